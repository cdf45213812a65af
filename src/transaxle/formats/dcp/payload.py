"""The bytes behind each item: small torch archives, thousands to a file, or safetensors data at its end.

Each archive must be read, for what the metadata says of a chunk may be a lie: its type, its shape and the place of its
bytes are taken from the archive itself and then compared. Reading one takes a while, and a checkpoint may have a
hundred thousand. But those of one shape are alike to the last byte, outside of the tensor, its checksum and a serial
number. So a strictly read archive serves as a stencil: whatever matches it is read as well.

Of a quantized tensor each rank saved its part with the scales of that part; together they are one tensor. The metadata
describes it by the dtype and shape that it shows to torch. Codes are cut like any tensor; the scales of a chunk begin
at its first index divided by the tile. A number for the whole tensor is in every chunk and must be equal in all of
them, which the container's `twins` require.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from transaxle.errors import Faults, Refusal, TransaxleError, Where
from transaxle.formats.catalog import PACKED, Checksum, Entry, Extent, Shape, Twin, logical, nbytes, number
from transaxle.formats.dcp.metadata import Payload, SavedChunk, SavedItem
from transaxle.formats.dcp.stencil import Stencils
from transaxle.formats.pickled.descriptors import NOTHING, Quantized, Scalar, TensorRef
from transaxle.formats.safetensors import part_starts, read_header
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.archive import LOCAL
from transaxle.formats.torch_file.quantized_tensors import CODES, NOTE, TAKEN, PlainLayout, StoringKind, layout
from transaxle.formats.torch_file.saved import DATA, REPEATED, Saved, StoredStorage, ViewFault, place, read_saved
from transaxle.formats.training_state.flatten import described
from transaxle.formats.training_state.state import LEFT_BEHIND, Leaf

if TYPE_CHECKING:
    from transaxle.axes.layout.tile import SplitTile


_MANY = 8
"""Chunks that are recognised together."""
_AGAIN = "Copy the file again, or save the checkpoint again."


class _TensorArchive(NamedTuple):
    """A tensor in an archive."""

    dtype: str
    """torch's name of its type."""
    shape: Shape
    """As torch gives it."""
    place: Extent
    """Its extent in logical elements; the offset counts from the archive's first byte."""
    repeated: int
    """Bytes that strides of zero repeat."""
    stored: tuple[int, int]
    """First byte of its storage, counted from the archive's first byte, and its size in bytes."""


class QuantizedChunk(NamedTuple):
    """A part of a tensor whose archive holds codes and scales (see `formats.torch_file.quantized_tensors`)."""

    layout: PlainLayout
    """How the buffers make values."""
    parts: Mapping[str, Entry]
    """Suffix of the tensor's name -> this chunk's own buffer."""
    dtype: str
    """torch's name for the dtype that the tensor shows."""


class _ObjectArchive(NamedTuple):
    """An archive that holds no tensor."""

    value: Any


class _Blob(NamedTuple):
    """Safetensors data at the end of a file."""

    entries: Mapping[str, Entry]
    starts: Mapping[str, Shape]


class Payloads:
    """Reads the archives of items.

    Args:
        storage: the files.
        sizes: bytes of each data file.
        faults: receives the problems.
    """

    def __init__(self, storage: Storage, sizes: Mapping[str, int], faults: Faults) -> None:
        self._storage = storage
        self._sizes = sizes
        self._faults = faults
        self._stencils: Stencils[_TensorArchive | _ObjectArchive] = Stencils(storage)
        self._objects: dict[Payload, Leaf] = {}
        self._blobs: dict[tuple[str, int], _Blob | None] = {}
        self._taken: dict[str, list[tuple[int, int, str]]] = {}
        self._repeated = 0
        self.checksums: list[Checksum] = []
        """What the archives say of the tensors in them."""

    def chunk(self, item: SavedItem, chunk: SavedChunk) -> Extent | QuantizedChunk | None:
        """Return where the bytes of a chunk lie; None if something is wrong with it."""
        payload = chunk.payload
        if payload is None or not self._inside(item.key, payload):
            return None
        match = self._stencils.match(payload)
        if match is None and not self._is_archive(payload):
            return self._in_blob(item, chunk, payload)
        archive = match.result if match else self._read(item.key, payload)
        self._take(item.key, payload.file, payload.offset, payload.offset + payload.length)
        if archive is None:
            return None
        if isinstance(archive, _ObjectArchive):
            self._fault(item.key, payload.file, f"its archive does not hold a tensor, but {described(archive.value)}")
            return None
        if isinstance(archive, QuantizedChunk):
            return archive if self._alike(item, chunk, payload, archive.dtype, archive.layout.shape) else None
        if match and match.crc32:
            offset, size = archive.stored
            self._note(payload, offset, size, match.crc32)
        return self._checked(item, chunk, payload, archive)

    def chunks(self, item: SavedItem, chunks: Sequence[SavedChunk]) -> list[Extent | QuantizedChunk | None]:
        """Return where the bytes of chunks lie; None for each with which something is wrong."""
        found: list[Extent | QuantizedChunk | None] = [None] * len(chunks)
        checksums: list[Sequence[Checksum]] = [()] * len(chunks)
        alike = _alike_chunks(chunks) if len(chunks) >= _MANY else {}
        own, self.checksums = self.checksums, []
        for at, chunk in enumerate(chunks):
            if found[at] is not None:
                continue
            found[at] = self.chunk(item, chunk)
            checksums[at], self.checksums = self.checksums, []
            # What was read now may be a stencil for those like it.
            others = alike.pop((chunk.payload.file, chunk.payload.length, chunk.shape), ()) if chunk.payload else ()
            if len(others) >= _MANY:
                self._find_alike(item, chunks, others[1:], found, checksums)
        own.extend(chain.from_iterable(checksums))
        self.checksums = own
        return found

    def _find_alike(
        self,
        item: SavedItem,
        chunks: Sequence[SavedChunk],
        which: Sequence[int],
        found: list[Extent | QuantizedChunk | None],
        checksums: list[Sequence[Checksum]],
    ) -> None:
        """Find the places and checksums of those chunks of one file, length and shape with which all is well.

        They are recognised together; whichever is not is left out, and is to be looked at by itself.
        """
        assert item.dtype is not None
        (file, _, length), shape = _payload(chunks[which[0]]), chunks[which[0]].shape
        key, code, size = item.key, item.dtype.code, self._sizes.get(file, 0)
        starts = [chunks[at].start for at in which]
        offsets = [_payload(chunks[at]).offset for at in which]
        if max(offsets) + length > size:
            inside = [at for at, offset in enumerate(offsets) if offset + length <= size]
            which, offsets = [which[at] for at in inside], [offsets[at] for at in inside]
            starts = [starts[at] for at in inside]
        if code in PACKED:
            starts = [logical(start, code) for start in starts]
        places = np.array(offsets, np.int64)
        taken = self._taken.setdefault(file, [])
        for archive, matching, crc32 in self._stencils.matches(file, length, offsets):
            if not isinstance(archive, _TensorArchive) or archive.repeated:
                continue
            if (archive.dtype, archive.shape) != (item.dtype.name, shape):
                continue
            place, (begin, stored) = archive.place, archive.stored
            here, rows = places[matching], matching.tolist()
            taken += zip(here.tolist(), (here + length).tolist(), repeat(key))
            chosen, begins = map(starts.__getitem__, rows), (here + place.offset).tolist()
            extents = map(Extent, chosen, repeat(place.shape), repeat(file), begins, repeat(place.strides))
            for at, extent in zip(map(which.__getitem__, rows), extents, strict=True):
                found[at] = extent
            if crc32 is None:
                continue
            begins, sums = (here + begin).tolist(), crc32.tolist()
            noted = zip(map(Checksum, repeat(file), begins, repeat(stored), sums, repeat(_WHAT)), strict=False)
            for at, crc, checksum in zip(map(which.__getitem__, rows), sums, noted, strict=True):
                if crc:
                    checksums[at] = checksum

    def leaf(self, item: SavedItem) -> Leaf | None:
        """Return what an object's archive holds; None if something is wrong with it.

        Items of equal value may share an archive, unlike tensors.
        """
        payload = item.payload
        if payload is None or not self._inside(item.key, payload):
            return None
        shared_leaf = self._objects.get(payload)
        if shared_leaf is not None:
            return replace(shared_leaf, path=item.path)
        match = self._stencils.match(payload)
        archive = match.result if match else self._read(item.key, payload)
        self._take(item.key, payload.file, payload.offset, payload.offset + payload.length)
        if archive is None:
            return None
        if isinstance(archive, QuantizedChunk):
            return Leaf(item.path, "tensor", archive)
        if isinstance(archive, _TensorArchive):
            return Leaf(item.path, "other", NOTHING, "a tensor that was saved as an object")
        value = archive.value
        if type(value) is Scalar or (type(value) in (int, float, bool) and number(value) is not None):
            leaf = Leaf(item.path, "number", value)
        else:
            leaf = Leaf(item.path, "other", value, described(value))
        self._objects[payload] = leaf
        return leaf

    def check_overlaps(self) -> None:
        """Refuse archives that share bytes: two items would be one."""
        for file, ranges in self._taken.items():
            ranges.sort()
            reached, holder = 0, ""
            for begin, end, key in ranges:
                if begin < reached:
                    message = f"its bytes {begin} to {end} overlap those of {holder!r}, which end at {reached}"
                    self._faults.add("OVERLAP", message, file, key)
                if end > reached:
                    reached, holder = end, key

    def _inside(self, key: str, payload: Payload) -> bool:
        """Check that a payload lies in its file; a file that is not there has been refused."""
        size = self._sizes.get(payload.file)
        if size is not None and payload.offset + payload.length > size:
            end = payload.offset + payload.length
            message = f"its bytes {payload.offset} to {end} lie outside the file, which has {size}"
            self._faults.add("CORRUPT", message, payload.file, key, _AGAIN)
            return False
        return size is not None

    def _is_archive(self, payload: Payload) -> bool:
        return self._storage.read(payload.file, payload.offset, min(len(LOCAL), payload.length)) == LOCAL

    def _read(self, key: str, payload: Payload) -> _TensorArchive | QuantizedChunk | _ObjectArchive | None:
        """Read an archive strictly."""
        try:
            saved = read_saved(self._storage, *payload)
        except TransaxleError as error:
            if error.exit_code == TransaxleError.exit_code:
                at = Where(payload.file, key)
                self._faults.extend(*(Refusal(each.code, each.message, at, each.hint) for each in error.refusals))
                return None
            raise
        archive = self._described(key, payload, saved)
        if isinstance(archive, _TensorArchive | _ObjectArchive) and self._is_archive(payload):
            self._stencils.learn(payload, archive)
        for checksum in saved.checksums:
            if checksum.what.startswith(_RECORD):
                self._note(payload, checksum.offset - payload.offset, checksum.size, checksum.crc32)
        return archive

    def _described(
        self, key: str, payload: Payload, saved: Saved
    ) -> _TensorArchive | QuantizedChunk | _ObjectArchive | None:
        value = saved.value
        if isinstance(value, Quantized):
            return self._quantized(key, payload, value)
        if not isinstance(value, TensorRef) or not isinstance(value.storage, StoredStorage):
            return _ObjectArchive(value)
        try:
            entry, repeated = place(key, value, payload.file)
        except ViewFault as fault:
            self._faults.add(fault.code, fault.message, payload.file, key, fault.hint)
            return None
        (extent,) = entry.extents
        base, stored = payload.offset, value.storage
        relative = Extent(extent.start, extent.shape, extent.file, extent.offset - base, extent.strides)
        dtype = value.dtype or stored.dtype
        return _TensorArchive(dtype.name, value.shape, relative, repeated, (stored.offset - base, stored.nbytes))

    def _quantized(self, key: str, payload: Payload, value: Quantized) -> QuantizedChunk | None:
        """Return the buffers of a quantized tensor; None if something is wrong with them."""
        parts: dict[str, Entry] = {}
        repeated = 0
        try:
            plain_layout = layout(value)
            for end, buffer in plain_layout.parts.items():
                entry, repeated_here = place(key + end, buffer.view, payload.file)
                parts[end] = entry if buffer.dtype is None else replace(entry, dtype=buffer.dtype)
                repeated += repeated_here
        except ViewFault as fault:
            self._faults.add(fault.code, fault.message, payload.file, key, fault.hint)
            return None
        return QuantizedChunk(plain_layout, parts, value.dtype.name) if self._is_held(key, payload, repeated) else None

    def _alike(self, item: SavedItem, chunk: SavedChunk, payload: Payload, dtype: str, shape: Shape) -> bool:
        """Compare an archive's tensor with what the metadata says of the chunk."""
        assert item.dtype is not None
        if dtype != item.dtype.name:
            message = f"the metadata says {item.dtype.name}, but the file holds {dtype}"
            self._faults.add("DTYPE_MISMATCH", message, payload.file, item.key)
            return False
        if shape != chunk.shape:
            message = f"its chunk is {list(chunk.shape)} in the metadata, but {list(shape)} in the file"
            self._faults.add("SHAPE_MISMATCH", message, payload.file, item.key)
            return False
        return True

    def _is_held(self, key: str, payload: Payload, repeated: int) -> bool:
        """Count bytes that are claimed and not there, and tell whether there are too many."""
        self._repeated += repeated
        if self._repeated > REPEATED:
            message = f"with strides of zero the files claim more than {REPEATED} bytes that they do not hold"
            self._fault(key, payload.file, message)
            return False
        return True

    def _checked(self, item: SavedItem, chunk: SavedChunk, payload: Payload, archive: _TensorArchive) -> Extent | None:
        """Return where an archive's tensor lies, if it is what the metadata says."""
        assert item.dtype is not None
        if not self._alike(item, chunk, payload, archive.dtype, archive.shape):
            return None
        if not self._is_held(item.key, payload, archive.repeated):
            return None
        extent = archive.place
        start = logical(chunk.start, item.dtype.code)
        return Extent(start, extent.shape, payload.file, payload.offset + extent.offset, extent.strides)

    def _in_blob(self, item: SavedItem, chunk: SavedChunk, payload: Payload) -> Extent | None:
        """Return where a chunk lies in the safetensors data that begins at its offset."""
        assert item.dtype is not None
        code = item.dtype.code
        size = nbytes(code, logical(chunk.shape, code))
        if payload.length != size:
            message = f"its {payload.length} bytes are not an archive, and safetensors data would have {size}"
            self._fault(item.key, payload.file, message)
            return None
        blob = self._blob(payload.file, payload.offset)
        if blob is None:
            return None
        entry, start = blob.entries.get(item.key), blob.starts.get(item.key)
        if entry is None:
            self._faults.add("INCOMPLETE", "the file does not hold this part of the tensor", payload.file, item.key)
            return None
        if start != logical(chunk.start, code):
            message = f"the file should hold the part at {list(chunk.start)}, but holds the one at {list(start or ())}"
            hint = "In this format torch writes only one part of a tensor to a file; the others are lost."
            self._faults.add("INCOMPLETE", message, payload.file, item.key, hint)
            return None
        if entry.dtype != code:
            message = f"the metadata says {code}, but the file holds {entry.dtype}"
            self._faults.add("DTYPE_MISMATCH", message, payload.file, item.key)
            return None
        if entry.shape != logical(chunk.shape, code):
            message = f"its chunk is {list(chunk.shape)} in the metadata, but {list(entry.shape)} in the file"
            self._faults.add("SHAPE_MISMATCH", message, payload.file, item.key)
            return None
        (in_file,) = entry.extents
        return Extent(start, in_file.shape, in_file.file, in_file.offset)

    def _blob(self, file: str, begin: int) -> _Blob | None:
        """Read safetensors data that reaches from its first byte to the end of a file."""
        read_before = self._blobs.get((file, begin))
        if read_before is not None or (file, begin) in self._blobs:
            return read_before
        blob = None
        try:
            header = read_header(self._storage, file, begin)
        except TransaxleError as error:
            if error.exit_code != TransaxleError.exit_code:
                raise
            self._faults.extend(*error.refusals)
        else:
            placed = part_starts(header.entries, header.metadata, file, self._faults)
            blob = None if placed is None else _Blob(header.entries, placed)
            self._take("", file, begin, self._sizes[file])
        self._blobs[file, begin] = blob
        return blob

    def _take(self, key: str, file: str, begin: int, end: int) -> None:
        self._taken.setdefault(file, []).append((begin, end, key))

    def _note(self, payload: Payload, offset: int, size: int, crc32: int) -> None:
        self.checksums.append(Checksum(payload.file, payload.offset + offset, size, crc32, _WHAT))

    def _fault(self, key: str, file: str, message: str) -> None:
        self._faults.add("CORRUPT", message, file, key)


def _alike_chunks(chunks: Sequence[SavedChunk]) -> dict[tuple[str, int, Shape], list[int]]:
    """Return the numbers of the chunks that have a place, by their file, its bytes, and their shape."""
    if None not in map(_place, chunks):
        shapes = list(map(_shape, chunks))
        files, _, lengths = zip(*map(_place, chunks), strict=True)
        kinds = files, lengths, shapes
        if all(kind.count(kind[0]) == len(chunks) for kind in kinds):  # the usual case, of very many
            return {(files[0], lengths[0], shapes[0]): list(range(len(chunks)))}
    alike: dict[tuple[str, int, Shape], list[int]] = {}
    for at, (_, shape, payload) in enumerate(chunks):
        if payload is not None:
            alike.setdefault((payload.file, payload.length, shape), []).append(at)
    return alike


_shape: Callable[[SavedChunk], Shape] = attrgetter("shape")
_place: Callable[[SavedChunk], Payload | None] = attrgetter("payload")


def _payload(chunk: SavedChunk) -> Payload:
    assert chunk.payload is not None
    return chunk.payload


_WHAT = "a chunk"
_RECORD = f"record {DATA}"


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
