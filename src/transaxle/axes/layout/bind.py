"""Binding: matching the names of a checkpoint with the lines of a dialect.

Each stored name matches one line of the dialect at certain indices, or is listed as ignored, or is unknown. Patterns
match whole names. One prefix (`module.`, `_orig_mod.`, `language_model.`) is stripped for the whole checkpoint. Where
two lines share a name, the encoding of the stored tensor decides (`family.NumberFormat`), or the config, or the
presence of other tensors; a name that two lines may still match is refused. The optimizer state of a parameter,
`optim/<parameter>/<state>`, follows the line of its parameter: each state is a *slot*. Optimizer state may be read
through another dialect than the weights.
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
"""Slot of the parameter itself."""
OPTIM = "optim/"
"""Prefix of names of optimizer state: `optim/<parameter>/<state>`."""
IN_MEMORY = "transformers"
"""Dialect of hub models in the memory of transformers, with stacked experts; some files use it beside the hub's names.

"""
_MANY = 16
"""Least number of similar names for which they are bound in one call."""
Index = tuple[int, ...]
"""Indices of the axes in a line's name, in the order of the name."""


def split_slot(name: str) -> tuple[str, str]:
    """Split a stored name into the name of its parameter and its slot."""
    if name.startswith(OPTIM):
        parameter, _, state = name[len(OPTIM) :].rpartition("/")
        if parameter and state != WEIGHT:
            return parameter, state
    return name, WEIGHT


def join_slot(parameter: str, slot: str) -> str:
    """Return the stored name of a parameter's slot.  Inverse: `split_slot`."""
    return parameter if slot == WEIGHT else f"{OPTIM}{parameter}/{slot}"


class BoundNames(msgspec.Struct, frozen=True):
    """The names of one checkpoint, matched with the lines of one dialect."""

    family: Family
    """Family of the model."""
    dialect: Dialect
    """Dialect whose lines the names were matched with."""
    prefix: str
    """Prefix that every name has before the names of the dialect."""
    names: Mapping[tuple[Line, str], Mapping[Index, str]]
    """`(line, slot)` -> index -> stored name."""
    ignored: tuple[str, ...]
    """Stored names with nothing of the model in them, such as recomputable buffers."""
    unknown: tuple[str, ...]
    """Stored names without a line in the dialect."""
    encodings: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Stored name -> its encoding, one of `family.WORDS`; plain tensors are absent."""
    own: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Stored name -> the name without segments of wrappers inside it; empty where no name has such segments."""
    state_dialect: Dialect | None = None
    """Dialect in which the optimizer state is named; None: that of the weights."""


def _prefixes(names: Mapping[str, list[str]], dialect: Dialect) -> dict[str, int]:
    """Count, for every possible prefix, the names that the dialect could read if the prefix were stripped."""
    readable: dict[str, int] = defaultdict(int)
    longest = max(map(len, dialect.by_skeleton), default=0)
    for key, names_alike in names.items():
        sample = names_alike[0]
        # No run of digits contains a dot, so the skeleton after a dot is the skeleton of the text after that dot.
        # Dots are tried from the right, only as far as the dialect's names are long: a name may have 10,000 dots.
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
    """Strip the segments of wrappers from inside names: stored name -> stripped name; empty where no name has any."""
    parameters = {name: split_slot(name) for name in names}
    unwrapped = own_names(dict.fromkeys(parameter for parameter, _ in parameters.values()))
    return unwrapped and {name: join_slot(unwrapped[parameter], slot) for name, (parameter, slot) in parameters.items()}


def group(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameter names that differ only in digits, by skeleton."""
    listed = list(names)
    grouped: dict[str, list[str]] = defaultdict(list)
    for key, name in zip(skeletons(listed), listed, strict=True):
        grouped[key].append(name)
    return grouped


def score(grouped: Mapping[str, list[str]], dialect: Dialect) -> tuple[int, str]:
    """Return how many names the dialect can read with its best prefix, and that prefix."""
    counts = _prefixes(grouped, dialect)
    if not counts:
        return 0, ""
    # Of equal counts the shortest prefix wins, which leaves most of the text to the names.
    prefix = max(counts, key=lambda key: (counts[key], -len(key)))
    return counts[prefix], prefix


def refuse_headless(families: Iterable[Family], grouped: Mapping[str, list[str]], ways: str) -> None:
    """Refuse names that mostly lack only the first segment of a dialect's names.

    Args:
        families: families that the names may belong to.
        grouped: the checkpoint's names by skeleton, most of which the dialects cannot read.
        ways: text for the hint: other ways out.

    Raises:
        UsageError: UNKNOWN_FAMILY: the model is stored without its head, as transformers stores base models.
    """
    total = sum(map(len, grouped.values()))
    for family, dialect in [(each, dialect) for each in families for dialect in each.dialects]:
        lacking: dict[str, int] = defaultdict(int)
        for front, _, tail in (key.partition(".") for key in dialect.by_skeleton):
            lacking[front] += len(grouped.get(tail, ()))
        front = max(lacking, key=lacking.__getitem__, default="")
        if 2 * lacking[front] > total:
            first = next(alike[0] for key, alike in grouped.items() if f"{front}.{key}" in dialect.by_skeleton)
            message = (
                f"the names, such as {first}, are those of {family.name}:{dialect.label} without '{front}.' in front: "
                "of a model without its head, for which the table has none"
            )
            raise refuse("UNKNOWN_FAMILY", message, hint=f"Save the whole model, with '{front}.' in front.\n{ways}")


def with_counts(sizes: Sizes, dialect: Dialect, prefix: str, names: Iterable[str]) -> Sizes:
    """Add sizes that only names show: of an axis from which a dialect's names are numbered (`mtp_layers.{l-L}`).

    The first L numbers belong to another line of the dialect (`layers.{l}`): L is one more than its largest number.

    Args:
        sizes: sizes from the config and the user, which win.
        dialect: the dialect of the names.
        prefix: prefix of every name.
        names: stored names.
    """
    holes = [(line.name.skeleton, hole) for line in dialect.lines for hole in line.name.holes]
    shifted = {key: hole for key, hole in holes if hole.shift_axis and hole.shift == f"-{hole.shift_axis}"}
    if {hole.shift_axis for hole in shifted.values()} <= sizes.at({}).keys():
        return sizes
    grouped = group(split_slot(name)[0].removeprefix(prefix) for name in names)
    counts: dict[str, int] = {}
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
            counts[base] = max(firsts)
    return structs.replace(sizes, overrides={**counts, **sizes.overrides}) if counts else sizes


def bind(
    names: Sequence[str],
    family: Family,
    dialect: Dialect,
    sizes: Sizes,
    prefix: str = "",
    encodings: Mapping[str, str] | None = None,
    stored: Mapping[str, Stored] | None = None,
    weights: BoundNames | None = None,
) -> BoundNames:
    """Match names with the lines of a dialect.

    Args:
        names: stored names.
        family: the family they belong to.
        dialect: the dialect to read them through.
        sizes: axis sizes from the config and the user.
        prefix: text before every name of the dialect.
        encodings: stored name -> its encoding, one of `family.WORDS`; None: all are plain.
        stored: the stored tensors by name; their shapes may show a size that is needed to split merged numbers.
        weights: the bound names of the weights, where `names` are their optimizer state; None: `names` has the weights.

    Raises:
        UsageError: UNKNOWN_AXIS where a size is missing that is needed to compute an index; AMBIGUOUS where the config
            does not decide which of two lines a name matches.
        Refused: NAME_COLLISION for two names that differ only in segments of wrappers.
    """
    encodings = encodings or {}
    if unwrapped := without_wrappers(names):
        stored_names = {inner: name for name, inner in unwrapped.items()}
        if len(stored_names) < len(unwrapped):
            raise _refusal_of_wrapped_names(unwrapped, stored_names)
        inner_stored = {unwrapped[name]: tensor for name, tensor in (stored or {}).items() if name in unwrapped}
        inner_encodings = {unwrapped[name]: encoding for name, encoding in encodings.items() if name in unwrapped}
        inner_bound = bind(tuple(stored_names), family, dialect, sizes, prefix, inner_encodings, inner_stored, weights)
        return _with_stored_names(inner_bound, stored_names, encodings)
    merged = _MergedNumbers(dialect, sizes, prefix)
    if not merged.lines:
        return _bind_names(names, family, dialect, sizes, prefix, encodings, weights)
    unmerged = structs.replace(dialect, lines=tuple(line for line in dialect.lines if line not in merged.lines))
    postponed = {name for name in names if merged.matches(name)}
    bound = _bind_names(
        [name for name in names if name not in postponed], family, unmerged, sizes, prefix, encodings, weights
    )
    if postponed:
        sizes = merged.solve_sizes(weights or bound, stored or {}, postponed)
        return _bind_names(names, family, dialect, sizes, prefix, encodings, weights)
    return structs.replace(bound, dialect=dialect)


def _refusal_of_wrapped_names(unwrapped: Mapping[str, str], stored_names: Mapping[str, str]) -> TransaxleError:
    """Build the refusal of names that are equal once segments of wrappers are stripped.

    Args:
        unwrapped: stored name -> stripped name.
        stored_names: stripped name -> stored name; of names that collide, the last one.
    """
    message = "without the segments of wrappers it has the name of {}: {}"
    hint = "Wrappers such as torch.compile add a segment to a name; keep all names with --to safetensors:identity."
    return gathered(
        Refusal("NAME_COLLISION", message.format(stored_names[inner], inner), Where(None, name), hint)
        for name, inner in unwrapped.items()
        if stored_names[inner] != name
    )


def _with_stored_names(bound: BoundNames, stored_names: Mapping[str, str], encodings: Mapping[str, str]) -> BoundNames:
    """Return bound names with the stored names in place of the stripped ones.

    A name that no line matches keeps a segment `module`: only names that match prove that the segment is a wrapper's.
    """
    unwrapped = {name: inner for inner, name in stored_names.items()}
    unread = (stored_names[inner] for inner in bound.unknown)
    unwrapped |= {name: name for name in unread if own_name(name) == name}
    return structs.replace(
        bound,
        names={
            key: {index: stored_names[name] for index, name in of_line.items()} for key, of_line in bound.names.items()
        },
        ignored=tuple(stored_names[name] for name in bound.ignored),
        unknown=tuple(stored_names[name] for name in bound.unknown),
        encodings=encodings,
        own=unwrapped,
    )


def with_kept(bound: BoundNames, target: Dialect, sizes: Sizes, stored: Mapping[str, Stored]) -> BoundNames:
    """Match the names that a checkpoint's own dialect does not know with other dialects of the family.

    These are the target dialect, then the family's first dialect (the hub's), then the dialect in the memory of
    transformers. Such names come from earlier conversions, which kept tensors unknown to their target under their old
    names. A tensor is bound only where the checkpoint does not have it already. So a tensor that only `hf` knows
    survives a conversion through other dialects, and conditions that depend on it hold again.

    Args:
        bound: the stored names, bound through their own dialect.
        target: the dialect to convert to.
        sizes: axis sizes from the config and the user.
        stored: the stored tensors by name.

    Raises:
        UsageError: as `bind` does.
    """
    family = bound.family
    for dialect in (target, family.dialects[0], family.dialect(IN_MEMORY)):
        bound = bound if dialect is None else _with_names_of(dialect, bound, sizes, stored)
    return bound


def with_state_of(
    bound: BoundNames, dialect: Dialect, prefix: str, sizes: Sizes, stored: Mapping[str, Stored]
) -> BoundNames:
    """Match the names of optimizer state with another dialect than that of the weights; names unknown to it stay bound.

    Args:
        bound: all names, bound through the dialect of the weights.
        dialect: dialect of the parameter names in the state.
        prefix: prefix of each of these parameter names.
        sizes: axis sizes from the config and the user.
        stored: the stored tensors by name.

    Raises:
        UsageError: as `bind` does.
    """
    state = tuple(name for name in stored if split_slot(name)[1] != WEIGHT)
    state_bound = bind(state, bound.family, dialect, sizes, prefix, bound.encodings, stored, bound)
    still_unknown = frozenset(state_bound.unknown)
    names = {
        key: {index: name for index, name in of_line.items() if key[1] == WEIGHT or name in still_unknown}
        for key, of_line in bound.names.items()
    }
    for key, of_line in state_bound.names.items():
        names[key] = {**names.get(key, {}), **of_line}
    return structs.replace(
        bound,
        names={key: of_line for key, of_line in names.items() if of_line},
        ignored=tuple(dict.fromkeys((*bound.ignored, *state_bound.ignored))),
        unknown=tuple(name for name in bound.unknown if split_slot(name)[1] == WEIGHT or name in still_unknown),
        state_dialect=dialect,
    )


def _with_names_of(dialect: Dialect, bound: BoundNames, sizes: Sizes, stored: Mapping[str, Stored]) -> BoundNames:
    """Match the names that are still unknown with another dialect."""
    if not bound.unknown or dialect is bound.dialect:
        return bound
    newly_bound = bind(bound.unknown, bound.family, dialect, sizes, encodings=bound.encodings, stored=stored)
    names: _NamesByLine = defaultdict(dict, {key: dict(of_line) for key, of_line in bound.names.items()})
    present = _Presence(bound.names)
    read = set()
    for (line, slot), of_line in newly_bound.names.items():
        for position, name in of_line.items():
            index = dict(zip(line.name.axes, position, strict=True))
            if not any(present.at(component, index) for component in line.expression.components):
                names[line, slot][position] = name
                read.add(name)
    return structs.replace(bound, names=dict(names), unknown=tuple(name for name in bound.unknown if name not in read))


def _bind_names(
    names: Sequence[str],
    family: Family,
    dialect: Dialect,
    sizes: Sizes,
    prefix: str,
    encodings: Mapping[str, str],
    weights: BoundNames | None = None,
) -> BoundNames:
    """Match names with the lines of a dialect, once every size that their numbers need is known."""
    bound_names: _NamesByLine = defaultdict(dict)
    ignored: list[str] = []
    unknown: list[str] = []
    reader = _NameReader(dialect, sizes)
    doubtful: list[tuple[str, _Fits]] = []
    for name in _bind_groups(names, prefix, reader, bound_names):
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
    return BoundNames(family, dialect, prefix, in_order, tuple(ignored), tuple(unknown), encodings)


def _bind_groups(names: Sequence[str], prefix: str, reader: _NameReader, bound_names: _NamesByLine) -> Sequence[str]:
    """Bind groups of parameters that differ only in numbers, one group at once; return the remaining names in order."""
    if len(names) < _MANY:
        return names
    remaining: set[str] = set()
    for alike in group(names).values():
        matches = reader.read_all(alike, prefix) if len(alike) >= _MANY and split_slot(alike[0])[1] == WEIGHT else None
        if matches is None:
            remaining.update(alike)
        else:
            line, positions = matches
            bound_names[line, WEIGHT] = dict(zip(positions, alike, strict=True))
    return [name for name in names if name in remaining]


class _MergedNumbers:
    """The lines that merge several axes in one number (`{(l e)}`) and need an unknown size to split it."""

    def __init__(self, dialect: Dialect, sizes: Sizes, prefix: str) -> None:
        self._sizes = sizes
        self._prefix = prefix
        merged = [line for line in dialect.lines if line.name.inner]
        known_sizes = sizes.at({}) if merged else {}
        self.lines = frozenset(line for line in merged if not known_sizes.keys() >= set(line.name.inner))
        self._by_skeleton = {line.name.skeleton for line in self.lines}

    def matches(self, name: str) -> bool:
        """Tell whether a stored name may match one of these lines."""
        parameter = split_slot(name)[0]
        bare = parameter[len(self._prefix) :]
        return (
            parameter.startswith(self._prefix)
            and skeleton(bare) in self._by_skeleton
            and any(line.name.match(bare) is not None for line in self.lines)
        )

    def solve_sizes(self, bound: BoundNames, stored: Mapping[str, Stored], names: Iterable[str]) -> Sizes:
        """Add the sizes that the shapes of all other tensors show.

        Names show none: 12 numbers of `{(l e)}` may be 3 times 4 or 4 times 3.

        Raises:
            UsageError: UNKNOWN_AXIS where the shapes do not show a size that is needed.
        """
        equations: dict[Expression, dict[Shape, Mapping[str, int]]] = defaultdict(dict)
        for (line, slot), by_index in bound.names.items():
            for index, name in by_index.items():
                if slot == WEIGHT and name in stored:
                    at = dict(zip(line.name.axes, index, strict=True))
                    equations[line.expression].setdefault(stored[name].shape, at)
        sizes = solve(equations, self._sizes)
        known_sizes = sizes.at({})
        bare = [split_slot(name)[0][len(self._prefix) :] for name in names]
        for line in self.lines:
            missing = [axis for axis in line.name.inner if axis not in known_sizes]
            numbers = [numbers_of_name for name in bare if (numbers_of_name := line.name.match(name)) is not None]
            if missing and numbers:
                raise _refusal_of_merged_numbers(line, missing[0], numbers, known_sizes)
        return sizes


def _refusal_of_merged_numbers(
    line: Line, axis: str, numbers: Sequence[tuple[int, ...]], known_sizes: Mapping[str, int]
) -> TransaxleError:
    """Build the refusal of merged numbers that cannot be split, with the size that their count suggests."""
    place, hole = next((place, hole) for place, hole in enumerate(line.name.holes) if axis in hole.inner)
    count = len({numbers_of_name[place] for numbers_of_name in numbers})
    outer_axes = [other for other in (hole.axis, *hole.inner) if other != axis]
    guess = ""
    # Zero where a size is unknown: the count suggests nothing in that case.
    outside = prod(known_sizes.get(other, 0) for other in outer_axes)
    if outside and count % outside == 0:
        whole = " and ".join(f"{other}={known_sizes[other]}" for other in outer_axes)
        guess = f" If all {count} are here, then with {whole}, {axis}={count // outside}."
    message = (
        f"{line.text}\nthe size of axis {axis} is needed to tell what the {count} numbers of {hole.text} mean, and no "
        "shape shows it"
    )
    hint = f"Give it with --axis {axis}=N, or the model's config.json with --config FILE.{guess}"
    return refuse("UNKNOWN_AXIS", message, hint=hint)


_Fits = list[tuple[Line, Index]]
"""Lines that a name may match, each with the indices at which its pattern gives the name."""
_NamesByLine = dict[tuple[Line, str], dict[Index, str]]


def _settle(
    doubtful: Iterable[tuple[str, _Fits]],
    bound_names: _NamesByLine,
    family: Family,
    sizes: Sizes,
    encodings: Mapping[str, str],
    weights: BoundNames | None,
) -> None:
    """Bind names that match several lines, by conditions on the presence of other tensors, which are bound by now.

    Raises:
        UsageError: AMBIGUOUS, once for each group of lines.
    """
    settled: list[tuple[Line, Index, str]] = []
    problems: dict[tuple[Line, ...], Refusal] = {}
    present = _Presence(bound_names if weights is None else weights.names)
    for name, fits in doubtful:
        encoding = words(encodings.get(name, PLAIN))

        def evaluate(
            formula: Formula, index: Mapping[str, int], encoding: Mapping[str, bool] = encoding
        ) -> bool | None:
            tensors_present = {tensor: present.at(tensor, index) for tensor in formula.names & family.tensors.keys()}
            return sizes.holds(formula, index, {**tensors_present, **encoding})

        indices = [dict(zip(line.name.axes, position, strict=True)) for line, position in fits]
        open_fits = [
            fit
            for fit, index in zip(fits, indices, strict=True)
            if fit[0].when is None or evaluate(fit[0].when, index) is not False
        ]
        if len(open_fits) > 1:
            lines = tuple(line for line, _ in open_fits)
            refusal = refusal_of_undecided(lines, "can have this name", family, partial(evaluate, index=indices[0]))
            problems.setdefault(lines, replace(refusal, where=Where(None, name)))
        else:
            settled.append((*(open_fits or fits)[0], name))
    if problems:
        raise gathered(problems.values())
    for line, position, name in settled:
        bound_names[line, split_slot(name)[1]][position] = name


class _Presence:
    """Lookup of which logical tensors the bound names contain, and at which indices."""

    def __init__(self, bound_names: Mapping[tuple[Line, str], Mapping[Index, str]]) -> None:
        self._indices: dict[str, list[tuple[Line, Iterable[Index]]]] = defaultdict(list)
        for (line, slot), names in bound_names.items():
            for component in line.expression.components if slot == WEIGHT else ():
                self._indices[component].append((line, names))
        self._projected: dict[tuple[Line, tuple[str, ...]], frozenset[Index]] = {}

    def at(self, tensor: str, index: Mapping[str, int]) -> bool:
        """Tell whether some stored tensor can contain a logical tensor at these indices."""
        for line, positions in self._indices.get(tensor, ()):
            common = tuple(axis for axis in line.name.axes if axis in index)
            if (line, common) not in self._projected:
                places = [line.name.axes.index(axis) for axis in common]
                self._projected[line, common] = frozenset(tuple(p[i] for i in places) for p in positions)
            if tuple(index[axis] for axis in common) in self._projected[line, common]:
                return True
        return False


def refusal_of_undecided(
    lines: Sequence[Line], action: str, family: Family, evaluate: Callable[[Formula], bool | None]
) -> Refusal:
    """Build the refusal of several lines of which only one can apply, where the config does not decide which.

    Args:
        lines: the lines.
        action: the verb phrase of the message: what only one of the lines can do.
        family: the family of the lines.
        evaluate: evaluates a formula; None where its value is unknown.
    """
    names = dict.fromkeys(name for line in lines if line.when is not None for name in sorted(line.when.names))
    open_names = [n for n in names if n not in WORDS and n not in family.name_axes and evaluate(Formula(n)) is None]
    missing = ", ".join(open_names) or "what these conditions ask"
    message = f"only one of these lines {action}, and the config does not say which: {missing} is unknown"
    hint = "Give the model's config.json with --config FILE (config=): it says which line applies."
    return Refusal("AMBIGUOUS", "\n".join([*(line.whole for line in lines), message]), hint=hint)


class _Candidate(msgspec.Struct, frozen=True):
    """A line with the skeleton of a name, and so a candidate for matching it."""

    line: Line
    numbering: Numbering
    """How the numbers in its name follow from indices."""
    limits: tuple[float, ...]
    """Size of each axis in the name; infinite where unknown."""

    def index(self, name: str) -> Index | None:
        """Return the indices at which the line's pattern gives this name; None where there are none."""
        position = self.numbering.position(name)
        # A number must not be beyond a known size.
        return position if position is not None and all(map(lt, position, self.limits)) else None


class _NameReader:
    """Matches names with the lines of a dialect; looks up the lines of each skeleton once."""

    def __init__(self, dialect: Dialect, sizes: Sizes) -> None:
        self.dialect = dialect
        self.sizes = sizes
        self.known = sizes.at({})
        self.candidates: dict[str, list[_Candidate]] = {}

    def read(self, name: str, encoding: str = PLAIN) -> _Fits:
        """Return the lines that match a name, each with its indices; several only where the config does not decide."""
        fits = [(c.line, index) for c in self._candidates(name) if (index := c.index(name)) is not None]
        if len(fits) < 2:
            return fits
        outcomes = [self._holds(line, index, encoding) for line, index in fits]
        # A condition may be unknown (None). A line whose condition is false counts only where no other line is left.
        best = [fit for fit, holds in zip(fits, outcomes, strict=True) if holds] or [
            fit for fit, holds in zip(fits, outcomes, strict=True) if holds is None
        ]
        return best or fits[:1]

    def read_all(self, names: Sequence[str], prefix: str) -> tuple[Line, list[Index]] | None:
        """Return the line of many names that differ only in numbers, and the indices of each; None where `read` must
        decide.

        Args:
            names: names of parameters.
            prefix: prefix of every name.
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
        """Return the lines that have the skeleton of a name."""
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
        may_match = skeleton(name) in self.dialect.skeletons_to_ignore
        return may_match and any(pattern.match(name) is not None for pattern in self.dialect.ignored)
