"""Name patterns: stored tensor names with placeholders ("holes") for the indices of axes, such as the layer's number.

    model.layers.{l}.mlp.experts.{e}.down_proj.weight      {l} is the index of axis l
    model.layers.{m+L}.eh_proj.weight                      index arithmetic: layer number m + L, L an axis size
    blocks.{2*l+1}.weight                                  every second number: 1, 3, 5
    experts.{(l e)}.weight                                 two axes merged: number l * E + e, E the size of e
    mtp_layers.{l-L}.eh_proj.weight                        the reverse: number l - L, for l from L on
    decoder.layers.{l}.mlp.experts.linear_fc1.weight{e@ep} the index counts from the first expert of a rank of axis ep

A hole matches a decimal number without sign or leading zeros, of at most ten digits. The text outside of holes must
match exactly, and a pattern must match the whole name. `skeleton` maps names that differ only in digits to the same
key, so finding the pattern for a name takes constant time.
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
"""Characters that have a special meaning in the sort keys of `natural`."""
_DECIMAL = "(0|[1-9][0-9]{0,9})"
_SEPARATOR = "."
_NEXT = "\n"
COMPILED, CHECKPOINTED, FSDP1 = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"
"""Attributes in which the wrappers of `torch.compile`, activation checkpointing and FSDP1 keep the wrapped module."""
_WRAPPERS = frozenset({COMPILED, CHECKPOINTED, FSDP1})
"""Name segments that torch's module wrappers insert into parameter names."""
_PARALLEL = "module"
"""Name segment that DDP and training loops insert. An ordinary module may have this name too, so the segment counts as
a wrapper's only if the parent module has no other child.
"""
_AROUND = _WRAPPERS | {_PARALLEL, "_forward_module"}
_OUTER = _AROUND | {"model", "model_state_dict", "model_state", "state_dict"}
"""Segments that wrappers may put in front of all names of a model; other prefixes mean that the model is part of a
larger one.
"""
_MARKED = tuple(f"{segment}{_SEPARATOR}" for segment in (*sorted(_WRAPPERS), _PARALLEL))


def own_name(name: str) -> str:
    """Return a parameter name without the segments that torch's module wrappers insert."""
    return _SEPARATOR.join(segment for segment in name.split(_SEPARATOR) if segment not in _WRAPPERS)


def own_names(names: Iterable[str], *, outer: bool = False) -> dict[str, str]:
    """Return name -> name without the segments of module wrappers; empty if no name has such segments.

    Args:
        names: parameter names without duplicates.
        outer: whether to strip also wrapper segments with which all names begin.
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
    stripped = bare if outer else {name: prefix + inner for name, inner in bare.items()}
    return stripped if any(name != inner for name, inner in stripped.items()) else {}


def _places_of_module(names: Collection[str]) -> set[str]:
    """Return the names of the modules whose only child is named `module`."""
    if not any(f"{_PARALLEL}{_SEPARATOR}" in name for name in names):
        return set()
    children: dict[str, set[str]] = defaultdict(set)
    for name in names:
        segments = name.split(_SEPARATOR)
        for at, segment in enumerate(segments):
            children[_SEPARATOR.join(segments[:at])].add(segment)
    return {place for place, segments in children.items() if segments == {_PARALLEL}}


def _without(name: str, places: Container[str]) -> str:
    """Return a name without the segments that directly follow one of the module names in `places`."""
    segments = name.split(_SEPARATOR)
    segments_left = (segment for at, segment in enumerate(segments) if _SEPARATOR.join(segments[:at]) not in places)
    return _SEPARATOR.join(segments_left)


def is_outer(prefix: str) -> bool:
    """Return whether a prefix consists only of segments that data parallelism, compilation or training loops add."""
    return _OUTER.issuperset(prefix.split(_SEPARATOR)[:-1])


def skeleton(name: str) -> str:
    """Return the name with each number in it replaced by a single `0`."""
    return _shorten(name.encode(errors="surrogatepass").translate(_ZEROS))


def skeletons(names: Sequence[str]) -> list[str]:
    """Return the skeleton of each name; for many names one call is faster than many calls of `skeleton`."""
    text = _join_lines(names)
    if text is None:
        return list(map(skeleton, names))
    zeros = text.encode(errors="surrogatepass").translate(_ZEROS)
    while b"00" in zeros:
        zeros = zeros.replace(b"00", b"0")
    return zeros.decode(errors="surrogatepass").split(_NEXT)


def _join_lines(names: Sequence[str]) -> str | None:
    """Join names with newlines; the result is None if a name contains a newline."""
    text = _NEXT.join(names)
    return text if text.count(_NEXT) == len(names) - 1 else None


@lru_cache(maxsize=1 << 14)
def _shorten(zeros: bytes) -> str:
    """Replace every run of zeros by one zero; results are cached, because many names have the same skeleton."""
    return _RUN.sub(b"0", zeros).decode(errors="surrogatepass")


class Hole(msgspec.Struct, frozen=True):
    """A placeholder for a number in a name pattern, such as `{l}`."""

    axis: str
    """Axis whose index the number in the name is."""
    shift: str | None
    """`+` or `-`, followed by a number or an axis: the number or axis size that is added to the index or subtracted."""
    mesh: str | None
    """Mesh dim whose ranks each count the index from their own first index; None if all ranks count from 0.
    """
    factor: int = 1
    """Number by which the index is multiplied before the shift is added."""
    inner: tuple[str, ...] = ()
    """Axes that are merged with `axis` into one number, as in `{(l e)}`, outermost first."""

    @property
    def text(self) -> str:
        """The placeholder as written in the rules file, such as `{l}`."""
        axes = f"({' '.join((self.axis, *self.inner))})" if self.inner else self.axis
        times = f"{self.factor}*" if self.factor > 1 else ""
        return f"{{{times}{axes}{self.shift or ''}{f'@{self.mesh}' if self.mesh else ''}}}"

    @property
    def shift_axis(self) -> str | None:
        """Axis whose size is added to or subtracted from the index; None if the shift contains no axis."""
        return None if self.shift is None or self.shift[1:].isdigit() else self.shift[1:]

    def shift_value(self, sizes: Mapping[str, int]) -> int:
        """Return the number that is added to the index; it is negative if the pattern subtracts it.

        Raises:
            UsageError: with the code UNKNOWN_AXIS if the number is an axis size, and the size is unknown.
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

    def counter(self, sizes: Mapping[str, int]) -> Counter:
        """Return the conversion between a placeholder's indices and its number, for the given axis sizes.

        Raises:
            UsageError: with the code UNKNOWN_AXIS if the size of an axis that the number depends on is unknown.
        """
        for axis in self.inner:
            if axis not in sizes:
                raise refuse(
                    "UNKNOWN_AXIS",
                    f"the size of axis {axis} is needed for the numbers of {self.text}",
                    hint=f"Give it with --axis {axis}=N, or the model's config.json with --config FILE.",
                )
        return Counter(self.factor, self.shift_value(sizes), tuple(sizes[axis] for axis in self.inner))


class Counter(msgspec.Struct, frozen=True):
    """Converts the indices of a placeholder's axes to the number in the name and back, for known axis sizes."""

    factor: int
    """Number by which the index (of several merged axes: the combined index) is multiplied."""
    shift: int
    """Number added to the product of index and factor."""
    spans: tuple[int, ...]
    """Sizes of the merged axes except the first."""

    def number(self, indices: Sequence[int]) -> int | None:
        """Return the number for the indices of the merged axes; None if an index is beyond the size of its axis."""
        count = indices[0]
        for index, span in zip(indices[1:], self.spans, strict=True):
            if index >= span:
                return None
            count = count * span + index
        return count * self.factor + self.shift

    def indices(self, number: int) -> tuple[int, ...] | None:
        """Return the indices for which `number` returns this number; None if there are no such indices."""
        count, remainder = divmod(number - self.shift, self.factor)
        if remainder or count < 0:
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
    """A name pattern: literal texts alternating with placeholders."""

    text: str
    """The pattern as written in the rules file."""
    start: int = 0
    """Column at which the pattern begins in its line of the file, for error messages."""

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
        """The literal texts before, between and after the placeholders."""
        return self._parts[0]

    @property
    def holes(self) -> tuple[Hole, ...]:
        """The placeholders, in the order of the name."""
        return self._parts[1]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes of all placeholders, in the order of the name."""
        return tuple(axis for hole in self.holes for axis in (hole.axis, *hole.inner))

    @cached_property
    def inner(self) -> tuple[str, ...]:
        """Axes whose sizes are needed to split a merged number, as in `{(l e)}`, into indices."""
        return tuple(axis for hole in self.holes for axis in hole.inner)

    def index_at(self, position: Sequence[int]) -> dict[str, int]:
        """Return axis -> index, for the indices of the name's axes in the order of the name."""
        return dict(zip(self.axes, position, strict=True))

    def numbering(self, sizes: Mapping[str, int]) -> Numbering:
        """Return the conversion between axis indices and the numbers in this name.

        Raises:
            UsageError: with the code UNKNOWN_AXIS if the size of an axis on which a number depends is unknown.
        """
        counters = tuple(hole.counter(sizes) for hole in self.holes)
        return Numbering(self, counters, all(counter == _DIRECT for counter in counters))

    @cached_property
    def skeleton(self) -> str:
        """Skeleton of all names that match the pattern; it is the key by which the pattern is looked up."""
        return skeleton("0".join(self.literals))

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(_DECIMAL.join(re.escape(literal) for literal in self.literals))

    def match(self, name: str) -> tuple[int, ...] | None:
        """Return the numbers that a stored name has in place of the placeholders; None if the name does not match."""
        matched = self._regex.fullmatch(name)
        return None if matched is None else tuple(map(int, matched.groups()))

    def match_all(self, names: Sequence[str], before: str) -> list[tuple[int, ...]] | None:
        """Return `match` for each name without its prefix, faster than many calls of `match`. The result is None if
        some name does not match, or if the pattern has no placeholders.
        """
        text = _join_lines(names)
        if text is None or not self.holes:
            return None
        rows = re.findall(f"^{re.escape(before)}{self._regex.pattern}$", text, re.MULTILINE)
        if len(rows) != len(names):
            return None
        columns = zip(*rows, strict=True) if len(self.holes) > 1 else [rows]
        return list(zip(*(map(int, column) for column in columns), strict=True))

    def format(self, numbers: tuple[int, ...]) -> str:
        """Return the name with these numbers in place of the placeholders; `match` is the inverse."""
        return self._template % numbers

    @cached_property
    def _template(self) -> str:
        return "%d".join(literal.replace("%", "%%") for literal in self.literals)


def _hole(axes: str, shift: str | None, mesh: str | None, factor: int) -> Hole:
    axis, *inner = re.findall(_AXIS, axes)
    return Hole(axis, shift, mesh, factor, tuple(inner))


class Numbering(msgspec.Struct, frozen=True):
    """Converts between the indices of a name's axes and the numbers in the name, for known axis sizes."""

    name: Name
    """The pattern of the names that are converted."""
    counters: tuple[Counter, ...]
    """For each placeholder, the conversion between the placeholder's indices and its number."""
    is_index: bool
    """Whether every number in the name equals the index of its axis."""

    def numbers(self, position: Sequence[int]) -> tuple[int | None, ...]:
        """Return the number in each placeholder for the indices of the name's axes; None in place of a number if an
        index is beyond the size of its axis.
        """
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
        """Return the indices of the name's axes for this stored name; None if no indices produce the name."""
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
    """Return a sort key by which `layers.2` comes before `layers.10`.

    In the key, each number becomes a mark that sorts before every character, then the count of digits, then the digits.
    Comparing such texts is several times as fast as comparing tuples.
    """
    middle = max(name.find(".", len(name) // 2), 0)
    return _natural(name[:middle]) + _natural(name[middle:])


@lru_cache(maxsize=1 << 14)
def _natural(part: str) -> str:
    """Return the sort key of half a name; results are cached, because layers and experts share the words around their
    numbers.
    """
    return ".".join(map(_natural_word, part.split(".")))


@lru_cache(maxsize=1 << 14)
def _natural_word(word: str) -> str:
    """Return the sort key of a text without dots; results are cached, because names consist of few distinct words."""
    if "\0" in word or "\1" in word:
        word = _MARKS.sub(_escape_mark, word)
    pieces = _SPLIT.split(word)
    pieces[1::2] = map(_number_key, pieces[1::2])
    return "".join(pieces)


def _escape_mark(mark: re.Match[str]) -> str:
    """Return a replacement for a mark character that occurs in a name: it sorts like the character, but is no mark."""
    return f"\1{mark[0]}"


def _number_key(digits: str) -> str:
    """Return the sort key of a number, which is written in decimal digits."""
    significant = digits.lstrip("0")
    return f"\0{chr(len(significant))}{significant}"
