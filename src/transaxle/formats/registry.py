"""All container formats by name, and what they say together of the names of files.

Whoever needs to know something of a format asks here; nothing else lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from transaxle.formats.builtin_formats import FORMATS
from transaxle.formats.format import Format

_FOREIGN = (
    ".ckpt", ".gguf", ".ggml", ".h5", ".keras", ".msgpack", ".npy", ".npz", ".onnx", ".onnx_data", ".ot", ".pkl",
    ".pickle", ".tflite",
)  # fmt: skip
"""Ends of the names of files with tensors that no format here reads: they do not travel with a
model, and are not written."""


@cache
def builtin() -> Mapping[str, Format]:
    """Return the formats that ship with Transaxle, by name."""
    return {kind.name: kind for kind in FORMATS}


def find(name: str) -> Format | None:
    """Return a format by name; None where there is none."""
    return builtin().get(name)


def get(name: str) -> Format:
    """Return a format that is known to be there."""
    kind = find(name)
    if kind is None:
        raise ValueError(f"there is no format {name!r}")
    return kind


def every_format() -> tuple[Format, ...]:
    """Return all formats, in the order in which a folder is looked at for them."""
    return tuple(sorted(builtin().values(), key=lambda kind: min(clue.place for clue in kind.clues)))


def writable() -> tuple[str, ...]:
    """Return the names of the formats that can be written."""
    return tuple(kind.name for kind in builtin().values() if kind.draft)


def is_one_file(name: str) -> bool:
    """Tell whether a file of this name can be a checkpoint by itself; also of a path."""
    return _any(lambda kind: name.endswith(kind.one_file))


def one_file_ends() -> tuple[str, ...]:
    """Return the ends of the names of such files."""
    return tuple(end for kind in builtin().values() for end in kind.one_file)


def foreign_ends() -> tuple[str, ...]:
    """Return the ends of the names of other files with tensors: parts of folders, and formats that are not read."""
    return (*(end for kind in builtin().values() for end in kind.parts), *_FOREIGN)


def holds_tensors(name: str) -> bool:
    """Tell whether a file of this name holds tensors, in whatever format."""
    lower = name.lower()
    return lower.endswith(_FOREIGN) or _any(lambda kind: lower.endswith((*kind.one_file, *kind.parts)))


def opens_checkpoint(name: str) -> bool:
    """Tell whether a file of this name makes the files around it a checkpoint."""
    return _any(lambda kind: name.endswith(kind.openers))


def is_of_checkpoint(name: str) -> bool:
    """Tell whether a file of this name is found in folders that hold a checkpoint, and in no others."""
    return _any(lambda kind: name.endswith((*kind.one_file, *kind.parts, *kind.openers)))


def is_step(folder: str) -> bool:
    """Tell whether a folder of this name holds a checkpoint of one training step."""
    return _any(lambda kind: kind.step_pattern.fullmatch(folder) is not None)


def begins_right(name: str, head: bytes) -> bool:
    """Tell whether a file begins as those do whose name ends so; an empty one has nothing to lose.

    Args:
        name: ends like a file that can be a checkpoint.
        head: its first bytes.
    """
    return not head or _any(lambda kind: name.endswith(kind.one_file) and _begins(kind, head))


def _begins(kind: Format, head: bytes) -> bool:
    return not kind.heads or any(head.startswith(part, at) for at, part in kind.heads)


def _any(test: Callable[[Format], bool]) -> bool:
    return any(map(test, builtin().values()))
