"""Grouped parameters: N tensors under numbered names, or one with a dim for the number; two dialects of one table.

    fc1.weight{e} = t0[x y]      fc1.weight{e}_scale_inv = t1[x y]      fc1.bias{e} = t2[x]
    fc1.weight    = t0[e x y]    fc1.weight_scale_inv    = t1[e x y]    fc1.bias    = t2[e x]

Such a layer may stand anywhere in a model, so the table is made for the names at hand; what is done with it is what is
done with any table. Which stems it needs `transaxle.axes.translation.arrange` finds out, for every way into a model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transaxle.axes.layout.bind import WEIGHT, bind, join_slot, split_slot
from transaxle.axes.layout.relayout import Check, Stored, unchanged
from transaxle.axes.notation.expression import parse
from transaxle.axes.notation.family import Dialect, Family, Line, Sizes, Tensor
from transaxle.axes.notation.name import Name
from transaxle.axes.translation.translate import Translation, translate
from transaxle.errors import Refusal, Where

FAMILY = "grouped"
"""Name of the family."""
STORED = "stored"
"""The dialect that a checkpoint has."""
WANTED = "wanted"
"""The dialect that is asked for."""

Form = Literal["members", "stack", "rows", "column"]
"""How N tensors are there: under N names, or as one: `[e x y]`, below each other `[(e x) y]`, as columns `[e 1 x]`."""
MEMBERS: Form = "members"
STACK: Form = "stack"
ROWS: Form = "rows"
COLUMN: Form = "column"

_NUMBERED = re.compile(r"(.*[A-Za-z_])(0|[1-9][0-9]{0,9})((?:_[A-Za-z_]+)?)")


@dataclass(frozen=True, slots=True)
class Stem:
    """N tensors that a checkpoint has in one form and that are wanted in another."""

    name: str
    """Name of the one; of the others what is before the number."""
    rest: str
    """What follows: nothing, or the name of a buffer, `_scale_inv`."""
    dims: int
    """Of each of N."""
    count: int
    """N."""
    stored: Form
    """How the checkpoint has them."""
    wanted: Form
    """How they are asked for."""
    copies: tuple[int, ...] = ()
    """Which of them the checkpoint has under a name of their own too: they must equal what the one tensor holds."""

    @property
    def single(self) -> str:
        """Name of the one."""
        return f"{self.name}{self.rest}"

    def member(self, place: int) -> str:
        """Return the name of one of N."""
        return f"{self.name}{place}{self.rest}"

    @property
    def sources(self) -> list[str]:
        """Names under which the checkpoint has them, copies included."""
        places: Iterable[int] = range(self.count) if self.stored == MEMBERS else self.copies
        return [*([] if self.stored == MEMBERS else [self.single]), *map(self.member, places)]

    @property
    def targets(self) -> list[str]:
        """Names under which they are wanted."""
        return [self.member(place) for place in range(self.count)] if self.wanted == MEMBERS else [self.single]

    def reversed(self) -> Stem:
        """Return what makes the stored form of the wanted one."""
        return replace(self, stored=self.wanted, wanted=self.stored, copies=())


def numbered(name: str) -> tuple[str, int, str] | None:
    """Split a name at the number of its member: what is before, the number, what follows; None: there is none."""
    before, dot, last = name.rpartition(".")
    found = _NUMBERED.fullmatch(last)
    return None if found is None else (f"{before}{dot}{found[1]}", int(found[2]), found[3])


def table(given: Sequence[Stem]) -> Family:
    """Return the family of these tensors, with both dialects."""
    tensors, stored, wanted = {}, [], []
    axes: dict[str, None] = {}
    for place, stem in enumerate(given):
        name, number, dims = f"t{place}", f"e{place}", [f"x{place}_{dim}" for dim in range(stem.dims)]
        tensors[name] = Tensor(name, (number, *dims))
        axes.update(dict.fromkeys([number, *dims]))
        stored.append(_line(stem, stem.stored, name, number, dims))
        if stem.copies:  # states of an optimizer may be under either name
            stored.append(_line(stem, MEMBERS, name, number, dims))
        wanted.append(_line(stem, stem.wanted, name, number, dims))
    dialects = (Dialect(STORED, None, tuple(stored)), Dialect(WANTED, None, tuple(wanted)))
    return Family(FAMILY, (), dict(axes), tensors, dialects=dialects)


def sizes(given: Sequence[Stem]) -> dict[str, int]:
    """Return the sizes of the table's axes that names do not tell."""
    return {f"e{place}": stem.count for place, stem in enumerate(given)}


def _line(stem: Stem, form: Form, name: str, number: str, dims: Sequence[str]) -> Line:
    inner = " ".join(dims)
    if form == MEMBERS:
        return Line(Name(f"{stem.name}{{{number}}}{stem.rest}"), parse(f"{name}[{inner}]"))
    packed = {
        STACK: f"{name}[{number} {inner}]",
        ROWS: f"{name}[{' '.join([f'({number} {dims[0]})', *dims[1:]]) if dims else number}]",
        COLUMN: f"{name}[{number} 1 {inner}]",
    }[form]
    return Line(Name(stem.single), parse(packed))


def without_copies(given: Sequence[Stem], names: Iterable[str]) -> list[str]:
    """Return names of stored tensors but for those of members that the checkpoint has in one tensor too."""
    known = dict.fromkeys(names)
    copies = _copies(given, known)
    return [name for name in known if name not in copies]


def _copies(given: Sequence[Stem], names: Collection[str]) -> dict[str, tuple[Stem, int]]:
    """Return the names of copies, states of an optimizer among them, each with its stem and its number."""
    members = {stem.member(place): (stem, place) for stem in given for place in stem.copies}
    found = {}
    for name in names if members else ():
        parameter, slot = split_slot(name)
        if parameter in members and join_slot(members[parameter][0].single, slot) in names:
            found[name] = members[parameter]
    return found


def copy_checks(given: Sequence[Stem], stored: Mapping[str, Stored]) -> tuple[list[Check], list[Refusal]]:
    """Return the checks that what a checkpoint has in both forms is equal, and what cannot be.

    Args:
        given: the stems.
        stored: the checkpoint's tensors by name.
    """
    copies = _copies(given, stored)
    stems = [replace(stem, wanted=MEMBERS, copies=()) for stem in dict.fromkeys(stem for stem, _ in copies.values())]
    singles = {stem.single for stem in stems}
    held = {name: one for name, one in stored.items() if stems and split_slot(name)[0] in singles}
    parts = regrouped(stems, held).targets if stems else {}
    checks, problems = [], []
    for name, (stem, place) in copies.items():
        whole = join_slot(stem.single, split_slot(name)[1])
        own, why = unchanged(name, stored[name]), f"{whole} and {name} are both there: expert {place}"
        if (own.dtype, own.shape) != (parts[name].dtype, parts[name].shape):
            kinds = " and ".join(f"{one.dtype} {list(one.shape)}" for one in (parts[name], own))
            problems.append(Refusal("UNEQUAL_COPIES", f"{why}\nbut they are {kinds}", Where(None, name)))
        else:
            checks.append(Check(own, parts[name], why))
    return checks, problems


def regrouped(given: Sequence[Stem], stored: Mapping[str, Stored]) -> Translation:
    """Express what is stored in the other dialect of the table; other names are kept.

    Args:
        given: the stems.
        stored: the tensors by name, states of an optimizer among them.
    """
    family = table(given)
    known = Sizes(family, {}, sizes(given))
    source, target = family.dialects
    found = translate(bind(without_copies(given, stored), family, source, known), stored, target, known)
    checks, problems = copy_checks(given, stored)
    return replace(found, checks=(*found.checks, *checks), refusals=(*found.refusals, *problems))


def parameters(names: Iterable[str]) -> Iterable[str]:
    """Return the names that are no states of an optimizer."""
    return (name for name in names if split_slot(name)[1] == WEIGHT)
