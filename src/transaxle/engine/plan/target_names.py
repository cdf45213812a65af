"""Names of a target: its own, which says what is written, and those of its files, which must be distinct everywhere.

A name like `out.gguf` would make a folder of that name, which is not what anybody means. `A` and `a` are one file on
many file systems, and so are an `é` of one character and one of two: checkpoints are copied between disks, so such
pairs are refused wherever they are written. What a target has no place for is told here too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from transaxle.engine.checkpoint.recognise import IDENTITY, other_meaning
from transaxle.errors import Refusal, Where, refuse
from transaxle.families import is_dialect
from transaxle.formats import registry
from transaxle.formats.builtin_formats import SAFETENSORS
from transaxle.formats.catalog import Spec
from transaxle.formats.format import Format
from transaxle.formats.registry import MANIFEST, SCRATCH

_PACKED = (
    ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".rar",
)  # fmt: skip
_OTHERS = (
    ".arrow", ".bak", ".caffemodel", ".csv", ".dat", ".data", ".db", ".engine", ".feather", ".hdf", ".hdf5", ".json",
    ".llamafile", ".mar", ".mat", ".mlmodel", ".mlpackage", ".nemo", ".parquet", ".params", ".pb", ".pdparams", ".pt2",
    ".ptd", ".pte", ".rten", ".tensors", ".tmp", ".torch", ".torchscript", ".txt", ".weights", ".yaml", ".yml",
    ".zarr",
)  # fmt: skip
_PLACE = "This looks like a place: the target is the second argument, and --to says what is written there."
_RENAME = "Rename one of them in the source."


def parse_to(to: str) -> tuple[str, str | None]:
    """Split `FORMAT[:DIALECT]` or `DIALECT`, which is short for `safetensors:DIALECT`.

    Returns:
        format and dialect; no dialect means the source's own names.

    Raises:
        UsageError: AMBIGUOUS for a format that does not exist, and for what is no name.
        Refused: UNSUPPORTED for one that cannot be written.
    """
    first, colon, second = to.partition(":")
    if not colon and (first == IDENTITY or is_dialect(first)):
        return SAFETENSORS.name, first  # asked first: a dialect that ships is no reason to look for installed formats
    kind = registry.find(first)
    if kind is not None and kind.draft:
        return first, second or None
    if kind is None and (colon or not first):
        raise registry.unknown(first, registry.writable(), _before_colon(first, second))
    if kind is not None:
        message = f"cannot write format {first!r}; formats that can be written: {', '.join(registry.writable())}"
        near = next((name for name in registry.writable() if name.startswith(first)), None)
        raise refuse("UNSUPPORTED", message, hint=f"Did you mean {near}?" if near else "")
    if hint := _no_name(to):
        raise refuse("AMBIGUOUS", f"{to!r} is neither FORMAT:DIALECT nor one of them", hint=hint)
    return SAFETENSORS.name, first


def _before_colon(first: str, second: str) -> str:
    """Return what to write instead of two words with a colon, the first of which is no format; empty if unknown."""
    if hint := other_meaning(first):
        return hint
    if second in registry.writable():
        return f"The format comes first: {second}:{first}"
    if second.startswith("//"):
        return _PLACE
    if not first and is_dialect(second):
        return f"Did you mean {second}?"
    if not is_dialect(first):
        return ""
    wanted = second if is_dialect(second) else first
    return f"{first} is a dialect; a format stands before the colon: {SAFETENSORS.name}:{wanted}"


def _no_name(to: str) -> str:
    """Return what to write instead of a text that can be no name: with another sign than a colon, or a path."""
    words = re.split(r"[^\w@.-]+", to)
    if len(words) == 2:
        for form, label in (words, reversed(words)):
            if form in registry.writable() and (label == IDENTITY or is_dialect(label)):
                return f"Did you mean {form}:{label}?"
    if "/" in to or registry.is_one_file(to):
        return _PLACE
    return ""


def is_one_file(target: str | None) -> bool:
    """Tell whether a name says that one file is to be written."""
    return target is not None and registry.is_one_file(target)


def misnamed(target: str | None, form: str) -> Iterator[Refusal]:
    """Yield why a container format cannot be written to a target of this name.

    A `/` at its end says that it is a folder, whatever the rest looks like.
    """
    if target is None:
        return
    written = registry.find(form)
    endings = () if written is None else written.one_file
    if registry.is_one_file(target):
        if not target.endswith(endings):
            message = f"the ending of the name belongs to another format, and {form} is to be written"
            others = [name for name in registry.writable() if target.endswith(registry.get(name).one_file)]
            name = f"End it in {endings[0]}" if endings else "Name a folder"
            hint = f"{name}, or write another format: --to {' or --to '.join(others)}." if others else f"{name}."
            yield Refusal("UNSUPPORTED", message, Where(target), hint)
        return
    lower, whole = target.lower(), (*registry.one_file_ends(), *endings)
    ending = next((end for end in (*whole, *registry.foreign_ends(), *_PACKED, *_OTHERS) if lower.endswith(end)), None)
    if ending is None or lower.rpartition("/")[2] == ending:  # a hidden folder is one
        return
    advice = f"a single file ends in {', '.join(endings)}" if endings else f"{form} is always a folder"
    if ending in whole:
        message = f"other programs do not recognise a file that ends in {target[-len(ending) :]}"
        yield Refusal("UNSUPPORTED", message, Where(target), f"End it in {ending}, or in {ending}/ for a folder.")
    else:
        message = f"files that end in {ending} cannot be written; {advice}"
        hint = f"Choose another name; to write a folder, end it in /: {target}/"
        if meaning := other_meaning(ending.lstrip(".")):
            hint = f"{meaning}\n{hint}"
        yield Refusal("UNSUPPORTED", message, Where(target), hint)


def clashing(names: Iterable[str]) -> list[Refusal]:
    """Return a refusal for every name that some file system would confuse with another one or with a file of ours.

    Args:
        names: paths in the target folder, `a/b/c`, without our own files.
    """
    spelled = {_folded(reserved): reserved for reserved in (MANIFEST, SCRATCH)}
    is_file_at = dict.fromkeys(spelled.values(), True)
    problems = []
    for name in names:
        parts = name.split("/")
        for count in range(1, len(parts) + 1):
            path, is_file = "/".join(parts[:count]), count == len(parts)
            spelling = spelled.setdefault(_folded(path), path)
            kind = is_file_at.setdefault(path, is_file)
            if spelling != path or kind != is_file or spelling in (MANIFEST, SCRATCH):
                message = f"on file systems that ignore case or accents it would be the same file as {spelling!r}"
                if spelling in (MANIFEST, SCRATCH):
                    message = f"the name {spelling} is reserved for Transaxle's own files"
                problems.append(Refusal("NAME_COLLISION", message, Where(name), _RENAME))
                break
    return problems


def _folded(name: str) -> str:
    """Return the key that names share if some file system treats them as equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def without_line(name: str, dialect: str) -> Refusal:
    """Say that a dialect has no line for a tensor."""
    message = f"dialect {dialect} has no line for this tensor"
    return Refusal("UNEXPECTED_TENSOR", message, Where(None, name), "Omit --strict.")


def unholdable(kind: Format, specs: Sequence[Spec]) -> Iterator[Refusal]:
    """Yield why a format cannot hold tensors of some types."""
    if kind.dtypes is None:
        return
    for spec in specs:
        if spec.dtype not in kind.dtypes:
            hint = "Choose a format that can hold it, or leave it out."
            yield Refusal("UNSUPPORTED", f"{kind.name} has no dtype for {spec.dtype}", Where(None, spec.name), hint)
