"""Binding: reading the names of a checkpoint through a dialect.

Each stored name either is one line of the dialect at certain indices, or is known to hold nothing, or is unknown.
Names are matched whole. One prefix (`module.`, `_orig_mod.`, `language_model.`) is bound once for the checkpoint.
Where two lines have one name, the encoding in which a tensor is stored decides (`form`).
A parameter's optimizer state `optim/<parameter>/<state>` follows the line of its parameter: states are *slots*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from transaxle.axes.notation.family import Dialect, Family, Line, Sizes
from transaxle.axes.notation.name import skeleton
from transaxle.axes.notation.number_format import PLAIN, words

WEIGHT = ""
"""The slot of the parameter itself."""
OPTIM = "optim/"
"""Prefix of optimizer state: `optim/<parameter>/<state>`."""

Index = tuple[int, ...]
"""Indices of a line's name axes, in the order of the name."""


def split_slot(name: str) -> tuple[str, str]:
    """Split a stored name into its parameter's name and its slot."""
    if name.startswith(OPTIM):
        parameter, _, state = name[len(OPTIM) :].rpartition("/")
        if parameter and state != WEIGHT:
            return parameter, state
    return name, WEIGHT


def join_slot(parameter: str, slot: str) -> str:
    """Inverse of `split_slot`."""
    return parameter if slot == WEIGHT else f"{OPTIM}{parameter}/{slot}"


@dataclass(frozen=True)
class Bound:
    """The names of one checkpoint, read through one dialect."""

    family: Family
    """Its family."""
    dialect: Dialect
    """The dialect its names are of."""
    prefix: str
    """What stands before every name of the dialect."""
    found: Mapping[tuple[Line, str], Mapping[Index, str]]
    """(line, slot) -> index -> stored name."""
    ignored: tuple[str, ...]
    """Stored names that hold nothing of the model."""
    unknown: tuple[str, ...]
    """Stored names that the dialect has no line for."""
    encodings: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> its encoding, one of `form.WORDS`; names that are not in it are plain."""

    def stored_name(self, line: Line, slot: str, index: Index) -> str | None:
        """Return the name under which a line's tensor is stored, or None."""
        return self.found.get((line, slot), {}).get(index)


def _prefixes(names: Mapping[str, list[str]], dialect: Dialect) -> dict[str, int]:
    """Count, for every possible prefix, the names that it would let the dialect read."""
    counts: dict[str, int] = defaultdict(int)
    longest = max(map(len, dialect.by_skeleton), default=0)
    for whole, same in names.items():
        sample = same[0]
        # A dot is in no run of digits: what follows it in the skeleton is the skeleton of what follows it. From the
        # right, and only as far as the dialect's names are long: a stranger's name may have ten thousand dots.
        start, begin = len(sample), len(whole)
        while begin >= 0 and len(whole) - begin <= longest + 1:
            start, begin = sample.rfind(".", 0, start), whole.rfind(".", 0, begin)
            rest = sample[start + 1 :]
            for line in dialect.by_skeleton.get(whole[begin + 1 :], ()):
                if line.name.match(rest) is not None:
                    counts[sample[: start + 1]] += len(same)
                    break
    return counts


def group(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameter names that differ in digits only."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for name in names:
        grouped[skeleton(name)].append(name)
    return grouped


def score(grouped: Mapping[str, list[str]], dialect: Dialect) -> tuple[int, str]:
    """Return how many names the dialect can read, and the prefix that makes it most."""
    counts = _prefixes(grouped, dialect)
    if not counts:
        return 0, ""
    prefix = max(counts, key=lambda key: (counts[key], -len(key)))
    return counts[prefix], prefix


def bind(
    names: Sequence[str],
    family: Family,
    dialect: Dialect,
    sizes: Sizes,
    prefix: str = "",
    encodings: Mapping[str, str] | None = None,
) -> Bound:
    """Read names through a dialect.

    Args:
        names: stored names.
        family: the family they are of.
        dialect: the dialect they are of.
        sizes: what its config and the user say of axis sizes.
        prefix: what stands before every name of the dialect.
        encodings: stored name -> its encoding, one of `form.WORDS`; None: all are plain.

    Raises:
        UsageError: UNKNOWN_AXIS where an index cannot be told apart without the size of an axis.
    """
    found: dict[tuple[Line, str], dict[Index, str]] = defaultdict(dict)
    ignored: list[str] = []
    unknown: list[str] = []
    encodings = encodings or {}
    reader = _Reader(dialect, sizes)
    for name in names:
        parameter, slot = split_slot(name)
        if not parameter.startswith(prefix):
            unknown.append(name)
            continue
        bare = parameter[len(prefix) :]
        read = reader.read(bare, encodings.get(name, PLAIN))
        if read is not None:
            line, position = read
            found[line, slot][position] = name
        elif reader.ignores(bare):
            ignored.append(name)
        else:
            unknown.append(name)
    return Bound(family, dialect, prefix, dict(found), tuple(ignored), tuple(unknown), encodings)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A line that names of one skeleton may be of."""

    line: Line
    shifts: tuple[int, ...]
    """What is added to each index to give the number in the name."""
    limits: tuple[int | None, ...]
    """Size of each axis in the name, where it is known."""

    def index(self, name: str) -> Index | None:
        """Return the indices for which the line gives this name, or None."""
        numbers = self.line.name.match(name)
        if numbers is None:
            return None
        position = tuple(number - shift for number, shift in zip(numbers, self.shifts, strict=True))
        fits = all(i >= 0 and (size is None or i < size) for i, size in zip(position, self.limits, strict=True))
        return position if fits else None


class _Reader:
    """Reads names through a dialect; looks at each skeleton's lines once."""

    def __init__(self, dialect: Dialect, sizes: Sizes) -> None:
        self.dialect = dialect
        self.sizes = sizes
        self.known = sizes.at({})
        self.candidates: dict[str, list[_Candidate]] = {}

    def read(self, name: str, encoding: str = PLAIN) -> tuple[Line, Index] | None:
        """Return the line and the indices that give this name; of several lines, one whose condition holds."""
        key = skeleton(name)
        candidates = self.candidates.get(key)
        if candidates is None:
            candidates = self.candidates[key] = [self._candidate(c) for c in self.dialect.by_skeleton.get(key, ())]
        fitting = [(c.line, index) for c in candidates if (index := c.index(name)) is not None]
        if len(fitting) > 1:
            fitting.sort(key=lambda item: self._holds(item[0], item[1], encoding) is False)
        return fitting[0] if fitting else None

    def _candidate(self, line: Line) -> _Candidate:
        holes = line.name.holes
        shifts = tuple(hole.added(self.known) for hole in holes)
        return _Candidate(line, shifts, tuple(self.known.get(hole.axis) for hole in holes))

    def _holds(self, line: Line, index: Index, encoding: str) -> bool | None:
        return self.sizes.holds(line.when, dict(zip(line.name.axes, index, strict=True)), words(encoding))

    def ignores(self, name: str) -> bool:
        """Tell whether a name holds nothing of the model."""
        known = skeleton(name) in self.dialect.ignored_skeletons
        return known and any(pattern.match(name) is not None for pattern in self.dialect.ignored)
