"""The bytes behind each item: small torch archives, thousands to a file, or safetensors data at its end.

Each archive must be read, for what the metadata says of a chunk may be a lie: its type, its shape and the place of its
bytes are taken from the archive itself and then compared. Reading one takes a while, and a checkpoint may have a
hundred thousand. But those of one shape are alike to the last byte, outside of the tensor, its checksum and a serial
number. So a strictly read archive serves as a stencil: whatever matches it is read as well.

An archive is recognised by its skeleton, everything in it but the tensor, checksums and serial number. One that equals
an archive read before, byte for byte outside of these, describes the same tensor. The blanked bytes describe no place,
and both copies of the tensor's checksum must still agree.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise, repeat
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from transaxle.errors import Faults, Refusal, TransaxleError, Where
from transaxle.formats.catalog import PACKED, Checksum, Entry, Extent, Shape, logical, nbytes, number
from transaxle.formats.dcp.metadata import Payload, SavedChunk, SavedItem
from transaxle.formats.flattened_state import described
from transaxle.formats.pickled.descriptors import NOTHING, Quantized, Scalar, TensorRef
from transaxle.formats.safetensors import part_starts, read_header
from transaxle.formats.storage.copier import Steps
from transaxle.formats.storage.storage import NearReads, Storage
from transaxle.formats.torch_file.archive import (
    CENTRAL_FORM,
    END_FORM,
    HAS_DESCRIPTOR,
    LOCAL,
    MAX16,
    MAX32,
    Archive,
    FileWindow,
    read_archive,
)
from transaxle.formats.torch_file.quantized_tensors import PlainLayout, layout
from transaxle.formats.torch_file.saved import DATA, REPEATED, Saved, StoredStorage, ViewFault, place, read_saved
from transaxle.formats.training_state import Leaf

_SERIAL = ".data/serialization_id"
_MOST = 10_000
"""Cap on the skeletons that are remembered; a checkpoint has a few hundred."""
_MOST_ALIKE = 8
"""Cap on the arrangements of one length that are tried."""
_WHOLE = 1 << 14
"""Archives up to this size are read in one piece."""
_BLOCK = 1 << 18
"""Bytes read at a time of archives that follow one another, and bytes of skeletons that are compared at a time."""
_FEW = 4
"""Contents that are looked for among many archives at a time; others are recognised one by one."""
_CRC = struct.Struct("<I")
_CRC_IN_CENTRAL, _CRC_IN_LOCAL, _CRC_IN_DESCRIPTOR = 16, 14, 4

Result = TypeVar("Result")

_MANY = 8
"""Chunks that are recognised together."""
_AGAIN = "Copy the file again, or save the checkpoint again."


class _Arrangement(NamedTuple):
    """Positions of the parts of an archive, in the skeleton (head and tail joined)."""

    head: int
    """Bytes before the tensor."""
    tail: int
    """First byte after it, in the archive."""
    kept: tuple[tuple[int, int], ...]
    """Spans that may not differ."""
    checksums: tuple[tuple[int, int], ...]
    """Positions of checksums that occur twice; the tensor's comes first."""


class Match(NamedTuple, Generic[Result]):
    """An archive that was recognised."""

    result: Result
    """The contents of the archive that it equals."""
    crc32: int
    """Checksum of its own tensor; 0 if it has no tensor or no checksum."""


class Matches(NamedTuple, Generic[Result]):
    """Archives that were recognised, and equal the same one."""

    result: Result
    """The contents of that."""
    which: NDArray[np.intp]
    """Their positions among those that were looked at."""
    crc32: NDArray[np.uint32] | None
    """Checksum of each one's own tensor; None if they have no tensor or no checksum."""


class Stencils(Generic[Result]):
    """The skeletons of archives that were read, with their contents."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._read = NearReads(storage).read
        self._by_length: dict[int, list[tuple[_Arrangement, dict[bytes, Result]]]] = {}
        self._count = 0
        self._room: NDArray[np.uint8] = np.empty(0, np.uint8)

    def match(self, payload: Payload) -> Match[Result] | None:
        """Recognise an archive; None if it must be read."""
        for arrangement, known in self._by_length.get(payload.length, ()):
            skeleton = self._skeleton(payload, arrangement)
            result = known.get(_blanked(skeleton, arrangement))
            if result is None:
                continue
            for first, second in arrangement.checksums:
                if skeleton[first : first + _CRC.size] != skeleton[second : second + _CRC.size]:
                    break
            else:
                has_checksum = arrangement.tail > arrangement.head and arrangement.checksums
                return Match(result, _CRC.unpack_from(skeleton, arrangement.checksums[0][0])[0] if has_checksum else 0)
        return None

    def matches(self, file: str, length: int, offsets: Sequence[int]) -> Iterator[Matches[Result]]:
        """Recognise archives of one length, together; those that are not among the matches are unlike the others.

        Args:
            file: its name.
            length: bytes of each archive.
            offsets: where they begin.
        """
        for arrangement, known in self._by_length.get(length, ())[:1]:
            width = length - (arrangement.tail - arrangement.head)
            rows = max(_BLOCK // max(width, 1), 1)
            for begin in range(0, len(offsets), rows):
                some = offsets[begin : begin + rows]
                for match in _matches(self._skeletons(file, length, some, arrangement), arrangement, known):
                    yield match._replace(which=match.which + begin)

    def learn(self, payload: Payload, result: Result) -> None:
        """Remember an archive that was read without any problem."""
        archive = read_archive(FileWindow(self._storage, payload.file, payload.offset, payload.length))
        arrangement = _arranged(archive)
        if arrangement is None:
            return
        if self._count >= _MOST:
            self._by_length.clear()
            self._count = 0
        alike = self._by_length.setdefault(payload.length, [])
        known = next((known for other, known in alike if other == arrangement), None)
        if known is None:
            known = {}
            alike.insert(0, (arrangement, known))
            del alike[_MOST_ALIKE:]
        known[_blanked(self._skeleton(payload, arrangement), arrangement)] = result
        self._count += 1

    def _skeleton(self, payload: Payload, arrangement: _Arrangement) -> bytes:
        file, offset, length = payload
        head, tail = arrangement.head, arrangement.tail
        if length <= _WHOLE:
            data = self._read(file, offset, length)
            return data[:head] + data[tail:]
        read = self._read
        return read(file, offset, head) + read(file, offset + tail, length - tail)

    def _skeletons(
        self, file: str, length: int, offsets: Sequence[int], arrangement: _Arrangement
    ) -> NDArray[np.uint8]:
        """Return the skeletons of archives, one a row."""
        if length > _WHOLE:
            return self._distant_skeletons(file, length, offsets, arrangement)
        head, tail = arrangement.head, arrangement.tail
        rows = np.empty((len(offsets), length - (tail - head)), np.uint8)
        places = np.array(offsets, np.int64)
        gaps = np.diff(places) - length
        ends = [*(((gaps < 0) | (gaps > length)).nonzero()[0] + 1).tolist(), len(places)]
        first = 0
        while first < len(places):
            begin, stop = offsets[first], ends[bisect_right(ends, first)]
            stop = first + int(places[first:stop].searchsorted(begin + _BLOCK))
            size = offsets[stop - 1] + length - begin
            if size > len(self._room):  # the same memory for all: the system gives new memory by the page
                self._room = np.empty(size, np.uint8)
            data = self._room[:size]
            self._storage.read_into(file, begin, data.data)
            archives = _cut_out(data, length, places[first:stop] - begin)
            rows[first:stop, :head], rows[first:stop, head:] = archives[:, :head], archives[:, tail:]
            first = stop
        return rows

    def _distant_skeletons(
        self, file: str, length: int, offsets: Sequence[int], arrangement: _Arrangement
    ) -> NDArray[np.uint8]:
        """Return the skeletons of archives too long to be read whole; those at even steps are few calls."""
        head, tail = arrangement.head, arrangement.tail
        width = length - (tail - head)
        rows = np.empty((len(offsets), width), np.uint8)
        for first, count, step in _progressions(offsets):
            room = rows[first : first + count].reshape(-1).data
            begin, end = offsets[first], offsets[first + count - 1]
            reads = [(begin, 0, head, count), (begin + tail, head, length - tail, count)]
            if step == length:  # a tail and the next head lie side by side, in the file and here
                middle = (begin + tail, head, width, count - 1)
                reads = [(begin, 0, head, 1), middle, (end + tail, (count - 1) * width + head, length - tail, 1)]
            with Steps() as steps:
                for offset, into, size, times in reads:
                    self._storage.add_read(steps, file, offset, room[into:], size, ((times, step, width),))
                steps.run()
        return rows


def _cut_out(data: NDArray[np.uint8], length: int, offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return so many bytes from each of these offsets, one a row; those at even steps are not copied."""
    steps = np.diff(offsets)
    if (steps == steps[:1]).all():
        return np.ndarray((len(offsets), length), np.uint8, data, strides=(int(steps[0]) if len(steps) else length, 1))
    return sliding_window_view(data, length)[offsets]


def _progressions(offsets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the stretches of numbers that grow by even steps: the first one's position, how many, and the step."""
    first = 0
    while first < len(offsets):
        stop = first + 1
        step = max(offsets[stop] - offsets[first], 0) if stop < len(offsets) else 0
        while step and stop < len(offsets) and offsets[stop] - offsets[stop - 1] == step:
            stop += 1
        yield first, stop - first, step
        first = stop


def _matches(
    skeletons: NDArray[np.uint8], arrangement: _Arrangement, known: dict[bytes, Result]
) -> Iterator[Matches[Result]]:
    """Find out which skeletons, one a row, are those of contents that are known."""
    agree = np.ones(len(skeletons), bool)
    for first, second in arrangement.checksums:
        agree &= _numbers(skeletons, first) == _numbers(skeletons, second)
    has_checksum = arrangement.tail > arrangement.head and bool(arrangement.checksums)
    left = agree
    for _ in range(_FEW):
        if not left.any():
            return
        one = skeletons[int(left.argmax())]
        alike = left.copy()
        if not _are_all(skeletons, one, arrangement):
            for start, stop in arrangement.kept:
                alike &= (skeletons[:, start:stop] == one[start:stop]).all(axis=1)
        result = known.get(_blanked(one.tobytes(), arrangement))
        which = alike.nonzero()[0]
        if result is not None:
            crc32 = _numbers(skeletons, arrangement.checksums[0][0])[which] if has_checksum else None
            yield Matches(result, which, crc32)
        left = left & ~alike


def _numbers(skeletons: NDArray[np.uint8], at: int) -> NDArray[np.uint32]:
    """Return the number of a checksum's size that begins at a byte of each skeleton."""
    return np.ndarray(len(skeletons), "<u4", skeletons, at, skeletons.strides[:1])


def _are_all(skeletons: NDArray[np.uint8], one: NDArray[np.uint8], arrangement: _Arrangement) -> bool:
    """Tell whether all skeletons are like one of them. Comparing bytes takes a tenth of the time of arrays."""
    filled = skeletons.copy()
    for (_, start), (stop, _) in pairwise(arrangement.kept):
        filled[:, start:stop] = one[start:stop]
    return filled.tobytes() == one.tobytes() * len(filled)


def _blanked(skeleton: bytes, arrangement: _Arrangement) -> bytes:
    """Return what is left of a skeleton without the spans that may differ: these have their places in all of them."""
    return b"".join([skeleton[start:stop] for start, stop in arrangement.kept])


def _arranged(archive: Archive) -> _Arrangement | None:
    """Return the arrangement of an archive; None if it has several storages, or needs zip64."""
    tensors = [record for name, record in archive.records.items() if name.startswith(DATA)]
    if len(tensors) > 1:
        return None
    size = archive.window.size
    head, tail = (tensors[0].offset, tensors[0].offset + tensors[0].size) if tensors else (size, size)

    def inside(position: int) -> int:
        return position if position < tail else position - (tail - head)

    entries = list(_directory(archive))
    if not entries:
        return None
    blanks: list[tuple[int, int]] = []
    checksums: list[tuple[int, int]] = []
    serial = archive.records.get(_SERIAL)
    for record in (*tensors, *([serial] if serial else [])):
        for name, central, header, flags in entries:
            if name == record.name:
                descriptor_checksum = record.offset + record.size + _CRC_IN_DESCRIPTOR
                pair = (
                    inside(central),
                    inside(descriptor_checksum if flags & HAS_DESCRIPTOR else header + _CRC_IN_LOCAL),
                )
                blanks.extend((at, at + _CRC.size) for at in pair)
                checksums.append(pair)
    if serial:
        blanks.append((inside(serial.offset), inside(serial.offset) + serial.size))
    edges = sorted(blanks)
    kept = zip([0, *(stop for _, stop in edges)], [*(start for start, _ in edges), size - (tail - head)], strict=True)
    return _Arrangement(head, tail, tuple(kept), tuple(checksums))


def _directory(archive: Archive) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, position of the checksum, position of the header, and flags of each entry of the directory."""
    area = archive.window
    *_, count, size, begin, _ = END_FORM.unpack(area.read(area.size - END_FORM.size, END_FORM.size))
    if MAX32 in (size, begin) or count == MAX16:
        return
    text = area.read(begin, size)
    at = 0
    for _ in range(count):
        fields = CENTRAL_FORM.unpack_from(text, at)
        fixed, length, extra, header = fields[2], fields[6], fields[7], fields[-1]
        path = text[at + CENTRAL_FORM.size : at + CENTRAL_FORM.size + length].decode()
        yield path.partition("/")[2], begin + at + _CRC_IN_CENTRAL, header, int.from_bytes(fixed[2:4], "little")
        at += CENTRAL_FORM.size + length + extra


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
