"""Drafting a DCP folder: every chunk gets its file and its place before a byte moves.

The result is what one rank of torch would save: `.metadata`, and data files `__0_0.distcp`, `__0_1.distcp`, …. Any
number of ranks can load it. A tensor is one chunk unless it exceeds the size of a file or an archive; then it is cut
into runs of whole rows, so that its bytes still follow one another.

An archive of a single chunk is what `torch.save` makes of one tensor, laid out before the tensor's bytes are known.
Everything around the tensor depends on its dtype and shape alone, so thousands of chunks share a few such frames.
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
from transaxle.formats.catalog import PACKED, Draft, Entry, Extent, Fragment, Shape, Spec, code_of, logical, nbytes
from transaxle.formats.dcp.metadata import DATA_FILE, METADATA, MODULES, Payload, flat_path, path_of
from transaxle.formats.flattened_state import as_numbered, group_path
from transaxle.formats.pickled.allowed import STORAGES
from transaxle.formats.pickled.descriptors import CODES, DType, Global, Object, Persistent, StorageType, TensorRef
from transaxle.formats.pickled.writer import Streamed, write_pickle
from transaxle.formats.registry import DCP
from transaxle.formats.shards import refuse_many
from transaxle.formats.torch_file.archive import ALIGNMENT, ZipItem, lay_out
from transaxle.formats.torch_file.draft import saved, surround
from transaxle.formats.torch_file.saved import BYTE_ORDER, DATA, LITTLE, PICKLE, VERSION
from transaxle.formats.training_state import PARAMS, KeyPath, ParamGroup, joined

LARGEST = 1 << 30
"""Cap on the bytes of a tensor in one archive: torch reads an archive whole, whatever part of it is wanted."""

_FOLDER = "archive"
"""Name of the archive's folder where torch writes to a stream, as DCP does."""
_KEY = "0"
_TYPED = frozenset(STORAGES.values())
"""Types that have a storage class; torch writes the newer ones as untyped bytes."""


class ArchiveFrame(NamedTuple):
    """An archive without its tensor."""

    head: bytes
    """Bytes before the tensor."""
    tail: bytes
    """Bytes after it."""


@lru_cache(256)
def frame(dtype: DType, shape: tuple[int, ...], size: int) -> ArchiveFrame:
    """Return the archive around one row-major tensor.

    Args:
        dtype: its type.
        shape: its shape, as torch gives it.
        size: bytes of the tensor.

    Post-condition: the tensor begins at a multiple of `ALIGNMENT`, counted from the archive's first byte.
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
    known_pieces = [data for _, data in lay_out(_FOLDER, items).known]
    return ArchiveFrame(known_pieces[0], known_pieces[1]) if size else ArchiveFrame(b"", known_pieces[0])


_NOTES = {".format_version": b"1", ".storage_alignment": str(ALIGNMENT).encode(), BYTE_ORDER: LITTLE}
_VERSION = b"3\n"


METADATA_VERSION = "1.0.0"
"""torch's version number for this form of the metadata."""

DTYPES = {code: DType(name) for name, code in CODES.items()}
"""Safetensors code -> torch's type."""
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
    """A tensor to be written, as torch counts it."""

    spec: Spec
    """As tables and plans count it."""
    path: KeyPath
    """Its path in the saved state dict."""
    dtype: DType
    shape: Shape
    size: int
    """Bytes."""


class PlacedChunk(NamedTuple):
    """A part of a tensor with its place, as torch counts it."""

    start: Shape
    shape: Shape
    payload: Payload


def as_torch_tensor(spec: Spec, path: KeyPath, names_by_key: dict[str, str], faults: Faults) -> TorchTensor | None:
    """Return a tensor as torch counts it; every obstacle to writing it becomes a fault.

    Args:
        spec: the tensor.
        path: its path in the saved state dict.
        names_by_key: names by flat key, so far; receives this one.
        faults: receives the obstacles.
    """
    shown = spec.name.encode("utf-8", "backslashreplace").decode()
    key = joined(path)
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
    """Cut a tensor into boxes of at most `limit` bytes, each a run of its row-major bytes, in order."""
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
    """The data files, filled one after the other: archives at multiples of their alignment, zeros between.

    Args:
        shard_size: bytes of tensors in one file; None: there is one file.
        size: bytes of all tensors.

    Raises:
        UsageError: AMBIGUOUS where these would be too many files.
    """

    def __init__(self, shard_size: int | None, size: int) -> None:
        if shard_size is not None:
            refuse_many(-(-size // shard_size), size, shard_size)
        self.limit = LARGEST if shard_size is None else min(shard_size, LARGEST)
        """Bytes of a tensor that may go into one archive."""
        self._shard_size = shard_size
        self._sizes: dict[str, int] = {}
        self._fragments: list[Fragment] = []
        self._pending = bytearray()
        self._file = ""
        self._end = 0
        """Bytes of the current file so far."""
        self._tensor_bytes = 0
        """Bytes of tensors in it."""
        self._begin()

    def place(self, dtype: DType, shape: Shape) -> tuple[Payload, int]:
        """Place a chunk; return the place of its archive, and where in the file the chunk itself begins."""
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
        """Place a tensor without dims whose bytes are known."""
        payload, offset = self.place(dtype, ())
        self._fragments.append(Fragment(payload.file, offset, value))
        return payload

    def keep(self, archive: bytes) -> Payload:
        """Place an archive whose bytes are known."""
        payload = Payload(self._file, self._end, len(archive))
        padded = archive + bytes(-len(archive) % ALIGNMENT)
        self._pending += padded
        self._end += len(padded)
        return payload

    def finished(self) -> tuple[list[Fragment], dict[str, int]]:
        """Return the bytes outside the tensors, and the sizes of the files."""
        self._close()
        return self._fragments, self._sizes

    def _begin(self) -> None:
        self._file = f"__0_{len(self._sizes)}{DATA_FILE}"
        self._sizes[self._file] = 0
        self._end = self._tensor_bytes = 0

    def _flush(self, head: bytes) -> None:
        """Add the bytes between two tensors as one fragment."""
        bytes_between = bytes(self._pending) + head
        if bytes_between:
            self._fragments.append(Fragment(self._file, self._end - len(self._pending), bytes_between))
        self._pending.clear()

    def _close(self) -> None:
        self._flush(b"")
        self._sizes[self._file] = self._end


def _bytes_of(dtype: DType, shape: Shape) -> int:
    """Return the bytes of a chunk whose shape is torch's."""
    return nbytes(dtype.code, logical(shape, dtype.code))


ChunksByTensor = list[tuple[TorchTensor, list[PlacedChunk]]]
PlacedObjects = list[tuple[KeyPath, Payload]]


def metadata_of(tensors: ChunksByTensor, objects: PlacedObjects, *, with_paths: bool = True) -> Object:
    """Return the description of everything, as torch's classes hold it, to be written once.

    Args:
        tensors: with their chunks.
        objects: pickled values.
        with_paths: note the path of each key in the state dict, as torch's planners do; Megatron's keys are no paths.
    """
    paths = {joined(path): path for path in (*(tensor.path for tensor, _ in tensors), *(path for path, _ in objects))}
    about = _made("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[])
    return _made(
        "Metadata",
        state_dict_metadata=Streamed(_described(tensors, objects), is_dict=True),
        planner_data=paths if with_paths else None,
        storage_data=Streamed(_stored(tensors, objects), is_dict=True),
        storage_meta=about,
        version=METADATA_VERSION,
    )


def _described(tensors: ChunksByTensor, objects: PlacedObjects) -> Iterator[tuple[str, Object]]:
    """Yield what each key is: a tensor with its chunks, or an object."""
    properties = {tensor.dtype: _properties(tensor.dtype) for tensor, _ in tensors}
    for tensor, chunks in tensors:
        boxes = (_made("ChunkStorageMetadata", offsets=_size(c.start), sizes=_size(c.shape)) for c in chunks)
        yield (
            joined(tensor.path),
            _made(
                "TensorStorageMetadata",
                properties=properties[tensor.dtype],
                size=_size(tensor.shape),
                chunks=Streamed(boxes),
            ),
        )
    for path, _ in objects:
        yield joined(path), Object(_CLASSES["BytesStorageMetadata"], new=True)


def _stored(tensors: ChunksByTensor, objects: PlacedObjects) -> Iterator[tuple[Object, Object]]:
    """Yield where each chunk and each object is."""
    for tensor, chunks in tensors:
        key = joined(tensor.path)
        for number, (start, _, payload) in enumerate(chunks):
            yield _made("MetadataIndex", fqn=key, index=number, offset=_size(start)), _place(payload)
    for path, payload in objects:
        yield _made("MetadataIndex", fqn=joined(path), index=None, offset=None), _place(payload)


def _place(payload: Payload) -> Object:
    state = {"relative_path": payload.file, "offset": payload.offset, "length": payload.length}
    return Object(_INFO, state=state, new=True)


def _properties(dtype: DType) -> Object:
    layout = Object(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Object(Global(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    return Object(
        Global(_METADATA_MODULE, "TensorProperties"), state=(dtype, layout, False, memory_format, False), new=True
    )


def _made(name: str, **fields: object) -> Object:
    return Object(_CLASSES[name], state=fields, new=True)


def _size(counts: Shape) -> Object:
    return Object(_SIZE, (counts,))


_MOST_FLAT = 200_000
"""Cap on the flattened settings of single parameters; beyond it, only those of groups are written."""


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
        tensors: what to write; files are filled in this order.
        metadata: not written: the format has no place for free text.
        shard_size: bytes of tensors in one file; larger ones are cut into chunks. Without it there is one file.
        groups: settings of the optimizer; written both nested and flattened, so that torch finds what it asks for.
        training: state of the trainer that is no tensor, by its paths.

    Raises:
        Refused: for every tensor that has no place: UNSUPPORTED (dtype, a name that is no Unicode), NAME_COLLISION,
            SHAPE_MISMATCH (packed elements that do not fill whole bytes).
    """
    del metadata
    faults = Faults()
    names_by_key: dict[str, str] = {}
    torch_tensors = [as_torch_tensor(spec, path_of(spec.name), names_by_key, faults) for spec in tensors]
    for path in training:
        if joined(path) in names_by_key:
            complaint = f"{names_by_key[joined(path)]!r} has the key of an item that is no tensor, {joined(path)!r}"
            faults.add("NAME_COLLISION", complaint, None, joined(path))
    if faults:
        raise faults.error()
    files = DataFiles(shard_size, sum(nbytes(spec.dtype, spec.shape) for spec in tensors))
    entries: dict[str, Entry] = {}
    chunks: list[tuple[TorchTensor, list[PlacedChunk]]] = []
    for tensor in torch_tensors:
        assert tensor is not None
        placed, extents = [], []
        for start, shape in cut(tensor, files.limit):
            payload, offset = files.place(tensor.dtype, shape)
            placed.append(PlacedChunk(start, shape, payload))
            code = tensor.spec.dtype
            extents.append(Extent(logical(start, code), logical(shape, code), payload.file, offset))
        chunks.append((tensor, placed))
        entries[tensor.spec.name] = Entry(tensor.spec.name, tensor.spec.dtype, tensor.spec.shape, tuple(extents))
    settings = chain(training.items(), _by_path(groups))
    objects = _objects(settings, files, names_by_key, chunks)
    fragments, sizes = files.finished()
    described_by = write_pickle(metadata_of(chunks, objects))
    fragments.append(Fragment(METADATA, 0, described_by))
    return Draft(DCP.name, entries, {**sizes, METADATA: len(described_by)}, tuple(fragments))


def _objects(
    values: Iterable[tuple[KeyPath, object]], files: DataFiles, tensor_keys: Collection[str], chunks: ChunksByTensor
) -> PlacedObjects:
    """Place plain data; items that are equal share one archive.

    Args:
        values: by their paths.
        files: where they go.
        tensor_keys: keys of tensors.
        chunks: receives those that are tensors.

    Returns:
        the others, each with its path.
    """
    shared_archives: dict[str, Payload] = {}
    objects: PlacedObjects = []
    keys_so_far = set(tensor_keys)
    for path, value in values:
        if joined(path) in keys_so_far:
            continue  # a parameter whose name is a number: what is nested counts
        keys_so_far.add(joined(path))
        if isinstance(value, np.generic):
            code = code_of(value.dtype)
            tensor = TorchTensor(Spec(joined(path), code, ()), path, DTYPES[code], (), value.nbytes)
            chunks.append((tensor, [PlacedChunk((), (), files.put(DTYPES[code], value.tobytes()))]))
            continue
        if repr(value) not in shared_archives:
            storages: list[int | bytes] = []
            layout = surround(METADATA, saved(value, storages), storages)
            shared_archives[repr(value)] = files.keep(b"".join(data for _, data in layout.known))
        objects.append((path, shared_archives[repr(value)]))
    return objects


def _by_path(groups: Sequence[ParamGroup]) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every setting in the two forms that torch saves: by group, and by parameter."""
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
