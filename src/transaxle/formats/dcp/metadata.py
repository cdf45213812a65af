"""The `.metadata` file as plain values: the items, their chunks, and where the parts are.

torch unpickles this file without any restriction. Here it goes through the restricted interpreter, which allows torch's
classes, under all names that they have had, and Megatron's; and every field is treated as a stranger's: dtypes, counts
and names are checked, and every problem is reported with its item. Older forms of the file are read too; fields that an
old torch did not write, or that are of another kind than it writes, are simply absent.

Items have the keys of the state dict that torch saves and loads: model tensors their names, the optimizer's state
torchtitan's keys, `optimizer.state.<parameter>.<state>`, which is also what torch flattens `{"optimizer":
get_optimizer_state_dict(...)}` to.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import msgspec

from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.builtin_formats import DCP_DATA, DCP_METADATA
from transaxle.formats.catalog import Shape
from transaxle.formats.format import uncollected
from transaxle.formats.pickled.allowed_globals.allowed import ALLOWED, INERT, GlobalRule, Names
from transaxle.formats.pickled.columns import Column, Run, filled
from transaxle.formats.pickled.descriptors import DType, Global, Key, Object
from transaxle.formats.pickled.interpreter import Bounds, read_pickle
from transaxle.formats.pickled.repeats import bare, described, elements, keys
from transaxle.formats.storage.storage import Storage
from transaxle.formats.training_state.flatten import optimizer_path
from transaxle.formats.training_state.state import GROUPS, KeyPath, joined

MODULES = ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
"""Package of torch's classes, and its name before 2.0."""
_PROPERTIES = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata")
"""Module of a tensor's properties, and its name before 2.3."""
_CLASSES = {
    "Metadata": "metadata", "TensorStorageMetadata": "metadata", "BytesStorageMetadata": "metadata",
    "ChunkStorageMetadata": "metadata", "MetadataIndex": "metadata", "StorageMeta": "metadata",
    "_StorageInfo": "filesystem",
}  # fmt: skip
"""Class -> module in the package."""
TENSOR_PROPERTIES = frozenset((module, "TensorProperties") for module in _PROPERTIES)
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")

_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
GLOBALS = {name: tuple(Global(f"{package}.{module}", name) for package in MODULES) for name, module in _CLASSES.items()}
"""Class -> its possible names."""
GLOBALS["Metadata"] += (Global(_MEGATRON, "MCoreMetadata"),)  # megatron-core 0.15
_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
"""Classes of torch's planner: Megatron keeps the plans of all ranks beside the metadata."""
_KINDS_OF_ITEM = ("TENSOR", "SHARD", "BYTE_IO")


def _names() -> Iterator[tuple[str, str]]:
    for names_of_class in GLOBALS.values():
        for global_name in names_of_class:
            yield global_name.module, global_name.name
    for name in _PLANNER:
        yield f"{MODULES[0]}.planner", name
    for member in _KINDS_OF_ITEM:  # up to Python 3.11.3, members of an Enum were pickled by name
        yield f"{MODULES[0]}.planner", f"WriteItemType.{member}"
    yield _MEGATRON, "MCoreSavePlan"  # up to megatron-core 0.15
    for module in _PROPERTIES:
        yield module, "TensorProperties"
        for formats in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"):
            yield module, formats
            for member in _MEMORY_FORMATS:
                yield module, f"{formats}.{member}"


_BUILDERS = {
    "ChunkStorageMetadata": elements, "MetadataIndex": keys, "BytesStorageMetadata": bare,
    "TensorStorageMetadata": described,
}  # fmt: skip
NAMES: Names = {
    **ALLOWED,
    **dict.fromkeys(_names(), INERT),
    # A name that stands for the one object of `GLOBALS` is found there by its identity, in a tenth of the time.
    **{
        (each.module, each.name): GlobalRule(each, _BUILDERS.get(name))
        for name, possible in GLOBALS.items()
        for each in possible
    },
    (f"{MODULES[0]}.planner", "WriteItem"): GlobalRule(build=elements),
}
"""Globals that this file may name; the files that hold tensors may not."""
ONE_BY_ONE = {
    name: GlobalRule(rule.value) if rule.build in (bare, described, elements, keys) else rule
    for name, rule in NAMES.items()
}
"""The same, without runs."""


MAX_DIMS = 64
"""numpy's cap on the dims of an array."""
_MAX_COUNT = 2**63 - 1


def fields_of(value: object, name: str, *, bare: bool = False) -> Mapping[str, Any] | None:
    """Return the fields of a dataclass by name; None if the value is not of that class.

    Args:
        value: the value in the pickle.
        name: the class.
        bare: it may have no fields.
    """
    if not isinstance(value, Object) or value.args or value.items or value.pairs or value.cls not in GLOBALS[name]:
        return None
    if isinstance(value.state, dict):
        return value.state
    return {} if bare else None


def properties_of(value: object) -> tuple[DType | None, str | None]:
    """Return a tensor's dtype, and its layout if it is not dense.

    The class moved twice and wrote its fields as a tuple; only its first two concern the bytes.
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
    """Return the name of a layout; a missing one is dense."""
    if value is None:
        return "torch.strided"
    if isinstance(value, Object) and len(value.args) == 1 and isinstance(value.args[0], str):
        return value.args[0]
    return str(value) if isinstance(value, Global) else kind_of(value)


def counts_of(value: object) -> Shape | None:
    """Return a tuple of counts; lists, which old versions wrote, are accepted too."""
    if isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, tuple) or len(value) > MAX_DIMS + 1:
        return None
    for count in value:
        if type(count) is not int or not 0 <= count <= _MAX_COUNT:
            return None
    return value


def kind_of(value: object) -> str:
    """Return the type of a value, for a message; never its contents."""
    if isinstance(value, Object):
        return f"a {value.cls.module[:100]}.{value.cls.name[:100]}"
    return "a compound key" if isinstance(value, Key) else f"a {type(value).__name__}"


METADATA = DCP_METADATA
"""Name of the file, and the suffix of its name where each rank wrote its own."""
DATA_FILE = DCP_DATA

_DEEPEST = 100
_MEMORY_PER_BYTE, _MOST_MEMORY = 64, 8 << 30
"""Memory that reading a large file may take, per byte and in total: a chunk is some 140 bytes of it, and takes at most
6 kB.
"""
_SPARSE = "a {} layout is not supported; only dense tensors are"

_TWICE = "a dict has the same key twice"
_FLATTENED = "nd_reformulated_orig_global_shape"
"""What Megatron notes of a tensor whose flattened parts are saved."""


class Payload(NamedTuple):
    """Where one part of one item is."""

    file: str
    """Name of the file inside the folder."""
    offset: int
    """Its first byte there."""
    length: int
    """Bytes."""


class SavedChunk(NamedTuple):
    """A rectangular part of a tensor. Counts are in elements, as torch gives them."""

    start: Shape
    """First index along each dim."""
    shape: Shape
    """Elements along each dim."""
    payload: Payload | None
    """Its place; None if none is recorded, as may be for a chunk without elements."""


# There are a hundred thousand of them: made so, a named tuple takes a third of the time.
_new_payload: Callable[[Iterable[Any]], Payload] = partial(tuple.__new__, Payload)
_new_chunk: Callable[[Iterable[Any]], SavedChunk] = partial(tuple.__new__, SavedChunk)


class SavedItem(msgspec.Struct, frozen=True, gc=False):
    """One entry of the saved state dict."""

    key: str
    """Its flat key."""
    path: KeyPath
    """Its path in the nested state dict."""
    dtype: DType | None
    """Type of a tensor; None for an object."""
    shape: Shape
    """Shape of a tensor, as torch gives it."""
    chunks: tuple[SavedChunk, ...]
    """Parts of a tensor."""
    payload: Payload | None = None
    """Place of an object."""
    unflattened: Shape | None = None
    """Shape of the tensor whose flattened parts are saved, as Megatron notes it; None: the tensor is as it is."""


def read_metadata(storage: Storage, file: str, faults: Faults) -> list[SavedItem]:
    """Read one `.metadata` file.

    Args:
        storage: the files.
        file: its name.
        faults: receives the problems of single items, which are left out.

    Returns:
        Items in the order of the file.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, UNSUPPORTED where the file as a whole is refused.
        StorageError: IO.
    """
    bounds = Bounds()
    size = storage.size(file)
    if size > bounds.size:
        raise refuse("CORRUPT", f"the metadata has {size} bytes; at most {bounds.size} are read", file=file)
    bounds = Bounds(memory=max(bounds.memory, min(_MEMORY_PER_BYTE * size, _MOST_MEMORY)))
    data = storage.read(file, 0, size)
    with uncollected():
        pickled = read_pickle(data, file=file, bounds=bounds, allowed=NAMES)
        if pickled.has_runs:
            found = Faults()
            with suppress(TransaxleError):
                items = _items(pickled.value, file, found)
                if not found:
                    return items
            # Whatever is wrong is said as it is said of single records.
            pickled = read_pickle(data, file=file, bounds=bounds, allowed=ONE_BY_ONE)
    return _items(pickled.value, file, faults)


def _items(top: object, file: str, faults: Faults) -> list[SavedItem]:
    """Return the items that a file describes.

    Raises:
        Refused: CORRUPT where there are none.
    """
    fields = fields_of(top, "Metadata")
    if fields is None:
        raise refuse("CORRUPT", f"the file holds {kind_of(top)}, not the metadata of a checkpoint", file=file)
    described = fields.get("state_dict_metadata")
    stored = fields.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise refuse(
            "CORRUPT", "the metadata does not list the checkpoint's items and where they are stored", file=file
        )
    paths = fields.get("planner_data")
    notes = fields.get("mcore_data")
    placed = _placed(stored, file, faults)
    return _ItemReader(file, faults, placed, notes if isinstance(notes, dict) else {}).items(described, paths)


class _Places:
    """Where the parts of all items are."""

    def __init__(self) -> None:
        self.objects: dict[str, Payload] = {}
        """Key of an object -> its place."""
        self.chunks: defaultdict[str, dict[Shape, Payload]] = defaultdict(dict)
        """Key of a tensor -> first index of a chunk -> its place."""

    @property
    def keys(self) -> set[str]:
        """The keys of all items that have a place."""
        return {*self.objects, *self.chunks}

    def add(self, objects: Mapping[str, Payload], chunks: Mapping[str, dict[Shape, Payload]]) -> bool:
        """Note further places, if none of them is noted already; tell whether they are noted."""
        known = self.chunks
        if not self.objects.keys().isdisjoint(objects) or any(
            key in known and not known[key].keys().isdisjoint(places) for key, places in chunks.items()
        ):
            return False
        self.objects.update(objects)
        for key, places in chunks.items():
            if key in known:
                known[key].update(places)
            else:
                known[key] = places
        return True


class _ItemReader:
    """Reads the items of one metadata file."""

    def __init__(self, file: str, faults: Faults, places: _Places, notes: Mapping[Any, Any]) -> None:
        self._file = file
        self._faults = faults
        self._places = places
        self._notes = notes

    def items(self, described: Mapping[Any, Any], paths: object) -> list[SavedItem]:
        items: list[SavedItem] = []
        known: set[str] = set()
        keys, values = list(described), list(described.values())
        at = 0
        while at < len(keys):
            key, value, first = keys[at], values[at], at
            at += 1
            if isinstance(key, Key) and isinstance(value, Run) and key.value is value:
                items += self._tensors(value, paths, known)
                continue
            is_object = fields_of(value, "BytesStorageMetadata", bare=True) is not None
            while is_object and at < len(keys) and values[at] is value:  # one stands for all alike: see `repeats.bare`
                at += 1
            alike = keys[first:at]
            if is_object and not paths and self._are_plain_objects(alike, known):
                known.update(alike)
                places = map(self._places.objects.__getitem__, alike)
                items += map(SavedItem, alike, zip(alike, strict=False), repeat(None), repeat(()), repeat(()), places)
                continue
            for each in alike:
                if each in known:
                    self._fault(str(each), _TWICE)
                known.add(each)
                if not isinstance(each, str):
                    message = f"the key of an item is {kind_of(each)}, not text"
                    self._faults.add("CORRUPT", message, self._file)
                    continue
                item = self._item(each, value, paths, is_object=is_object)
                if item is not None:
                    items.append(item)
                if self._faults.full:
                    return items
        for key in sorted(self._places.keys - known):
            self._faults.add(
                "CORRUPT",
                "the metadata gives its place in a file, but does not list it among the items",
                self._file,
                key,
            )
        return items

    def _are_plain_objects(self, keys: Sequence[Any], known: set[str]) -> bool:
        """Tell whether keys are those of objects, each with a place of its own, as Megatron has for every expert."""
        places = self._places
        return (
            known.isdisjoint(keys)
            and all(map(places.objects.__contains__, keys))
            and places.chunks.keys().isdisjoint(keys)
        )

    def _tensors(self, run: Run, paths: object, known: set[str]) -> list[SavedItem]:
        """Return the tensors of a run; a key that was there before is a fault.

        Args:
            run: keys with what describes them.
            paths: see `_path`.
            known: the keys before; it grows.
        """
        text, template = run.templates if len(run.templates) == 2 else (None, None)
        keys = run.values(text.number) if isinstance(text, Column) else []
        if len(set(keys)) < len(run.columns) or not known.isdisjoint(keys):
            self._faults.add("CORRUPT", _TWICE, self._file)
            return []
        known.update(keys)
        fields = fields_of(template, "TensorStorageMetadata") or {}
        shape, chunks, properties = fields.get("size"), fields.get("chunks"), fields.get("properties")
        columns = list(map(_box, chunks)) if isinstance(chunks, list) else [None]
        counts = counts_of(shape)
        if counts is None or None in columns or not run.is_one(properties):
            read = (self._item(key, value, paths, is_object=False) for key, value in run.records())
            return [item for item in read if item is not None]
        dtype = self._dtype(keys[0], filled(properties, run.row(0), {}), counts)
        if dtype is None:
            return []
        starts, shapes = (
            list(zip(*(run.rows(box[side]) for box in columns if box is not None), strict=True)) or [()] * len(keys)
            for side in (0, 1)
        )
        found = []
        for key, size, starts_of_key, shapes_of_key in zip(keys, run.rows(counts), starts, shapes, strict=True):
            path = self._path(key, paths)
            item = None if path is None else self._placed_tensor(key, path, dtype, size, starts_of_key, shapes_of_key)
            if item is not None:
                found.append(item)
        return found

    def _item(self, key: str, value: object, paths: object, *, is_object: bool) -> SavedItem | None:
        path = self._path(key, paths)
        if path is None:
            return None
        if is_object:
            return self._object(key, path)
        fields = fields_of(value, "TensorStorageMetadata")
        if fields is None:
            self._fault(key, f"it is described by {kind_of(value)}")
            return None
        return self._tensor(key, path, fields)

    def _object(self, key: str, path: KeyPath) -> SavedItem | None:
        place = self._places.objects.get(key)
        if place is None:
            self._faults.add("INCOMPLETE", "the metadata gives no file for it", self._file, key)
            return None
        if key in self._places.chunks:
            self._fault(key, "it is not a tensor, and yet has chunks in files")
            return None
        return SavedItem(key, path, None, (), (), place)

    def _tensor(self, key: str, path: KeyPath, fields: Mapping[str, Any]) -> SavedItem | None:
        listed = fields.get("chunks")
        shape = counts_of(fields.get("size")) if isinstance(listed, list) else None
        dtype = self._dtype(key, fields.get("properties"), shape)
        if dtype is None or shape is None or not isinstance(listed, list):
            return None
        starts: list[Shape] = []
        shapes: list[Shape] = []
        for chunk_value in listed:
            boxes = _boxes(chunk_value)
            if boxes is None:
                self._fault(key, "a chunk's offsets or sizes are malformed")
                return None
            starts += boxes[0]
            shapes += boxes[1]
        return self._placed_tensor(key, path, dtype, shape, starts, shapes)

    def _dtype(self, key: str, properties: object, shape: Shape | None) -> DType | None:
        """Return the dtype of a tensor; None where that, its layout or its shape is a problem."""
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

    def _placed_tensor(
        self, key: str, path: KeyPath, dtype: DType, shape: Shape, starts: Sequence[Shape], shapes: Iterable[Shape]
    ) -> SavedItem | None:
        places = self._places.chunks.get(key, {})
        is_object = key in self._places.objects
        # Chunks are usually listed in the order in which they are stored.
        found = places.values() if tuple(places) == tuple(starts) else map(places.get, starts)
        chunks = tuple(map(_new_chunk, zip(starts, shapes, found, strict=True)))
        extra = () if isinstance(found, ValuesView) else places.keys() - set(starts)
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

    def _path(self, key: str, paths: object) -> KeyPath | None:
        """Return the path of a key; what is no mapping of paths is private to another planner."""
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
        if joined(saved_path) != key:
            self._fault(key, f"its path is {list(saved_path)}, which gives another name")
            return None
        return saved_path

    def _fault(self, key: str, message: str) -> None:
        self._faults.add("CORRUPT", message, self._file, key)


def _placed(stored: Mapping[Any, Any], file: str, faults: Faults) -> _Places:
    """Return the places of all parts, by key and first index."""
    places = _Places()
    for index, info in _each(stored, places):
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


def _each(stored: Mapping[Any, Any], places: _Places) -> Iterator[tuple[object, object]]:
    """Yield each index with its place, those in runs too; but of a run without any problem the places are noted."""
    for index, info in stored.items():
        if not isinstance(index, Key) or not isinstance(info, Run) or index.value is not info:
            yield index, info
        elif not _noted(info, places):
            for record in info.records():
                yield from zip(record[::2], record[1::2], strict=False)


def _noted(run: Run, places: _Places) -> bool:
    """Note the places in a run, if there is nothing wrong with them; tell whether they are noted."""
    found = _Places()
    for index, info in zip(run.templates[::2], run.templates[1::2], strict=False):
        if not _noted_columns(run, index, info, found):
            return False
    return places.add(found.objects, found.chunks)


def _noted_columns(run: Run, index: object, info: object, found: _Places) -> bool:
    """Note the places that one item of each record of a run tells, if there is nothing wrong with them."""
    index_fields, info_fields = fields_of(index, "MetadataIndex") or {}, fields_of(info, "_StorageInfo") or {}
    key, file, start = index_fields.get("fqn"), info_fields.get("relative_path"), index_fields.get("offset")
    spans = counts_of((info_fields.get("offset"), info_fields.get("length")))
    if not isinstance(key, str | Column) or not isinstance(file, str) or spans is None:
        return False
    if info_fields.get("transform_descriptors") or (start is not None and counts_of(start) is None):
        return False
    offsets, lengths = (run.columns[:, column].tolist() for column in spans)
    payloads = map(_new_payload, zip(repeat(file), offsets, lengths, strict=False))
    count = len(run.columns)
    if start is None:
        objects = (
            {key: next(payloads)} if isinstance(key, str) else dict(zip(run.values(key.number), payloads, strict=True))
        )
        return len(objects) == count and found.add(objects, {})
    if isinstance(key, str):
        chunks = dict(zip(run.rows(start), payloads, strict=True))
        return len(chunks) == count and found.add({}, {key: chunks})
    for key_of_row, start_of_row, payload in zip(run.values(key.number), run.rows(start), payloads, strict=True):
        known = found.chunks[key_of_row]
        if start_of_row in known:
            return False
        known[start_of_row] = payload
    return True


def _boxes(value: object) -> tuple[Sequence[Shape], Sequence[Shape]] | None:
    """Return first indices and sizes of a chunk, or of a run of them; None if one is malformed."""
    if not isinstance(value, Run):
        box = _box(value)
        return None if box is None else ([box[0]], [box[1]])
    columns = [_box(template) for template in value.templates]
    if None in columns:  # they are references, or malformed
        boxes = [_box(each) for record in value.records() for each in record]
        found = [box for box in boxes if box is not None]
        return None if len(found) < len(boxes) else ([start for start, _ in found], [sizes for _, sizes in found])
    starts, shapes = ([value.rows(box[side]) for box in columns if box is not None] for side in (0, 1))
    return list(chain.from_iterable(zip(*starts, strict=True))), list(chain.from_iterable(zip(*shapes, strict=True)))


def _box(value: object) -> tuple[Shape, Shape] | None:
    """Return first index and size of a chunk; None if it is malformed."""
    fields = fields_of(value, "ChunkStorageMetadata") or {}
    start, sizes = counts_of(fields.get("offsets")), counts_of(fields.get("sizes"))
    return None if start is None or sizes is None else (start, sizes)


def _payload(info: Mapping[str, Any] | None, file: str, key: str, faults: Faults) -> Payload | None:
    """Return one place; an impossible byte range is a fault."""
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


_OPTIMIZER = "optimizer"
_FLAT_KEY = re.compile(r"(?:(.+?)\.)?(optim|optimizer)\.((?:state|param_groups)\..+)", re.DOTALL)
_WRAPPER = "app"


def path_of(name: str) -> KeyPath:
    """Return the path in the saved state dict under which a tensor is written.

    `optim/<parameter>/<state>` becomes `optimizer`, `state`, parameter, state; a parameter that is only a number,
    `#<i>`, is that number. Any other name is a key of its own.
    """
    path = optimizer_path(name)
    return (name,) if path is None else tuple(map(str, path))


def flat_path(parameter: str, setting: str) -> KeyPath:
    """Return the path of a parameter's setting where the optimizer's state is flattened."""
    return (_OPTIMIZER, f"{GROUPS}.{parameter}.{setting}")


def paths_within(paths: Sequence[KeyPath]) -> tuple[list[KeyPath], str | None]:
    """Return the paths that name the items, and the wrapper that was removed from all of them.

    The wrapper is torch's own `{"app": AppState(...)}`. A flat key without a known path is a single part; only an
    optimizer's state is recognised in such keys.
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
