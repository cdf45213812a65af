"""All container formats by name, and what they say together of the names of files: which belong to a checkpoint.

Whoever needs to know something of a format asks here; nothing else lists them. Formats of installed packages are looked
for where no format that ships answers: a name that none of them has, a folder that none of them reads, a file whose
kind none of them knows.

Sidecars are the other files of a checkpoint's folder, which are copied with the weights or left alone. A model is more
than its tensors: its config, its tokenizer and its chat template go where it goes. A second set of weights (another
format, another precision) does not, and neither does a link out of the folder. Both lists are shown to the user:
nothing is left behind in silence.

What the program knows of a container format is one record. Reader and draft are named by module path and imported when
the format is used: looking at a folder of safetensors files imports nothing of DCP, of pickles or of DeepSpeed.

The order of the clues is that in which a folder that holds a checkpoint twice is read: what describes a whole folder
comes before single files, and Hugging Face's own names before others.
"""

from __future__ import annotations

import difflib
import gc
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from transaxle.errors import TransaxleError, gathered, refuse
from transaxle.formats.storage.storage import Storage
from transaxle.plugins import Plugin, aside, is_users, plugins

if TYPE_CHECKING:
    from transaxle.formats.catalog import Container, Draft


_LONGEST_TAG = 4096
"""Bytes that are read of a file that names a step."""
_SHOWN = 10
"""Names that an error lists."""
INDEX = ".index.json"
"""Suffix of a file that lists which shard holds which tensor."""
HERE = "."
"""Candidate for a path that is itself the folder of one step."""
LAST = 100
"""Place of a clue that is tried after those of all built-in formats."""


class Folder(msgspec.Struct, frozen=True):
    """The names that detection sees: no contents, except one small tag file."""

    storage: Storage
    inside: str
    """Sub-folder of the storage, with a trailing `/`; empty for the folder itself."""
    names: tuple[str, ...]
    """Files directly in the folder, or the one file that the path denotes."""
    folders: tuple[str, ...]
    """Sub-folders; none if the path denotes one file."""


Candidates = Callable[[Folder], tuple[str, ...]]
"""Returns the members of a folder that would each be a checkpoint."""


class Clue(msgspec.Struct, frozen=True):
    """One way to recognise a format."""

    candidates: Candidates | str
    """Finds the candidates; or its `module:function`, which is imported if `hint` matches."""
    place: int = LAST
    """Order of the clues, the smallest first. If clues of one place find two candidates, the user decides."""
    hint: str = ""
    """Regular expression; the clue is tried only if it matches the whole name of a file or sub-folder."""
    reader: str = ""
    """`module:function` that opens its candidates, if that is not the format's own reader."""
    all_shards: bool = False
    """A candidate stands for all shards in its folder, so that one that is named `…-00001-of-00002` may be opened."""

    def found(self, folder: Folder) -> tuple[str, ...]:
        """Return the candidates in a folder."""
        if self.hint and not any(re.fullmatch(self.hint, name) for name in (*folder.names, *folder.folders)):
            return ()
        find = imported(self.candidates) if isinstance(self.candidates, str) else self.candidates
        candidates: tuple[str, ...] = find(folder)
        return candidates


@dataclass(frozen=True, kw_only=True)
class Format:
    """A container format."""

    name: str
    """What `--format`, `--to` and plans call it."""
    title: str
    """A checkpoint of it in words, with its article."""
    clues: tuple[Clue, ...]
    """How it is recognised."""
    reader: str
    """`module:function(storage, path, member)`, which returns a `Container`; `member` is a clue's candidate."""
    draft: str = ""
    """`module:function(tensors, *, metadata, shard_size)`, which returns a `Draft`; empty: it cannot be written."""
    reader_takes: frozenset[str] = frozenset()
    """Keywords that the reader takes besides: `weights` (which precision), `cutter` (how ranks cut parameters),
    `optimizer` (whether its state is wanted)."""
    draft_takes: frozenset[str] = frozenset()
    """Keywords that the draft takes besides: `groups` (an optimizer's settings), `training` (other plain data by its
    paths), `run` and `read` (what a training run says of itself, and a reader of small tensors), `sealed` (leave room
    for digests in the one file), `nesting` (how the state dict in the one file is nested), `stem` (how names of files
    begin), `config` (the model's), `cuts` (where tensors of several layers or experts are cut into chunks), `degrees`
    and `parts` (the ranks that have files, and what each tensor-parallel one holds of a tensor)."""
    dialects: tuple[str, ...] = ()
    """Dialects in which it is written unless the user names one: the first that fits. Empty: the source's own names."""
    full_precision: bool = False
    """Whether its weights are the full-precision copies that the optimizer keeps, where it keeps some."""
    dtypes: frozenset[str] | None = None
    """Types of tensors that it can hold, as safetensors codes; None: its draft refuses what it cannot."""

    one_file: tuple[str, ...] = ()
    """Ends of the names of files each of which can be a checkpoint by itself; empty: it is always a folder."""
    heads: tuple[tuple[int, bytes], ...] = ()
    """Offset and bytes by which such a file is told from others of its name; one of them is enough."""
    parts: tuple[str, ...] = ()
    """Ends of the names of its other files that hold tensors or describe them."""
    openers: tuple[str, ...] = ()
    """Ends of the names of files that make those around them a checkpoint: they must appear last."""
    files: str = r"(?!)"
    """Regular expression for the paths of all its files inside the folder of a checkpoint."""
    sidecars: frozenset[str] = frozenset()
    """Names of the files that frameworks write beside them."""
    steps: str = ""
    """Regular expression for sub-folders, each of which is a checkpoint of one training step; empty: it has none."""
    newest: str = ""
    """File beside such sub-folders that names the newest."""
    inner: str = ""
    """Sub-folder of a step that holds some of its files."""
    package: str = ""
    """Distribution that it comes from; empty: it ships with Transaxle."""

    def open(self, clue: Clue | None, storage: Storage, path: str, member: str, **options: Any) -> Container:
        """Open a checkpoint of it.

        Args:
            clue: what found it; None where the user names the format.
            storage: where the files are.
            path: what the user typed.
            member: the candidate.
            **options: those of `reader_takes`.

        Raises:
            TransaxleError: what the reader raises.
        """
        reader = self._imported((clue.reader if clue is not None else "") or self.reader)
        with self.answerable("its reader", member):
            container: Container = reader(storage, path, member, **options)
        return container

    @contextmanager
    def answerable(self, what: str, file: str | None = None) -> Iterator[None]:
        """Let an error of an installed package name that package; of a format that ships it stays the bug that it is.

        Args:
            what: the part of it that runs.
            file: what it reads.
        """
        try:
            with aside() if self.package else nullcontext():
                yield
        except TransaxleError:
            raise
        except BaseException as error:
            if not self.package or is_users(error):
                raise
            message = f"format {self.name} of the package {self.package}: {what} failed: {error!r}"
            hint = f"This is a bug of {self.package}, which should say what is wrong: tell its authors."
            raise refuse("UNSUPPORTED", message, file=file, hint=hint) from error

    @cached_property
    def drafter(self) -> Callable[..., Draft]:
        """What lays out a checkpoint of it that does not exist yet."""
        drafter: Callable[..., Draft] = self._imported(self.draft)
        return drafter

    @cached_property
    def file_pattern(self) -> re.Pattern[str]:
        """`files`, compiled."""
        return re.compile(self.files)

    @cached_property
    def step_pattern(self) -> re.Pattern[str]:
        """`steps`, compiled; it matches nothing where there are none."""
        return re.compile(self.steps or r"(?!)")

    def _imported(self, where: str) -> Any:
        try:
            with aside() if self.package else nullcontext():
                return imported(where)
        except BaseException as error:
            if not self.package or is_users(error):
                raise  # one of our own modules: that is a bug, and no refusal
            message = f"format {self.name} of the package {self.package}: {where} cannot be imported: {error!r}"
            raise refuse("UNSUPPORTED", message, hint=f"Repair the package, or remove {self.package}.") from error


def imported(where: str) -> Any:
    """Return what `module:name` names.

    Raises:
        Exception: whatever importing the module raises; AttributeError where it has no such name.
    """
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def ending(*ends: str, unless: str = r"(?!)") -> Candidates:
    """Return what finds the files whose names end so.

    Args:
        ends: ends of names.
        unless: regular expression for names that are no candidates, unless the path denotes that one file.
    """
    left_out = re.compile(unless)

    def candidates(folder: Folder) -> tuple[str, ...]:
        wanted = folder.storage.single
        found = (name for name in folder.names if name.endswith(ends))
        return tuple(name for name in found if name == wanted or not left_out.fullmatch(name))

    return candidates


def named(name: str) -> Candidates:
    """Return what finds the file of this name."""
    return lambda folder: (name,) if name in folder.names else ()


def first_of(pattern: str) -> Candidates:
    """Return what finds the first of the files whose names match all of a regular expression, by numbers in them."""
    compiled = re.compile(pattern)

    def candidates(folder: Folder) -> tuple[str, ...]:
        found = [name for name in folder.names if compiled.fullmatch(name)]
        return (min(found, key=lambda name: (*map(int, re.findall(r"\d+", name)), name)),) if found else ()

    return candidates


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the search for garbage that holds itself: of the millions of objects that are made here, none is.

    Whatever else is dropped goes at once, as always.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def newest_step(folder: Folder, file: str) -> str | None:
    """Return the sub-folder that a file names; None where the file, or the sub-folder, is not there."""
    if file not in folder.names or not folder.folders:
        return None
    tag = _tag_in(folder, file)
    return tag if tag in folder.folders else None


def check_newest(folder: Folder, file: str) -> None:
    """Refuse a file that names no sub-folder of the checkpoint: another step is not what was asked for.

    Raises:
        Refused: PATH_ESCAPE where it leads out; CORRUPT where it is empty; INCOMPLETE where the folder is not there.
    """
    if not file or file not in folder.names or newest_step(folder, file) is not None:
        return
    from transaxle.formats.storage.storage import is_plain

    tag = _tag_in(folder, file)
    if not is_plain(tag):
        message = f"the file names the step {tag!r}, which is not a folder of the checkpoint"
        hint = "Give the folder of a step itself."
        raise refuse("PATH_ESCAPE" if tag else "CORRUPT", message, file=f"{folder.inside}{file}", hint=hint)
    if folder.folders:
        message = f"the file names the step {tag!r}, whose folder is missing; present: {listed(folder.folders)}"
        hint = "Copy that folder, or give the folder of a step itself."
        raise refuse("INCOMPLETE", message, file=f"{folder.inside}{file}", hint=hint)


def listed(names: Sequence[str]) -> str:
    """Return names as errors show them: the first ten."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _tag_in(folder: Folder, file: str) -> str:
    whole = f"{folder.inside}{file}"
    size = min(folder.storage.size(whole), _LONGEST_TAG)
    return folder.storage.read(whole, 0, size).decode("utf-8", "replace").strip()


_HUB = "(?:diffusion_pytorch_model|pytorch_model|model|consolidated)"
"""How the files of a model begin that Hugging Face's libraries, and Meta's, write."""


def _shards_and_index(*ends: str) -> str:
    """Return a pattern for the files of a model on a hub: whole, in shards, and their index; no adapters."""
    end = f"(?:{'|'.join(map(re.escape, ends))})"
    return (
        rf"{_HUB}(?:[.\-_]?\d[^/]*|[.\-][^/]*)?{end}"
        rf"|(?!adapter)[^/]+-\d+-of-\d+{end}"
        rf"|[^/]+{end}{re.escape(INDEX)}"
    )


SAFETENSORS = Format(
    name="safetensors",
    title="a safetensors checkpoint",
    clues=(
        Clue(ending(f".safetensors{INDEX}"), 40),
        Clue(named("model.safetensors"), 50),
        Clue(ending(".safetensors"), 80),
    ),
    reader="transaxle.formats.safetensors:open_safetensors",
    draft="transaxle.formats.safetensors:draft",
    draft_takes=frozenset({"groups", "run", "sealed", "stem"}),
    one_file=(".safetensors",),
    heads=((8, b"{"),),
    openers=(INDEX,),
    files=_shards_and_index(".safetensors"),
)

_TORCH_FILES = (".bin", ".pt", ".pth")
_NO_WEIGHTS = r"(training_args|(optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state)(_\d+)?)\.(bin|pt|pth)"
"""What transformers' Trainer and accelerate keep beside the weights."""
TORCH = Format(
    name="torch",
    title="a torch checkpoint",
    clues=(
        Clue(ending(*(f"{end}{INDEX}" for end in _TORCH_FILES), unless=_NO_WEIGHTS), 60),
        Clue(ending(*_TORCH_FILES, unless=_NO_WEIGHTS), 80),
        Clue(ending(".ckpt"), 90),  # as Lightning names them; ours never end so
    ),
    reader="transaxle.formats.torch_file.reader:open_torch",
    draft="transaxle.formats.torch_file.draft:draft",
    draft_takes=frozenset({"groups", "nesting", "sealed", "stem"}),
    one_file=_TORCH_FILES,
    heads=((0, b"PK\x03\x04"), (0, b"\x80")),
    openers=(INDEX,),
    files=_shards_and_index(*_TORCH_FILES),
)

DCP_METADATA = ".metadata"
DCP_DATA = ".distcp"
DCP_RANK = rf"__(\d+){re.escape(DCP_METADATA)}"
"""Pattern for the metadata that each rank writes of a save without coordination."""
DCP_SHARD = r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors"
"""Pattern for what torch's `HuggingFaceStorageWriter` writes before it consolidates."""
DCP = Format(
    name="dcp",
    title="a torch.distributed.checkpoint (DCP) folder",
    clues=(
        Clue(named(DCP_METADATA), 10),
        Clue(first_of(DCP_RANK), 11),
        Clue(
            first_of(DCP_SHARD),
            70,
            reader="transaxle.formats.dcp.reader:open_shards",
            all_shards=True,
        ),
    ),
    reader="transaxle.formats.dcp.reader:open_dcp",
    draft="transaxle.formats.dcp.draft:draft",
    draft_takes=frozenset({"groups", "training"}),
    parts=(DCP_DATA, DCP_METADATA),
    openers=(DCP_METADATA,),
    files=rf"\.metadata|__\d+_\d+{re.escape(DCP_DATA)}",
    sidecars=frozenset({"common.pt", "metadata.json"}),  # of Megatron's distributed checkpoints
)

MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
"""File beside the folders of Megatron's iterations that names the newest."""
_ITERATIONS = r"iter_\d{7,}|release"
TORCH_DIST = Format(
    name="torch_dist",
    title="a distributed checkpoint of Megatron",
    clues=(
        Clue(
            "transaxle.formats.megatron.iterations:distributed",
            5,
            hint="|".join((r"metadata\.json", r"common\.pt", re.escape(MEGATRON_TRACKER), "weights")),
        ),
    ),
    reader="transaxle.formats.megatron.torch_dist.reader:open_torch_dist",
    reader_takes=frozenset({"weights"}),
    draft="transaxle.formats.megatron.torch_dist.draft:draft",
    draft_takes=frozenset({"config", "cuts", "degrees", "run", "read"}),
    dialects=("megatron_dist", "megatron_layers"),
    openers=(MEGATRON_TRACKER,),
    files=rf"\.metadata|__\d+_\d+{re.escape(DCP_DATA)}|common\.pt",
    sidecars=frozenset({MEGATRON_TRACKER, "metadata.json"}),
    steps=_ITERATIONS,
)

MEGATRON_RANK = r"mp_rank_\d{2,6}(?:_\d{3,6}){0,2}"
"""Pattern for the folder in which one rank of Megatron writes."""
MEGATRON_MODEL, MEGATRON_FLAT = "model_optim_rng.pt", "distrib_optim.pt"
"""Files in it: the rank's part of the model, and of the distributed optimizer's flat buffers."""
MEGATRON_TORCH = Format(
    name="megatron_torch",
    title="a Megatron checkpoint of one folder for each rank",
    clues=(
        Clue(
            "transaxle.formats.megatron.iterations:legacy",
            6,
            hint=rf"{MEGATRON_RANK}|{re.escape(MEGATRON_TRACKER)}|{re.escape(MEGATRON_MODEL)}",
        ),
    ),
    reader="transaxle.formats.megatron.legacy.reader:open_legacy",
    reader_takes=frozenset({"weights", "cutter", "optimizer"}),
    draft="transaxle.formats.megatron.legacy.draft:draft",
    draft_takes=frozenset({"degrees", "parts", "config", "run", "read"}),
    dialects=("megatron",),
    openers=(MEGATRON_TRACKER,),
    files=rf"{MEGATRON_RANK}/(?:{re.escape(MEGATRON_MODEL)}|{re.escape(MEGATRON_FLAT)})",
    sidecars=frozenset({MEGATRON_TRACKER}),
    steps=_ITERATIONS,
)

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
DEEPSPEED_ZERO = "zero"
MODEL_END = "_model_states.pt"
RANK_FILES = (
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})(_model_states|_?optim_states)\.pt",
    r"mp_rank_(\d{1,6})_model_states\.pt",
    r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt",
    r"(?:layer_(\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt",
    r"expp_rank_\d{1,6}_mp_rank_\d{1,6}_optim_states\.pt",
)
"""Patterns for what ranks write: their optimizer or, of ZeRO-3, model; a model; a layer; an expert; an optimizer of
experts without ZeRO."""
_RANK_FILE = "|".join(f"(?:{pattern})" for pattern in RANK_FILES)
_STEPS = r"global_step\d+(_universal)?"
DEEPSPEED = Format(
    name="deepspeed",
    title="a DeepSpeed checkpoint",
    clues=(
        Clue(
            "transaxle.formats.deepspeed.files:of_run",
            20,
            hint=rf"{LATEST}|global_step\d+|.*_states\.pt",
        ),
    ),
    reader="transaxle.formats.deepspeed.reader:open_deepspeed",
    reader_takes=frozenset({"weights", "cutter"}),
    openers=(LATEST, MODEL_END),
    files=_RANK_FILE,
    sidecars=frozenset({LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py"}),
    steps=_STEPS,
    newest=LATEST,
)
UNIVERSAL = Format(
    name="deepspeed-universal",
    title="a DeepSpeed universal checkpoint",
    clues=(
        Clue(
            "transaxle.formats.deepspeed.files:universal",
            30,
            hint=rf"{LATEST_UNIVERSAL}|{DEEPSPEED_ZERO}|global_step.*",
        ),
    ),
    reader="transaxle.formats.deepspeed.universal_reader:open_universal",
    reader_takes=frozenset({"weights"}),
    draft="transaxle.formats.deepspeed.universal_draft:draft",
    draft_takes=frozenset({"run", "read"}),
    full_precision=True,
    openers=(LATEST_UNIVERSAL,),
    files=rf"{_RANK_FILE}|{DEEPSPEED_ZERO}/(?:[^/]+/)?[^/]+\.pt",
    steps=_STEPS,
    newest=LATEST_UNIVERSAL,
    inner=DEEPSPEED_ZERO,
)

FORMATS = (SAFETENSORS, TORCH, DCP, TORCH_DIST, MEGATRON_TORCH, UNIVERSAL, DEEPSPEED)
"""In the order in which lists show them."""

CALLED = {
    "huggingface": "hf", "hub": "hf", "sglang": "hf", "pt": "torch", "pth": "torch", "bin": "torch",
    "mcore": "torch_dist", "megatron-lm": "torch_dist", "fsdp": "dcp", "fsdp2": "dcp", "zero": "deepspeed-universal",
}  # fmt: skip
"""What people call a target -> the dialect or format that they mean."""


GROUP = "transaxle.formats"
"""Entry points of packages that add a format: the format's name, and where its `Format` is."""
_ORDINARY = frozenset({
    "", "csv", "gitattributes", "gitignore", "html", "ini", "jinja", "jpg", "json", "jsonl", "log", "md", "model",
    "png", "py", "rst", "sh", "tiktoken", "toml", "tsv", "txt", "xml", "yaml", "yml",
})  # fmt: skip
"""Endings of names that no installed format can claim, so that such a file is no reason to look for one."""
_FOREIGN = (
    ".ckpt", ".gguf", ".ggml", ".h5", ".keras", ".msgpack", ".npy", ".npz", ".onnx", ".onnx_data", ".ot", ".pkl",
    ".pickle", ".tflite",
)  # fmt: skip
"""Ends of the names of files with tensors that no format here writes, and none reads, but for `.ckpt`: they do not
travel with a model."""


@cache
def builtin() -> Mapping[str, Format]:
    """Return the formats that ship with Transaxle, by name."""
    return {kind.name: kind for kind in FORMATS}


def find(name: str) -> Format | None:
    """Return a format by name; None where there is none.

    Raises:
        Refused: where an installed package has a format of this name that cannot be used.
    """
    if name in builtin():
        return builtin()[name]
    return next((_installed(plugin) for plugin in plugins(GROUP) if plugin.name == name), None)


@cache
def installed() -> tuple[Format, ...]:
    """Return the formats of installed packages.

    Raises:
        Refused: UNSUPPORTED where one cannot be used, NAME_COLLISION where it claims what another one has.
    """
    kinds = tuple(map(_installed, plugins(GROUP)))
    claimed = {end: "Transaxle" for kind in builtin().values() for end in (*kind.one_file, *kind.parts)}
    for kind, plugin in zip(kinds, plugins(GROUP), strict=True):
        for end in (*kind.one_file, *kind.parts):
            if claimed.setdefault(end, plugin.package) != plugin.package:
                raise plugin.refusal("NAME_COLLISION", f"it claims files that end in {end}, as {claimed[end]} does")
    return kinds


@cache
def _installed(plugin: Plugin) -> Format:
    """Return the format of an installed package, and check what it claims."""
    kind = plugin.load()
    if not isinstance(kind, Format):
        raise plugin.refusal("UNSUPPORTED", f"it is {kind!r}, and no transaxle.formats.registry.Format")
    if kind.name != plugin.name:
        raise plugin.refusal("UNSUPPORTED", f"the format is called {kind.name!r}; both names must be the same")
    if kind.name in builtin():
        raise plugin.refusal("NAME_COLLISION", "Transaxle has a format of this name itself")
    ordinary = [end for end in (*kind.one_file, *kind.parts) if _suffix(end) in _ORDINARY]
    if ordinary:
        raise plugin.refusal("NAME_COLLISION", f"it claims files that end in {ordinary[0]}, which may be anything")
    return replace(kind, package=plugin.package)


def get(name: str) -> Format:
    """Return a format that is known to be there."""
    kind = find(name)
    if kind is None:
        raise ValueError(f"there is no format {name!r}")
    return kind


def unknown(name: str, known: Sequence[str], hint: str = "") -> TransaxleError:
    """Return the error for a format that does not exist, with the nearest one that does.

    Args:
        name: what the user typed.
        known: names of the formats that it could have been.
        hint: what to do, where that is known better than by the nearest name.
    """
    close = difflib.get_close_matches(name.lower(), known, 1)
    message = f"there is no format {name!r}; there are: {', '.join(known)}"
    return refuse("AMBIGUOUS", message, hint=hint or (f"Did you mean {close[0]}?" if close else ""))


def every_format() -> tuple[Format, ...]:
    """Return all formats, in the order in which a folder is looked at for them."""
    shipped = sorted(builtin().values(), key=lambda kind: min(clue.place for clue in kind.clues))
    return (*shipped, *installed())


def writable() -> tuple[str, ...]:
    """Return the names of the formats that can be written."""
    return tuple(kind.name for kind in (*builtin().values(), *installed()) if kind.draft)


def is_one_file(name: str) -> bool:
    """Tell whether a file of this name can be a checkpoint by itself; also of a path."""
    return _any(name, lambda kind: name.endswith(kind.one_file))


def one_file_ends() -> tuple[str, ...]:
    """Return the ends of the names of such files, as far as formats ship with Transaxle."""
    return tuple(end for kind in builtin().values() for end in kind.one_file)


def foreign_ends() -> tuple[str, ...]:
    """Return the ends of the names of other files with tensors: parts of folders, and formats that are not read."""
    return (*(end for kind in builtin().values() for end in kind.parts), *_FOREIGN)


def unread_end(name: str) -> str:
    """Return the end of the name of a file with tensors that no format here reads; empty for other names."""
    return next((end for end in _FOREIGN if name.lower().endswith(end)), "")


def holds_tensors(name: str) -> bool:
    """Tell whether a file of this name holds tensors, in whatever format."""
    lower = name.lower()
    return lower.endswith(_FOREIGN) or _any(name, lambda kind: lower.endswith((*kind.one_file, *kind.parts)))


def opens_checkpoint(name: str) -> bool:
    """Tell whether a file of this name makes the files around it a checkpoint."""
    return _any(name, lambda kind: name.endswith(kind.openers))


def is_of_checkpoint(name: str) -> bool:
    """Tell whether a file of this name is found in folders that hold a checkpoint, and in no others."""
    return _any(name, lambda kind: name.endswith((*kind.one_file, *kind.parts, *kind.openers)))


def is_step(folder: str) -> bool:
    """Tell whether a folder of this name holds a checkpoint of one training step."""
    return any(kind.step_pattern.fullmatch(folder) for kind in builtin().values())


def begins_right(name: str, head: bytes) -> bool:
    """Tell whether a file begins as those do whose name ends so; an empty one has nothing to lose.

    Args:
        name: ends like a file that can be a checkpoint.
        head: its first bytes.
    """
    return not head or _any(name, lambda kind: name.endswith(kind.one_file) and _begins(kind, head))


def _begins(kind: Format, head: bytes) -> bool:
    return not kind.heads or any(head.startswith(part, at) for at, part in kind.heads)


def _any(name: str, test: Callable[[Format], bool]) -> bool:
    """Tell whether a format says something of a file; those that are installed are asked of unknown kinds of files."""
    return any(map(test, builtin().values())) or (_suffix(name) not in _ORDINARY and any(map(test, installed())))


def _suffix(name: str) -> str:
    """Return the last ending of a name, without the dot; empty where there is none."""
    return name.rpartition("/")[2].rpartition(".")[2].lower() if "." in name.rpartition("/")[2] else ""


MANIFEST = "transaxle.json"
"""Our own description of a checkpoint that we wrote; the engine handles it, so it is neither carried nor ignored."""
SCRATCH = ".transaxle"
"""Folder for files outside the checkpoint while it is written; its presence means that the work is not finished."""
STATE_FOLDER = "optimizer"
"""Folder for the optimizer's state: a framework that loads a model reads the files beside its config."""
_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
"""peft's description of an adapter."""
_MODEL_FILES = (
    _CONFIG, "generation_config.json", "tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab.",
    "merges.txt", "chat_template", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Prefixes of a model's own small files. A single tensor file may be anywhere, and a run's folder holds its logs as
well, so only these count as their sidecars."""


_DOCUMENTS = (".md", "license", "license.txt", "notice", "notice.txt")
"""Ends of the names of files that only people read."""


def is_for_people(name: str) -> bool:
    """Tell whether no program reads a file."""
    return name.lower().endswith(_DOCUMENTS)


def is_of_model(name: str) -> bool:
    """Tell whether a small file is a model's own: its config, its tokenizer."""
    return name.startswith(_MODEL_FILES)


def tells_of_use(name: str) -> bool:
    """Tell whether a file only says how to use a model: a tokenizer, a template, a text. No tensor depends on it."""
    return name != _CONFIG and (is_for_people(name) or is_of_model(name))


class SidecarFiles(msgspec.Struct, frozen=True):
    """The files of a folder that hold none of its checkpoint's tensors."""

    carried: tuple[str, ...]
    """Files that are copied with the model."""
    ignored: tuple[str, ...]
    """Left alone: other tensor files, hidden files, sub-folders (with a `/`), links and special files."""


def sort_sidecars(storage: Storage, files: Collection[str], *, of_run: bool = False) -> SidecarFiles:
    """Sort the files around a checkpoint.

    Args:
        storage: where they are.
        files: those that it consists of.
        of_run: the folder is a run's, with files that are no part of the model.

    Raises:
        Refused: PATH_ESCAPE or UNSUPPORTED if the folder's config.json exists but must not be read.
        StorageError: IO.
    """
    listing = storage.listing()
    if _CONFIG in listing.special:
        raise gathered([listing.special[_CONFIG]])
    others = [name for name in listing.names if name not in files and name != MANIFEST]
    if storage.single:
        return SidecarFiles(tuple(filter(is_of_model, others)), ())
    own = tuple(name for name in others if not _left_alone(name))
    carried = tuple(filter(is_of_model, own)) if of_run else own
    used = {file.partition("/")[0] for file in files if "/" in file}
    folders = tuple(f"{name}/" for name in listing.folders if name not in used)
    ignored = [*(name for name in others if name not in carried), *listing.special, *folders]
    if STATE_FOLDER in used:
        inside = (f"{STATE_FOLDER}/{name}" for name in storage.listing(STATE_FOLDER).everything())
        ignored += [name for name in inside if name not in files]
    return SidecarFiles(carried, tuple(sorted(ignored)))


def _left_alone(name: str) -> bool:
    return name.startswith(".") or name.lower().endswith(INDEX) or holds_tensors(name)
