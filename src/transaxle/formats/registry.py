"""The table of all checkpoint formats, and functions on file names that concern all formats.

Formats of installed packages (plugins) are loaded only if no built-in format matches: for an unknown format name, a
folder that no built-in format recognises, or a file with an unknown ending.

Sidecars are the files of a checkpoint's folder that contain none of its tensors. Sidecars with a model's config,
tokenizer and chat template are copied with the model's weights. A second set of weights (in a different format or
precision) is not copied, and neither is a symbolic link that leads out of the folder. The copied and the ignored files
are both listed for the user.

Each format is described by one `Format` record. A format's reader and its function `draft` are named by module path,
and imported when the format is used: opening a folder of safetensors files imports no code for DCP, pickles or
DeepSpeed.

The order of the clues (recognisable names) decides which checkpoint is read in a folder that contains two: clues for a
whole folder come before clues for single files, and Hugging Face's names before the names of other programs.
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
"""Maximum number of bytes read of a tag file, which names the newest step."""
_SHOWN = 10
"""Maximum number of names that an error message lists."""
INDEX = ".index.json"
"""Suffix of the name of an index, the file that maps tensors to shard files."""
HERE = "."
"""Candidate that represents the folder itself, if the folder is the checkpoint of one training step."""
LAST = 100
"""The `place` of a clue (recognisable name) that is tried after the clues of all built-in formats."""


class Folder(msgspec.Struct, frozen=True):
    """The names of files and folders at a path; the format of the checkpoint there is detected from these names."""

    storage: Storage
    inside: str
    """Path of the sub-folder in the storage, with a trailing `/`; empty for the top folder."""
    names: tuple[str, ...]
    """Names of the files directly in the folder, or of the single file that the user named."""
    folders: tuple[str, ...]
    """Names of the sub-folders; empty if the user named a single file."""


Candidates = Callable[[Folder], tuple[str, ...]]
"""A function `candidates(folder)`, which returns those files and sub-folders that may each be a checkpoint."""


class Clue(msgspec.Struct, frozen=True):
    """One way to recognise a format by the names of files and folders."""

    candidates: Candidates | str
    """Function that returns the candidates for a checkpoint, or the function's name `module:function`, which is
    imported only if `hint` matches."""
    place: int = LAST
    """Sort key of the clue: clues with a smaller place are tried first. Two candidates whose clues have equal places
    are refused as ambiguous."""
    hint: str = ""
    """Regular expression; the clue is tried only if `hint` matches the whole name of some file or sub-folder."""
    reader: str = ""
    """`module:function` that opens the clue's candidates; empty if the format's own reader opens them."""
    all_shards: bool = False
    """Whether a candidate file represents all shard files in its folder; then its name may be `…-00001-of-00002`."""

    def find_candidates(self, folder: Folder) -> tuple[str, ...]:
        """Return the names in a folder that, by this clue, may be a checkpoint."""
        if self.hint and not any(re.fullmatch(self.hint, name) for name in (*folder.names, *folder.folders)):
            return ()
        find = import_object(self.candidates) if isinstance(self.candidates, str) else self.candidates
        candidates: tuple[str, ...] = find(folder)
        return candidates


@dataclass(frozen=True, kw_only=True)
class Format:
    """The record of one checkpoint format: how it is recognised, read and written."""

    name: str
    """Name of the format, as in the options `--format` and `--to`, and in plans."""
    title: str
    """Description of a checkpoint in this format, with an article, for messages."""
    clues: tuple[Clue, ...]
    """Clues (recognisable names) by which the format is recognised."""
    reader: str
    """`module:function(storage, path, member)`, which returns a `Container`; `member` is the name of the file or folder
    to open."""
    draft: str = ""
    """`module:function(tensors, *, metadata, shard_size)`, which returns a `Draft`; empty if the format cannot be
    written."""
    reader_takes: frozenset[str] = frozenset()
    """Optional keyword arguments that the reader accepts: `weights` (which precision), `cutter` (how ranks cut
    parameters), `optimizer` (whether to read the optimizer's state)."""
    draft_takes: frozenset[str] = frozenset()
    """Optional keyword arguments that the function `draft` accepts: `groups` (an optimizer's settings), `training`
    (other plain data by key path), `run` and `read` (facts about a training run, and a function that reads small
    tensors), `sealed` (whether to leave space for digests in a single file), `nesting` (how the state dict in a single
    file is nested), `stem` (beginning of file names), `config` (the model's config), `cuts` (where tensors of several
    layers or experts are cut into chunks), `degrees` and `parts` (the parallel degrees, and each tensor-parallel rank's
    shard of a tensor), `names` and `ones` (an engine's names of tensors, and of scales that are 1), `fsdp`, `whole`,
    `in_order` and `training_paths` (the FSDP ranks, which tensors each of them has whole, whether groups are in the
    optimizer's order, and the key paths of tensors of the training state)."""
    dialects: tuple[str, ...] = ()
    """Names of the dialects (tensor names of one framework) that are tried for writing; the first dialect that the
    model's family has is used. Empty means that tensors keep the names that they have in the source."""
    loaded_as: frozenset[str] = frozenset()
    """Names of the dialects in which programs load this format; empty means those in `dialects`, or else any."""
    full_precision: bool = False
    """Whether a checkpoint's weights are the optimizer's full-precision copies, if it has such copies."""
    dtypes: frozenset[str] | None = None
    """Dtypes that the format can store, as safetensors codes; None means that the function `draft` itself refuses
    unsupported dtypes."""

    one_file: tuple[str, ...] = ()
    """Endings of file names that can be a whole checkpoint; empty if a checkpoint is always a folder."""
    heads: tuple[tuple[int, bytes], ...] = ()
    """Signatures `(offset, bytes)` of a single-file checkpoint, one of which must match. Empty means that signatures
    are not checked."""
    parts: tuple[str, ...] = ()
    """Endings of the names of all further files of the format that contain tensors or describe them."""
    openers: tuple[str, ...] = ()
    """Endings of the names of files that complete a checkpoint, such as an index; these files must be written last."""
    files: str = r"(?!)"
    """Regular expression for the paths of all files of the format inside a checkpoint's folder."""
    sidecars: frozenset[str] = frozenset()
    """Names of small additional files that frameworks write with this format."""
    steps: str = ""
    """Regular expression for the names of step folders, each of which is a checkpoint; by default it matches
    nothing."""
    newest: str = ""
    """Name of the file next to the step folders that names the newest step; empty if there is no such file."""
    inner: str = ""
    """Name of the sub-folder of a step folder that contains some of the step's files; empty if there is none."""
    model_folder: str = ""
    """Name of the sub-folder into which the model's config and tokenizer are written; empty if they are beside the
    tensors."""
    package: str = ""
    """Name of the Python distribution that provides the format; empty if the format is built in."""

    def open(self, clue: Clue | None, storage: Storage, path: str, member: str, **options: Any) -> Container:
        """Open a checkpoint of this format, and return its catalog.

        Args:
            clue: the clue that matched; None if the user named the format.
            storage: storage that reads the checkpoint's files.
            path: the path as the user typed it.
            member: name of the file or sub-folder to open.
            **options: keyword arguments for the reader; `reader_takes` lists their names.

        Raises:
            TransaxleError: if the reader raises a TransaxleError.
        """
        reader = self._import((clue.reader if clue is not None else "") or self.reader)
        with self.answerable("its reader", member):
            container: Container = reader(storage, path, member, **options)
        return container

    @contextmanager
    def answerable(self, what: str, file: str | None = None) -> Iterator[None]:
        """Turn an unexpected exception of a plugin's format into a refusal that names the plugin's package.

        Args:
            what: what the plugin was doing (such as its reader), for the message.
            file: name of the file that is read.
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
        """Return the function that the field `draft` names; it is imported on first use."""
        drafter: Callable[..., Draft] = self._import(self.draft)
        return drafter

    @cached_property
    def file_pattern(self) -> re.Pattern[str]:
        """The regular expression in the field `files`, compiled."""
        return re.compile(self.files)

    @cached_property
    def step_pattern(self) -> re.Pattern[str]:
        """The regular expression in the field `steps`, compiled; for a format without step folders it never matches."""
        return re.compile(self.steps or r"(?!)")

    def _import(self, where: str) -> Any:
        try:
            with aside() if self.package else nullcontext():
                return import_object(where)
        except BaseException as error:
            if not self.package or is_users(error):
                raise  # in a module of Transaxle itself, the exception is a bug and not a refusal
            message = f"format {self.name} of the package {self.package}: {where} cannot be imported: {error!r}"
            raise refuse("UNSUPPORTED", message, hint=f"Repair the package, or remove {self.package}.") from error


def import_object(where: str) -> Any:
    """Import and return the object at `module:name`.

    Raises:
        Exception: any exception that importing the module raises; AttributeError if the module has no object of this
            name.
    """
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def ending(*ends: str, unless: str = r"(?!)") -> Candidates:
    """Return a `Candidates` function for files whose names have one of the given endings.

    Args:
        ends: endings of file names.
        unless: regular expression for names to skip, unless the user named the file.
    """
    skipped = re.compile(unless)

    def candidates(folder: Folder) -> tuple[str, ...]:
        single_file = folder.storage.single
        names = (name for name in folder.names if name.endswith(ends))
        return tuple(name for name in names if name == single_file or not skipped.fullmatch(name))

    return candidates


def named(name: str) -> Candidates:
    """Return a `Candidates` function for the file with a given name."""
    return lambda folder: (name,) if name in folder.names else ()


def first_of(pattern: str) -> Candidates:
    """Return a `Candidates` function for the first of the files whose whole names match a pattern, in the order of the
    numbers in their names.
    """
    compiled = re.compile(pattern)

    def candidates(folder: Folder) -> tuple[str, ...]:
        names = [name for name in folder.names if compiled.fullmatch(name)]
        return (min(names, key=lambda name: (*map(int, re.findall(r"\d+", name)), name)),) if names else ()

    return candidates


@contextmanager
def without_gc() -> Iterator[None]:
    """Pause Python's cyclic garbage collector; with millions of new objects it is slow, and would find no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def newest_step(folder: Folder, file: str) -> str | None:
    """Return the name of the sub-folder that a tag file names; None if the file or the sub-folder is missing."""
    if file not in folder.names or not folder.folders:
        return None
    tag = _tag_in(folder, file)
    return tag if tag in folder.folders else None


def check_newest(folder: Folder, file: str) -> None:
    """Refuse a tag file that names a missing sub-folder, because reading a different step would be wrong.

    Raises:
        Refused: with the code PATH_ESCAPE for a path out of the folder; with the code CORRUPT for an empty tag; with
            the code INCOMPLETE for a missing sub-folder.
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
        message = f"the file names the step {tag!r}, whose folder is missing; present: {join_names(folder.folders)}"
        hint = "Copy the missing folder, or give the folder of a step itself."
        raise refuse("INCOMPLETE", message, file=f"{folder.inside}{file}", hint=hint)


def join_names(names: Sequence[str]) -> str:
    """Join names for an error message; only the first ten names are shown."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _tag_in(folder: Folder, file: str) -> str:
    whole = f"{folder.inside}{file}"
    size = min(folder.storage.size(whole), _LONGEST_TAG)
    return folder.storage.read(whole, 0, size).decode("utf-8", "replace").strip()


_HUB = "(?:diffusion_pytorch_model|pytorch_model|model|consolidated)"
"""Pattern for the beginning of the names of model files of Hugging Face's libraries and of Meta."""


def _shards_and_index(*ends: str) -> str:
    """Return a pattern for the names of model files on a hub (a single file, shard files, or their index); it does not
    match adapters.
    """
    end = f"(?:{'|'.join(map(re.escape, ends))})"
    return (
        rf"{_HUB}(?:[.\-_]?\d[^/]*|[.\-][^/]*)?{end}"
        rf"|(?!adapter)[^/]+-\d+-of-\d+{end}"
        rf"|[^/]+{end}{re.escape(INDEX)}"
    )


_OF_TRANSFORMERS = frozenset({"hf", "transformers", "stacked", "separate"})
"""Dialects of transformers' models, which DeepSpeed and verl train."""
_STATE_DICTS = _OF_TRANSFORMERS | {"torchtitan", "automodel", "megatron", "te"}
"""Dialects of trainers' models in memory, whose state dicts have these names."""
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
    loaded_as=_STATE_DICTS | {"torchtitan_hf"},
    one_file=(".safetensors",),
    heads=((8, b"{"),),
    openers=(INDEX,),
    files=_shards_and_index(".safetensors"),
)

_TORCH_FILES = (".bin", ".pt", ".pth")
_NO_WEIGHTS = r"(training_args|(optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state)(_\d+)?)\.(bin|pt|pth)"
"""Pattern for the names of files with training state (of transformers' Trainer and accelerate) that contain no
weights."""
TORCH = Format(
    name="torch",
    title="a torch checkpoint",
    clues=(
        Clue(ending(*(f"{end}{INDEX}" for end in _TORCH_FILES), unless=_NO_WEIGHTS), 60),
        Clue(ending(*_TORCH_FILES, unless=_NO_WEIGHTS), 80),
        Clue(ending(".ckpt"), 90),  # `.ckpt` is the ending of Lightning's files; Transaxle writes no such files
    ),
    reader="transaxle.formats.torch_file.reader:open_torch",
    draft="transaxle.formats.torch_file.draft:draft",
    draft_takes=frozenset({"groups", "nesting", "sealed", "stem"}),
    loaded_as=_STATE_DICTS,
    one_file=_TORCH_FILES,
    heads=((0, b"PK\x03\x04"), (0, b"\x80")),
    openers=(INDEX,),
    files=_shards_and_index(*_TORCH_FILES),
)

RANK_NAMES = r"(?:model|optim|extra_state)_world_size_\d+_rank_\d+\.pt"
"""Pattern for the names that verl and related programs give to the files of ranks."""
FSDP_CONFIG = "fsdp_config.json"
"""File in which verl stores the version of FSDP and the number of ranks."""
RANKS = Format(
    name="ranks",
    title="a folder with one torch file for each rank",
    clues=(Clue(first_of(r"model_world_size_\d+_rank_\d+\.pt"), 50, hint=RANK_NAMES),),
    reader="transaxle.formats.ranks.reader:open_ranks",
    reader_takes=frozenset({"ranks"}),
    draft="transaxle.formats.ranks.draft:draft",
    draft_takes=frozenset({"groups", "in_order", "fsdp", "whole", "training", "training_paths"}),
    loaded_as=_OF_TRANSFORMERS,
    model_folder="huggingface",
    files=RANK_NAMES,
    sidecars=frozenset({FSDP_CONFIG}),
)

DCP_METADATA = ".metadata"
DCP_DATA = ".distcp"
DCP_RANK = rf"__(\d+){re.escape(DCP_METADATA)}"
"""Pattern for the name of one rank's metadata file, from a save without coordination between ranks."""
DCP_SHARD = r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors"
"""Pattern for the names of the files of torch's `HuggingFaceStorageWriter` before consolidation."""
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
    loaded_as=_STATE_DICTS,
    parts=(DCP_DATA, DCP_METADATA),
    openers=(DCP_METADATA,),
    files=rf"\.metadata|__\d+_\d+{re.escape(DCP_DATA)}",
    sidecars=frozenset({"common.pt", "metadata.json"}),  # these are small files in Megatron's distributed checkpoints
)

MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
"""Name of the file next to Megatron's iteration folders that names the newest iteration."""
GLOBAL_STEP = re.compile(r"global_step_\d+")
"""Pattern for the name of a step folder of verl or SkyRL."""
TRACKERS = (MEGATRON_TRACKER, "latest_ckpt_global_step.txt")
"""Names of the files next to the step folders of verl and SkyRL that name the newest step."""
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
"""Pattern for the name of a Megatron rank's folder."""
MEGATRON_MODEL, MEGATRON_FLAT = "model_optim_rng.pt", "distrib_optim.pt"
"""Names of the files in a Megatron rank's folder: one with the rank's share of the model, one with its share of the
distributed optimizer's flat buffers."""
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
"""Patterns for the names of DeepSpeed's rank files, in this order: optimizer file (or model file of ZeRO-3), model
file, layer file, expert file, and optimizer file of experts without ZeRO."""
_RANK_FILE = "|".join(f"(?:{pattern})" for pattern in RANK_FILES)
_STEPS = r"global_step\d+(_universal)?"
DEEPSPEED = Format(
    name="deepspeed",
    title="a DeepSpeed checkpoint",
    clues=(Clue("transaxle.formats.deepspeed.files:of_run", 20, hint=rf"{LATEST}|global_step\d+|.*_states\.pt"),),
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
    loaded_as=_OF_TRANSFORMERS,
    full_precision=True,
    openers=(LATEST_UNIVERSAL,),
    files=rf"{_RANK_FILE}|{DEEPSPEED_ZERO}/(?:[^/]+/)?[^/]+\.pt",
    steps=_STEPS,
    newest=LATEST_UNIVERSAL,
    inner=DEEPSPEED_ZERO,
)

VLLM = "vllm"
VLLM_FILE = r"model-rank-(?P<rank>\d{1,6})-part-(?P<part>\d{1,6})\.safetensors"
"""Dialect of vLLM's parameters, and pattern for the name of a file of one of its tensor-parallel ranks."""
VLLM_SHARDED = Format(
    name="vllm_sharded",
    title="a folder of vLLM's sharded state",
    clues=(Clue(first_of(VLLM_FILE), 45),),
    reader="transaxle.formats.vllm_sharded:open_sharded",
    draft="transaxle.formats.vllm_sharded:draft",
    draft_takes=frozenset({"degrees", "names", "ones", "parts"}),
    dialects=(VLLM,),
    files=VLLM_FILE,
)

FORMATS = (SAFETENSORS, TORCH, RANKS, DCP, TORCH_DIST, MEGATRON_TORCH, UNIVERSAL, DEEPSPEED, VLLM_SHARDED)
"""All built-in formats, in the order in which users see them."""

CALLED = {
    "huggingface": "hf", "hub": "hf", "sglang": "hf", "pt": "torch", "pth": "torch", "bin": "torch",
    "mcore": "torch_dist", "megatron-lm": "torch_dist", "fsdp": "dcp", "fsdp2": "dcp", "zero": "deepspeed-universal",
}  # fmt: skip
"""Common alternative name for a conversion target -> name of the dialect or format."""


GROUP = "transaxle.formats"
"""Name of the entry point group for the formats of installed packages; each entry point names a `Format`."""
_ORDINARY = frozenset({
    "", "csv", "gitattributes", "gitignore", "html", "ini", "jinja", "jpg", "json", "jsonl", "log", "md", "model",
    "png", "py", "rst", "sh", "tiktoken", "toml", "tsv", "txt", "xml", "yaml", "yml",
})  # fmt: skip
"""Common file endings, which no plugin's format may claim; otherwise files with these endings would cause plugins to be
loaded."""
_FOREIGN = (
    ".ckpt", ".gguf", ".ggml", ".h5", ".keras", ".msgpack", ".npy", ".npz", ".onnx", ".onnx_data", ".ot", ".pkl",
    ".pickle", ".tflite",
)  # fmt: skip
"""Endings of the names of tensor files that no built-in format writes; except for `.ckpt`, no built-in format reads
these files either. Files with these endings are not copied along with a model.
"""


@cache
def builtin() -> Mapping[str, Format]:
    """Return format name -> format, for all built-in formats."""
    return {kind.name: kind for kind in FORMATS}


def find(name: str) -> Format | None:
    """Return the format of a name; None if there is none. Raises `plugin_formats`' errors if a plugin has the name."""
    if name in builtin():
        return builtin()[name]
    return next((_load_format(plugin) for plugin in plugins(GROUP) if plugin.name == name), None)


@cache
def plugin_formats() -> tuple[Format, ...]:
    """Return the formats that other installed packages provide.

    Raises:
        Refused: with the code UNSUPPORTED for a plugin that cannot be used; with the code NAME_COLLISION if two plugins
            claim the same file endings.
    """
    kinds = tuple(map(_load_format, plugins(GROUP)))
    claimed = {end: "Transaxle" for kind in builtin().values() for end in (*kind.one_file, *kind.parts)}
    for kind, plugin in zip(kinds, plugins(GROUP), strict=True):
        for end in (*kind.one_file, *kind.parts):
            if claimed.setdefault(end, plugin.package) != plugin.package:
                raise plugin.refusal("NAME_COLLISION", f"it claims files that end in {end}, as {claimed[end]} does")
    return kinds


@cache
def _load_format(plugin: Plugin) -> Format:
    """Load the format of an installed plugin package, and check the format's name and file endings."""
    kind = plugin.load()
    if not isinstance(kind, Format):
        raise plugin.refusal("UNSUPPORTED", f"it is {kind!r}, and no transaxle.formats.registry.Format")
    if kind.name != plugin.name:
        raise plugin.refusal("UNSUPPORTED", f"the format is called {kind.name!r}; both names must be the same")
    if kind.name in builtin():
        raise plugin.refusal("NAME_COLLISION", "Transaxle has a built-in format of this name")
    ordinary = [end for end in (*kind.one_file, *kind.parts) if _suffix(end) in _ORDINARY]
    if ordinary:
        raise plugin.refusal("NAME_COLLISION", f"it claims files that end in {ordinary[0]}, which may be anything")
    return replace(kind, package=plugin.package)


def get_format(name: str) -> Format:
    """Return the format of a name; raise ValueError if there is no such format."""
    kind = find(name)
    if kind is None:
        raise ValueError(f"there is no format {name!r}")
    return kind


def unknown_format(name: str, known: Sequence[str], hint: str = "") -> TransaxleError:
    """Return the error for an unknown format name; its hint is the most similar known name.

    Args:
        name: the name that the user typed.
        known: names of the formats that the user may choose.
        hint: hint for the user, in place of the most similar name.
    """
    close = difflib.get_close_matches(name.lower(), known, 1)
    message = f"there is no format {name!r}; there are: {', '.join(known)}"
    return refuse("AMBIGUOUS", message, hint=hint or (f"Did you mean {close[0]}?" if close else ""))


def every_format() -> tuple[Format, ...]:
    """Return all formats, in the order in which they are tried when a folder is opened."""
    shipped = sorted(builtin().values(), key=lambda kind: min(clue.place for clue in kind.clues))
    return (*shipped, *plugin_formats())


def writable() -> tuple[str, ...]:
    """Return the names of the formats that can be written."""
    return tuple(kind.name for kind in (*builtin().values(), *plugin_formats()) if kind.draft)


def is_one_file(name: str) -> bool:
    """Return whether a file with this name or path can be a whole checkpoint."""
    return _any_format(name, lambda kind: name.endswith(kind.one_file))


def one_file_ends() -> tuple[str, ...]:
    """Return the endings of files that can be a whole checkpoint in a built-in format."""
    return tuple(end for kind in builtin().values() for end in kind.one_file)


def foreign_ends() -> tuple[str, ...]:
    """Return the endings of tensor files that Transaxle cannot open alone: parts of a checkpoint folder, and files of
    formats that it does not read.
    """
    return (*(end for kind in builtin().values() for end in kind.parts), *_FOREIGN)


def unread_end(name: str) -> str:
    """Return the ending of the name of a tensor file that no built-in format reads; empty for any other file name."""
    return next((end for end in _FOREIGN if name.lower().endswith(end)), "")


def holds_tensors(name: str) -> bool:
    """Return whether a file with this name contains tensors, in any format."""
    lower = name.lower()
    return lower.endswith(_FOREIGN) or _any_format(name, lambda kind: lower.endswith((*kind.one_file, *kind.parts)))


def opens_checkpoint(name: str) -> bool:
    """Return whether a file with this name completes a checkpoint, as an index does."""
    return _any_format(name, lambda kind: name.endswith(kind.openers))


def is_of_checkpoint(name: str) -> bool:
    """Return whether a file with this name occurs only in folders of checkpoints."""
    return _any_format(name, lambda kind: name.endswith((*kind.one_file, *kind.parts, *kind.openers)))


def is_step(folder: str) -> bool:
    """Return whether a folder with this name is the checkpoint of a training step."""
    return any(kind.step_pattern.fullmatch(folder) for kind in builtin().values())


def has_right_signature(name: str, head: bytes) -> bool:
    """Return whether a file may be replaced: the file must be empty, or its first bytes must fit the ending of its
    name.

    Args:
        name: name of the file.
        head: first bytes of the file.
    """
    return not head or _any_format(name, lambda kind: name.endswith(kind.one_file) and _has_signature(kind, head))


def _has_signature(kind: Format, head: bytes) -> bool:
    return not kind.heads or any(head.startswith(part, at) for at, part in kind.heads)


def _any_format(name: str, test: Callable[[Format], bool]) -> bool:
    """Return whether `test` is true for any format; plugins are loaded only for uncommon file endings."""
    return any(map(test, builtin().values())) or (_suffix(name) not in _ORDINARY and any(map(test, plugin_formats())))


def _suffix(name: str) -> str:
    """Return the lower-case text after the last dot of a file name; empty for a name without a dot."""
    return name.rpartition("/")[2].rpartition(".")[2].lower() if "." in name.rpartition("/")[2] else ""


MANIFEST = "transaxle.json"
"""Name of the manifest, the file in which Transaxle describes a checkpoint that it wrote. Conversions do not copy this
file, and do not list it as ignored."""
SCRATCH = ".transaxle"
"""Name of the folder for working files during a conversion; a checkpoint that contains this folder is not finished."""
STATE_FOLDER = "optimizer"
"""Name of the sub-folder for the optimizer's state; it is separate because frameworks read all tensor files next to a
model's config."""
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
"""Name of the file in which peft describes an adapter."""
USE_FILES = (
    ("generation_config.json",),
    ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    ("tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab.", "merges.txt", "chat_template",
     "spiece.model", "sentencepiece", "tiktoken", "tekken.json"),
)  # fmt: skip
"""For each kind of file for the use of a model, the beginnings of its names. Logs of a training run have others."""
_DOCUMENTS = (".md", "license", "license.txt", "notice", "notice.txt")
"""Endings of the names of files that only people read."""


def is_for_people(name: str) -> bool:
    """Return whether a file is only for people to read, such as a license."""
    return name.lower().endswith(_DOCUMENTS)


def is_of_model(name: str) -> bool:
    """Return whether a file belongs to a model, such as the model's config or tokenizer."""
    return name.startswith(CONFIG) or any(map(name.startswith, USE_FILES))


def is_for_use(name: str) -> bool:
    """Return whether a file concerns only the use of a model: its tokenizer, chat template or text."""
    return name != CONFIG and (is_for_people(name) or is_of_model(name))


class SidecarFiles(msgspec.Struct, frozen=True):
    """The sidecars of a checkpoint: those files of its folder that contain none of its tensors."""

    carried: tuple[str, ...]
    """Names of the sidecars that conversions copy with the model."""
    ignored: tuple[str, ...]
    """Names of the files that are not copied: unrelated tensor files, hidden files, sub-folders (with a `/`), links and
    special files."""


def sort_sidecars(storage: Storage, files: Collection[str], *, of_run: bool = False) -> SidecarFiles:
    """Sort the sidecars of a checkpoint into those that are copied with it and those that are ignored.

    Args:
        storage: storage that reads the checkpoint's folder.
        files: names of the checkpoint's own files, which are not sidecars.
        of_run: whether the folder belongs to a training run, so that it also contains files that do not belong to the
            model.

    Raises:
        Refused: with one of the codes PATH_ESCAPE or UNSUPPORTED if the folder's config.json exists but must not be
            read.
        StorageError: with the code IO if the folder cannot be read.
    """
    listing = storage.listing()
    if CONFIG in listing.special:
        raise gathered([listing.special[CONFIG]])
    other_files = [name for name in listing.names if name not in files and name != MANIFEST]
    if storage.single:
        return SidecarFiles(tuple(filter(is_of_model, other_files)), ())
    candidates = tuple(name for name in other_files if not _is_ignored(name))
    carried = tuple(filter(is_of_model, candidates)) if of_run else candidates
    used = {file.partition("/")[0] for file in files if "/" in file}
    folders = tuple(f"{name}/" for name in listing.folders if name not in used)
    ignored = [*(name for name in other_files if name not in carried), *listing.special, *folders]
    if STATE_FOLDER in used:
        inside = (f"{STATE_FOLDER}/{name}" for name in storage.listing(STATE_FOLDER).everything())
        ignored += [name for name in inside if name not in files]
    return SidecarFiles(carried, tuple(sorted(ignored)))


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name.lower().endswith(INDEX) or holds_tensors(name)
