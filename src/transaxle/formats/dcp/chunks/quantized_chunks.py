"""Quantized tensors in chunks: a rank saved its part with the scales of that part, and all parts make one tensor.

The metadata knows the tensor by the type and the shape that it shows to torch. Codes lie in it as they do in any
tensor; the scales of a chunk lie at its place divided by the tile. One number for the whole tensor is in every chunk,
and must be the same in all of them, which is left to the container's `twins`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from transaxle.formats.catalog.catalog import Entry, Extent, Twin
from transaxle.formats.catalog.problem_list import Faults
from transaxle.formats.dcp.chunks.payload import QuantizedChunk
from transaxle.formats.dcp.metadata import Chunk
from transaxle.formats.dtype import Shape
from transaxle.formats.torch_file.quantized_tensors import CODES, NOTE, TAKEN, Kind
from transaxle.formats.torch_file.views import ViewFault
from transaxle.formats.training_state.state import LEFT_BEHIND

_ONE_FOR_ALL = "one number stands for all of {!r}, and each chunk has its own"
_HINT = "Save it unsharded, or dequantized."


@dataclass(frozen=True, slots=True)
class Whole:
    """A quantized tensor that was found whole."""

    kind: Kind
    """How its buffers make values."""
    parts: Mapping[str, Entry]
    """What follows its name -> the buffer; the codes are still of the type that the file gives them."""
    twins: tuple[Twin, ...]
    """Numbers that must be equal."""
    left: Mapping[str, str]
    """What follows its name -> what it is, for buffers that are not read."""


def whole(
    key: str, shape: Shape, found: Sequence[tuple[Chunk, QuantizedChunk]], file: str, faults: Faults
) -> Whole | None:
    """Put the chunks of a quantized tensor together.

    Args:
        key: its name.
        shape: its elements along each dim.
        found: its chunks, which cover it exactly once; at least one.
        file: what describes it, for refusals.
        faults: gets DTYPE_MIXED for chunks that are stored in several ways, BLOCK_MISALIGNED for a cut inside a tile,
            UNSUPPORTED for a stack of matrices that is cut and has a number for each.

    Returns:
        None if something is wrong with them.
    """
    kinds = {each.layout.kind for _, each in found}
    if len(kinds) > 1:
        told = " and ".join(sorted(f"{kind.encoding} in tiles of {kind.tile}, type {kind.number}" for kind in kinds))
        faults.add("DTYPE_MIXED", f"its chunks are stored as {told}", file, key, _HINT)
        return None
    (kind,) = kinds
    parts: dict[str, Entry] = {}
    twins: list[Twin] = []
    for end, first in found[0][1].parts.items():
        tile = _tile(kind, end, first, shape)
        if tile is None:
            if len(found) > 1 and prod(first.shape) != 1:
                message = f"it is a stack of matrices in {len(found)} chunks, which have one number for each matrix"
                faults.add("UNSUPPORTED", message, file, key, _HINT)
                return None
            parts[end] = replace(first, name=key + end)
            twins += (Twin(first, other.parts[end], _ONE_FOR_ALL.format(key)) for _, other in found[1:])
            continue
        for chunk, _ in found:
            if any(start % step for start, step in zip(chunk.start, tile, strict=True)):
                message = f"a chunk begins at {list(chunk.start)}, inside of a tile of {list(tile)}"
                faults.add("BLOCK_MISALIGNED", message, file, key, _HINT)
                return None
        grid = tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))
        extents = sorted(_placed(found, end, tile), key=lambda extent: extent.start)
        parts[end] = Entry(key + end, first.dtype, grid, tuple(extents))
    left = {end: what for _, each in found for end, what in each.layout.left.items()}
    return Whole(kind, parts, tuple(twins), left)


def copies(key: str, one: QuantizedChunk, two: QuantizedChunk, why: str, faults: Faults) -> Iterator[Twin]:
    """Yield the buffers of two copies of one chunk, which must be equal.

    Args:
        key: name of the tensor.
        one: the chunk that is read.
        two: its copy.
        why: why they must be equal; gets the names of both files.
        faults: gets DTYPE_MIXED if they are stored in two ways.
    """
    files = [each.parts[CODES].extents[0].file for each in (one, two)]
    if one.layout.kind != two.layout.kind:
        faults.add("DTYPE_MIXED", f"{files[0]} and {files[1]} hold it in two encodings", files[1], key)
        return
    for end, entry in one.parts.items():
        yield Twin(entry, two.parts[end], why.format(*files, key))


def buffers(
    quantized: Mapping[str, Whole], plain: Collection[str], file: str, metadata: dict[str, Any]
) -> dict[str, Entry]:
    """Return the buffers of quantized tensors by name, and let the metadata say what they are.

    Args:
        quantized: the tensors by name.
        plain: names of the others.
        file: what describes them, for refusals.
        metadata: of the container.

    Raises:
        Refused: NAME_COLLISION with another tensor, UNSUPPORTED for types that are none of codes.
    """
    faults = Faults()
    old = any(each.kind.is_old for each in quantized.values())
    found: dict[str, Entry] = {}
    for name, each in quantized.items():
        try:
            metadata.setdefault(NOTE, {})[name] = each.kind.said(old=old)
        except ViewFault as fault:
            faults.add(fault.code, fault.message, file, name, fault.hint)
            continue
        for end, entry in each.parts.items():
            if name + end in plain or name + end in found:
                faults.add("NAME_COLLISION", TAKEN, file, name + end)
            dtype = each.kind.stored(old=old) if end == CODES else entry.dtype
            found[name + end] = replace(entry, name=name + end, dtype=dtype)
        if each.left:
            left = {name + end: what for end, what in each.left.items()}
            metadata[LEFT_BEHIND] = {**metadata.get(LEFT_BEHIND, {}), **left}
    if faults:
        raise faults.error()
    return found


def _tile(kind: Kind, end: str, first: Entry, shape: Shape) -> Shape | None:
    """Return the elements that one number of a buffer is for, along each dim; None for all of them."""
    if end == CODES:
        return (*(1 for _ in shape[:-1]), 2 if kind.packed else 1) if shape else ()
    if len(first.shape) != len(shape) or not all(kind.tile):
        return None
    return (1,) * (len(shape) - 2) + kind.tile[-len(shape) :]


def _placed(found: Sequence[tuple[Chunk, QuantizedChunk]], end: str, tile: Shape) -> Iterator[Extent]:
    for chunk, each in found:
        (extent,) = each.parts[end].extents
        yield replace(extent, start=tuple(start // step for start, step in zip(chunk.start, tile, strict=True)))
