"""Quantized tensors in chunks: each rank saved its part with the scales of that part; together they are one tensor.

The metadata describes the tensor by the dtype and shape that it shows to torch. Codes are cut like any tensor; the
scales of a chunk begin at its first index divided by the tile. A number for the whole tensor is in every chunk and must
be equal in all of them, which the container's `twins` require.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from transaxle.errors import Faults, Refusal, Where
from transaxle.formats.catalog import Entry, Extent, Twin
from transaxle.formats.dcp.chunks.payload import QuantizedChunk
from transaxle.formats.dcp.metadata import SavedChunk
from transaxle.formats.dtype import Shape
from transaxle.formats.torch_file.quantized_tensors import CODES, NOTE, TAKEN, StoringKind
from transaxle.formats.torch_file.views import ViewFault
from transaxle.formats.training_state.state import LEFT_BEHIND

if TYPE_CHECKING:
    from transaxle.axes.layout.tile import SplitTile

_ONE_FOR_ALL = "one number applies to the whole of {!r}, but each chunk has its own"
_HINT = "Save it unsharded, or dequantized."


@dataclass(frozen=True, slots=True)
class AssembledTensor:
    """A quantized tensor whose chunks cover it."""

    kind: StoringKind
    """How its buffers make values."""
    parts: Mapping[str, Entry]
    """Suffix of its name -> the buffer; codes still have the dtype that the file states."""
    twins: tuple[Twin, ...]
    """Numbers that must be equal."""
    left: Mapping[str, str]
    """Suffix of its name -> description, for buffers that are not read."""


def assembled(
    key: str, shape: Shape, chunks: Sequence[tuple[SavedChunk, QuantizedChunk]], file: str, faults: Faults
) -> AssembledTensor | None:
    """Assemble the chunks of a quantized tensor.

    Args:
        key: its name.
        shape: its elements along each dim.
        chunks: its chunks, which cover it exactly once; at least one.
        file: the file that describes it, for refusals.
        faults: receives DTYPE_MIXED for chunks that are stored differently, BLOCK_MISALIGNED for a cut inside a tile,
            UNSUPPORTED for a stack of matrices that is cut and has a number for each.

    Returns:
        None if they have a problem.
    """
    kinds = {archive.layout.kind for _, archive in chunks}
    if len(kinds) > 1:
        variants = " and ".join(
            sorted(f"{kind.encoding} in tiles of {kind.tile}, type {kind.number}" for kind in kinds)
        )
        faults.add("DTYPE_MIXED", f"its chunks are stored as {variants}", file, key, _HINT)
        return None
    (kind,) = kinds
    parts: dict[str, Entry] = {}
    twins: list[Twin] = []
    for end, first_buffer in chunks[0][1].parts.items():
        tile = _tile(kind, end, first_buffer, shape)
        if tile is None:
            if len(chunks) > 1 and prod(first_buffer.shape) != 1:
                message = f"it is a stack of matrices in {len(chunks)} chunks, which have one number for each matrix"
                faults.add("UNSUPPORTED", message, file, key, _HINT)
                return None
            parts[end] = replace(first_buffer, name=key + end)
            twins += (
                Twin(first_buffer, other_chunk.parts[end], _ONE_FOR_ALL.format(key)) for _, other_chunk in chunks[1:]
            )
            continue
        for chunk, _ in chunks:
            if any(start % step for start, step in zip(chunk.start, tile, strict=True)):
                message = f"a chunk begins at {list(chunk.start)}, inside a tile of {list(tile)}"
                detail = partial(_split, shape, tile, chunk.start, [each for each, _ in chunks])
                faults.extend(Refusal("BLOCK_MISALIGNED", message, Where(file, key), _HINT, detail))
                return None
        grid = tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))
        extents = sorted(_placed(chunks, end, tile), key=lambda extent: extent.start)
        parts[end] = Entry(key + end, first_buffer.dtype, grid, tuple(extents))
    unread = {end: reason for _, archive in chunks for end, reason in archive.layout.left.items()}
    return AssembledTensor(kind, parts, tuple(twins), unread)


def _split(shape: Shape, tile: Shape, start: Shape, chunks: Sequence[SavedChunk]) -> SplitTile | None:
    """Return the tile inside which a chunk begins, looked at along the first dim in which it does."""
    from transaxle.axes.layout.tile import DRAWN, SplitTile

    dim = next(each for each, step in enumerate(tile) if start[each] % step)
    number = tuple(at // step for at, step in zip(start, tile, strict=True))
    first = number[dim] * tile[dim]
    stop = min(first + tile[dim], shape[dim])
    if stop - first > DRAWN:
        return None
    runs: list[tuple[int, int, str, Shape]] = []
    for at in range(first, stop):
        place = (*start[:dim], at, *start[dim + 1 :])
        chunk = next(each for each in chunks if _has(each, place))
        name = f"the chunk at {list(chunk.start)}"
        own = tuple((here - begin) // step for here, begin, step in zip(place, chunk.start, tile, strict=True))
        if runs and runs[-1][2:] == (name, own):
            runs[-1] = runs[-1][0], at + 1, name, own
        else:
            runs.append((at, at + 1, name, own))
    return SplitTile(f"tiles of {list(tile)}", number, dim, tuple(runs))


def _has(chunk: SavedChunk, place: Shape) -> bool:
    return all(begin <= at < begin + size for at, begin, size in zip(place, chunk.start, chunk.shape, strict=True))


def copies(key: str, first: QuantizedChunk, second: QuantizedChunk, why: str, faults: Faults) -> Iterator[Twin]:
    """Yield the buffers of two copies of one chunk, which must be equal.

    Args:
        key: name of the tensor.
        first: the chunk that is read.
        second: its copy.
        why: why they must be equal; gets the names of both files.
        faults: gets DTYPE_MIXED if they are stored in two ways.
    """
    files = [chunk.parts[CODES].extents[0].file for chunk in (first, second)]
    if first.layout.kind != second.layout.kind:
        faults.add("DTYPE_MIXED", f"{files[0]} and {files[1]} store it in two encodings", files[1], key)
        return
    for end, entry in first.parts.items():
        yield Twin(entry, second.parts[end], why.format(*files, key))


def buffers(
    quantized: Mapping[str, AssembledTensor], plain: Collection[str], file: str, metadata: dict[str, Any]
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
    old = any(tensor.kind.is_old for tensor in quantized.values())
    entries: dict[str, Entry] = {}
    for name, tensor in quantized.items():
        try:
            metadata.setdefault(NOTE, {})[name] = tensor.kind.said(old=old)
        except ViewFault as fault:
            faults.add(fault.code, fault.message, file, name, fault.hint)
            continue
        for end, entry in tensor.parts.items():
            if name + end in plain or name + end in entries:
                faults.add("NAME_COLLISION", TAKEN, file, name + end)
            dtype = tensor.kind.stored(old=old) if end == CODES else entry.dtype
            entries[name + end] = replace(entry, name=name + end, dtype=dtype)
        if tensor.left:
            unread = {name + end: reason for end, reason in tensor.left.items()}
            metadata[LEFT_BEHIND] = {**metadata.get(LEFT_BEHIND, {}), **unread}
    if faults:
        raise faults.error()
    return entries


def _tile(kind: StoringKind, end: str, first: Entry, shape: Shape) -> Shape | None:
    """Return the elements along each dim that share one number of a buffer; None for all of them."""
    if end == CODES:
        return (*(1 for _ in shape[:-1]), 2 if kind.packed else 1) if shape else ()
    if len(first.shape) != len(shape) or not all(kind.tile):
        return None
    return (1,) * (len(shape) - 2) + kind.tile[-len(shape) :]


def _placed(chunks: Sequence[tuple[SavedChunk, QuantizedChunk]], end: str, tile: Shape) -> Iterator[Extent]:
    for chunk, archive in chunks:
        (extent,) = archive.parts[end].extents
        yield msgspec.structs.replace(
            extent, start=tuple(start // step for start, step in zip(chunk.start, tile, strict=True))
        )
