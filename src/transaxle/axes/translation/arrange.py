"""Arranging: how a checkpoint holds the experts that are wanted, and what is wrong with the set of them.

The one place that tells another number of experts, a part of them, and both forms at once, for `load_state_dict`,
`transaxle.load` and the DCP planners alike. It sees names and shapes only, and runs before anything is written. A layer
says itself what it wants (`transaxle.nn.checkpoints.remap`); of a state dict the names do: `weight0`, `weight1`, …
and `bias0`, … are experts, and a stack of them is one where the other side has it in another form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.solve import Shape
from transaxle.axes.translation.grouped import COLUMN, MEMBERS, ROWS, STACK, Form, Stem, numbered, parameters
from transaxle.errors import Refusal, TransaxleError, refuse

_EXPERTS = {"weight": 2, "bias": 1}
"""Last parts of the names of grouped layers' parameters, and the dims of one expert's."""
_OTHER_COUNT = "build the layer with as many experts as the checkpoint has"
_LACKING = "is a file of the checkpoint missing?"
_Places = Mapping[tuple[str, str], Mapping[int, str]]
"""(what is before the number, what follows) -> number -> name."""


@dataclass(frozen=True, slots=True)
class Group:
    """N tensors of one shape that are wanted, under N names or as one."""

    name: str
    """Name of the one; of the others what is before the number."""
    rest: str
    """What follows: nothing, or the name of a buffer, `_scale_inv`."""
    count: int
    """N."""
    shape: Shape
    """Of one of them."""
    single: bool
    """Whether all are one tensor."""
    own: range | None = None
    """Of N tensors, those that are wanted here; None: all."""
    sure: bool = True
    """Whether it is known to be experts: then a set that does not fit is refused, and else left to its names."""

    @property
    def whole(self) -> str:
        """Name of the one."""
        return f"{self.name}{self.rest}"

    @property
    def names(self) -> list[str]:
        """The names that are wanted."""
        return [self.whole] if self.single else [f"{self.name}{place}{self.rest}" for place in self.needed]

    @property
    def needed(self) -> range:
        """Numbers of those that have to be there, where they are under N names."""
        return range(self.count) if self.single or self.own is None else self.own


@dataclass(frozen=True, slots=True)
class Arranged:
    """How a checkpoint holds what is wanted."""

    stems: tuple[Stem, ...]
    """What is there in another form, or in both; what is there as it is wanted is not among them."""
    problems: tuple[Refusal, ...]
    """SHAPE_MISMATCH for another number of experts, naming both; INCOMPLETE for a part of them, naming those that lack;
    UNSUPPORTED for scales that experts share."""
    broken: frozenset[str]
    """Names, of both sides, of the groups that the problems are of."""


def groups(wanted: Mapping[str, Shape], stored: Mapping[str, Shape]) -> list[Group]:
    """Return what is grouped of the tensors wanted, as far as names tell.

    Args:
        wanted: names and whole shapes of what is asked for, without optimizer state.
        stored: the same of the checkpoint.
    """
    mine, theirs = _places(wanted), _places(stored)
    found: dict[tuple[str, str], Group] = {}
    for (before, rest), places in mine.items():
        shapes = {wanted[name] for name in places.values()}
        if len(shapes) == 1 and max(places) + 1 == len(places) and f"{before}{rest}" not in wanted:
            found[before, rest] = Group(before, rest, len(places), shapes.pop(), False, sure=_is_expert(before))
    for (before, rest), places in theirs.items():
        shape = wanted.get(f"{before}{rest}", ())
        if shape and (before, rest) not in mine:
            alike = rest != "" or any(len(stored[name]) == len(shape) - 1 for name in places.values())
            found[before, rest] = Group(before, rest, shape[0], shape[1:], True, sure=alike and _is_expert(before))
    for before in [name for name in wanted if (name, "") not in found and _packed_otherwise(name, wanted, stored)]:
        beside = {name.removeprefix(before): shape for name, shape in wanted.items() if _is_beside(before, name)}
        found |= {(before, rest): Group(before, rest, s[0], s[1:], True) for rest, s in beside.items() if s}
    return list(found.values())


def arranged(wanted: Sequence[Group], stored: Mapping[str, Shape]) -> Arranged:
    """Find out how a checkpoint holds what is wanted.

    Args:
        wanted: the groups.
        stored: names and whole shapes of the checkpoint's tensors.
    """
    theirs = _places(stored)
    stems: dict[tuple[str, str], Stem] = {}
    problems: list[Refusal] = []
    broken: set[str] = set()
    for group in wanted:
        members = theirs.get((group.name, group.rest), {})
        try:
            stem = _stem(group, members, stored)
        except TransaxleError as error:
            if group.sure:
                problems += error.refusals
                broken.update((*group.names, group.whole, *members.values()))
            continue
        if stem is not None:
            stems[group.name, group.rest] = stem
    for stem in list(stems.values()):
        if not stem.rest and stem.stored != stem.wanted:
            stems = {**stems, **{pair: one for pair, one in _beside(stem, theirs, stored).items() if pair not in stems}}
    return Arranged(tuple(stems.values()), tuple(problems), frozenset(broken))


def _places(names: Iterable[str]) -> _Places:
    found: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in parameters(names):
        split = numbered(name)
        if split is not None:
            found[split[0], split[2]][split[1]] = name
    return found


def _is_expert(before: str) -> bool:
    return before.rpartition(".")[2] in _EXPERTS


def _is_beside(before: str, name: str) -> bool:
    return name == before or (name.startswith(f"{before}_") and "." not in name.removeprefix(before))


def _packed_otherwise(name: str, wanted: Mapping[str, Shape], stored: Mapping[str, Shape]) -> bool:
    """Tell whether both sides have experts in one tensor, the checkpoint with fewer dims, or as columns.

    Only what can be the same rows, of whole experts: any other shape is just another shape.
    """
    dims, mine, theirs = _EXPERTS.get(name.rpartition(".")[2]), wanted[name], stored.get(name)
    if theirs is None or dims is None or len(mine) != dims + 1:
        return False
    whole_ones = theirs[1:] == mine[2:] and bool(mine[1]) and not theirs[0] % mine[1]
    below = len(theirs) == dims and (whole_ones or theirs[0] == mine[0] * mine[1])  # of values for codes: as many rows
    return below or (dims == 1 and len(theirs) == dims + 2 and theirs[1:] == (1, mine[1]))


def _stem(group: Group, members: Mapping[int, str], stored: Mapping[str, Shape]) -> Stem | None:
    """Return how one group is there; None where it is as it is wanted, or not at all.

    Raises:
        Refused: see `Arranged`.
    """
    one = stored.get(group.whole)
    if not group.sure and (one is not None if group.single else bool(members)):
        return None
    wanted = STACK if group.single else MEMBERS
    if one is None:
        if members:
            _check_all(group, members)
        as_wanted = not members or not group.single
        return (
            None if as_wanted else Stem(group.name, group.rest, len(stored[members[0]]), group.count, MEMBERS, wanted)
        )
    form = _form(group, one)
    if not group.sure and form != STACK:
        return None
    if members and max(members) >= group.count:
        raise _count(group, f"at least {max(members) + 1}")
    if form == wanted and not members:
        return None
    dims = len(one) - {STACK: 1, ROWS: 0, COLUMN: 2, MEMBERS: 0}[form]
    return Stem(group.name, group.rest, dims, group.count, form, wanted, tuple(sorted(members)))


def _form(group: Group, one: Shape) -> Form:
    """Tell how one tensor holds N: by its shape where that is the group's, else by the number of its dims.

    A checkpoint of values may fill a group of codes, whose rows are as many, but shorter.

    Raises:
        Refused: SHAPE_MISMATCH where it holds another number; UNSUPPORTED for scales that N experts share.
    """
    count, shape = group.count, group.shape
    exact: dict[Form, Shape] = {STACK: (count, *shape)}
    if shape:
        exact[ROWS] = (count * shape[0], *shape[1:])
    if len(shape) == 1:
        exact[COLUMN] = (count, 1, *shape)
    for form, whole in exact.items():
        if one == whole:
            return form
    more = len(one) - len(shape)
    if group.rest and (not one or one[0] != count or more != 1):
        message = f"{list(one)} are not the scales of {count} experts, each with its own"
        raise refuse("UNSUPPORTED", message, tensor=group.whole, hint="quantize each expert's weight by itself")
    if more == 1:
        if one[0] != count:
            raise _count(group, str(one[0]))
        return STACK
    if more == 0 and shape:
        if one[0] != count * shape[0]:
            whole_ones = bool(shape[0]) and not one[0] % shape[0]
            raise _count(group, str(one[0] // shape[0]) if whole_ones else f"{one[0]} rows, no whole number of")
        return ROWS
    if more == 2 and one[1:] == (1, *shape):
        raise _count(group, str(one[0]))
    message = f"{list(one)} are not {count} experts of {list(shape)}"
    raise refuse("SHAPE_MISMATCH", message, tensor=group.whole, hint=_OTHER_COUNT)


def _check_all(group: Group, members: Mapping[int, str]) -> None:
    """Refuse another number of experts than the layer's, and a set without some that are needed.

    Raises:
        Refused: SHAPE_MISMATCH, INCOMPLETE.
    """
    lacking = sorted(set(group.needed) - members.keys())
    more = sorted(members.keys() - set(range(group.count)))
    if not lacking and not more:
        return
    if sorted(members) == list(range(len(members))):
        raise _count(group, str(len(members)), f"; {_listed(lacking)} lack" if lacking else "")
    said = [f"experts {_listed(lacking)} of {group.count} lack"] if lacking else []
    said += [f"there are experts {_listed(more)}, the layer has {group.count}"] if more else []
    message = f"{len(members)} experts: {'; '.join(said)}"
    raise refuse("INCOMPLETE", message, tensor=group.whole, hint=_LACKING)


def _count(group: Group, found: str, more: str = "") -> TransaxleError:
    message = f"the checkpoint has {found} experts, the layer {group.count}{more}"
    return refuse("SHAPE_MISMATCH", message, tensor=group.whole, hint=_OTHER_COUNT)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _beside(stem: Stem, theirs: _Places, stored: Mapping[str, Shape]) -> dict[tuple[str, str], Stem]:
    """Return the buffers that go with codes to their other form, those that nobody asks for included."""
    found = {}
    if stem.stored == MEMBERS:
        for (before, rest), members in theirs.items():
            if before == stem.name and len(members) == stem.count == max(members) + 1:
                found[before, rest] = replace(stem, rest=rest, dims=len(stored[members[0]]))
        return found
    for name, shape in stored.items():
        if name.startswith(f"{stem.name}_") and "." not in name.removeprefix(stem.name) and shape:
            rest = name.removeprefix(stem.name)
            if shape[0] == stem.count:
                copies = tuple(sorted(theirs.get((stem.name, rest), ())))
                found[stem.name, rest] = replace(stem, rest=rest, dims=len(shape) - 1, stored=STACK, copies=copies)
    return found


def parameter_shapes(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return names and shapes of parameters, of those too that are known by their states only."""
    found: dict[str, Shape] = {}
    for name, shape in tensors.items():
        parameter, slot = split_slot(name)
        if slot == WEIGHT or (parameter not in tensors and len(found.get(parameter, ())) <= len(shape)):
            found[parameter] = shape
    return found
