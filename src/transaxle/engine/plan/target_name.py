"""What the name of a target says: a folder, one file of a format, or a kind of file that is not written.

A name like `out.gguf` would make a folder of that name, which is not what anybody means.
"""

from __future__ import annotations

from collections.abc import Iterator

from transaxle.errors import Refusal, Where
from transaxle.formats import registry

_PACKED = (
    ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".rar",
)  # fmt: skip
_OTHERS = (
    ".arrow", ".bak", ".caffemodel", ".csv", ".dat", ".data", ".db", ".engine", ".feather", ".hdf", ".hdf5", ".json",
    ".llamafile", ".mar", ".mat", ".mlmodel", ".mlpackage", ".nemo", ".parquet", ".params", ".pb", ".pdparams", ".pt2",
    ".ptd", ".pte", ".rten", ".tensors", ".tmp", ".torch", ".torchscript", ".txt", ".weights", ".yaml", ".yml",
    ".zarr",
)  # fmt: skip


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
