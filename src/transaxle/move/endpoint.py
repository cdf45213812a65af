"""Endpoints: what bytes are moved from, and to. Files of a storage and the memory of ranks look alike here."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
"""One-dimensional."""


class Readable(Protocol):
    """What transfers read from: the files of a storage (`formats.Storage`)."""

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a file from `offset`."""


class Shared(Readable, Protocol):
    """The memory of several ranks, as one storage: each file is a tensor's part that one of them holds."""

    def lend(self, name: str, offset: int, size: int) -> Bytes:
        """Return bytes of this rank's own files without copying them; nobody writes to them."""

    def owner(self, name: str) -> int:
        """Return the rank that holds a file; the others cannot read it."""
