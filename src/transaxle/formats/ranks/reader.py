"""Opens a folder of rank files as one checkpoint of whole tensors, without copying a tensor.

Each rank's file contains a state dict. The files have names like `model_world_size_4_rank_0.pt` (verl and related
programs), or names that the user describes by a template (`model_rank{}.pt`). A tensor that is divided among ranks (a
DTensor or a ShardedTensor) is joined from its boxes on all ranks. The boxes must cover the tensor exactly once, apart
from replicas. If several ranks have the same box, their copies must be equal; so must the copies of a plain tensor,
which is whole on every rank. Each conversion compares the copies before it writes.

A folder is refused if a rank's file is missing, or if the files of two ranks contradict each other: they differ in a
tensor's shape, dtype, mesh or placement, in the training step, or in the set of tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.lib.stride_tricks import as_strided

from transaxle.axes.geometry import row_major
from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import (
    Checksum,
    Container,
    Entry,
    Extent,
    NumbersInMemory,
    Shape,
    Twin,
    numpy_dtype,
)
from transaxle.formats.dcp.chunk_tiling import check_tiling
from transaxle.formats.deepspeed.rank_files import RankShard, block_extents
from transaxle.formats.deepspeed.spread import ShardBlock
from transaxle.formats.flattened_state import Odd, flatten
from transaxle.formats.pickled.descriptors import Quantized, TensorRef
from transaxle.formats.ranks.names import ALL_FILES, GATHER, ONE_SAVE, names_like, rank_files
from transaxle.formats.ranks.rank_tensors import MAX_RANKS, WHOLE, RankTensor, RankTensorReader
from transaxle.formats.registry import FSDP_CONFIG, RANKS, sort_sidecars
from transaxle.formats.storage.storage import NotJsonError, Storage, parse_json
from transaxle.formats.torch_file.reader import number_entry, read_setting
from transaxle.formats.torch_file.saved import ViewFault, place, read_saved
from transaxle.formats.training_state import (
    GROUPS,
    LEFT_BEHIND,
    OPTIMIZER,
    TRAINING,
    State,
    TrainingItem,
    arrange,
    tops,
)

_DIFFERENT = "different from rank to rank"
_SHOWN = 6
_NUMBERED, _STEP = f"{OPTIMIZER}#", "/step"
_NAMED_STATE = (
    "Save the optimizer with FSDP.optim_state_dict or torch.distributed.checkpoint.state_dict.get_state_dict, which "
    "name its parameters. To do without its state: --no-optimizer (optimizer=False)."
)
_INTEGERS = ("I32", "I64")
_LONGEST_CONFIG = 1 << 20
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
    """Parameter groups and training state of the file; its leaves are left out, since `tensors` has them."""
    checksums: tuple[Checksum, ...]


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
    if storage.single and len(files) > 1:
        message = f"this is the file of one of {len(files)} ranks, which has a part of the tensors"
        raise refuse("INCOMPLETE", message, file=member, hint=ALL_FILES)
    _check_fsdp_config(storage, len(files))
    inline = NumbersInMemory(storage)
    faults = Faults()
    contents = []
    rank_sets: dict[tuple[int, ...], frozenset[int]] = {}
    for rank, file in files.items():
        reader = RankTensorReader(file, rank, len(files), partial(_ranks, inline, file), rank_sets)
        try:
            contents.append(_read_file(inline, reader))
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
        tuple(checksum for file in contents for checksum in file.checksums),
        tuple(merged.twins),
        training=tuple(merged.training),
        paths=contents[0].state.paths,
        whole=merged.whole,
        in_order=contents[0].state.is_numbered,
        spreads={name: tensor.spread for file in reversed(contents) for name, tensor in file.tensors.items()},
    )


def _check_fsdp_config(storage: Storage, count: int) -> None:
    """Refuse rank files if their number differs from that in verl's fsdp_config.json, if this file is beside them."""
    if FSDP_CONFIG not in storage.listing().names:
        return
    try:
        settings = parse_json(storage.read(FSDP_CONFIG, 0, min(storage.size(FSDP_CONFIG), _LONGEST_CONFIG)))
    except NotJsonError as error:
        raise refuse("CORRUPT", f"it is not JSON: {error}", file=FSDP_CONFIG) from None
    world = settings.get("world_size") if isinstance(settings, dict) else None
    if type(world) is int and world != count:
        message = f"the job had {world} ranks, and there are files of {count}"
        raise refuse("CORRUPT", message, file=FSDP_CONFIG, hint=ONE_SAVE)


def _read_file(inline: NumbersInMemory, reader: RankTensorReader) -> _RankFile:
    """Read the description of one rank's tensors."""
    file = reader.file
    saved = read_saved(inline, file)
    leaves = flatten(saved.value, file)
    if not leaves and not isinstance(saved.value, dict | list | tuple):
        raise refuse("UNSUPPORTED", "the file holds neither tensors nor training state", file=file)
    state = arrange(leaves, file=file, read=partial(read_setting, inline, file))
    tensors: dict[str, RankTensor] = {}
    faults = Faults()
    for name, leaf in state.leaves.items():
        try:
            if leaf.kind == "number":
                entry = number_entry(name, leaf.value, inline)
                tensors[name] = RankTensor(entry, (), (ShardBlock((), (), ()),), is_whole=True, spread=WHOLE)
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
    return _RankFile(reader.rank, file, tensors, replace(state, leaves={}), saved.checksums)


def _ranks(inline: NumbersInMemory, file: str, value: object) -> Sequence[int]:
    """Read the ranks of a device mesh from a pickled tensor, which may be a strided view."""
    if not isinstance(value, TensorRef):
        raise ViewFault("CORRUPT", "its device mesh has no ranks")
    entry, repeated = place("", value, file)
    if entry.dtype not in _INTEGERS or repeated or prod(entry.shape) > MAX_RANKS:
        raise ViewFault("CORRUPT", f"the ranks of its device mesh are a tensor of {entry.dtype} {list(entry.shape)}")
    if 0 in entry.shape:
        return ()
    (extent,) = entry.extents
    strides = extent.strides or row_major(entry.shape)
    span = 1 + sum((size - 1) * stride for size, stride in zip(entry.shape, strides, strict=True))
    dtype = numpy_dtype(entry.dtype)
    if span * dtype.itemsize > _LONGEST_MESH:
        raise ViewFault("CORRUPT", f"the ranks of its device mesh are spread over {span} elements of a storage")
    numbers = np.frombuffer(inline.read(extent.file, extent.offset, span * dtype.itemsize), dtype)
    ranks = as_strided(numbers, entry.shape, [stride * dtype.itemsize for stride in strides])
    return tuple(ranks.ravel().tolist())


@dataclass(slots=True)
class _Merged:
    """The whole tensors and the training state of all ranks."""

    entries: dict[str, Entry]
    twins: list[Twin]
    metadata: dict[str, Any]
    training: list[TrainingItem]
    whole: frozenset[str] | None = None
    """Names of the tensors that every rank has whole; None if no tensor is cut."""


def _merge(inline: NumbersInMemory, files: Sequence[_RankFile]) -> _Merged:
    """Join the tensors of all ranks; refuse ranks whose files contradict each other."""
    faults = Faults()
    parts_by_name: dict[str, list[tuple[_RankFile, RankTensor]]] = defaultdict(list)
    for file in files:
        for name, tensor in file.tensors.items():
            parts_by_name[name].append((file, tensor))
    neighbours = _neighbours(files)
    _refuse_flat_state(files, faults)
    if faults:
        raise faults.error()
    training, left_behind, dropped = _training(inline, files, faults)
    merged = _Merged({}, [], {}, training)
    dating = next((name for name in parts_by_name if name.startswith(OPTIMIZER) and name.endswith(_STEP)), None)
    for name, parts in parts_by_name.items():
        if name in dropped:
            continue
        joined = _join(name, parts, files, neighbours, faults, dates=name == dating)
        if joined is not None:
            merged.entries[name] = joined[0]
            merged.twins += joined[1]
        if faults.full:
            break
    groups = _groups(files, faults)
    if faults:
        raise faults.error()
    whole = [name for name in merged.entries if parts_by_name[name][0][1].is_whole]
    merged.whole = frozenset(whole) if len(whole) < len(merged.entries) else None
    state = files[0].state
    left_behind = {**state.left_behind, **left_behind}
    merged.metadata = {
        key: value for key, value in state.metadata().items() if key not in (GROUPS, LEFT_BEHIND, TRAINING)
    }
    merged.metadata |= ({GROUPS: groups} if groups else {}) | ({LEFT_BEHIND: left_behind} if left_behind else {})
    merged.metadata |= {TRAINING: tops(training)} if training else {}
    return merged


def _refuse_flat_state(files: Sequence[_RankFile], faults: Faults) -> None:
    """Refuse the state of FSDP1's optimizer, which consists of each rank's part of flat parameters, numbered and as
    plain tensors.
    """
    numbered = [(name, tensor) for file in files for name, tensor in file.tensors.items() if name.startswith(_NUMBERED)]
    shapes: dict[str, list[Shape]] = defaultdict(list)
    for name, tensor in numbered:
        if tensor.shape:
            shapes[name].append(tensor.shape)
    if len(files) == 1 or not shapes or not all(tensor.is_whole for _, tensor in numbered):
        return
    uneven = [name for name, of_ranks in shapes.items() if len(of_ranks) < len(files) or len(set(of_ranks)) > 1]
    all_flat = all(len(shape) == 1 for of_ranks in shapes.values() for shape in of_ranks)
    if uneven or all_flat:
        message = (
            "each rank has another part of it, and the files do not say which: FSDP1's optimizer numbers flat "
            "parameters, which have no names"
        )
        faults.add("UNSUPPORTED", message, files[0].file, next(iter(uneven or shapes)), _NAMED_STATE)


def _neighbours(files: Sequence[_RankFile]) -> dict[int, frozenset[int]]:
    """Return, for each rank, the ranks that must have the same plain tensors: all ranks in the meshes of the rank's
    DTensors.

    Without pipeline stages, all ranks of a job hold the same plain tensors. With pipeline stages, each stage has
    separate meshes and separate plain tensors. Meshes with the same ranks usually share one set of ranks.
    """
    everyone = frozenset(file.rank for file in files)
    unions: dict[frozenset[int], frozenset[int]] = {frozenset(): everyone}
    neighbours = {}
    for file in files:
        meshes = {id(ranks): ranks for tensor in file.tensors.values() if (ranks := tensor.mesh_ranks) is not None}
        key = frozenset(meshes)
        if key not in unions:
            unions[key] = frozenset().union(*meshes.values())
        neighbours[file.rank] = unions[key]
    return neighbours


def _ranks_without(
    parts: Sequence[tuple[_RankFile, RankTensor]], neighbours: Mapping[int, frozenset[int]]
) -> tuple[_RankFile, list[int]] | None:
    """Return a file that contains a tensor, and the ranks that must have the tensor too but lack it; None if no rank
    lacks it.
    """
    holders = {file.rank for file, _ in parts}
    checked: set[int] = set()
    for file, tensor in parts:
        must_have = neighbours[file.rank] if tensor.is_whole else tensor.mesh_ranks
        if must_have is None or id(must_have) in checked:
            continue
        checked.add(id(must_have))
        if missing := must_have - holders:
            return file, sorted(missing)
    return None


def _join(
    name: str,
    parts: Sequence[tuple[_RankFile, RankTensor]],
    files: Sequence[_RankFile],
    neighbours: Mapping[int, frozenset[int]],
    faults: Faults,
    *,
    dates: bool,
) -> tuple[Entry, list[Twin]] | None:
    """Join the ranks' parts of one tensor; add a fault and return None if they contradict each other."""
    first_file, first = parts[0]
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
    if (without := _ranks_without(parts, neighbours)) is not None:
        file, missing = without
        ranks = ", ".join(map(str, missing[:_SHOWN]))
        rank_file = {of_rank.rank: of_rank.file for of_rank in files}.get(missing[0])
        if rank_file is None:
            message = f"rank {file.rank} shares it with rank {ranks}, but there are {len(files)} files"
        else:
            message = f"rank {file.rank} shares it with rank {ranks}, where it is missing"
        faults.add("INCOMPLETE", message, rank_file or file.file, name, GATHER)
        return None
    return _join_boxes(name, parts, faults, dates=dates)


def _join_boxes(
    name: str, parts: Sequence[tuple[_RankFile, RankTensor]], faults: Faults, *, dates: bool
) -> tuple[Entry, list[Twin]] | None:
    file, first = parts[0]
    owners: dict[tuple[Shape, Shape], tuple[_RankFile, RankShard, ShardBlock]] = {}
    boxes: dict[tuple[Shape, Shape], Entry] = {}
    """Box that several ranks have -> the part of the rank that is read; all its twins share it."""
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
            if box not in boxes:
                boxes[box] = _box_entry(name, owner, owner_block)
            why = f"ranks {owner_file.rank} and {file.rank} have the same {'tensor' if tensor.is_whole else 'part'}"
            twins.append(Twin(boxes[box], _box_entry(name, shard, block), why, dates=dates))
    if not first.is_whole and not check_tiling(name, first.shape, list(owners), file.file, faults):
        return None
    return Entry(name, first.entry.dtype, first.shape, tuple(extents)), twins


def _box_entry(name: str, shard: RankShard, block: ShardBlock) -> Entry:
    """Return a separate tensor that consists of one box of a rank's part."""
    return Entry(name, shard.dtype, block.shape, tuple(block_extents(shard, block, (0,) * len(block.shape))))


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
