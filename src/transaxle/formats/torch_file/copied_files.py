"""Files of ranks that are copies of another rank's: parts are alike in shape, so both would pass for the model's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from transaxle.formats.catalog import Checksum
from transaxle.formats.storage.storage import Storage

_CHUNK = 1 << 20


def copied(storage: Storage, files: Iterable[tuple[str, tuple[Checksum, ...]]]) -> Iterator[tuple[str, str]]:
    """Yield each file that is an earlier one byte by byte, with that one; only those with equal checksums are read.

    Args:
        storage: where they are.
        files: each with the checksums in it.
    """
    alike: dict[tuple[object, ...], str] = {}
    for file, checksums in files:
        size = storage.size(file)
        sums = ((each.offset, each.crc32) for each in checksums)
        first = alike.setdefault((size, *sums), file)
        if first != file and all(
            storage.read(first, at, min(_CHUNK, size - at)) == storage.read(file, at, min(_CHUNK, size - at))
            for at in range(0, size, _CHUNK)
        ):
            yield file, first
