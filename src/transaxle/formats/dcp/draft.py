"""Lays out a new DCP folder: assigns a file and a byte offset to every chunk before any data is written.

The new folder looks as if one rank of torch had saved it: it contains `.metadata`, and the data files `__0_0.distcp`,
`__0_1.distcp`, …. Any number of ranks can load this folder. A tensor is stored as one chunk if it fits into one file
and one archive; a larger tensor is cut into chunks of whole rows, each contiguous.

The archive of a chunk has the same bytes as the output of `torch.save` for one tensor, but is laid out before the
tensor's bytes are known. The bytes of an archive before and after the tensor (the archive's frame) depend only on dtype
and shape, so thousands of chunks share a few frames.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from transaxle.axes.geometry import row_major
from transaxle.errors import Faults, TransaxleError
from transaxle.formats.catalog import (
    PACKED,
    Draft,
    Entry,
    Extent,
    Fragment,
    Shape,
    Spec,
    code_of,
    elements_shape,
    nbytes,
)
from transaxle.formats.dcp.metadata import DATA_FILE, METADATA, MODULES, Payload, flat_path, path_of
from transaxle.formats.flattened_state import as_numbered, group_path
from transaxle.formats.pickled.allowed import STORAGES
from transaxle.formats.pickled.descriptors import CODES, DType, Global, Object, Persistent, StorageType, TensorRef
from transaxle.formats.pickled.writer import Streamed, write_pickle
from transaxle.formats.registry import DCP
from transaxle.formats.shards import refuse_many
from transaxle.formats.torch_file.archive import ALIGNMENT, ZipItem, lay_out
from transaxle.formats.torch_file.draft import lay_out_value, settings_to_save
from transaxle.formats.torch_file.saved import BYTE_ORDER, DATA, LITTLE, PICKLE, VERSION
from transaxle.formats.training_state import PARAMS, KeyPath, ParamGroup, join_path

LARGEST = 1 << 30
"""Maximum number of tensor bytes in one archive; torch reads a whole archive even to load a part of it."""

_FOLDER = "archive"
"""Name of the folder inside a zip archive that torch writes to a stream, as DCP does."""
_KEY = "0"
_TYPED = frozenset(STORAGES.values())
"""Dtypes for which torch has a typed storage class; tensors of newer dtypes are pickled with untyped storage."""


class ArchiveFrame(NamedTuple):
    """The bytes of a chunk's archive before and after the chunk's tensor."""

    head: bytes
    """The archive's bytes before the tensor."""
    tail: bytes
    """The archive's bytes after the tensor."""


@lru_cache(256)
def frame(dtype: DType, shape: tuple[int, ...], size: int) -> ArchiveFrame:
    """Return the frame (the bytes before and after the tensor) of an archive with one row-major tensor.

    Args:
        dtype: the tensor's dtype.
        shape: the tensor's shape in torch, which counts packed elements (such as two FP4 values in a byte) as one.
        size: the tensor's size in bytes.

    In the archive the tensor begins at a multiple of `ALIGNMENT` bytes.
    """
    typed = dtype.name in _TYPED
    storage = StorageType(dtype if typed else None)
    storage_id = Persistent(("storage", storage, _KEY, "cpu", math.prod(shape) if typed else size))
    pickle = write_pickle(TensorRef(storage_id, None if typed else dtype, 0, shape, row_major(shape)))
    items = [
        ZipItem(PICKLE, len(pickle), pickle),
        *(ZipItem(name, len(data), data) for name, data in _NOTES.items()),
        ZipItem(f"{DATA}{_KEY}", size, None if size else b""),
        ZipItem(VERSION, len(_VERSION), _VERSION),
    ]
    frame_pieces = [data for _, data in lay_out(_FOLDER, items).fragments]
    return ArchiveFrame(frame_pieces[0], frame_pieces[1]) if size else ArchiveFrame(b"", frame_pieces[0])


_NOTES = {".format_version": b"1", ".storage_alignment": str(ALIGNMENT).encode(), BYTE_ORDER: LITTLE}
_VERSION = b"3\n"


METADATA_VERSION = "1.0.0"
"""Version number that torch writes into the metadata."""

DTYPES = {code: DType(name) for name, code in CODES.items()}
"""Safetensors dtype code -> torch dtype."""
_METADATA_MODULE = f"{MODULES[0]}.metadata"
_CLASSES = {
    name: Global(_METADATA_MODULE, name)
    for name in (
        "Metadata",
        "StorageMeta",
        "MetadataIndex",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
    )
}
_INFO, _SIZE = Global(f"{MODULES[0]}.filesystem", "_StorageInfo"), Global("torch", "Size")


class TorchTensor(NamedTuple):
    """A tensor to be written, with its dtype and shape as torch describes them; torch counts packed elements (two FP4
    values in a byte) as one.
    """

    spec: Spec
    """Name, dtype code and shape of the tensor, in elements."""
    path: KeyPath
    """Keys that lead to the tensor in the saved state dict."""
    dtype: DType
    shape: Shape
    size: int
    """Size of the tensor in bytes."""


class ChunkPlace(NamedTuple):
    """A chunk of a tensor (first index and shape, in torch's elements), with the byte range of the chunk's archive."""

    start: Shape
    shape: Shape
    payload: Payload


def as_torch_tensor(spec: Spec, path: KeyPath, names_by_key: dict[str, str], faults: Faults) -> TorchTensor | None:
    """Describe a tensor as torch does; if torch cannot store the tensor, add a fault for each reason and return None.

    Args:
        spec: name, dtype code and shape of the tensor.
        path: key path of the tensor in the saved state dict.
        names_by_key: flat DCP key -> tensor name, for all tensors so far; this tensor is added.
        faults: list of faults, to which NAME_COLLISION, SHAPE_MISMATCH or UNSUPPORTED is added.
    """
    shown = spec.name.encode("utf-8", "backslashreplace").decode()
    key = join_path(path)
    if key in names_by_key:
        complaint = (
            "two tensors have this name"
            if names_by_key[key] == spec.name
            else f"{names_by_key[key]!r} has the same key, {key!r}"
        )
        faults.add("NAME_COLLISION", complaint, None, shown)
    names_by_key[key] = spec.name
    if spec.name != shown:
        faults.add("UNSUPPORTED", "the name is not valid Unicode", None, shown)
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        hint = "Choose a format that can hold this tensor, or leave it out."
        faults.add("UNSUPPORTED", f"{spec.dtype} is not written to DCP folders", None, shown, hint)
        return None
    try:
        size = nbytes(spec.dtype, spec.shape)
    except TransaxleError as error:
        faults.add(error.code, error.refusals[0].message, None, shown)
        return None
    shape, packed = spec.shape, PACKED.get(spec.dtype, 1)
    if packed > 1:
        if not shape or shape[-1] % packed:
            message = (
                f"torch packs {packed} elements of {spec.dtype} into one; the last dim of {list(shape)} is not a "
                f"multiple of {packed}"
            )
            faults.add("SHAPE_MISMATCH", message, None, shown)
            return None
        shape = (*shape[:-1], shape[-1] // packed)
    return TorchTensor(spec, path, dtype, shape, size)


def cut(tensor: TorchTensor, limit: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor into boxes of at most `limit` bytes, each contiguous in row-major order; yield the boxes in this
    order.
    """
    start = (0,) * len(tensor.shape)
    if tensor.size <= limit:
        yield start, tensor.shape
    else:
        yield from _runs(tensor.shape, tensor.size // math.prod(tensor.shape), max(limit, 1))


def _runs(shape: Shape, item: int, limit: int) -> Iterator[tuple[Shape, Shape]]:
    if not shape:
        yield (), ()
        return
    row = item * math.prod(shape[1:])
    rows = limit // row
    if rows:
        inner_start = (0,) * (len(shape) - 1)
        for first_row in range(0, shape[0], rows):
            yield (first_row, *inner_start), (min(rows, shape[0] - first_row), *shape[1:])
        return
    for at in range(shape[0]):
        for start, sizes in _runs(shape[1:], item, limit):
            yield (at, *start), (1, *sizes)


class DataFiles:
    """Fills data files one after another with archives at aligned offsets, and writes zeros between archives.

    Args:
        shard_size: maximum number of tensor bytes in one file; None means that there is a single file.
        size: total bytes of all tensors.

    Raises:
        UsageError: with the code AMBIGUOUS if `shard_size` would result in too many files.
    """

    def __init__(self, shard_size: int | None, size: int) -> None:
        if shard_size is not None:
            refuse_many(-(-size // shard_size), size, shard_size)
        self.limit = LARGEST if shard_size is None else min(shard_size, LARGEST)
        """Maximum number of tensor bytes in one archive."""
        self._shard_size = shard_size
        self._sizes: dict[str, int] = {}
        self._fragments: list[Fragment] = []
        self._pending = bytearray()
        self._file = ""
        self._end = 0
        """Number of bytes in the current file so far."""
        self._tensor_bytes = 0
        """Number of tensor bytes in the current file so far, without padding and without the archives' bytes around
        tensors."""
        self._begin()

    def place(self, dtype: DType, shape: Shape) -> tuple[Payload, int]:
        """Reserve space for a chunk; return the byte range of its archive, and the file offset of the tensor's first
        byte.
        """
        size = _bytes_of(dtype, shape)
        if self._shard_size is not None and self._tensor_bytes and self._tensor_bytes + size > self._shard_size:
            self._close()
            self._begin()
        head, tail = frame(dtype, shape, size)
        begin = self._end
        data = begin + len(head)
        self._flush(head)
        self._end = data + size
        payload = Payload(self._file, begin, len(head) + size + len(tail))
        self._pending += tail
        self._pending += bytes(-(self._end + len(self._pending)) % ALIGNMENT)
        self._end += len(self._pending)
        self._tensor_bytes += size
        return payload, data

    def put(self, dtype: DType, value: bytes) -> Payload:
        """Store a tensor without dims whose value is known, given the value's bytes."""
        payload, offset = self.place(dtype, ())
        self._fragments.append(Fragment(payload.file, offset, value))
        return payload

    def keep(self, archive: bytes) -> Payload:
        """Store a complete archive, given the archive's bytes."""
        payload = Payload(self._file, self._end, len(archive))
        padded = archive + bytes(-len(archive) % ALIGNMENT)
        self._pending += padded
        self._end += len(padded)
        return payload

    def finish(self) -> tuple[list[Fragment], dict[str, int]]:
        """Close the last file; return the fragments (all bytes outside the tensors), and the size of each file."""
        self._close()
        return self._fragments, self._sizes

    def _begin(self) -> None:
        self._file = f"__0_{len(self._sizes)}{DATA_FILE}"
        self._sizes[self._file] = 0
        self._end = self._tensor_bytes = 0

    def _flush(self, head: bytes) -> None:
        """Turn the bytes since the last tensor into one fragment."""
        bytes_between = bytes(self._pending) + head
        if bytes_between:
            self._fragments.append(Fragment(self._file, self._end - len(self._pending), bytes_between))
        self._pending.clear()

    def _close(self) -> None:
        self._flush(b"")
        self._sizes[self._file] = self._end


def _bytes_of(dtype: DType, shape: Shape) -> int:
    """Return the size in bytes of a chunk, given the chunk's shape in torch's elements."""
    return nbytes(dtype.code, elements_shape(shape, dtype.code))


ChunksByTensor = list[tuple[TorchTensor, list[ChunkPlace]]]
ObjectPlaces = list[tuple[KeyPath, Payload]]


def metadata_of(tensors: ChunksByTensor, objects: ObjectPlaces, *, with_paths: bool = True) -> Object:
    """Return torch's `Metadata` object, which describes a DCP folder. The object's lists are streamed, so it can be
    pickled only once.

    Args:
        tensors: the tensors of the folder, with their chunks.
        objects: key path and archive of each item that is not a tensor.
        with_paths: whether to record the state-dict path of each key, as torch's planners do; Megatron's keys have no
            paths.
    """
    paths = {
        join_path(path): path for path in (*(tensor.path for tensor, _ in tensors), *(path for path, _ in objects))
    }
    about = _torch_object("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[])
    return _torch_object(
        "Metadata",
        state_dict_metadata=Streamed(_item_metadata(tensors, objects), is_dict=True),
        planner_data=paths if with_paths else None,
        storage_data=Streamed(_storage_places(tensors, objects), is_dict=True),
        storage_meta=about,
        version=METADATA_VERSION,
    )


def _item_metadata(tensors: ChunksByTensor, objects: ObjectPlaces) -> Iterator[tuple[str, Object]]:
    """Yield each DCP key with the metadata of its tensor (which lists the chunks) or of its object."""
    properties = {tensor.dtype: _properties(tensor.dtype) for tensor, _ in tensors}
    for tensor, chunks in tensors:
        boxes = (_torch_object("ChunkStorageMetadata", offsets=_size(c.start), sizes=_size(c.shape)) for c in chunks)
        yield (
            join_path(tensor.path),
            _torch_object(
                "TensorStorageMetadata",
                properties=properties[tensor.dtype],
                size=_size(tensor.shape),
                chunks=Streamed(boxes),
            ),
        )
    for path, _ in objects:
        yield join_path(path), Object(_CLASSES["BytesStorageMetadata"], new=True)


def _storage_places(tensors: ChunksByTensor, objects: ObjectPlaces) -> Iterator[tuple[Object, Object]]:
    """Yield torch's `MetadataIndex` of each chunk and each object, with its file, offset and length."""
    for tensor, chunks in tensors:
        key = join_path(tensor.path)
        for number, (start, _, payload) in enumerate(chunks):
            yield _torch_object("MetadataIndex", fqn=key, index=number, offset=_size(start)), _storage_info(payload)
    for path, payload in objects:
        yield _torch_object("MetadataIndex", fqn=join_path(path), index=None, offset=None), _storage_info(payload)


def _storage_info(payload: Payload) -> Object:
    state = {"relative_path": payload.file, "offset": payload.offset, "length": payload.length}
    return Object(_INFO, state=state, new=True)


def _properties(dtype: DType) -> Object:
    layout = Object(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Object(Global(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    return Object(
        Global(_METADATA_MODULE, "TensorProperties"), state=(dtype, layout, False, memory_format, False), new=True
    )


def _torch_object(name: str, **fields: object) -> Object:
    return Object(_CLASSES[name], state=fields, new=True)


def _size(counts: Shape) -> Object:
    return Object(_SIZE, (counts,))


_MOST_FLAT = 200_000
"""Maximum number of flattened optimizer settings; above it, settings are written only for each group, not for each
parameter."""


def draft(
    tensors: Sequence[Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    groups: Sequence[ParamGroup] = (),
    training: Mapping[KeyPath, object] = MappingProxyType({}),
) -> Draft:
    """Lay out a DCP folder.

    Args:
        tensors: the tensors to be written; files are filled in this order.
        metadata: not used, because the format has no place for free text.
        shard_size: maximum number of tensor bytes in one file; larger tensors are cut into chunks. None means that
            there is a single file.
        groups: parameter groups of the optimizer; their settings are written both nested and flattened, since torch
            loads either form.
        training: values of the training state that are not tensors, by state-dict path.

    Raises:
        Refused: with every tensor that cannot be stored, and the code UNSUPPORTED (its dtype, or a name that is not
            valid Unicode), NAME_COLLISION or SHAPE_MISMATCH (packed elements that do not fill whole bytes).
    """
    del metadata
    faults = Faults()
    names_by_key: dict[str, str] = {}
    torch_tensors = [as_torch_tensor(spec, path_of(spec.name), names_by_key, faults) for spec in tensors]
    for path in training:
        if join_path(path) in names_by_key:
            complaint = (
                f"{names_by_key[join_path(path)]!r} has the key of an item that is no tensor, {join_path(path)!r}"
            )
            faults.add("NAME_COLLISION", complaint, None, join_path(path))
    if faults:
        raise faults.error()
    files = DataFiles(shard_size, sum(nbytes(spec.dtype, spec.shape) for spec in tensors))
    entries: dict[str, Entry] = {}
    chunks: list[tuple[TorchTensor, list[ChunkPlace]]] = []
    for tensor in torch_tensors:
        assert tensor is not None
        placed_chunks, extents = [], []
        for start, shape in cut(tensor, files.limit):
            payload, offset = files.place(tensor.dtype, shape)
            placed_chunks.append(ChunkPlace(start, shape, payload))
            code = tensor.spec.dtype
            extents.append(Extent(elements_shape(start, code), elements_shape(shape, code), payload.file, offset))
        chunks.append((tensor, placed_chunks))
        entries[tensor.spec.name] = Entry(tensor.spec.name, tensor.spec.dtype, tensor.spec.shape, tuple(extents))
    settings = chain(training.items(), _by_path(groups))
    objects = _objects(settings, files, names_by_key, chunks)
    fragments, sizes = files.finish()
    metadata_pickle = write_pickle(metadata_of(chunks, objects))
    fragments.append(Fragment(METADATA, 0, metadata_pickle))
    return Draft(DCP.name, entries, {**sizes, METADATA: len(metadata_pickle)}, tuple(fragments))


def _objects(
    values: Iterable[tuple[KeyPath, object]], files: DataFiles, tensor_keys: Collection[str], chunks: ChunksByTensor
) -> ObjectPlaces:
    """Store values that are not tensors in archives; equal values share one archive.

    Args:
        values: key path and value of each item.
        files: the data files to which the archives are added.
        tensor_keys: flat DCP keys of the tensors.
        chunks: list of tensors with their chunks, to which numpy scalars are added, since they are stored as tensors.

    Returns:
        key path and archive of each value that is stored as an object.
    """
    shared_archives: dict[str, Payload] = {}
    objects: ObjectPlaces = []
    keys_so_far = set(tensor_keys)
    for path, value in values:
        if join_path(path) in keys_so_far:
            # If a parameter's name is a number, a nested path and a flattened path can have the same flat key; then the
            # nested path is stored.
            continue
        keys_so_far.add(join_path(path))
        if isinstance(value, np.generic):
            code = code_of(value.dtype)
            tensor = TorchTensor(Spec(join_path(path), code, ()), path, DTYPES[code], (), value.nbytes)
            chunks.append((tensor, [ChunkPlace((), (), files.put(DTYPES[code], value.tobytes()))]))
            continue
        if repr(value) not in shared_archives:
            storages: list[int | bytes] = []
            layout = lay_out_value(METADATA, settings_to_save(value, storages), storages)
            shared_archives[repr(value)] = files.keep(b"".join(data for _, data in layout.fragments))
        objects.append((path, shared_archives[repr(value)]))
    return objects


def _by_path(groups: Sequence[ParamGroup]) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every optimizer setting under the two key paths by which torch finds it: by parameter group, and by
    parameter.
    """
    for number, group in enumerate(groups):
        for setting, value in group.items():
            listed = [as_numbered(parameter) for parameter in value] if setting == PARAMS else value
            yield group_path(number, setting), listed
    settings = sum(len(group[PARAMS]) * (len(group) - 1) for group in groups)
    for group in groups if settings <= _MOST_FLAT else ():
        for parameter in group[PARAMS]:
            for setting, value in group.items():
                if setting != PARAMS and isinstance(as_numbered(parameter), str):
                    yield flat_path(parameter, setting), value
