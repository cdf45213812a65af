"""Opens folders of torch.distributed.checkpoint (DCP) as a catalog of whole tensors, each with its chunks.

torch trusts the metadata when it loads a checkpoint: elements that no chunk covers silently keep their old values.
Transaxle checks that the chunks of every tensor cover it exactly once, that the description in each chunk's archive
agrees with the metadata, and that every byte exists.

A quantized tensor consists of codes and scales; each rank saves a chunk of the codes together with the scales of these
codes. The metadata states the dtype and shape that the tensor reports to torch. Codes are cut like an unquantized
tensor; the scales of a chunk begin at the chunk's first index divided by the tile (the block of codes that share one
scale). A scale of the whole tensor is in every chunk and must be equal in all chunks; the field `twins` of the opened
checkpoint states this.

Files of torch's `HuggingFaceStorageWriter` look like a safetensors checkpoint, but each file lists the chunks on one
rank as if they were whole tensors. A note in each file's header states which chunks of the tensors are in the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from math import prod
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from transaxle.errors import Faults, Refusal, TransaxleError, Where
from transaxle.formats.catalog import (
    ITEM_BITS,
    Container,
    Entry,
    Extent,
    Number,
    NumbersInMemory,
    Shape,
    Twin,
    elements_shape,
    number,
)
from transaxle.formats.dcp.chunk_tiling import ChunkBox, check_tiling, outside
from transaxle.formats.dcp.metadata import METADATA, Payload, SavedChunk, SavedItem, paths_within, read_metadata
from transaxle.formats.dcp.payload import Payloads, QuantizedChunk
from transaxle.formats.pickled.descriptors import NOTHING, Scalar
from transaxle.formats.registry import DCP, DCP_RANK, DCP_SHARD, sort_sidecars
from transaxle.formats.safetensors import PART_NOTES, Header, part_starts, read_header
from transaxle.formats.storage.storage import Storage, split_name
from transaxle.formats.torch_file.quantized_tensors import CODES, NOTE, TAKEN, StoringKind
from transaxle.formats.torch_file.saved import ViewFault
from transaxle.formats.training_state import LEFT_BEHIND, ROOT, KeyPath, Leaf, arrange, single

if TYPE_CHECKING:
    from transaxle.axes.layout.tile import SplitTile

_RANK = re.compile(DCP_RANK)
_UNEQUAL_COPIES = "{} and {} both claim to hold this part of {!r}; only one of them is read"
_UNEQUAL_RANKS = "different from rank to rank"


def metadata_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of the metadata files: one file for the whole folder, or one file per rank, in the order of
    ranks.
    """
    if METADATA in names:
        return (METADATA,)
    ranks = sorted((int(match[1]), name) for name in names if (match := _RANK.fullmatch(name)))
    return tuple(name for _, name in ranks)


def open_dcp(storage: Storage, path: str, member: str) -> Container:
    """Open the DCP folder that a metadata file describes.

    Ranks that saved without coordination wrote one metadata file each, and these files are read together. Chunks that
    several ranks saved must be equal; the field `twins` of the opened checkpoint states this.

    Args:
        storage: storage that reads the checkpoint's files.
        path: the checkpoint's path as the user typed it.
        member: name of a metadata file: `.metadata`, or the `__<rank>.metadata` of any rank.

    Raises:
        Refused: with every problem found, each with file and item, and one of the codes UNSAFE_PICKLE, CORRUPT,
            DTYPE_MISMATCH, INCOMPLETE, NAME_COLLISION, OVERLAP, PATH_ESCAPE, SHAPE_MISMATCH or UNSUPPORTED.
        StorageError: with the code IO if a file cannot be read.
    """
    metadata_names = (member,) if member == METADATA else metadata_files(set(storage.names()) - {METADATA})
    if DCP.sidecars.isdisjoint(storage.names()):
        return read_folder(storage, path, metadata_names, Conventions())
    container = read_folder(storage, path, metadata_names, Conventions(select=without_aliases))
    carried = tuple(name for name in container.carried if name not in DCP.sidecars)  # they would name another format
    ignored = {*container.carried, *container.ignored}.difference(carried)
    return msgspec.structs.replace(container, carried=carried, ignored=tuple(sorted(ignored)))


def read_folder(storage: Storage, path: str, metadata_names: Sequence[str], conventions: Conventions) -> Container:
    """Read the checkpoint that metadata files describe.

    Args:
        storage: storage that reads the checkpoint's files.
        path: the checkpoint's path as the user typed it.
        metadata_names: names of the metadata files: `.metadata`, or one file per rank.
        conventions: how the program that saved the folder names its items.

    Raises:
        Refused: with the codes that `open_dcp` lists.
        StorageError: with the code IO if a file cannot be read.
    """
    faults = Faults()
    member = metadata_names[0]
    items = _items(storage, metadata_names, conventions, faults)
    sizes = _sizes(storage, items, member, faults)
    if faults:
        raise faults.error()
    inline = NumbersInMemory(storage)
    payloads = Payloads(inline, sizes, faults)
    leaves_of_items = (conventions.known_leaf(item.item) or _leaf(item, payloads, faults) for item in items)
    # several items may have been read as the same object
    leaves = list({id(leaf): leaf for leaf in leaves_of_items if leaf is not None}.values())
    payloads.check_overlaps()
    if faults:
        raise faults.error()
    paths, wrapper = conventions.paths([leaf.path for leaf in leaves])
    state = arrange(
        [msgspec.structs.replace(leaf, path=path) for leaf, path in zip(leaves, paths, strict=True)],
        file=member,
        read=lambda tensor: single(inline, tensor.entry) if isinstance(tensor, _WholeTensor) else NOTHING,
    )
    entries: dict[str, Entry] = {}
    twins: list[Twin] = []
    quantized = {name: leaf.value for name, leaf in state.leaves.items() if isinstance(leaf.value, AssembledTensor)}
    for name, leaf in state.leaves.items():
        if leaf.kind == "number":
            entries[name] = _number(name, leaf.value, inline)
        elif name not in quantized:
            entries[name] = msgspec.structs.replace(leaf.value.entry, name=name)
            twins.extend(leaf.value.twins)
    metadata = state.metadata()
    if quantized:
        entries |= buffers(quantized, entries, member, metadata)
        twins.extend(twin for tensor in quantized.values() for twin in tensor.twins)
    if wrapper and state.root:
        metadata[ROOT] = f"{wrapper}.{state.root}"
    files = {name: storage.size(name) for name in metadata_names} | sizes
    sidecars = sort_sidecars(storage, files)
    checksums = tuple(payloads.checksums)
    return Container(
        conventions.format,
        path,
        inline,
        entries,
        files,
        metadata,
        sidecars.carried,
        sidecars.ignored,
        checksums,
        tuple(twins),
        training=tuple(state.training),
        paths=state.paths,
    )


def _read_it(item: SavedItem) -> None:
    """Return None, which means that every item must be read, whatever its key."""


@dataclass(frozen=True, slots=True)
class Conventions:
    """What is particular to one program's DCP folders: the key paths of items, and the items that need not be read."""

    format: str = DCP.name
    """Name of the checkpoint format."""
    paths: Callable[[Sequence[KeyPath]], tuple[list[KeyPath], str | None]] = paths_within
    """Function that returns each item's key path without the program's wrapper, and the wrapper's name."""
    known_leaf: Callable[[SavedItem], Leaf | None] = _read_it
    """Function that returns the leaf (a value with its key path) to list for an item that need not be read, or None for
    an item that must be read."""
    select: Callable[[Sequence[SavedItem]], Sequence[SavedItem]] = list
    """Function that selects the items of a metadata file that belong to the checkpoint."""


def without_aliases(items: Sequence[SavedItem]) -> list[SavedItem]:
    """Return the items, except those that are second keys of a tensor (items with the same chunks as an earlier item).

    Transaxle writes such second keys in Megatron's folders, see `megatron.torch_dist.draft`.
    """
    chunks_by_first: dict[
        SavedChunk, list[tuple[SavedChunk, ...]]
    ] = {}  # items are compared by first chunk only, because a tensor may have very many chunks
    selected = []
    for item in items:
        if item.dtype is not None and item.chunks:
            alike = chunks_by_first.setdefault(item.chunks[0], [])
            if item.chunks in alike:
                continue
            alike.append(item.chunks)
        selected.append(item)
    return selected


class _ItemOfRanks(NamedTuple):
    """One key of the saved state dict, with its descriptions in all metadata files."""

    item: SavedItem
    file: str
    """The first metadata file that lists the key."""
    duplicates: tuple[SavedItem, ...] = ()
    """The items under this key in the metadata files after the first."""


# There are very many of these records; `tuple.__new__` takes a third of the time of the class's own constructor.
_new_item: Callable[[Iterable[Any]], _ItemOfRanks] = partial(tuple.__new__, _ItemOfRanks)


@dataclass(frozen=True, slots=True)
class _WholeTensor:
    """A dense tensor that its chunks cover exactly once, with the pairs of equal chunks from different ranks."""

    entry: Entry
    twins: tuple[Twin, ...]


def _items(storage: Storage, files: Sequence[str], conventions: Conventions, faults: Faults) -> list[_ItemOfRanks]:
    """Return the items of the metadata files, merged by key."""
    items_by_key: dict[str, list[tuple[SavedItem, str]]] = {}
    for rank, file in enumerate(files):
        if file not in (METADATA, f"__{rank}{METADATA}"):
            message = f"the metadata of rank {rank} is missing, but {file} exists"
            faults.add("INCOMPLETE", message, f"__{rank}{METADATA}", hint="Copy the missing files.")
            break
        try:
            items = conventions.select(read_metadata(storage, file, faults))
            if len(files) == 1:  # a single metadata file lists each key only once
                return list(map(_new_item, zip(items, repeat(file), repeat(()), strict=False)))
            for item in items:
                items_by_key.setdefault(item.key, []).append((item, file))
        except TransaxleError as error:
            if error.exit_code != TransaxleError.exit_code:
                raise
            faults.extend(*error.refusals)
    merged = []
    for (first, file), *other_items in items_by_key.values():
        for other_item, elsewhere in other_items:
            if first.dtype != other_item.dtype:
                first_name, second_name = (
                    item.dtype.name if item.dtype else "no tensor" for item in (first, other_item)
                )
                faults.add(
                    "DTYPE_MISMATCH",
                    f"it is {first_name} in {file}, but {second_name} in {elsewhere}",
                    elsewhere,
                    first.key,
                )
            elif first.shape != other_item.shape:
                message = f"its shape is {list(first.shape)} in {file}, but {list(other_item.shape)} in {elsewhere}"
                faults.add("SHAPE_MISMATCH", message, elsewhere, first.key)
        merged.append(_ItemOfRanks(first, file, tuple(other_item for other_item, _ in other_items)))
    return merged


def _sizes(storage: Storage, items: Sequence[_ItemOfRanks], member: str, faults: Faults) -> dict[str, int]:
    """Return the size of every data file; add a fault for a missing or unreadable file."""
    described = [item.item for item in items]
    if any(item.duplicates for item in items):
        described = [each for item in items for each in (item.item, *item.duplicates)]
    parts = Counter([item.payload.file for item in described if item.payload])
    chunks = chain.from_iterable(item.chunks for item in described if item.chunks)
    parts.update([place.file for place in map(_place, chunks) if place])
    listing = storage.listing()
    present = {*listing.everything(), *listing.folders}
    sizes: dict[str, int] = {}
    for file, count in parts.items():
        try:
            if len(split_name(file)) == 1 and file not in present:
                message = f"the file is missing; {member} places {count} parts of tensors in it"
                faults.add("INCOMPLETE", message, file, hint="Copy the missing file.")
            else:
                sizes[file] = storage.size(file)
        except TransaxleError as error:
            faults.extend(*error.refusals)
        if faults.full:
            break
    return sizes


def _leaf(item_of_ranks: _ItemOfRanks, payloads: Payloads, faults: Faults) -> Leaf | None:
    """Read the object of an item; if the item has a problem, add a fault and return None."""
    if faults.full:
        return None
    if item_of_ranks.item.dtype is not None:
        tensor = _tensor(item_of_ranks, item_of_ranks.item.dtype.code, payloads, faults)
        return Leaf(item_of_ranks.item.path, "tensor", tensor) if tensor else None
    first, *other_leaves = (payloads.leaf(item) for item in (item_of_ranks.item, *item_of_ranks.duplicates))
    if first and any(other_leaf is None or _differ(first, other_leaf) for other_leaf in other_leaves):
        return Leaf(first.path, "other", NOTHING, _UNEQUAL_RANKS)
    if first and isinstance(first.value, QuantizedChunk):
        first_chunk = first.value
        twins = (
            twin
            for other_leaf in other_leaves
            if other_leaf
            for twin in copies(item_of_ranks.item.key, first_chunk, other_leaf.value, _UNEQUAL_COPIES, faults)
        )
        return msgspec.structs.replace(
            first,
            value=AssembledTensor(first_chunk.layout.kind, first_chunk.parts, tuple(twins), first_chunk.layout.left),
        )
    return first


def _differ(first: Leaf, second: Leaf) -> bool:
    if first.kind != second.kind or first.what != second.what:
        return True
    return first.kind == "number" and _bytes(first.value) != _bytes(second.value)


def _tensor(
    item_of_ranks: _ItemOfRanks, code: str, payloads: Payloads, faults: Faults
) -> _WholeTensor | AssembledTensor | None:
    """Collect the chunks of a tensor; if they do not cover it exactly once, add a fault and return None."""
    item = item_of_ranks.item
    if code not in ITEM_BITS:
        faults.add("UNSUPPORTED", f"its elements are {code}, which cannot be read", item_of_ranks.file, item.key)
        return None
    chunks = list(item.chunks)
    if any(0 in shape for shape in set(map(_shape, chunks))):
        chunks = [chunk for chunk in chunks if not _is_empty(item, chunk)]
    copies: list[SavedChunk] = []
    if item_of_ranks.duplicates:
        boxes_seen = {chunk[:2] for chunk in chunks}
        for chunk in (
            chunk
            for other_item in item_of_ranks.duplicates
            for chunk in other_item.chunks
            if not _is_empty(item, chunk)
        ):
            (copies if chunk[:2] in boxes_seen else chunks).append(chunk)
            boxes_seen.add(chunk[:2])
    if not check_tiling(item.key, item.shape, list(map(_box, chunks)), item_of_ranks.file, faults):
        return None
    missing = list(map(_place, chunks)).count(None)
    if missing:
        faults.add("INCOMPLETE", f"no file holds {missing} of its {len(chunks)} chunks", item_of_ranks.file, item.key)
        return None
    chunk_places = payloads.chunks(item, chunks)
    place_by_box = {chunk[:2]: place for chunk, place in zip(chunks, chunk_places, strict=True)} if copies else {}
    pairs = [(place_by_box.get(copy[:2]), payloads.chunk(item, copy)) for copy in copies]
    extents = [place for place in chunk_places if isinstance(place, Extent)]
    quantized = []
    if len(extents) < len(chunk_places):
        quantized = [
            (chunk, place)
            for chunk, place in zip(chunks, chunk_places, strict=True)
            if isinstance(place, QuantizedChunk)
        ]
    twins = tuple(twin for pair in pairs for twin in _twins(item_of_ranks, code, *pair, faults))
    if len(extents) + len(quantized) < len(chunks):
        return None
    if quantized and extents:
        message = f"{len(quantized)} of its {len(chunks)} chunks are quantized, the others are not"
        faults.add("DTYPE_MIXED", message, item_of_ranks.file, item.key)
        return None
    if quantized:
        quantized_whole = assemble(item.key, item.shape, quantized, item_of_ranks.file, faults)
        return replace(quantized_whole, twins=quantized_whole.twins + twins) if quantized_whole else None
    extents.sort(key=_start)
    return _WholeTensor(Entry(item.key, code, elements_shape(item.shape, code), tuple(extents)), twins)


_start: Callable[[Extent], Shape] = attrgetter("start")
_place: Callable[[SavedChunk], Payload | None] = attrgetter("payload")
_shape: Callable[[SavedChunk], Shape] = attrgetter("shape")
_box: Callable[[SavedChunk], ChunkBox] = itemgetter(slice(2))


def _is_empty(item: SavedItem, chunk: SavedChunk) -> bool:
    """Return whether a chunk is empty and inside the tensor: ranks that have no rows of a tensor save such chunks."""
    return 0 in chunk.shape and not outside(item.shape, chunk[:2])


def _twins(
    item_of_ranks: _ItemOfRanks,
    code: str,
    first_place: Extent | QuantizedChunk | None,
    second_place: Extent | QuantizedChunk | None,
    faults: Faults,
) -> Iterator[Twin]:
    """Yield the pairs of tensors that must be equal because both are copies of one chunk; a quantized tensor yields one
    pair per buffer.
    """
    key = item_of_ranks.item.key
    if isinstance(first_place, Extent) and isinstance(second_place, Extent):
        first, second = (
            Entry(key, code, extent.shape, (msgspec.structs.replace(extent, start=(0,) * len(extent.start)),))
            for extent in (first_place, second_place)
        )
        yield Twin(first, second, _UNEQUAL_COPIES.format(first_place.file, second_place.file, key))
    elif isinstance(first_place, QuantizedChunk) and isinstance(second_place, QuantizedChunk):
        yield from copies(key, first_place, second_place, _UNEQUAL_COPIES, faults)
    elif first_place is not None and second_place is not None:
        faults.add(
            "DTYPE_MIXED",
            "the chunk of one rank is quantized, but its copy on another rank is not",
            item_of_ranks.file,
            key,
        )


def _number(name: str, value: Number | Scalar, inline: NumbersInMemory) -> Entry:
    code, data = _bytes(value)
    return Entry(name, code, (), (inline.add(data),))


def _bytes(value: Number | Scalar) -> tuple[str, bytes]:
    """Return a dtype code that can represent a number, and the number's bytes in this dtype."""
    code_and_bytes = (value.code, value.data) if isinstance(value, Scalar) else number(value)
    assert code_and_bytes is not None
    return code_and_bytes


# Functions for quantized tensors.

_ONE_FOR_ALL = "one number applies to the whole of {!r}, but each chunk has its own"
_HINT = "Save the tensor unsharded, or dequantized."


@dataclass(frozen=True, slots=True)
class AssembledTensor:
    """A quantized tensor that was joined from its saved chunks."""

    kind: StoringKind
    """The encoding, which states how the tensor's values are computed from its buffers."""
    parts: Mapping[str, Entry]
    """Suffix of the tensor's name -> catalog entry of the buffer; the codes still have the dtype that the file
    states.
    """
    twins: tuple[Twin, ...]
    """Pairs of tensors that must be equal, such as a number that every chunk repeats."""
    unread: Mapping[str, str]
    """Suffix of the tensor's name -> description, for buffers of the tensor that are not read."""


def assemble(
    key: str, shape: Shape, chunks: Sequence[tuple[SavedChunk, QuantizedChunk]], file: str, faults: Faults
) -> AssembledTensor | None:
    """Join the chunks of a quantized tensor.

    Args:
        key: name of the tensor.
        shape: shape of the tensor.
        chunks: chunks of the tensor, at least one; together they cover it exactly once.
        file: name of the file that describes the tensor, for error messages.
        faults: list of faults, to which problems are added: DTYPE_MIXED if chunks have different encodings;
            BLOCK_MISALIGNED if a chunk begins inside a tile (a block of codes with one scale); UNSUPPORTED if a stack
            of matrices with one scale per matrix is cut.

    Returns:
        the joined tensor; None if there is a fault.
    """
    kinds = {archive.layout.kind for _, archive in chunks}
    if len(kinds) > 1:
        variants = " and ".join(
            sorted(f"{kind.encoding} in tiles of {kind.tile}, type {kind.number}" for kind in kinds)
        )
        faults.add("DTYPE_MIXED", f"its chunks are stored as {variants}", file, key, _HINT)
        return None
    (kind,) = kinds
    parts: dict[str, Entry] = {}
    twins: list[Twin] = []
    for end, first_buffer in chunks[0][1].parts.items():
        tile = _tile(kind, end, first_buffer, shape)
        if tile is None:
            if len(chunks) > 1 and prod(first_buffer.shape) != 1:
                message = f"it is a stack of matrices in {len(chunks)} chunks, which have one number for each matrix"
                faults.add("UNSUPPORTED", message, file, key, _HINT)
                return None
            parts[end] = msgspec.structs.replace(first_buffer, name=key + end)
            twins += (
                Twin(first_buffer, other_chunk.parts[end], _ONE_FOR_ALL.format(key)) for _, other_chunk in chunks[1:]
            )
            continue
        for chunk, _ in chunks:
            if any(start % step for start, step in zip(chunk.start, tile, strict=True)):
                message = f"a chunk begins at {list(chunk.start)}, inside a tile of {list(tile)}"
                detail = partial(_split_tile, shape, tile, chunk.start, [each for each, _ in chunks])
                faults.extend(Refusal("BLOCK_MISALIGNED", message, Where(file, key), _HINT, detail))
                return None
        grid = tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))
        extents = sorted(_extents(chunks, end, tile), key=lambda extent: extent.start)
        parts[end] = Entry(key + end, first_buffer.dtype, grid, tuple(extents))
    unread = {end: reason for _, archive in chunks for end, reason in archive.layout.left.items()}
    return AssembledTensor(kind, parts, tuple(twins), unread)


def _split_tile(shape: Shape, tile: Shape, start: Shape, chunks: Sequence[SavedChunk]) -> SplitTile | None:
    """Describe the tile (block of codes with one scale) that a chunk's first index splits, along the first dim with a
    split; None if the tile is too large for the error's drawing.
    """
    from transaxle.axes.layout.tile import DRAWN, SplitTile

    dim = next(each for each, step in enumerate(tile) if start[each] % step)
    number = tuple(at // step for at, step in zip(start, tile, strict=True))
    first = number[dim] * tile[dim]
    stop = min(first + tile[dim], shape[dim])
    if stop - first > DRAWN:
        return None
    intervals: list[tuple[int, int, str, Shape]] = []
    for at in range(first, stop):
        place = (*start[:dim], at, *start[dim + 1 :])
        chunk = next(each for each in chunks if _contains(each, place))
        name = f"the chunk at {list(chunk.start)}"
        tile_of_chunk = tuple(
            (here - begin) // step for here, begin, step in zip(place, chunk.start, tile, strict=True)
        )
        if intervals and intervals[-1][2:] == (name, tile_of_chunk):
            intervals[-1] = intervals[-1][0], at + 1, name, tile_of_chunk
        else:
            intervals.append((at, at + 1, name, tile_of_chunk))
    return SplitTile(f"tiles of {list(tile)}", number, dim, tuple(intervals))


def _contains(chunk: SavedChunk, place: Shape) -> bool:
    return all(begin <= at < begin + size for at, begin, size in zip(place, chunk.start, chunk.shape, strict=True))


def copies(key: str, first: QuantizedChunk, second: QuantizedChunk, why: str, faults: Faults) -> Iterator[Twin]:
    """Yield the pairs of buffers that must be equal because two ranks saved copies of one chunk.

    Args:
        key: name of the tensor.
        first: the chunk that is read.
        second: the copy of the chunk, from a different rank.
        why: template of the error message for unequal copies; the two file names and the tensor's key are filled in.
        faults: list of faults, to which DTYPE_MIXED is added if the copies have different encodings.
    """
    files = [chunk.parts[CODES].extents[0].file for chunk in (first, second)]
    if first.layout.kind != second.layout.kind:
        faults.add("DTYPE_MIXED", f"{files[0]} and {files[1]} store it in two encodings", files[1], key)
        return
    for end, entry in first.parts.items():
        yield Twin(entry, second.parts[end], why.format(*files, key))


def buffers(
    quantized: Mapping[str, AssembledTensor], plain: Collection[str], file: str, metadata: dict[str, Any]
) -> dict[str, Entry]:
    """Return the buffers of quantized tensors by buffer name, and describe these tensors in the metadata.

    Args:
        quantized: the quantized tensors by name.
        plain: names of the tensors that are not quantized.
        file: name of the file that describes the tensors, for error messages.
        metadata: metadata of the opened checkpoint, to which the description of quantized tensors is added.

    Raises:
        Refused: with the code NAME_COLLISION if a buffer's name is also a tensor's name; with the code UNSUPPORTED if
            codes have an unknown dtype.
    """
    faults = Faults()
    old = any(tensor.kind.is_old for tensor in quantized.values())
    entries: dict[str, Entry] = {}
    for name, tensor in quantized.items():
        try:
            metadata.setdefault(NOTE, {})[name] = tensor.kind.describe(old=old)
        except ViewFault as fault:
            faults.add(fault.code, fault.message, file, name, fault.hint)
            continue
        for end, entry in tensor.parts.items():
            if name + end in plain or name + end in entries:
                faults.add("NAME_COLLISION", TAKEN, file, name + end)
            dtype = tensor.kind.stored_code(old=old) if end == CODES else entry.dtype
            entries[name + end] = msgspec.structs.replace(entry, name=name + end, dtype=dtype)
        if tensor.unread:
            unread = {name + end: reason for end, reason in tensor.unread.items()}
            metadata[LEFT_BEHIND] = {**metadata.get(LEFT_BEHIND, {}), **unread}
    if faults:
        raise faults.error()
    return entries


def _tile(kind: StoringKind, end: str, first: Entry, shape: Shape) -> Shape | None:
    """Return the shape of the tile (the block of codes that share one element of a buffer); None if the tile is the
    whole tensor.
    """
    if end == CODES:
        return (*(1 for _ in shape[:-1]), 2 if kind.packed else 1) if shape else ()
    if len(first.shape) != len(shape) or not all(kind.tile):
        return None
    return (1,) * (len(shape) - 2) + kind.tile[-len(shape) :]


def _extents(chunks: Sequence[tuple[SavedChunk, QuantizedChunk]], end: str, tile: Shape) -> Iterator[Extent]:
    for chunk, archive in chunks:
        (extent,) = archive.parts[end].extents
        yield msgspec.structs.replace(
            extent, start=tuple(start // step for start, step in zip(chunk.start, tile, strict=True))
        )


# Unconsolidated safetensors files of torch's `HuggingFaceStorageWriter`, which contain each rank's chunks of tensors.

_SHARD = re.compile(DCP_SHARD)


def shard_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of unconsolidated safetensors files, sorted."""
    return tuple(sorted(name for name in names if _SHARD.fullmatch(name)))


def open_shards(storage: Storage, path: str, member: str) -> Container:
    """Open a folder of safetensors files that ranks saved separately and that were not consolidated.

    Args:
        storage: storage that reads the checkpoint's files.
        path: the checkpoint's path as the user typed it.
        member: name of one of the files.

    Raises:
        Refused: with every problem found, and one of the codes CORRUPT, DTYPE_MISMATCH, INCOMPLETE, NAME_COLLISION,
            OVERLAP or UNSUPPORTED.
        StorageError: with the code IO if a file cannot be read.
    """
    faults = Faults()
    headers: dict[str, Header] = {}
    parts: dict[str, list[tuple[Entry, Extent]]] = {}
    for file in shard_files({*storage.names(), member}):
        try:
            headers[file] = header = read_header(storage, file)
        except TransaxleError as error:
            if error.exit_code != TransaxleError.exit_code:
                raise
            faults.extend(*error.refusals)
            continue
        for name, start in (part_starts(header.entries, header.metadata, file, faults) or {}).items():
            entry = header.entries[name]
            (placed,) = entry.extents
            parts.setdefault(name, []).append((entry, Extent(start, entry.shape, file, placed.offset)))
    joined = {name: _join_parts(name, pieces, faults) for name, pieces in parts.items()}
    entries = {name: entry for name, entry in joined.items() if entry}
    if faults:
        raise faults.error()
    files = {file: storage.size(file) for file in headers}
    sidecars = sort_sidecars(storage, files)
    return Container(DCP.name, path, storage, entries, files, _notes(headers), sidecars.carried, sidecars.ignored)


def _join_parts(name: str, parts: list[tuple[Entry, Extent]], faults: Faults) -> Entry | None:
    """Return the tensor that consists of the given chunks; if the chunks do not fit together, add a fault and return
    None.
    """
    (model, _), (_, first_extent) = parts[0], parts[0]
    for entry, extent_here in parts[1:]:
        if entry.dtype != model.dtype:
            message = f"it is {model.dtype} in {first_extent.file}, but {entry.dtype} here"
            faults.add("DTYPE_MISMATCH", message, extent_here.file, name)
            return None
        if len(entry.shape) != len(model.shape):
            message = f"it has {len(model.shape)} dims in {first_extent.file}, but {len(entry.shape)} here"
            faults.add("SHAPE_MISMATCH", message, extent_here.file, name)
            return None
    extents = sorted((extent_here for _, extent_here in parts), key=lambda extent: extent.start)
    shape: Shape = tuple(
        max(extent.start[dim] + extent.shape[dim] for extent in extents) for dim in range(len(model.shape))
    )
    non_empty = [extent for extent in extents if 0 not in extent.shape]
    boxes: list[ChunkBox] = [(extent.start, extent.shape) for extent in non_empty]
    if not check_tiling(name, shape, boxes, first_extent.file, faults):
        return None
    return Entry(name, model.dtype, shape, tuple(non_empty))


def _notes(headers: Mapping[str, Header]) -> dict[str, str]:
    """Return the metadata entries that are equal in all headers, without the notes on which chunks a file contains."""
    texts = [header.metadata for header in headers.values()]
    first_text = texts[0] if texts else {}
    return {
        key: text
        for key, text in first_text.items()
        if key not in PART_NOTES and all(other_text.get(key) == text for other_text in texts)
    }
