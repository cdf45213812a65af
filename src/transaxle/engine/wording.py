"""Writes numbers, sizes and folded tensor names as readable text.

Reports and the command line write numbers with decimal units: 1 GB is 10^9 bytes.

**Folding names** prints eighteen thousand tensor names in twenty lines, and never prints a name that does not exist.

Names that differ only in their indices, with equal dtype and shape, become one row that contains the sets of these
indices: `model.layers.[0-47].mlp.experts.[0-127].gate_proj.weight`. A row represents every combination of its indices
and no other name. So if a combination is missing, several rows are needed.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import product

import msgspec

from transaxle.axes.notation.name import natural

_STEPS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"))


def significant(value: float) -> str:
    """Return a number below a thousand as text with at most three or four significant digits."""
    text = f"{value:.2f}" if value < 100 else f"{value:.1f}"
    return text.rstrip("0").rstrip(".")


def parameters(count: int) -> str:
    """Return a number of parameters as text: `30.53 B parameters`, `13,936 parameters`."""
    for unit, letter in _COUNTS:
        if count >= unit:
            return f"{significant(count / unit)} {letter} parameters"
    return plural(count, "parameter")


def size(count: int) -> str:
    """Return a number of bytes as text: `61.06 GB`, `512 B`."""
    for unit, letter in _STEPS:
        if count >= unit:
            return f"{significant(count / unit)} {letter}B"
    return f"{count} B"


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """Return a number with its noun in singular or plural: `1 tensor`, `18,867 tensors`."""
    return f"{count:,} {noun if count == 1 else plural_noun or f'{noun}s'}"


def tensors_in_words(count: int, optimizer: int) -> str:
    """Return a text with the number of tensors, and with how many of them are optimizer state if there is any."""
    return plural(count, "tensor") + (f", {optimizer:,} of them optimizer state" if optimizer else "")


def duration(seconds: float) -> str:
    """Return a duration as text: `0.02 s`, `25.1 s`, `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}"


def notebook(text: str) -> str:
    """Return a plain text as escaped HTML for a notebook."""
    from html import escape  # `html` is a large module that only notebooks need

    return f"<pre>{escape(text)}</pre>"


def speed(count: int, seconds: float) -> str:
    """Return a speed, computed from bytes and seconds, as text: `2.4 GB/s`."""
    return f"{size(round(count / max(seconds, 1e-9)))}/s"


def percent(part: int, whole: int) -> str:
    """Return a fraction in whole percent. The result is `100 %` only if part equals whole, which includes zero of
    zero.
    """
    share = 100 if part >= whole else min(99, round(100 * part / whole))
    return f"{share} %"


_INDEX = re.compile(r"(?:(?<![^./#])|(?<=\.weight)(?=[0-9]+$)|(?<=\.bias)(?=[0-9]+$))(0|[1-9][0-9]*)(?![^./])")
"""Pattern of an index in a tensor name: a whole segment (`layers.12.`), or the number at the end of a weight's name
(`linear_fc1.weight7`).
"""

_MAX_INDICES = 8
"""Largest number of indices in a tensor name that are folded; any further indices in the name are treated as text."""

Position = tuple[int, ...]
Indices = tuple[tuple[int, ...], ...]
"""For each position of an index in a tensor name, the sorted indices that occur at this position."""


class FoldedRow(msgspec.Struct, frozen=True):
    """One printed row that represents several tensor names, which differ only in their indices."""

    name: str
    """The row's names, folded into one text: `layers.[0-2,5].weight`."""
    names: tuple[str, ...]
    """All names that the row represents, sorted by index."""
    key: Hashable = None
    """Key (such as dtype and shape) that all names of the row have in common."""
    literals: tuple[str, ...] = ()
    """The texts around the indices in the row's names; empty for a single name that was not folded."""
    sets: Indices = ()
    """For each position of an index in the names, the indices that the row represents."""

    @property
    def count(self) -> int:
        """Number of names that the row represents."""
        return len(self.names)

    @property
    def times(self) -> str:
        """The number of names as it is printed: `x48`; empty for a single name."""
        return f"x{self.count}" if self.count > 1 else ""


def index_ranges(indices: Sequence[int]) -> str:
    """Return sorted indices as text: `7`, `[0-47]`, `[0-2,5]`."""
    if len(indices) == 1:
        return str(indices[0])
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return f"[{','.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)}]"


def index_products(positions: Iterable[Position]) -> list[Indices]:
    """Express a set of tuples of indices as the union of a few Cartesian products of sets of indices.

    Returns:
        Disjoint products whose union is the given set; each product has one sorted tuple of indices per position.
    """
    grouped: dict[int, set[Position]] = {}
    for position in positions:
        if not position:
            return [()]
        grouped.setdefault(position[0], set()).add(position[1:])
    alike: dict[frozenset[Position], list[int]] = {}
    for index in sorted(grouped):
        alike.setdefault(frozenset(grouped[index]), []).append(index)
    return [(tuple(indices), *following) for inner, indices in alike.items() for following in index_products(inner)]


def split_name(name: str) -> tuple[tuple[str, ...], Position]:
    """Split a tensor name into the texts around its indices, and the indices."""
    parts = _INDEX.split(name, maxsplit=_MAX_INDICES)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def fold(names: Iterable[str], keys: Iterable[Hashable] | None = None) -> list[FoldedRow]:
    """Fold tensor names that differ only in their indices into rows.

    Args:
        names: tensor names, in the order in which the rows are to begin.
        keys: one key per name; only names with equal keys are folded together.

    Returns:
        Rows in the order of their first names; together they represent exactly the given names.
    """
    groups: dict[tuple[tuple[str, ...], Hashable], dict[Position, str]] = {}
    listed = list(names)
    for name, key in zip(listed, [None] * len(listed) if keys is None else keys, strict=True):
        literals, position = split_name(name)
        groups.setdefault((literals, key), {})[position] = name
    rows = []
    for (literals, key), names_by_position in groups.items():
        for sets in index_products(names_by_position):
            text = "".join(a + index_ranges(b) for a, b in zip(literals, sets, strict=False)) + literals[-1]
            rows.append(
                FoldedRow(text, tuple(names_by_position[position] for position in product(*sets)), key, literals, sets)
            )
    return rows


def fold_to_text(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the text of each row into which the given tensor names are folded."""
    for row in fold(sorted(names, key=natural)):
        yield f"{row.name}  {row.times}".rstrip()
