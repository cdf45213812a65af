"""The storages of a torch file: what its pickle says of each, held against the bytes that are there.

torch.load believes the pickle: it takes a record of eight bytes per element for four, or for a storage that was never
written it hands out whatever lies in memory. Here a storage has one type, one size, and exactly so many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from transaxle.formats.dtype import ITEM_BITS
from transaxle.formats.pickled.descriptors import DType, StorageType
from transaxle.formats.pickled.fault import PickleFault, malformed
from transaxle.formats.storage.names import is_plain

STORAGE, _MODULE = "storage", "module"
"""First items of persistent ids."""
_MAX_COUNT = 2**63 - 1
BYTE = DType("uint8")


def item_bytes(dtype: DType) -> int:
    """Return the bytes of one element as torch counts them: two F4 values are one."""
    return max(ITEM_BITS[dtype.code] // 8, 1)


@dataclass(slots=True, eq=False)
class Stored:
    """One storage."""

    key: str
    """Its name in the file."""
    dtype: DType
    """Type of its elements; untyped storages are bytes."""
    count: int
    """Number of elements."""
    offset: int = 0
    """Its first byte in the file, once that is known."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * item_bytes(self.dtype)


class Storages:
    """The storages that a pickle has referred to so far, by key.

    Args:
        legacy: the file is of the form that torch wrote before 1.6.
    """

    def __init__(self, *, legacy: bool) -> None:
        self._legacy = legacy
        self.found: dict[str, Stored] = {}
        self._views: dict[str, tuple[Stored, int, Stored]] = {}

    def refer(self, pid: object) -> Stored:
        """Resolve a persistent id: `("storage", type, key, device, elements)`, in old files with the view it is of.

        Raises:
            PickleFault: CORRUPT if it is none, or contradicts an earlier one; UNSUPPORTED for code that was saved.
        """
        if type(pid) is not tuple or len(pid) < 2:
            raise malformed("a persistent id is no storage")
        what, *rest = pid
        if what == _MODULE:
            raise PickleFault("it holds the source of a module", "UNSUPPORTED")
        if what != STORAGE or len(rest) != (5 if self._legacy else 4):
            raise malformed("a persistent id is no storage")
        kind, key, device, count = rest[:4]
        if type(kind) is not StorageType or type(key) is not str or type(device) not in (str, bytes):
            raise malformed("the persistent id of a storage is malformed")
        if type(count) is not int or not 0 <= count <= _MAX_COUNT // 16:
            raise malformed(f"storage {key[:80]!r} has an impossible number of elements")
        if not is_plain(key):
            raise malformed(f"{key[:80]!r} is no name of a storage")
        stored = self._agreed(Stored(key, kind.dtype or BYTE, count))
        return self._view(stored, rest[4]) if self._legacy and rest[4] is not None else stored

    @property
    def clash(self) -> str | None:
        """A key that is that of a storage and of a view of one; None where there is none."""
        return min(self.found.keys() & self._views.keys(), default=None)

    def settle(self, start: int) -> None:
        """Count all places from the beginning of the file, and give views of storages theirs.

        Args:
            start: byte of the file from which the storages' places were counted.
        """
        for stored in self.found.values():
            stored.offset += start
        for root, first, view in self._views.values():
            view.offset = self.found[root.key].offset + first * item_bytes(view.dtype)

    def _view(self, root: Stored, said: object) -> Stored:
        """Return a part of a storage that releases before 0.4 saved as one: `(key, first element, elements)`."""
        if type(said) is not tuple or len(said) != 3 or type(said[0]) is not str:
            raise malformed(f"the view of storage {root.key!r} is malformed")
        key, first, count = said
        if not is_plain(key):
            raise malformed(f"{key[:80]!r} is no name of a view of a storage")
        if type(first) is not int or type(count) is not int or not 0 <= first <= first + count <= root.count:
            raise malformed(f"the view {key!r} does not lie in storage {root.key!r}, which has {root.count} elements")
        known, begin, view = self._views.setdefault(key, (root, first, Stored(key, root.dtype, count)))
        if (known.key, begin, view.dtype, view.count) != (root.key, first, root.dtype, count):
            raise malformed(f"the view {key!r} is said to be two parts of storages")
        return view

    def _agreed(self, said: Stored) -> Stored:
        known = self.found.setdefault(said.key, said)
        if known.nbytes != said.nbytes or (known.dtype != said.dtype and said.nbytes):
            first, second = (f"{one.count} elements of {one.dtype.name}" for one in (known, said))
            raise malformed(f"storage {said.key!r} is said to hold {first}, and elsewhere {second}")
        return known if known.dtype == said.dtype else said
