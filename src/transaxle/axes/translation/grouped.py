"""Expert tensors that are stored as N tensors with numbered names or as one stacked tensor: both forms as dialects.

    fc1.weight{e} = t0[x y]      fc1.weight{e}_scale_inv = t1[x y]      fc1.bias{e} = t2[x]
    fc1.weight    = t0[e x y]    fc1.weight_scale_inv    = t1[e x y]    fc1.bias    = t2[e x]

A grouped layer may have any name in a model, so a table of mapping rules is built for the names that occur, and used
like other tables. A layer declares which form it requires (`transaxle.nn.expert_relayout`). In a state dict the names
show the form: `weight0`, `weight1`, … and `bias0`, … are experts. A single tensor is a stack of experts if the
checkpoint has the same parameter as numbered tensors.

`load_state_dict`, `transaxle.load` and the DCP planners all call `arrange`, which detects a wrong number of experts,
missing experts, and experts that are stored in both forms. `arrange` reads only names and shapes, and runs before
anything is written.
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
"""Name of the model family in the table that this module builds."""
STORED = "stored"
"""Name of the dialect for the layout in which the checkpoint has the experts."""
WANTED = "wanted"
"""Name of the dialect for the layout in which the experts are requested."""

Packing = Literal["members", "stack", "rows", "column"]
"""How N expert tensors are stored: `members` means N tensors; `stack` `[e x y]`, `rows` `[(e x) y]` and `column` `[e 1
x]` mean one tensor with these dims.
"""
MEMBERS: Packing = "members"
STACK: Packing = "stack"
ROWS: Packing = "rows"
COLUMN: Packing = "column"

_NUMBERED = re.compile(r"(.*[A-Za-z_])(0|[1-9][0-9]{0,9})((?:_[A-Za-z_]+)?)")


class Regrouping(msgspec.Struct, frozen=True):
    """N expert tensors that the checkpoint stores in one form (such as a stack) and that are requested in a different
    form.
    """

    name: str
    """Name of the stacked tensor, and also the text before the number in the names of the N tensors."""
    suffix: str
    """Text after the number in the names of the N tensors: empty, or the ending of a buffer's name such as
    `_scale_inv`.
    """
    dims: int
    """Number of dims of one expert's tensor."""
    count: int
    """Number of experts."""
    stored: Packing
    """Form in which the checkpoint has the tensors: one of the values of `Packing`."""
    requested: Packing
    """Form in which the tensors are requested: one of the values of `Packing`."""
    copies: tuple[int, ...] = ()
    """Numbers of the experts that the checkpoint has twice, in the stack and under their own names; the two must be
    equal.
    """

    @property
    def single(self) -> str:
        """Name of the stacked tensor, including the suffix."""
        return f"{self.name}{self.suffix}"

    def member(self, place: int) -> str:
        """Return the name of the tensor of expert number `place`."""
        return f"{self.name}{place}{self.suffix}"

    @property
    def sources(self) -> list[str]:
        """Names of the group's tensors in the checkpoint, including numbered tensors that the stack contains too."""
        places: Iterable[int] = range(self.count) if self.stored == MEMBERS else self.copies
        return [*([] if self.stored == MEMBERS else [self.single]), *map(self.member, places)]

    @property
    def targets(self) -> list[str]:
        """Names of the group's tensors in the requested form (one name, or N names)."""
        return [self.member(place) for place in range(self.count)] if self.requested == MEMBERS else [self.single]

    def invert(self) -> Regrouping:
        """Return the inverse change of form: from the requested form back to the stored form."""
        return msgspec.structs.replace(self, stored=self.requested, requested=self.stored, copies=())


class NumberedName(NamedTuple):
    """The name of one of N expert tensors, split at the expert's number."""

    before: str
    """Text before the number in the name."""
    number: int
    """Number of the expert."""
    suffix: str
    """Text after the number in the name: empty, or the ending of a buffer's name such as `_scale_inv`."""


def split_number(name: str) -> NumberedName | None:
    """Split a tensor name at the expert's number; None if the name has no number."""
    before, dot, last = name.rpartition(".")
    match = _NUMBERED.fullmatch(last)
    return None if match is None else NumberedName(f"{before}{dot}{match[1]}", int(match[2]), match[3])


def stack_name(name: str) -> str:
    """Return the name of the stack that a numbered tensor is a slice of; other names are returned unchanged."""
    split = split_number(name)
    return name if split is None or split.suffix else split.before


def members_by_stack(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return stack name -> number -> tensor name, for all numbered names, including names of optimizer states.

    Buffers such as `weight0_scale_inv` belong to a separate stack, `weight_scale_inv`.
    """
    stacks: dict[str, dict[int, str]] = {}
    for name in names:
        parameter, slot = split_slot(name)
        split = split_number(parameter)
        if split is not None:
            stacks.setdefault(join_slot(f"{split.before}{split.suffix}", slot), {})[split.number] = name
    return stacks


def table(stems: Sequence[Regrouping]) -> Family:
    """Build the table of mapping rules for expert tensors: a family with one dialect for each of the two forms."""
    tensors, stored, requested_lines = {}, [], []
    # Axis names end with the number of their group, because two layers of different sizes must not share an axis.
    axes: dict[str, None] = {}
    for at, stem in enumerate(stems):
        name, number, dims = f"t{at}", f"e{at}", [f"x{at}_{dim}" for dim in range(stem.dims)]
        tensors[name] = LogicalTensor(name, (number, *dims))
        axes.update(dict.fromkeys([number, *dims]))
        stored.append(_line(stem, stem.stored, name, number, dims))
        if stem.copies:  # optimizer states may be stored under the numbered names too
            stored.append(_line(stem, MEMBERS, name, number, dims))
        requested_lines.append(_line(stem, stem.requested, name, number, dims))
    dialects = (Dialect(STORED, None, tuple(stored)), Dialect(WANTED, None, tuple(requested_lines)))
    return Family(FAMILY, (), dict(axes), tensors, dialects=dialects)


def sizes(stems: Sequence[Regrouping]) -> dict[str, int]:
    """Return axis -> size, for the axes in the built table whose sizes the tensor names do not show."""
    return {f"e{place}": stem.count for place, stem in enumerate(stems)}


def _line(stem: Regrouping, form: Packing, name: str, number: str, dims: Sequence[str]) -> Line:
    inner = " ".join(dims)
    if form == MEMBERS:
        return Line(Name(f"{stem.name}{{{number}}}{stem.suffix}"), parse(f"{name}[{inner}]"))
    packed = {
        STACK: f"{name}[{number} {inner}]",
        ROWS: f"{name}[{' '.join([f'({number} {dims[0]})', *dims[1:]]) if dims else number}]",
        COLUMN: f"{name}[{number} 1 {inner}]",
    }[form]
    return Line(Name(stem.single), parse(packed))


class MemberCopy(msgspec.Struct, frozen=True):
    """An expert's tensor that a checkpoint contains twice: under its own numbered name, and as a slice of the stack."""

    name: str
    """Numbered name of the expert's tensor, or of an optimizer state of that tensor."""
    stack: str
    """Name of the stacked tensor, or of the corresponding optimizer state of the stacked tensor."""
    stem: Regrouping
    """The group of N expert tensors to which the expert's tensor belongs."""
    place: int
    """Number of the expert."""

    @property
    def why(self) -> str:
        """First line of the error if the numbered tensor differs from the slice of the stack."""
        return f"{self.stack} and {self.name} both hold expert {self.place}"


def member_copies(stems: Iterable[Regrouping], names: Collection[str]) -> list[MemberCopy]:
    """Return the numbered tensors, and their optimizer states, that the checkpoint also contains inside a stack.

    Args:
        stems: groups of N tensors whose form changes, such as from a stack to numbered tensors.
        names: names of all tensors in the checkpoint.
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


def without_copies(stems: Sequence[Regrouping], names: Iterable[str]) -> list[str]:
    """Return the stored names, omitting numbered tensors that are also inside a stack."""
    unique_names = dict.fromkeys(names)
    copies = {copy.name for copy in member_copies(stems, unique_names)}
    return [name for name in unique_names if name not in copies]


def copy_checks(stems: Sequence[Regrouping], stored: Mapping[str, Stored]) -> tuple[list[Check], list[Refusal]]:
    """Return checks that slices of stacks equal the numbered tensors of the same experts, and errors where they cannot
    be compared.

    Args:
        stems: groups of N tensors whose form changes, such as from a stack to numbered tensors.
        stored: the checkpoint's tensors by name.
    """
    copies = member_copies(stems, stored)
    # Each numbered tensor is compared with its slice of the stack: the stack is translated into numbered tensors, and
    # each result must equal the tensor that is stored under its name.
    regroupings = [
        msgspec.structs.replace(stem, requested=MEMBERS, copies=())
        for stem in dict.fromkeys(copy.stem for copy in copies)
    ]
    singles = {stem.single for stem in regroupings}
    stacks = {name: tensor for name, tensor in stored.items() if regroupings and split_slot(name)[0] in singles}
    members = regroup(regroupings, stacks).targets if regroupings else {}
    checks, problems = [], []
    for copy in copies:
        own_target, member = identity_target(copy.name, stored[copy.name]), members[copy.name]
        if (own_target.dtype, own_target.shape) != (member.dtype, member.shape):
            kinds = " and ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in (member, own_target))
            problems.append(Refusal("UNEQUAL_COPIES", f"{copy.why}\nbut they are {kinds}", Where(None, copy.name)))
        else:
            checks.append(Check(own_target, member, copy.why))
    return checks, problems


def regroup(stems: Sequence[Regrouping], stored: Mapping[str, Stored]) -> Translation:
    """Translate expert tensors from the stored form to the requested form; all other tensors keep their names.

    Args:
        stems: groups of N tensors whose form changes, such as from a stack to numbered tensors.
        stored: stored tensors by name, including optimizer states.
    """
    family = table(stems)
    axis_sizes = Sizes(family, {}, sizes(stems))
    source, target = family.dialects
    translation = translate(bind(without_copies(stems, stored), family, source, axis_sizes), stored, target, axis_sizes)
    checks, problems = copy_checks(stems, stored)
    return replace(translation, checks=(*translation.checks, *checks), refusals=(*translation.refusals, *problems))


def parameters(names: Iterable[str]) -> Iterable[str]:
    """Return the names that are not names of optimizer states."""
    return (name for name in names if split_slot(name)[1] == WEIGHT)


_EXPERTS = {"weight": 2, "bias": 1}
"""Last name segment of a grouped layer's parameter -> number of dims that one expert's tensor has."""
_OTHER_COUNT = "build the layer with as many experts as the checkpoint has"
_LACKING = "check whether a file of the checkpoint is missing"
_Places = Mapping[tuple[str, str], Mapping[int, str]]
"""`(text before the expert's number, text after the number)` -> expert's number -> tensor name."""


class ExpertSet(msgspec.Struct, frozen=True):
    """A request for N expert tensors of the same shape, under N names or as one stack."""

    name: str
    """Name of the stacked tensor, and also the text before the number in the names of the N tensors."""
    suffix: str
    """Text after the number in the names of the N tensors: empty, or the ending of a buffer's name such as
    `_scale_inv`.
    """
    count: int
    """Number of expert tensors."""
    shape: Shape
    """Shape of one expert's tensor."""
    single: bool
    """Whether the expert tensors are requested as one stack."""
    local_numbers: range | None = None
    """Numbers of the experts that this rank requests; None means all experts."""
    sure: bool = True
    """Whether the tensors are certainly experts. If they are, a set that does not fit is refused; if not, such a set
    keeps its names.
    """

    @property
    def whole(self) -> str:
        """Name of the stacked tensor, including the suffix."""
        return f"{self.name}{self.suffix}"

    @property
    def names(self) -> list[str]:
        """Names under which the expert tensors are requested: one name, or N names."""
        return [self.whole] if self.single else [f"{self.name}{place}{self.suffix}" for place in self.numbers_needed]

    @property
    def numbers_needed(self) -> range:
        """Numbers of the experts that a checkpoint with numbered names must have."""
        return range(self.count) if self.single or self.local_numbers is None else self.local_numbers


class Arrangement(msgspec.Struct, frozen=True):
    """The forms (stacked or numbered) in which a checkpoint has the requested experts."""

    stems: tuple[Regrouping, ...]
    """Groups of experts that the checkpoint has in a different form than requested, or in both forms."""
    problems: tuple[Refusal, ...]
    """Errors about expert sets. The code is SHAPE_MISMATCH if the checkpoint and the request have different numbers of
    experts, INCOMPLETE if experts are missing, and UNSUPPORTED if experts share one scale.
    """
    broken: frozenset[str]
    """Requested and stored names of the expert sets that have errors."""

    def check(self) -> tuple[Regrouping, ...]:
        """Return the groups of experts whose form changes.

        Raises:
            Refused: if `problems` is not empty; the exception contains these errors.
        """
        if self.problems:
            raise gathered(self.problems)
        return self.stems


def groups(requested: Mapping[str, Shape], stored: Mapping[str, Shape]) -> list[ExpertSet]:
    """Find sets of experts among the requested tensors by their names.

    Args:
        requested: tensor name -> whole shape, for the requested tensors without optimizer states.
        stored: tensor name -> whole shape, for the checkpoint's tensors.
    """
    wanted_places, stored_places = _places(requested), _places(stored)
    sets: dict[tuple[str, str], ExpertSet] = {}
    for (before, suffix), places in wanted_places.items():
        shapes = {requested[name] for name in places.values()}
        if len(shapes) == 1 and max(places) + 1 == len(places) and f"{before}{suffix}" not in requested:
            sets[before, suffix] = ExpertSet(before, suffix, len(places), shapes.pop(), False, sure=_is_expert(before))
    for (before, suffix), places in stored_places.items():
        shape = requested.get(f"{before}{suffix}", ())
        if shape and (before, suffix) not in wanted_places:
            fits = suffix != "" or any(len(stored[name]) == len(shape) - 1 for name in places.values())
            sets[before, suffix] = ExpertSet(
                before, suffix, shape[0], shape[1:], True, sure=fits and _is_expert(before)
            )
    for before in [name for name in requested if (name, "") not in sets and _is_in_other_form(name, requested, stored)]:
        nearby = {name.removeprefix(before): shape for name, shape in requested.items() if _is_beside(before, name)}
        sets |= {(before, suffix): ExpertSet(before, suffix, s[0], s[1:], True) for suffix, s in nearby.items() if s}
    return list(sets.values())


def arrange(expert_sets: Sequence[ExpertSet], stored: Mapping[str, Shape]) -> Arrangement:
    """Determine in which form (stacked or numbered) a checkpoint has each set of experts.

    Args:
        expert_sets: the requested sets of experts.
        stored: tensor name -> whole shape, for the checkpoint's tensors.
    """
    stored_places = _places(stored)
    stems: dict[tuple[str, str], Regrouping] = {}
    problems: list[Refusal] = []
    broken: set[str] = set()
    for experts in expert_sets:
        members = stored_places.get((experts.name, experts.suffix), {})
        try:
            stem = _stem(experts, members, stored)
        except TransaxleError as error:
            if experts.sure:
                problems += error.refusals
                broken.update((*experts.names, experts.whole, *members.values()))
            continue
        if stem is not None:
            stems[experts.name, experts.suffix] = stem
    for stem in list(stems.values()):
        if not stem.suffix and stem.stored != stem.requested:
            stems = {
                **stems,
                **{pair: buffer for pair, buffer in _beside(stem, stored_places, stored).items() if pair not in stems},
            }
    return Arrangement(tuple(stems.values()), tuple(problems), frozenset(broken))


def between(requested: Mapping[str, Shape], stored: Mapping[str, Shape], *, shared_out: bool = True) -> Arrangement:
    """Determine in which form the available tensors have the requested experts; names of optimizer states are allowed.

    Args:
        requested: tensor name -> shape, for the requested tensors.
        stored: tensor name -> shape, for the available tensors.
        shared_out: whether the experts are divided among ranks, so that a checkpoint may have more experts than this
            rank requests.
    """
    parameters_wanted, parameters_stored = parameter_shapes(requested), parameter_shapes(stored)
    sets = groups(parameters_wanted, parameters_stored)
    if not shared_out:
        return arrange(sets, parameters_stored)
    names = parameters_stored.keys()
    parts = _parts(parameters_wanted, parameters_stored)
    of_parts = {each.whole for each in parts}
    sets = [each for each in sets if each.single or each.whole in names or not names >= {*each.names}]
    arrangement = arrange([*parts, *(each for each in sets if each.whole not in of_parts)], parameters_stored)
    # If only some experts of a set are requested, they are read under their own names, and the stack is only compared
    # with the tensors read.
    stems = (replace(stem, stored=MEMBERS) if stem.single in of_parts else stem for stem in arrangement.stems)
    return replace(arrangement, stems=tuple(stems))


def _parts(requested: Mapping[str, Shape], stored: Mapping[str, Shape]) -> list[ExpertSet]:
    """Return the requested sets that lack some experts, if the checkpoint has both the single tensors of all experts
    and their stack.
    """
    stored_places, parts = _places(stored), list[ExpertSet]()
    for (before, suffix), places in _places(requested).items():
        stored_members, whole = stored_places.get((before, suffix), {}), f"{before}{suffix}"
        if whole in stored and whole not in requested and places.keys() < stored_members.keys():
            shape = requested[places[min(places)]]
            parts.append(ExpertSet(before, suffix, max(stored_members) + 1, shape, False, sure=_is_expert(before)))
    return parts


def _places(names: Iterable[str]) -> _Places:
    places: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in parameters(names):
        split = split_number(name)
        if split is not None:
            places[split.before, split.suffix][split.number] = name
    return places


def _is_expert(before: str) -> bool:
    return before.rpartition(".")[2] in _EXPERTS


def _is_beside(before: str, name: str) -> bool:
    return name == before or (name.startswith(f"{before}_") and "." not in name.removeprefix(before))


def _is_in_other_form(name: str, requested: Mapping[str, Shape], stored: Mapping[str, Shape]) -> bool:
    """Return whether a checkpoint has the requested stack of experts as one tensor with a different shape.

    The stored tensor must have the rows of all experts in one dim, or be a `column` (see `Packing`).
    """
    dims, shape, single = _EXPERTS.get(name.rpartition(".")[2]), requested[name], stored.get(name)
    if single is None or dims is None or len(shape) != dims + 1:
        return False
    whole_ones = single[1:] == shape[2:] and bool(shape[1]) and not single[0] % shape[1]
    # Unquantized weights have as many rows as packed 4-bit codes, but longer rows.
    below = len(single) == dims and (whole_ones or single[0] == shape[0] * shape[1])
    return below or (dims == 1 and len(single) == dims + 2 and single[1:] == (1, shape[1]))


def _stem(experts: ExpertSet, members: Mapping[int, str], stored: Mapping[str, Shape]) -> Regrouping | None:
    """Return how the form of one expert set changes; None if the checkpoint has the requested form, or has no expert of
    the set.

    Raises:
        Refused: if the number of experts, or the stored form, does not fit (see `Arrangement.problems`).
    """
    single = stored.get(experts.whole)
    if not experts.sure and (single is not None if experts.single else bool(members)):
        return None
    target = STACK if experts.single else MEMBERS
    if single is None:
        if members:
            _check_all(experts, members)
        as_wanted = not members or not experts.single
        return (
            None
            if as_wanted
            else Regrouping(experts.name, experts.suffix, len(stored[members[0]]), experts.count, MEMBERS, target)
        )
    form = _packing(experts, single)
    if not experts.sure and form != STACK:
        return None
    if members and max(members) >= experts.count:
        raise _count(experts, f"at least {max(members) + 1}")
    if form == target and not members:
        return None
    dims = len(single) - {STACK: 1, ROWS: 0, COLUMN: 2, MEMBERS: 0}[form]
    return Regrouping(experts.name, experts.suffix, dims, experts.count, form, target, tuple(sorted(members)))


def _packing(experts: ExpertSet, single: Shape) -> Packing:
    """Determine how one tensor contains N experts: by its shape if it fits exactly, else by its number of dims.

    The stored shape may differ from the requested shape, because unquantized weights have as many rows as packed 4-bit
    codes, but longer rows.

    Raises:
        Refused: with the code SHAPE_MISMATCH if the number of experts differs; with the code UNSUPPORTED if all experts
            share one scale.
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
    extra_dims = len(single) - len(shape)
    if experts.suffix and (not single or single[0] != count or extra_dims != 1):
        message = f"{list(single)} is not one scale for each of {count} experts"
        raise refuse("UNSUPPORTED", message, tensor=experts.whole, hint="Quantize each expert's weight by itself.")
    if extra_dims == 1:
        if single[0] != count:
            raise _count(experts, str(single[0]))
        return STACK
    if extra_dims == 0 and shape:
        if single[0] != count * shape[0]:
            whole_ones = bool(shape[0]) and not single[0] % shape[0]
            raise _count(
                experts, str(single[0] // shape[0]) if whole_ones else f"{single[0]} rows, not a whole number of"
            )
        return ROWS
    if extra_dims == 2 and single[1:] == (1, *shape):
        raise _count(experts, str(single[0]))
    message = f"{list(single)} are not {count} experts of {list(shape)}"
    raise refuse("SHAPE_MISMATCH", message, tensor=experts.whole, hint=_OTHER_COUNT)


def _check_all(experts: ExpertSet, members: Mapping[int, str]) -> None:
    """Check that the checkpoint and the layer have equally many experts, and that no requested expert is missing.

    Raises:
        Refused: with the code SHAPE_MISMATCH if the numbers of experts differ; with the code INCOMPLETE if requested
            experts are missing.
    """
    lacking = sorted(set(experts.numbers_needed) - members.keys())
    extra = sorted(members.keys() - set(range(experts.count)))
    if not lacking and not extra:
        return
    if sorted(members) == list(range(len(members))):
        raise _count(experts, str(len(members)), f"; {_join_numbers(lacking)} are missing" if lacking else "")
    complaints = [f"experts {_join_numbers(lacking)} of {experts.count} are missing"] if lacking else []
    complaints += [f"there are experts {_join_numbers(extra)}, but the layer has {experts.count}"] if extra else []
    message = f"{len(members)} experts: {'; '.join(complaints)}"
    raise refuse("INCOMPLETE", message, tensor=experts.whole, hint=_LACKING)


def _count(experts: ExpertSet, stored_count: str, addition: str = "") -> TransaxleError:
    message = f"the checkpoint has {stored_count} experts, the layer {experts.count}{addition}"
    return refuse("SHAPE_MISMATCH", message, tensor=experts.whole, hint=_OTHER_COUNT)


def _join_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _beside(stem: Regrouping, stored_places: _Places, stored: Mapping[str, Shape]) -> dict[tuple[str, str], Regrouping]:
    """Return the buffers (scales) whose form changes together with the experts' codes, even if nobody requested the
    buffers.
    """
    buffers = {}
    if stem.stored == MEMBERS:
        for (before, suffix), members in stored_places.items():
            if before == stem.name and len(members) == stem.count == max(members) + 1:
                buffers[before, suffix] = replace(stem, suffix=suffix, dims=len(stored[members[0]]))
        return buffers
    for name, shape in stored.items():
        if name.startswith(f"{stem.name}_") and "." not in name.removeprefix(stem.name) and shape:
            suffix = name.removeprefix(stem.name)
            if shape[0] == stem.count:
                copies = tuple(sorted(stored_places.get((stem.name, suffix), ())))
                buffers[stem.name, suffix] = replace(
                    stem, suffix=suffix, dims=len(shape) - 1, stored=STACK, copies=copies
                )
    return buffers


def parameter_shapes(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return parameter name -> shape, also for parameters that are only named by their optimizer states."""
    shapes: dict[str, Shape] = {}
    for name, shape in tensors.items():
        parameter, slot = split_slot(name)
        if slot == WEIGHT or (parameter not in tensors and len(shapes.get(parameter, ())) <= len(shape)):
            shapes[parameter] = shape
    return shapes
