"""Grouped parameters: N tensors under numbered names, or stacked in one; two dialects of one table.

    fc1.weight{e} = t0[x y]      fc1.weight{e}_scale_inv = t1[x y]      fc1.bias{e} = t2[x]
    fc1.weight    = t0[e x y]    fc1.weight_scale_inv    = t1[e x y]    fc1.bias    = t2[e x]

Such a layer may be anywhere in a model, so the table is built for the names at hand, and then used like any other.

Which form is wanted, a layer says itself (`transaxle.nn.expert_relayout`); of a state dict the names do: `weight0`,
`weight1`, … and `bias0`, … are experts, and a stack of them is one where the other side has it in another form.
`arranged` is the one place that tells another number of experts, a part of them, and both forms at once, for
`load_state_dict`, `transaxle.load` and the DCP planners alike. It sees names and shapes only, and runs before anything
is written.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, bind, join_slot, split_slot
from transaxle.axes.layout.relayout import Check, Shape, Stored, identity_target
from transaxle.axes.notation.expression import parse
from transaxle.axes.notation.family import Dialect, Family, Line, LogicalTensor, Sizes
from transaxle.axes.notation.name import Name
from transaxle.axes.translation.translate import Translation, translate
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse

FAMILY = "grouped"
"""Name of the family."""
STORED = "stored"
"""The dialect in which the checkpoint has them."""
WANTED = "wanted"
"""The dialect in which they are asked for."""

Packing = Literal["members", "stack", "rows", "column"]
"""How N tensors are stored: under N names, or in one: stacked `[e x y]`, below each other `[(e x) y]`, as columns `[e
1 x]`.
"""
MEMBERS: Packing = "members"
STACK: Packing = "stack"
ROWS: Packing = "rows"
COLUMN: Packing = "column"

_NUMBERED = re.compile(r"(.*[A-Za-z_])(0|[1-9][0-9]{0,9})((?:_[A-Za-z_]+)?)")


class Stem(msgspec.Struct, frozen=True):
    """N tensors that a checkpoint has in one form and that are wanted in another."""

    name: str
    """Name of the stack; the text before the number in the names of members."""
    rest: str
    """Text after the number: empty, or the name of a buffer such as `_scale_inv`."""
    dims: int
    """Dims of one member."""
    count: int
    """Number of members."""
    stored: Packing
    """How the checkpoint has them."""
    wanted: Packing
    """How they are asked for."""
    copies: tuple[int, ...] = ()
    """Members that the checkpoint also has under names of their own, and that must equal their slice of the stack."""

    @property
    def single(self) -> str:
        """Name of the stack."""
        return f"{self.name}{self.rest}"

    def member(self, place: int) -> str:
        """Return the name of one member."""
        return f"{self.name}{place}{self.rest}"

    @property
    def sources(self) -> list[str]:
        """Names under which the checkpoint has the tensors, copies included."""
        places: Iterable[int] = range(self.count) if self.stored == MEMBERS else self.copies
        return [*([] if self.stored == MEMBERS else [self.single]), *map(self.member, places)]

    @property
    def targets(self) -> list[str]:
        """Names under which the tensors are wanted."""
        return [self.member(place) for place in range(self.count)] if self.wanted == MEMBERS else [self.single]

    def reversed(self) -> Stem:
        """Return the stem that turns the wanted form back into the stored one."""
        return msgspec.structs.replace(self, stored=self.wanted, wanted=self.stored, copies=())


class Numbered(NamedTuple):
    """The name of one of N tensors, split at its number."""

    before: str
    """Text before the number."""
    number: int
    """Which of the N tensors it is."""
    rest: str
    """Text after the number: empty, or the name of a buffer such as `_scale_inv`."""


def numbered(name: str) -> Numbered | None:
    """Split a name at the number of the member; None where there is no number."""
    before, dot, last = name.rpartition(".")
    match = _NUMBERED.fullmatch(last)
    return None if match is None else Numbered(f"{before}{dot}{match[1]}", int(match[2]), match[3])


def stack_name(name: str) -> str:
    """Return the name of the stack that a member's name belongs to; of a name without a number at its end, itself."""
    split = numbered(name)
    return name if split is None or split.rest else split.before


def members_by_stack(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return the numbered names, states of optimizers among them: name of the stack -> number -> name.

    Buffers (`weight0_scale_inv`) belong to a stack of their own, `weight_scale_inv`.
    """
    stacks: dict[str, dict[int, str]] = {}
    for name in names:
        parameter, slot = split_slot(name)
        split = numbered(parameter)
        if split is not None:
            stacks.setdefault(join_slot(f"{split.before}{split.rest}", slot), {})[split.number] = name
    return stacks


def table(stems: Sequence[Stem]) -> Family:
    """Return the family of these tensors, with both dialects."""
    tensors, stored, wanted = {}, [], []
    # Axes carry the number of their stem: two layers with different sizes must not share one axis.
    axes: dict[str, None] = {}
    for at, stem in enumerate(stems):
        name, number, dims = f"t{at}", f"e{at}", [f"x{at}_{dim}" for dim in range(stem.dims)]
        tensors[name] = LogicalTensor(name, (number, *dims))
        axes.update(dict.fromkeys([number, *dims]))
        stored.append(_line(stem, stem.stored, name, number, dims))
        if stem.copies:  # states of an optimizer may be under either name
            stored.append(_line(stem, MEMBERS, name, number, dims))
        wanted.append(_line(stem, stem.wanted, name, number, dims))
    dialects = (Dialect(STORED, None, tuple(stored)), Dialect(WANTED, None, tuple(wanted)))
    return Family(FAMILY, (), dict(axes), tensors, dialects=dialects)


def sizes(stems: Sequence[Stem]) -> dict[str, int]:
    """Return the sizes of the table's axes that names do not tell."""
    return {f"e{place}": stem.count for place, stem in enumerate(stems)}


def _line(stem: Stem, form: Packing, name: str, number: str, dims: Sequence[str]) -> Line:
    inner = " ".join(dims)
    if form == MEMBERS:
        return Line(Name(f"{stem.name}{{{number}}}{stem.rest}"), parse(f"{name}[{inner}]"))
    packed = {
        STACK: f"{name}[{number} {inner}]",
        ROWS: f"{name}[{' '.join([f'({number} {dims[0]})', *dims[1:]]) if dims else number}]",
        COLUMN: f"{name}[{number} 1 {inner}]",
    }[form]
    return Line(Name(stem.single), parse(packed))


class MemberCopy(msgspec.Struct, frozen=True):
    """A tensor that a checkpoint has under the name of a member, and in the stack too."""

    name: str
    """Name of the member, or of a state of it."""
    stack: str
    """Name of the stack, or of the same state of it."""
    stem: Stem
    """The set that the member belongs to."""
    place: int
    """Its number."""

    @property
    def why(self) -> str:
        """Why both must be equal, as messages say it."""
        return f"{self.stack} and {self.name} both hold expert {self.place}"


def member_copies(stems: Iterable[Stem], names: Collection[str]) -> list[MemberCopy]:
    """Return the members, and the states of members, that are stacked too.

    Args:
        stems: the sets of tensors that change form.
        names: the names of a checkpoint.
    """
    members = {stem.member(place): (stem, place) for stem in stems for place in stem.copies}
    copies = []
    for name in names if members else ():
        parameter, slot = split_slot(name)
        if parameter in members:
            stem, place = members[parameter]
            stack = join_slot(stem.single, slot)
            copies += [MemberCopy(name, stack, stem, place)] if stack in names else []
    return copies


def without_copies(stems: Sequence[Stem], names: Iterable[str]) -> list[str]:
    """Return the names of stored tensors without the copies of members that are stacked too."""
    unique_names = dict.fromkeys(names)
    copies = {copy.name for copy in member_copies(stems, unique_names)}
    return [name for name in unique_names if name not in copies]


def copy_checks(stems: Sequence[Stem], stored: Mapping[str, Stored]) -> tuple[list[Check], list[Refusal]]:
    """Return the checks that what a checkpoint has in both forms is equal, and what cannot be.

    Args:
        stems: the sets of tensors that change form.
        stored: the checkpoint's tensors by name.
    """
    copies = member_copies(stems, stored)
    # Each copy is compared with its slice of the stack: the stack is expressed as members, and the member's own tensor
    # must equal that.
    regroupings = [
        msgspec.structs.replace(stem, wanted=MEMBERS, copies=()) for stem in dict.fromkeys(copy.stem for copy in copies)
    ]
    singles = {stem.single for stem in regroupings}
    stacks = {name: tensor for name, tensor in stored.items() if regroupings and split_slot(name)[0] in singles}
    members = regrouped(regroupings, stacks).targets if regroupings else {}
    checks, problems = [], []
    for copy in copies:
        own_target, member = identity_target(copy.name, stored[copy.name]), members[copy.name]
        if (own_target.dtype, own_target.shape) != (member.dtype, member.shape):
            kinds = " and ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in (member, own_target))
            problems.append(Refusal("UNEQUAL_COPIES", f"{copy.why}\nbut they are {kinds}", Where(None, copy.name)))
        else:
            checks.append(Check(own_target, member, copy.why))
    return checks, problems


def regrouped(stems: Sequence[Stem], stored: Mapping[str, Stored]) -> Translation:
    """Express what is stored in the other dialect of the table; other names are kept.

    Args:
        stems: the sets of tensors that change form.
        stored: the tensors by name, states of an optimizer among them.
    """
    family = table(stems)
    axis_sizes = Sizes(family, {}, sizes(stems))
    source, target = family.dialects
    translation = translate(bind(without_copies(stems, stored), family, source, axis_sizes), stored, target, axis_sizes)
    checks, problems = copy_checks(stems, stored)
    return replace(translation, checks=(*translation.checks, *checks), refusals=(*translation.refusals, *problems))


def parameters(names: Iterable[str]) -> Iterable[str]:
    """Return the names that are no states of an optimizer."""
    return (name for name in names if split_slot(name)[1] == WEIGHT)


_EXPERTS = {"weight": 2, "bias": 1}
"""Last segments of the names of grouped layers' parameters, with the dims of one expert's."""
_OTHER_COUNT = "build the layer with as many experts as the checkpoint has"
_LACKING = "check whether a file of the checkpoint is missing"
_Places = Mapping[tuple[str, str], Mapping[int, str]]
"""(text before the number, text after it) -> number -> name."""


class ExpertSet(msgspec.Struct, frozen=True):
    """N tensors of one shape that are wanted, under N names or as one stack."""

    name: str
    """Name of the stack; the text before the number in the names of members."""
    rest: str
    """Text after the number: empty, or the name of a buffer such as `_scale_inv`."""
    count: int
    """Number of tensors."""
    shape: Shape
    """Shape of one of them."""
    single: bool
    """Whether they are wanted as one stack."""
    own: range | None = None
    """Numbers of those that this rank wants; None: all."""
    sure: bool = True
    """Whether they are known to be experts. If so, a set that does not fit is refused; else its names are left alone.
    """

    @property
    def whole(self) -> str:
        """Name of the stack."""
        return f"{self.name}{self.rest}"

    @property
    def names(self) -> list[str]:
        """Names that are wanted."""
        return [self.whole] if self.single else [f"{self.name}{place}{self.rest}" for place in self.needed]

    @property
    def needed(self) -> range:
        """Numbers that must be present where the checkpoint has them under N names."""
        return range(self.count) if self.single or self.own is None else self.own


class Arranged(msgspec.Struct, frozen=True):
    """How a checkpoint holds the wanted experts."""

    stems: tuple[Stem, ...]
    """Sets that the checkpoint has in another form, or in both; sets that it has as wanted are left out."""
    problems: tuple[Refusal, ...]
    """SHAPE_MISMATCH for another number of experts, naming both; INCOMPLETE for a part of them, naming those that lack;
    UNSUPPORTED for scales that experts share."""
    broken: frozenset[str]
    """Names, on both sides, of the sets with problems."""

    def checked(self) -> tuple[Stem, ...]:
        """Return the sets that change form.

        Raises:
            Refused: the problems.
        """
        if self.problems:
            raise gathered(self.problems)
        return self.stems


def groups(wanted: Mapping[str, Shape], stored: Mapping[str, Shape]) -> list[ExpertSet]:
    """Return the sets of experts among the wanted tensors, as far as names tell.

    Args:
        wanted: names and whole shapes of what is asked for, without optimizer state.
        stored: the same of the checkpoint.
    """
    wanted_places, stored_places = _places(wanted), _places(stored)
    sets: dict[tuple[str, str], ExpertSet] = {}
    for (before, rest), places in wanted_places.items():
        shapes = {wanted[name] for name in places.values()}
        if len(shapes) == 1 and max(places) + 1 == len(places) and f"{before}{rest}" not in wanted:
            sets[before, rest] = ExpertSet(before, rest, len(places), shapes.pop(), False, sure=_is_expert(before))
    for (before, rest), places in stored_places.items():
        shape = wanted.get(f"{before}{rest}", ())
        if shape and (before, rest) not in wanted_places:
            fits = rest != "" or any(len(stored[name]) == len(shape) - 1 for name in places.values())
            sets[before, rest] = ExpertSet(before, rest, shape[0], shape[1:], True, sure=fits and _is_expert(before))
    for before in [name for name in wanted if (name, "") not in sets and _packed_otherwise(name, wanted, stored)]:
        beside = {name.removeprefix(before): shape for name, shape in wanted.items() if _is_beside(before, name)}
        sets |= {(before, rest): ExpertSet(before, rest, s[0], s[1:], True) for rest, s in beside.items() if s}
    return list(sets.values())


def arranged(wanted: Sequence[ExpertSet], stored: Mapping[str, Shape]) -> Arranged:
    """Find out how a checkpoint holds the wanted experts.

    Args:
        wanted: the sets of experts.
        stored: names and whole shapes of the checkpoint's tensors.
    """
    stored_places = _places(stored)
    stems: dict[tuple[str, str], Stem] = {}
    problems: list[Refusal] = []
    broken: set[str] = set()
    for experts in wanted:
        members = stored_places.get((experts.name, experts.rest), {})
        try:
            stem = _stem(experts, members, stored)
        except TransaxleError as error:
            if experts.sure:
                problems += error.refusals
                broken.update((*experts.names, experts.whole, *members.values()))
            continue
        if stem is not None:
            stems[experts.name, experts.rest] = stem
    for stem in list(stems.values()):
        if not stem.rest and stem.stored != stem.wanted:
            stems = {
                **stems,
                **{pair: buffer for pair, buffer in _beside(stem, stored_places, stored).items() if pair not in stems},
            }
    return Arranged(tuple(stems.values()), tuple(problems), frozenset(broken))


def between(wanted: Mapping[str, Shape], stored: Mapping[str, Shape], *, shared_out: bool = True) -> Arranged:
    """Find out how one side holds the experts that the other wants; both may have states of optimizers.

    Args:
        wanted: names and shapes of what is asked for.
        stored: names and shapes of what there is.
        shared_out: other ranks may want other experts, so a checkpoint may have more of them than are wanted.
    """
    parameters_wanted, parameters_stored = parameter_shapes(wanted), parameter_shapes(stored)
    sets = groups(parameters_wanted, parameters_stored)
    if not shared_out:
        return arranged(sets, parameters_stored)
    names = parameters_stored.keys()
    parts = _parts(parameters_wanted, parameters_stored)
    of_parts = {each.whole for each in parts}
    sets = [each for each in sets if each.single or each.whole in names or not names >= {*each.names}]
    found = arranged([*parts, *(each for each in sets if each.whole not in of_parts)], parameters_stored)
    # What is wanted of a part is there as it is wanted; it is the copies that count.
    stems = (replace(stem, stored=MEMBERS) if stem.single in of_parts else stem for stem in found.stems)
    return replace(found, stems=tuple(stems))


def _parts(wanted: Mapping[str, Shape], stored: Mapping[str, Shape]) -> list[ExpertSet]:
    """Return the sets of which some experts are wanted, under names that the checkpoint has beside a stack of all."""
    stored_places, parts = _places(stored), list[ExpertSet]()
    for (before, rest), places in _places(wanted).items():
        there, whole = stored_places.get((before, rest), {}), f"{before}{rest}"
        if whole in stored and whole not in wanted and places.keys() < there.keys():
            shape = wanted[places[min(places)]]
            parts.append(ExpertSet(before, rest, max(there) + 1, shape, False, sure=_is_expert(before)))
    return parts


def _places(names: Iterable[str]) -> _Places:
    places: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in parameters(names):
        split = numbered(name)
        if split is not None:
            places[split.before, split.rest][split.number] = name
    return places


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


def _stem(experts: ExpertSet, members: Mapping[int, str], stored: Mapping[str, Shape]) -> Stem | None:
    """Return how a checkpoint holds one set; None if it has the set as wanted, or not at all.

    Raises:
        Refused: see `Arranged`.
    """
    single = stored.get(experts.whole)
    if not experts.sure and (single is not None if experts.single else bool(members)):
        return None
    wanted = STACK if experts.single else MEMBERS
    if single is None:
        if members:
            _check_all(experts, members)
        as_wanted = not members or not experts.single
        return (
            None
            if as_wanted
            else Stem(experts.name, experts.rest, len(stored[members[0]]), experts.count, MEMBERS, wanted)
        )
    form = _packing(experts, single)
    if not experts.sure and form != STACK:
        return None
    if members and max(members) >= experts.count:
        raise _count(experts, f"at least {max(members) + 1}")
    if form == wanted and not members:
        return None
    dims = len(single) - {STACK: 1, ROWS: 0, COLUMN: 2, MEMBERS: 0}[form]
    return Stem(experts.name, experts.rest, dims, experts.count, form, wanted, tuple(sorted(members)))


def _packing(experts: ExpertSet, single: Shape) -> Packing:
    """Tell how one tensor holds N: by its shape if that matches, else by its number of dims.

    A checkpoint of values may fill a set of codes: its rows are as many, but their lengths differ.

    Raises:
        Refused: SHAPE_MISMATCH where it holds another number; UNSUPPORTED for scales that N experts share.
    """
    count, shape = experts.count, experts.shape
    exact: dict[Packing, Shape] = {STACK: (count, *shape)}
    if shape:
        exact[ROWS] = (count * shape[0], *shape[1:])
    if len(shape) == 1:
        exact[COLUMN] = (count, 1, *shape)
    for form, shape_of_packing in exact.items():
        if single == shape_of_packing:
            return form
    more = len(single) - len(shape)
    if experts.rest and (not single or single[0] != count or more != 1):
        message = f"{list(single)} is not one scale for each of {count} experts"
        raise refuse("UNSUPPORTED", message, tensor=experts.whole, hint="Quantize each expert's weight by itself.")
    if more == 1:
        if single[0] != count:
            raise _count(experts, str(single[0]))
        return STACK
    if more == 0 and shape:
        if single[0] != count * shape[0]:
            whole_ones = bool(shape[0]) and not single[0] % shape[0]
            raise _count(
                experts, str(single[0] // shape[0]) if whole_ones else f"{single[0]} rows, not a whole number of"
            )
        return ROWS
    if more == 2 and single[1:] == (1, *shape):
        raise _count(experts, str(single[0]))
    message = f"{list(single)} are not {count} experts of {list(shape)}"
    raise refuse("SHAPE_MISMATCH", message, tensor=experts.whole, hint=_OTHER_COUNT)


def _check_all(experts: ExpertSet, members: Mapping[int, str]) -> None:
    """Refuse another number of experts than the layer's, and a set without some that are needed.

    Raises:
        Refused: SHAPE_MISMATCH, INCOMPLETE.
    """
    lacking = sorted(set(experts.needed) - members.keys())
    extra = sorted(members.keys() - set(range(experts.count)))
    if not lacking and not extra:
        return
    if sorted(members) == list(range(len(members))):
        raise _count(experts, str(len(members)), f"; {_listed(lacking)} are missing" if lacking else "")
    complaints = [f"experts {_listed(lacking)} of {experts.count} are missing"] if lacking else []
    complaints += [f"there are experts {_listed(extra)}, but the layer has {experts.count}"] if extra else []
    message = f"{len(members)} experts: {'; '.join(complaints)}"
    raise refuse("INCOMPLETE", message, tensor=experts.whole, hint=_LACKING)


def _count(experts: ExpertSet, stored_count: str, more: str = "") -> TransaxleError:
    message = f"the checkpoint has {stored_count} experts, the layer {experts.count}{more}"
    return refuse("SHAPE_MISMATCH", message, tensor=experts.whole, hint=_OTHER_COUNT)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _beside(stem: Stem, stored_places: _Places, stored: Mapping[str, Shape]) -> dict[tuple[str, str], Stem]:
    """Return the buffers that follow codes into their other form, including those that nobody asks for."""
    buffers = {}
    if stem.stored == MEMBERS:
        for (before, rest), members in stored_places.items():
            if before == stem.name and len(members) == stem.count == max(members) + 1:
                buffers[before, rest] = replace(stem, rest=rest, dims=len(stored[members[0]]))
        return buffers
    for name, shape in stored.items():
        if name.startswith(f"{stem.name}_") and "." not in name.removeprefix(stem.name) and shape:
            rest = name.removeprefix(stem.name)
            if shape[0] == stem.count:
                copies = tuple(sorted(stored_places.get((stem.name, rest), ())))
                buffers[stem.name, rest] = replace(stem, rest=rest, dims=len(shape) - 1, stored=STACK, copies=copies)
    return buffers


def parameter_shapes(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return names and shapes of the parameters, including those that only their optimizer states reveal."""
    shapes: dict[str, Shape] = {}
    for name, shape in tensors.items():
        parameter, slot = split_slot(name)
        if slot == WEIGHT or (parameter not in tensors and len(shapes.get(parameter, ())) <= len(shape)):
            shapes[parameter] = shape
    return shapes
