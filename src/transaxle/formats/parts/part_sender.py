"""What a worker sends of files that several workers write: whole parts, and its bytes of those that it shares.

Bytes may come in any order and from several threads. A part is sent when it is full, by threads of their own, while the
next one is filled. One that a dead worker has sent, and the service tags with the sum of just these bytes, is not sent
again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore, Lock

import xxhash

from transaxle.formats.catalog import Fragment
from transaxle.formats.parts.part_layout import FileParts, KeptShare, Part, SentPart
from transaxle.formats.remote.hidden_objects import BegunUpload, HiddenObjects
from transaxle.formats.remote.multipart import Multipart, StoredPart, gone

SENDERS = 4
"""Parts that a worker sends at once."""


class PartSender:
    """Takes what one item of work writes.

    Args:
        calls: of the service.
        hidden: what lies beside the target.
        begun: the uploads.
        layout: file -> its parts, of files that items write.
        item: number of the item.
        known: bytes that no item writes and that are known before any tensor is.
        stored: file -> parts that the service has already.
    """

    def __init__(
        self,
        calls: Multipart,
        hidden: HiddenObjects,
        begun: BegunUpload,
        layout: Mapping[str, FileParts],
        item: int,
        known: Iterable[Fragment],
        stored: Mapping[str, Mapping[int, StoredPart]],
    ) -> None:
        self._calls, self._hidden, self._begun = calls, hidden, begun
        self._layout, self._item, self._stored = layout, item, stored
        self._known: dict[str, list[Fragment]] = {}
        for fragment in known:
            self._known.setdefault(fragment.file, []).append(fragment)
        self._starts = {file: [part.start for part in parts.parts] for file, parts in layout.items()}
        self._lock = Lock()
        self._open: dict[tuple[str, int], _Filling] = {}
        self._done: set[tuple[str, int]] = set()
        self._room = BoundedSemaphore(SENDERS)
        self._pool = ThreadPoolExecutor(SENDERS, "transaxle-parts")
        self._sent: list[Future[SentPart | KeptShare]] = []

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Take bytes of a file; they are copied.

        Raises:
            StorageError: IO, also for what was sent before.
        """
        with view.cast("B") as octets:
            at, end = offset, offset + octets.nbytes
            while at < end:
                number = bisect_right(self._starts[file], at)
                part = self._layout[file].parts[number - 1]
                stop = min(end, part.stop)
                filling = self._filling(file, number, part)
                if filling.put(at, octets[at - offset : stop - offset]):
                    self._send(filling)
                at = stop

    def _filling(self, file: str, number: int, part: Part) -> _Filling:
        with self._lock:
            if (file, number) in self._done:
                raise ValueError(f"{file}: part {number} was full already")
            if (file, number) not in self._open:
                self._open[file, number] = self._started(file, number, part)
            return self._open[file, number]

    def _started(self, file: str, number: int, part: Part) -> _Filling:
        if part.item is None:
            shares = self._layout[file].shares(part)
            return _Filling(file, number, part, [(start, stop) for start, stop, item in shares if item == self._item])
        if part.item != self._item:
            raise ValueError(f"{file}: part {number} belongs to item {part.item}, not to {self._item}")
        filling = _Filling(file, number, part, [(part.start, part.stop)])
        for fragment in self._known.get(file, ()):
            start, stop = max(part.start, fragment.offset), min(part.stop, fragment.offset + len(fragment.data))
            if start < stop:
                data = memoryview(fragment.data)[start - fragment.offset : stop - fragment.offset]
                filling.put(start, data)
        return filling

    def _send(self, filling: _Filling) -> None:
        with self._lock:
            del self._open[filling.file, filling.number]
            self._done.add((filling.file, filling.number))
        for each in self._sent:
            if each.done() and each.exception() is not None:
                each.result()
        self._room.acquire()
        try:
            self._sent.append(self._pool.submit(self._carry, filling))
        except BaseException:
            self._room.release()
            raise

    def _carry(self, filling: _Filling) -> SentPart | KeptShare:
        try:
            file, number, data = filling.file, filling.number, filling.data
            found = xxhash.xxh3_128_hexdigest(data)
            if filling.part.item is None:
                name = f"{self._item}-{sorted(self._layout).index(file)}-{number}"
                self._hidden.put_share(name, bytes(data))
                return KeptShare(file, number, name, found)
            upload = self._begun.uploads.get(file)
            if upload is None:
                raise gone(file)
            stored = self._stored.get(file, {}).get(number)
            if stored is not None and stored.is_of(data):
                return SentPart(file, number, stored.etag, len(data), found)
            etag = self._calls.send_part(self._begun.places[file], upload, number, data, file)
            return SentPart(file, number, etag, len(data), found)
        finally:
            self._room.release()

    def flush(self) -> tuple[tuple[SentPart, ...], tuple[KeptShare, ...]]:
        """Wait until everything is sent, and return it.

        Raises:
            StorageError: IO.
            ValueError: the item has not written all that is its own.
        """
        for file, parts in self._layout.items():
            # Parts of which the item writes nothing: large headers.
            for number, part in parts.of_item(self._item):
                if (file, number) not in self._done:
                    filling = self._filling(file, number, part)
                    if filling.left == 0:
                        self._send(filling)
        if self._open:
            file, number = next(iter(self._open))
            raise ValueError(f"{file}: {self._open[file, number].left} bytes of part {number} were not written")
        sent = [each.result() for each in self._sent]
        parts_sent = tuple(each for each in sent if isinstance(each, SentPart))
        return parts_sent, tuple(each for each in sent if isinstance(each, KeptShare))

    def close(self) -> None:
        """Send nothing that is not on its way already, and wait for that."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._open.clear()


class _Filling:
    """A part, or an item's share of one, that is being filled.

    Args:
        file: of the target.
        number: of the part.
        part: it.
        ranges: which bytes of it come, in order.
    """

    def __init__(self, file: str, number: int, part: Part, ranges: list[tuple[int, int]]) -> None:
        self.file, self.number, self.part = file, number, part
        self.left = sum(stop - start for start, stop in ranges)
        """Bytes that have not come."""
        self.data = bytearray(self.left)
        """The bytes of the ranges, joined."""
        self._ranges = ranges
        self._lock = Lock()

    def put(self, offset: int, octets: memoryview) -> bool:
        """Take bytes; tell whether they were the last ones."""
        stop, before, taken = offset + octets.nbytes, 0, 0
        for first, last in self._ranges:
            low, high = max(first, offset), min(last, stop)
            if low < high:
                self.data[before + low - first : before + high - first] = octets[low - offset : high - offset]
                taken += high - low
            before += last - first
        if taken != octets.nbytes:
            raise ValueError(f"{self.file}: bytes {offset} to {stop} are not this item's")
        with self._lock:
            self.left -= taken
            if self.left < 0:
                raise ValueError(f"{self.file}: bytes {offset} to {stop} came twice")
            return self.left == 0
