"""The storages of a torch file, as its pickle describes them, checked against the bytes that exist.

torch.load trusts the pickle: it reads a record of eight bytes per element as four, and for a storage that was never
written it returns uninitialised memory. Here a storage has one dtype, one size, and exactly that many bytes.
"""

from __future__ import annotations

import msgspec

from transaxle.formats.dtype import ITEM_BITS
from transaxle.formats.pickled.descriptors import DType, StorageType
from transaxle.formats.pickled.fault import PickleFault, malformed
from transaxle.formats.storage.storage import is_plain

STORAGE, _MODULE = "storage", "module"
"""First items of persistent ids."""
_MAX_COUNT = 2**63 - 1
BYTE = DType("uint8")


def item_bytes(dtype: DType) -> int:
    """Return the bytes of one element as torch counts them: two F4 values are one."""
    return max(ITEM_BITS[dtype.code] // 8, 1)


class StoredStorage(msgspec.Struct, eq=False):
    """One storage."""

    key: str
    """Its name in the file."""
    dtype: DType
    """Type of its elements; untyped storages are bytes."""
    count: int
    """Number of elements."""
    offset: int = 0
    """Its first byte in the file, once it is known."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * item_bytes(self.dtype)


class Storages:
    """The storages that a pickle has referred to so far, by key.

    Args:
        legacy: the file has the format that torch wrote before 1.6.
    """

    def __init__(self, *, legacy: bool) -> None:
        self._legacy = legacy
        self.by_key: dict[str, StoredStorage] = {}
        self._views: dict[str, tuple[StoredStorage, int, StoredStorage]] = {}

    def refer(self, pid: object) -> StoredStorage:
        """Resolve a persistent id: `("storage", type, key, device, elements)`, in old files with the view it stands
        for.

        Raises:
            PickleFault: CORRUPT if it is malformed, or contradicts an earlier one; UNSUPPORTED for saved code.
        """
        if type(pid) is not tuple or len(pid) < 2:
            raise malformed("a persistent id is not a storage")
        id_kind, *id_fields = pid
        if id_kind == _MODULE:
            raise PickleFault("it contains the source code of a module", "UNSUPPORTED")
        if id_kind != STORAGE or len(id_fields) != (5 if self._legacy else 4):
            raise malformed("a persistent id is not a storage")
        kind, key, device, count = id_fields[:4]
        if type(kind) is not StorageType or type(key) is not str or type(device) not in (str, bytes):
            raise malformed("the persistent id of a storage is malformed")
        if type(count) is not int or not 0 <= count <= _MAX_COUNT // 16:
            raise malformed(f"storage {key[:80]!r} has an impossible number of elements")
        if not is_plain(key):
            raise malformed(f"{key[:80]!r} is not the name of a storage")
        stored = self._agreed(StoredStorage(key, kind.dtype or BYTE, count))
        return self._view(stored, id_fields[4]) if self._legacy and id_fields[4] is not None else stored

    @property
    def clash(self) -> str | None:
        """A key that names both a storage and a view of one; None if there is none."""
        return min(self.by_key.keys() & self._views.keys(), default=None)

    def settle(self, start: int) -> None:
        """Turn all offsets into offsets from the beginning of the file, and set those of views.

        Args:
            start: byte of the file from which the storages' offsets were counted.
        """
        for stored in self.by_key.values():
            stored.offset += start
        for root, first, view in self._views.values():
            view.offset = self.by_key[root.key].offset + first * item_bytes(view.dtype)

    def _view(self, root: StoredStorage, view_id: object) -> StoredStorage:
        """Return a part of a storage that releases before 0.4 saved as one: `(key, first element, elements)`."""
        if type(view_id) is not tuple or len(view_id) != 3 or type(view_id[0]) is not str:
            raise malformed(f"the view of storage {root.key!r} is malformed")
        key, first_element, count = view_id
        if not is_plain(key):
            raise malformed(f"{key[:80]!r} is not the name of a view of a storage")
        if (
            type(first_element) is not int
            or type(count) is not int
            or not 0 <= first_element <= first_element + count <= root.count
        ):
            raise malformed(f"the view {key!r} lies outside the storage {root.key!r}, which has {root.count} elements")
        known_root, begin, view = self._views.setdefault(
            key, (root, first_element, StoredStorage(key, root.dtype, count))
        )
        if (known_root.key, begin, view.dtype, view.count) != (root.key, first_element, root.dtype, count):
            raise malformed(f"the view {key!r} is described as two different parts of storages")
        return view

    def _agreed(self, storage: StoredStorage) -> StoredStorage:
        first_seen = self.by_key.setdefault(storage.key, storage)
        if first_seen.nbytes != storage.nbytes or (first_seen.dtype != storage.dtype and storage.nbytes):
            first, second = (f"{claim.count} elements of {claim.dtype.name}" for claim in (first_seen, storage))
            raise malformed(f"storage {storage.key!r} is described as {first}, and elsewhere as {second}")
        return first_seen if first_seen.dtype == storage.dtype else storage
