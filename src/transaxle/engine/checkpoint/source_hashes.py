"""Checks the bytes that are read from a source against the source's own hashes, in a manifest or in its files.

A conversion hashes the bytes that it writes, so damaged source bytes would from then on have a correct hash; a model
would train with them. Therefore a source that has hashes is checked against them while it is read (`HashWitness`).
Bytes that are read in the order in which they were hashed are hashed at the same time; all other bytes are read a
second time. The option `check_source=False` accepts damaged bytes, and the report says so.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from threading import Lock, get_ident
from typing import TYPE_CHECKING

import msgspec

from transaxle.axes.geometry import Loop
from transaxle.axes.layout.relayout import identity_target, is_one_run
from transaxle.engine.checkpoint.manifest import IN_SPANS, Manifest, describe_change, has_manifest, load, stale
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.engine.source import Source
from transaxle.errors import Refusal, Refused, TransaxleError, Where, gathered
from transaxle.formats.catalog import Container, Entry, Recoding, Seal, digest_outside, read_digest
from transaxle.formats.registry import MANIFEST, is_for_people, is_for_use, join_names
from transaxle.formats.storage.copier import Steps
from transaxle.formats.storage.storage import NotJsonError, Overlay, Storage, layer, parse_json
from transaxle.move.transfer import Transfer

if TYPE_CHECKING:
    from transaxle.move.journal import ItemHash


_MAX_EARLY = 1 << 16
"""Maximum number of byte ranges that are remembered of the reads before a conversion; if there are more, all tensors
count as read.
"""
_ONE_RUN, _INTERLEAVED = -1, -2
"""Places of a strided piece of a tensor, which has no single offset in the tensor: one run of bytes in the file, or
several.
"""
_SHARE = 2
"""A load that needs 1/`_SHARE` of a tensor's bytes, or more, reads the rest too to compare the tensor with its hash, so
tensors with padding that the model lacks are compared.
"""
UNCHECKED = "unchecked"
"""What a report says a source was checked against, if it was not checked."""
_EVIDENCE = ("structure", "digests", "manifest")
"""What a report says a source was checked against, if it was checked; from the weakest evidence to the strongest."""
_INTACT = "What is made of damaged bytes is damaged too: use an intact copy."
_NO_CHECK = "pass --no-check-source (check_source=False)"
_MEANT = f"{_INTACT} If the change is intended, {_NO_CHECK}, or delete {MANIFEST}."
_MEANT_ALONE = f"{_INTACT} If the change is intended, {_NO_CHECK}."
_MEANT_BESIDE = (
    f"Restore the file. If the change is intended, let `transaxle verify SRC` show that nothing else has "
    f"changed, and delete {MANIFEST}."
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


class BytesRead(msgspec.Struct, frozen=True):
    """What one process has read of the tensors that have recorded hashes."""

    compared: tuple[int, ...]
    """Numbers of the tensors that were compared with their hashes."""
    sizes: dict[int, int]
    """Number of each other tensor that was read -> count of its bytes that were read."""


class HashWitness(Overlay):
    """A storage that, once `watch` was called, checks the bytes of tensors against recorded hashes while they are read.

    A `HashWitness` can be shared between threads.

    Args:
        below: the storage that contains the files.
        container: the checkpoint with the tensors that the hashes are of.
        is_chosen: whether the checkpoint was opened with different tensors, by a choice of weights.
    """

    def __init__(self, below: Storage, container: Container | None = None, *, is_chosen: bool = False) -> None:
        super().__init__(below)
        self.container = container
        self.is_chosen = is_chosen
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
        self._settled: set[int] = set()
        """Numbers of the tensors that were compared with their recorded hashes."""
        self._wrong: dict[int, str] = {}
        """Number of a tensor that does not match its recorded hash -> hash of the bytes that were read."""
        self._early: set[tuple[str, int, int]] = set()
        """Byte ranges that were read before `watch`, such as the codebooks and shapes of encoded tensors, each as
        (file, offset, size).
        """
        self._scattered: set[int] = set()
        """Numbers of tensors that are never read in order, because they are read in strided runs or share bytes with
        other tensors.
        """
        self._uncounted: set[int] = set()
        """Numbers of the tensors in `_scattered` of which it is unknown how many bytes were read."""
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
                    strided = _ONE_RUN if part.source_span == part.size else _INTERLEAVED
                    place = strided if part.loops else part.target
                    pieces_by_file.setdefault(part.file, []).append((part.source, part.source_span, number, place))
            for file, pieces in pieces_by_file.items():
                pieces.sort()
                self._pieces[file], self._ends[file] = [], []
                for start, size, number, place in pieces:
                    if place < 0:
                        self._scattered.add(number)
                    if place == _INTERLEAVED or (self._ends[file] and start < self._ends[file][-1]):
                        self._scattered.add(number)
                        self._uncounted.add(number)
                        continue
                    self._pieces[file].append((start, number, place))
                    self._ends[file].append(start + size)
                self._starts[file] = [start for start, _, _ in self._pieces[file]]
            self._read = dict.fromkeys(self._scattered, 0)
            if len(self._early) == _MAX_EARLY:
                self._read = {number: tensor.size for number, tensor in enumerate(records)}
            for file, offset, size in self._early:
                for number, place, low, high in self._tensors_in(file, offset, size) if file in self._pieces else ():
                    # a header is often read together with the beginning of a tensor, which is not used
                    is_used = not place and high - low == records[number].size
                    self._read[number] = self._read.get(number, 0) + (high - low if is_used else 0)
            self._early.clear()

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
        _, number, place = self._pieces[part.file][index]
        tensor = self._records[number]
        if place or tensor.size != size or tensor.span != span_ends(size)[0]:
            return None
        self._hashed_elsewhere.add(number)
        return number

    def settle(self, number: int, xxh3: str) -> None:
        """Compare the hash of the tensor's bytes that were read with the recorded hash."""
        with self._lock:
            self._settled.add(number)
            if xxh3 != self._records[number].xxh3:
                self._wrong[number] = xxh3
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
            for number in numbers - self._settled:
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
            proved = sorted(self._settled - self._reported)
            self._reported.update(proved)
        return tuple(self._records[number].name for number in proved)

    def reads(self) -> BytesRead:
        """Return which tensors this process has compared with their hashes, and the sizes of what it read of others."""
        with self._lock:
            sizes = {number: count for number, count in self._read.items() if count}
            sizes |= {number: self._records[number].size for number in self._uncounted - self._settled}
            return BytesRead(tuple(sorted(self._settled)), sizes)

    def read_mostly(self, of_all: Sequence[BytesRead]) -> dict[int, bool]:
        """Return the number of each tensor that was read, but not yet compared with its hash -> whether at least
        1/`_SHARE` of it was read.

        Args:
            of_all: what each process has read.
        """
        totals = Counter[int]()
        for of_process in of_all:
            totals.update(of_process.sizes)
        for number in chain.from_iterable(of_process.compared for of_process in of_all):
            totals.pop(number, None)
        return {number: totals[number] * _SHARE >= self._records[number].size for number in sorted(totals)}

    def compare(self, numbers: Sequence[int]) -> None:
        """Read tensors and compare them with their hashes; forget what else was read.

        Raises:
            Refused: with code CORRUPT, for each tensor that does not match its hash, also of those read before.
            StorageError: with code IO, if a file cannot be read.
        """
        self._check_hashes(numbers)
        with self._lock:
            self._read.clear()

    def name_of(self, number: int) -> str:
        """Return the stored name of a tensor."""
        return self._records[number].name

    def accept(self, names: Collection[str]) -> None:
        """Count tensors as intact, because another process has checked them against their hashes."""
        with self._lock:
            for number, tensor in enumerate(self._records):
                if tensor.name in names:
                    self._settled.add(number)
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
        if self._wrong:
            raise gathered([self._problem(self._records[each], xxh3) for each, xxh3 in sorted(self._wrong.items())])

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Copy bytes as `Storage.add_read` does; the bytes of strided runs are read a second time for their hash."""
        self.below.add_read(steps, name, offset, view, width, loops)
        if not self._records:
            self._note_early(name, offset, view.nbytes, width, loops)
        elif loops:
            self._count_read(name, offset, width, loops)
        else:
            self._hash_read(steps, name, offset, view)

    def _note_early(self, name: str, offset: int, size: int, width: int, loops: Sequence[Loop]) -> None:
        """Remember a read before `watch`, because the conversion may depend on the bytes."""
        span = Transfer(name, offset, 0, width, tuple(loops)).source_span if loops else size
        with self._lock:
            if len(self._early) < _MAX_EARLY:
                self._early.add((name, offset, span))

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
            if place >= 0 and number not in self._hashed_elsewhere:
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
        """Yield the tensors in a byte range of a file, each as its number, the offset in the tensor (negative if it is
        strided), and its range in the file.
        """
        pieces, ends, stop = self._pieces[file], self._ends[file], offset + size
        index = max(bisect_right(self._starts[file], offset) - 1, 0)
        while index < len(pieces) and pieces[index][0] < stop:
            start, number, place = pieces[index]
            low, high = max(start, offset), min(ends[index], stop)
            if low < high:
                yield number, place + low - start if place >= 0 else place, low, high
            index += 1

    def _problem(self, tensor: RecordedTensor, xxh3: str) -> Refusal:
        files = join_names(list(dict.fromkeys(part.file for part in tensor.transfers)))
        hint = _MEANT if self.manifest is not None else _MEANT_ALONE
        message = f"in the source, {describe_change(tensor.xxh3, xxh3)} ({files})"
        return Refusal("CORRUPT", message, Where(self.path, tensor.name), hint)


def with_hash_witness(container: Container, open_as_written: Callable[[], Container] | None = None) -> Container:
    """Return a container that checks the bytes it reads against recorded hashes, if the checkpoint has recorded
    hashes.

    Args:
        container: the open checkpoint.
        open_as_written: function that opens the checkpoint again with the tensors that the hashes are of; None means
            that `container` has them. With a choice of weights, a tensor's name can mean a different tensor.

    Raises:
        TransaxleError: any error of opening the checkpoint again.
    """
    if not has_hashes(container):
        return container
    written = None
    if open_as_written is not None:
        opened = open_as_written()
        opened.storage.close()
        written = msgspec.structs.replace(opened, storage=container.storage)
    witness = HashWitness(container.storage, written or container, is_chosen=written is not None)
    return msgspec.structs.replace(container, storage=witness)


def as_written(container: Container) -> Container:
    """Return a checkpoint with the tensors that its recorded hashes are of, whichever weights were chosen when it was
    opened.
    """
    witness = layer(container.storage, HashWitness)
    if witness is None or witness.container is None or not witness.is_chosen:
        return container
    return msgspec.structs.replace(witness.container, storage=container.storage)


def has_hashes(container: Container) -> bool:
    """Return whether hashes of at least some tensors are recorded, in a manifest or as digests in the files."""
    return bool(container.seals) or has_manifest(container)


def hash_evidence(container: Container) -> str:
    """Return where the hashes of all tensors of a checkpoint, its adapter and its base are recorded: `manifest` or
    `digests`; `structure` means that one of these has no hashes.

    Raises:
        Refused: any refusal that `HashWitness.manifest` raises.
        StorageError: with code IO, if the manifest cannot be read.
    """
    return min(map(_evidence_of, containers_of(container)), key=_EVIDENCE.index)


def _evidence_of(container: Container) -> str:
    witness = layer(container.storage, HashWitness)
    if witness is None or witness.container is None:
        return "structure"
    if witness.manifest is not None:
        return "manifest"
    container = witness.container  # the container of the view is not used, because its tensors may be in virtual files
    files = {extent.file for entry in container.entries.values() for extent in entry.extents}
    return "digests" if container.seals and files <= {seal.file for seal in container.seals} else "structure"


def problems_of(
    storage: Storage, *, copies_about_use: bool, config_given: bool, files: Collection[str] | None = None
) -> Iterator[Refusal]:
    """Yield problems of a source's bytes outside its tensors, and of its list of files.

    Args:
        storage: the files of the source, or a storage that wraps them.
        copies_about_use: whether files that only concern the use of the model (tokenizer, chat template) are copied
            too; if not, their content is not checked.
        config_given: whether the user gave a config; if so, the source's own config is not checked.
        files: names of the files to check, which contain no tensors; None means all files.
    """
    witness = layer(storage, HashWitness)
    if witness is None or witness.container is None:
        return
    container, manifest = witness.container, None
    try:
        manifest = witness.manifest
        problems = [] if manifest is None else stale(manifest, container, files)
        if manifest is None and files is None:
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


def containers_of(container: Container) -> Iterator[Container]:
    """Yield the containers whose bytes a checkpoint has: its own, and that of an adapter or a base."""
    yield container
    yield from container.recoding.additional.values()


@contextmanager
def damage_first(storage: Storage, recoding: Recoding, *, is_checked: bool) -> Iterator[None]:
    """Refuse damaged tensors instead of what the block refuses, since damage may explain it: of two copies that differ,
    one may be damaged. Only tensors that were read are compared with their hashes.

    Args:
        storage: storage of the source.
        recoding: the source's `Recoding`, which has its adapter or base.
        is_checked: whether to compare anything; if True, `watch_hashes` was called before.

    Raises:
        Refused: with code CORRUPT, if tensors do not match their hashes; else what the block raises.
    """
    try:
        yield
    except Refused:
        storages = [storage, *(container.storage for container in recoding.additional.values())]
        for witness in [layer(files, HashWitness) for files in storages if is_checked]:
            if witness is not None:
                witness.compare(tuple(witness.reads().sizes))
        raise


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
    if manifest is not None:
        hashes = {name: record.xxh3 for name, record in manifest.tensors.items()}
    else:
        hashes = {
            name: read_digest(container.storage, seal, place)
            for seal in container.seals
            for name, place in digest_positions(seal, container)
        }
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
    expected = read_digest(container.storage, seal, seal.head)
    if digest != expected:
        message = describe_change(expected, digest, "the header, or other bytes around the tensors, were changed")
        yield Refusal("CORRUPT", message, Where(seal.file))
