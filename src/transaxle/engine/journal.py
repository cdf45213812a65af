"""The journal of a conversion: which tensors are already written, so that an interrupted run can be continued.

One line per finished tensor, each with its own checksum; a torn last line is simply not there. A journal belongs to
one plan over one state of the source: anything else starts anew. What it lists is read back and hashed before it is
believed, so a resumed run gives the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO

from transaxle.encodings.codec import Error
from transaxle.engine.manifest import digest
from transaxle.formats.failure import failed
from transaxle.formats.place import JOURNAL

_NONE = "-"


@dataclass(frozen=True, slots=True)
class Done:
    """A tensor whose bytes are written."""

    hash: str
    """xxh3-128 of its bytes."""
    error: Error | None = None
    """How far the values are that it encodes, where it is encoded."""


def _written(error: Error | None) -> str:
    if error is None:
        return _NONE
    return f"{error.max!r},{error.square_sum!r},{error.count},{error.unequal}"


def _error(text: str) -> Error | None:
    """Inverse of `_written`."""
    if text == _NONE:
        return None
    most, squares, count, unequal = text.split(",")
    return Error(float(most), float(squares), int(count), int(unequal))


class Journal:
    """Finished tensors of one conversion.

    Args:
        folder: a folder that survives until the target is committed.
        key: hash of the plan and of the source's state.

    Raises:
        StorageError: IO, NO_SPACE.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / JOURNAL
        self._lock = Lock()
        self._first_line = f"transaxle journal 2 {key}".encode()
        with self._named("reading"):
            self.finished = self._read()
            """What an earlier run of the same plan recorded, by tensor."""
        with self._named("beginning"):
            self._file: IO[bytes] = self._open()

    def _read(self) -> dict[str, Done]:
        if not self._path.exists():
            return {}
        lines = self._path.read_bytes().split(b"\n")
        if lines[0] != self._first_line:
            return {}
        found: dict[str, Done] = {}
        for line in lines[1:]:
            checksum, _, rest = line.partition(b" ")
            if digest(rest).encode() == checksum:
                tensor_hash, error, name = rest.decode().split(" ", 2)
                found[name] = Done(tensor_hash, _error(error))
        return found

    def _open(self) -> IO[bytes]:
        if self.finished:
            return self._path.open("ab", buffering=0)
        file = self._path.open("wb", buffering=0)
        try:
            file.write(self._first_line + b"\n")
        except BaseException:
            file.close()
            raise
        return file

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise failed(error, f"{doing} the journal", os.fspath(self._path)) from error

    def add(self, name: str, done: Done) -> None:
        """Record a tensor whose bytes are written; names with line breaks are not recorded, only done again.

        Raises:
            StorageError: IO, NO_SPACE.
        """
        if "\n" in name:
            return
        rest = f"{done.hash} {_written(done.error)} {name}".encode()
        with self._lock, self._named("writing"):
            self._file.write(b"\n" + digest(rest).encode() + b" " + rest)  # first the break: a torn line stays alone

    def close(self) -> None:
        """Close the file."""
        self._file.close()
