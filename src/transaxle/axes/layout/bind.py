"""Binding: reading the names of a checkpoint through a dialect.

Each stored name is one line of the dialect at certain indices, or is listed as ignored, or is unknown. Names match
whole. One prefix (`module.`, `_orig_mod.`, `language_model.`) is bound once for the checkpoint. Where two lines share a
name, the encoding in which the tensor is stored decides (`number_format`). A parameter's optimizer state
`optim/<parameter>/<state>` follows the line of its parameter: states are *slots*.
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
    """Family of the model."""
    dialect: Dialect
    """Dialect through which the names are read."""
    prefix: str
    """Text before every name of the dialect."""
    names: Mapping[tuple[Line, str], Mapping[Index, str]]
    """(line, slot) -> index -> stored name."""
    ignored: tuple[str, ...]
    """Stored names that hold nothing of the model."""
    unknown: tuple[str, ...]
    """Stored names that the dialect has no line for."""
    encodings: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> its encoding, one of `number_format.WORDS`; names that are not in it are plain."""


def _prefixes(names: Mapping[str, list[str]], dialect: Dialect) -> dict[str, int]:
    """Count, for every possible prefix, the names that it would let the dialect read."""
    readable: dict[str, int] = defaultdict(int)
    longest = max(map(len, dialect.by_skeleton), default=0)
    for key, names_alike in names.items():
        sample = names_alike[0]
        # A dot is in no run of digits: what follows it in the skeleton is the skeleton of what follows it. From the
        # right, and only as far as the dialect's names are long: a stranger's name may have ten thousand dots.
        start, begin = len(sample), len(key)
        while begin >= 0 and len(key) - begin <= longest + 1:
            start, begin = sample.rfind(".", 0, start), key.rfind(".", 0, begin)
            tail = sample[start + 1 :]
            for line in dialect.by_skeleton.get(key[begin + 1 :], ()):
                if line.name.match(tail) is not None:
                    readable[sample[: start + 1]] += len(names_alike)
                    break
    return readable


def group(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameter names that differ in digits only."""
    grouped: dict[str, list[str]] = defaultdict(list)
    for name in names:
        grouped[skeleton(name)].append(name)
    return grouped


def score(grouped: Mapping[str, list[str]], dialect: Dialect) -> tuple[int, str]:
    """Return how many names the dialect can read, and the prefix with which it reads the most."""
    counts = _prefixes(grouped, dialect)
    if not counts:
        return 0, ""
    # Of equal counts the shortest prefix wins, which leaves most of the text to the names.
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
        family: the family they belong to.
        dialect: the dialect to read them through.
        sizes: axis sizes from the config and the user.
        prefix: text before every name of the dialect.
        encodings: stored name -> its encoding, one of `number_format.WORDS`; None: all are plain.

    Raises:
        UsageError: UNKNOWN_AXIS where an index cannot be told apart without the size of an axis.
    """
    bound_names: dict[tuple[Line, str], dict[Index, str]] = defaultdict(dict)
    ignored: list[str] = []
    unknown: list[str] = []
    encodings = encodings or {}
    reader = _NameReader(dialect, sizes)
    for name in names:
        parameter, slot = split_slot(name)
        if not parameter.startswith(prefix):
            unknown.append(name)
            continue
        bare = parameter[len(prefix) :]
        line_and_index = reader.read(bare, encodings.get(name, PLAIN))
        if line_and_index is not None:
            line, position = line_and_index
            bound_names[line, slot][position] = name
        elif reader.ignores(bare):
            ignored.append(name)
        else:
            unknown.append(name)
    return Bound(family, dialect, prefix, dict(bound_names), tuple(ignored), tuple(unknown), encodings)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A line that a name of this skeleton may match."""

    line: Line
    shifts: tuple[int, ...]
    """Number added to each index to give the number in the name."""
    limits: tuple[int | None, ...]
    """Size of each axis in the name; None where it is unknown."""

    def index(self, name: str) -> Index | None:
        """Return the indices for which the line gives this name, or None."""
        numbers = self.line.name.match(name)
        if numbers is None:
            return None
        shifted = [number - shift for number, shift in zip(numbers, self.shifts, strict=True)]
        factors = [hole.factor for hole in self.line.name.holes]
        if any(number % factor for number, factor in zip(shifted, factors, strict=True)):
            return None
        position = tuple(number // factor for number, factor in zip(shifted, factors, strict=True))
        # A line such as `layers.{l+1}` must not read number 0, nor a number beyond a known size.
        fits = all(i >= 0 and (size is None or i < size) for i, size in zip(position, self.limits, strict=True))
        return position if fits else None


class _NameReader:
    """Reads names through a dialect; looks up each skeleton's lines once."""

    def __init__(self, dialect: Dialect, sizes: Sizes) -> None:
        self.dialect = dialect
        self.sizes = sizes
        self.known = sizes.at({})
        self.candidates: dict[str, list[_Candidate]] = {}

    def read(self, name: str, encoding: str = PLAIN) -> tuple[Line, Index] | None:
        """Return the line and index that give this name; where several lines do, one whose condition can hold."""
        key = skeleton(name)
        candidates = self.candidates.get(key)
        if candidates is None:
            candidates = self.candidates[key] = [self._candidate(c) for c in self.dialect.by_skeleton.get(key, ())]
        fitting = [(c.line, index) for c in candidates if (index := c.index(name)) is not None]
        if len(fitting) > 1:
            # A condition may be unknown (None): only a line whose condition is false comes last.
            fitting.sort(key=lambda item: self._holds(item[0], item[1], encoding) is False)
        return fitting[0] if fitting else None

    def _candidate(self, line: Line) -> _Candidate:
        holes = line.name.holes
        shifts = tuple(hole.added(self.known) for hole in holes)
        return _Candidate(line, shifts, tuple(self.known.get(hole.axis) for hole in holes))

    def _holds(self, line: Line, index: Index, encoding: str) -> bool | None:
        return self.sizes.holds(line.when, dict(zip(line.name.axes, index, strict=True)), words(encoding))

    def ignores(self, name: str) -> bool:
        """Tell whether the dialect ignores a name."""
        may_match = skeleton(name) in self.dialect.ignored_skeletons
        return may_match and any(pattern.match(name) is not None for pattern in self.dialect.ignored)
