"""What the name of a target says: a folder, one file of a format, or a kind of file that is not written.

A name like `out.gguf` would make a folder of that name, which is not what anybody means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transaxle.errors import Refusal, Where
from transaxle.formats.catalog.sidecar_files import SAFETENSORS as SAFETENSORS_FILE
from transaxle.formats.catalog.sidecar_files import TENSOR_FILES, WHOLE
from transaxle.formats.catalog.sidecar_files import TORCH as TORCH_FILES
from transaxle.formats.safetensors.index_name import FORMAT as SAFETENSORS
from transaxle.formats.torch_file.reader import FORMAT as TORCH

_FILES: Mapping[str, str | tuple[str, ...]] = {SAFETENSORS: SAFETENSORS_FILE, TORCH: TORCH_FILES}
"""Ends of the names of single files, by format."""
_PACKED = (
    ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".rar",
)  # fmt: skip
_OTHERS = (
    ".arrow", ".bak", ".caffemodel", ".csv", ".dat", ".data", ".db", ".engine", ".feather", ".hdf", ".hdf5", ".json",
    ".llamafile", ".mar", ".mat", ".mlmodel", ".mlpackage", ".nemo", ".parquet", ".params", ".pb", ".pdparams", ".pt2",
    ".ptd", ".pte", ".rten", ".tensors", ".tmp", ".torch", ".torchscript", ".txt", ".weights", ".yaml", ".yml",
    ".zarr",
)  # fmt: skip
_NO_FOLDER = (*(end for end in TENSOR_FILES if end not in WHOLE), *_PACKED, *_OTHERS)
"""Ends of names that say a file, or a folder, of a kind that is not written."""


def is_one_file(target: str | None) -> bool:
    """Tell whether a name says that one file is to be written."""
    return target is not None and target.endswith(WHOLE)


def misnamed(target: str | None, form: str) -> Iterator[Refusal]:
    """Yield why a container format cannot be written to a target of this name.

    A `/` at its end says that it is a folder, whatever the rest looks like.
    """
    if target is None:
        return
    endings = _FILES.get(form, ())
    if target.endswith(WHOLE):
        if not target.endswith(endings):
            message = f"the name says that it is a file of another format; {form} is to be written"
            yield Refusal("UNSUPPORTED", message, Where(target), "Choose another name, or another --to.")
        return
    lower = target.lower()
    ending = next((end for end in (*WHOLE, *_NO_FOLDER) if lower.endswith(end)), None)
    if ending is None or lower.rpartition("/")[2] == ending:  # a hidden folder is one
        return
    files = (endings,) if isinstance(endings, str) else endings
    advice = f"one file ends in {', '.join(files)}" if files else f"{form} is always a folder"
    if ending in WHOLE:
        message = f"a name that ends in {target[-len(ending) :]} is no file that others open"
        yield Refusal("UNSUPPORTED", message, Where(target), f"End it in {ending}, or in {ending}/ for a folder.")
    else:
        message = f"files that end in {ending} are not written; {advice}"
        hint = f"Choose another name; one that ends in / is a folder: {target}/"
        yield Refusal("UNSUPPORTED", message, Where(target), hint)
