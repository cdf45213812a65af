"""Names of a target: its own, which says what is written, and those of its files, which must be distinct everywhere.

A name like `out.gguf` would make a folder of that name, which is not what anybody means. `A` and `a` are one file on
many file systems, and so are an `é` of one character and one of two: checkpoints are copied between disks, so such
pairs are refused wherever they are written. What a target has no place for is told here too.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from transaxle.errors import Refusal, Where
from transaxle.formats import registry
from transaxle.formats.catalog.catalog import Spec
from transaxle.formats.catalog.sidecar_files import MANIFEST, SCRATCH
from transaxle.formats.format import Format

_PACKED = (
    ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".rar",
)  # fmt: skip
_OTHERS = (
    ".arrow", ".bak", ".caffemodel", ".csv", ".dat", ".data", ".db", ".engine", ".feather", ".hdf", ".hdf5", ".json",
    ".llamafile", ".mar", ".mat", ".mlmodel", ".mlpackage", ".nemo", ".parquet", ".params", ".pb", ".pdparams", ".pt2",
    ".ptd", ".pte", ".rten", ".tensors", ".tmp", ".torch", ".torchscript", ".txt", ".weights", ".yaml", ".yml",
    ".zarr",
)  # fmt: skip
_RENAME = "Rename one of them in the source."


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
            yield Refusal("UNSUPPORTED", message, Where(target), "Choose another name, or another --to.")
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
