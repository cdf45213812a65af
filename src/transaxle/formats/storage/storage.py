"""Where the bytes of one checkpoint are read from: the small interface that a local folder and a URL both offer.

Readers know names, sizes and byte ranges, nothing else. So what holds for one storage (a name never leaves the
checkpoint, a short read is an error, nothing is memory-mapped) holds for every format read through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from transaxle.axes.geometry.strided import Loop
from transaxle.errors import Refusal
from transaxle.formats.storage.strided_reads import read_each, read_strided


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies directly in one folder of a checkpoint, sorted by name."""

    names: tuple[str, ...]
    """Regular files, links to them included where they may be followed."""
    folders: tuple[str, ...]
    """Sub-folders."""
    special: Mapping[str, Refusal]
    """Everything else, with the reason why it is not read: FIFOs, devices, sockets, links that lead elsewhere."""

    def everything(self) -> tuple[str, ...]:
        """Return the names of all files, those that will be refused when they are read included."""
        return tuple(sorted((*self.names, *self.special)))


class Storage(Protocol):
    """Read access to the files of one checkpoint. Safe to share between threads."""

    @property
    def path(self) -> str:
        """The path as the user typed it."""

    @property
    def single(self) -> str | None:
        """Name of the one file that the path denotes; None where it denotes a folder."""

    def listing(self, folder: str = "") -> Listing:
        """List the checkpoint's folder or one of its sub-folders; names are bare, without the folder.

        Raises:
            Refused: PATH_ESCAPE.
            StorageError: IO.
        """

    def names(self) -> tuple[str, ...]:
        """Return the names of the regular files directly in the checkpoint's folder."""
        return self.listing().names

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            Refused: PATH_ESCAPE; UNSUPPORTED for anything that is not a regular file; CORRUPT if it was changed.
            StorageError: IO for a missing or unreadable file.
        """

    def version(self, name: str) -> str:
        """Return a text that changes when the file does: for a local one its place, size and time of change.

        Raises as `size`.
        """

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the bytes that start at `offset`.

        Raises:
            Refused: as `size`; CORRUPT if the file ends before the view is full.
            StorageError: IO.
        """

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; raises as `read_into`."""
        buffer = bytearray(size)
        with memoryview(buffer) as view:
            self.read_into(name, offset, view)
        return bytes(buffer)

    def recheck(self) -> None:
        """Check that no file that was read has changed since; worth doing before what was made of them is published.

        Raises:
            Refused: CORRUPT.
            StorageError: IO.
        """

    def close(self) -> None:
        """Release what is held open. Reading afterwards is a ValueError."""


class Overlay(Storage):
    """A storage over another one: what a subclass does not say for itself, the one below says.

    Args:
        below: the storage that it stands over.
    """

    def __init__(self, below: Storage) -> None:
        self.below = below

    @property
    def path(self) -> str:
        """See `Storage`."""
        return self.below.path

    @property
    def single(self) -> str | None:
        """See `Storage`."""
        return self.below.single

    def listing(self, folder: str = "") -> Listing:
        """See `Storage`."""
        return self.below.listing(folder)

    def size(self, name: str) -> int:
        """See `Storage`."""
        return self.below.size(name)

    def version(self, name: str) -> str:
        """See `Storage`."""
        return self.below.version(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        self.below.read_into(name, offset, view)

    def recheck(self) -> None:
        """See `Storage`."""
        self.below.recheck()

    def close(self) -> None:
        """See `Storage`."""
        self.below.close()


class Virtual(Protocol):
    """A file that does not exist: its bytes are made when they are read."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the bytes that start at `offset`; safe from several threads."""


@dataclass(frozen=True, slots=True)
class Octets:
    """Bytes at hand, as a file."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """See `Virtual`."""
        return len(self.data)

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `Virtual`."""
        view.cast("B")[:] = self.data[offset : offset + view.nbytes]


class Beside(Overlay):
    """A storage, and beside its files some that do not exist.

    Args:
        below: the files that do.
        files: the others, by names that no file has.
    """

    def __init__(self, below: Storage, files: Mapping[str, Virtual]) -> None:
        super().__init__(below)
        self._files = files

    def size(self, name: str) -> int:
        """See `Storage`."""
        found = self._files.get(name)
        return super().size(name) if found is None else found.nbytes

    def version(self, name: str) -> str:
        """See `Storage`; what is made changes with the files that it is made of."""
        return "" if name in self._files else super().version(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        found = self._files.get(name)
        if found is None:
            super().read_into(name, offset, view)
        else:
            found.read_into(offset, view)

    def read_strided(self, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
        """See `formats.strided.read_strided`."""
        if name in self._files:
            read_each(self, name, offset, view, width, loops)
        else:
            read_strided(self.below, name, offset, view, width, loops)


Layer = TypeVar("Layer", bound=Overlay)


def layer(storage: Storage, kind: type[Layer]) -> Layer | None:
    """Return the uppermost overlay of a kind in a storage; None where there is none."""
    while isinstance(storage, Overlay):
        if isinstance(storage, kind):
            return storage
        storage = storage.below
    return None
