"""The manifest `transaxle.json`: the description of a checkpoint that we wrote, with a hash of every tensor and header.

It is written last. While file sizes and header hashes match, it gives family and dialect without guessing, and `verify`
checks every tensor's bytes against it. Its own checksum covers the rest of its text.

Whatever is made of a checkpoint gets hashes of its own, by which damaged bytes would be right from then on. So a source
that has hashes, in a manifest or in its file, is held against them while it is read (`HashWitness`): bytes that pass in
the order in which they were hashed are hashed on their way, and only what passed otherwise is read once more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from threading import Lock, get_ident
from typing import TYPE_CHECKING

import msgspec
import xxhash

from transaxle.axes.geometry import Loop
from transaxle.axes.layout.relayout import identity_target, is_one_run
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.engine.source import Source
from transaxle.errors import Refusal, StorageError, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Seal, Shape, nbytes, read_digest, rest_of
from transaxle.formats.registry import MANIFEST, is_for_people, listed, tells_of_use
from transaxle.formats.storage.copier import Steps
from transaxle.formats.storage.storage import NotJsonError, Overlay, Storage, layer, parsed
from transaxle.move.transfer import Transfer

if TYPE_CHECKING:
    from transaxle.move.journal import ItemHash


SCHEMA, IN_SPANS = 2, 2
"""Versions of the manifest: the last one, and the first in which large tensors are hashed in spans."""
_BLOCK = 1 << 18
_NEAR, _IN_A_ROW = 1 << 14, 4
"""Bytes between small gaps that are near each other, and how many of them in a row tell that the next ones are too."""
_LARGEST = 1 << 30


class FileRecord(msgspec.Struct, frozen=True):
    """A file of the checkpoint."""

    size: int
    """Bytes."""
    head: int
    """Number of bytes that belong to no tensor: the headers of a tensor file, all of any other file."""
    xxh3: str
    """xxh3-128 of those bytes, in the order of the file, in hex."""


class TensorRecord(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint."""

    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """Logical elements along each dim."""
    xxh3: str
    """xxh3-128 of its row-major little-endian bytes, in hex; in version 2, of one of more than 256 MiB, xxh3-128 of
    the text of the hashes of each 256 MiB, one after another.
    """


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of `transaxle.json`."""

    transaxle: int = 1
    """Version of this schema."""
    format: str
    """Container format."""
    family: str | None
    """Model family."""
    dialect: str
    """Dialect of the names."""
    axes: dict[str, int]
    """Axis sizes, as far as they are the same in every layer."""
    aliases: dict[str, str]
    """Stored name -> stored name of the tensor it is tied to."""
    files: dict[str, FileRecord]
    """Every other file."""
    tensors: dict[str, TensorRecord]
    """Every tensor."""
    source: str | msgspec.UnsetType = msgspec.UNSET
    """What was read, where its URL leads to the same for ever: a hub's repository at a commit."""
    checksum: str = ""
    """xxh3-128 of this text with an empty checksum."""


def encode(manifest: Manifest) -> bytes:
    """Return the manifest's text, with its checksum.  Inverse: `decode`."""
    bare = msgspec.structs.replace(manifest, checksum="")
    from transaxle.move.journal import digest  # only manifests need it, and a look at other folders none

    checksum = digest(msgspec.json.encode(bare))
    return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(bare, checksum=checksum)), indent=1)


def decode(text: bytes, file: str = MANIFEST) -> Manifest:
    """Read a manifest's text.

    Raises:
        Refused: UNSUPPORTED for one of a later version; CORRUPT where it is malformed or was changed.
    """
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise refuse("CORRUPT", f"malformed: {error}", file=file) from None
    if manifest.transaxle > SCHEMA:
        message = f"the manifest has version {manifest.transaxle}; this program reads versions up to {SCHEMA}"
        raise refuse("UNSUPPORTED", message, file=file, hint="Use a newer Transaxle.")
    if encode(manifest) != text:
        raise refuse("CORRUPT", "the manifest's text was changed: its checksum does not match", file=file)
    return manifest


def has_manifest(container: Container) -> bool:
    """Tell whether a checkpoint has a manifest, whatever it says.

    A file that was named alone has its folder's, if that can be read and lists it.
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
    """Return a checkpoint's manifest, whatever it says; of a file that was named alone, what its folder's says of it.

    None where there is none.

    Raises:
        Refused: CORRUPT.
        StorageError: IO.
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
    """Return the manifest's statements about files that are no longer true.

    Args:
        manifest: from `load`.
        container: the checkpoint.
        files: check only these; None: all that it lists.
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
    """Return the size of a file, which may lie in a sub-folder; None if it is not there."""
    if "/" not in name and name not in present:
        return None
    try:
        return container.storage.size(name)
    except StorageError:
        return None


_Ranges = list[tuple[list[int], int]]
"""First bytes of ranges of one size, and that size."""


def _tensor_ranges(container: Container) -> dict[str, _Ranges]:
    """Return the byte ranges of every file that hold tensors."""
    alike: dict[tuple[str, str, Shape], list[int]] = {}
    copies = (twin.second for twin in (*container.twins, *container.uncompared))
    for entry in (*container.entries.values(), *container.left.values(), *copies):
        dtype = entry.dtype
        for extent in entry.extents:
            alike.setdefault((extent.file, dtype, extent.shape), []).append(extent.offset)
    ranges: dict[str, _Ranges] = {}
    for (file, dtype, shape), offsets in alike.items():
        if size := nbytes(dtype, shape):
            ranges.setdefault(file, []).append((offsets, size))
    return ranges


def _digest_around(container: Container, name: str, size: int, ranges: _Ranges) -> tuple[int, str]:
    """Return the number, and the xxh3-128, of a file's bytes outside its tensors."""
    state = xxhash.xxh3_128()
    starts, stops = _gaps(size, ranges)
    count, number = sum(stops) - sum(starts), 0
    reached = end_of_block = near = 0
    room = memoryview(bytearray(min(_BLOCK, size)))
    while number < len(starts):
        reached, stop = max(reached, starts[number]), stops[number]
        # Between small tensors there are small gaps: many of them are read together.
        near = near + 1 if max(reached - end_of_block, stop - reached) <= _NEAR else 0
        wanted = stop - reached if near < _IN_A_ROW else size - reached
        block = room[: min(_BLOCK, wanted)]
        container.storage.read_into(name, reached, block)
        begin, end_of_block = reached, reached + len(block)
        after = bisect_left(starts, end_of_block, number)
        here = zip([reached, *starts[number + 1 : after]], stops[number:after], strict=True)
        state.update(b"".join([block[start - begin : stop - begin] for start, stop in here]))
        reached, number = end_of_block, bisect_right(stops, end_of_block, number)
    return count, state.hexdigest()


def _gaps(size: int, ranges: _Ranges) -> tuple[list[int], list[int]]:
    """Return where the bytes of a file begin and end that are in none of the ranges."""
    starts, stops, reached = [], [], 0
    for begin, end in sorted((begin, begin + length) for begins, length in (*ranges, ([size], 0)) for begin in begins):
        if begin > reached:
            starts.append(reached)
            stops.append(begin)
        reached = max(reached, end)
    return starts, stops


def read_manifest(container: Container) -> Manifest | None:
    """Return the manifest if the checkpoint still matches it; None otherwise.

    Only files that hold or describe tensors, and config.json, are checked; `verify` checks the others.
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
_INTACT = "What would be written has the same bytes: convert an intact copy."
_MEANT = f"{_INTACT} If they are meant, delete {MANIFEST}: nothing is held against it then."
_MEANT_ALONE = f"{_INTACT} If they are meant, save the file anew, without the digests that it holds."
_MEANT_BESIDE = (
    f"Put the file back as it was. If the change is meant, let `transaxle verify` show that nothing else has changed, "
    f"and delete {MANIFEST}: nothing is held against it then."
)
_MEANT_CONFIG = f"If the change is meant, name the file (--config FILE, config=), or delete {MANIFEST}."


class RecordedTensor(msgspec.Struct, frozen=True):
    """A tensor whose hash is recorded."""

    name: str
    """Its stored name."""
    size: int
    """Bytes."""
    xxh3: str
    """Its hash, in hex."""
    span: int
    """Bytes of the spans in which it is hashed."""
    transfers: tuple[Transfer, ...]
    """Where its bytes are, sorted by where they belong in it."""


class _Passing(msgspec.Struct):
    """A span of a tensor whose bytes pass in order."""

    hashed: ItemHash
    thread: int
    """Who reads them: only one thread keeps the order."""
    reached: int
    """One past the last byte that has passed."""


class HashWitness(Overlay):
    """A storage that holds what is read of tensors against recorded hashes, once it is told these.

    Safe to share between threads.

    Args:
        below: the files.
        container: the checkpoint, as it is stored.
    """

    def __init__(self, below: Storage, container: Container | None = None) -> None:
        super().__init__(below)
        self.container = container
        self._records: Sequence[RecordedTensor] = ()
        self._starts: dict[str, list[int]] = {}
        self._pieces: dict[str, list[tuple[int, int, int]]] = {}
        """File -> first byte of a piece of a tensor, the tensor's number, and the piece's first byte in that."""
        self._ends: dict[str, list[int]] = {}
        self._passing: dict[tuple[int, int], _Passing] = {}
        self._spans: dict[int, dict[int, str]] = {}
        self._read: dict[int, int] = {}
        """Tensors of which bytes were read and that are not settled -> how many bytes."""
        self._settled: dict[int, bool] = {}
        self._scattered: set[int] = set()
        """Tensors with runs, or with bytes that others have too: they never pass in order."""
        self._elsewhere: set[int] = set()
        """Tensors that somebody else hashes on their way."""
        self._handed: set[int] = set()
        self._lock = Lock()

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest, if it is that of these tensors and not of others in the folder.

        Raises:
            Refused: CORRUPT, UNSUPPORTED.
            StorageError: IO.
        """
        manifest = None if self.container is None else load(self.container)
        if manifest is None or self.container is None or manifest.files.keys().isdisjoint(self.container.files):
            return None
        return manifest

    @property
    def is_holding(self) -> bool:
        """Whether it was told hashes."""
        return bool(self._records)

    def hold(self, records: Sequence[RecordedTensor]) -> None:
        """Begin to hold what is read against hashes; a second time nothing is done."""
        with self._lock:
            if self._records:
                return
            self._records = records
            found: dict[str, list[tuple[int, int, int, int]]] = {}
            for number, tensor in enumerate(records):
                for part in tensor.transfers:
                    place = -1 if part.loops else part.target
                    found.setdefault(part.file, []).append((part.source, part.source_span, number, place))
            for file, pieces in found.items():
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

    def alike(self, parts: Sequence[Transfer], size: int) -> int | None:
        """Return the number of the tensor that lies whole in a place, of which somebody will tell the hash.

        None if there is none, or if its hash is not that of its spans.
        """
        from transaxle.move.journal import span_ends  # here and below: a look at a checkpoint hashes nothing

        if len(parts) != 1 or parts[0].loops or parts[0].width != size or parts[0].file not in self._pieces:
            return None
        (part,) = parts
        at = bisect_left(self._starts[part.file], part.source)
        if at == len(self._starts[part.file]) or self._starts[part.file][at] != part.source:
            return None
        number = self._pieces[part.file][at][1]
        tensor = self._records[number]
        if tensor.size != size or tensor.span != span_ends(size)[0]:
            return None
        self._elsewhere.add(number)
        return number

    def settle(self, number: int, xxh3: str) -> None:
        """Take the hash of a tensor's bytes as they were read."""
        with self._lock:
            self._settled[number] = self._settled.get(number, True) and self._records[number].xxh3 == xxh3
            self._read.pop(number, None)

    def expect(self, parts: Iterable[Transfer]) -> None:
        """Note what somebody else has read; a file that is made of others, which are not known here, is of all."""
        numbers = self._scattered.copy()
        for part in parts:
            if part.file in self._pieces:
                numbers.update(number for number, _, _, _ in self._touched(part.file, part.source, part.source_span))
            else:
                numbers.update(range(len(self._records)))
        with self._lock:
            for number in numbers - self._settled.keys():
                self._read.setdefault(number, 0)

    def hand_over(self) -> tuple[str, ...]:
        """Return the tensors that proved to have their hashes since the last time.

        Those of which only some bytes were read here are left to whoever puts together what several have read.

        Raises:
            Refused: CORRUPT, for each tensor that does not have its hash.
            StorageError: IO.
        """
        self._judge([number for number, count in [*self._read.items()] if count >= self._records[number].size])
        with self._lock:
            self._read.clear()
            proved = sorted(self._settled.keys() - self._handed)
            self._handed.update(proved)
        return tuple(self._records[number].name for number in proved)

    def believe(self, names: Collection[str]) -> None:
        """Take the word of another process for tensors that have their hashes."""
        with self._lock:
            for number, tensor in enumerate(self._records):
                if tensor.name in names:
                    self._settled.setdefault(number, True)
                    self._read.pop(number, None)

    def recheck(self) -> None:
        """Check that no file has changed, and every tensor that was read against its hash.

        Raises:
            Refused: CORRUPT, for each tensor that does not have its hash.
            StorageError: IO.
        """
        super().recheck()
        self._judge([*self._read])

    def _judge(self, unsettled: Sequence[int]) -> None:
        """Read tensors whose bytes did not pass in order, and refuse all that do not have their hash."""
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
        """See `Storage`; runs are read once more for their hash."""
        self.below.add_read(steps, name, offset, view, width, loops)
        if loops:
            self._count(name, offset, width, loops)
        else:
            self._pass(steps, name, offset, view)

    def _count(self, name: str, offset: int, width: int, loops: Sequence[Loop]) -> None:
        if name not in self._pieces:
            return
        runs = Transfer(name, offset, 0, width, tuple(loops))
        with self._lock:
            for number, _, _, _ in self._touched(name, offset, runs.source_span):
                if number not in self._settled:
                    self._read[number] = self._read.get(number, 0) + runs.size

    def _pass(self, steps: Steps, name: str, offset: int, view: memoryview) -> None:
        """Hash bytes that were read, where they are the next ones of a tensor."""
        if name not in self._pieces or not view.nbytes:
            return
        octets = view.cast("B")
        for number, place, low, high in self._touched(name, offset, view.nbytes):
            with self._lock:
                if number in self._settled:
                    continue
                self._read[number] = self._read.get(number, 0) + high - low
            if number not in self._elsewhere:
                self._hash(number, place, octets[low - offset : high - offset], steps)

    def _hash(self, number: int, start: int, data: memoryview, steps: Steps) -> None:
        """Hash bytes of a tensor, from `start` on."""
        tensor = self._records[number]
        while len(data):
            at, inside = divmod(start, tensor.span)
            part = data[: tensor.span - inside]
            passing = self._next(number, at, inside)
            if passing is not None:
                passing.reached += len(part)
                passing.hashed.add_update(steps, 0, part)
                if passing.reached == min(tensor.span, tensor.size - at * tensor.span):
                    steps.then(partial(self._end, number, at, passing))
            start, data = start + len(part), data[len(part) :]

    def _next(self, number: int, at: int, inside: int) -> _Passing | None:
        """Return the span of a tensor whose next byte in this thread is this one; None: these bytes do not count."""
        from transaxle.move.journal import WHOLE, ItemHash

        with self._lock:
            passing = self._passing.get((number, at))
            if passing is None and not inside:
                passing = self._passing[number, at] = _Passing(ItemHash(WHOLE), get_ident(), 0)
            if passing is None or passing.reached != inside or passing.thread != get_ident():
                return None
            return passing

    def _end(self, number: int, at: int, passing: _Passing) -> None:
        """Note the hash of a span; with the last one, that of the tensor."""
        from transaxle.move.journal import join_hashes

        tensor = self._records[number]
        with self._lock:
            spans = self._spans.setdefault(number, {})
            spans[at] = passing.hashed.hexdigest()
            if len(spans) * tensor.span < tensor.size:
                return
            self._spans.pop(number)
            for each in spans:
                self._passing.pop((number, each), None)
        self.settle(number, join_hashes([spans[each] for each in sorted(spans)]))

    def _touched(self, file: str, offset: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the tensors that lie in a range of a file: number, first byte in it, and the bytes in the file."""
        pieces, ends, stop = self._pieces[file], self._ends[file], offset + size
        at = max(bisect_right(self._starts[file], offset) - 1, 0)
        while at < len(pieces) and pieces[at][0] < stop:
            start, number, place = pieces[at]
            low, high = max(start, offset), min(ends[at], stop)
            if low < high:
                yield number, place + low - start, low, high
            at += 1

    def _problem(self, tensor: RecordedTensor) -> Refusal:
        files = listed(list(dict.fromkeys(part.file for part in tensor.transfers)))
        hint = _MEANT if self.manifest is not None else _MEANT_ALONE
        return Refusal("CORRUPT", f"in the source, {CHANGED} ({files})", Where(self.path, tensor.name), hint)


def hashed(container: Container) -> Container:
    """Return a container that can hold what is read against hashes, where it has any."""
    if not has_hashes(container):
        return container
    return msgspec.structs.replace(container, storage=HashWitness(container.storage, container))


def has_hashes(container: Container) -> bool:
    """Tell whether something beside the tensors says what some of their bytes were: a manifest, or digests."""
    return bool(container.seals) or has_manifest(container)


def against(container: Container) -> str:
    """Return what says what all of the tensors' bytes were: `manifest`, `digests`, or nothing but the `structure`.

    Raises:
        Refused: as `HashWitness.manifest`.
        StorageError: IO.
    """
    witness = layer(container.storage, HashWitness)
    if witness is None or witness.container is None:
        return "structure"
    if witness.manifest is not None:
        return "manifest"
    container = witness.container  # under views its tensors may lie in files that do not exist
    files = {extent.file for entry in container.entries.values() for extent in entry.extents}
    return "digests" if container.seals and files <= {seal.file for seal in container.seals} else "structure"


def problems_of(storage: Storage, *, carries: bool, config_given: bool) -> Iterator[Refusal]:
    """Yield what is wrong with the bytes of a source outside its tensors, and with its list of files.

    Args:
        storage: its files, under whatever views.
        carries: files that only tell of the model's use are copied along; otherwise it does not matter what they say.
        config_given: the user gave a config, so that its own does not count.
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
        elif manifest is not None and tells_of_use(name):
            if not carries or _is_edited(container, name, manifest):
                continue
            hint = _MEANT_BESIDE
        message = f"in the source, {problem.message} ({name})"
        yield Refusal(problem.code, message, Where(container.path), problem.hint or hint)


def edited(storage: Storage, carried: Collection[str]) -> Iterator[str]:
    """Yield a note on each file that is copied along though it was edited since the manifest was written."""
    witness = layer(storage, HashWitness)
    if witness is None or witness.container is None:
        return
    try:
        manifest, container = witness.manifest, witness.container
        beside = [name for name in carried if tells_of_use(name)]
        changed = stale(manifest, container, beside) if manifest is not None and beside else []
    except TransaxleError:  # refused before anything is written
        return
    for name in (problem.where.file or "" for problem in changed):
        if manifest is not None and _is_edited(container, name, manifest):
            yield f"{name} was edited after the source's {MANIFEST} was written; it is copied as it is now"


def _is_edited(container: Container, name: str, manifest: Manifest) -> bool:
    """Tell whether somebody has edited a changed file, and it is not what damage leaves of one.

    That has the same length, is cut off, or no text. What only people read is anybody's to change.
    """
    if is_for_people(name):
        return True
    try:
        data = container.storage.read(name, 0, container.storage.size(name))
        text = data.decode()
        if name.endswith(".json"):
            return len(data) != manifest.files[name].size and bool(parsed(text))
    except (TransaxleError, UnicodeDecodeError, NotJsonError):
        return False
    return len(data) > manifest.files[name].size and "\0" not in text


def hold(storage: Storage) -> None:
    """Begin to hold what is read of a source against its own hashes, if it has any.

    Raises:
        Refused: CORRUPT, UNSUPPORTED for a manifest that cannot be read.
        StorageError: IO.
    """
    from transaxle.move.journal import span_ends

    witness = layer(storage, HashWitness)
    if witness is None or witness.container is None or witness.is_holding:
        return
    container, manifest = witness.container, witness.manifest
    in_spans = manifest is None or manifest.transaxle >= IN_SPANS
    hashes: dict[str, str] = {}
    if manifest is not None:
        hashes = {name: record.xxh3 for name, record in manifest.tensors.items()}
    else:
        for seal in container.seals:
            for name, place in sealed(seal, container):
                hashes[name] = read_digest(container.storage, seal, place)
    entries = {**container.left, **container.entries}
    source = Source(msgspec.structs.replace(container, entries=entries))
    witness.hold(
        [
            RecordedTensor(name, size, xxh3, span_ends(size)[0] if in_spans else size, _places(entries[name], source))
            for name, xxh3 in hashes.items()
            if name in entries and (size := entries[name].nbytes)
        ]
    )


def _places(entry: Entry, source: Source) -> tuple[Transfer, ...]:
    """Return where a tensor's bytes are."""
    if is_one_run(entry):
        (extent,) = entry.extents
        return (Transfer(extent.file, extent.offset, 0, entry.nbytes),)
    return tuple(source.transfers(identity_target(entry.name, entry)))


def _ranges(file: str, container: Container) -> Iterator[tuple[str, int, int]]:
    """Yield the tensors of a sealed file that have bytes: name, first byte, and the one after the last."""
    for name, entry in (*container.entries.items(), *container.left.items()):
        if entry.nbytes and entry.extents[0].file == file:
            begin = entry.extents[0].offset
            yield name, begin, begin + entry.nbytes


def sealed(seal: Seal, container: Container) -> Iterator[tuple[str, int]]:
    """Yield the tensors of a file that keeps digests, each with the place of its digest."""
    for name, begin, _ in _ranges(seal.file, container):
        if begin in seal.places:
            yield name, seal.places[begin]


def check_rest(seal: Seal, container: Container) -> Iterator[Refusal]:
    """Check the bytes outside the tensors of a file against their digest, and that every tensor has a digest."""
    ranges = list(_ranges(seal.file, container))
    if {begin for _, begin, _ in ranges} != seal.places.keys():
        yield Refusal("CORRUPT", "the number of digests is not the number of tensors", Where(seal.file))
    digest = rest_of(container.storage, seal, ((begin, end) for _, begin, end in ranges))
    if digest != read_digest(container.storage, seal, seal.head):
        yield Refusal("CORRUPT", "the header, or other bytes around the tensors, were changed", Where(seal.file))
