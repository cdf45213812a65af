"""Small reads that follow one another closely, as those of headers between small tensors: many of them are one."""

from __future__ import annotations

from transaxle.formats.storage.storage import Storage

_NEAR = 1 << 14
"""Bytes between two reads that follow one another closely."""
_BLOCK = 1 << 16
_IN_A_ROW = 4
"""So many of them in a row, and the next ones are read at once. Between large tensors every other one is near."""
_MOST_FILES = 64


class _Block:
    """The latest bytes read of one file."""

    __slots__ = ("begin", "data", "near")

    def __init__(self) -> None:
        self.begin = 0
        self.data = b""
        self.near = 0
        """Reads in a row that were near."""


class NearReads:
    """Reads of a storage, in blocks where they are near each other.

    Args:
        storage: the files.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._blocks: dict[str, _Block] = {}

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Return bytes of a file; raises as `Storage.read`."""
        block = self._blocks.get(name)
        if block is None:
            if len(self._blocks) >= _MOST_FILES:
                self._blocks.clear()
            block = self._blocks[name] = _Block()
        low = offset - block.begin
        if low >= 0 and low + count <= len(block.data):
            return block.data[low : low + count]
        is_near = count <= _NEAR and abs(low - len(block.data)) <= _NEAR
        block.near = block.near + 1 if is_near else 0
        wanted = count
        if block.near >= _IN_A_ROW:
            wanted = max(count, min(_BLOCK, self._storage.size(name) - offset))
        data = self._storage.read(name, offset, wanted)
        block.begin, block.data = (offset, data) if wanted <= _BLOCK else (offset + wanted, b"")
        return data if wanted == count else data[:count]
