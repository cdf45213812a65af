"""All container formats by name, and what they say together of the names of files: which belong to a checkpoint.

Whoever needs to know something of a format asks here; nothing else lists them. Formats of installed packages are looked
for where no format that ships answers: a name that none of them has, a folder that none of them reads, a file whose
kind none of them knows.

Sidecars are the other files of a checkpoint's folder, which are copied with the weights or left alone. A model is more
than its tensors: its config, its tokenizer and its chat template go where it goes. A second set of weights (another
format, another precision) does not, and neither does a link out of the folder. Both lists are shown to the user:
nothing is left behind in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

import msgspec

from transaxle.errors import TransaxleError, gathered, refuse
from transaxle.formats.builtin_formats import FORMATS
from transaxle.formats.format import INDEX, Format
from transaxle.formats.storage.storage import Storage
from transaxle.plugins import Plugin, plugins

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
        raise plugin.refusal("UNSUPPORTED", f"it is {kind!r}, and no transaxle.formats.format.Format")
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
