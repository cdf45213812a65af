"""Reads a torch file, in the zip or the legacy format, into a value, with the places of the value's storages and
tensors in the file.

torch.load trusts the pickle: it may read a record of 8-byte elements as 4-byte elements, and for a storage without a
record it returns uninitialised memory. This reader requires that a storage has one dtype, one size, and exactly that
many bytes. torch also does not check the view of a tensor: with a stride of zero, four bytes become a terabyte, and a
storage of one dtype can be viewed as another dtype. This reader therefore refuses a tensor whose bytes are not inside
its storage.

Torch files of releases before 1.6 consist of five pickles in a row, then the storages, each preceded by its number of
elements. A file in this legacy format does not state the length of its pickles. The reader therefore parses the pickles
from the beginning of the file, and reads more bytes whenever the pickles extend beyond the bytes read so far.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import msgspec

from transaxle.errors import Code
from transaxle.formats.catalog import DIGITS, ITEM_BITS, Checksum, Entry, Extent, Seal, make_seal
from transaxle.formats.pickled.allowed import ALLOWED, Names
from transaxle.formats.pickled.descriptors import (
    DType,
    Object,
    Persistent,
    PickleFault,
    Quantized,
    StorageType,
    TensorRef,
    malformed,
)
from transaxle.formats.pickled.interpreter import Bounds, PersistentId, PickleEnds, read_pickle
from transaxle.formats.storage.storage import Storage, is_plain
from transaxle.formats.torch_file.archive import LOCAL, Archive, FileWindow, read_archive, window

STORAGE, _MODULE = "storage", "module"
"""First elements that a persistent id can have: it denotes a storage, or the source code of a module."""
_MAX_COUNT = 2**63 - 1
BYTE = DType("uint8")


def item_bytes(dtype: DType) -> int:
    """Return the number of bytes of one element as torch counts elements; torch counts two F4 values as one element."""
    return max(ITEM_BITS[dtype.code] // 8, 1)


class StoredStorage(msgspec.Struct, eq=False):
    """A storage of a torch file: a flat array; the tensors are views of storages."""

    key: str
    """Key of the storage in the file."""
    dtype: DType
    """Dtype of the storage's elements; `uint8` for untyped storages."""
    count: int
    """Number of the storage's elements."""
    offset: int = 0
    """File offset of the storage's first byte, once it is known."""

    @property
    def nbytes(self) -> int:
        """Size of the storage in bytes."""
        return self.count * item_bytes(self.dtype)


class Storages:
    """The storages that a pickle has referred to so far, by key.

    Args:
        legacy: whether the file has the format that torch used before release 1.6.
    """

    def __init__(self, *, legacy: bool) -> None:
        self._legacy = legacy
        self.by_key: dict[str, StoredStorage] = {}
        self._views: dict[str, tuple[StoredStorage, int, StoredStorage]] = {}

    def refer(self, pid: object) -> StoredStorage:
        """Return the storage for a persistent id `("storage", type, key, device, elements)`; in legacy files, the id
        also describes a view.

        Raises:
            PickleFault: with the code CORRUPT if the id is malformed, or contradicts an earlier id; with the code
                UNSUPPORTED for the source code of a module.
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
        stored = self._check_consistent(StoredStorage(key, kind.dtype or BYTE, count))
        return self._view(stored, id_fields[4]) if self._legacy and id_fields[4] is not None else stored

    @property
    def clash(self) -> str | None:
        """Return a key that is used both for a storage and for a view of a storage; None if there is no such key."""
        return min(self.by_key.keys() & self._views.keys(), default=None)

    def set_offsets(self, start: int) -> None:
        """Make all offsets relative to the beginning of the file, and set the offsets of views.

        Args:
            start: file offset from which the storages' offsets are counted so far.
        """
        for stored in self.by_key.values():
            stored.offset += start
        for root, first, view in self._views.values():
            view.offset = self.by_key[root.key].offset + first * item_bytes(view.dtype)

    def _view(self, root: StoredStorage, view_id: object) -> StoredStorage:
        """Return a view of a storage; torch before 0.4 saved it as `(key, first element, number of elements)`."""
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

    def _check_consistent(self, storage: StoredStorage) -> StoredStorage:
        first_seen = self.by_key.setdefault(storage.key, storage)
        if first_seen.nbytes != storage.nbytes or (first_seen.dtype != storage.dtype and storage.nbytes):
            first, second = (f"{claim.count} elements of {claim.dtype.name}" for claim in (first_seen, storage))
            raise malformed(f"storage {storage.key!r} is described as {first}, and elsewhere as {second}")
        return first_seen if first_seen.dtype == storage.dtype else storage


MAGIC = 0x1950A86A20F9469CFC6C
"""Value of the first pickle in a legacy file."""
_PROTOCOL = 1001
_LITTLE = "little_endian"
_COUNT = struct.Struct("<q")
_FIRST_READ = 1 << 20
_GROWTH = 4


class Head(NamedTuple):
    """The contents of the five pickles of a legacy file."""

    value: Any
    """The object that was saved."""
    storages: Storages
    """The storages that the object refers to."""
    keys: Any
    """Keys of the storages, in the order of the storages' bytes in the file; these keys are not checked."""
    end: int
    """File offset of the first byte after the pickles."""


def read_legacy(window: FileWindow) -> tuple[Any, Storages]:
    """Read a torch file in the legacy format, which torch used before release 1.6.

    Returns:
        The saved object, and its storages with their offsets in the file.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE, CORRUPT or UNSUPPORTED if the file's pickles or storages are at
            fault.
        StorageError: with the code IO if the file cannot be read.
    """
    max_bytes = Bounds().size
    size = min(_FIRST_READ, window.size)
    while True:
        complete = size == window.size or size >= max_bytes
        try:
            head = _head(window, window.read(0, size), complete=complete)
        except PickleEnds:
            size = min(size * _GROWTH, window.size, max_bytes)
        else:
            _place(window, head)
            return head.value, head.storages


def _head(window: FileWindow, data: bytes, *, complete: bool) -> Head:
    """Parse the five pickles of a legacy file; raise PickleEnds if they extend beyond the data."""
    at = 0

    def following(record: str, persistent: PersistentId = Persistent) -> Any:
        nonlocal at
        pickled = read_pickle(data, file=window.file, record=record, start=at, complete=complete, persistent=persistent)
        at = pickled.end
        return pickled.value

    if following("magic number") != MAGIC:
        hint = "Load the file with the program that wrote it, and save the tensors with torch.save or as safetensors."
        raise window.unsupported("the file is a pickle, but not one that torch wrote", hint)
    if following("protocol version") != _PROTOCOL:
        raise window.corrupt(f"the protocol version is not {_PROTOCOL}")
    system = following("system")
    if not isinstance(system, dict) or type(system.get(_LITTLE)) is not bool:
        raise window.corrupt("the file does not say which system wrote it")
    if not system[_LITTLE]:
        raise window.unsupported(
            "the file was written on a big-endian machine", "Load and save the file again on a little-endian machine."
        )
    storages = Storages(legacy=True)
    value = following("object", storages.refer)
    return Head(value, storages, following("storage keys"), at)


def _place(window: FileWindow, head: Head) -> None:
    """Set the offsets of all storages; the file must contain exactly those storages to which its pickle refers."""
    storages, keys = head.storages.by_key, head.keys
    if not isinstance(keys, list) or any(type(key) is not str for key in keys):
        raise window.corrupt("the list of storages is malformed")
    if len(set(keys)) != len(keys):
        raise window.corrupt("the list of storages has one twice")
    for key in keys:
        if key not in storages:
            raise window.corrupt(f"the file holds the storage {key[:80]!r}, which no tensor uses")
    if head.storages.clash:
        raise window.corrupt(f"{head.storages.clash!r} is both a storage and a view of one")
    missing = storages.keys() - set(keys)
    if missing:
        raise window.corrupt(f"tensors use the storage {min(missing)!r}, which the file does not hold")
    at = head.end
    for key in keys:
        stored = storages[key]
        (count,) = _COUNT.unpack(window.read(at, _COUNT.size))
        if count != stored.count:
            message = f"storage {key!r} has {count} elements; the pickle says {stored.count}"
            raise window.corrupt(message)
        stored.offset = at + _COUNT.size
        at = stored.offset + stored.nbytes
        if at > window.size:
            raise window.corrupt(f"the file is truncated: storage {key!r} ends at {at}, the file at {window.size}")
    if at != window.size:
        raise window.corrupt(f"the last {window.size - at} bytes of the file belong to no storage")


PICKLE, DATA, BYTE_ORDER, VERSION = "data.pkl", "data/", "byteorder", "version"
FORMAT_VERSION, ALIGNED = ".format_version", ".storage_alignment"
SEALED = ".data/transaxle_digests"
"""Name of the record with the digests of the file's bytes; torch ignores this record."""
LITTLE = b"little"
_BIG = b"big"
_SCRIPT = "constants.pkl"
_LFS_POINTER = b"version https://git-lfs"
_TAR, _TAR_AT = b"ustar", 257
_LONGEST_NOTE = 64
_WIDEST = 1 << 30
_PICKLE_BEGINS = b"\x80"


class Saved(msgspec.Struct, frozen=True):
    """The contents of a file that `torch.save` wrote."""

    value: Any
    """The saved object, made of plain values and descriptors; the storage of each tensor in it is a `StoredStorage`."""
    storages: Mapping[str, StoredStorage]
    """Key -> storage, for all storages of the file; offsets count from the beginning of the file."""
    checksums: tuple[Checksum, ...]
    """Checksums of the records in the zip archive; empty for a legacy file."""
    seal: Seal | None = None
    """Where the digests of the file's bytes are; None if the file has no digests."""


def read_saved(
    storage: Storage, file: str, start: int = 0, size: int | None = None, *, allowed: Names = ALLOWED
) -> Saved:
    """Read a torch file, which may be a range of a larger file; the bytes of its storages are not read.

    Args:
        storage: storage that reads the file.
        file: name of the file.
        start: offset at which the torch file begins in `file`.
        size: size of the torch file in bytes; None means that it extends to the end of `file`.
        allowed: table of the globals (classes and functions) that the file's pickle may name.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE, CORRUPT, PATH_ESCAPE or UNSUPPORTED if the archive or its pickle
            is at fault.
        StorageError: with the code IO if the file cannot be read.
    """
    area = window(storage, file, start, size)
    begin = area.read(0, min(len(_LFS_POINTER), area.size))
    if begin.startswith(LOCAL):
        value, storages, checksums, seal = _read_zip(area, allowed)
    elif begin.startswith(_PICKLE_BEGINS):
        value, storages = read_legacy(area)
        checksums, seal = (), None
    else:
        raise _refuse_file(area, begin)
    storages.set_offsets(start)
    return Saved(value, storages.by_key, checksums, seal)


def _refuse_file(area: FileWindow, begin: bytes) -> Exception:
    if begin == _LFS_POINTER:
        hint = "This is a Git LFS pointer, not the file itself: run `git lfs pull`."
        return area.unsupported("not a torch file", hint)
    if not area.size:
        return area.corrupt("the file is empty")
    if area.size > _TAR_AT + len(_TAR) and area.read(_TAR_AT, len(_TAR)) == _TAR:
        return area.unsupported(
            "this is the tar format of torch before 0.1.10", "Load the file with torch and save it again."
        )
    return area.unsupported("not a torch file: neither a zip archive nor a pickle")


def _read_zip(area: FileWindow, allowed: Names) -> tuple[Any, Storages, tuple[Checksum, ...], Seal | None]:
    archive = read_archive(area)
    records = archive.records
    if _SCRIPT in records:
        hint = "Save its state_dict with torch.save."
        raise area.unsupported("this is a TorchScript archive, which contains code", hint)
    if PICKLE not in records:
        raise area.corrupt(f"the archive has no record {PICKLE}")
    _check_notes(area, archive)
    bounds = Bounds()
    if records[PICKLE].size > bounds.size:
        raise area.corrupt(f"record {PICKLE} has {records[PICKLE].size} bytes; at most {bounds.size} are read")
    storages = Storages(legacy=False)
    data = archive.read(PICKLE)
    pickled = read_pickle(data, file=area.file, record=PICKLE, persistent=storages.refer, allowed=allowed)
    if pickled.end != len(data):
        raise area.corrupt(f"record {PICKLE}: {len(data) - pickled.end} bytes follow the pickle")
    for key, stored in storages.by_key.items():
        record = records.get(DATA + key)
        if record is None:
            raise area.corrupt(f"tensors use the record {DATA}{key}, which is missing")
        if record.size != stored.nbytes:
            expected = f"{stored.count} elements of {stored.dtype.name}, {stored.nbytes} bytes"
            raise area.corrupt(f"record {DATA}{key} has {record.size} bytes; the pickle says {expected}")
        stored.offset = record.offset
    for name in records:
        if name.startswith(DATA) and name.removeprefix(DATA) not in storages.by_key:
            raise area.corrupt(f"no tensor uses the record {name}")
    return pickled.value, storages, archive.checksums(), _seal(area, archive)


def _seal(area: FileWindow, archive: Archive) -> Seal | None:
    """Return where a file contains digests; None if it contains none.

    Only files written by Transaxle have digests; each storage of such a file is one tensor, in the order of the
    records.

    Raises:
        Refused: with the code CORRUPT if some of the digests are missing.
    """
    record = archive.records.get(SEALED)
    if record is None:
        return None
    tensor_offsets = [
        stored.offset for name, stored in archive.records.items() if name.startswith(DATA) and stored.size
    ]
    count = record.size // DIGITS - 1
    # the last storages may contain settings of an optimizer instead of tensors
    if record.size % DIGITS or not 0 <= count <= len(tensor_offsets):
        raise area.corrupt("the record of the digests is incomplete")
    first = area.start + record.offset
    return make_seal(area.file, first, first + DIGITS, (area.start + offset for offset in tensor_offsets[:count]))


def _check_notes(area: FileWindow, archive: Archive) -> None:
    """Check the archive's small records, which state byte order, versions and alignment."""
    order, version = (_note(area, archive, name) for name in (BYTE_ORDER, VERSION))
    if order == _BIG:
        raise area.unsupported(
            "the file was written on a big-endian machine", "Load and save the file again on a little-endian machine."
        )
    if order not in (None, LITTLE):
        raise area.corrupt(f"record {BYTE_ORDER}: {order!r} is not a byte order")
    for name, version_text in ((VERSION, version), (FORMAT_VERSION, _note(area, archive, FORMAT_VERSION))):
        if version_text is not None and not version_text.strip().isdigit():
            raise area.corrupt(f"record {name}: {version_text!r} is not a version")
    aligned = _note(area, archive, ALIGNED)
    if aligned is not None and not (aligned.isdigit() and 0 < int(aligned) <= _WIDEST):
        raise area.corrupt(f"record {ALIGNED}: {aligned!r} is not an alignment of storages in bytes")


def _note(area: FileWindow, archive: Archive, name: str) -> bytes | None:
    record = archive.records.get(name)
    if record is None:
        return None
    if record.size > _LONGEST_NOTE:
        raise area.corrupt(f"record {name} has {record.size} bytes; at most {_LONGEST_NOTE} are read")
    return archive.read(name)


REPEATED = 1 << 30
"""Maximum number of bytes by which expanded views (stride 0) of one file may repeat elements; without a maximum, a few
stored bytes could expand to terabytes."""

_PACKED = {"F4": 2}
"""Safetensors code of a packed dtype -> number of elements that torch counts as one."""
_KINDS: dict[str, str] = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_sparse_csr_tensor": "a sparse tensor",
    "_rebuild_qtensor": "a quantized tensor, whose scale is not among its bytes",
    "_rebuild_nested_tensor": "a nested tensor",
    "NestedTensor": "a nested tensor",
    "_rebuild_njt": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no values",
    "DTensor": "a DTensor, of which this file holds only one rank's part",
    "ShardedTensor": "a ShardedTensor, of which this file holds only one rank's part",
    "UninitializedParameter": "a parameter without values",
    "UninitializedBuffer": "a buffer without values",
}
_HINT = "Save the tensor as plain dense tensors."
_OF_RANKS = (
    "Give the folder with the files of all ranks, and say how they are named: --ranks 'model_rank{}.pt' (ranks=), with "
    "{} for the rank."
)


class ViewFault(Exception):
    """Raised if a tensor cannot be read; the message states the reason."""

    def __init__(self, code: Code, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.hint = hint


def place(name: str, tensor: TensorRef | Object | Quantized, file: str) -> tuple[Entry, int]:
    """Return the catalog entry of a tensor, and the number of bytes by which its view repeats stored elements.

    Args:
        name: name of the tensor.
        tensor: description of the tensor in the pickle; the tensor's storage is a `StoredStorage`.
        file: name of the file that contains the storage.

    Raises:
        ViewFault: with the code CORRUPT if the tensor is not inside its storage; with the code UNSUPPORTED for tensors
            that are not plain views.
    """
    if isinstance(tensor, Object):
        kind = _KINDS.get(tensor.cls.name, f"a tensor of the class {tensor.cls}")
        is_part = tensor.cls.name in ("DTensor", "ShardedTensor")
        raise ViewFault("UNSUPPORTED", f"it is {kind}", _OF_RANKS if is_part else _HINT)
    if isinstance(tensor, Quantized):
        raise ViewFault("UNSUPPORTED", f"it is a {tensor.kind}, which consists of several tensors", _HINT)
    stored = tensor.storage
    if not isinstance(stored, StoredStorage):
        raise ViewFault("UNSUPPORTED", "its storage is pickled inside another pickle", _HINT)
    if tensor.flags:
        message = f"the stored values are not the tensor's: they need {' and '.join(tensor.flags)}"
        raise ViewFault("UNSUPPORTED", message, "Save the tensor after resolve_conj() and resolve_neg().")
    dtype = tensor.dtype or stored.dtype
    if stored.dtype not in (dtype, BYTE):
        raise ViewFault("CORRUPT", f"it views elements of {stored.dtype.name} as {dtype.name}")
    item = item_bytes(dtype)
    count, span = _count(tensor), _span(tensor)
    if (tensor.offset + span) * item > stored.nbytes and count:
        message = (
            f"{dtype.name} {list(tensor.shape)} with strides {list(tensor.strides)} from element {tensor.offset} ends "
            f"at byte {(tensor.offset + span) * item} of storage {stored.key!r}, which has {stored.nbytes}"
        )
        raise ViewFault("CORRUPT", message)
    shape, strides = _in_elements(tensor, dtype)
    offset = stored.offset + (tensor.offset * item if count else 0)
    extent = Extent((0,) * len(shape), shape, file, offset, strides)
    return Entry(name, dtype.code, shape, (extent,)), max(count - span, 0) * item


def identity(tensor: TensorRef) -> tuple[object, ...] | None:
    """Return a key that is equal for two tensors if they are the same view of one storage; None for an empty tensor."""
    if not isinstance(tensor.storage, StoredStorage) or not prod(tensor.shape):
        return None
    return tensor.storage.key, tensor.dtype, tensor.offset, tensor.shape, tensor.strides


def _count(tensor: TensorRef) -> int:
    count = prod(tensor.shape)
    if prod(size or 1 for size in tensor.shape) * 16 > _MAX_COUNT:
        raise ViewFault("CORRUPT", f"the shape {list(tensor.shape)} overflows: no file holds so many elements")
    return count


def _span(tensor: TensorRef) -> int:
    """Return the number of elements of the storage from a view's first element to its last element, both included."""
    if 0 in tensor.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))


def _in_elements(tensor: TensorRef, dtype: DType) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return a tensor's shape and strides in elements; the strides are None for a row-major view without gaps."""
    shape, strides = tensor.shape, tensor.strides
    dense = _is_dense(shape, strides)
    pack = _PACKED.get(dtype.code)
    if pack:
        if not shape:
            raise ViewFault("UNSUPPORTED", f"a scalar of {dtype.name} would pack {pack} values")
        if not dense and strides[-1] != 1 and shape[-1] > 1:
            message = f"{dtype.name} is transposed, so its packed values are not along the last dim"
            raise ViewFault("UNSUPPORTED", message, _HINT)
        shape = (*shape[:-1], shape[-1] * pack)
        strides = (*(step * pack for step in strides[:-1]), 1)
    return shape, None if dense else strides


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if step != expected:
                return 0 in shape
            expected *= size
    return True


_CHUNK = 1 << 20


def find_copies(storage: Storage, files: Iterable[tuple[str, tuple[Checksum, ...]]]) -> Iterator[tuple[str, str]]:
    """Yield `(file, earlier file)` for each file whose bytes equal those of an earlier file with equal checksums.

    Args:
        storage: storage that reads the files.
        files: pairs of a file's name and the checksums of its records.
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
