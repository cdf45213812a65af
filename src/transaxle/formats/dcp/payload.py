"""Reads the stored bytes of DCP items, which are small torch archives, thousands in one file, or safetensors data at a
file's end.

The metadata may be wrong about a chunk, so every archive must be read: dtype, shape and byte offset of a chunk's tensor
come from the chunk's archive and are then compared with the metadata. Reading one archive with all checks is slow, and
a checkpoint may have a hundred thousand archives. Reading every archive with all checks is not necessary, because the
archives of two tensors of one shape differ only in the tensor's bytes, the tensor's checksum and a serial number. An
archive that was read with all checks is therefore used as a stencil, with which similar archives are compared.

The frame of an archive is its bytes around the tensor (head and tail), and its skeleton is the frame without checksums
and serial number. If two archives have the same skeleton, byte for byte, their tensors have the same dtype, shape and
offset, because checksums and serial numbers do not affect dtype, shape and offset. An archive contains the tensor's
checksum twice, and these two numbers must still be equal.
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
from transaxle.formats.catalog import PACKED, Checksum, Entry, Extent, Shape, elements_shape, nbytes, number
from transaxle.formats.dcp.metadata import Payload, SavedChunk, SavedItem
from transaxle.formats.flattened_state import describe
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
_MAX_SKELETONS = 10_000
"""Maximum number of archive skeletons (an archive's bytes without tensor, checksums and serial number) that are
remembered; a usual checkpoint has a few hundred.
"""
_MAX_ARRANGEMENTS = 8
"""Maximum number of arrangements (see `_Arrangement`) that are tried for archives of one length."""
_MAX_WHOLE_READ = 1 << 14
"""Size in bytes up to which an archive is read whole; of a larger archive only the bytes before and after the tensor
are read."""
_BLOCK = 1 << 18
"""Batch size in bytes: for reading neighbouring archives, and for comparing skeletons."""
_MAX_CONTENTS = 4
"""Maximum number of skeletons that are looked for in one batch; archives with further skeletons are matched one
by one.
"""
_CRC = struct.Struct("<I")
_CRC_IN_CENTRAL, _CRC_IN_LOCAL, _CRC_IN_DESCRIPTOR = 16, 14, 4

Result = TypeVar("Result")

_MIN_BATCH = 8
"""Minimum number of similar chunks that are matched as a batch rather than one by one."""
_AGAIN = "Copy the file again, or save the checkpoint again."


class _Arrangement(NamedTuple):
    """How an archive is divided: where its tensor is, and which of the bytes around the tensor must match.

    The bytes before and after the tensor (head and tail), joined, are the archive's frame. `fixed_spans` and
    `checksums` are positions in the frame (the bytes of an archive around its tensor).
    """

    head: int
    """Number of bytes of the archive before the tensor."""
    tail: int
    """Offset in the archive of the first byte after the tensor."""
    fixed_spans: tuple[tuple[int, int], ...]
    """Spans (start, stop) of the frame (the bytes around the tensor) whose bytes must be equal in all archives of this
    arrangement."""
    checksums: tuple[tuple[int, int], ...]
    """For each CRC-32, the positions in the frame of its two copies; the tensor's CRC-32 comes first."""


class Match(NamedTuple, Generic[Result]):
    """An archive that has the same skeleton as an archive that was read before."""

    result: Result
    """Contents of the earlier archive with the same skeleton."""
    crc32: int
    """CRC-32 of this archive's tensor; 0 if the archive has no tensor or no checksum."""


class Matches(NamedTuple, Generic[Result]):
    """Archives of a batch that all have the same known skeleton."""

    result: Result
    """Contents of the earlier archive with this skeleton."""
    which: NDArray[np.intp]
    """Positions of the matching archives in the batch."""
    crc32: NDArray[np.uint32] | None
    """CRC-32 of each matching archive's tensor; None if the archives have no tensor or no checksum."""


class Stencils(Generic[Result]):
    """Remembers the skeletons of archives that were read with all checks, together with the archives' contents."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._read = NearReads(storage).read
        self._by_length: dict[int, list[tuple[_Arrangement, dict[bytes, Result]]]] = {}
        self._count = 0
        self._buffer: NDArray[np.uint8] = np.empty(0, np.uint8)

    def match(self, payload: Payload) -> Match[Result] | None:
        """Return the contents of an archive if its skeleton is known; otherwise return None, and the archive must be
        read.
        """
        for arrangement, contents in self._by_length.get(payload.length, ()):
            frame = self._frame(payload, arrangement)
            result = contents.get(_skeleton_of(frame, arrangement))
            if result is None:
                continue
            for first, second in arrangement.checksums:
                if frame[first : first + _CRC.size] != frame[second : second + _CRC.size]:
                    break
            else:
                has_checksum = arrangement.tail > arrangement.head and arrangement.checksums
                return Match(result, _CRC.unpack_from(frame, arrangement.checksums[0][0])[0] if has_checksum else 0)
        return None

    def matches(self, file: str, length: int, offsets: Sequence[int]) -> Iterator[Matches[Result]]:
        """Match many archives of one length at once; an archive that is in none of the returned matches must be read by
        itself.

        Args:
            file: name of the file that contains the archives.
            length: size of each archive in bytes.
            offsets: offset of each archive in the file.
        """
        for arrangement, contents in self._by_length.get(length, ())[:1]:
            width = length - (arrangement.tail - arrangement.head)
            rows = max(_BLOCK // max(width, 1), 1)
            for begin in range(0, len(offsets), rows):
                batch = offsets[begin : begin + rows]
                for match in _matches(self._frames(file, length, batch, arrangement), arrangement, contents):
                    yield match._replace(which=match.which + begin)

    def learn(self, payload: Payload, result: Result) -> None:
        """Remember the skeleton of an archive that was read without any problem."""
        archive = read_archive(FileWindow(self._storage, payload.file, payload.offset, payload.length))
        arrangement = _arrangement_of(archive)
        if arrangement is None:
            return
        if self._count >= _MAX_SKELETONS:
            self._by_length.clear()
            self._count = 0
        arrangements = self._by_length.setdefault(payload.length, [])
        contents = next((contents for other, contents in arrangements if other == arrangement), None)
        if contents is None:
            contents = {}
            arrangements.insert(0, (arrangement, contents))
            del arrangements[_MAX_ARRANGEMENTS:]
        contents[_skeleton_of(self._frame(payload, arrangement), arrangement)] = result
        self._count += 1

    def _frame(self, payload: Payload, arrangement: _Arrangement) -> bytes:
        file, offset, length = payload
        head, tail = arrangement.head, arrangement.tail
        if length <= _MAX_WHOLE_READ:
            data = self._read(file, offset, length)
            return data[:head] + data[tail:]
        read = self._read
        return read(file, offset, head) + read(file, offset + tail, length - tail)

    def _frames(self, file: str, length: int, offsets: Sequence[int], arrangement: _Arrangement) -> NDArray[np.uint8]:
        """Read the frame (the bytes around the tensor) of each archive; return an array with one row per archive."""
        if length > _MAX_WHOLE_READ:
            return self._distant_frames(file, length, offsets, arrangement)
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
            if size > len(self._buffer):  # the array is reused, because fresh memory costs a page fault for each page
                self._buffer = np.empty(size, np.uint8)
            data = self._buffer[:size]
            self._storage.read_into(file, begin, data.data)
            archives = _cut_out(data, length, places[first:stop] - begin)
            rows[first:stop, :head], rows[first:stop, head:] = archives[:, :head], archives[:, tail:]
            first = stop
        return rows

    def _distant_frames(
        self, file: str, length: int, offsets: Sequence[int], arrangement: _Arrangement
    ) -> NDArray[np.uint8]:
        """Read the frames (the bytes around the tensor) of long archives, one row per archive; if the archives are
        evenly spaced, few read calls suffice.
        """
        head, tail = arrangement.head, arrangement.tail
        width = length - (tail - head)
        rows = np.empty((len(offsets), width), np.uint8)
        for first, count, step in _progressions(offsets):
            buffer = rows[first : first + count].reshape(-1).data
            begin, end = offsets[first], offsets[first + count - 1]
            reads = [(begin, 0, head, count), (begin + tail, head, length - tail, count)]
            # the tail of an archive and the head of the next archive are adjacent, both in the file and in `rows`
            if step == length:
                middle = (begin + tail, head, width, count - 1)
                reads = [(begin, 0, head, 1), middle, (end + tail, (count - 1) * width + head, length - tail, 1)]
            with Steps() as steps:
                for offset, into, size, times in reads:
                    self._storage.add_read(steps, file, offset, buffer[into:], size, ((times, step, width),))
                steps.run()
        return rows


def _cut_out(data: NDArray[np.uint8], length: int, offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return `length` bytes from each offset of `data`, one row per offset; if offsets are evenly spaced, nothing is
    copied.
    """
    steps = np.diff(offsets)
    if (steps == steps[:1]).all():
        return np.ndarray((len(offsets), length), np.uint8, data, strides=(int(steps[0]) if len(steps) else length, 1))
    return sliding_window_view(data, length)[offsets]


def _progressions(offsets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Split offsets into arithmetic progressions; yield for each progression the position of its first offset, its
    count and its step.
    """
    first = 0
    while first < len(offsets):
        stop = first + 1
        step = max(offsets[stop] - offsets[first], 0) if stop < len(offsets) else 0
        while step and stop < len(offsets) and offsets[stop] - offsets[stop - 1] == step:
            stop += 1
        yield first, stop - first, step
        first = stop


def _matches(
    frames: NDArray[np.uint8], arrangement: _Arrangement, contents: dict[bytes, Result]
) -> Iterator[Matches[Result]]:
    """Yield the groups of archives that have a known skeleton.

    Args:
        frames: the bytes around the tensor of each archive, one row per archive.
        arrangement: how the archives are divided.
        contents: known skeleton -> contents of the archive.
    """
    agree = np.ones(len(frames), bool)
    for first, second in arrangement.checksums:
        agree &= _numbers(frames, first) == _numbers(frames, second)
    has_checksum = arrangement.tail > arrangement.head and bool(arrangement.checksums)
    unmatched = agree
    for _ in range(_MAX_CONTENTS):
        if not unmatched.any():
            return
        model = frames[int(unmatched.argmax())]
        alike = unmatched.copy()
        if not _are_all(frames, model, arrangement):
            for start, stop in arrangement.fixed_spans:
                alike &= (frames[:, start:stop] == model[start:stop]).all(axis=1)
        result = contents.get(_skeleton_of(model.tobytes(), arrangement))
        which = alike.nonzero()[0]
        if result is not None:
            crc32 = _numbers(frames, arrangement.checksums[0][0])[which] if has_checksum else None
            yield Matches(result, which, crc32)
        unmatched = unmatched & ~alike


def _numbers(frames: NDArray[np.uint8], at: int) -> NDArray[np.uint32]:
    """Return the 32-bit number at one byte position of each row."""
    return np.ndarray(len(frames), "<u4", frames, at, frames.strides[:1])


def _are_all(frames: NDArray[np.uint8], model: NDArray[np.uint8], arrangement: _Arrangement) -> bool:
    """Return whether the frames in all rows have the same skeleton as the frame `model`."""
    # frames are compared as bytes objects, which takes a tenth of the time that comparing arrays takes
    filled = frames.copy()
    for (_, start), (stop, _) in pairwise(arrangement.fixed_spans):
        filled[:, start:stop] = model[start:stop]
    return filled.tobytes() == model.tobytes() * len(filled)


def _skeleton_of(frame: bytes, arrangement: _Arrangement) -> bytes:
    """Return the skeleton of a frame (the bytes of an archive around its tensor): the frame without checksums and
    serial number.
    """
    return b"".join([frame[start:stop] for start, stop in arrangement.fixed_spans])


def _arrangement_of(archive: Archive) -> _Arrangement | None:
    """Return the arrangement of an archive; None if the archive has several storages, or needs zip64."""
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
    blank_spans = sorted(blanks)
    begins, ends = [0, *(stop for _, stop in blank_spans)], [*(start for start, _ in blank_spans), size - (tail - head)]
    return _Arrangement(head, tail, tuple(zip(begins, ends, strict=True)), tuple(checksums))


def _directory(archive: Archive) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, position of the checksum, position of the local header, flags) of each entry in the zip central
    directory.
    """
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
    """Contents of an archive with a single dense tensor."""

    dtype: str
    """torch's name of the tensor's dtype."""
    shape: Shape
    """Shape of the tensor in torch's elements."""
    place: Extent
    """Extent of the tensor in elements; its offset counts from the archive's first byte."""
    repeated: int
    """Number of the tensor's bytes that are not stored, because strides of zero repeat stored bytes."""
    stored: tuple[int, int]
    """Offset of the tensor's storage from the archive's first byte, and size of the storage in bytes."""


class QuantizedChunk(NamedTuple):
    """A chunk of a quantized tensor: an archive with codes and scales (see `formats.torch_file.quantized_tensors`)."""

    layout: PlainLayout
    """How the tensor's values are computed from its buffers."""
    parts: Mapping[str, Entry]
    """Suffix of the tensor's name -> catalog entry of the buffer with this suffix, for this chunk only."""
    dtype: str
    """torch's name of the dtype that the tensor reports, such as `bfloat16`."""


class _ObjectArchive(NamedTuple):
    """Contents of an archive without a tensor."""

    value: Any


class _Blob(NamedTuple):
    """Safetensors data at the end of a data file: the tensors there, each with the index of its first element in the
    whole tensor.
    """

    entries: Mapping[str, Entry]
    starts: Mapping[str, Shape]


class Payloads:
    """Reads the archives of DCP items, and checks them against the metadata.

    Args:
        storage: storage that reads the folder's files.
        sizes: file name -> size of the data file in bytes.
        faults: list of faults, to which every problem is added, with file and item.
    """

    def __init__(self, storage: Storage, sizes: Mapping[str, int], faults: Faults) -> None:
        self._storage = storage
        self._sizes = sizes
        self._faults = faults
        self._stencils: Stencils[_TensorArchive | _ObjectArchive] = Stencils(storage)
        self._objects: dict[Payload, Leaf] = {}
        self._blobs: dict[tuple[str, int], _Blob | None] = {}
        self._occupied: dict[str, list[tuple[int, int, str]]] = {}
        self._repeated = 0
        self.checksums: list[Checksum] = []
        """CRC-32 of each tensor's stored bytes, as the archives state it."""

    def chunk(self, item: SavedItem, chunk: SavedChunk) -> Extent | QuantizedChunk | None:
        """Return where a chunk's bytes are; if the chunk has a problem, add a fault and return None."""
        payload = chunk.payload
        if payload is None or not self._inside(item.key, payload):
            return None
        match = self._stencils.match(payload)
        if match is None and not self._is_archive(payload):
            return self._in_blob(item, chunk, payload)
        archive = match.result if match else self._read(item.key, payload)
        self._occupy(item.key, payload.file, payload.offset, payload.offset + payload.length)
        if archive is None:
            return None
        if isinstance(archive, _ObjectArchive):
            self._fault(item.key, payload.file, f"its archive does not hold a tensor, but {describe(archive.value)}")
            return None
        if isinstance(archive, QuantizedChunk):
            return archive if self._agrees(item, chunk, payload, archive.dtype, archive.layout.shape) else None
        if match and match.crc32:
            offset, size = archive.stored
            self._note(payload, offset, size, match.crc32)
        return self._extent(item, chunk, payload, archive)

    def chunks(self, item: SavedItem, chunks: Sequence[SavedChunk]) -> list[Extent | QuantizedChunk | None]:
        """Return where each chunk's bytes are; for a chunk with a problem, add a fault and return None."""
        places: list[Extent | QuantizedChunk | None] = [None] * len(chunks)
        checksums: list[Sequence[Checksum]] = [()] * len(chunks)
        similar_chunks = _similar_chunks(chunks) if len(chunks) >= _MIN_BATCH else {}
        earlier_checksums, self.checksums = self.checksums, []
        for at, chunk in enumerate(chunks):
            if places[at] is not None:
                continue
            places[at] = self.chunk(item, chunk)
            checksums[at], self.checksums = self.checksums, []
            # The archive that was read last may be a stencil for the remaining similar archives.
            similar = (
                similar_chunks.pop((chunk.payload.file, chunk.payload.length, chunk.shape), ()) if chunk.payload else ()
            )
            if len(similar) >= _MIN_BATCH:
                self._match_batch(item, chunks, similar[1:], places, checksums)
        earlier_checksums.extend(chain.from_iterable(checksums))
        self.checksums = earlier_checksums
        return places

    def _match_batch(
        self,
        item: SavedItem,
        chunks: Sequence[SavedChunk],
        which: Sequence[int],
        places: list[Extent | QuantizedChunk | None],
        checksums: list[Sequence[Checksum]],
    ) -> None:
        """Match chunks with the same file, length and shape in one batch.

        Args:
            item: the tensor of the chunks.
            chunks: all chunks of the tensor.
            which: positions in `chunks` of the chunks to match in this batch.
            places: list, to which the place of each matching chunk's bytes is written; a chunk that does not match must
                be read by itself.
            checksums: list, to which the checksum of each matching chunk is written.
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
            starts = [elements_shape(start, code) for start in starts]
        archive_offsets = np.array(offsets, np.int64)
        occupied_ranges = self._occupied.setdefault(file, [])
        for archive, matching, crc32 in self._stencils.matches(file, length, offsets):
            if not isinstance(archive, _TensorArchive) or archive.repeated:
                continue
            if (archive.dtype, archive.shape) != (item.dtype.name, shape):
                continue
            extent_in_archive, (begin, storage_bytes) = archive.place, archive.stored
            matching_offsets, rows = archive_offsets[matching], matching.tolist()
            occupied_ranges += zip(matching_offsets.tolist(), (matching_offsets + length).tolist(), repeat(key))
            extent_starts = map(starts.__getitem__, rows)
            begins = (matching_offsets + extent_in_archive.offset).tolist()
            sizes, strides = repeat(extent_in_archive.shape), repeat(extent_in_archive.strides)
            extents = map(Extent, extent_starts, sizes, repeat(file), begins, strides)
            for at, extent in zip(map(which.__getitem__, rows), extents, strict=True):
                places[at] = extent
            if crc32 is None:
                continue
            begins, sums = (matching_offsets + begin).tolist(), crc32.tolist()
            new_checksums = zip(
                map(Checksum, repeat(file), begins, repeat(storage_bytes), sums, repeat(_WHAT)), strict=False
            )
            for at, crc, checksum in zip(map(which.__getitem__, rows), sums, new_checksums, strict=True):
                if crc:
                    checksums[at] = checksum

    def leaf(self, item: SavedItem) -> Leaf | None:
        """Return the value of an item that is an object; if the object's archive has a problem, add a fault and return
        None.

        Two objects of equal value may share an archive; two tensors may not.
        """
        payload = item.payload
        if payload is None or not self._inside(item.key, payload):
            return None
        shared_leaf = self._objects.get(payload)
        if shared_leaf is not None:
            return replace(shared_leaf, path=item.path)
        match = self._stencils.match(payload)
        archive = match.result if match else self._read(item.key, payload)
        self._occupy(item.key, payload.file, payload.offset, payload.offset + payload.length)
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
            leaf = Leaf(item.path, "other", value, describe(value))
        self._objects[payload] = leaf
        return leaf

    def check_overlaps(self) -> None:
        """Add a fault for each archive whose byte range overlaps an earlier archive's."""
        for file, ranges in self._occupied.items():
            ranges.sort()
            reached, holder = 0, ""
            for begin, end, key in ranges:
                if begin < reached:
                    message = f"its bytes {begin} to {end} overlap those of {holder!r}, which end at {reached}"
                    self._faults.add("OVERLAP", message, file, key)
                if end > reached:
                    reached, holder = end, key

    def _inside(self, key: str, payload: Payload) -> bool:
        """Return whether a byte range is inside its file. If the file is too short, add a fault; a missing file already
        has a fault.
        """
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
        """Read an archive with all checks, and remember its skeleton; if the archive has problems, add faults and
        return None.
        """
        try:
            saved = read_saved(self._storage, *payload)
        except TransaxleError as error:
            if error.exit_code == TransaxleError.exit_code:
                at = Where(payload.file, key)
                self._faults.extend(*(Refusal(each.code, each.message, at, each.hint) for each in error.refusals))
                return None
            raise
        archive = self._classify(key, payload, saved)
        if isinstance(archive, _TensorArchive | _ObjectArchive) and self._is_archive(payload):
            self._stencils.learn(payload, archive)
        for checksum in saved.checksums:
            if checksum.what.startswith(_RECORD):
                self._note(payload, checksum.offset - payload.offset, checksum.size, checksum.crc32)
        return archive

    def _classify(
        self, key: str, payload: Payload, saved: Saved
    ) -> _TensorArchive | QuantizedChunk | _ObjectArchive | None:
        value = saved.value
        if isinstance(value, Quantized):
            return self._quantized_chunk(key, payload, value)
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

    def _quantized_chunk(self, key: str, payload: Payload, value: Quantized) -> QuantizedChunk | None:
        """Return the buffers of a quantized tensor's chunk; if a buffer has a problem, add a fault and return None."""
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
        return (
            QuantizedChunk(plain_layout, parts, value.dtype.name) if self._is_stored(key, payload, repeated) else None
        )

    def _agrees(self, item: SavedItem, chunk: SavedChunk, payload: Payload, dtype: str, shape: Shape) -> bool:
        """Return whether an archive's tensor has the dtype and shape that the metadata states; add a fault if not."""
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

    def _is_stored(self, key: str, payload: Payload, repeated: int) -> bool:
        """Add up the bytes that strides of zero repeat; return whether the sum over all files is below the maximum."""
        self._repeated += repeated
        if self._repeated > REPEATED:
            message = f"with strides of zero the files claim more than {REPEATED} bytes that they do not hold"
            self._fault(key, payload.file, message)
            return False
        return True

    def _extent(self, item: SavedItem, chunk: SavedChunk, payload: Payload, archive: _TensorArchive) -> Extent | None:
        """Return the extent of an archive's tensor; if dtype or shape differ from the metadata, add a fault and return
        None.
        """
        assert item.dtype is not None
        if not self._agrees(item, chunk, payload, archive.dtype, archive.shape):
            return None
        if not self._is_stored(item.key, payload, archive.repeated):
            return None
        extent = archive.place
        start = elements_shape(chunk.start, item.dtype.code)
        return Extent(start, extent.shape, payload.file, payload.offset + extent.offset, extent.strides)

    def _in_blob(self, item: SavedItem, chunk: SavedChunk, payload: Payload) -> Extent | None:
        """Return the extent of a chunk in the safetensors data that begins at the chunk's offset."""
        assert item.dtype is not None
        code = item.dtype.code
        size = nbytes(code, elements_shape(chunk.shape, code))
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
        if start != elements_shape(chunk.start, code):
            message = f"the file should hold the part at {list(chunk.start)}, but holds the one at {list(start or ())}"
            hint = "In this format torch writes only one chunk of a tensor to a file; its other chunks are lost."
            self._faults.add("INCOMPLETE", message, payload.file, item.key, hint)
            return None
        if entry.dtype != code:
            message = f"the metadata says {code}, but the file holds {entry.dtype}"
            self._faults.add("DTYPE_MISMATCH", message, payload.file, item.key)
            return None
        if entry.shape != elements_shape(chunk.shape, code):
            message = f"its chunk is {list(chunk.shape)} in the metadata, but {list(entry.shape)} in the file"
            self._faults.add("SHAPE_MISMATCH", message, payload.file, item.key)
            return None
        (in_file,) = entry.extents
        return Extent(start, in_file.shape, in_file.file, in_file.offset)

    def _blob(self, file: str, begin: int) -> _Blob | None:
        """Read the header of the safetensors data from `begin` to the end of a file; None if the header has a
        problem.
        """
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
            self._occupy("", file, begin, self._sizes[file])
        self._blobs[file, begin] = blob
        return blob

    def _occupy(self, key: str, file: str, begin: int, end: int) -> None:
        self._occupied.setdefault(file, []).append((begin, end, key))

    def _note(self, payload: Payload, offset: int, size: int, crc32: int) -> None:
        self.checksums.append(Checksum(payload.file, payload.offset + offset, size, crc32, _WHAT))

    def _fault(self, key: str, file: str, message: str) -> None:
        self._faults.add("CORRUPT", message, file, key)


def _similar_chunks(chunks: Sequence[SavedChunk]) -> dict[tuple[str, int, Shape], list[int]]:
    """Return (file, length in bytes, shape) -> positions of the chunks, for the chunks that have a byte range."""
    if None not in map(_place, chunks):
        shapes = list(map(_shape, chunks))
        files, _, lengths = zip(*map(_place, chunks), strict=True)
        kinds = files, lengths, shapes
        # in the usual case very many chunks have the same file, length and shape
        if all(kind.count(kind[0]) == len(chunks) for kind in kinds):
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
