"""The manifest is the file `transaxle.json`. The file describes a checkpoint that Transaxle wrote, with a hash of every
tensor and file header.

The manifest is written last. As long as file sizes and header hashes match the manifest, it states family and dialect
with certainty, and `verify` checks the bytes of every tensor against it. The manifest's own checksum covers the rest of
its text.

A conversion hashes the bytes that it writes, so damaged source bytes would from then on have a correct hash. Therefore
a source that has hashes, in a manifest or in its files, is checked against them while it is read (`HashWitness`). Bytes
that are read in the order in which they were hashed are hashed at the same time; all other bytes are read a second
time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from threading import Lock, get_ident
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from transaxle.axes.geometry import Loop, row_major
from transaxle.axes.layout.relayout import identity_target, is_one_run
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.engine.source import Source
from transaxle.errors import Refusal, StorageError, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import BITS, Container, Entry, Extent, Seal, Shape, digest_outside, nbytes, read_digest
from transaxle.formats.registry import MANIFEST, is_for_people, is_for_use, join_names
from transaxle.formats.storage.copier import Steps
from transaxle.formats.storage.storage import NotJsonError, Overlay, Storage, layer, parse_json
from transaxle.move.transfer import Transfer

if TYPE_CHECKING:
    from transaxle.move.journal import ItemHash


SCHEMA, IN_SPANS = 2, 2
"""Versions of the manifest's schema: the current version, and the first version in which large tensors are hashed in
spans.
"""
_BLOCK = 1 << 18
_NEAR, _IN_A_ROW = 1 << 14, 4
"""A gap between two tensors in a file is near if both its length and its distance from the previous gap are at most
`_NEAR` bytes. After `_IN_A_ROW` near gaps, whole blocks of the file are read, including the tensors between the gaps.
"""
_LARGEST = 1 << 30


class FileRecord(msgspec.Struct, frozen=True):
    """Size and header hash of a file of the checkpoint."""

    size: int
    """Size of the file in bytes."""
    head: int
    """Number of the file's bytes that belong to no tensor: headers, or all bytes if the file has no tensors."""
    xxh3: str
    """The xxh3-128 hash, in hex, of the file's bytes outside the tensors, in file order."""


class TensorRecord(msgspec.Struct, frozen=True):
    """Dtype, shape and hash of a tensor of the checkpoint."""

    dtype: str
    """Safetensors code of the tensor's dtype."""
    shape: tuple[int, ...]
    """Number of logical elements along each dim of the tensor."""
    xxh3: str
    """The xxh3-128 hash, in hex, of the tensor's row-major little-endian bytes. In version 2 of the manifest, a tensor
    of more than 256 MiB has the xxh3-128 hash of the concatenated hex hashes of its 256 MiB spans.
    """


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the manifest `transaxle.json`."""

    transaxle: int = 1
    """Version of the manifest's schema."""
    format: str
    """Container format of the checkpoint."""
    family: str | None
    """Model family; None if no family's table reads the tensor names."""
    dialect: str
    """Dialect of the tensor names."""
    axes: dict[str, int]
    """Axis sizes, without those that differ between layers."""
    aliases: dict[str, str]
    """Stored name of a tied tensor -> stored name of the tensor that it is a copy of."""
    files: dict[str, FileRecord]
    """File name -> size and hash of the file, for every file except the manifest."""
    tensors: dict[str, TensorRecord]
    """Stored tensor name -> dtype, shape and hash, for every tensor."""
    source: str | msgspec.UnsetType = msgspec.UNSET
    """URL of the source if its content can never change: a hub's repository at a fixed commit."""
    checksum: str = ""
    """The xxh3-128 hash of the manifest's text, computed with an empty checksum."""


def encode(manifest: Manifest) -> bytes:
    """Return the text of a manifest, with its checksum. The function `decode` is the inverse."""
    bare = msgspec.structs.replace(manifest, checksum="")
    # imported inside the function, so that opening a folder without a manifest does not load the module
    from transaxle.move.journal import digest

    checksum = digest(msgspec.json.encode(bare))
    return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(bare, checksum=checksum)), indent=1)


def decode(text: bytes, file: str = MANIFEST) -> Manifest:
    """Parse the text of a manifest, and check it against its checksum.

    Raises:
        Refused: with code UNSUPPORTED, if the manifest has a later version; with code CORRUPT, if the text is malformed
            or was changed.
    """
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refuse("CORRUPT", f"malformed: {error}", file=file) from None
    if manifest.transaxle > SCHEMA:
        message = f"the manifest has version {manifest.transaxle}; this program reads versions up to {SCHEMA}"
        raise refuse("UNSUPPORTED", message, file=file, hint="Use a newer version of Transaxle.")
    if encode(manifest) != text:
        raise refuse("CORRUPT", "the manifest's text was changed: its checksum does not match", file=file)
    return manifest


def has_manifest(container: Container) -> bool:
    """Return whether a checkpoint has a manifest, valid or not.

    A file that is opened alone has the manifest of its folder, if that manifest can be read and lists the file.
    """
    if MANIFEST not in container.storage.names():
        return False
    if not container.storage.single:
        return True
    try:
        return load(container) is not None
    except TransaxleError:
        return False


def load(container: Container) -> Manifest | None:
    """Return the manifest of a checkpoint, even if it no longer matches the files; None if the checkpoint has no
    manifest.

    For a file that is opened alone, return the part of its folder's manifest that describes this file.

    Raises:
        Refused: with code CORRUPT, if the manifest is malformed or was changed.
        StorageError: with code IO, if the manifest cannot be read.
    """
    storage = container.storage
    if MANIFEST not in storage.names():
        return None
    size = storage.size(MANIFEST)
    if size > _LARGEST:
        raise refuse("CORRUPT", f"a manifest of {size} bytes is too long to be real", file=MANIFEST)
    manifest = decode(storage.read(MANIFEST, 0, size))
    file = storage.single
    if not file:
        return manifest
    if file not in manifest.files or manifest.format != container.format:
        return None
    names = {**container.entries, **container.left}
    tensors = {name: record for name, record in manifest.tensors.items() if name in names}
    return msgspec.structs.replace(manifest, files={file: manifest.files[file]}, tensors=tensors, aliases={})


def stale(manifest: Manifest, container: Container, files: Collection[str] | None = None) -> list[Refusal]:
    """Return refusals of files that no longer match the manifest.

    Args:
        manifest: the manifest, as returned by `load`.
        container: the files of the checkpoint.
        files: names of the files to check; None means all files that the manifest lists.
    """
    problems = []
    tensor_ranges = _tensor_ranges(container)
    present = set(container.storage.names())
    for name, record in manifest.files.items():
        if files is not None and name not in files:
            continue
        size = _size(container, name, present)
        if size is None:
            problems.append(Refusal("INCOMPLETE", "the manifest lists this file, but it is missing", Where(name)))
        elif size != record.size:
            message = f"the manifest says {record.size} bytes, the file has {size}"
            problems.append(Refusal("CORRUPT", message, Where(name)))
        elif _digest_around(container, name, size, tensor_ranges.get(name, [])) != (record.head, record.xxh3):
            subject = "this file" if record.head == size else "its header"
            problems.append(Refusal("CORRUPT", f"{subject} was changed after it was written", Where(name)))
    return problems


def _size(container: Container, name: str, present: Collection[str]) -> int | None:
    """Return the size of a file, whose name may contain a sub-folder; None if the file does not exist."""
    if "/" not in name and name not in present:
        return None
    try:
        return container.storage.size(name)
    except StorageError:
        return None


_Ranges = list[tuple[list[int], int]]
"""Byte ranges in one file: one pair (offsets, size) for all ranges of the same size."""


def _tensor_ranges(container: Container) -> dict[str, _Ranges]:
    """Return file name -> byte ranges of the tensors in the file."""
    alike: dict[tuple[str, str, Shape], list[int]] = {}
    copies = (twin.second for twin in (*container.twins, *container.uncompared))
    for entry in (*container.entries.values(), *container.left.values(), *copies):
        dtype = entry.dtype
        for extent in entry.extents:
            if extent.strides is None:
                alike.setdefault((extent.file, dtype, extent.shape), []).append(extent.offset)
            else:
                shape, offsets = _runs(extent, extent.strides, BITS[dtype])
                alike.setdefault((extent.file, dtype, shape), []).extend(offsets)
    ranges: dict[str, _Ranges] = {}
    for (file, dtype, shape), offsets in alike.items():
        if size := nbytes(dtype, shape):
            ranges.setdefault(file, []).append((offsets, size))
    return ranges


def _runs(extent: Extent, strides: Shape, bits: int) -> tuple[Shape, list[int]]:
    """Return the contiguous parts of a strided chunk: the shape of each, and their offsets in the file."""
    dims = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    shape = tuple(extent.shape[dim] for dim in dims)
    steps = tuple(strides[dim] for dim in dims)
    dense = row_major(shape)
    outer = next((at for at in range(len(dims)) if steps[at:] == dense[at:]), len(dims))
    starts = np.zeros(1, np.int64)
    for size, step in zip(shape[:outer], steps[:outer], strict=True):
        starts = (starts[:, None] + np.arange(size) * step).ravel()
    return shape[outer:], (extent.offset + starts * bits // 8).tolist()


def _digest_around(container: Container, name: str, size: int, ranges: _Ranges) -> tuple[int, str]:
    """Return the number of a file's bytes outside its tensors, and their xxh3-128 hash."""
    state = xxhash.xxh3_128()
    starts, stops = _gaps(size, ranges)
    count, number = sum(stops) - sum(starts), 0
    reached = end_of_block = near_gaps = 0
    buffer = memoryview(bytearray(min(_BLOCK, size)))
    while number < len(starts):
        reached, stop = max(reached, starts[number]), stops[number]
        # Gaps between small tensors are small, so many gaps are read at once.
        near_gaps = near_gaps + 1 if max(reached - end_of_block, stop - reached) <= _NEAR else 0
        wanted_bytes = stop - reached if near_gaps < _IN_A_ROW else size - reached
        block = buffer[: min(_BLOCK, wanted_bytes)]
        container.storage.read_into(name, reached, block)
        begin, end_of_block = reached, reached + len(block)
        after = bisect_left(starts, end_of_block, number)
        gaps = zip([reached, *starts[number + 1 : after]], stops[number:after], strict=True)
        state.update(b"".join([block[start - begin : stop - begin] for start, stop in gaps]))
        reached, number = end_of_block, bisect_right(stops, end_of_block, number)
    return count, state.hexdigest()


def _gaps(size: int, ranges: _Ranges) -> tuple[list[int], list[int]]:
    """Return the start offsets and the end offsets of the parts of a file that lie outside all given ranges."""
    starts, stops, reached = [], [], 0
    for begin, end in sorted((begin, begin + length) for begins, length in (*ranges, ([size], 0)) for begin in begins):
        if begin > reached:
            starts.append(reached)
            stops.append(begin)
        reached = max(reached, end)
    return starts, stops


def read_manifest(container: Container) -> Manifest | None:
    """Return the manifest if the checkpoint still matches it; None otherwise.

    Only files with tensors or descriptions of tensors, and config.json, are checked; `verify` checks all other files.
    """
    try:
        manifest = None if container.storage.single else load(container)
        if manifest is None or not container.files.keys() <= manifest.files.keys():
            return None
        if stale(manifest, container, {*container.files, CONFIG}):
            return None
    except TransaxleError:
        return None
    return manifest


CHANGED = "the bytes were changed after they were written"
_INTACT = "The target would contain the same damaged bytes: convert an intact copy."
_MEANT = f"{_INTACT} If they are meant, delete {MANIFEST}: nothing is held against it then."
_MEANT_ALONE = f"{_INTACT} If they are meant, save the file anew, without the digests that it holds."
_MEANT_BESIDE = (
    f"Restore the file. If the change is intended, let `transaxle verify` show that nothing else has changed, "
    f"and delete {MANIFEST}: nothing is held against it then."
)
_MEANT_CONFIG = f"If the change is intended, name the file (--config FILE, config=), or delete {MANIFEST}."


class RecordedTensor(msgspec.Struct, frozen=True):
    """A source tensor with the hash that the source records for it."""

    name: str
    """Stored name of the tensor."""
    size: int
    """Size of the tensor in bytes."""
    xxh3: str
    """The recorded xxh3-128 hash, in hex."""
    span: int
    """Number of bytes in each span of the tensor; the spans are hashed separately."""
    transfers: tuple[Transfer, ...]
    """The transfers that read the tensor's bytes, sorted by position in the tensor."""


class _SpanProgress(msgspec.Struct):
    """A span (byte range) of a tensor whose bytes are read and hashed in order."""

    hash: ItemHash
    thread: int
    """Identifier of the thread that reads the span; only a single thread can keep the order of the bytes."""
    reached: int
    """Offset in the tensor of the byte after the last hashed byte."""


class HashWitness(Overlay):
    """A storage that, once `watch` was called, checks the bytes of tensors against recorded hashes while they are read.

    A `HashWitness` can be shared between threads.

    Args:
        below: the storage that contains the files.
        container: the checkpoint with its stored tensors.
    """

    def __init__(self, below: Storage, container: Container | None = None) -> None:
        super().__init__(below)
        self.container = container
        self._records: Sequence[RecordedTensor] = ()
        self._starts: dict[str, list[int]] = {}
        self._pieces: dict[str, list[tuple[int, int, int]]] = {}
        """File name -> parts of tensors in this file, each as (offset in the file, tensor number, offset in the
        tensor).
        """
        self._ends: dict[str, list[int]] = {}
        self._progress: dict[tuple[int, int], _SpanProgress] = {}
        self._spans: dict[int, dict[int, str]] = {}
        self._read: dict[int, int] = {}
        """Number of a tensor that was read but not yet checked -> count of its bytes that were read."""
        self._settled: dict[int, bool] = {}
        self._scattered: set[int] = set()
        """Numbers of tensors that are never read in order, because they are read in strided runs or share bytes with
        other tensors.
        """
        self._hashed_elsewhere: set[int] = set()
        """Numbers of tensors that the code that reads them also hashes."""
        self._reported: set[int] = set()
        self._lock = Lock()

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of the checkpoint's folder; None if the manifest does not describe the tensors of this
        container.

        Raises:
            Refused: with code CORRUPT, if the manifest is malformed; with code UNSUPPORTED, if it has a later version.
            StorageError: with code IO, if the manifest cannot be read.
        """
        manifest = None if self.container is None else load(self.container)
        if manifest is None or self.container is None or manifest.files.keys().isdisjoint(self.container.files):
            return None
        return manifest

    @property
    def is_watching(self) -> bool:
        """Whether `watch` was called with recorded hashes."""
        return bool(self._records)

    def watch(self, records: Sequence[RecordedTensor]) -> None:
        """Start to check the bytes that are read against recorded hashes; a second call changes nothing."""
        with self._lock:
            if self._records:
                return
            self._records = records
            pieces_by_file: dict[str, list[tuple[int, int, int, int]]] = {}
            for number, tensor in enumerate(records):
                for part in tensor.transfers:
                    place = -1 if part.loops else part.target
                    pieces_by_file.setdefault(part.file, []).append((part.source, part.source_span, number, place))
            for file, pieces in pieces_by_file.items():
                pieces.sort()
                self._pieces[file], self._ends[file] = [], []
                for start, size, number, place in pieces:
                    if place < 0 or (self._ends[file] and start < self._ends[file][-1]):
                        self._scattered.add(number)
                        continue
                    self._pieces[file].append((start, number, place))
                    self._ends[file].append(start + size)
                self._starts[file] = [start for start, _, _ in self._pieces[file]]
            self._read = dict.fromkeys(self._scattered, 0)

    def tensor_in(self, parts: Sequence[Transfer], size: int) -> int | None:
        """Return the number of the tensor that the given transfers read completely; the caller then passes the tensor's
        hash to `settle`.

        Return None if the transfers read no whole tensor, or if the recorded hash was not made from the same spans.
        """
        # imported here and in the functions below, because opening a checkpoint hashes nothing
        from transaxle.move.journal import span_ends

        if len(parts) != 1 or parts[0].loops or parts[0].width != size or parts[0].file not in self._pieces:
            return None
        (part,) = parts
        index = bisect_left(self._starts[part.file], part.source)
        if index == len(self._starts[part.file]) or self._starts[part.file][index] != part.source:
            return None
        number = self._pieces[part.file][index][1]
        tensor = self._records[number]
        if tensor.size != size or tensor.span != span_ends(size)[0]:
            return None
        self._hashed_elsewhere.add(number)
        return number

    def settle(self, number: int, xxh3: str) -> None:
        """Compare the hash of the tensor's bytes that were read with the recorded hash."""
        with self._lock:
            self._settled[number] = self._settled.get(number, True) and self._records[number].xxh3 == xxh3
            self._read.pop(number, None)

    def expect(self, parts: Iterable[Transfer]) -> None:
        """Record that other processes have read these transfers. A transfer from a file that is unknown here counts as
        a read of all tensors.
        """
        numbers = self._scattered.copy()
        for part in parts:
            if part.file in self._pieces:
                numbers.update(number for number, _, _, _ in self._tensors_in(part.file, part.source, part.source_span))
            else:
                numbers.update(range(len(self._records)))
        with self._lock:
            for number in numbers - self._settled.keys():
                self._read.setdefault(number, 0)

    def take_proved(self) -> tuple[str, ...]:
        """Return the names of the tensors that proved intact since the last call.

        A tensor that this process read only in part is checked by the process that combines the reads of all processes.

        Raises:
            Refused: with code CORRUPT, for each tensor that does not match its hash.
            StorageError: with code IO, if a file cannot be read.
        """
        self._check_hashes([number for number, count in [*self._read.items()] if count >= self._records[number].size])
        with self._lock:
            self._read.clear()
            proved = sorted(self._settled.keys() - self._reported)
            self._reported.update(proved)
        return tuple(self._records[number].name for number in proved)

    def accept(self, names: Collection[str]) -> None:
        """Count tensors as intact, because another process has checked them against their hashes."""
        with self._lock:
            for number, tensor in enumerate(self._records):
                if tensor.name in names:
                    self._settled.setdefault(number, True)
                    self._read.pop(number, None)

    def recheck(self) -> None:
        """Check that no file has changed, and that every tensor that was read matches its hash.

        Raises:
            Refused: with code CORRUPT, for each tensor that does not match its hash.
            StorageError: with code IO, if a file cannot be read.
        """
        super().recheck()
        self._check_hashes([*self._read])

    def _check_hashes(self, unsettled: Sequence[int]) -> None:
        """Hash tensors whose bytes were not read in order, and refuse all tensors that do not match their hash."""
        from transaxle.move.journal import digest_in
        from transaxle.move.workers import limits, run_workers

        def check(_: object, number: int) -> None:
            tensor = self._records[number]
            self.settle(number, digest_in(self.below, tensor.transfers, tensor.span))

        if unsettled:
            run_workers(sorted(unsettled), limits().jobs, lambda _: None, check)
        wrong = sorted(number for number, right in self._settled.items() if not right)
        if wrong:
            raise gathered([self._problem(self._records[number]) for number in wrong])

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Copy bytes as `Storage.add_read` does; the bytes of strided runs are read a second time for their hash."""
        self.below.add_read(steps, name, offset, view, width, loops)
        if loops:
            self._count_read(name, offset, width, loops)
        else:
            self._hash_read(steps, name, offset, view)

    def _count_read(self, name: str, offset: int, width: int, loops: Sequence[Loop]) -> None:
        if name not in self._pieces:
            return
        runs = Transfer(name, offset, 0, width, tuple(loops))
        with self._lock:
            for number, _, _, _ in self._tensors_in(name, offset, runs.source_span):
                if number not in self._settled:
                    self._read[number] = self._read.get(number, 0) + runs.size

    def _hash_read(self, steps: Steps, name: str, offset: int, view: memoryview) -> None:
        """Hash the bytes of a read that continue a tensor whose hash is in progress."""
        if name not in self._pieces or not view.nbytes:
            return
        octets = view.cast("B")
        for number, place, low, high in self._tensors_in(name, offset, view.nbytes):
            with self._lock:
                if number in self._settled:
                    continue
                self._read[number] = self._read.get(number, 0) + high - low
            if number not in self._hashed_elsewhere:
                self._hash(number, place, octets[low - offset : high - offset], steps)

    def _hash(self, number: int, start: int, data: memoryview, steps: Steps) -> None:
        """Hash bytes of a tensor, beginning at the offset `start` in the tensor."""
        tensor = self._records[number]
        while len(data):
            at, inside = divmod(start, tensor.span)
            part = data[: tensor.span - inside]
            passing = self._span_at(number, at, inside)
            if passing is not None:
                passing.reached += len(part)
                passing.hash.add_update(steps, 0, part)
                if passing.reached == min(tensor.span, tensor.size - at * tensor.span):
                    steps.then(partial(self._finish_span, number, at, passing))
            start, data = start + len(part), data[len(part) :]

    def _span_at(self, number: int, at: int, inside: int) -> _SpanProgress | None:
        """Return the span that the bytes at an offset continue in this thread; None if they continue no span."""
        from transaxle.move.journal import WHOLE, ItemHash

        with self._lock:
            passing = self._progress.get((number, at))
            if passing is None and not inside:
                passing = self._progress[number, at] = _SpanProgress(ItemHash(WHOLE), get_ident(), 0)
            if passing is None or passing.reached != inside or passing.thread != get_ident():
                return None
            return passing

    def _finish_span(self, number: int, at: int, passing: _SpanProgress) -> None:
        """Store the hash of a complete span; after the last span of a tensor, compare the tensor's hash with the
        recorded one.
        """
        from transaxle.move.journal import join_hashes

        tensor = self._records[number]
        with self._lock:
            spans = self._spans.setdefault(number, {})
            spans[at] = passing.hash.hexdigest()
            if len(spans) * tensor.span < tensor.size:
                return
            self._spans.pop(number)
            for each in spans:
                self._progress.pop((number, each), None)
        self.settle(number, join_hashes([spans[each] for each in sorted(spans)]))

    def _tensors_in(self, file: str, offset: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the tensors in a byte range of a file, each as its number, the offset in the tensor, and its range in
        the file.
        """
        pieces, ends, stop = self._pieces[file], self._ends[file], offset + size
        index = max(bisect_right(self._starts[file], offset) - 1, 0)
        while index < len(pieces) and pieces[index][0] < stop:
            start, number, place = pieces[index]
            low, high = max(start, offset), min(ends[index], stop)
            if low < high:
                yield number, place + low - start, low, high
            index += 1

    def _problem(self, tensor: RecordedTensor) -> Refusal:
        files = join_names(list(dict.fromkeys(part.file for part in tensor.transfers)))
        hint = _MEANT if self.manifest is not None else _MEANT_ALONE
        return Refusal("CORRUPT", f"in the source, {CHANGED} ({files})", Where(self.path, tensor.name), hint)


def with_hash_witness(container: Container) -> Container:
    """Return a container that checks the bytes it reads against recorded hashes, if the checkpoint has recorded
    hashes.
    """
    if not has_hashes(container):
        return container
    return msgspec.structs.replace(container, storage=HashWitness(container.storage, container))


def has_hashes(container: Container) -> bool:
    """Return whether hashes of at least some tensors are recorded, in a manifest or as digests in the files."""
    return bool(container.seals) or has_manifest(container)


def hash_evidence(container: Container) -> str:
    """Return where the hashes of all tensors are recorded: `manifest` or `digests`; `structure` means that there are no
    hashes.

    Raises:
        Refused: any refusal that `HashWitness.manifest` raises.
        StorageError: with code IO, if the manifest cannot be read.
    """
    witness = layer(container.storage, HashWitness)
    if witness is None or witness.container is None:
        return "structure"
    if witness.manifest is not None:
        return "manifest"
    container = witness.container  # the container of the view is not used, because its tensors may be in virtual files
    files = {extent.file for entry in container.entries.values() for extent in entry.extents}
    return "digests" if container.seals and files <= {seal.file for seal in container.seals} else "structure"


def problems_of(storage: Storage, *, copies_about_use: bool, config_given: bool) -> Iterator[Refusal]:
    """Yield problems of a source's bytes outside its tensors, and of its list of files.

    Args:
        storage: the files of the source, or a storage that wraps them.
        copies_about_use: whether files that only concern the use of the model (tokenizer, chat template) are copied
            too; if not, their content is not checked.
        config_given: whether the user gave a config; if so, the source's own config is not checked.
    """
    witness = layer(storage, HashWitness)
    if witness is None or witness.container is None:
        return
    container, manifest = witness.container, None
    try:
        manifest = witness.manifest
        problems = [] if manifest is None else stale(manifest, container)
        if manifest is None:
            problems += [problem for seal in container.seals for problem in check_rest(seal, container)]
    except TransaxleError as error:
        problems = list(error.refusals)
    for problem in problems:
        name, hint = problem.where.file or "", _MEANT_ALONE if container.seals else _MEANT
        if name == CONFIG:
            if config_given:
                continue
            hint = _MEANT_CONFIG
        elif manifest is not None and is_for_use(name):
            if not copies_about_use or _is_edited(container, name, manifest):
                continue
            hint = _MEANT_BESIDE
        message = f"in the source, {problem.message} ({name})"
        yield Refusal(problem.code, message, Where(container.path), problem.hint or hint)


def edit_notes(storage: Storage, carried: Collection[str]) -> Iterator[str]:
    """Yield a note on each copied file that was edited after the manifest was written."""
    witness = layer(storage, HashWitness)
    if witness is None or witness.container is None:
        return
    try:
        manifest, container = witness.manifest, witness.container
        about_use = [name for name in carried if is_for_use(name)]
        changed = stale(manifest, container, about_use) if manifest is not None and about_use else []
    except TransaxleError:  # `problems_of` refuses such a file before anything is written
        return
    for name in (problem.where.file or "" for problem in changed):
        if manifest is not None and _is_edited(container, name, manifest):
            yield f"{name} was edited after the source's {MANIFEST} was written; it is copied as it is now"


def _is_edited(container: Container, name: str, manifest: Manifest) -> bool:
    """Return whether a changed file was probably edited on purpose, rather than damaged.

    A damaged file is one that kept its length, was truncated, or is not text. Files that only people read may be edited
    without a refusal.
    """
    if is_for_people(name):
        return True
    try:
        data = container.storage.read(name, 0, container.storage.size(name))
        text = data.decode()
        if name.endswith(".json"):
            return len(data) != manifest.files[name].size and bool(parse_json(text))
    except (TransaxleError, UnicodeDecodeError, NotJsonError):
        return False
    return len(data) > manifest.files[name].size and "\0" not in text


def watch_hashes(storage: Storage) -> None:
    """Start to check the bytes that are read from a source against the source's own hashes, if it has any.

    Raises:
        Refused: with code CORRUPT, if the manifest is malformed; with code UNSUPPORTED, if it has a later version.
        StorageError: with code IO, if a file cannot be read.
    """
    from transaxle.move.journal import span_ends

    witness = layer(storage, HashWitness)
    if witness is None or witness.container is None or witness.is_watching:
        return
    container, manifest = witness.container, witness.manifest
    in_spans = manifest is None or manifest.transaxle >= IN_SPANS
    hashes: dict[str, str] = {}
    if manifest is not None:
        hashes = {name: record.xxh3 for name, record in manifest.tensors.items()}
    else:
        for seal in container.seals:
            for name, place in digest_positions(seal, container):
                hashes[name] = read_digest(container.storage, seal, place)
    entries = {**container.left, **container.entries}
    source = Source(msgspec.structs.replace(container, entries=entries))
    witness.watch(
        [
            RecordedTensor(name, size, xxh3, span_ends(size)[0] if in_spans else size, _places(entries[name], source))
            for name, xxh3 in hashes.items()
            if name in entries and (size := entries[name].nbytes)
        ]
    )


def _places(entry: Entry, source: Source) -> tuple[Transfer, ...]:
    """Return the transfers that read a tensor's bytes."""
    if is_one_run(entry):
        (extent,) = entry.extents
        return (Transfer(extent.file, extent.offset, 0, entry.nbytes),)
    return tuple(source.transfers(identity_target(entry.name, entry)))


def _ranges(file: str, container: Container) -> Iterator[tuple[str, int, int]]:
    """Yield tensor name, start offset and end offset of each non-empty tensor in a file that was written with
    digests.
    """
    for name, entry in (*container.entries.items(), *container.left.items()):
        if entry.nbytes and entry.extents[0].file == file:
            begin = entry.extents[0].offset
            yield name, begin, begin + entry.nbytes


def digest_positions(seal: Seal, container: Container) -> Iterator[tuple[str, int]]:
    """Yield (tensor name, position of the tensor's digest) for each tensor of a file that was written with digests."""
    for name, begin, _ in _ranges(seal.file, container):
        if begin in seal.places:
            yield name, seal.places[begin]


def check_rest(seal: Seal, container: Container) -> Iterator[Refusal]:
    """Check that a file's bytes outside its tensors match their digest, and that every tensor has a digest."""
    ranges = list(_ranges(seal.file, container))
    if {begin for _, begin, _ in ranges} != seal.places.keys():
        yield Refusal("CORRUPT", "the number of digests is not the number of tensors", Where(seal.file))
    digest = digest_outside(container.storage, seal, ((begin, end) for _, begin, end in ranges))
    if digest != read_digest(container.storage, seal, seal.head):
        yield Refusal("CORRUPT", "the header, or other bytes around the tensors, were changed", Where(seal.file))
