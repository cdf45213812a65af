"""Opening what torch.distributed.checkpoint saved: one catalog of whole tensors, each in its chunks.

torch takes the metadata at its word, and what the chunks do not cover keeps the values it had. Here the chunks of every
tensor must cover it exactly once, every chunk's own description must agree, and every byte must be there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from transaxle.errors import TransaxleError
from transaxle.formats.builtin_formats import DCP, DCP_RANK
from transaxle.formats.catalog.catalog import Container, Entry, Extent, Twin
from transaxle.formats.catalog.inline import Inline, Number, number
from transaxle.formats.catalog.problem_list import Faults
from transaxle.formats.catalog.sidecar_files import company
from transaxle.formats.dcp.chunks.chunk_tiling import outside, tiled
from transaxle.formats.dcp.chunks.payload import Payloads, QuantizedChunk
from transaxle.formats.dcp.chunks.quantized_chunks import Whole, buffers, copies, whole
from transaxle.formats.dcp.key_names import paths_within
from transaxle.formats.dcp.metadata import METADATA, Chunk, Item, read_metadata
from transaxle.formats.dtype import ITEM_BITS, logical
from transaxle.formats.pickled.descriptors import NOTHING, Scalar
from transaxle.formats.storage.names import checked_parts
from transaxle.formats.storage.storage import Storage
from transaxle.formats.training_state.state import ROOT, Leaf, arrange
from transaxle.formats.training_state.state_groups import single

_RANK = re.compile(DCP_RANK)
_WHY = "{} and {} each say that they hold this part of {!r}; one of them is read"
_DIFFERS = "different from rank to rank"


def metadata_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the metadata files among names: the one that counts, or that of each rank, in order of ranks."""
    if METADATA in names:
        return (METADATA,)
    ranks = sorted((int(found[1]), name) for name in names if (found := _RANK.fullmatch(name)))
    return tuple(name for _, name in ranks)


def open_dcp(storage: Storage, path: str, member: str) -> Container:
    """Open the folder that a metadata file describes.

    Where ranks saved without coordination, each wrote a metadata file; they are read together. What several of them
    hold must be equal, which is left to the container's `twins`.

    Args:
        storage: where the files are.
        path: what the user typed.
        member: `.metadata`, or the `__<rank>.metadata` of any rank.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, DTYPE_MISMATCH, INCOMPLETE, NAME_COLLISION, OVERLAP, PATH_ESCAPE,
            SHAPE_MISMATCH, UNSUPPORTED: every problem found, each with file and item.
        StorageError: IO.
    """
    faults = Faults()
    described = (member,) if member == METADATA else metadata_files(set(storage.names()) - {METADATA})
    items = _items(storage, described, faults)
    sizes = _sizes(storage, items, member, faults)
    if faults:
        raise faults.error()
    inline = Inline(storage)
    payloads = Payloads(inline, sizes, faults)
    leaves = [leaf for item in items if (leaf := _leaf(item, payloads, faults))]
    payloads.check_overlaps()
    if faults:
        raise faults.error()
    paths, wrapper = paths_within([leaf.path for leaf in leaves])
    state = arrange(
        [replace(leaf, path=path) for leaf, path in zip(leaves, paths, strict=True)],
        file=member,
        read=lambda tensor: single(inline, tensor.entry) if isinstance(tensor, _Tensor) else NOTHING,
    )
    entries: dict[str, Entry] = {}
    twins: list[Twin] = []
    quantized = {name: leaf.value for name, leaf in state.leaves.items() if isinstance(leaf.value, Whole)}
    for name, leaf in state.leaves.items():
        if leaf.kind == "number":
            entries[name] = _number(name, leaf.value, inline)
        elif name not in quantized:
            entries[name] = replace(leaf.value.entry, name=name)
            twins.extend(leaf.value.twins)
    metadata = state.metadata()
    if quantized:
        entries |= buffers(quantized, entries, member, metadata)
        twins.extend(twin for each in quantized.values() for twin in each.twins)
    if wrapper and state.root:
        metadata[ROOT] = f"{wrapper}.{state.root}"
    files = {name: storage.size(name) for name in described} | sizes
    around = company(storage, files)
    checksums = tuple(payloads.checksums)
    return Container(
        DCP.name,
        path,
        inline,
        entries,
        files,
        metadata,
        around.carried,
        around.ignored,
        checksums,
        tuple(twins),
        training=tuple(state.training),
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """One key of the saved state, in all metadata files that have it."""

    item: Item
    file: str
    """The first of the files."""
    others: tuple[Item, ...] = ()
    """What the others say."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that was found whole."""

    entry: Entry
    twins: tuple[Twin, ...]


def _items(storage: Storage, files: Sequence[str], faults: Faults) -> list[_Held]:
    """Return what the metadata files say, by key."""
    found: dict[str, list[tuple[Item, str]]] = {}
    for rank, file in enumerate(files):
        if file not in (METADATA, f"__{rank}{METADATA}"):
            message = f"the metadata of rank {rank} is not there, and {file} is"
            faults.add("INCOMPLETE", message, f"__{rank}{METADATA}", hint="Copy the missing files.")
            break
        try:
            for item in read_metadata(storage, file, faults):
                found.setdefault(item.key, []).append((item, file))
        except TransaxleError as error:
            if error.exit_code != TransaxleError.exit_code:
                raise
            faults.extend(*error.refusals)
    held = []
    for (first, file), *others in found.values():
        for other, elsewhere in others:
            if first.dtype != other.dtype:
                one, two = (item.dtype.name if item.dtype else "no tensor" for item in (first, other))
                faults.add("DTYPE_MISMATCH", f"{file} says {one}, {elsewhere} {two}", elsewhere, first.key)
            elif first.shape != other.shape:
                message = f"{file} says {list(first.shape)}, {elsewhere} {list(other.shape)}"
                faults.add("SHAPE_MISMATCH", message, elsewhere, first.key)
        held.append(_Held(first, file, tuple(other for other, _ in others)))
    return held


def _sizes(storage: Storage, items: Sequence[_Held], member: str, faults: Faults) -> dict[str, int]:
    """Return the size of every data file; one that is not there, or must not be read, is a fault."""
    parts: Counter[str] = Counter()
    for held in items:
        for item in (held.item, *held.others):
            parts.update(place.file for place in (item.payload, *(chunk.payload for chunk in item.chunks)) if place)
    listing = storage.listing()
    there = {*listing.everything(), *listing.folders}
    sizes: dict[str, int] = {}
    for file, count in parts.items():
        try:
            if len(checked_parts(file)) == 1 and file not in there:
                message = f"the file is not there; {member} places {count} parts of tensors in it"
                faults.add("INCOMPLETE", message, file, hint="Copy the missing file.")
            else:
                sizes[file] = storage.size(file)
        except TransaxleError as error:
            faults.extend(*error.refusals)
        if faults.full:
            break
    return sizes


def _leaf(held: _Held, payloads: Payloads, faults: Faults) -> Leaf | None:
    """Read one item; None if something is wrong with it."""
    if faults.full:
        return None
    if held.item.dtype is not None:
        tensor = _tensor(held, held.item.dtype.code, payloads, faults)
        return Leaf(held.item.path, "tensor", tensor) if tensor else None
    first, *others = (payloads.leaf(item) for item in (held.item, *held.others))
    if first and any(other is None or _differ(first, other) for other in others):
        return Leaf(first.path, "other", None, _DIFFERS)
    if first and isinstance(first.value, QuantizedChunk):
        one = first.value
        twins = (twin for other in others if other for twin in copies(held.item.key, one, other.value, _WHY, faults))
        return replace(first, value=Whole(one.layout.kind, one.parts, tuple(twins), one.layout.left))
    return first


def _differ(one: Leaf, two: Leaf) -> bool:
    if one.kind != two.kind or one.what != two.what:
        return True
    return one.kind == "number" and _bytes(one.value) != _bytes(two.value)


def _tensor(held: _Held, code: str, payloads: Payloads, faults: Faults) -> _Tensor | Whole | None:
    """Find every chunk of a tensor; None if they are not all of it, once."""
    item = held.item
    if code not in ITEM_BITS:
        faults.add("UNSUPPORTED", f"its elements are {code}, which are not read", held.file, item.key)
        return None
    listed = [chunk for chunk in item.chunks if not _is_empty(item, chunk)]
    chunks = list(listed)
    copies: list[Chunk] = []
    if held.others:
        seen = {chunk[:2] for chunk in listed}
        for chunk in (chunk for other in held.others for chunk in other.chunks if not _is_empty(item, chunk)):
            (copies if chunk[:2] in seen else chunks).append(chunk)
            seen.add(chunk[:2])
    if not tiled(item.key, item.shape, [chunk[:2] for chunk in chunks], held.file, faults):
        return None
    lost = sum(chunk.payload is None for chunk in chunks)
    if lost:
        faults.add("INCOMPLETE", f"no file is said to hold {lost} of its {len(chunks)} chunks", held.file, item.key)
        return None
    places = {chunk[:2]: payloads.chunk(item, chunk) for chunk in chunks}
    pairs = [(places.get(copy[:2]), payloads.chunk(item, copy)) for copy in copies]
    found = [place for place in places.values() if isinstance(place, Extent)]
    quantized = [(chunk, place) for chunk in chunks if isinstance(place := places[chunk[:2]], QuantizedChunk)]
    twins = tuple(twin for pair in pairs for twin in _twins(held, code, *pair, faults))
    if len(found) + len(quantized) < len(chunks):
        return None
    if quantized and found:
        message = f"{len(quantized)} of its {len(chunks)} chunks are quantized, and the others are not"
        faults.add("DTYPE_MIXED", message, held.file, item.key)
        return None
    if quantized:
        one = whole(item.key, item.shape, quantized, held.file, faults)
        return replace(one, twins=one.twins + twins) if one else None
    found.sort(key=lambda extent: extent.start)
    return _Tensor(Entry(item.key, code, logical(item.shape, code), tuple(found)), twins)


def _is_empty(item: Item, chunk: Chunk) -> bool:
    """Tell whether a chunk holds nothing, and is where a chunk may be: ranks that have no rows save such."""
    return 0 in chunk.shape and not outside(item.shape, chunk[:2])


def _twins(
    held: _Held, code: str, one: Extent | QuantizedChunk | None, two: Extent | QuantizedChunk | None, faults: Faults
) -> Iterator[Twin]:
    """Yield two copies of one chunk, each as a tensor of its own; a quantized one as its buffers."""
    key = held.item.key
    if isinstance(one, Extent) and isinstance(two, Extent):
        first, second = (
            Entry(key, code, extent.shape, (replace(extent, start=(0,) * len(extent.start)),)) for extent in (one, two)
        )
        yield Twin(first, second, _WHY.format(one.file, two.file, key))
    elif isinstance(one, QuantizedChunk) and isinstance(two, QuantizedChunk):
        yield from copies(key, one, two, _WHY, faults)
    elif one is not None and two is not None:
        faults.add("DTYPE_MIXED", "a rank's chunk is quantized, and its copy on another rank is not", held.file, key)


def _number(name: str, value: Number | Scalar, inline: Inline) -> Entry:
    code, data = _bytes(value)
    return Entry(name, code, (), (inline.add(data),))


def _bytes(value: Number | Scalar) -> tuple[str, bytes]:
    """Return the code and the bytes of a number that has been found to have them."""
    found = (value.code, value.data) if isinstance(value, Scalar) else number(value)
    assert found is not None
    return found
