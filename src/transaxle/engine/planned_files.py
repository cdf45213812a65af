"""The files of a planned conversion, computed when they are read: nothing is written.

A conversion writes each target file from its first byte to its last. Here any byte range of a file can be read, at any
time and by several threads. A file consists of sections: bytes that the plan knows (a header, an index, a config), and
places of tensors. A tensor is computed in blocks, the same as those in which a conversion writes it, each independently
of the others. So a read computes only the blocks that it touches; the blocks computed last stay in memory, because the
next read of a client often begins inside one.

Whatever a conversion checks is checked here too: refusals of the plan before anything is read; copies that must be
equal when the files are opened; hashes and checksums of the source, and whether its files have changed, before the last
bytes of each read are returned. After such an error no read succeeds, so that no reader gets bytes of two states of the
source.
"""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from queue import SimpleQueue
from typing import Generic, TypeVar

import msgspec
import numpy as np

from transaxle.encodings.encoding import Role
from transaxle.encodings.value_steps import MEASURED_BY_READING, RecodedTensor
from transaxle.engine.carry import measure_amaxes, recheck, require_finite
from transaxle.engine.checkpoint.source_hashes import damage_first
from transaxle.engine.duplicates import compare_copies
from transaxle.engine.execute import check_source, watch_source
from transaxle.engine.plan.conversion import Prepared
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.engine.views.encode import WITHOUT_BANDS, Step, encode_band, whole_buffer
from transaxle.errors import Refusal, Refused, Where, gathered
from transaxle.formats.catalog import numpy_dtype
from transaxle.formats.storage.storage import is_url, recheck_versions
from transaxle.move.transfer import clip
from transaxle.move.workers import BLOCK, Limits, Worker, block_ends

_CACHED_BYTES = 16 << 20
"""Maximum size in bytes of the computed blocks that stay in memory; a single larger block stays too."""
_CACHED_TENSORS = 64
"""Number of tensors whose block offsets stay in memory."""
_SMALL = 32 << 20
"""Maximum size in bytes of a file without tensors whose content is hashed when the files are opened."""
_SECONDS_LOCAL, _SECONDS_REMOTE = 1.0, 60.0
"""Seconds between two checks, at the beginning of reads, that the source's files have not changed."""
_FLOATING = frozenset({"F16", "BF16", "F32", "F64"})
_HEX = 40
"""Number of hex digits of an identity, as in a commit of git."""

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class _Section(msgspec.Struct, frozen=True):
    """A contiguous byte range of a target file."""

    start: int
    """Offset of the first byte in the file."""
    size: int
    """Number of bytes."""
    data: bytes = b""
    """The bytes, if the plan knows them."""
    tensor: int = -1
    """Number of the tensor that the bytes belong to, if they are computed."""
    offset: int = 0
    """Offset of the section's first byte in the tensor."""

    @property
    def stop(self) -> int:
        """Offset in the file after the last byte."""
        return self.start + self.size


class PlannedFile(msgspec.Struct, frozen=True):
    """A file of the target."""

    name: str
    """Name of the file in the target's folder."""
    size: int
    """Size in bytes."""
    identity: str
    """40 hex digits that change whenever the bytes may change. For a small file without tensors, git's hash of the
    content; otherwise a hash of the target's identity and the file's name.
    """
    has_tensors: bool
    """Whether the file contains tensors, which are computed when it is read."""


class PlannedFiles:
    """The files that a conversion would write, except its manifest, whose hashes are known only after all tensors.

    Any number of threads may read at the same time. `jobs` of them compute, with the buffers of `limit`; each read also
    has one computed block, and at most 16 MB of computed blocks stay in memory.

    Args:
        prepared: the plan, with its open source, which must stay open as long as files are read.
        limit: number of threads that compute at the same time, and memory of their buffers.

    Attributes:
        identity: 40 hex digits that change if the source's files, the plan, or any byte that the plan knows changes.
        files: file name -> the file.

    Raises:
        TransaxleError: all refusals of the plan and of the source; with code UNSUPPORTED, if the target's format
            divides tensors among files of ranks; with code UNEQUAL_COPIES, if copies of a tensor in the source differ.
    """

    def __init__(self, prepared: Prepared, limit: Limits) -> None:
        self._prepared, self._limit = prepared, limit.with_min_block(prepared.plan.band)
        self._container = prepared.checkpoint.container
        task, problems = check_source(prepared, "", self._limit)
        problems += _refuse_divided(prepared)
        if problems:
            raise gathered(problems)
        watch_source(prepared)
        plan, storage = prepared.plan, self._container.storage
        with damage_first(storage, self._container.recoding, is_checked=prepared.check_source):
            if plan.checks and (differing := compare_copies(plan.checks, storage, self._limit)):
                raise gathered(differing)
        self._tensors = (*plan.tensors, *plan.carried_files)
        self._sections = _sections(prepared, self._tensors)
        self._workers: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(self._limit.jobs):
            self._workers.put(Worker(storage, self._limit, threading.Event()))
        self._blocks = _Recent[tuple[int, int], bytes](_CACHED_BYTES, len)
        self._layouts = _Recent[int, _Layout](_CACHED_TENSORS, lambda _: 1)
        self._amaxes: dict[str, tuple[float, ...]] = {}
        self._finite: set[RecodedTensor] = set()
        """Steps of which it was measured that they make no finite value infinite."""
        self._measuring, self._checking = threading.Lock(), threading.Lock()
        self._failure: Refused | None = None
        self._looked = time.monotonic()
        fragments = sorted((fragment.file, fragment.offset, fragment.data) for fragment in prepared.draft.fragments)
        self.identity = _digest(task.to, task.state, task.plan, msgspec.msgpack.encode((fragments, plan.files)))
        self.files = {name: self._describe(name) for name in sorted(plan.files)}

    def _describe(self, name: str) -> PlannedFile:
        size, tensors = self._prepared.plan.files[name], len(self._prepared.plan.tensors)
        has_tensors = any(0 <= section.tensor < tensors for section in self._sections[name])
        identity = _digest(self.identity, name)
        if not has_tensors and size <= _SMALL:
            content = b"".join(self._produce(name, 0, size))
            identity = hashlib.sha1(b"blob %d\0" % size + content, usedforsecurity=False).hexdigest()
        return PlannedFile(name, size, identity, has_tensors)

    def require_unchanged(self) -> None:
        """Check that the source's files have not changed since they were opened; after an error, every call raises it.

        Files on this machine are looked at once in a second at most, those of a service once in a minute: reads of
        these check the version of what they read.

        Raises:
            Refused: with code CORRUPT, if a file has changed; or with the code of an earlier error.
            StorageError: with code IO, if a file cannot be read.
        """
        if self._failure is not None:
            raise self._failure
        seconds = _SECONDS_REMOTE if is_url(self._container.path) else _SECONDS_LOCAL
        with self._checking, self._latch():
            if time.monotonic() >= self._looked + seconds:
                recheck_versions(self._container.storage)
                self._looked = time.monotonic()

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes `[start, stop)` of a file, block by block; each block stays valid.

        The last block is yielded only after the source was checked: that its files have not changed, and that each
        source tensor which was read matches its hash, if the source has hashes.

        Raises:
            KeyError: if the target has no such file.
            Refused: with code CORRUPT, if the source has changed or is damaged; with code LOSSY, if finite values
                become infinite; after one of these, every read raises it.
            StorageError: with code IO, if the source cannot be read.
        """
        if self._failure is not None:
            raise self._failure
        with self._latch():
            last = memoryview(b"")
            for block in self._produce(name, start, stop):
                if last:
                    yield last
                last = block
            if any(section.tensor >= 0 for section in self._sections[name]):
                with self._checking:
                    recheck(self._prepared)
            if self._failure is not None:
                raise self._failure
            if last:
                yield last

    @contextmanager
    def _latch(self) -> Iterator[None]:
        """Remember the first refusal, so that every later read raises it too."""
        try:
            yield
        except Refused as error:
            self._failure = self._failure or error
            raise

    def _produce(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes `[start, stop)` of a file; between sections a file has zeros."""
        at, sections = start, self._sections[name]
        first = bisect_right(sections, start, key=_stop_of)
        for section in sections[first:]:
            if section.start >= stop:
                break
            yield from _zeros(section.start - at)
            at = max(at, section.start)
            end = min(section.stop, stop)
            if section.tensor < 0:
                yield memoryview(section.data)[at - section.start : end - section.start]
            else:
                shift = section.offset - section.start
                yield from self._read_tensor(section.tensor, at + shift, end + shift)
            at = end
        yield from _zeros(stop - at)

    def _read_tensor(self, number: int, start: int, stop: int) -> Iterator[memoryview]:
        tensor = self._tensors[number]
        layout = self._layouts.get(number)
        if layout is None:
            layout = self._layouts.put(number, _Layout(tensor, self._limit.block))
        index = bisect_right(layout.ends, start)
        while start < stop:
            first, end = layout.ends[index - 1] if index else 0, layout.ends[index]
            block = self._blocks.get((number, index))
            if block is None:
                block = self._blocks.put((number, index), self._compute(tensor, layout, index, first, end))
            yield memoryview(block)[start - first : min(end, stop) - first]
            start, index = end, index + 1

    def _compute(self, tensor: PlannedTensor, layout: _Layout, index: int, first: int, end: int) -> bytes:
        """Return block `index` of a tensor, its bytes `[first, end)`, as a conversion writes them."""
        sizes = self._amaxes_of(tensor)
        worker = self._workers.get()
        try:
            block = layout.compute(worker, index, first, end, sizes)
        finally:
            self._workers.put(worker)
        if len(block) != end - first:
            raise RuntimeError(f"{tensor.name}: {len(block)} bytes were computed for bytes {first} to {end}")
        self._require_finite(tensor, block)
        return block

    def _amaxes_of(self, tensor: PlannedTensor) -> tuple[float, ...]:
        """Return the amax of each matrix of a tensor with global scales; the whole tensor is read once for them."""
        if tensor.step is None or not tensor.step.spec.has_global:
            return ()
        name = tensor.step.tensor
        with self._measuring:
            if name not in self._amaxes:
                make = partial(Worker, self._container.storage, self._limit)
                self._amaxes |= measure_amaxes([tensor], self._limit, make)
            return self._amaxes[name]

    def _require_finite(self, tensor: PlannedTensor, block: bytes) -> None:
        """Refuse finite values that became infinite in decoded, cast or merged tensors. If a block has an infinite
        value, the whole source tensors are read, because the value may have been infinite before.
        """
        recoding = self._container.recoding
        if not recoding.computed or tensor.dtype not in _FLOATING:
            return
        used = {recoding.computed[part.file].step for part in tensor.transfers if part.file in recoding.computed}
        steps = {step for step in used if step.action in MEASURED_BY_READING}
        if steps <= self._finite or not np.isinf(np.frombuffer(block, numpy_dtype(tensor.dtype))).any():
            return
        with self._measuring:
            require_finite(self._prepared, steps - self._finite, self._limit)
            self._finite |= steps


class _Layout:
    """The blocks in which a tensor is computed.

    Args:
        tensor: the tensor.
        capacity: size in bytes of the buffer in which a block of values is read.
    """

    def __init__(self, tensor: PlannedTensor, capacity: int) -> None:
        self._tensor = tensor
        self._starts = [part.target for part in tensor.transfers]
        self._reached = list(accumulate((part.target_end for part in tensor.transfers), max))
        step = tensor.step
        self._bands = [] if step is None or step.role in WITHOUT_BANDS else list(step.bands(capacity))
        self.ends = [tensor.nbytes]
        """Offset in the tensor after the last byte of each block."""
        if step is None:
            self.ends = block_ends(tensor.transfers, tensor.nbytes, capacity)
        elif self._bands:
            self.ends = [_end_of_block(step, tensor.nbytes, band) for band in self._bands]

    def compute(self, worker: Worker, index: int, first: int, end: int, sizes: Sequence[float]) -> bytes:
        """Return block `index`, the bytes `[first, end)` of the tensor; `sizes` are amaxes of matrices."""
        step = self._tensor.step
        if step is None:
            return bytes(self._values(worker, first, end))
        if not self._bands:
            return bytes(whole_buffer(step, sizes))
        start = step.end_of_band(self._bands[index - 1]) if index else 0
        values = self._values(worker, start, step.end_of_band(self._bands[index]))
        return bytes(encode_band(step, self._bands[index], values, sizes)[0])

    def _values(self, worker: Worker, start: int, stop: int) -> memoryview:
        """Read the bytes `[start, stop)` of the tensor's values into the worker's block."""
        tensor = self._tensor
        touched = tensor.transfers[bisect_right(self._reached, start) : bisect_left(self._starts, stop)]
        parts = [
            msgspec.structs.replace(part, target=part.target - start)
            for transfer in touched
            for part in clip(transfer, start, stop)
        ]
        dtype = tensor.dtype if tensor.step is None else tensor.step.dtype
        blocks = list(worker.blocks_until(parts, [stop - start], dtype=dtype, arithmetic=tensor.arithmetic))
        return blocks[0] if blocks else memoryview(b"")


class _Recent(Generic[Key, Value]):
    """The values that were used last, up to a total size; several threads can share them.

    Args:
        capacity: maximum total size; a single larger value is kept.
        size: function that returns the size of a value.
    """

    def __init__(self, capacity: int, size: Callable[[Value], int]) -> None:
        self._capacity, self._size_of = capacity, size
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """Return the value of a key; None if it is not kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def put(self, key: Key, value: Value) -> Value:
        """Keep a value, drop those that were used least recently, and return the value."""
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self._size += self._size_of(value)
            while self._size > self._capacity and len(self._values) > 1:
                self._size -= self._size_of(self._values.popitem(last=False)[1])
        return value


def _end_of_block(step: Step, nbytes: int, band: tuple[int, int, int]) -> int:
    """Return the offset in a buffer of codes or scales after the bytes of a band of values."""
    number, _, last_row = band
    rows = step.shape[-2]
    if step.role == Role.SCALE:
        tile = step.spec.tiles(step.shape)[-2]
        rows, last_row = -(-rows // tile), -(-last_row // tile)
    return nbytes * (number * rows + last_row) // (step.matrices * rows)


def _sections(prepared: Prepared, tensors: Sequence[PlannedTensor]) -> dict[str, list[_Section]]:
    """Return file name -> the sections of the file, in order, which do not overlap."""
    sections: dict[str, list[_Section]] = {name: [] for name in prepared.plan.files}
    for fragment in prepared.draft.fragments:
        sections[fragment.file].append(_Section(fragment.offset, len(fragment.data), fragment.data))
    for number, tensor in enumerate(tensors):
        for place in tensor.everywhere:
            sections[place.file].append(_Section(place.source, place.size, tensor=number, offset=place.target))
    return {
        name: sorted((section for section in listed if section.size), key=_start_of)
        for name, listed in sections.items()
    }


def _start_of(section: _Section) -> int:
    return section.start


def _stop_of(section: _Section) -> int:
    return section.stop


def _zeros(size: int) -> Iterator[memoryview]:
    for at in range(0, size, BLOCK):
        yield memoryview(bytes(min(BLOCK, size - at)))


def _refuse_divided(prepared: Prepared) -> Iterator[Refusal]:
    """Yield a refusal if a file has parts of a tensor that are not contiguous in the tensor, such as columns."""
    for tensor in prepared.plan.tensors:
        if any(place.loops for place in tensor.everywhere):
            message = f"{prepared.plan.format} divides tensors among files of ranks, which cannot be served"
            hint = "Choose a format without files of ranks, or write the files to disk."
            yield Refusal("UNSUPPORTED", message, Where(None, tensor.name), hint)
            return


def _digest(*parts: str | bytes) -> str:
    """Return 40 hex digits of the hash of several texts."""
    state = hashlib.sha256()
    for part in parts:
        octets = part.encode() if isinstance(part, str) else part
        state.update(b"%d:" % len(octets) + octets)
    return state.hexdigest()[:_HEX]
