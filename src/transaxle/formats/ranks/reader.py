"""Opens a folder of rank files as one checkpoint of whole tensors, without copying a tensor.

Each rank's file contains a state dict. The files have names like `model_world_size_4_rank_0.pt` (verl and related
programs), or names that the user describes by a template (`model_rank{}.pt`). A tensor that is divided among ranks (a
DTensor or a ShardedTensor) is joined from its boxes on all ranks. The boxes must cover the tensor exactly once, apart
from replicas. If several ranks have the same box, or a plain tensor, which every rank has whole, the copies must be
equal. Each conversion compares the copies before it writes.

A folder is refused if a rank's file is missing, or if the files of two ranks contradict each other: they differ in a
tensor's shape, dtype, mesh or placement, in the training step, or in the set of tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import Container, Entry, Extent, NumbersInMemory, Shape, Twin, number, numpy_dtype
from transaxle.formats.dcp.chunk_tiling import check_tiling
from transaxle.formats.deepspeed.rank_files import RankShard, block_extents
from transaxle.formats.deepspeed.spread import ShardBlock
from transaxle.formats.flattened_state import Odd, flatten
from transaxle.formats.pickled.descriptors import NOTHING, Object, Quantized, Scalar, TensorRef
from transaxle.formats.ranks.names import GATHER, ONE_SAVE, names_like, rank_files
from transaxle.formats.ranks.rank_tensors import RankTensor, RankTensorReader
from transaxle.formats.registry import RANKS, sort_sidecars
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import Saved, ViewFault, place, read_saved
from transaxle.formats.training_state import GROUPS, LEFT_BEHIND, TRAINING, State, TrainingItem, arrange, single, tops

_DIFFERENT = "different from rank to rank"
_SHOWN = 6
_INTEGERS = ("I32", "I64")
_LONGEST_MESH = 8 << 20
"""Largest size in bytes of a device mesh."""
_LARGE = 1 << 20
"""Size in bytes from which a tensor of the training state is not compared, but counted as different on each rank."""
_COMMON = frozenset({
    "lr_scheduler", "lr_schedulers", "lr_scheduler_state_dict", "scheduler", "scheduler_state_dict", "epoch", "step",
    "global_step", "iteration", "iter_num", "train_state", "trainer_state",
})  # fmt: skip
"""Names of training state that is equal on all ranks of one step. If the values differ, the files come from two steps.
"""


@dataclass(frozen=True, slots=True)
class _RankFile:
    """The contents of one rank's file."""

    rank: int
    file: str
    tensors: Mapping[str, RankTensor]
    """Tensors and numbers by name, in the order in which they were saved."""
    state: State
    saved: Saved


def open_ranks(storage: Storage, path: str, member: str, ranks: str | None = None) -> Container:
    """Open the files of all ranks that belong to the same save as a given file.

    Args:
        storage: storage that reads the folder's files.
        path: path of the folder as the user typed it.
        member: name of one rank's file, such as `model_world_size_2_rank_0.pt`.
        ranks: the user's template for the names of the files; None means names like `model_world_size_2_rank_0.pt`.

    Raises:
        Refused: with all problems of all files, and one of the codes UNSAFE_PICKLE, CORRUPT, INCOMPLETE,
            SHAPE_MISMATCH, DTYPE_MIXED or UNSUPPORTED.
        StorageError: with the code IO if a file cannot be read.
    """
    template = names_like(member, ranks)
    files = rank_files(storage.listing().names, template)
    inline = NumbersInMemory(storage)
    faults = Faults()
    contents = []
    for rank, file in files.items():
        try:
            contents.append(_read_file(inline, file, rank))
        except TransaxleError as error:
            faults.extend(*error.refusals)
        if faults.full:
            break
    if faults:
        raise faults.error()
    merged = _merge(inline, contents)
    sizes = {file: storage.size(file) for file in files.values()}
    sidecars = sort_sidecars(storage, sizes, of_run=True)
    return Container(
        RANKS.name,
        path,
        inline,
        merged.entries,
        sizes,
        merged.metadata,
        sidecars.carried,
        sidecars.ignored,
        tuple(checksum for each in contents for checksum in each.saved.checksums),
        tuple(merged.twins),
        training=tuple(merged.training),
        paths=contents[0].state.paths,
    )


def _read_file(inline: NumbersInMemory, file: str, rank: int) -> _RankFile:
    """Read the description of one rank's tensors."""
    saved = read_saved(inline, file)
    leaves = flatten(saved.value, file)
    if not leaves and not isinstance(saved.value, dict | list | tuple):
        raise refuse("UNSUPPORTED", "the file holds neither tensors nor training state", file=file)
    state = arrange(leaves, file=file, read=partial(_setting, inline, file))
    reader = RankTensorReader(file, rank, partial(_ranks, inline, file))
    tensors: dict[str, RankTensor] = {}
    faults = Faults()
    for name, leaf in state.leaves.items():
        try:
            if leaf.kind == "number":
                tensors[name] = _whole_number(name, leaf.value, inline)
            elif any(isinstance(key, Odd) for key in leaf.path):
                raise ViewFault("UNSUPPORTED", f"its key is not text: {list(leaf.path)}")
            elif isinstance(leaf.value, Quantized):
                raise ViewFault("UNSUPPORTED", f"it is a {leaf.value.kind}, which is not read from rank files")
            else:
                tensors[name] = reader.read(name, leaf.value)
        except ViewFault as fault:
            faults.add(fault.code, fault.message, file, name, fault.hint)
        if faults.full:
            break
    if faults:
        raise faults.error()
    return _RankFile(rank, file, tensors, state, saved)


def _whole_number(name: str, value: Any, inline: NumbersInMemory) -> RankTensor:
    code_and_bytes = (value.code, value.data) if isinstance(value, Scalar) else number(value)
    assert code_and_bytes is not None
    code, data = code_and_bytes
    return RankTensor(Entry(name, code, (), (inline.add(data),)), (), (ShardBlock((), (), ()),), is_whole=True)


def _setting(inline: NumbersInMemory, file: str, value: TensorRef | Object) -> object:
    """Read a tensor without dims as a plain number; see `training_state.arrange`."""
    try:
        entry, _ = place("", value, file)
    except ViewFault:
        return NOTHING
    return single(inline, entry)


def _ranks(inline: NumbersInMemory, file: str, value: object) -> Sequence[int]:
    """Read the ranks of a device mesh from a pickled tensor."""
    if not isinstance(value, TensorRef):
        raise ViewFault("CORRUPT", "its device mesh has no ranks")
    entry, _ = place("", value, file)
    if entry.dtype not in _INTEGERS or entry.nbytes > _LONGEST_MESH or any(each.strides for each in entry.extents):
        raise ViewFault("CORRUPT", f"the ranks of its device mesh are a tensor of {entry.dtype} {list(entry.shape)}")
    data = b"".join(inline.read(each.file, each.offset, entry.nbytes) for each in entry.extents)
    ranks: list[int] = np.frombuffer(data, numpy_dtype(entry.dtype)).tolist()
    return ranks


@dataclass(slots=True)
class _Merged:
    """The whole tensors and the training state of all ranks."""

    entries: dict[str, Entry]
    twins: list[Twin]
    metadata: dict[str, Any]
    training: list[TrainingItem]


def _merge(inline: NumbersInMemory, files: Sequence[_RankFile]) -> _Merged:
    """Join the tensors of all ranks; refuse ranks whose files contradict each other."""
    faults = Faults()
    parts_by_name: dict[str, list[tuple[_RankFile, RankTensor]]] = defaultdict(list)
    for file in files:
        for name, tensor in file.tensors.items():
            parts_by_name[name].append((file, tensor))
    neighbours = _neighbours(files)
    training, left_behind, dropped = _training(inline, files, faults)
    merged = _Merged({}, [], {}, training)
    for name, parts in parts_by_name.items():
        if name in dropped:
            continue
        joined = _join(name, parts, files, neighbours, faults)
        if joined is not None:
            merged.entries[name] = joined[0]
            merged.twins += joined[1]
        if faults.full:
            break
    groups = _groups(files, faults)
    if faults:
        raise faults.error()
    state = files[0].state
    left_behind = {**state.left_behind, **left_behind}
    merged.metadata = {
        key: value for key, value in state.metadata().items() if key not in (GROUPS, LEFT_BEHIND, TRAINING)
    }
    merged.metadata |= ({GROUPS: groups} if groups else {}) | ({LEFT_BEHIND: left_behind} if left_behind else {})
    merged.metadata |= {TRAINING: tops(training)} if training else {}
    return merged


def _neighbours(files: Sequence[_RankFile]) -> dict[int, frozenset[int]]:
    """Return, for each rank, the ranks that must have the same plain tensors: all ranks in the meshes of the rank's
    DTensors.

    Without pipeline stages, all ranks of a job hold the same plain tensors. With pipeline stages, each stage has
    separate meshes and separate plain tensors.
    """
    everyone = frozenset(file.rank for file in files)
    neighbours = {}
    for file in files:
        meshes = {tensor.mesh.ranks for tensor in file.tensors.values() if tensor.mesh is not None}
        neighbours[file.rank] = frozenset().union(*meshes) if meshes else everyone
    return neighbours


def _join(
    name: str,
    parts: Sequence[tuple[_RankFile, RankTensor]],
    files: Sequence[_RankFile],
    neighbours: Mapping[int, frozenset[int]],
    faults: Faults,
) -> tuple[Entry, list[Twin]] | None:
    """Join the ranks' parts of one tensor; add a fault and return None if they contradict each other."""
    first_file, first = parts[0]
    holders = {file.rank for file, _ in parts}
    for file, tensor in parts:
        if tensor.is_whole != first.is_whole:
            kinds = {first.is_whole: first_file.file, tensor.is_whole: file.file}
            faults.add(
                "CORRUPT", f"it is whole in {kinds[True]}, and cut over ranks in {kinds[False]}", file.file, name
            )
            return None
        if tensor.shape != first.shape:
            message = f"its shape is {list(tensor.shape)}, but {list(first.shape)} in {first_file.file}"
            faults.add("SHAPE_MISMATCH", message, file.file, name, ONE_SAVE)
            return None
        if tensor.entry.dtype != first.entry.dtype:
            message = f"it is {tensor.entry.dtype}, but {first.entry.dtype} in {first_file.file}"
            faults.add("DTYPE_MIXED", message, file.file, name, ONE_SAVE)
            return None
        must_have = neighbours[file.rank] if tensor.mesh is None else frozenset(tensor.mesh.ranks)
        lacking = sorted(must_have - holders) if tensor.mesh is not None or tensor.is_whole else []
        if lacking:
            message = f"rank {file.rank} shares it with rank {', '.join(map(str, lacking[:_SHOWN]))}"
            rank_file = next((file.file for file in files if file.rank == lacking[0]), None)
            if rank_file is None:
                message += f", but there are {len(files)} files"
            faults.add("INCOMPLETE", f"{message}, where it is missing", rank_file or file.file, name, GATHER)
            return None
    return _join_boxes(name, parts, faults)


def _join_boxes(
    name: str, parts: Sequence[tuple[_RankFile, RankTensor]], faults: Faults
) -> tuple[Entry, list[Twin]] | None:
    file, first = parts[0]
    owners: dict[tuple[Shape, Shape], tuple[_RankFile, RankShard, ShardBlock]] = {}
    twins: list[Twin] = []
    extents: list[Extent] = []
    for file, tensor in parts:
        shard = RankShard(tensor.entry.dtype, tensor.entry.shape, tensor.entry.extents, file.file)
        for block in tensor.blocks:
            box = block.start, block.shape
            if box not in owners:
                owners[box] = file, shard, block
                extents += block_extents(shard, block, block.start)
                continue
            owner_file, owner, owner_block = owners[box]
            origin = (0,) * len(block.shape)
            twins.append(
                Twin(
                    Entry(name, shard.dtype, block.shape, tuple(block_extents(owner, owner_block, origin))),
                    Entry(name, shard.dtype, block.shape, tuple(block_extents(shard, block, origin))),
                    f"ranks {owner_file.rank} and {file.rank} have the same {'tensor' if tensor.is_whole else 'part'}",
                    replica=True,
                )
            )
    if not first.is_whole and not check_tiling(name, first.shape, list(owners), file.file, faults):
        return None
    return Entry(name, first.entry.dtype, first.shape, tuple(extents)), twins


def _groups(files: Sequence[_RankFile], faults: Faults) -> list[Any]:
    """Return the optimizer's parameter groups, which must be equal on all ranks."""
    groups = list(files[0].state.groups)
    for file in files[1:]:
        if repr(list(file.state.groups)) != repr(groups):
            message = (
                f"the optimizer's parameter groups differ from those of {files[0].file}: of two steps, or two runs"
            )
            faults.add("CORRUPT", message, file.file, hint=ONE_SAVE)
    return groups


class _CommonState(NamedTuple):
    """The training state of a job, as far as it is equal on all ranks."""

    items: list[TrainingItem]
    left_behind: dict[str, str]
    """Top-level name -> reason, for state whose value depends on the rank."""
    dropped: set[str]
    """Names of the tensors in the training state whose value depends on the rank."""


def _training(inline: NumbersInMemory, files: Sequence[_RankFile], faults: Faults) -> _CommonState:
    """Return the training state that is equal on all ranks, and describe the state that depends on the rank."""
    items_of_ranks = [{item.path: item for item in file.state.training} for file in files]
    common: list[TrainingItem] = []
    left_behind: dict[str, str] = {}
    dropped: set[str] = set()
    differing_tops: set[str | int] = set()
    values: dict[tuple[str | int, ...], list[object]] = {}
    for path in dict.fromkeys(path for items in items_of_ranks for path in items):
        values[path] = [
            _value(inline, items.get(path), file) for items, file in zip(items_of_ranks, files, strict=True)
        ]
        texts = [repr(value) for value in values[path]]
        odd = next((number for number, text in enumerate(texts) if text != texts[0]), None)
        if odd is None:
            continue
        differing_tops.add(path[0])
        if str(path[0]) in _COMMON:
            message = f"{'.'.join(map(str, path))} is {texts[odd][:80]}, but {texts[0][:80]} in {files[0].file}"
            faults.add("CORRUPT", f"{message}: of two steps", files[odd].file, hint=ONE_SAVE)
    for items in items_of_ranks:
        for path, item in items.items():
            if path[0] in differing_tops:
                left_behind[str(path[0])] = _DIFFERENT
                dropped |= {item.name} if item.name is not None else set()
            elif items is items_of_ranks[0]:
                common.append(item)
    return _CommonState(common, left_behind, dropped)


def _value(inline: NumbersInMemory, item: TrainingItem | None, file: _RankFile) -> object:
    """Return the value of a training item for a comparison between ranks; a large tensor is not read, and counts as
    different on each rank.
    """
    if item is None or not item.is_tensor:
        return None if item is None else item.value
    entry = file.tensors[str(item.name)].entry
    if entry.nbytes > _LARGE:
        return file.rank
    return [inline.read(part.file, part.offset, entry.nbytes) for part in entry.extents if part.strides is None]
