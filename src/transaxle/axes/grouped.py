"""Grouped parameters: N tensors under numbered names, or one with a dim for the number; two dialects of one table.

    fc1.weight{e} = t0[x y]      fc1.weight{e}_scale_inv = t1[x y]      fc1.bias{e} = t2[x]
    fc1.weight    = t0[e x y]    fc1.weight_scale_inv    = t1[e x y]    fc1.bias    = t2[e x]

Such a layer may stand anywhere in a model, so the table is made for the names at hand; what is done with it is what is
done with any table.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from transaxle.axes.bind import bind, split_slot
from transaxle.axes.expression import parse
from transaxle.axes.family import Dialect, Family, Line, Sizes, Tensor
from transaxle.axes.name import Name
from transaxle.axes.relayout import Stored
from transaxle.axes.solve import Shape
from transaxle.axes.translate import Translation, translate

FAMILY = "grouped"
"""Name of the family."""
STORED = "stored"
"""The dialect that a checkpoint has."""
WANTED = "wanted"
"""The dialect that is asked for."""

Packing = Literal["stack", "rows", "column"]
"""How one tensor holds N: `[e x y]`, below each other `[(e x) y]`, or as columns `[e 1 x]`."""

_NUMBERED = re.compile(r"(.*[A-Za-z_])(0|[1-9][0-9]{0,9})((?:_[A-Za-z_]+)?)")


@dataclass(frozen=True, slots=True)
class Stem:
    """N tensors, or one."""

    name: str
    """Name of the one; of the others what is before the number."""
    rest: str
    """What follows: nothing, or the name of a buffer, `_scale_inv`."""
    dims: int
    """Of each of N."""
    stored: Packing | None
    """How the checkpoint has them as one; None: under N names."""
    count: int
    """N."""

    @property
    def single(self) -> str:
        """Name of the one."""
        return f"{self.name}{self.rest}"

    def member(self, place: int) -> str:
        """Return the name of one of N."""
        return f"{self.name}{place}{self.rest}"


def numbered(name: str) -> tuple[str, int, str] | None:
    """Split a name at the number of its member: what is before, the number, what follows; None: there is none."""
    found = _NUMBERED.fullmatch(name.rpartition(".")[2])
    if found is None:
        return None
    before, number, rest = found.groups()
    return name.rpartition(".")[0] + ("." if "." in name else "") + before, int(number), rest


def stems(wanted: Iterable[str], stored: Mapping[str, Shape]) -> list[Stem] | None:
    """Return what a checkpoint has under numbered names and is wanted as one, or the other way round.

    With a parameter go the buffers beside it: where `weight` is regrouped, `weight_scale_inv` is too.

    Args:
        wanted: names asked for, without optimizer state.
        stored: names and shapes that there are.

    Returns:
        The stems; None where some name is neither there nor in one of these.
    """
    here: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in stored:
        split = numbered(name) if split_slot(name)[1] == "" else None
        if split is not None:
            here[split[0], split[2]].add(split[1])
    singles = {f"{before}{rest}": (before, rest) for before, rest in here}
    found: dict[tuple[str, str], Stem] = {}
    for name in sorted({name for name in wanted if name not in stored}):
        split = numbered(name)
        if split is not None and f"{split[0]}{split[2]}" in stored:
            found[split[0], split[2]] = _one(split[0], split[2], stored)
        elif name in singles:
            found[singles[name]] = _many(*singles[name], here[singles[name]], stored)
        else:
            return None
    for before in {stem.name for stem in found.values() if not stem.stored}:
        beside = [pair for pair in here if pair[0] == before]
        found |= {pair: _many(*pair, here[pair], stored) for pair in beside}
    for stem in [stem for stem in found.values() if stem.stored]:
        rests = (name.removeprefix(stem.name) for name in stored if name.startswith(f"{stem.name}_"))
        alike = [rest for rest in rests if "." not in rest and stored[f"{stem.name}{rest}"][:1] == (stem.count,)]
        found |= {(stem.name, rest): _one(stem.name, rest, stored) for rest in alike}
    return list(found.values())


def _one(before: str, rest: str, stored: Mapping[str, Shape]) -> Stem:
    shape = stored[f"{before}{rest}"]
    return Stem(before, rest, len(shape) - 1, "stack", shape[0] if shape else 0)


def _many(before: str, rest: str, numbers: set[int], stored: Mapping[str, Shape]) -> Stem:
    return Stem(before, rest, len(stored[f"{before}{min(numbers)}{rest}"]), None, max(numbers) + 1)


def table(given: Sequence[Stem]) -> Family:
    """Return the family of these tensors, with both dialects."""
    tensors, stored, wanted = {}, [], []
    axes: dict[str, None] = {}
    for place, stem in enumerate(given):
        name, number, dims = f"t{place}", f"e{place}", [f"x{place}_{dim}" for dim in range(stem.dims)]
        tensors[name] = Tensor(name, (number, *dims))
        axes.update(dict.fromkeys([number, *dims]))
        many = Line(Name(f"{stem.name}{{{number}}}{stem.rest}"), parse(f"{name}[{' '.join(dims)}]"))
        one = Line(Name(stem.single), parse(_packed(name, number, dims, stem.stored or "stack")))
        stored.append(one if stem.stored else many)
        wanted.append(many if stem.stored else one)
    dialects = (Dialect(STORED, None, tuple(stored)), Dialect(WANTED, None, tuple(wanted)))
    return Family(FAMILY, (), dict(axes), tensors, dialects=dialects)


def sizes(given: Sequence[Stem]) -> dict[str, int]:
    """Return the sizes of the table's axes that names do not tell."""
    return {f"e{place}": stem.count for place, stem in enumerate(given)}


def _packed(name: str, number: str, dims: Sequence[str], packing: Packing) -> str:
    inner = " ".join(dims)
    if packing == "rows":
        return f"{name}[{' '.join([f'({number} {dims[0]})', *dims[1:]])}]"
    return f"{name}[{number} 1 {inner}]" if packing == "column" else f"{name}[{number} {inner}]"


def regrouped(given: Sequence[Stem], stored: Mapping[str, Stored]) -> Translation:
    """Express what is stored in the other dialect of the table; other names are kept.

    Args:
        given: the stems.
        stored: the tensors by name, states of an optimizer among them.
    """
    family = table(given)
    known = Sizes(family, {}, sizes(given))
    source, target = family.dialects
    return translate(bind(tuple(stored), family, source, known), stored, target, known)
