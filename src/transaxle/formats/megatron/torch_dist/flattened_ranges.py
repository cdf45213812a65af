"""Optimizer state that ranks saved as ranges of their flattened tensors (`fully_sharded_model_space`, up to 0.15).

Every rank of a data-parallel group has a range of each parameter as the ranks of the model cut it. Such a tensor is
stored with an axis for every axis of the model's, as long as there are parts along it, and one for the elements of a
part. The shape that it has in the model is in the metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from msgspec.structs import replace

from transaxle.axes.geometry.strided import lexicographic_boxes
from transaxle.errors import Faults
from transaxle.formats.catalog import BITS, Container, Entry, Extent, Shape


def in_whole_shapes(container: Container, shapes: Mapping[str, Shape], file: str) -> Container:
    """Return a container in which flattened tensors have the shapes that they have in the model.

    Args:
        container: with tensors as they are stored.
        shapes: name of a flattened tensor -> its shape.
        file: the metadata, for errors.

    Raises:
        Refused: CORRUPT where the parts are not those of a tensor of that shape.
    """
    faults = Faults()
    entries = dict(container.entries)
    for name, shape in shapes.items():
        entry = entries.get(name)
        if entry is None:
            continue
        parts = entry.shape[:-1]
        if len(parts) != len(shape) or any(not part or size % part for size, part in zip(shape, parts, strict=True)):
            message = f"{list(parts)} parts of {entry.shape[-1:]} elements do not make the shape {list(shape)}"
            faults.add("CORRUPT", message, file, name)
            continue
        part = tuple(size // count for size, count in zip(shape, parts, strict=True))
        if prod(part) != entry.shape[-1]:
            message = f"its parts have {entry.shape[-1]} elements each; those of the shape {list(shape)} {prod(part)}"
            faults.add("CORRUPT", message, file, name)
            continue
        if any(extent.strides is not None or prod(extent.shape[:-1]) != 1 for extent in entry.extents):
            faults.add("UNSUPPORTED", "a chunk of it is not a range of one part", file, name)
            continue
        extents = sorted(_unfolded(entry, part), key=lambda extent: extent.start)
        entries[name] = Entry(name, entry.dtype, shape, tuple(extents))
    if faults:
        raise faults.error()
    return replace(container, entries=entries)


def _unfolded(entry: Entry, part: Shape) -> Iterator[Extent]:
    """Yield the chunks of a flattened tensor as boxes of the whole.

    Args:
        entry: the tensor as it is stored.
        part: shape of each part.
    """
    for extent in entry.extents:
        *number, low = extent.start
        offset = extent.offset
        for box in lexicographic_boxes(part, low, low + extent.shape[-1]):
            bounds = zip(number, part, box, strict=True)
            start = tuple(at * length + begin for at, length, (begin, _) in bounds)
            shape = tuple(end - begin for begin, end in box)
            yield Extent(start, shape, extent.file, offset)
            offset += prod(shape) * BITS[entry.dtype] // 8
