"""Files of a checkpoint under other names: a sub-folder seen as the whole, or its files seen in the folder above."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from transaxle.axes.geometry.strided import Loop
from transaxle.formats.storage.compiled import StepBatch
from transaxle.formats.storage.storage import Listing, Overlay, Storage
from transaxle.formats.storage.strided_reads import FileRange, read_ranges, read_strided


class Renaming(Overlay):
    """Files that have other names in the storage below."""

    @abstractmethod
    def named(self, name: str) -> str:
        """Return a file's name in the storage below."""

    def size(self, name: str) -> int:
        """See `Storage`."""
        return self.below.size(self.named(name))

    def version(self, name: str) -> str:
        """See `Storage`."""
        return self.below.version(self.named(name))

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        self.below.read_into(self.named(name), offset, view)

    def note_read(self, batch: StepBatch, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        self.below.note_read(batch, self.named(name), offset, view)

    def note_strided(
        self, batch: StepBatch, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]
    ) -> None:
        """See `Storage`."""
        self.below.note_strided(batch, self.named(name), offset, view, width, loops)

    def read_strided(self, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
        """See `formats.storage.strided_reads.read_strided`."""
        read_strided(self.below, self.named(name), offset, view, width, loops)

    def read_ranges(self, ranges: Sequence[FileRange]) -> None:
        """See `formats.storage.strided_reads.read_ranges`."""
        read_ranges(self.below, [(self.named(name), offset, view) for name, offset, view in ranges])


class SubFolder(Renaming):
    """The files of a sub-folder under their names in it.

    Args:
        below: the checkpoint's files.
        folder: path of the sub-folder in it, without a `/` at the end.
    """

    def __init__(self, below: Storage, folder: str) -> None:
        super().__init__(below)
        self._folder = folder

    def named(self, name: str) -> str:
        """See `Renaming`."""
        return f"{self._folder}/{name}"

    def listing(self, folder: str = "") -> Listing:
        """See `Storage`."""
        return self.below.listing(self.named(folder) if folder else self._folder)


class LiftedFiles(Renaming):
    """A checkpoint's files, of which some that are in sub-folders appear in its own folder, too.

    Args:
        below: the checkpoint's files.
        lifted: name in its own folder, where no file has it -> path in the storage below.
    """

    def __init__(self, below: Storage, lifted: Mapping[str, str]) -> None:
        super().__init__(below)
        self._lifted = lifted

    def named(self, name: str) -> str:
        """See `Renaming`."""
        return self._lifted.get(name, name)

    def listing(self, folder: str = "") -> Listing:
        """See `Storage`."""
        listing = self.below.listing(folder)
        return listing if folder else replace(listing, names=tuple(sorted((*listing.names, *self._lifted))))
