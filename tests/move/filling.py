"""Transfers and runs carried out alone, at once, and files that are read so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from transaxle.axes.geometry import Loop
from transaxle.formats.storage.copier import Bytes, Steps, read_strided
from transaxle.move.transfer import Readable, Scratch, Transfer, add_transfer


class PlainFiles(ABC):
    """Files whose runs are read one by one."""

    @abstractmethod
    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Readable`."""

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """See `Readable`."""
        steps.call(partial(read_strided, partial(self.read_into, name), offset, view, width, loops))


def fill(reader: Readable, transfer: Transfer, out: Bytes, start: int, scratch: Scratch) -> None:
    """Carry a transfer out into a buffer; see `add_transfer`."""
    with Steps() as steps:
        add_transfer(steps, reader, transfer, out, start, scratch)
        steps.run()


def read_runs(reader: Readable, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
    """Read runs of a file into their places; see `Storage.add_read`."""
    with Steps() as steps:
        reader.add_read(steps, name, offset, view if loops else view[:width], width, loops)
        steps.run()
