"""Reads the optimizer state of each rank, and joins the tensors of all ranks.

A rank's model file lists optimizer state by parameter number; a distributed optimizer has flat buffers in a separate
file. The shards on tensor-parallel ranks are joined into whole tensors; copies of a shard on several ranks must be
equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import Checksum, Entry, Extent, NumbersInMemory, Shape, Twin, numpy_dtype
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.rank_files import (
    FlatBuffer,
    FlatInterval,
    RankShard,
    TensorReader,
    extents,
    merge_shards,
)
from transaxle.formats.deepspeed.spread import Spread, TableCuts, by_widths, whole
from transaxle.formats.megatron.legacy.global_names import (
    LOW,
    OrderUnknown,
    Parameter,
    bucket_size,
    buffers,
    by_groups,
    has_expert_groups,
    is_expert,
    is_vocabulary,
    lay_flat,
)
from transaxle.formats.megatron.legacy.rank_grid import OPTIMIZER_KEY, STEPS, Mesh, MeshPlace, RankFile
from transaxle.formats.megatron.run_arguments import NAMES
from transaxle.formats.pickled.descriptors import NOTHING, DType, Key, TensorRef
from transaxle.formats.torch_file.saved import read_saved
from transaxle.formats.training_state import MASTER, PARAMS, ParamGroup, plain

_GROUPS, _STATE, _STEP = "param_groups", "state", "step"
_INNER = ("optimizer", "optimizer_state_dict")
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
_COALESCED, _UNPADDED, _PARAM = "buckets_coalesced", "numel_unpadded", "param"
_SAMPLES, _SAMPLED = 24, 16
"""How many parameters of a rank are compared with their full-precision copies, and how many elements of each parameter
are compared."""
_CLOSE = 2.0**-6
"""Maximum relative difference between a weight and its full-precision copy; the error of rounding is smaller."""


@dataclass(slots=True)
class ParameterState:
    """The optimizer state of one parameter on one rank."""

    states: dict[str, RankShard] = field(default_factory=dict)
    """Name of the optimizer state -> tensor, in the shape that the parameter has on this rank."""
    numbers: dict[str, Entry] = field(default_factory=dict)
    """Name of the optimizer state -> number, such as the step."""


@dataclass(slots=True)
class RankOptimizer:
    """The optimizer state and settings of one rank."""

    states: dict[tuple[int, str], ParameterState] = field(default_factory=dict)
    """(virtual pipeline stage, name of the parameter in the whole model) -> optimizer state."""
    groups: list[tuple[ParamGroup, list[str]]] = field(default_factory=list)
    """Settings of each parameter group, with the whole-model names of the group's parameters on this rank."""
    flat: frozenset[str] = frozenset()
    """Whole-model names of the parameters whose optimizer state must be in a flat buffer of at least one rank."""
    checksums: tuple[Checksum, ...] = ()


@dataclass(frozen=True, slots=True)
class _ChainedOptimizer:
    """One of a run's chained optimizers: the optimizer of dense parameters, or that of experts."""

    node: CheckedValue
    groups: list[CheckedValue]
    parameters: list[list[Parameter]]
    """Parameters of each optimizer group."""
    all: list[Parameter]
    """All parameters of this optimizer, in the order of the module."""


def read_optimizer(
    inline: NumbersInMemory, rank: RankFile, stage: int, parameters: Sequence[Parameter], flat_file: str | None
) -> RankOptimizer:
    """Read the optimizer state of a rank.

    Args:
        inline: storage that reads the checkpoint's files.
        rank: contents of the rank's model file.
        stage: number of the rank's pipeline stage.
        parameters: all trained parameters of the rank, in the order of the module.
        flat_file: name of the file of the distributed optimizer; None if the rank has no such file.

    Raises:
        OrderUnknown: if the files do not show which optimizer state belongs to which parameter.
        Refused: with one of the codes UNSAFE_PICKLE, CORRUPT or UNSUPPORTED if a file cannot be read as Megatron's.
        StorageError: with the code IO if a file cannot be read.
    """
    optimizer = RankOptimizer()
    top = rank.root.get(OPTIMIZER_KEY)
    if top is None:
        return optimizer
    parts = list(_parts(top, parameters, rank.run.args))
    for part in parts:
        for group, members in zip(part.groups, part.parameters, strict=True):
            optimizer.groups.append((_settings(group), [member.name for member in members]))
    if any(group.get(PARAMS) is not None for part in parts for group in part.groups):
        step_node = rank.root.get(STEPS)
        steps = [{}] * len(parts) if step_node is None else [dict(node.items()) for node in step_node.list()]
        for part, part_steps in zip(parts, steps, strict=True):
            _read_numbered(TensorReader(inline, rank.file), part, part_steps, optimizer)
    else:
        optimizer.flat = frozenset(parameter.name for part in parts for parameter in part.all)
        if flat_file is not None:
            _read_flat(inline, flat_file, rank.run.args, stage, parts, optimizer)
    return optimizer


def _parts(top: CheckedValue, parameters: Sequence[Parameter], args: Mapping[str, Any]) -> Iterator[_ChainedOptimizer]:
    """Yield the chained optimizers of a run: either a single optimizer, or one for dense parameters and one for
    experts.
    """
    nodes = top.list() if top.is_list else [top]
    groups = [_inner(node)[_GROUPS].list() for node in nodes]
    experts = [has_expert_groups(each) for each in groups]
    apart = any(experts)
    if len(nodes) != 1 + apart:
        raise OrderUnknown(f"it has {len(nodes)} parts, of which {sum(experts)} are for experts")
    for node, of_node, is_experts in zip(nodes, groups, experts, strict=True):
        part_parameters = [parameter for parameter in parameters if not apart or parameter.expert is is_experts]
        members = part_parameters if apart else [_as_dense(parameter) for parameter in part_parameters]
        yield _ChainedOptimizer(node, of_node, by_groups(members, of_node, args), members)


def _as_dense(parameter: Parameter) -> Parameter:
    """Return a parameter with `expert` set to False, for a run with a single optimizer."""
    return Parameter(
        parameter.chunk, parameter.name, parameter.dtype, parameter.shape, expert=False, shared=parameter.shared
    )


def _inner(node: CheckedValue) -> CheckedValue:
    """Return the state dict of the torch optimizer inside Megatron's wrapper."""
    for key in _INNER:
        inner = node.get(key)
        if inner is not None:
            return inner
    return node


def _settings(group: CheckedValue, besides: Collection[str] = (PARAMS, _STEP)) -> dict[str, Any]:
    """Return those settings of a parameter group that are plain data, without the keys in `besides`."""
    settings = {key: plain(node.value) for key, node in group.string_items() if key not in besides}
    return {key: value for key, value in settings.items() if value is not NOTHING}


def optimizer_settings(top: CheckedValue | None) -> dict[str, Any]:
    """Return a dict with the settings of all groups, under the key of the run's optimizer; empty if there is no
    optimizer.
    """
    if top is None:
        return {}
    nodes = top.list() if top.is_list else [top]
    parts = [
        {OPTIMIZER_KEY: {_GROUPS: [_settings(group, (PARAMS,)) for group in _inner(node)[_GROUPS].list()]}}
        for node in nodes
    ]
    return {OPTIMIZER_KEY: dict(enumerate(parts)) if len(parts) > 1 else parts[0]}


def _read_numbered(
    reader: TensorReader, part: _ChainedOptimizer, steps: Mapping[Any, CheckedValue], optimizer: RankOptimizer
) -> None:
    """Add the optimizer states that a rank's model file lists by parameter number, and the steps that Transaxle wrote
    into the file.

    Args:
        reader: reads the tensors of the rank's model file.
        part: the chained optimizer that is read.
        steps: parameter number -> step; empty in files that Megatron wrote.
        optimizer: record to which the optimizer states are added.
    """
    inner = _inner(part.node)
    states = inner[_STATE]
    masters = next((node for key in _MASTERS if (node := part.node.get(key)) is not None), None)
    lists = None if masters is None else masters.list()
    if lists is not None and len(lists) != len(part.groups):
        raise OrderUnknown(f"it has full-precision copies of {len(lists)} groups, and settings of {len(part.groups)}")
    for number, (group, members) in enumerate(zip(part.groups, part.parameters, strict=True)):
        numbers = group[PARAMS].naturals()
        if len(numbers) != len(members):
            message = f"its group {number} has {len(numbers)} parameters; by their shapes, {len(members)} are in it"
            raise OrderUnknown(message)
        low = [member for member in members if member.dtype in LOW]
        copies = [] if lists is None else lists[number].list()
        if lists is not None and len(copies) != len(low):
            message = f"its group {number} has {len(copies)} full-precision copies of {len(low)} parameters"
            raise OrderUnknown(message)
        for member, copy in zip(low, copies, strict=False):
            _add_state(reader, optimizer, member, MASTER, copy)
        for member, index in zip(members, numbers, strict=True):
            state = states.get(index)
            tensors_by_state = {} if state is None else dict(state.string_items())
            step = tensors_by_state.pop(_STEP, None) or steps.get(index) or group.get(_STEP)
            for name, node in tensors_by_state.items():
                _add_state(reader, optimizer, member, name, node)
            if step is not None and tensors_by_state:
                _add_number(reader, optimizer, member, step)


def _add_state(
    reader: TensorReader, optimizer: RankOptimizer, member: Parameter, state: str, node: CheckedValue
) -> None:
    """Add one optimizer state of a parameter; the state must have the parameter's shape."""
    if not isinstance(node.value, TensorRef):
        raise OrderUnknown(f"its {state} of {member.name} is no tensor")
    entry = reader.tensor(f"{member.name}/{state}", node)
    if entry.shape != member.shape:
        message = f"its {state} of {member.name} has the shape {list(entry.shape)}, the parameter {list(member.shape)}"
        raise OrderUnknown(message)
    parameter_state = optimizer.states.setdefault((member.chunk, member.name), ParameterState())
    parameter_state.states[state] = RankShard(entry.dtype, entry.shape, entry.extents, node.file)


def _add_number(reader: TensorReader, optimizer: RankOptimizer, member: Parameter, node: CheckedValue) -> None:
    entry = reader.number(f"{member.name}/{_STEP}", node)
    if entry is None:
        raise node.fault("expected a number")
    optimizer.states.setdefault((member.chunk, member.name), ParameterState()).numbers[_STEP] = entry


def _read_flat(
    inline: NumbersInMemory,
    file: str,
    args: Mapping[str, Any],
    stage: int,
    parts: Sequence[_ChainedOptimizer],
    optimizer: RankOptimizer,
) -> None:
    """Add the optimizer states that are in the flat buffers of the distributed optimizer."""
    saved = read_saved(inline, file, allowed=NAMES)
    optimizer.checksums = saved.checksums
    top = CheckedValue(saved.value, file)
    nodes = top.list() if top.is_list else [top]
    if len(nodes) != len(parts):
        raise OrderUnknown(f"{file} has {len(nodes)} parts, the optimizer {len(parts)}")
    reader = TensorReader(inline, file)
    elements = sum(parameter.size for part in parts for parameter in part.all)
    for node, part in zip(nodes, parts, strict=True):
        if node.value is None:
            continue  # a different rank of the data-parallel group wrote the file of this optimizer
        _check_form(node)
        steps = {
            member.name: step
            for group, members in zip(part.groups, part.parameters, strict=True)
            if (step := group.get(_STEP)) is not None
            for member in members
        }
        for number, members in enumerate(buffers(part.all)):
            vectors = _vectors(reader, node, number, members)
            bucket = bucket_size(args, stage, members[0].chunk, elements)
            for member, at in _places(members, bucket, vectors, file):
                parameter_state = optimizer.states.setdefault((member.chunk, member.name), ParameterState())
                for state, vector in vectors.items():
                    run = FlatInterval(0, member.size, 0, at)
                    boxes = extents(member.shape, [run], [vector]) if member.size else ()
                    parameter_state.states[state] = RankShard(vector.dtype, member.shape, boxes, file)
                if member.name in steps:
                    _add_number(reader, optimizer, member, steps[member.name])


def _check_form(node: CheckedValue) -> None:
    coalesced = node.get(_COALESCED)
    if coalesced is None or not coalesced.flag():
        message = "its flat buffers have the form of Megatron-LM before February 2024, one tensor for each bucket"
        hint = "Load and save the checkpoint with --ckpt-convert-update-legacy-dist-opt-format."
        raise refuse("UNSUPPORTED", message, file=node.file, hint=hint)


def _vectors(
    reader: TensorReader, node: CheckedValue, number: int, members: Sequence[Parameter]
) -> dict[str, FlatBuffer]:
    """Return name of the optimizer state -> flat buffer, for the parameters of one dtype."""
    kinds = [(key, value) for key, value in node[number].items()]
    kind = kinds[0][0].value if len(kinds) == 1 and isinstance(kinds[0][0], Key) else None
    stored = kind[0].code if isinstance(kind, tuple) and kind and isinstance(kind[0], DType) else None
    if stored != members[0].dtype:
        raise OrderUnknown(f"{node.file}: buffer {number} is of {stored or 'no'} parameters, not {members[0].dtype}")
    nodes_by_state = dict(kinds[0][1].string_items())
    nodes_by_state.pop(_UNPADDED, None)
    return {MASTER if key == _PARAM else key: reader.vector(value) for key, value in nodes_by_state.items()}


def _places(
    members: Sequence[Parameter], bucket: int | None, vectors: Mapping[str, FlatBuffer], file: str
) -> list[tuple[Parameter, int]]:
    """Return each parameter with the index of its first element in the flat buffers; the buffers' lengths must fit
    exactly.
    """
    places, length = lay_flat(members, bucket)
    for state, vector in vectors.items():
        if vector.length != length:
            raise OrderUnknown(f"{file}: {state} has {vector.length} elements; its parameters need {length}")
    return places


def check_copies(inline: NumbersInMemory, weights: Mapping[tuple[int, str], Entry], optimizer: RankOptimizer) -> None:
    """Compare samples of the full-precision copies with the weights; each weight must be its rounded copy.

    Args:
        inline: storage that reads the checkpoint's files.
        weights: maps (virtual pipeline stage, name in the whole model) to the weight on the rank.
        optimizer: the rank's optimizer state.

    Raises:
        OrderUnknown: if a copy differs from its weight, which shows that the assumed order of parameters is wrong.
        StorageError: with the code IO if a file cannot be read.
    """
    keys = [key for key, state in optimizer.states.items() if MASTER in state.states and weights[key].dtype in LOW]
    for key in keys[:: max(1, len(keys) // _SAMPLES)]:
        weight, master = weights[key], optimizer.states[key].states[MASTER]
        count = min(weight.nbytes // 2, _SAMPLED)
        skipped = (weight.nbytes // 2 - count) // 2
        stored, copy = (_sample(inline, each.extents, each.dtype, skipped, count) for each in (weight, master))
        if stored is None or copy is None:
            continue
        finite = np.isfinite(stored) & np.isfinite(copy)
        if bool(np.any(np.abs(stored - copy)[finite] > _CLOSE * np.abs(copy[finite]) + np.float64(1e-7))):
            raise OrderUnknown(f"its full-precision copy of {key[1]} has other values than the weight")


def _sample(inline: NumbersInMemory, places: Sequence[Any], dtype: str, skipped: int, count: int) -> np.ndarray | None:
    """Read some elements from the middle of a tensor; return None if the tensor is not one contiguous extent."""
    if len(places) != 1 or places[0].strides is not None or not count:
        return None
    kind = numpy_dtype(dtype)
    data = inline.read(places[0].file, places[0].offset + skipped * kind.itemsize, count * kind.itemsize)
    return np.frombuffer(data, kind).astype(np.float64)


EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_AHEAD = ".eh_proj.weight"
"""Suffix of the name of the projection before a multi-token prediction layer; Megatron cuts this projection by rows."""


@dataclass(frozen=True, slots=True)
class RankParameter:
    """One rank's shard of a parameter, with the optimizer state of the shard."""

    place: MeshPlace
    shard: RankShard
    state: ParameterState
    """Optimizer state of the shard."""


@dataclass(slots=True)
class JoinedTensors:
    """The joined tensors of the whole model, and the pairs of copies that must be equal."""

    weights: dict[str, Entry] = field(default_factory=dict)
    states: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """Parameter name -> name of the optimizer state -> tensor or number of this state."""
    twins: list[Twin] = field(default_factory=list)


def is_cut_by_rows(name: str) -> bool:
    """Return whether Megatron always cuts a parameter by rows, even if the family's table of tensor names states
    otherwise.

    The rows of a vocabulary are cut together with its padding rows.
    """
    return is_vocabulary(name) or name.endswith(_AHEAD)


class ShardJoiner:
    """Joins the shards of all ranks into whole tensors.

    Args:
        mesh: parallel degrees of the run.
        cuts: how parameters are cut over tensor-parallel ranks, from the family's table of tensor names; None without
            tensor parallelism.
        args: Megatron's training arguments of the run.
    """

    def __init__(self, mesh: Mesh, cuts: TableCuts | None, args: Mapping[str, Any]) -> None:
        self._mesh, self._cuts = mesh, cuts
        self._rows, self._width = args.get("padded_vocab_size"), args.get("hidden_size")
        self._numbers: set[tuple[tuple[Extent, ...], tuple[Extent, ...]]] = set()
        self.faults = Faults()

    def join(
        self, shards_by_name: Mapping[str, Mapping[tuple[int, int], Sequence[RankParameter]]], flat: frozenset[str]
    ) -> JoinedTensors:
        """Join the shards of all parameters.

        Args:
            shards_by_name: parameter name -> (pipeline stage, virtual stage) -> the shards of all ranks.
            flat: names of the parameters whose optimizer state must be in a flat buffer of at least one rank.

        Returns:
            the joined tensors; problems are added to the joiner's list `faults`.
        """
        joined = JoinedTensors()
        for name, stages in shards_by_name.items():
            for parts in stages.values():
                try:
                    self._stage(joined, name, parts, must=name in flat)
                except TransaxleError as error:
                    self.faults.extend(*error.refusals)
                if self.faults.full:
                    return joined
        return joined

    def _stage(self, joined: JoinedTensors, name: str, parts: Sequence[RankParameter], *, must: bool) -> None:
        """Join the shards of a parameter on the ranks of one pipeline stage."""
        count = self._mesh.etp if is_expert(name) else self._mesh.tp
        by_rank: list[list[RankParameter]] = [[] for _ in range(count)]
        for part in parts:
            by_rank[part.place.tp % count].append(part)
        lacking = [rank for rank, holders in enumerate(by_rank) if not holders]
        if lacking:
            message = f"tensor-parallel ranks {lacking[:8]} do not hold it, but others of their stage do"
            raise refuse("INCOMPLETE", message, file=parts[0].shard.file, tensor=name)
        spread = self._spread(name, [holders[0].shard for holders in by_rank])
        weights = self._merge(joined, name, name, spread, [[each.shard for each in holders] for holders in by_rank])
        self._add_entry(joined, joined.weights, name, name, weights)
        states = dict.fromkeys(state for part in parts for state in part.state.states)
        for state in states:
            shards = [
                [each.state.states[state] for each in holders if state in each.state.states] for holders in by_rank
            ]
            if not all(shards):
                message = f"some ranks' optimizers have no {state} of it, but others do"
                raise refuse("INCOMPLETE", message, file=parts[0].shard.file, tensor=name)
            shown = f"{name}/{state}"
            self._add_entry(
                joined,
                joined.states.setdefault(name, {}),
                state,
                shown,
                self._merge(joined, name, shown, spread, shards),
            )
        if must and not states:
            message = "its optimizer's state is in a file distrib_optim.pt that is missing"
            hint = "Copy the missing file, or leave the optimizer out (--no-optimizer)."
            raise refuse("INCOMPLETE", message, file=parts[0].shard.file, tensor=name, hint=hint)
        for part in parts:
            for key, number in part.state.numbers.items():
                self._add_number_twin(joined, name, key, number)

    def _spread(self, name: str, shards: Sequence[RankShard]) -> Spread:
        """Return how a parameter is distributed over the tensor-parallel ranks.

        Raises:
            Refused, UsageError: if the family's table of tensor names lacks the parameter, or does not fit the shards'
            shapes.
        """
        shapes: list[Shape] = [shard.shape for shard in shards]
        if is_cut_by_rows(name) and shapes[0]:
            rows = [shape[0] for shape in shapes]
            expected_rows = self._rows if is_vocabulary(name) else self._width
            spread = by_widths((sum(rows), *shapes[0][1:]), 0, [rows])
            if tuple(shapes) != spread.shards or (expected_rows is not None and sum(rows) != expected_rows):
                expectation = f"{expected_rows} rows by the args of the run" if expected_rows else "alike"
                message = (
                    f"its shards have the shapes {', '.join(map(str, map(list, shapes)))}, which are not {expectation}"
                )
                raise refuse("SHAPE_MISMATCH", message, file=shards[0].file, tensor=name)
            return spread
        if len(shards) == 1 or self._cuts is None:
            return whole(shapes[0], len(shards))
        return self._cuts.spread(name, shapes)

    def _merge(
        self, joined: JoinedTensors, name: str, shown: str, spread: Spread, shards: Sequence[Sequence[RankShard]]
    ) -> Entry:
        """Merge the first shard of each tensor-parallel rank into a whole tensor; add all further shards as copies that
        must be equal.
        """
        firsts = [holders[0] for holders in shards]
        entry, twins = merge_shards(shown, firsts, spread)
        joined.twins.extend(twins)
        for first, *duplicates in shards:
            for duplicate in duplicates:
                if (duplicate.dtype, duplicate.shape) != (first.dtype, first.shape):
                    message = (
                        f"{duplicate.file} holds {duplicate.dtype} {list(duplicate.shape)} of it, but {first.file} "
                        f"{first.dtype} {list(first.shape)}"
                    )
                    raise refuse("CORRUPT", message, file=duplicate.file, tensor=name)
                why = f"{first.file} and {duplicate.file} hold the same part of it"
                first_entry, other_entry = (
                    Entry(shown, each.dtype, each.shape, each.extents) for each in (first, duplicate)
                )
                joined.twins.append(Twin(first_entry, other_entry, why, replica=True))
        return entry

    def _add_entry(self, joined: JoinedTensors, into: dict[str, Entry], key: str, shown: str, entry: Entry) -> None:
        """Add a tensor of one pipeline stage; if an earlier stage has the same tensor, add the pair as tensors that
        must be equal.
        """
        first = into.setdefault(key, entry)
        if first is not entry:
            self._require_equal(joined, first, entry, shown)

    def _require_equal(self, joined: JoinedTensors, first: Entry, entry: Entry, shown: str) -> None:
        if (first.dtype, first.shape) != (entry.dtype, entry.shape):
            first_kind, kind = (f"{each.dtype} {list(each.shape)}" for each in (first, entry))
            message = f"one pipeline stage holds it as {first_kind}, another as {kind}"
            raise refuse("CORRUPT", message, tensor=shown)
        joined.twins.append(Twin(first, entry, "two pipeline stages hold the same tensor"))

    def _add_number_twin(self, joined: JoinedTensors, name: str, key: str, number: Entry) -> None:
        first = joined.states.setdefault(name, {}).setdefault(key, number)
        pair = first.extents, number.extents
        if first is not number and pair not in self._numbers:
            self._numbers.add(pair)
            joined.twins.append(Twin(first, number, f"{key} of {name} is one number on all ranks"))

    def tie(self, joined: JoinedTensors) -> None:
        """If embeddings are tied, remove the output head: it is the last stage's copy of the embedding, and must equal
        it.
        """
        embedding = joined.weights.get(EMBEDDING)
        if embedding is None or HEAD not in joined.weights:
            return
        self._require_equal(joined, embedding, joined.weights.pop(HEAD), HEAD)
        states = joined.states.pop(HEAD, {})
        for state, entry in states.items():
            first = joined.states.get(EMBEDDING, {}).get(state)
            if first is not None:
                self._require_equal(joined, first, entry, f"{HEAD}/{state}")
