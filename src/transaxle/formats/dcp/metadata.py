"""Reads the `.metadata` file of a DCP folder into plain values: the saved items (tensors and objects), their chunks,
and the byte ranges of chunks and objects.

torch unpickles this file without any restriction. Transaxle reads it with a restricted pickle interpreter, which allows
only classes of torch (under all names that these classes have had) and of Megatron. Dtypes, counts and names in the
file are checked, and every problem is reported with the item that it concerns. Metadata files of old torch versions are
read as well. A field that is missing, or does not have the type that torch writes, counts as absent.

An item's key is its key in the state dict that torch saves and loads: for a weight, the parameter's name; for optimizer
state, torchtitan's `optimizer.state.<parameter>.<state>`, to which torch also flattens `{"optimizer":
get_optimizer_state_dict(...)}`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import suppress
from functools import partial
from itertools import compress, repeat
from operator import not_
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from transaxle.errors import Faults, refuse
from transaxle.formats.catalog import Shape
from transaxle.formats.flattened_state import optimizer_path
from transaxle.formats.pickled.allowed import ALLOWED, INERT, GlobalRule, Names
from transaxle.formats.pickled.descriptors import DType, Global, Key, Object
from transaxle.formats.pickled.interpreter import Bounds, read_pickle
from transaxle.formats.pickled.scan import NONE, Graph, Sizes, Unread, scan_pickle
from transaxle.formats.registry import DCP_DATA, DCP_METADATA, without_gc
from transaxle.formats.storage.storage import Storage
from transaxle.formats.training_state import GROUPS, KeyPath, join_path

MODULES = ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
"""Package of torch's DCP classes: first the current name, then the name before torch 2.0."""
_PROPERTIES = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata")
"""Module of the class `TensorProperties`: first the current name, then the name before torch 2.3."""
_CLASSES = {
    "Metadata": "metadata", "TensorStorageMetadata": "metadata", "BytesStorageMetadata": "metadata",
    "ChunkStorageMetadata": "metadata", "MetadataIndex": "metadata", "StorageMeta": "metadata",
    "_StorageInfo": "filesystem",
}  # fmt: skip
"""Class name -> module inside torch's DCP package that defines the class."""
TENSOR_PROPERTIES = frozenset((module, "TensorProperties") for module in _PROPERTIES)
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")

_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
GLOBALS = {name: tuple(Global(f"{package}.{module}", name) for package in MODULES) for name, module in _CLASSES.items()}
"""Class name -> all (module, name) pairs under which the class can be pickled."""
GLOBALS["Metadata"] += (Global(_MEGATRON, "MCoreMetadata"),)  # megatron-core pickles this class since release 0.15
_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
"""Classes of torch's save planner; Megatron stores the save plans of all ranks in the metadata file."""
_KINDS_OF_ITEM = ("TENSOR", "SHARD", "BYTE_IO")


def _names() -> Iterator[tuple[str, str]]:
    for names_of_class in GLOBALS.values():
        for global_name in names_of_class:
            yield global_name.module, global_name.name
    for name in _PLANNER:
        yield f"{MODULES[0]}.planner", name
    for member in _KINDS_OF_ITEM:  # up to Python 3.11.3, members of an Enum were pickled by name
        yield f"{MODULES[0]}.planner", f"WriteItemType.{member}"
    yield _MEGATRON, "MCoreSavePlan"  # megatron-core pickles this class up to release 0.15
    for module in _PROPERTIES:
        yield module, "TensorProperties"
        for formats in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"):
            yield module, formats
            for member in _MEMORY_FORMATS:
                yield module, f"{formats}.{member}"


NAMES: Names = {
    **ALLOWED,
    **dict.fromkeys(_names(), INERT),
    # Every pickled name of one class maps to the same object of `GLOBALS`, because comparing identities takes a tenth
    # of the time.
    **{(each.module, each.name): GlobalRule(each) for possible in GLOBALS.values() for each in possible},
}
"""Classes and functions that the pickle of a metadata file may name, although a data file may not."""


MAX_DIMS = 64
"""Maximum number of dims of a numpy array."""
_MAX_COUNT = 2**63 - 1


def fields_of(value: object, name: str, *, bare: bool = False) -> Mapping[str, Any] | None:
    """Return the fields of a pickled dataclass by field name; None if the value is not an instance of the class.

    Args:
        value: any value that the pickle contains.
        name: name of the dataclass.
        bare: whether to accept an instance without any fields.
    """
    if not isinstance(value, Object) or value.args or value.items or value.pairs or value.cls not in GLOBALS[name]:
        return None
    if isinstance(value.state, dict):
        return value.state
    return {} if bare else None


def properties_of(value: object) -> tuple[DType | None, str | None]:
    """Return a tensor's dtype, and the name of the tensor's layout if the layout is not dense.

    Some versions of torch pickle `TensorProperties` as a tuple of its fields; the first two fields are dtype and
    layout.
    """
    if not isinstance(value, Object) or (value.cls.module, value.cls.name) not in TENSOR_PROPERTIES:
        return None, None
    state = value.state
    dtype: object = None
    layout: object = None
    if isinstance(state, tuple) and state:
        dtype, layout = state[0], state[1] if len(state) > 1 else None
    elif isinstance(state, dict):
        dtype, layout = state.get("dtype"), state.get("layout")
    name = layout_of(layout)
    return dtype if isinstance(dtype, DType) else None, None if name == "torch.strided" else name


def layout_of(value: object) -> str:
    """Return the name of a tensor's layout; a missing layout means dense."""
    if value is None:
        return "torch.strided"
    if isinstance(value, Object) and len(value.args) == 1 and isinstance(value.args[0], str):
        return value.args[0]
    return str(value) if isinstance(value, Global) else kind_of(value)


def counts_of(value: object) -> Shape | None:
    """Return a shape or an index as a tuple of ints; None if the value is neither a shape nor an index. Old versions of
    torch wrote shapes as lists.
    """
    if isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, tuple) or len(value) > MAX_DIMS + 1:
        return None
    for count in value:
        if type(count) is not int or not 0 <= count <= _MAX_COUNT:
            return None
    return value


def kind_of(value: object) -> str:
    """Return the type of a value for an error message, without any of the value's contents."""
    if isinstance(value, Object):
        return f"a {value.cls.module[:100]}.{value.cls.name[:100]}"
    return "a compound key" if isinstance(value, Key) else f"a {type(value).__name__}"


METADATA = DCP_METADATA
"""Name of the metadata file of the whole folder; where each rank wrote a metadata file, the suffix of these files."""
DATA_FILE = DCP_DATA

_DEEPEST = 100
_MEMORY_PER_BYTE, _MOST_MEMORY = 64, 8 << 30
"""Maximum memory for reading a large metadata file: bytes per byte of the file, and bytes in total. A chunk takes about
140 bytes of the file, and at most 6 kB of memory.
"""
_SPARSE = "a {} layout is not supported; only dense tensors are"

_FLATTENED = "nd_reformulated_orig_global_shape"
"""Key under which Megatron records the original shape of a tensor whose flattened parts are saved."""


class Payload(NamedTuple):
    """The byte range of a stored chunk of a tensor, or of a stored object."""

    file: str
    """Name of the data file, relative to the checkpoint's folder."""
    offset: int
    """Offset of the byte range in the data file."""
    length: int
    """Size of the byte range, in bytes."""


class SavedChunk(NamedTuple):
    """A rectangular chunk of a tensor, in torch's elements (packed elements count as one)."""

    start: Shape
    """Index of the chunk's first element, one number for each dim."""
    shape: Shape
    """Number of elements of the chunk along each dim."""
    payload: Payload | None
    """Byte range of the chunk; None if the metadata lists no byte range, which is valid for an empty chunk."""


# A checkpoint can have a hundred thousand of these records; `tuple.__new__` takes a third of the time of the classes'
# own constructors.
_new_payload: Callable[[Iterable[Any]], Payload] = partial(tuple.__new__, Payload)
_new_chunk: Callable[[Iterable[Any]], SavedChunk] = partial(tuple.__new__, SavedChunk)


class SavedItem(msgspec.Struct, frozen=True, gc=False):
    """An entry of the saved state dict: a tensor with its chunks, or an object."""

    key: str
    """Flat key of the item in the metadata."""
    path: KeyPath
    """Key path of the item in the nested state dict."""
    dtype: DType | None
    """Dtype of a tensor; None for an object."""
    shape: Shape
    """Shape of a tensor in torch's elements; empty for an object."""
    chunks: tuple[SavedChunk, ...]
    """Chunks of a tensor; empty for an object."""
    payload: Payload | None = None
    """Byte range of an object; None for a tensor."""
    unflattened: Shape | None = None
    """Original shape of a tensor that Megatron saved flattened; None if the tensor is not flattened."""


def read_metadata(storage: Storage, file: str, faults: Faults) -> list[SavedItem]:
    """Read one `.metadata` file and return its items.

    Args:
        storage: storage that reads the folder's files.
        file: name of the metadata file.
        faults: list of faults, to which the problems of single items are added; these items are left out.

    Returns:
        the items of the file, in the order of the file.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE, CORRUPT or UNSUPPORTED if the file as a whole cannot be read.
        StorageError: with the code IO if the file cannot be read.
    """
    bounds = Bounds()
    size = storage.size(file)
    if size > bounds.size:
        raise refuse("CORRUPT", f"the metadata has {size} bytes; at most {bounds.size} are read", file=file)
    bounds = Bounds(memory=max(bounds.memory, min(_MEMORY_PER_BYTE * size, _MOST_MEMORY)))
    with without_gc():
        with suppress(Unread):
            columns, parts = _scan_columns(storage.read(file, 0, size), bounds.memory)
            places = _places_of_columns(parts)
            del parts  # frees the memory of the scan before the items are built
            return _items_of_columns(columns, places, file)
        # The fast scan gave up, so the interpreter reads the file again and reports what is wrong.
        pickled = read_pickle(storage.read(file, 0, size), file=file, bounds=bounds, allowed=NAMES)
        return _items(pickled.value, file, faults)


def _scan_columns(data: bytes, memory: int) -> tuple[_Columns, _PartColumns]:
    with scan_pickle(data, NAMES, memory) as graph:
        return _columns(graph)


def _items(top: object, file: str, faults: Faults) -> list[SavedItem]:
    """Return the items that a metadata file describes.

    Raises:
        Refused: with the code CORRUPT if the file is not a checkpoint's metadata.
    """
    fields = fields_of(top, "Metadata")
    if fields is None:
        raise refuse("CORRUPT", f"the file holds {kind_of(top)}, not the metadata of a checkpoint", file=file)
    item_metadata = fields.get("state_dict_metadata")
    storage_data = fields.get("storage_data")
    if not isinstance(item_metadata, dict) or not isinstance(storage_data, dict):
        raise refuse(
            "CORRUPT", "the metadata does not list the checkpoint's items and where they are stored", file=file
        )
    paths = fields.get("planner_data")
    notes = fields.get("mcore_data")
    places = _read_places(storage_data, file, faults)
    return _ItemReader(file, faults, places, notes if isinstance(notes, dict) else {}).items(item_metadata, paths)


class _Places:
    """The byte ranges of all items of a metadata file."""

    def __init__(self) -> None:
        self.objects: dict[str, Payload] = {}
        """Key of an object -> byte range of the object."""
        self.chunks: defaultdict[str, dict[Shape, Payload]] = defaultdict(dict)
        """Key of a tensor -> first index of a chunk -> byte range of the chunk."""

    @property
    def keys(self) -> set[str]:
        """The keys of all items that have a byte range."""
        return {*self.objects, *self.chunks}


class _ItemReader:
    """Checks the items of one metadata file and builds a `SavedItem` for each item; problems of items become faults."""

    def __init__(self, file: str, faults: Faults, places: _Places, notes: Mapping[Any, Any]) -> None:
        self._file = file
        self._faults = faults
        self._places = places
        self._notes = notes

    def items(self, item_metadata: Mapping[Any, Any], paths: object) -> list[SavedItem]:
        items: list[SavedItem] = []
        listed_keys: set[str] = set()
        for key, value in item_metadata.items():
            if not isinstance(key, str):
                self._faults.add("CORRUPT", f"the key of an item is {kind_of(key)}, not text", self._file)
                continue
            listed_keys.add(key)
            item = self._item(key, value, paths)
            if item is not None:
                items.append(item)
            if self._faults.full:
                return items
        for key in sorted(self._places.keys - listed_keys):
            self._faults.add(
                "CORRUPT",
                "the metadata gives its place in a file, but does not list it among the items",
                self._file,
                key,
            )
        return items

    def _item(self, key: str, value: object, paths: object) -> SavedItem | None:
        path = self.path(key, paths)
        if path is None:
            return None
        if fields_of(value, "BytesStorageMetadata", bare=True) is not None:
            return self.object_item(key, path)
        fields = fields_of(value, "TensorStorageMetadata")
        if fields is None:
            self._fault(key, f"it is described by {kind_of(value)}")
            return None
        return self._tensor(key, path, fields)

    def object_item(self, key: str, path: KeyPath) -> SavedItem | None:
        place = self._places.objects.get(key)
        if place is None:
            self._faults.add("INCOMPLETE", "the metadata gives no file for it", self._file, key)
            return None
        if key in self._places.chunks:
            self._fault(key, "it is not a tensor, and yet has chunks in files")
            return None
        return SavedItem(key, path, None, (), (), place)

    def _tensor(self, key: str, path: KeyPath, fields: Mapping[str, Any]) -> SavedItem | None:
        chunk_metadata = fields.get("chunks")
        shape = counts_of(fields.get("size")) if isinstance(chunk_metadata, list) else None
        dtype = self.dtype(key, fields.get("properties"), shape)
        if dtype is None or shape is None or not isinstance(chunk_metadata, list):
            return None
        starts: list[Shape] = []
        shapes: list[Shape] = []
        for chunk in chunk_metadata:
            box = fields_of(chunk, "ChunkStorageMetadata") or {}
            start, size = counts_of(box.get("offsets")), counts_of(box.get("sizes"))
            if start is None or size is None:
                self._fault(key, "a chunk's offsets or sizes are malformed")
                return None
            starts.append(start)
            shapes.append(size)
        return self.tensor_item(key, path, dtype, shape, starts, shapes)

    def dtype(self, key: str, properties: object, shape: Shape | None) -> DType | None:
        """Return a tensor's dtype; if its dtype, layout or shape is not supported, add a fault and return None."""
        dtype, layout = properties_of(properties)
        if dtype is None:
            self._fault(key, "its dtype is missing")
        elif layout is not None:
            self._faults.add("UNSUPPORTED", _SPARSE.format(layout), self._file, key)
        elif shape is None:
            self._fault(key, "its shape or its list of chunks is malformed")
        elif len(shape) > MAX_DIMS:
            self._faults.add(
                "UNSUPPORTED", f"the tensor has more than the {MAX_DIMS} dims that numpy supports", self._file, key
            )
        else:
            return dtype
        return None

    def tensor_item(
        self, key: str, path: KeyPath, dtype: DType, shape: Shape, starts: Sequence[Shape], shapes: Iterable[Shape]
    ) -> SavedItem | None:
        places = self._places.chunks.get(key, {})
        is_object = key in self._places.objects
        # A metadata file usually lists chunks in the order in which they are stored.
        payloads = places.values() if tuple(places) == tuple(starts) else map(places.get, starts)
        chunks = tuple(map(_new_chunk, zip(starts, shapes, payloads, strict=True)))
        extra = () if isinstance(payloads, ValuesView) else places.keys() - set(starts)
        if extra or is_object:
            parts = [*(["an object"] if is_object else []), *(f"a chunk at {list(start)}" for start in sorted(extra))]
            shown = " and ".join(parts)
            self._fault(key, f"files are listed for {shown[:200]} of it, which it does not have")
            return None
        notes = self._notes.get(key)
        flattened = notes.get(_FLATTENED) if isinstance(notes, dict) else None
        unflattened = None if flattened is None else counts_of(flattened)
        if flattened is not None and unflattened is None:
            self._fault(key, "the shape of what it is a part of is malformed")
            return None
        return SavedItem(key, path, dtype, shape, chunks, unflattened=unflattened)

    def path(self, key: str, paths: object) -> KeyPath | None:
        """Return the state-dict path of a key; if the path is malformed, add a fault and return None.

        `paths` may be the private data of a user-written planner; then the key itself is the path.
        """
        if not paths or not isinstance(paths, dict):
            return (key,)
        saved_path = paths.get(key)
        if saved_path == (key,):
            return (key,)
        if (
            not isinstance(saved_path, tuple)
            or not saved_path
            or not all(type(key_part) in (str, int) for key_part in saved_path)
        ):
            return (key,)
        if len(saved_path) > _DEEPEST:
            self._fault(key, f"it is nested more than {_DEEPEST} levels deep")
            return None
        if join_path(saved_path) != key:
            self._fault(key, f"its path is {list(saved_path)}, which gives another name")
            return None
        return saved_path

    def _fault(self, key: str, message: str) -> None:
        self._faults.add("CORRUPT", message, self._file, key)


def _read_places(storage_data: Mapping[Any, Any], file: str, faults: Faults) -> _Places:
    """Read the byte ranges of all chunks and objects; malformed byte ranges become faults."""
    places = _Places()
    for index, info in storage_data.items():
        if faults.full:
            break
        index_fields = fields_of(index, "MetadataIndex")
        key = index_fields.get("fqn") if index_fields else None
        if index_fields is None or not isinstance(key, str):
            faults.add("CORRUPT", f"a file is given for {kind_of(index)}, not for an item", file)
            continue
        start = None
        if index_fields.get("offset") is not None:
            start = counts_of(index_fields["offset"])
            if start is None:
                faults.add("CORRUPT", "the offset of one of its chunks is malformed", file, key)
                continue
        payload = _payload(fields_of(info, "_StorageInfo"), file, key, faults)
        if payload is None:
            continue
        if start is None:
            if key in places.objects:
                faults.add("CORRUPT", "it is stored in two places", file, key)
            places.objects[key] = payload
        else:
            if start in places.chunks[key]:
                faults.add("CORRUPT", f"its chunk at {list(start)} is stored in two places", file, key)
            places.chunks[key][start] = payload
    return places


def _payload(info: Mapping[str, Any] | None, file: str, key: str, faults: Faults) -> Payload | None:
    """Return the byte range of a chunk or object; if the range is impossible, or its bytes are compressed, add a fault
    and return None.
    """
    if info is None or not isinstance(info.get("relative_path"), str):
        faults.add("CORRUPT", "its place is not a byte range in a file", file, key)
        return None
    transforms = info.get("transform_descriptors")
    if transforms:
        names = ", ".join(map(str, transforms)) if isinstance(transforms, list | tuple) else kind_of(transforms)
        hint = "Save the checkpoint again without extensions."
        faults.add(
            "UNSUPPORTED",
            f"the bytes are compressed or transformed ({names[:200]}), which is not supported",
            file,
            key,
            hint,
        )
        return None
    spans = counts_of((info.get("offset"), info.get("length")))
    if spans is None:
        faults.add("CORRUPT", "the offset or the length of its bytes is not a count", file, key)
        return None
    return Payload(info["relative_path"], *spans)


_FIELDS = "state_dict_metadata", "storage_data", "planner_data", "mcore_data"


class _Columns(NamedTuple):
    """The items of a metadata file as columns, so that the scan's memory can be freed before the items are built."""

    keys: list[str]
    """Flat key of each item, in the order of the metadata file."""
    are_objects: list[bool]
    paths: object
    notes: object
    properties: list[object]
    """Pickled `TensorProperties` of each tensor; each column below has one row per tensor or per chunk."""
    shapes: Sizes
    chunk_counts: list[int]
    chunk_starts: Sizes
    chunk_shapes: Sizes


class _PartColumns(NamedTuple):
    """The stored chunks and objects of a metadata file as columns."""

    keys: list[str]
    """Flat key of the item to which each chunk or object belongs."""
    are_chunks: list[bool]
    starts: Sizes
    """Index of each chunk's first element, one row per chunk; objects have no row in this column."""
    files: list[str]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


def _columns(graph: Graph) -> tuple[_Columns, _PartColumns]:
    """Return a metadata file's columns of items, and its columns of chunks and objects.

    Raises:
        Unread: if the file is wrong, or has a form that current torch does not write.
    """
    top = np.array([graph.root], np.uint32)
    item_metadata, storage_data, paths, notes = (
        int(column[0]) for column in graph.fields(top, GLOBALS["Metadata"], *_FIELDS)
    )
    keys, values = graph.items(item_metadata)
    are_objects = graph.are_of(values, GLOBALS["BytesStorageMetadata"])
    properties, shapes, lists = graph.fields(
        values[~are_objects], GLOBALS["TensorStorageMetadata"], "properties", "size", "chunks"
    )
    chunks = graph.lists(lists)
    starts, extents = graph.fields(
        np.concatenate([np.empty(0, np.uint32), *chunks]), GLOBALS["ChunkStorageMetadata"], "offsets", "sizes"
    )
    indices, places = graph.items(storage_data)
    part_keys, part_starts = graph.fields(indices, GLOBALS["MetadataIndex"], "fqn", "offset")
    files, offsets, lengths, transforms = graph.fields(
        places, GLOBALS["_StorageInfo"], "relative_path", "offset", "length", "transform_descriptors"
    )
    if transforms.any():
        raise Unread
    are_chunks = part_starts != NONE
    parts = _PartColumns(
        graph.texts(part_keys),
        are_chunks.tolist(),
        graph.sizes(part_starts[are_chunks]),
        graph.texts(files),
        graph.integers(offsets),
        graph.integers(lengths),
    )
    items = _Columns(
        graph.texts(keys),
        are_objects.tolist(),
        graph.value(paths),
        graph.value(notes),
        graph.values_alike(properties),
        graph.sizes(shapes),
        list(map(len, chunks)),
        graph.sizes(starts),
        graph.sizes(extents),
    )
    return items, parts


def _items_of_columns(columns: _Columns, places: _Places, file: str) -> list[SavedItem]:
    """Build the items of a metadata file from their columns.

    Raises:
        Unread: if an item has a problem.
    """
    faults = Faults()
    reader = _ItemReader(file, faults, places, columns.notes if isinstance(columns.notes, dict) else {})
    starts, shapes = columns.chunk_starts.rows(), columns.chunk_shapes.rows()
    are_objects = columns.are_objects
    tensor_rows = zip(columns.properties, columns.shapes.rows(), columns.chunk_counts, strict=True)
    tensors: list[SavedItem | None] = []
    begin = 0
    tensor_keys = compress(columns.keys, map(not_, are_objects))
    for key, (properties, shape, count) in zip(tensor_keys, tensor_rows, strict=True):
        path, dtype = reader.path(key, columns.paths), reader.dtype(key, properties, shape)
        if path is None or dtype is None:
            raise Unread
        chunk_rows = slice(begin, begin + count)
        begin += count
        tensors.append(reader.tensor_item(key, path, dtype, shape, starts[chunk_rows], shapes[chunk_rows]))
    objects = _objects_of_columns(columns, places, reader)
    of_tensors = iter(tensors)
    items = [next(objects if is_object else of_tensors) for is_object in are_objects]
    if faults or None in tensors or not places.keys <= set(columns.keys):
        raise Unread
    return items  # type: ignore[return-value]  # none of them is None


def _objects_of_columns(columns: _Columns, places: _Places, reader: _ItemReader) -> Iterator[SavedItem]:
    """Build all items that are objects at once, because Megatron saves an object for every expert."""
    keys = list(compress(columns.keys, columns.are_objects))
    paths = [reader.path(key, columns.paths) for key in keys] if columns.paths else zip(keys, strict=True)
    if not (places.objects.keys() >= set(keys) and places.chunks.keys().isdisjoint(keys)):
        raise Unread
    payloads = map(places.objects.__getitem__, keys)
    return map(SavedItem, keys, paths, repeat(None), repeat(()), repeat(()), payloads)


def _places_of_columns(parts: _PartColumns) -> _Places:
    """Return the byte ranges of all chunks and objects of a metadata file.

    Raises:
        Unread: if a chunk or object has two byte ranges.
    """
    offsets, lengths = parts.offsets.tolist(), parts.lengths.tolist()
    payloads = list(map(_new_payload, zip(parts.files, offsets, lengths, strict=True)))
    places = _Places()
    are_objects = list(map(not_, parts.are_chunks))
    places.objects.update(zip(compress(parts.keys, are_objects), compress(payloads, are_objects), strict=True))
    payloads_by_start, last_key = dict[Shape, Payload](), None
    keys, chunk_payloads = compress(parts.keys, parts.are_chunks), compress(payloads, parts.are_chunks)
    for key, start, payload in zip(keys, parts.starts.rows(), chunk_payloads, strict=True):
        if key is not last_key:
            payloads_by_start, last_key = places.chunks[key], key
        payloads_by_start[start] = payload
    if len(places.objects) + sum(map(len, places.chunks.values())) < len(payloads):
        raise Unread
    return places


_OPTIMIZER = "optimizer"
_FLAT_KEY = re.compile(r"(?:(.+?)\.)?(optim|optimizer)\.((?:state|param_groups)\..+)", re.DOTALL)
_WRAPPER = "app"


def path_of(name: str) -> KeyPath:
    """Return the state-dict path under which DCP stores a tensor of a catalog.

    `optim/<parameter>/<state>` becomes the path (`optimizer`, `state`, parameter, state), where a numbered parameter
    `#<i>` becomes the number. The path of a tensor with any other name is a single key.
    """
    path = optimizer_path(name)
    return (name,) if path is None else tuple(map(str, path))


def flat_path(parameter: str, setting: str) -> KeyPath:
    """Return the path of an optimizer setting of one parameter, in torch's flattened form."""
    return (_OPTIMIZER, f"{GROUPS}.{parameter}.{setting}")


def paths_within(paths: Sequence[KeyPath]) -> tuple[list[KeyPath], str | None]:
    """Return each item's path without torch's wrapper, and the wrapper's name (empty if there is no wrapper).

    In state dicts that torch wraps itself, the wrapper is `{"app": AppState(...)}`. A flat key without a recorded path
    stays a path of one key, but a key of optimizer state is recognised and split.
    """
    split_paths = [_split(path[0]) if len(path) == 1 else path for path in paths]
    if split_paths and all(len(path) > 1 and path[0] == _WRAPPER for path in split_paths):
        return [path[1:] for path in split_paths], _WRAPPER
    return split_paths, None


def _split(key: str | int) -> KeyPath:
    match = _FLAT_KEY.fullmatch(key) if isinstance(key, str) else None
    if not match:
        return (key,)
    outer, container, inner = match.groups()
    return (*([outer] if outer else []), container, inner)
