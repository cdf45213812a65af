"""Assembles the tensors of a run's pipeline stages from the DeepSpeed files of all ranks.

The trained parameters of a model-parallel rank are read from the flat buffers of the rank's data-parallel ranks. Every
length is checked: parameters and padding must add up exactly to the buffers. If a rank's file has a map of fragments
(DeepSpeed's record of where each parameter is in the buffers), the map must agree with the computed positions.

In DeepSpeed's own MoE layers, each expert-parallel rank counts its experts from zero. The module tensors of experts are
in separate files, where experts have the numbers of the whole model. In the optimizer's files, a group of expert
parameters is cut only over the ranks with the same experts, and experts have the rank's own numbers; `partition_count`
is the number of ranks with the same experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod

from transaxle.errors import Code, Faults, TransaxleError, refuse
from transaxle.formats.catalog import Entry, Extent, Shape, Twin
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.rank_files import (
    FlatBuffer,
    FlatInterval,
    FlatPosition,
    RankModel,
    RankShard,
    RankState,
    block_with_scale,
    extents,
    full_spread,
    lay_out,
    merge_shards,
    moment_refusal,
    rank_intervals,
    shard_width,
)
from transaxle.formats.deepspeed.spread import HINT, UNKNOWN_CUTS, Spread, TableCuts
from transaxle.formats.deepspeed.universal_record import UniversalInfo
from transaxle.formats.pickled.descriptors import Object


class ExpertShares:
    """Finds the data-parallel ranks over which each optimizer group is cut, and the global names of expert parameters.

    Args:
        model: contents of the model file.
        states: contents of the optimizer files, in the order of data-parallel ranks.
    """

    def __init__(self, model: RankModel, states: Sequence[RankState]) -> None:
        self._model, self._states = model, states
        self._is_strided = _is_strided(model)
        self._local: dict[str, int] = {}
        for shapes in model.shapes:
            for name in shapes:
                head, number, _ = _split_name(name)
                if number is not None:
                    self._local[head] = max(self._local.get(head, 0), number + 1)

    def of(self, group: int) -> list[Sequence[RankState]]:
        """Return the contents of the optimizer files over which a group is cut: one list per expert-parallel rank, or
        one list for a dense group.

        Raises:
            Refused: with the code CORRUPT if the numbers of ranks do not fit; with the code UNSUPPORTED if it is
                unknown whether the group's parameters belong to experts.
        """
        total = len(self._states)
        counts = self._states[0].root.get(keys.PARTITION_COUNT)
        listed = [] if counts is None or not counts.is_list else counts.list()
        sharing = listed[group].natural() if group < len(listed) else total
        if sharing == total:
            return [self._states]
        if not 0 < sharing < total or total % sharing:
            message = (
                f"group {group} is cut over {sharing} ranks, which does not divide the {total} ranks that have files"
            )
            raise refuse("CORRUPT", message, file=self._states[0].file)
        for name in self._model.shapes[group]:
            if _split_name(name)[1] is None and self._model.auto.mixture_of(name) is None:
                message = (
                    f"it is cut over {sharing} of {total} ranks, but is no expert of DeepSpeed's MoE layers or AutoEP"
                )
                raise refuse("UNSUPPORTED", message, file=self._model.file, tensor=name)
        # Number of expert-parallel ranks; `sharing` data-parallel ranks have the same experts.
        ranks = total // sharing
        # By default expert-parallel ranks are neighbours, so ranks with the same experts are `ranks` apart; if data
        # parallelism comes first, ranks with the same experts are neighbours.
        if self._is_strided:
            return [self._states[rank::ranks] for rank in range(ranks)]
        return [self._states[rank * sharing : (rank + 1) * sharing] for rank in range(ranks)]

    def parts(self, name: str, shape: Shape, rank: int) -> Iterator[tuple[str, Shape]]:
        """Yield the parts of a parameter, in order: name in the whole model, in which experts have the whole model's
        numbers, and shape. Only AutoEP's parameters of several experts have more than one part.

        Args:
            name: the parameter's name on the expert-parallel rank.
            shape: the parameter's shape on the rank.
            rank: the expert-parallel rank.
        """
        head, number, tail = _split_name(name)
        if number is not None:
            yield f"{head}{number + rank * self._local[head]}{tail}", shape
        elif self._model.auto.mixture_of(name) is not None:
            yield from self._model.auto.parts(name, shape, rank, self._model.file)
        else:
            yield name, shape

    def with_all_experts(self) -> RankModel:
        """Return the contents of the model file, with the expert parameters of all ranks added to the groups."""
        shapes = tuple(
            {
                part: part_shape
                for rank in range(len(self.of(group)))
                for name, shape in shapes_of_group.items()
                for part, part_shape in self.parts(name, shape, rank)
            }
            for group, shapes_of_group in enumerate(self._model.shapes)
        )
        return replace(self._model, shapes=shapes)


def _is_strided(model: RankModel) -> bool:
    """Return whether neighbouring ranks have different experts, which is the default."""
    config = model.root.get(keys.CONFIG)
    data_first = None if config is None else config.get(keys.DATA_BEFORE_EXPERTS)
    return data_first is None or not data_first.flag()


def _split_name(name: str) -> tuple[str, int | None, str]:
    """Split an expert's parameter name into the text before the expert's number, the number, and the text after the
    number.
    """
    head, mark, tail = name.partition(keys.EXPERTS)
    number = tail.partition(".")[0]
    if not mark or not number.isdecimal() or not number.isascii() or len(number) > len(str(1 << 20)):
        return name, None, ""
    return head + mark, int(number), tail[len(number) :]


def add_experts(
    model: RankModel,
    files: Mapping[tuple[int, int], str],
    tensors_by_file: Mapping[str, Mapping[str, Entry]],
    faults: Faults,
) -> RankModel:
    """Return the contents of a model file, completed with the tensors from the rank's expert files.

    Args:
        model: contents of the model file.
        files: maps (layer, expert) to the name of the expert file.
        tensors_by_file: maps the name of each expert file to the tensors in it.
        faults: list of faults, to which INCOMPLETE is added for an expert without a file, and NAME_COLLISION for a
            tensor in two files.
    """
    counts = model.root.get(keys.NUM_EXPERTS)
    expert_counts = [] if counts is None or not counts.is_list else list(enumerate(counts.naturals()))
    # earlier versions of DeepSpeed write one file per expert, with the expert's tensors in all layers
    if any(layer < 0 for layer, _ in files):
        expert_counts = [(-1, max(count for _, count in expert_counts))] if expert_counts else []
    for layer, count in expert_counts:
        missing = [expert for expert in range(min(count, 1 << 16)) if (layer, expert) not in files]
        if missing:
            message = f"the files of the experts {missing[:8]} of mixture {layer} are missing"
            faults.add("INCOMPLETE", message, model.file)
    module = dict(model.module)
    for file in files.values():
        for name, entry in tensors_by_file.get(file, {}).items():
            if module.setdefault(name, entry) is not entry:
                faults.add("NAME_COLLISION", "another file has the same tensor", file, name)
    return replace(model, module=module)


OF_ONE_RUN = "The folder mixes files of two runs; keep only the files of one run."
"""Hint for errors about files that contradict each other."""
_SLACK = 16
"""Maximum number of elements of alignment padding at the end of a group's vector, per rank."""


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A trained parameter on one model-parallel rank, complete over all data-parallel ranks."""

    group: int
    """Index of the optimizer group that contains the parameter."""
    shape: Shape
    states: Mapping[str, RankShard]
    """Name of the optimizer state -> shard of this state on the model-parallel rank; the state `fp32` contains the
    master weights."""
    numbers: Mapping[str, Entry]
    """Name of the optimizer state -> number that is stored for it, such as the `step`."""


def read_trained(model: RankModel, states: Sequence[RankState]) -> tuple[dict[str, TrainedParameter], list[Twin]]:
    """Read the trained parameters of one model-parallel rank.

    Args:
        model: contents of the rank's model file.
        states: contents of the rank's optimizer files, in the order of data-parallel ranks.

    Returns:
        the parameters in the order of the flat buffers, and the pairs of numbers that must be equal on all ranks.

    Raises:
        Refused: with the code CORRUPT if lengths contradict each other; with the code INCOMPLETE if a rank lacks an
            optimizer state; with the code NAME_COLLISION if a parameter is in two groups.
    """
    stages = {state.stage for state in states}
    if len(stages) > 1:
        raise refuse(
            "CORRUPT",
            f"its ranks were saved with different ZeRO stages: {sorted(stages)}",
            file=states[0].file,
            hint=OF_ONE_RUN,
        )
    counts = {len(state.groups) for state in states}
    if len(counts) > 1:
        raise refuse(
            "CORRUPT", f"its ranks have different numbers of parameter groups: {sorted(counts)}", file=states[0].file
        )
    _check_counts(states)
    parameters: dict[str, TrainedParameter] = {}
    for group, name, shape, intervals, buffers in _flat_parameters(model, states, zero3=stages == {3}):
        if name in parameters:
            raise refuse("NAME_COLLISION", "it is in two parameter groups", file=model.file, tensor=name)
        shards = {
            state: RankShard(_dtype(state, vectors, states), shape, extents(shape, intervals, vectors), states[0].file)
            for state, vectors in buffers.items()
        }
        parameters[name] = TrainedParameter(group, shape, shards, states[0].groups[group].numbers)
    return parameters, list(_steps(parameters, states))


def _check_counts(states: Sequence[RankState]) -> None:
    """Check that all ranks state the same partition counts (numbers of ranks), one for each group."""
    first_counts, *other_counts = [_counts(state) for state in states]
    for state, counts in zip(states[1:], other_counts, strict=True):
        if counts != first_counts:
            message = (
                f"{keys.PARTITION_COUNT} is {list(counts or ())}, but {list(first_counts or ())} in {states[0].file}"
            )
            raise refuse("CORRUPT", message, file=state.file, hint=OF_ONE_RUN)
    if first_counts is not None and len(first_counts) != len(states[0].groups):
        message = f"{keys.PARTITION_COUNT} has {len(first_counts)} numbers for {len(states[0].groups)} groups"
        raise refuse("CORRUPT", message, file=states[0].file)


def _counts(state: RankState) -> tuple[int, ...] | None:
    """Return the number of ranks over which each group is cut; None if the file does not state it."""
    counts = state.root.get(keys.PARTITION_COUNT)
    if counts is None or state.stage == 3:
        return None
    return counts.naturals() if counts.is_list else (counts.natural(),) * len(state.groups)


_FlatParameter = tuple[int, str, Shape, list[FlatInterval], Mapping[str, list[FlatBuffer]]]


def _flat_parameters(model: RankModel, states: Sequence[RankState], *, zero3: bool) -> Iterator[_FlatParameter]:
    """Yield each parameter as (group, name, shape, intervals, flat buffers); the intervals are positions in the
    buffers.
    """
    if zero3:
        yield from _zero3(model, states)
        return
    if len(model.shapes) != len(states[0].groups):
        message = f"there are {len(model.shapes)} groups of parameters, but {len(states[0].groups)} of flat buffers"
        raise refuse("CORRUPT", message, file=model.file)
    shares = ExpertShares(model, states)
    round_robin = _is_round_robin(model)
    for group, shapes in enumerate(model.shapes):
        for rank, sharing in enumerate(shares.of(group)):
            buffers = _buffers(sharing, group)
            for place, intervals in _group_intervals(
                sharing, group, shapes, buffers[keys.FP32], round_robin=round_robin
            ):
                _check_inside(place, intervals, buffers, sharing)
                begin = 0
                for name, shape in shares.parts(place.name, place.shape, rank):
                    end = begin + prod(shape)
                    yield group, name, shape, list(_intervals_inside(intervals, begin, end)), buffers
                    begin = end


def _intervals_inside(intervals: Sequence[FlatInterval], begin: int, end: int) -> Iterator[FlatInterval]:
    """Yield the intervals of a part of a parameter, which counts its elements from the part's beginning."""
    for run in intervals:
        start, stop = max(run.start, begin), min(run.stop, end)
        if start < stop:
            yield FlatInterval(start - begin, stop - begin, run.part, run.at + start - run.start)


def _is_round_robin(model: RankModel) -> bool:
    """Return whether the run set `round_robin_gradients`, which deals out each group's parameters to the ranks
    in turn.
    """
    config = model.root.get(keys.CONFIG)
    zero = None if config is None else config.get(keys.ZERO_CONFIG)
    round_robin = None if zero is None else zero.get(keys.ROUND_ROBIN)
    return round_robin is not None and round_robin.flag()


def _group_intervals(
    states: Sequence[RankState],
    group: int,
    shapes: Mapping[str, Shape],
    masters: Sequence[FlatBuffer],
    *,
    round_robin: bool,
) -> Iterator[tuple[FlatPosition, list[FlatInterval]]]:
    """Yield the parameters of a group, with their intervals in the flat buffers of the ranks over which the group is
    cut.
    """
    width = _width(states, group, masters)
    places, used = lay_out(shapes, _paddings(states[0], group, len(shapes)))
    # Elements beyond the parameters must be alignment padding; more elements mean that shapes and buffers come from
    # different runs.
    slack = width * len(states) - used
    if not 0 <= slack < _SLACK * len(states) or not _adds_up(states, group, slack, _sum(masters) - used):
        message = f"group {group}: its parameters need {used} elements, but its buffers have {width * len(states)}"
        raise refuse("CORRUPT", message, file=states[0].file)
    cut = {place.name: list(rank_intervals(place, width, len(states))) for place in places}
    # The shapes are listed in the order of the flat buffers. With `round_robin_gradients`, DeepSpeed 0.19.8 reorders
    # the parameters before it fills the buffers, but writes the map of fragments in the original order.
    places_before, _ = lay_out(_module_order(shapes, len(states)), (0,) * len(shapes)) if round_robin else ((), 0)
    cut_before = {place.name: list(rank_intervals(place, width, len(states))) for place in places_before}
    _check_map(states, group, cut, cut_before)
    for place in places:
        yield place, cut[place.name]


def _module_order(shapes: Mapping[str, Shape], ranks: int) -> dict[str, Shape]:
    """Return a group's parameters in their original order, before `round_robin_gradients` reordered them."""
    numbers = [number for rank in range(ranks) for number in range(rank, len(shapes), ranks)]
    return dict(shape for _, shape in sorted(zip(numbers, shapes.items(), strict=True)))


def _buffers(states: Sequence[RankState], group: int) -> dict[str, list[FlatBuffer]]:
    """Return name of the optimizer state -> flat buffer of each rank; if a rank has no buffer for the state, an empty
    buffer is listed.
    """
    names = dict.fromkeys(name for state in states for name in state.groups[group].vectors)
    empty_buffer = FlatBuffer("", 0, "", 0)
    return {name: [state.groups[group].vectors.get(name, empty_buffer) for state in states] for name in names}


def _width(states: Sequence[RankState], group: int, masters: Sequence[FlatBuffer]) -> int:
    """Return the number of elements in each rank's part of a group's vector, including padding that the files may leave
    out.
    """
    lengths = [vector.length for vector in masters]
    # Elastic checkpoints store the buffers without padding. With padding added, the parts of all ranks must have the
    # same length.
    padded = {length + _padding(state, group) for length, state in zip(lengths, states, strict=True)}
    if len(padded) == 1:
        return padded.pop()
    if len(set(lengths)) == 1:
        return lengths[0]
    message = f"group {group}: the ranks' buffers have {lengths[:8]} elements, which are not equal parts"
    raise refuse("CORRUPT", message, file=states[0].file)


def _sum(vectors: Sequence[FlatBuffer]) -> int:
    return sum(vector.length for vector in vectors)


def _adds_up(states: Sequence[RankState], group: int, slack: int, excess: int) -> bool:
    """Return whether a group's buffers exceed its parameters by exactly the padding that the files state; True if the
    files state no padding.

    Args:
        states: contents of the ranks' optimizer files.
        group: index of the optimizer group.
        slack: number of elements beyond the parameters, if all ranks' parts have equal width.
        excess: number of elements beyond the parameters in the stored buffers.
    """
    if any(state.root.get(keys.GROUP_PADDINGS) is None for state in states):
        return True
    # The stated padding must equal the excess of the equal parts, or the excess of the stored buffers.
    return sum(_padding(state, group) for state in states) in (slack, excess)


def _padding(state: RankState, group: int) -> int:
    paddings = state.root.get(keys.GROUP_PADDINGS)
    return 0 if paddings is None else _nth(paddings, group).natural()


def _paddings(state: RankState, group: int, count: int) -> Sequence[int]:
    """Return the number of padding elements after each parameter; zeros for files of earlier versions."""
    listed = state.root.get(keys.PARAM_PADDINGS)
    if listed is None:
        return (0,) * count
    paddings = _nth(listed, group).naturals()
    if len(paddings) != count:
        raise listed.fault(f"there are {len(paddings)} paddings for the {count} parameters of group {group}")
    return paddings


def _nth(node: CheckedValue, index: int) -> CheckedValue:
    items = node.list()
    if index >= len(items):
        raise node.fault(f"it has only {len(items)} items, so none for group {index}")
    return items[index]


def _check_inside(
    place: FlatPosition,
    intervals: Sequence[FlatInterval],
    buffers: Mapping[str, Sequence[FlatBuffer]],
    states: Sequence[RankState],
) -> None:
    """Check that a parameter's intervals are inside the stored buffers of all optimizer states."""
    for state, vectors in buffers.items():
        for run in intervals:
            vector, end = vectors[run.part], run.at + run.stop - run.start
            if end > vector.length:
                code: Code = "CORRUPT" if vector.length else "INCOMPLETE"
                message = f"its {state} ends at element {end}, but the buffer has only {vector.length}"
                raise refuse(code, message, file=states[run.part].file, tensor=place.name)


def _check_map(
    states: Sequence[RankState],
    group: int,
    cut: Mapping[str, Sequence[FlatInterval]],
    cut_before: Mapping[str, Sequence[FlatInterval]],
) -> None:
    """Check the maps of fragments (where each parameter is in the buffers) in the ranks' files, if there are any,
    against the computed intervals.

    Args:
        states: contents of the ranks' optimizer files.
        group: index of the optimizer group.
        cut: parameter name -> computed intervals of the parameter.
        cut_before: parameter name -> intervals in the order before `round_robin_gradients` reordered the parameters,
            which a map may have instead; empty without this setting.
    """
    for dp_rank, state in enumerate(states):
        listed = state.root.get(keys.MAPPINGS)
        if listed is None:
            continue
        expected = _fragments(cut, dp_rank)
        recorded = {name: _fragment(node) for name, node in _nth(listed, group).string_items()}
        # If a rank has no elements of a parameter, the map either omits the parameter, or lists it with zero elements.
        if cut_before and {name: at for name, at in recorded.items() if at[1]} == _fragments(cut_before, dp_rank):
            continue
        for name in [*expected, *recorded]:
            if expected.get(name, (0, 0)) != recorded.get(name, (0, 0)):
                start, count = expected.get(name, (0, 0))
                recorded_fragment = recorded.get(name)
                message = (
                    f"by the lengths it has {count} elements from {start}, but {keys.MAPPINGS} says {recorded_fragment}"
                )
                raise refuse("CORRUPT", message, file=state.file, tensor=name)


def _fragments(cut: Mapping[str, Sequence[FlatInterval]], dp_rank: int) -> dict[str, tuple[int, int]]:
    """Return parameter name -> (first element in the flat buffer, number of elements), for the intervals on one
    rank.
    """
    return {
        name: (run.at, run.stop - run.start)
        for name, intervals in cut.items()
        for run in intervals
        if run.part == dp_rank
    }


def _fragment(node: CheckedValue) -> tuple[int, int]:
    value = node.value
    fragment_fields = value.state if isinstance(value, Object) else value
    fields = CheckedValue(fragment_fields, node.file, node.path)
    count = fields["numel"].natural()
    return (fields["start"].natural(), count) if count else (0, 0)


def _zero3(model: RankModel, states: Sequence[RankState]) -> Iterator[_FlatParameter]:
    """Yield the parameters under ZeRO-3: each rank's buffers contain an equal interval of each parameter, one after
    another.
    """
    parts, groups = len(states), len(states[0].groups)
    names = dict.fromkeys(name for state in states for group in state.groups for name in group.vectors)
    empty_buffer = FlatBuffer("", 0, "", 0)
    # Buffers of all ranks in one list, rank by rank and group by group: the index of a buffer is rank * groups + group.
    buffers = {
        name: [group.vectors.get(name, empty_buffer) for state in states for group in state.groups] for name in names
    }
    lengths = [vector.length for vector in buffers[keys.FP32]]
    if any(lengths[dp_rank * groups : (dp_rank + 1) * groups] != lengths[:groups] for dp_rank in range(parts)):
        raise refuse("CORRUPT", "the buffers of its ranks differ in length", file=states[0].file)
    ends = list(accumulate(lengths[:groups]))
    shapes = [(name, shape) for group in model.shapes for name, shape in group.items()]
    used = sum(shard_width(prod(shape), parts) for _, shape in shapes)
    if used != (ends[-1] if ends else 0):
        message = f"its parameters need {used} elements on each rank, but the buffers have {ends[-1] if ends else 0}"
        raise refuse("CORRUPT", message, file=states[0].file)
    at = 0
    for name, shape in shapes:
        size = prod(shape)
        width = shard_width(size, parts)
        intervals = [
            run
            for dp_rank in range(parts)
            # The buffers of a rank form one sequence: an interval may begin in any buffer and continue in the next
            # buffer.
            for run in _split_run(
                min(dp_rank * width, size), min((dp_rank + 1) * width, size), at, ends, dp_rank * groups
            )
        ]
        place = FlatPosition(name, shape, at)
        _check_inside(place, intervals, buffers, [state for state in states for _ in state.groups])
        group = next((number for number, end in enumerate(ends) if at < end), 0)
        yield group, name, shape, intervals, buffers
        # Every rank reserves the same width for a parameter, even if the rank's interval of the parameter is shorter or
        # empty.
        at += width


def _split_run(start: int, stop: int, at: int, ends: Sequence[int], base: int) -> Iterator[FlatInterval]:
    """Split an interval of a parameter where one of the rank's consecutive buffers ends."""
    begin = 0
    for number, end in enumerate(ends):
        low, high = max(at, begin), min(at + stop - start, end)
        if low < high:
            yield FlatInterval(start + low - at, start + high - at, base + number, low - begin)
        begin = end


def _dtype(state: str, vectors: Sequence[FlatBuffer], states: Sequence[RankState]) -> str:
    dtypes = dict.fromkeys(vector.dtype for vector in vectors if vector.dtype)
    if len(dtypes) > 1:
        raise refuse(
            "DTYPE_MIXED", f"its ranks store {state} in different dtypes: {', '.join(dtypes)}", file=states[0].file
        )
    return next(iter(dtypes), "F32")


def _steps(parameters: Mapping[str, TrainedParameter], states: Sequence[RankState]) -> Iterator[Twin]:
    """Yield pairs of numbers that must be equal: the number of a group on the first rank, and the number on each later
    rank.
    """
    # The order is reversed so that, in the dict, the first parameter of each group replaces all later parameters of the
    # group.
    first_parameters = {item.group: name for name, item in reversed(list(parameters.items()))}
    for group, name in first_parameters.items():
        for state in states[1:]:
            for key, entry in states[0].groups[group].numbers.items():
                other_entry = state.groups[group].numbers.get(key)
                if other_entry is not None:
                    why = f"{key} of the group of {name} is one number on all ranks"
                    yield Twin(entry, other_entry, why, dates=key == keys.STEP)


@dataclass(frozen=True, slots=True)
class ModelRank:
    """The files and trained parameters of one tensor-parallel rank of a pipeline stage."""

    models: Sequence[RankModel]
    """Contents of the model files of the rank: a single file, or under ZeRO-3 one file per data-parallel rank."""
    trained: Mapping[str, TrainedParameter]


@dataclass(slots=True)
class Stage:
    """The tensors of one pipeline stage."""

    weights: dict[str, Entry] = field(default_factory=dict)
    """Tensor name -> trained weight in full precision, frozen parameter, or buffer."""
    low: dict[str, Entry] = field(default_factory=dict)
    """Tensor name -> tensor of the module's state dict, in low precision."""
    states: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """Parameter name -> name of the optimizer state -> tensor of optimizer state."""
    twins: list[Twin] = field(default_factory=list)
    compared: set[tuple[tuple[Extent, ...], tuple[Extent, ...]]] = field(default_factory=set)
    """Pairs of numbers that are already in `twins`; the parameters of a group share their numbers."""
    scaled: dict[str, float] = field(default_factory=dict)
    """Parameter name -> factor, for weights that ranks store multiplied by a factor."""


def assemble(
    ranks: Sequence[ModelRank], info: UniversalInfo | TableCuts | None, faults: Faults, without: Collection[str] = ()
) -> Stage:
    """Assemble the tensors of a pipeline stage.

    Args:
        ranks: the tensor-parallel ranks of the stage.
        info: source of the tensor-parallel cuts: the metadata in the files, or a table of tensor names; None if there
            is neither.
        faults: list of faults, to which every problem is added.
        without: names of tensors to leave out, such as empty placeholders.
    """
    stage = Stage()
    spreads = _Spreads(info, len(ranks), faults)
    for name in _names(ranks):
        if name in without:
            continue
        shards = [_frozen_or_buffer(rank, name) for rank in ranks]
        if any(name in rank.trained for rank in ranks):
            _add_trained(stage, name, ranks, spreads, faults)
        # Frozen parameters and buffers must exist on every tensor-parallel rank.
        elif all(shard is not None for shard in shards):
            present = [shard for shard in shards if shard is not None]
            buffer = name in ranks[0].models[0].buffers
            _merge_into(stage.weights, name, present, spreads.of(name, present, buffer=buffer), stage, faults)
        if all(name in rank.models[0].module for rank in ranks):
            low = [_dense(rank.models[0].module[name], rank.models[0].file) for rank in ranks]
            # An untrained tensor exists only in the module, so it is both the full-precision and the low-precision
            # weight.
            if name not in ranks[0].trained and name in stage.weights:
                stage.low[name] = stage.weights[name]
            # Under ZeRO-3, the module contains empty placeholders in place of the trained parameters.
            elif any(prod(shard.shape) for shard in low) or not any(name in rank.trained for rank in ranks):
                _merge_into(stage.low, name, low, spreads.of(name, low), stage, faults)
    return stage


def _names(ranks: Sequence[ModelRank]) -> list[str]:
    """Return the names of the stage's tensors in the order of the module, without second names of shared parameters."""
    shared = {alias for rank in ranks for model in rank.models for alias in model.shared}
    names: dict[str, None] = {}
    for rank in ranks:
        first_model = rank.models[0]
        names |= dict.fromkeys([*first_model.module, *rank.trained, *first_model.frozen, *first_model.fragments])
    return [name for name in names if name not in shared]


class _Spreads:
    """Looks up the spread of each parameter (which boxes each rank has) once and remembers it, so that each problem is
    reported only once.
    """

    def __init__(self, info: UniversalInfo | TableCuts | None, ranks: int, faults: Faults) -> None:
        self._info, self._ranks, self._faults = info, ranks, faults
        self._by_shapes: dict[tuple[str, tuple[Shape, ...]], Spread | None] = {}
        self._reported = False

    def of(self, name: str, shards: Sequence[RankShard], *, buffer: bool = False) -> Spread | None:
        """Return the spread of a parameter (which boxes each rank has); if it is unknown, add a fault and
        return None.
        """
        shapes = tuple(shard.shape for shard in shards)
        # A buffer of the module that has the same shape on all ranks counts as replicated, because the metadata lists
        # only parameters.
        if self._ranks == 1 or (buffer and len(set(shapes)) == 1):
            return full_spread(shards)
        key = name, shapes
        if key not in self._by_shapes:
            self._by_shapes[key] = self._look_up(name, shapes, shards[0].file)
        return self._by_shapes[key]

    def _look_up(self, name: str, shapes: Sequence[Shape], file: str) -> Spread | None:
        if self._info is None:
            if not self._reported:
                self._faults.add("UNSUPPORTED", UNKNOWN_CUTS, file, name, HINT)
            self._reported = True
            return None
        try:
            return self._info.spread(name, shapes)
        except TransaxleError as error:
            self._faults.extend(*error.refusals)
            return None


def _add_trained(stage: Stage, name: str, ranks: Sequence[ModelRank], spreads: _Spreads, faults: Faults) -> None:
    """Add a trained parameter to the stage: its weights, optimizer states and numbers."""
    first = next(rank.trained[name] for rank in ranks if name in rank.trained)
    for state in first.states:
        shards = []
        for rank in ranks:
            item = rank.trained.get(name)
            shard = _empty(rank, name, first.states[state].dtype) if item is None else item.states.get(state)
            if shard is None:
                file = rank.models[0].file
                faults.add("INCOMPLETE", f"this rank has no {state} of it, but other ranks do", file, name)
                return
            shards.append(shard)
        spread = spreads.of(name, shards)
        if spread is None:
            return
        if state == keys.FP32:
            _merge_into(stage.weights, name, shards, spread, stage, faults)
            continue
        block = block_with_scale(spread)
        if block is not None:
            faults.extend(*moment_refusal(f"{name}/{state}", block, shards[0].file).refusals)
            continue
        _merge_into(stage.states.setdefault(name, {}), state, shards, spread, stage, faults, shown=f"{name}/{state}")
    stage.states.setdefault(name, {}).update(first.numbers)
    for rank in ranks:
        item = rank.trained.get(name)
        for key, entry in () if item is None or item is first else item.numbers.items():
            first_entry = first.numbers.get(key, entry)
            # All parameters of a group share one stored step, so one comparison is enough.
            if (first_entry.extents, entry.extents) not in stage.compared and first_entry is not entry:
                stage.compared.add((first_entry.extents, entry.extents))
                why = f"{key} of {name} is one number on all tensor-parallel ranks"
                stage.twins.append(Twin(first_entry, entry, why, dates=key == keys.STEP))


def _merge_into(
    into: dict[str, Entry], name: str, shards: Sequence[RankShard], spread: Spread | None, stage: Stage, faults: Faults,
    *, shown: str = "",
) -> None:  # fmt: skip
    """Merge shards into a tensor and store it as `into[name]`; add pairs of copies, which must be equal, to the stage's
    `twins`.
    """
    if spread is None:
        return
    try:
        entry, twins = merge_shards(shown or name, shards, spread)
    except TransaxleError as error:
        faults.extend(*error.refusals)
        return
    into[name] = entry
    stage.twins.extend(twins)
    block = block_with_scale(spread)
    if block is not None:
        if any(other_block.scale != block.scale for blocks in spread.blocks for other_block in blocks):
            faults.add("UNSUPPORTED", "its ranks store it multiplied by different numbers", shards[0].file, name)
        stage.scaled[name] = block.scale


def _empty(rank: ModelRank, name: str, dtype: str) -> RankShard | None:
    """Return an empty shard for a rank that has no elements of a parameter; None if the rank should have elements."""
    model = rank.models[0]
    shape = model.frozen.get(name)
    if shape is None and name in model.module:
        shape = model.module[name].shape
    if shape is None or 0 not in shape:
        return None
    return RankShard(dtype, shape, (), model.file)


def _frozen_or_buffer(rank: ModelRank, name: str) -> RankShard | None:
    """Return a rank's shard of a frozen parameter or buffer; None if the rank has no such tensor."""
    first_model = rank.models[0]
    shape = first_model.frozen.get(name)
    if len(rank.models) > 1 and shape is not None:
        return _gather_frozen(rank.models, name, shape)
    entry = first_model.module.get(name)
    if shape is not None and (entry is None or entry.shape != shape):
        entry = first_model.fragments.get(name, entry)
    if entry is None:
        return None
    if shape is not None and entry.shape != shape:
        size = prod(shape)
        # ZeRO-3 flattens the tensor, even if there is only one data-parallel rank
        if len(rank.models) == 1 and entry.shape == (size,):
            return _gather_frozen(rank.models, name, shape)
        raise refuse(
            "CORRUPT",
            f"it has the shape {list(entry.shape)}, but the file lists {list(shape)}",
            file=first_model.file,
            tensor=name,
        )
    return _dense(entry, first_model.file)


def _dense(entry: Entry, file: str) -> RankShard:
    return RankShard(entry.dtype, entry.shape, entry.extents if prod(entry.shape) else (), file)


def _gather_frozen(models: Sequence[RankModel], name: str, shape: Shape) -> RankShard:
    """Return a frozen parameter that ZeRO-3 stores as equal intervals on the ranks; the last interval includes
    padding.
    """
    size, parts = prod(shape), len(models)
    width = shard_width(size, parts)
    vectors, intervals = [], []
    for dp_rank, model in enumerate(models):
        entry = model.fragments.get(name)
        low, high = min(dp_rank * width, size), min((dp_rank + 1) * width, size)
        length = 0 if entry is None else prod(entry.shape)
        if entry is None or length < high - low or (len(entry.shape) != 1 and length):
            message = f"this rank must hold {high - low} of its {size} elements, but has {length}"
            raise refuse("INCOMPLETE", message, file=model.file, tensor=name)
        extent = entry.extents[0] if entry.extents else Extent((0,), (0,), model.file, 0)
        vectors.append(FlatBuffer(entry.dtype, length, extent.file, extent.offset))
        if low < high:
            intervals.append(FlatInterval(low, high, dp_rank, 0))
    kinds = {vector.dtype for vector in vectors}
    if len(kinds) > 1:
        raise refuse(
            "DTYPE_MIXED", f"its ranks store it in different dtypes: {sorted(kinds)}", file=models[0].file, tensor=name
        )
    return RankShard(vectors[0].dtype, shape, extents(shape, intervals, vectors), models[0].file)
