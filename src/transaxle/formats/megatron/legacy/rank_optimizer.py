"""What the optimizer of each rank keeps, and whole tensors put together from ranks.

What an optimizer keeps of one rank's parameters: numbered by group, or in flat buffers beside the model's file.

Whole tensors from what the ranks hold: parts over tensor-parallel ranks are joined, copies must be equal.
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
    laid_flat,
)
from transaxle.formats.megatron.legacy.rank_grid import OPTIMIZER_KEY, STEPS, Mesh, Place, RankFile
from transaxle.formats.megatron.run_arguments import NAMES
from transaxle.formats.pickled.descriptors import NOTHING, DType, Key, TensorRef
from transaxle.formats.torch_file.saved import read_saved
from transaxle.formats.training_state import MASTER, PARAMS, ParamGroup, plain

_GROUPS, _STATE, _STEP = "param_groups", "state", "step"
_INNER = ("optimizer", "optimizer_state_dict")
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
_COALESCED, _UNPADDED, _PARAM = "buckets_coalesced", "numel_unpadded", "param"
_SAMPLES, _SAMPLED = 24, 16
"""Parameters of a rank whose full-precision copies are compared with their weights, and numbers of each."""
_CLOSE = 2.0**-6
"""Relative difference between a weight and its copy that rounding explains, and another parameter's hardly ever."""


@dataclass(slots=True)
class ParameterState:
    """What an optimizer keeps of one parameter on one rank."""

    states: dict[str, RankShard] = field(default_factory=dict)
    """State -> tensor of the parameter's shape on this rank."""
    numbers: dict[str, Entry] = field(default_factory=dict)
    """State -> number, such as the step."""


@dataclass(slots=True)
class RankOptimizer:
    """The optimizer of one rank."""

    states: dict[tuple[int, str], ParameterState] = field(default_factory=dict)
    """Stage of the virtual pipeline and name in the whole model -> state."""
    groups: list[tuple[ParamGroup, list[str]]] = field(default_factory=list)
    """Settings of each group, and the names of its parameters on this rank."""
    flat: frozenset[str] = frozenset()
    """Parameters that must be in a flat buffer of some rank."""
    checksums: tuple[Checksum, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the optimizers that a run chains: that of dense parameters, or that of experts."""

    node: CheckedValue
    groups: list[CheckedValue]
    parameters: list[list[Parameter]]
    """Of each group."""
    all: list[Parameter]
    """In the order of the module."""


def read_optimizer(
    inline: NumbersInMemory, rank: RankFile, stage: int, parameters: Sequence[Parameter], flat_file: str | None
) -> RankOptimizer:
    """Read the optimizer of a rank.

    Args:
        inline: the checkpoint's files.
        rank: its model file.
        stage: of the pipeline.
        parameters: all that are trained, in the order of the module.
        flat_file: the file of the distributed optimizer; None where the rank has none.

    Raises:
        OrderUnknown: it is not known which state belongs to which parameter.
        Refused: UNSAFE_PICKLE, CORRUPT, UNSUPPORTED for the files.
        StorageError: IO.
    """
    found = RankOptimizer()
    top = rank.root.get(OPTIMIZER_KEY)
    if top is None:
        return found
    parts = list(_parts(top, parameters, rank.run.args))
    for part in parts:
        for group, members in zip(part.groups, part.parameters, strict=True):
            found.groups.append((_settings(group), [member.name for member in members]))
    if any(group.get(PARAMS) is not None for part in parts for group in part.groups):
        own = rank.root.get(STEPS)
        steps = [{}] * len(parts) if own is None else [dict(node.items()) for node in own.list()]
        for part, numbered in zip(parts, steps, strict=True):
            _read_numbered(TensorReader(inline, rank.file), part, numbered, found)
    else:
        found.flat = frozenset(parameter.name for part in parts for parameter in part.all)
        if flat_file is not None:
            _read_flat(inline, flat_file, rank.run.args, stage, parts, found)
    return found


def _parts(top: CheckedValue, parameters: Sequence[Parameter], args: Mapping[str, Any]) -> Iterator[_Part]:
    """Yield the optimizers of a run: one, or one for dense parameters and one for experts."""
    nodes = top.list() if top.is_list else [top]
    groups = [_inner(node)[_GROUPS].list() for node in nodes]
    experts = [has_expert_groups(each) for each in groups]
    apart = any(experts)
    if len(nodes) != 1 + apart:
        raise OrderUnknown(f"it has {len(nodes)} parts, of which {sum(experts)} are for experts")
    for node, of_node, is_experts in zip(nodes, groups, experts, strict=True):
        own = [parameter for parameter in parameters if not apart or parameter.expert is is_experts]
        members = own if apart else [_dense(parameter) for parameter in own]
        yield _Part(node, of_node, by_groups(members, of_node, args), members)


def _dense(parameter: Parameter) -> Parameter:
    """Return a parameter of a run in which experts are trained like everything else."""
    return Parameter(
        parameter.chunk, parameter.name, parameter.dtype, parameter.shape, expert=False, shared=parameter.shared
    )


def _inner(node: CheckedValue) -> CheckedValue:
    """Return the state of the optimizer inside Megatron's."""
    for key in _INNER:
        inner = node.get(key)
        if inner is not None:
            return inner
    return node


def _settings(group: CheckedValue, besides: Collection[str] = (PARAMS, _STEP)) -> dict[str, Any]:
    """Return the settings of a group that are plain data; the step is a state of its parameters."""
    settings = {key: plain(node.value) for key, node in group.string_items() if key not in besides}
    return {key: value for key, value in settings.items() if value is not NOTHING}


def optimizer_settings(top: CheckedValue | None) -> dict[str, Any]:
    """Return the settings of all groups as an entry of the facts about a run; empty where there is no optimizer."""
    if top is None:
        return {}
    nodes = top.list() if top.is_list else [top]
    parts = [
        {OPTIMIZER_KEY: {_GROUPS: [_settings(group, (PARAMS,)) for group in _inner(node)[_GROUPS].list()]}}
        for node in nodes
    ]
    return {OPTIMIZER_KEY: dict(enumerate(parts)) if len(parts) > 1 else parts[0]}


def _read_numbered(reader: TensorReader, part: _Part, steps: Mapping[Any, CheckedValue], found: RankOptimizer) -> None:
    """Read states that are numbered by group: of each group's parameters in turn; also steps that we wrote besides."""
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
            _put(reader, found, member, MASTER, copy)
        for member, index in zip(members, numbers, strict=True):
            state = states.get(index)
            named = {} if state is None else dict(state.string_items())
            step = named.pop(_STEP, None) or steps.get(index) or group.get(_STEP)
            for name, node in named.items():
                _put(reader, found, member, name, node)
            if step is not None and named:
                _put_number(reader, found, member, step)


def _put(reader: TensorReader, found: RankOptimizer, member: Parameter, state: str, node: CheckedValue) -> None:
    """Add a state of a parameter; it must have the parameter's shape."""
    if not isinstance(node.value, TensorRef):
        raise OrderUnknown(f"its {state} of {member.name} is no tensor")
    entry = reader.tensor(f"{member.name}/{state}", node)
    if entry.shape != member.shape:
        message = f"its {state} of {member.name} has the shape {list(entry.shape)}, the parameter {list(member.shape)}"
        raise OrderUnknown(message)
    own = found.states.setdefault((member.chunk, member.name), ParameterState())
    own.states[state] = RankShard(entry.dtype, entry.shape, entry.extents, node.file)


def _put_number(reader: TensorReader, found: RankOptimizer, member: Parameter, node: CheckedValue) -> None:
    entry = reader.number(f"{member.name}/{_STEP}", node)
    if entry is None:
        raise node.fault("expected a number")
    found.states.setdefault((member.chunk, member.name), ParameterState()).numbers[_STEP] = entry


def _read_flat(
    inline: NumbersInMemory,
    file: str,
    args: Mapping[str, Any],
    stage: int,
    parts: Sequence[_Part],
    found: RankOptimizer,
) -> None:
    """Read the flat buffers of the distributed optimizer."""
    saved = read_saved(inline, file, allowed=NAMES)
    found.checksums = saved.checksums
    top = CheckedValue(saved.value, file)
    nodes = top.list() if top.is_list else [top]
    if len(nodes) != len(parts):
        raise OrderUnknown(f"{file} has {len(nodes)} parts, the optimizer {len(parts)}")
    reader = TensorReader(inline, file)
    elements = sum(parameter.size for part in parts for parameter in part.all)
    for node, part in zip(nodes, parts, strict=True):
        if node.value is None:
            continue  # another rank of the data-parallel group wrote it
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
                own = found.states.setdefault((member.chunk, member.name), ParameterState())
                for state, vector in vectors.items():
                    run = FlatInterval(0, member.size, 0, at)
                    boxes = extents(member.shape, [run], [vector]) if member.size else ()
                    own.states[state] = RankShard(vector.dtype, member.shape, boxes, file)
                if member.name in steps:
                    _put_number(reader, found, member, steps[member.name])


def _check_form(node: CheckedValue) -> None:
    coalesced = node.get(_COALESCED)
    if coalesced is None or not coalesced.flag():
        message = "its flat buffers have the form of Megatron-LM before February 2024, one tensor for each bucket"
        hint = "Load and save it with --ckpt-convert-update-legacy-dist-opt-format."
        raise refuse("UNSUPPORTED", message, file=node.file, hint=hint)


def _vectors(
    reader: TensorReader, node: CheckedValue, number: int, members: Sequence[Parameter]
) -> dict[str, FlatBuffer]:
    """Return the flat buffers of one dtype, by state."""
    kinds = [(key, value) for key, value in node[number].items()]
    kind = kinds[0][0].value if len(kinds) == 1 and isinstance(kinds[0][0], Key) else None
    stored = kind[0].code if isinstance(kind, tuple) and kind and isinstance(kind[0], DType) else None
    if stored != members[0].dtype:
        raise OrderUnknown(f"{node.file}: buffer {number} is of {stored or 'no'} parameters, not {members[0].dtype}")
    named = dict(kinds[0][1].string_items())
    named.pop(_UNPADDED, None)
    return {MASTER if key == _PARAM else key: reader.vector(value) for key, value in named.items()}


def _places(
    members: Sequence[Parameter], bucket: int | None, vectors: Mapping[str, FlatBuffer], file: str
) -> list[tuple[Parameter, int]]:
    """Return where each parameter is in the buffers; their lengths must be those of just these parameters."""
    places, length = laid_flat(members, bucket)
    for state, vector in vectors.items():
        if vector.length != length:
            raise OrderUnknown(f"{file}: {state} has {vector.length} elements; its parameters need {length}")
    return places


def check_copies(inline: NumbersInMemory, weights: Mapping[tuple[int, str], Entry], found: RankOptimizer) -> None:
    """Compare some full-precision copies with the weights that they were rounded to.

    Args:
        inline: the checkpoint's files.
        weights: stage of the virtual pipeline and name -> the rank's weight.
        found: what the optimizer keeps, by the same keys.

    Raises:
        OrderUnknown: a copy is not that of its weight, so the order is another one.
        StorageError: IO.
    """
    keys = [key for key, state in found.states.items() if MASTER in state.states and weights[key].dtype in LOW]
    for key in keys[:: max(1, len(keys) // _SAMPLES)]:
        weight, master = weights[key], found.states[key].states[MASTER]
        count = min(weight.nbytes // 2, _SAMPLED)
        skipped = (weight.nbytes // 2 - count) // 2
        stored, copy = (_sample(inline, each.extents, each.dtype, skipped, count) for each in (weight, master))
        if stored is None or copy is None:
            continue
        finite = np.isfinite(stored) & np.isfinite(copy)
        if bool(np.any(np.abs(stored - copy)[finite] > _CLOSE * np.abs(copy[finite]) + np.float64(1e-7))):
            raise OrderUnknown(f"its full-precision copy of {key[1]} has other values than the weight")


def _sample(inline: NumbersInMemory, places: Sequence[Any], dtype: str, skipped: int, count: int) -> np.ndarray | None:
    """Read some numbers from the middle of a tensor that is dense in one place; None for any other tensor."""
    if len(places) != 1 or places[0].strides is not None or not count:
        return None
    kind = numpy_dtype(dtype)
    data = inline.read(places[0].file, places[0].offset + skipped * kind.itemsize, count * kind.itemsize)
    return np.frombuffer(data, kind).astype(np.float64)


EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_AHEAD = ".eh_proj.weight"
"""Projection in front of a layer that predicts ahead: Megatron cuts its rows, other programs keep it whole."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as one rank holds it."""

    place: Place
    shard: RankShard
    state: ParameterState
    """What the rank's optimizer keeps of it."""


@dataclass(slots=True)
class Whole:
    """Whole tensors, and the copies that must be equal."""

    weights: dict[str, Entry] = field(default_factory=dict)
    states: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """Parameter -> state -> tensor or number."""
    twins: list[Twin] = field(default_factory=list)


def is_cut_by_rows(name: str) -> bool:
    """Tell whether Megatron cuts a parameter by its rows, whatever the table says of its axes.

    The rows of the vocabulary and its padding are cut as one dim.
    """
    return is_vocabulary(name) or name.endswith(_AHEAD)


class Joining:
    """Joins the parameters of all ranks.

    Args:
        mesh: the degrees of the run.
        cuts: what the tables say of the parameters that are cut; None where none is.
        args: of the run.
    """

    def __init__(self, mesh: Mesh, cuts: TableCuts | None, args: Mapping[str, Any]) -> None:
        self._mesh, self._cuts = mesh, cuts
        self._rows, self._width = args.get("padded_vocab_size"), args.get("hidden_size")
        self._numbers: set[tuple[tuple[Extent, ...], tuple[Extent, ...]]] = set()
        self.faults = Faults()

    def join(self, held: Mapping[str, Mapping[tuple[int, int], Sequence[Held]]], flat: frozenset[str]) -> Whole:
        """Join everything.

        Args:
            held: name -> pipeline stage and virtual stage -> what each rank holds of it.
            flat: parameters that must be in a flat buffer of some rank.

        Returns:
            the whole tensors; what stands against it is in `faults`.
        """
        found = Whole()
        for name, stages in held.items():
            for parts in stages.values():
                try:
                    self._stage(found, name, parts, must=name in flat)
                except TransaxleError as error:
                    self.faults.extend(*error.refusals)
                if self.faults.full:
                    return found
        return found

    def _stage(self, found: Whole, name: str, parts: Sequence[Held], *, must: bool) -> None:
        """Join what the ranks of one stage hold of a parameter."""
        count = self._mesh.etp if is_expert(name) else self._mesh.tp
        by_rank: list[list[Held]] = [[] for _ in range(count)]
        for part in parts:
            by_rank[part.place.tp % count].append(part)
        lacking = [rank for rank, holders in enumerate(by_rank) if not holders]
        if lacking:
            message = f"tensor-parallel ranks {lacking[:8]} do not hold it, but others of their stage do"
            raise refuse("INCOMPLETE", message, file=parts[0].shard.file, tensor=name)
        spread = self._spread(name, [holders[0].shard for holders in by_rank])
        weights = self._merged(found, name, name, spread, [[each.shard for each in holders] for holders in by_rank])
        self._keep(found, found.weights, name, name, weights)
        states = dict.fromkeys(state for part in parts for state in part.state.states)
        for state in states:
            shards = [
                [each.state.states[state] for each in holders if state in each.state.states] for holders in by_rank
            ]
            if not all(shards):
                message = f"some ranks' optimizers have no {state} of it, but others do"
                raise refuse("INCOMPLETE", message, file=parts[0].shard.file, tensor=name)
            shown = f"{name}/{state}"
            self._keep(
                found, found.states.setdefault(name, {}), state, shown, self._merged(found, name, shown, spread, shards)
            )
        if must and not states:
            message = "its optimizer's state is in a file distrib_optim.pt that is missing"
            hint = "Copy the missing file, or leave the optimizer out (--no-optimizer)."
            raise refuse("INCOMPLETE", message, file=parts[0].shard.file, tensor=name, hint=hint)
        for part in parts:
            for key, number in part.state.numbers.items():
                self._number(found, name, key, number)

    def _spread(self, name: str, shards: Sequence[RankShard]) -> Spread:
        """Return how a parameter is spread over the ranks that share it.

        Raises:
            Refused, UsageError: where the tables do not say it, or something else.
        """
        shapes: list[Shape] = [shard.shape for shard in shards]
        if is_cut_by_rows(name) and shapes[0]:
            rows = [shape[0] for shape in shapes]
            known = self._rows if is_vocabulary(name) else self._width
            spread = by_widths((sum(rows), *shapes[0][1:]), 0, [rows])
            if tuple(shapes) != spread.shards or (known is not None and sum(rows) != known):
                wanted = f"{known} rows by the args of the run" if known else "alike"
                message = f"its shards have the shapes {', '.join(map(str, map(list, shapes)))}, which are not {wanted}"
                raise refuse("SHAPE_MISMATCH", message, file=shards[0].file, tensor=name)
            return spread
        if len(shards) == 1 or self._cuts is None:
            return whole(shapes[0], len(shards))
        return self._cuts.spread(name, shapes)

    def _merged(
        self, found: Whole, name: str, shown: str, spread: Spread, shards: Sequence[Sequence[RankShard]]
    ) -> Entry:
        """Return a whole tensor of the first holders' shards; those of the others must be equal to them."""
        firsts = [holders[0] for holders in shards]
        entry, twins = merge_shards(shown, firsts, spread)
        found.twins.extend(twins)
        for first, *others in shards:
            for other in others:
                if (other.dtype, other.shape) != (first.dtype, first.shape):
                    message = (
                        f"{other.file} holds {other.dtype} {list(other.shape)} of it, but {first.file} "
                        f"{first.dtype} {list(first.shape)}"
                    )
                    raise refuse("CORRUPT", message, file=other.file, tensor=name)
                why = f"{first.file} and {other.file} hold the same part of it"
                kept, compared = (Entry(shown, each.dtype, each.shape, each.extents) for each in (first, other))
                found.twins.append(Twin(kept, compared, why, replica=True))
        return entry

    def _keep(self, found: Whole, into: dict[str, Entry], key: str, shown: str, entry: Entry) -> None:
        """Add a tensor; one that an earlier stage holds too must be equal."""
        first = into.setdefault(key, entry)
        if first is not entry:
            self._same(found, first, entry, shown)

    def _same(self, found: Whole, first: Entry, entry: Entry, shown: str) -> None:
        if (first.dtype, first.shape) != (entry.dtype, entry.shape):
            first_kind, kind = (f"{each.dtype} {list(each.shape)}" for each in (first, entry))
            message = f"one pipeline stage holds it as {first_kind}, another as {kind}"
            raise refuse("CORRUPT", message, tensor=shown)
        found.twins.append(Twin(first, entry, "two pipeline stages hold the same tensor"))

    def _number(self, found: Whole, name: str, key: str, number: Entry) -> None:
        first = found.states.setdefault(name, {}).setdefault(key, number)
        pair = first.extents, number.extents
        if first is not number and pair not in self._numbers:
            self._numbers.add(pair)
            found.twins.append(Twin(first, number, f"{key} of {name} is one number on all ranks"))

    def tie(self, found: Whole) -> None:
        """Remove the head of a model that uses its embedding as such: the last stage's copy, which must be equal."""
        embedding = found.weights.get(EMBEDDING)
        if embedding is None or HEAD not in found.weights:
            return
        self._same(found, embedding, found.weights.pop(HEAD), HEAD)
        states = found.states.pop(HEAD, {})
        for state, entry in states.items():
            first = found.states.get(EMBEDDING, {}).get(state)
            if first is not None:
                self._same(found, first, entry, f"{HEAD}/{state}")
