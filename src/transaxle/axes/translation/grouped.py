"""Grouped parameters: N tensors under numbered names, or stacked in one; two dialects of one table.

    fc1.weight{e} = t0[x y]      fc1.weight{e}_scale_inv = t1[x y]      fc1.bias{e} = t2[x]
    fc1.weight    = t0[e x y]    fc1.weight_scale_inv    = t1[e x y]    fc1.bias    = t2[e x]

Such a layer may be anywhere in a model, so the table is built for the names at hand, and then used like any other.
`transaxle.axes.translation.expert_sets` finds the stems that it needs, for every way into a model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, bind, join_slot, split_slot
from transaxle.axes.layout.relayout import Check, Stored, unchanged
from transaxle.axes.notation.expression import parse
from transaxle.axes.notation.family import Dialect, Family, Line, LogicalTensor, Sizes
from transaxle.axes.notation.name import Name
from transaxle.axes.translation.translate import Translation, translate
from transaxle.errors import Refusal, Where

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
        own_target, member = unchanged(copy.name, stored[copy.name]), members[copy.name]
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
