"""The trained parameters of one model rank, read from its data-parallel ranks' flat buffers.

Every length is checked against the others: the sizes of buffers, paddings and parameters must add up to the last
element, and the map of fragments that a rank stores beside them must be the same map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from transaxle.errors import Code, refuse
from transaxle.formats.catalog import Entry, Twin
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.checked_value import CheckedValue
from transaxle.formats.deepspeed.zero import experts
from transaxle.formats.deepspeed.zero.flat import (
    FlatRun,
    Position,
    Shape,
    Vector,
    extents,
    positions,
    runs,
    shard_width,
)
from transaxle.formats.deepspeed.zero.ranks import RankModel, RankState
from transaxle.formats.deepspeed.zero.shard import RankShard
from transaxle.formats.pickled.descriptors import Object

OF_ONE_RUN = "The folder mixes files of two runs; keep those of one."
"""What to do where files contradict each other."""
_SLACK = 16
"""Elements per rank by which a vector may exceed its parameters: it is padded for alignment."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained parameter on one model rank."""

    group: int
    """Number of its flat buffer."""
    shape: Shape
    states: Mapping[str, RankShard]
    """State -> the rank's shard; `fp32` is the weights."""
    numbers: Mapping[str, Entry]
    """State -> a number, such as `step`."""


def trained(model: RankModel, states: Sequence[RankState]) -> tuple[dict[str, Trained], list[Twin]]:
    """Read the trained parameters of one model rank.

    Args:
        model: its model file.
        states: its optimizer files, in the order of data-parallel ranks.

    Returns:
        the parameters in the order of the buffers, and the numbers that all ranks must agree on.

    Raises:
        Refused: CORRUPT where lengths contradict each other; INCOMPLETE where a state is missing on a rank;
            NAME_COLLISION for a parameter that is there twice.
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
    parameters: dict[str, Trained] = {}
    for group, name, shape, intervals, buffers in _placed_parameters(model, states, zero3=stages == {3}):
        if name in parameters:
            raise refuse("NAME_COLLISION", "it is in two parameter groups", file=model.file, tensor=name)
        shards = {
            state: RankShard(_dtype(state, vectors, states), shape, extents(shape, intervals, vectors), states[0].file)
            for state, vectors in buffers.items()
        }
        parameters[name] = Trained(group, shape, shards, states[0].groups[group].numbers)
    return parameters, list(_steps(parameters, states))


def _check_counts(states: Sequence[RankState]) -> None:
    """Check that all ranks state the same partition counts, one for each group."""
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
    """Return over how many ranks each group is cut; None if the file does not state it."""
    counts = state.root.get(keys.PARTITION_COUNT)
    if counts is None or state.stage == 3:
        return None
    return counts.naturals() if counts.is_list else (counts.natural(),) * len(state.groups)


_PlacedParameter = tuple[int, str, Shape, list[FlatRun], Mapping[str, list[Vector]]]


def _placed_parameters(model: RankModel, states: Sequence[RankState], *, zero3: bool) -> Iterator[_PlacedParameter]:
    """Yield each parameter with its intervals, and the buffers that they count in."""
    if zero3:
        yield from _zero3(model, states)
        return
    if len(model.shapes) != len(states[0].groups):
        message = f"there are {len(model.shapes)} groups of parameters, but {len(states[0].groups)} of flat buffers"
        raise refuse("CORRUPT", message, file=model.file)
    shares = experts.ExpertShares(model, states)
    dealt = _is_dealt(model)
    for group, shapes in enumerate(model.shapes):
        for rank, sharing in enumerate(shares.of(group)):
            buffers = _buffers(sharing, group)
            for place, intervals in _placed(sharing, group, shapes, buffers[keys.FP32], dealt=dealt):
                _check_inside(place, intervals, buffers, sharing)
                yield group, shares.name(place.name, rank), place.shape, intervals, buffers


def _is_dealt(model: RankModel) -> bool:
    """Tell whether the parameters of each group were dealt out to its ranks in turn: `round_robin_gradients`."""
    config = model.root.get(keys.CONFIG)
    zero = None if config is None else config.get(keys.ZERO_CONFIG)
    dealt = None if zero is None else zero.get(keys.ROUND_ROBIN)
    return dealt is not None and dealt.flag()


def _placed(
    states: Sequence[RankState], group: int, shapes: Mapping[str, Shape], masters: Sequence[Vector], *, dealt: bool
) -> Iterator[tuple[Position, list[FlatRun]]]:
    """Yield the parameters of a group with their intervals in the buffers of the ranks that share it."""
    width = _width(states, group, masters)
    places, used = positions(shapes, _paddings(states[0], group, len(shapes)))
    # What is left over must be the padding for alignment: more would mean that shapes and buffers are of different
    # runs.
    slack = width * len(states) - used
    if not 0 <= slack < _SLACK * len(states) or not _adds_up(states, group, slack, _sum(masters) - used):
        message = f"group {group}: its parameters need {used} elements, but its buffers have {width * len(states)}"
        raise refuse("CORRUPT", message, file=states[0].file)
    cut = {place.name: list(runs(place, width, len(states))) for place in places}
    # The shapes are in the order of the buffers. The map of DeepSpeed 0.19.8 is in the order before parameters were
    # dealt out, which its buffers never had.
    places_before, _ = positions(_before_dealing(shapes, len(states)), (0,) * len(shapes)) if dealt else ((), 0)
    cut_before = {place.name: list(runs(place, width, len(states))) for place in places_before}
    _check_map(states, group, cut, cut_before)
    for place in places:
        yield place, cut[place.name]


def _before_dealing(shapes: Mapping[str, Shape], ranks: int) -> dict[str, Shape]:
    """Return parameters in the order that they had before they were dealt out to so many ranks in turn."""
    numbers = [number for rank in range(ranks) for number in range(rank, len(shapes), ranks)]
    return dict(shape for _, shape in sorted(zip(numbers, shapes.items(), strict=True)))


def _buffers(states: Sequence[RankState], group: int) -> dict[str, list[Vector]]:
    """Return state -> every rank's buffer; a rank without one has an empty one."""
    names = dict.fromkeys(name for state in states for name in state.groups[group].vectors)
    nothing = Vector("", 0, "", 0)
    return {name: [state.groups[group].vectors.get(name, nothing) for state in states] for name in names}


def _width(states: Sequence[RankState], group: int, masters: Sequence[Vector]) -> int:
    """Return the elements of each rank's part of a group's vector; the files may have dropped its padding."""
    lengths = [vector.length for vector in masters]
    # Elastic checkpoints store the buffers without their padding. With it added, all parts must be equal again.
    padded = {length + _padding(state, group) for length, state in zip(lengths, states, strict=True)}
    if len(padded) == 1:
        return padded.pop()
    if len(set(lengths)) == 1:
        return lengths[0]
    message = f"group {group}: the ranks' buffers have {lengths[:8]} elements, which are not equal parts"
    raise refuse("CORRUPT", message, file=states[0].file)


def _sum(vectors: Sequence[Vector]) -> int:
    return sum(vector.length for vector in vectors)


def _adds_up(states: Sequence[RankState], group: int, slack: int, more: int) -> bool:
    """Tell whether the elements beyond a group's parameters are its padding; earlier versions record none.

    Args:
        states: the ranks' files.
        group: its number.
        slack: elements of the ranks' equal parts that belong to no parameter.
        more: elements of the stored buffers beyond the parameters.
    """
    if any(state.root.get(keys.GROUP_PADDINGS) is None for state in states):
        return True
    # The recorded paddings must equal what is left over of the equal parts, or of the buffers as they are stored.
    return sum(_padding(state, group) for state in states) in (slack, more)


def _padding(state: RankState, group: int) -> int:
    paddings = state.root.get(keys.GROUP_PADDINGS)
    return 0 if paddings is None else _nth(paddings, group).natural()


def _paddings(state: RankState, group: int, count: int) -> Sequence[int]:
    """Return the padding after each parameter; files of earlier versions have none."""
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
    place: Position, intervals: Sequence[FlatRun], buffers: Mapping[str, Sequence[Vector]], states: Sequence[RankState]
) -> None:
    """Check that a parameter's intervals lie in the buffers that are there."""
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
    cut: Mapping[str, Sequence[FlatRun]],
    cut_before: Mapping[str, Sequence[FlatRun]],
) -> None:
    """Check the ranks' own maps of fragments, where they exist, against the lengths.

    Args:
        states: the ranks' files.
        group: its number.
        cut: parameter -> its intervals.
        cut_before: the same in another order that a map may have; empty where there is none.
    """
    for dp_rank, state in enumerate(states):
        listed = state.root.get(keys.MAPPINGS)
        if listed is None:
            continue
        expected = _fragments(cut, dp_rank)
        recorded = {name: _fragment(node) for name, node in _nth(listed, group).named()}
        # A parameter that a rank does not hold is either absent or recorded with zero elements.
        if cut_before and {name: at for name, at in recorded.items() if at[1]} == _fragments(cut_before, dp_rank):
            continue
        for name in [*expected, *recorded]:
            if expected.get(name, (0, 0)) != recorded.get(name, (0, 0)):
                start, count = expected.get(name, (0, 0))
                said = recorded.get(name)
                message = f"by the lengths it has {count} elements from {start}, but {keys.MAPPINGS} says {said}"
                raise refuse("CORRUPT", message, file=state.file, tensor=name)


def _fragments(cut: Mapping[str, Sequence[FlatRun]], dp_rank: int) -> dict[str, tuple[int, int]]:
    """Return parameter -> where it begins in the buffer of a rank that holds some of it, and how many elements."""
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


def _zero3(model: RankModel, states: Sequence[RankState]) -> Iterator[_PlacedParameter]:
    """Yield the parameters of ZeRO-3: every rank holds an equal run of each, one after the other in its buffers."""
    parts, groups = len(states), len(states[0].groups)
    names = dict.fromkeys(name for state in states for group in state.groups for name in group.vectors)
    nothing = Vector("", 0, "", 0)
    # Flattened to one list, rank by rank and group by group: buffer number rank * groups + group.
    buffers = {name: [group.vectors.get(name, nothing) for state in states for group in state.groups] for name in names}
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
            # The buffers of a rank follow one another: an interval may lie in any of them, or continue in the next.
            for run in _split(min(dp_rank * width, size), min((dp_rank + 1) * width, size), at, ends, dp_rank * groups)
        ]
        place = Position(name, shape, at)
        _check_inside(place, intervals, buffers, [state for state in states for _ in state.groups])
        group = next((number for number, end in enumerate(ends) if at < end), 0)
        yield group, name, shape, intervals, buffers
        # Every rank reserves the same width for a parameter, also where its run is shorter or empty.
        at += width


def _split(start: int, stop: int, at: int, ends: Sequence[int], base: int) -> Iterator[FlatRun]:
    """Yield an interval of a parameter as intervals in the consecutive buffers of its rank."""
    begin = 0
    for number, end in enumerate(ends):
        low, high = max(at, begin), min(at + stop - start, end)
        if low < high:
            yield FlatRun(start + low - at, start + high - at, base + number, low - begin)
        begin = end


def _dtype(state: str, vectors: Sequence[Vector], states: Sequence[RankState]) -> str:
    dtypes = dict.fromkeys(vector.dtype for vector in vectors if vector.dtype)
    if len(dtypes) > 1:
        raise refuse(
            "DTYPE_MIXED", f"its ranks store {state} in different dtypes: {', '.join(dtypes)}", file=states[0].file
        )
    return next(iter(dtypes), "F32")


def _steps(parameters: Mapping[str, Trained], states: Sequence[RankState]) -> Iterator[Twin]:
    """Yield the numbers of each group that every rank keeps, as copies of the first rank's."""
    # Reversed, so that of several parameters of a group the first one remains.
    first = {item.group: name for name, item in reversed(list(parameters.items()))}
    for group, name in first.items():
        for state in states[1:]:
            for key, entry in states[0].groups[group].numbers.items():
                entry_elsewhere = state.groups[group].numbers.get(key)
                if entry_elsewhere is not None:
                    why = f"{key} of the group of {name} is one number on all ranks"
                    yield Twin(entry, entry_elsewhere, why, dates=key == keys.STEP)
