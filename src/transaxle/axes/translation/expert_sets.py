"""Sets of experts: in which form a checkpoint has those that are wanted, packed or numbered, and what is wrong with it.

The one place that tells another number of experts, a part of them, and both forms at once, for `load_state_dict`,
`transaxle.load` and the DCP planners alike. It sees names and shapes only, and runs before anything is written. A layer
says itself what it wants (`transaxle.nn.checkpoints.remap`); of a state dict the names do: `weight0`, `weight1`, …
and `bias0`, … are experts, and a stack of them is one where the other side has it in another form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.solve import Shape
from transaxle.axes.translation.grouped import COLUMN, MEMBERS, ROWS, STACK, Packing, Stem, numbered, parameters
from transaxle.errors import Refusal, TransaxleError, gathered, refuse

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
