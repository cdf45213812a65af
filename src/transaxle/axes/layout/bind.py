"""Binding: reading the names of a checkpoint through a dialect.

Each stored name is one line of the dialect at certain indices, or is listed as ignored, or is unknown. Names match
whole. One prefix (`module.`, `_orig_mod.`, `language_model.`) is bound once for the checkpoint. Where two lines share a
name, the encoding in which the tensor is stored decides (`family.NumberFormat`), the config, or which other tensors
there are; a name that two lines may still have is refused. A parameter's optimizer state `optim/<parameter>/<state>`
follows the line of its parameter: states are *slots*. It may be read through another dialect than the weights are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from operator import ge, lt

import msgspec
from msgspec import structs

from transaxle.axes.layout.relayout import Shape, Stored, solve
from transaxle.axes.notation.expression import Expression
from transaxle.axes.notation.family import PLAIN, WORDS, Dialect, Family, Formula, Line, Sizes, words
from transaxle.axes.notation.name import Hole, Numbering, own_name, own_names, skeleton, skeletons
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse

WEIGHT = ""
"""The slot of the parameter itself."""
OPTIM = "optim/"
"""Prefix of optimizer state: `optim/<parameter>/<state>`."""
IN_MEMORY = "transformers"
"""Dialect of what models of the hub have in memory: experts in stacks, which some files have beside the hub's names."""
_MANY = 16
"""Names that are read together."""
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


class Bound(msgspec.Struct, frozen=True):
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
    encodings: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Stored name -> its encoding, one of `family.WORDS`; names that are not in it are plain."""
    own: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Stored name -> the name that is read, without wrappers inside it; empty where no name has any."""
    state_dialect: Dialect | None = None
    """Dialect through which the optimizer's state is read; None: that of the weights."""


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


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Return names without the segments of wrappers inside them, by stored name; empty where no name has any."""
    parameters = {name: split_slot(name) for name in names}
    own = own_names(dict.fromkeys(parameter for parameter, _ in parameters.values()))
    return own and {name: join_slot(own[parameter], slot) for name, (parameter, slot) in parameters.items()}


def group(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameter names that differ in digits only."""
    listed = list(names)
    grouped: dict[str, list[str]] = defaultdict(list)
    for key, name in zip(skeletons(listed), listed, strict=True):
        grouped[key].append(name)
    return grouped


def score(grouped: Mapping[str, list[str]], dialect: Dialect) -> tuple[int, str]:
    """Return how many names the dialect can read, and the prefix with which it reads the most."""
    counts = _prefixes(grouped, dialect)
    if not counts:
        return 0, ""
    # Of equal counts the shortest prefix wins, which leaves most of the text to the names.
    prefix = max(counts, key=lambda key: (counts[key], -len(key)))
    return counts[prefix], prefix


def refuse_headless(families: Iterable[Family], grouped: Mapping[str, list[str]], ways: str) -> None:
    """Refuse names of which most would be a dialect's, were the first word of its names in front of them.

    Args:
        families: those that they may be of.
        grouped: names of which most are not read as they are, by their skeletons.
        ways: what else can be done.

    Raises:
        UsageError: UNKNOWN_FAMILY: it is a model without its head, as transformers stores base models.
    """
    total = sum(map(len, grouped.values()))
    for family, dialect in [(each, dialect) for each in families for dialect in each.dialects]:
        lacking: dict[str, int] = defaultdict(int)
        for front, _, rest in (key.partition(".") for key in dialect.by_skeleton):
            lacking[front] += len(grouped.get(rest, ()))
        front = max(lacking, key=lacking.__getitem__, default="")
        if 2 * lacking[front] > total:
            first = next(alike[0] for key, alike in grouped.items() if f"{front}.{key}" in dialect.by_skeleton)
            message = (
                f"the names, such as {first}, are those of {family.name}:{dialect.label} without '{front}.' in front: "
                "of a model without its head, for which the table has none"
            )
            raise refuse("UNKNOWN_FAMILY", message, hint=f"Save the whole model, with '{front}.' in front.\n{ways}")


def with_counts(sizes: Sizes, dialect: Dialect, prefix: str, names: Iterable[str]) -> Sizes:
    """Return sizes with those that a dialect's names are numbered from (`mtp_layers.{l-L}`), as the names show them.

    The dialect numbers what comes first by itself (`layers.{l}`): there are as many as these names have numbers.

    Args:
        sizes: what the config and the user say, which wins.
        dialect: the dialect of the names.
        prefix: text before every name.
        names: stored names.
    """
    holes = [(line.name.skeleton, hole) for line in dialect.lines for hole in line.name.holes]
    shifted = {key: hole for key, hole in holes if hole.shift_axis and hole.shift == f"-{hole.shift_axis}"}
    if {hole.shift_axis for hole in shifted.values()} <= sizes.at({}).keys():
        return sizes
    grouped = group(split_slot(name)[0].removeprefix(prefix) for name in names)
    given: dict[str, int] = {}
    for axis, base in {(hole.axis, hole.shift_axis) for key, hole in shifted.items() if key in grouped}:
        firsts = [
            numbers[at] + 1
            for key, alike in grouped.items()
            for line in dialect.by_skeleton.get(key, ())
            for at, hole in enumerate(line.name.holes)
            if hole == Hole(axis, None, None)
            for name in alike
            if (numbers := line.name.match(name)) is not None
        ]
        if firsts and base is not None:
            given[base] = max(firsts)
    return structs.replace(sizes, given={**given, **sizes.given}) if given else sizes


def bind(
    names: Sequence[str],
    family: Family,
    dialect: Dialect,
    sizes: Sizes,
    prefix: str = "",
    encodings: Mapping[str, str] | None = None,
    stored: Mapping[str, Stored] | None = None,
    weights: Bound | None = None,
) -> Bound:
    """Read names through a dialect.

    Args:
        names: stored names.
        family: the family they belong to.
        dialect: the dialect to read them through.
        sizes: axis sizes from the config and the user.
        prefix: text before every name of the dialect.
        encodings: stored name -> its encoding, one of `family.WORDS`; None: all are plain.
        stored: the tensors by name; their shapes may show a size without which merged numbers cannot be told apart.
        weights: those that the names are the optimizer's state of, if they are read already; None: they are not.

    Raises:
        UsageError: UNKNOWN_AXIS where an index cannot be told apart without the size of an axis; AMBIGUOUS where the
            config does not tell which of two lines a name is of.
        Refused: NAME_COLLISION for two names that differ in wrappers alone.
    """
    encodings = encodings or {}
    if own := without_wrappers(names):
        stored_names = {inner: name for name, inner in own.items()}
        if len(stored_names) < len(own):
            raise _wrapped_alike(own, stored_names)
        inner_stored = {own[name]: tensor for name, tensor in (stored or {}).items() if name in own}
        inner_encodings = {own[name]: encoding for name, encoding in encodings.items() if name in own}
        inner_bound = bind(tuple(stored_names), family, dialect, sizes, prefix, inner_encodings, inner_stored, weights)
        return _as_stored(inner_bound, stored_names, encodings)
    merged = _Merged(dialect, sizes, prefix)
    if not merged.lines:
        return _bound(names, family, dialect, sizes, prefix, encodings, weights)
    told = structs.replace(dialect, lines=tuple(line for line in dialect.lines if line not in merged.lines))
    postponed = {name for name in names if merged.matches(name)}
    bound = _bound([name for name in names if name not in postponed], family, told, sizes, prefix, encodings, weights)
    if postponed:
        sizes = merged.sized(weights or bound, stored or {}, postponed)
        return _bound(names, family, dialect, sizes, prefix, encodings, weights)
    return structs.replace(bound, dialect=dialect)


def _wrapped_alike(own: Mapping[str, str], stored_names: Mapping[str, str]) -> TransaxleError:
    """Build the refusal of names that are one name without wrappers.

    Args:
        own: stored name -> name without wrappers.
        stored_names: the other way round; of names that collide, the last.
    """
    message = "without the segments of wrappers it has the name of {}: {}"
    hint = "Wrappers such as torch.compile add a segment to a name; keep all names with --to safetensors:identity."
    return gathered(
        Refusal("NAME_COLLISION", message.format(stored_names[inner], inner), Where(None, name), hint)
        for name, inner in own.items()
        if stored_names[inner] != name
    )


def _as_stored(bound: Bound, stored_names: Mapping[str, str], encodings: Mapping[str, str]) -> Bound:
    """Return names that were read without wrappers, as they are stored.

    What no line reads keeps a module that is called `module`: that it is a wrapper, only names that are read prove.
    """
    own = {name: inner for inner, name in stored_names.items()}
    unread = (stored_names[inner] for inner in bound.unknown)
    own |= {name: name for name in unread if own_name(name) == name}
    return structs.replace(
        bound,
        names={
            key: {index: stored_names[name] for index, name in of_line.items()} for key, of_line in bound.names.items()
        },
        ignored=tuple(stored_names[name] for name in bound.ignored),
        unknown=tuple(stored_names[name] for name in bound.unknown),
        encodings=encodings,
        own=own,
    )


def with_kept(bound: Bound, target: Dialect, sizes: Sizes, stored: Mapping[str, Stored]) -> Bound:
    """Read the names that a checkpoint's own dialect has no line for through the target's, and what is left through
    those of the hub, which the family's first dialect has, and those that its models have in memory.

    They are kept names: so they are what the other dialect says they are, unless the checkpoint has that already. What
    `hf` has and two others have no line for comes back like that, and conditions that ask for it hold again.

    Args:
        bound: the stored names, read through their own dialect.
        target: the dialect wanted.
        sizes: axis sizes from the config and the user.
        stored: the tensors by name.

    Raises:
        UsageError: as `bind` does.
    """
    family = bound.family
    for dialect in (target, family.dialects[0], family.dialect(IN_MEMORY)):
        bound = bound if dialect is None else _with_names_of(dialect, bound, sizes, stored)
    return bound


def with_state_of(bound: Bound, dialect: Dialect, prefix: str, sizes: Sizes, stored: Mapping[str, Stored]) -> Bound:
    """Read the optimizer's state through another dialect than the weights, as far as that reads it.

    Args:
        bound: all names, read through the dialect of the weights.
        dialect: that of the parameters' names in the state.
        prefix: text before every one of these.
        sizes: axis sizes from the config and the user.
        stored: the tensors by name.

    Raises:
        UsageError: as `bind` does.
    """
    state = tuple(name for name in stored if split_slot(name)[1] != WEIGHT)
    state_bound = bind(state, bound.family, dialect, sizes, prefix, bound.encodings, stored, bound)
    left = frozenset(state_bound.unknown)
    names = {
        key: {index: name for index, name in of_line.items() if key[1] == WEIGHT or name in left}
        for key, of_line in bound.names.items()
    }
    for key, of_line in state_bound.names.items():
        names[key] = {**names.get(key, {}), **of_line}
    return structs.replace(
        bound,
        names={key: of_line for key, of_line in names.items() if of_line},
        ignored=tuple(dict.fromkeys((*bound.ignored, *state_bound.ignored))),
        unknown=tuple(name for name in bound.unknown if split_slot(name)[1] == WEIGHT or name in left),
        state_dialect=dialect,
    )


def _with_names_of(dialect: Dialect, bound: Bound, sizes: Sizes, stored: Mapping[str, Stored]) -> Bound:
    """Read the names that are unknown so far through another dialect."""
    if not bound.unknown or dialect is bound.dialect:
        return bound
    kept = bind(bound.unknown, bound.family, dialect, sizes, encodings=bound.encodings, stored=stored)
    names: _BoundNames = defaultdict(dict, {key: dict(of_line) for key, of_line in bound.names.items()})
    present = _Presence(bound.names)
    read = set()
    for (line, slot), of_line in kept.names.items():
        for position, name in of_line.items():
            index = dict(zip(line.name.axes, position, strict=True))
            if not any(present.at(component, index) for component in line.expression.components):
                names[line, slot][position] = name
                read.add(name)
    return structs.replace(bound, names=dict(names), unknown=tuple(name for name in bound.unknown if name not in read))


def _bound(
    names: Sequence[str],
    family: Family,
    dialect: Dialect,
    sizes: Sizes,
    prefix: str,
    encodings: Mapping[str, str],
    weights: Bound | None = None,
) -> Bound:
    """Read names through a dialect, all sizes that their numbers need being known."""
    bound_names: _BoundNames = defaultdict(dict)
    ignored: list[str] = []
    unknown: list[str] = []
    reader = _NameReader(dialect, sizes)
    doubtful: list[tuple[str, _Fits]] = []
    for name in _others(names, prefix, reader, bound_names):
        parameter, slot = split_slot(name)
        if not parameter.startswith(prefix):
            unknown.append(name)
            continue
        bare = parameter[len(prefix) :]
        fits = reader.read(bare, encodings.get(name, PLAIN))
        if len(fits) == 1:
            ((line, position),) = fits
            bound_names[line, slot][position] = name
        elif fits:
            doubtful.append((name, fits))
        elif reader.ignores(bare):
            ignored.append(name)
        else:
            unknown.append(name)
    if doubtful:
        _settle(doubtful, bound_names, family, sizes, encodings, weights)
    firsts = {next(iter(of_line.values())): key for key, of_line in bound_names.items()}
    in_order = {firsts[name]: bound_names[firsts[name]] for name in names if name in firsts}
    return Bound(family, dialect, prefix, in_order, tuple(ignored), tuple(unknown), encodings)


def _others(names: Sequence[str], prefix: str, reader: _NameReader, bound_names: _BoundNames) -> Sequence[str]:
    """Bind parameters that differ in numbers alone, all those of a line at once; return the other names, in order."""
    if len(names) < _MANY:
        return names
    others: set[str] = set()
    for alike in group(names).values():
        found = reader.read_all(alike, prefix) if len(alike) >= _MANY and split_slot(alike[0])[1] == WEIGHT else None
        if found is None:
            others.update(alike)
        else:
            line, positions = found
            bound_names[line, WEIGHT] = dict(zip(positions, alike, strict=True))
    return [name for name in names if name in others]


class _Merged:
    """Lines with several axes in one number (`{(l e)}`) that cannot be told apart without a size that is not known."""

    def __init__(self, dialect: Dialect, sizes: Sizes, prefix: str) -> None:
        self._sizes = sizes
        self._prefix = prefix
        merged = [line for line in dialect.lines if line.name.inner]
        known = sizes.at({}) if merged else {}
        self.lines = frozenset(line for line in merged if not known.keys() >= set(line.name.inner))
        self._by_skeleton = {line.name.skeleton for line in self.lines}

    def matches(self, name: str) -> bool:
        """Tell whether a stored name may be of one of them."""
        parameter = split_slot(name)[0]
        bare = parameter[len(self._prefix) :]
        return (
            parameter.startswith(self._prefix)
            and skeleton(bare) in self._by_skeleton
            and any(line.name.match(bare) is not None for line in self.lines)
        )

    def sized(self, others: Bound, stored: Mapping[str, Stored], names: Iterable[str]) -> Sizes:
        """Return sizes with those that the shapes of all other tensors show.

        Names show none: 12 numbers of `{(l e)}` may be 3 times 4 or 4 times 3.

        Raises:
            UsageError: UNKNOWN_AXIS where they do not show one that is needed.
        """
        equations: dict[Expression, dict[Shape, Mapping[str, int]]] = defaultdict(dict)
        for (line, slot), by_index in others.names.items():
            for index, name in by_index.items():
                if slot == WEIGHT and name in stored:
                    at = dict(zip(line.name.axes, index, strict=True))
                    equations[line.expression].setdefault(stored[name].shape, at)
        sizes = solve(equations, self._sizes)
        known = sizes.at({})
        bare = [split_slot(name)[0][len(self._prefix) :] for name in names]
        for line in self.lines:
            missing = [axis for axis in line.name.inner if axis not in known]
            numbers = [found for name in bare if (found := line.name.match(name)) is not None]
            if missing and numbers:
                raise _untold(line, missing[0], numbers, known)
        return sizes


def _untold(line: Line, axis: str, numbers: Sequence[tuple[int, ...]], known: Mapping[str, int]) -> TransaxleError:
    """Build the refusal of numbers that cannot be told apart, with what their count would mean."""
    place, hole = next((place, hole) for place, hole in enumerate(line.name.holes) if axis in hole.inner)
    count = len({found[place] for found in numbers})
    others = [other for other in (hole.axis, *hole.inner) if other != axis]
    guess = ""
    # Zero where a size is unknown: then nothing follows from the count.
    outside = prod(known.get(other, 0) for other in others)
    if outside and count % outside == 0:
        whole = " and ".join(f"{other}={known[other]}" for other in others)
        guess = f" If all {count} are here, then with {whole}, {axis}={count // outside}."
    message = (
        f"{line.text}\nthe size of axis {axis} is needed to tell what the {count} numbers of {hole.text} mean, and no "
        "shape shows it"
    )
    hint = f"Give it with --axis {axis}=N, or the model's config.json with --config FILE.{guess}"
    return refuse("UNKNOWN_AXIS", message, hint=hint)


_Fits = list[tuple[Line, Index]]
"""Lines that a name may be of, each with the indices that give the name."""
_BoundNames = dict[tuple[Line, str], dict[Index, str]]


def _settle(
    doubtful: Iterable[tuple[str, _Fits]],
    bound_names: _BoundNames,
    family: Family,
    sizes: Sizes,
    encodings: Mapping[str, str],
    weights: Bound | None,
) -> None:
    """Bind the names that several lines may have: by the conditions that name other tensors, which are bound by now.

    Raises:
        UsageError: AMBIGUOUS, each group of lines once.
    """
    settled: list[tuple[Line, Index, str]] = []
    problems: dict[tuple[Line, ...], Refusal] = {}
    present = _Presence(bound_names if weights is None else weights.names)
    for name, fits in doubtful:
        encoding = words(encodings.get(name, PLAIN))

        def known(formula: Formula, index: Mapping[str, int], encoding: Mapping[str, bool] = encoding) -> bool | None:
            there = {tensor: present.at(tensor, index) for tensor in formula.names & family.tensors.keys()}
            return sizes.holds(formula, index, {**there, **encoding})

        indices = [dict(zip(line.name.axes, position, strict=True)) for line, position in fits]
        left = [
            fit
            for fit, index in zip(fits, indices, strict=True)
            if fit[0].when is None or known(fit[0].when, index) is not False
        ]
        if len(left) > 1:
            lines = tuple(line for line, _ in left)
            refusal = undecided(lines, "can have this name", family, partial(known, index=indices[0]))
            problems.setdefault(lines, replace(refusal, where=Where(None, name)))
        else:
            settled.append((*(left or fits)[0], name))
    if problems:
        raise gathered(problems.values())
    for line, position, name in settled:
        bound_names[line, split_slot(name)[1]][position] = name


class _Presence:
    """Which logical tensors the bound names hold, and where."""

    def __init__(self, bound_names: Mapping[tuple[Line, str], Mapping[Index, str]]) -> None:
        self._indices: dict[str, list[tuple[Line, Iterable[Index]]]] = defaultdict(list)
        for (line, slot), names in bound_names.items():
            for component in line.expression.components if slot == WEIGHT else ():
                self._indices[component].append((line, names))
        self._projected: dict[tuple[Line, tuple[str, ...]], frozenset[Index]] = {}

    def at(self, tensor: str, index: Mapping[str, int]) -> bool:
        """Tell whether some stored tensor can hold a logical tensor at these indices."""
        for line, positions in self._indices.get(tensor, ()):
            common = tuple(axis for axis in line.name.axes if axis in index)
            if (line, common) not in self._projected:
                places = [line.name.axes.index(axis) for axis in common]
                self._projected[line, common] = frozenset(tuple(p[i] for i in places) for p in positions)
            if tuple(index[axis] for axis in common) in self._projected[line, common]:
                return True
        return False


def undecided(lines: Sequence[Line], what: str, family: Family, known: Callable[[Formula], bool | None]) -> Refusal:
    """Return the refusal of lines of which only one can apply, where nothing tells which.

    Args:
        lines: the lines.
        what: what only one of them can do.
        family: their family.
        known: what is known of a formula.
    """
    names = dict.fromkeys(name for line in lines if line.when is not None for name in sorted(line.when.names))
    open_names = [n for n in names if n not in WORDS and n not in family.name_axes and known(Formula(n)) is None]
    missing = ", ".join(open_names) or "what these conditions ask"
    message = f"only one of these lines {what}, and the config does not say which: {missing} is unknown"
    hint = "Give the model's config.json with --config FILE (config=): it says which line applies."
    return Refusal("AMBIGUOUS", "\n".join([*(line.whole for line in lines), message]), hint=hint)


class _Candidate(msgspec.Struct, frozen=True):
    """A line that a name of this skeleton may match."""

    line: Line
    numbering: Numbering
    """How its numbers follow from indices."""
    limits: tuple[float, ...]
    """Size of each axis in the name; infinite where it is unknown."""

    def index(self, name: str) -> Index | None:
        """Return the indices for which the line gives this name, or None."""
        position = self.numbering.position(name)
        # A number must not be beyond a known size.
        return position if position is not None and all(map(lt, position, self.limits)) else None


class _NameReader:
    """Reads names through a dialect; looks up each skeleton's lines once."""

    def __init__(self, dialect: Dialect, sizes: Sizes) -> None:
        self.dialect = dialect
        self.sizes = sizes
        self.known = sizes.at({})
        self.candidates: dict[str, list[_Candidate]] = {}

    def read(self, name: str, encoding: str = PLAIN) -> _Fits:
        """Return the lines that may give this name, with the indices for which they do: more than one only where the
        config does not tell which.
        """
        fits = [(c.line, index) for c in self._candidates(name) if (index := c.index(name)) is not None]
        if len(fits) < 2:
            return fits
        held = [self._holds(line, index, encoding) for line, index in fits]
        # A condition may be unknown (None). One that is false comes into question only where all are.
        best = [fit for fit, holds in zip(fits, held, strict=True) if holds] or [
            fit for fit, holds in zip(fits, held, strict=True) if holds is None
        ]
        return best or fits[:1]

    def read_all(self, names: Sequence[str], prefix: str) -> tuple[Line, list[Index]] | None:
        """Return the line of very many names that differ in numbers alone, and the indices of each, as `read` does;
        None where they are to be read one by one.

        Args:
            names: parameters' names.
            prefix: text before every name of the dialect.
        """
        candidates = self._candidates(names[0].removeprefix(prefix))
        if len(candidates) != 1 or not candidates[0].numbering.is_index:
            return None
        (candidate,) = candidates
        positions = candidate.line.name.match_all(names, prefix)
        if positions is None or any(map(ge, map(max, zip(*positions, strict=True)), candidate.limits)):
            return None
        return candidate.line, positions

    def _candidates(self, name: str) -> list[_Candidate]:
        """Return the lines that a name may match."""
        key = skeleton(name)
        candidates = self.candidates.get(key)
        if candidates is None:
            candidates = self.candidates[key] = [self._candidate(c) for c in self.dialect.by_skeleton.get(key, ())]
        return candidates

    def _candidate(self, line: Line) -> _Candidate:
        limits = tuple(self.known.get(axis, inf) for axis in line.name.axes)
        return _Candidate(line, line.name.numbering(self.known), limits)

    def _holds(self, line: Line, index: Index, encoding: str) -> bool | None:
        return self.sizes.holds(line.when, dict(zip(line.name.axes, index, strict=True)), words(encoding))

    def ignores(self, name: str) -> bool:
        """Tell whether the dialect ignores a name."""
        may_match = skeleton(name) in self.dialect.ignored_skeletons
        return may_match and any(pattern.match(name) is not None for pattern in self.dialect.ignored)
