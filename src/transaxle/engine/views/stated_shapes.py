"""Shapes that are stored as tensors: `weight_shape` of compressed-tensors, a list of integers.

A target's shape may differ from that of its sources, so such a buffer is never copied. It is read from a virtual file
that contains nothing but the numbers in its name, and each stored shape is compared with the shape that the codes have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from msgspec.structs import replace

from transaxle.formats.catalog import Container, Entry, Extent, Shape, numpy_dtype
from transaxle.formats.storage.storage import InMemoryFile, VirtualFiles

SHAPE_HINT = "The file is damaged, or its rows are padded, which is not supported."
"""Hint in refusals of tensors whose stored shape is wrong."""
_FILE = "\0shape "
"""Beginning of the names of the virtual files."""
_SUFFIX = "_shape"
"""End of the names of stored shapes."""


class _ShapeFiles(Mapping[str, InMemoryFile]):
    """The virtual files of all possible shapes; the name of a file states its dtype and its numbers."""

    def __getitem__(self, name: str) -> InMemoryFile:
        if not name.startswith(_FILE):
            raise KeyError(name)
        dtype, numbers = name.removeprefix(_FILE).split(" ")
        return InMemoryFile(np.array([int(number) for number in numbers.split(",")], numpy_dtype(dtype)).tobytes())

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def with_shape_files(container: Container) -> Container:
    """Return a container whose storage also has the virtual files of shapes, if a tensor may be a stored shape."""
    if not any(name.endswith(_SUFFIX) for name in container.entries):
        return container
    return replace(container, storage=VirtualFiles(container.storage, _ShapeFiles()))


def shape_entry(shape: Shape, dtype: str) -> Entry:
    """Return the entry of a virtual file with a shape.

    Args:
        shape: the shape whose numbers the entry contains.
        dtype: safetensors code of the dtype of the numbers.
    """
    file, counts = f"{_FILE}{dtype} {','.join(map(str, shape))}", (len(shape),)
    return Entry(file, dtype, counts, (Extent((0,), counts, file, 0),))
