"""Name patterns: the axes that live in a stored tensor's name.

    model.layers.{l}.mlp.experts.{e}.down_proj.weight      {l} is the index of axis l
    model.layers.{m+L}.eh_proj.weight                      index arithmetic: layer number m + L, L an axis size
    blocks.{2*l+1}.weight                                  every second number: 1, 3, 5
    experts.{(l e)}.weight                                 both axes counted through: number l * E + e, E the size of e
    mtp_layers.{l-L}.eh_proj.weight                        the other way: number l - L, for l from L on
    decoder.layers.{l}.mlp.experts.linear_fc1.weight{e@ep} the index counts from the first one of a rank of mesh axis ep

A hole matches a canonical decimal (no sign, no leading zeros, at most ten digits), and literals match exactly: whole
names, never substrings. `skeleton` maps names that differ in digits only to one key, so a table is searched in constant
time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

import msgspec

from transaxle.errors import TransaxleError, refuse

_AXIS = "[A-Za-z_][A-Za-z0-9_]*"
_MERGED = rf"\(\s*{_AXIS}(?:\s+{_AXIS})+\s*\)"
_HOLE = re.compile(rf"\{{(?:([1-9][0-9]{{0,2}})\*)?({_AXIS}|{_MERGED})([+-](?:{_AXIS}|[0-9]+))?(?:@({_AXIS}))?\}}")
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_RUN = re.compile(rb"0+")
_SPLIT = re.compile(r"([0-9]+)")
_MARKS = re.compile("[\0\1]")
"""Characters that have a meaning in sort keys."""
_DECIMAL = "(0|[1-9][0-9]{0,9})"
_SEPARATOR = "."
_NEXT = "\n"
COMPILED, CHECKPOINTED, FSDP1 = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"
"""Attribute in which `torch.compile`, the checkpoint wrapper and FSDP1 keep the module they are around."""
_WRAPPERS = frozenset({COMPILED, CHECKPOINTED, FSDP1})
"""Segments that torch's wrappers put into the names of a live model's parameters."""
_PARALLEL = "module"
"""Segment of DDP and of training loops. Modules may be called so, too: it is a wrapper where nothing is beside it."""
_AROUND = _WRAPPERS | {_PARALLEL, "_forward_module"}
_OUTER = _AROUND | {"model", "model_state_dict", "model_state", "state_dict"}
"""Segments that may precede every name of a model without making it part of a larger one."""
_MARKED = tuple(f"{segment}{_SEPARATOR}" for segment in (*sorted(_WRAPPERS), _PARALLEL))


def own_name(name: str) -> str:
    """Return a name without the segments that torch's wrappers insert."""
    return _SEPARATOR.join(segment for segment in name.split(_SEPARATOR) if segment not in _WRAPPERS)


def own_names(names: Iterable[str], *, outer: bool = False) -> dict[str, str]:
    """Return names without the segments of wrappers inside them, by the names as they are; empty where none has any.

    Args:
        names: of parameters, each once.
        outer: leave out what all of them begin with, too, which is a checkpoint's prefix.
    """
    listed = list(names)
    text = _NEXT.join(listed)
    if not any(mark in text for mark in _MARKED):
        return {}
    first = listed[0].split(_SEPARATOR)
    depth = next((at for at, segment in enumerate(first) if segment not in _AROUND), 0)
    prefix = "".join(f"{segment}{_SEPARATOR}" for segment in first[:depth])
    while not all(name.startswith(prefix) for name in listed):
        prefix = prefix[: prefix.rstrip(_SEPARATOR).rfind(_SEPARATOR) + 1]
    bare = {name: own_name(name[len(prefix) :]) for name in listed}
    alone = _places_of_module(bare.values())
    if alone:
        bare = {name: _without(inner, alone) for name, inner in bare.items()}
    own = bare if outer else {name: prefix + inner for name, inner in bare.items()}
    return own if any(name != inner for name, inner in own.items()) else {}


def _places_of_module(names: Collection[str]) -> set[str]:
    """Return what comes before `module` in some names, where no name has anything else there."""
    if not any(f"{_PARALLEL}{_SEPARATOR}" in name for name in names):
        return set()
    beside: dict[str, set[str]] = defaultdict(set)
    for name in names:
        segments = name.split(_SEPARATOR)
        for at, segment in enumerate(segments):
            beside[_SEPARATOR.join(segments[:at])].add(segment)
    return {place for place, segments in beside.items() if segments == {_PARALLEL}}


def _without(name: str, places: Container[str]) -> str:
    """Return a name without the segments that follow some places."""
    segments = name.split(_SEPARATOR)
    kept = (segment for at, segment in enumerate(segments) if _SEPARATOR.join(segments[:at]) not in places)
    return _SEPARATOR.join(kept)


def is_outer(prefix: str) -> bool:
    """Tell whether a prefix consists only of what data parallelism, compilation and training loops put before all
    names.
    """
    return _OUTER.issuperset(prefix.split(_SEPARATOR)[:-1])


def skeleton(name: str) -> str:
    """Return the name with every run of digits replaced by one `0`."""
    return _shortened(name.encode(errors="surrogatepass").translate(_ZEROS))


def skeletons(names: Sequence[str]) -> list[str]:
    """Return the skeleton of each of very many names."""
    text = _joined(names)
    if text is None:
        return list(map(skeleton, names))
    zeros = text.encode(errors="surrogatepass").translate(_ZEROS)
    while b"00" in zeros:
        zeros = zeros.replace(b"00", b"0")
    return zeros.decode(errors="surrogatepass").split(_NEXT)


def _joined(names: Sequence[str]) -> str | None:
    """Return one text with a line for each name; None where a name has several lines."""
    text = _NEXT.join(names)
    return text if text.count(_NEXT) == len(names) - 1 else None


@lru_cache(maxsize=1 << 14)
def _shortened(zeros: bytes) -> str:
    """Return a name whose digits are zeros with one for each run. Cached, as few names differ in more than digits."""
    return _RUN.sub(b"0", zeros).decode(errors="surrogatepass")


class Hole(msgspec.Struct, frozen=True):
    """One index in a name."""

    axis: str
    """Axis whose index is written here."""
    shift: str | None
    """`+` or `-` followed by a number or by an axis, whose size is then added to the index or subtracted from it."""
    mesh: str | None
    """Mesh axis whose rank's first index is subtracted."""
    factor: int = 1
    """What the index is multiplied by, before it is shifted."""
    inner: tuple[str, ...] = ()
    """Axes that are counted through for each index of `axis`, the outer ones first."""

    @property
    def text(self) -> str:
        """The hole as a table writes it."""
        axes = f"({' '.join((self.axis, *self.inner))})" if self.inner else self.axis
        times = f"{self.factor}*" if self.factor > 1 else ""
        return f"{{{times}{axes}{self.shift or ''}{f'@{self.mesh}' if self.mesh else ''}}}"

    @property
    def shift_axis(self) -> str | None:
        """The axis whose size shifts the index; None where there is none."""
        return None if self.shift is None or self.shift[1:].isdigit() else self.shift[1:]

    def added(self, sizes: Mapping[str, int]) -> int:
        """Return the number added to the index; negative where it is subtracted.

        Raises:
            UsageError: UNKNOWN_AXIS where it is the size of an axis that is not known.
        """
        if self.shift is None:
            return 0
        sign = -1 if self.shift[0] == "-" else 1
        axis = self.shift_axis
        if axis is None:
            return sign * int(self.shift[1:])
        if axis not in sizes:
            raise refuse(
                "UNKNOWN_AXIS",
                f"the size of axis {axis} is needed to number {self.text}",
                hint=f"Give it with --axis {axis}=N, or the model's config.json with --config FILE.",
            )
        return sign * sizes[axis]

    def counted(self, sizes: Mapping[str, int]) -> Counter:
        """Return the hole with its sizes filled in.

        Raises:
            UsageError: UNKNOWN_AXIS where a size that it needs is not known.
        """
        for axis in self.inner:
            if axis not in sizes:
                raise refuse(
                    "UNKNOWN_AXIS",
                    f"the size of axis {axis} is needed for the numbers of {self.text}",
                    hint=f"Give it with --axis {axis}=N, or the model's config.json with --config FILE.",
                )
        return Counter(self.factor, self.added(sizes), tuple(sizes[axis] for axis in self.inner))


class Counter(msgspec.Struct, frozen=True):
    """How a hole turns the indices of its axes into a number, all sizes known."""

    factor: int
    """What the count is multiplied by."""
    shift: int
    """What is added then."""
    spans: tuple[int, ...]
    """Sizes of the axes but the first."""

    def number(self, indices: Sequence[int]) -> int | None:
        """Return the number for some indices; None where one is beyond its axis."""
        count = indices[0]
        for index, span in zip(indices[1:], self.spans, strict=True):
            if index >= span:
                return None
            count = count * span + index
        return count * self.factor + self.shift

    def indices(self, number: int) -> tuple[int, ...] | None:
        """Return the indices that have a number; None where none have.  Inverse: `number`."""
        count, rest = divmod(number - self.shift, self.factor)
        if rest or count < 0:
            return None
        indices: list[int] = []
        for span in reversed(self.spans):
            if span == 0:
                return None
            count, index = divmod(count, span)
            indices.append(index)
        return (count, *reversed(indices))


_DIRECT = Counter(1, 0, ())


class Name(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A name pattern: literals and holes in turn."""

    text: str
    """As written in the table."""
    start: int = 0
    """Where in its line it begins, for errors."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    @cached_property
    def _parts(self) -> tuple[tuple[str, ...], tuple[Hole, ...]]:
        parts = _HOLE.split(self.text)
        literals = tuple(parts[::5])
        holes = tuple(
            _hole(axes, shift, mesh, int(factor or 1))
            for factor, axes, shift, mesh in zip(parts[1::5], parts[2::5], parts[3::5], parts[4::5], strict=True)
        )
        blank = _HOLE.sub(lambda hole: "." * len(hole[0]), self.text)
        for at, character in enumerate(blank):
            if character in "{}":
                raise self._fail("a hole such as {l}, {m+L}, {l-L}, {2*l+1}, {(l e)} or {e@ep}", at)
            if character in "()|":
                raise self._fail("alternatives as (one|other), or a name without '(', ')' and '|'", at)
        for match in _HOLE.finditer(self.text):
            if match[4] and match[2].startswith("("):
                raise self._fail("one axis before '@': of several, no rank has a first index", match.start())
        if not all(literals[1:-1]):
            raise self._fail(
                "text between two holes: without it, nothing tells where one number ends", self.text.index("}{") + 1
            )
        axes = [axis for hole in holes for axis in (hole.axis, *hole.inner)]
        for axis in axes:
            if axes.count(axis) > 1:
                again = [match.start() for match in _HOLE.finditer(self.text) if axis in re.findall(_AXIS, match[2])]
                raise self._fail(f"each axis once; {axis!r} occurs twice", again[-1])
        return literals, holes

    def _fail(self, expected: str, at: int) -> TransaxleError:
        return refuse("CORRUPT", f"{self.text}\n{' ' * at}^\ncolumn {self.start + at + 1}: expected {expected}")

    @property
    def literals(self) -> tuple[str, ...]:
        """Text before, between and after the holes."""
        return self._parts[0]

    @property
    def holes(self) -> tuple[Hole, ...]:
        """The indices, in order."""
        return self._parts[1]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes in the name, in order."""
        return tuple(axis for hole in self.holes for axis in (hole.axis, *hole.inner))

    @cached_property
    def inner(self) -> tuple[str, ...]:
        """Axes whose sizes are needed to tell the numbers of a merged hole apart."""
        return tuple(axis for hole in self.holes for axis in hole.inner)

    def numbering(self, sizes: Mapping[str, int]) -> Numbering:
        """Return how the numbers in this name follow from indices.

        Raises:
            UsageError: UNKNOWN_AXIS where a size that a number depends on is not known.
        """
        counters = tuple(hole.counted(sizes) for hole in self.holes)
        return Numbering(self, counters, all(counter == _DIRECT for counter in counters))

    @cached_property
    def skeleton(self) -> str:
        """Key under which a name that may match is found."""
        return skeleton("0".join(self.literals))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(_DECIMAL.join(re.escape(literal) for literal in self.literals))

    def match(self, name: str) -> tuple[int, ...] | None:
        """Return the numbers in the holes, in order; None if the name does not match. Shifts are still included."""
        matched = self._regex.fullmatch(name)
        return None if matched is None else tuple(map(int, matched.groups()))

    def match_all(self, names: Sequence[str], before: str) -> list[tuple[int, ...]] | None:
        """Return what `match` does of each of very many names without the same text before them; None unless all match.

        It also returns None for names without holes.
        """
        text = _joined(names)
        if text is None or not self.holes:
            return None
        rows = re.findall(f"^{re.escape(before)}{self._regex.pattern}$", text, re.MULTILINE)
        if len(rows) != len(names):
            return None
        columns = zip(*rows, strict=True) if len(self.holes) > 1 else [rows]
        return list(zip(*(map(int, column) for column in columns), strict=True))

    def format(self, numbers: tuple[int, ...]) -> str:
        """Put numbers into the holes, in order.  Inverse: `match`."""
        return self._template % numbers

    @cached_property
    def _template(self) -> str:
        return "%d".join(literal.replace("%", "%%") for literal in self.literals)


def _hole(axes: str, shift: str | None, mesh: str | None, factor: int) -> Hole:
    axis, *inner = re.findall(_AXIS, axes)
    return Hole(axis, shift, mesh, factor, tuple(inner))


class Numbering(msgspec.Struct, frozen=True):
    """The numbers of a name, as its axes count them."""

    name: Name
    """The name."""
    counters: tuple[Counter, ...]
    """One for each hole."""
    is_index: bool
    """Whether the numbers are the indices themselves."""

    def numbers(self, position: Sequence[int]) -> tuple[int | None, ...]:
        """Return the number of each hole for the indices of the name's axes; None where an index is beyond its axis."""
        numbers: list[int | None] = []
        start = 0
        for counter in self.counters:
            stop = start + 1 + len(counter.spans)
            if counter.spans:
                numbers.append(counter.number(position[start:stop]))
            else:
                numbers.append(position[start] * counter.factor + counter.shift)
            start = stop
        return tuple(numbers)

    def position(self, name: str) -> tuple[int, ...] | None:
        """Return the indices of the name's axes for which it gives a stored name, or None.  Inverse: `numbers`."""
        numbers = self.name.match(name)
        if numbers is None or self.is_index:
            return numbers
        position: list[int] = []
        for counter, number in zip(self.counters, numbers, strict=True):
            indices = counter.indices(number)
            if indices is None:
                return None
            position.extend(indices)
        return tuple(position)


def natural(name: str) -> str:
    """Return a sort key in which `layers.2` comes before `layers.10`.

    A number becomes a mark below every character, its count of digits, and these: texts are compared in a fraction of
    the time of tuples.
    """
    middle = name.find(".", len(name) // 2)
    return _natural(name) if middle < 0 else _natural(name[:middle]) + _natural(name[middle:])


@lru_cache(maxsize=1 << 14)
def _natural(part: str) -> str:
    """Return a sort key of a half of a name. Cached, as layers and experts share the words around their numbers."""
    return ".".join(map(_natural_word, part.split(".")))


@lru_cache(maxsize=1 << 14)
def _natural_word(word: str) -> str:
    """Return a sort key of a text without dots. Cached, as names have few words, and layers and experts few numbers."""
    if "\0" in word or "\1" in word:
        word = _MARKS.sub(_escaped, word)
    pieces = _SPLIT.split(word)
    pieces[1::2] = map(_ordered, pieces[1::2])
    return "".join(pieces)


def _escaped(mark: re.Match[str]) -> str:
    """Return a character that marks something in a sort key as one that sorts the same and marks nothing."""
    return f"\1{mark[0]}"


def _ordered(digits: str) -> str:
    """Return a sort key of a number."""
    significant = digits.lstrip("0")
    return f"\0{chr(len(significant))}{significant}"
