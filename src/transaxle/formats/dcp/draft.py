"""Drafting a DCP folder: every chunk gets its file and its place before a byte moves.

The result is what one rank of torch would save: `.metadata`, and data files `__0_0.distcp`, `__0_1.distcp`, …. Any
number of ranks can load it. A tensor is one chunk unless it exceeds the size of a file or an archive; then it is cut
into runs of whole rows, so that its bytes still follow one another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

from transaxle.errors import Faults
from transaxle.formats.builtin_formats import DCP
from transaxle.formats.catalog import Draft, Entry, Extent, Fragment, Spec, code_of, logical, nbytes
from transaxle.formats.dcp.metadata import METADATA, Payload, flat_path, path_of
from transaxle.formats.dcp.written_chunks import (
    DTYPES,
    ChunksByTensor,
    DataFiles,
    PlacedChunk,
    PlacedObjects,
    TorchTensor,
    as_torch_tensor,
    cut,
    metadata_of,
)
from transaxle.formats.pickled.writer import write_pickle
from transaxle.formats.torch_file.draft import saved, surround
from transaxle.formats.training_state.flatten import as_numbered, group_path
from transaxle.formats.training_state.state import PARAMS, KeyPath, ParamGroup, joined

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
    import numpy as np

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
