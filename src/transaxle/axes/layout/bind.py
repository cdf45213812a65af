"""Matches ("binds") the tensor names of a checkpoint with the mapping rules of a dialect.

A dialect is one framework's tensor names and layouts; each line of its table is one mapping rule. Each stored name
matches one mapping rule with certain indices (of layer, expert), or is ignored, or is unknown. Name patterns match
whole names. One prefix (such as `module.` or `language_model.`) is stripped from all names of a checkpoint.

If two mapping rules match the same name, the conditions of these rules decide. A condition depends on the encoding of
the stored tensor, on the config, or on the presence of other tensors. If the conditions of both rules may be true, the
name is refused.

The optimizer states of a parameter, named `optim/<parameter>/<state>`, have the mapping rule of the parameter; each
state is called a *slot*. The dialect of optimizer states may differ from the dialect of the weights.
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
"""Slot name that means the parameter itself, as opposed to an optimizer state."""
OPTIM = "optim/"
"""Prefix of the names of optimizer states: `optim/<parameter>/<state>`."""
IN_MEMORY = "transformers"
"""Name of the dialect that transformers uses in memory, with stacked experts; some files mix its names with the hub's
names.
"""
_MANY = 16
"""Smallest number of similar names that are matched in one call instead of one by one."""
Index = tuple[int, ...]
"""Indices (of layer, expert, …) of the axes in a mapping rule's name pattern, in the order of the pattern."""


def split_slot(name: str) -> tuple[str, str]:
    """Split a stored name into the parameter's name and the slot; slot "" means the weight, else an optimizer state."""
    if name.startswith(OPTIM):
        parameter, _, state = name[len(OPTIM) :].rpartition("/")
        if parameter and state != WEIGHT:
            return parameter, state
    return name, WEIGHT


def join_slot(parameter: str, slot: str) -> str:
    """Return the stored name for a parameter and a slot; the function `split_slot` reverses it."""
    return parameter if slot == WEIGHT else f"{OPTIM}{parameter}/{slot}"


class BoundNames(msgspec.Struct, frozen=True):
    """The names of one checkpoint, matched with the mapping rules of one dialect."""

    family: Family
    """Model family to which the names belong."""
    dialect: Dialect
    """Dialect with whose mapping rules the names were matched."""
    prefix: str
    """Text in front of every stored name that the names in the dialect lack."""
    names: Mapping[tuple[Line, str], Mapping[Index, str]]
    """Mapping rule and slot -> indices (layer, expert) -> stored name."""
    ignored: tuple[str, ...]
    """Stored names of tensors that do not belong to the model, such as buffers that can be recomputed."""
    unknown: tuple[str, ...]
    """Stored names that match no mapping rule of the dialect."""
    encodings: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Stored name -> name of the tensor's encoding, one of `family.WORDS`; unquantized tensors are absent."""
    own: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Stored name -> name without the segments that module wrappers insert; empty if no stored name has such
    segments.
    """
    state_dialect: Dialect | None = None
    """Dialect in which the optimizer states are named; None means the dialect of the weights."""


def _prefixes(names: Mapping[str, list[str]], dialect: Dialect) -> dict[str, int]:
    """Return prefix -> number of names that would match the dialect if the prefix were stripped, for every possible
    prefix.
    """
    readable: dict[str, int] = defaultdict(int)
    longest = max(map(len, dialect.by_skeleton), default=0)
    for key, names_alike in names.items():
        sample = names_alike[0]
        # A number contains no dot, so the skeleton of the text after a dot is the end of the whole name's skeleton.
        # Dots are tried from the right, at most as many as the dialect's names have, because a stored name may have
        # 10,000 dots.
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
    """Return stored name -> name without the segments that module wrappers insert; empty if no stored name has such
    segments.
    """
    parameters = {name: split_slot(name) for name in names}
    unwrapped = own_names(dict.fromkeys(parameter for parameter, _ in parameters.values()))
    return unwrapped and {name: join_slot(unwrapped[parameter], slot) for name, (parameter, slot) in parameters.items()}


def group(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameter names that differ only in numbers. The key is the skeleton: the name with each number replaced by
    0.
    """
    listed = list(names)
    grouped: dict[str, list[str]] = defaultdict(list)
    for key, name in zip(skeletons(listed), listed, strict=True):
        grouped[key].append(name)
    return grouped


def score(grouped: Mapping[str, list[str]], dialect: Dialect) -> tuple[int, str]:
    """Return the number of names that match the dialect, and the prefix that was stripped to reach this highest
    number.
    """
    counts = _prefixes(grouped, dialect)
    if not counts:
        return 0, ""
    # Of prefixes with equal counts the shortest is used, so that as little as possible is stripped from the names.
    prefix = max(counts, key=lambda key: (counts[key], -len(key)))
    return counts[prefix], prefix


def refuse_headless(families: Iterable[Family], grouped: Mapping[str, list[str]], ways: str) -> None:
    """Refuse a checkpoint whose names mostly match a dialect except that their first segment is missing.

    Args:
        families: model families to which the names may belong.
        grouped: the checkpoint's names by skeleton; most of these names match no dialect.
        ways: further advice that is added to the hint of the error.

    Raises:
        UsageError: with the code UNKNOWN_FAMILY if the model is stored without its head, as transformers stores base
            models.
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
    """Add the size of an axis `L` that a dialect subtracts from the numbers in names (`mtp_layers.{l-L}`), if only the
    stored names show this size.

    The names of a second mapping rule of the dialect (`layers.{l}`) contain the numbers below L, so L is the largest of
    these numbers plus one.

    Args:
        sizes: axis sizes from the config and the user, which take precedence.
        dialect: the dialect in which the tensors are named.
        prefix: prefix of every stored name.
        names: the stored names.
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
    """Match names with the mapping rules of a dialect.

    Args:
        names: the stored names to match.
        family: the model family to which the names belong.
        dialect: the dialect with whose mapping rules the names are matched.
        sizes: axis sizes from the config and the user.
        prefix: text in front of every stored name that the names in the dialect lack.
        encodings: stored name -> name of the tensor's encoding, one of `family.WORDS`; None means that no tensor is
            quantized.
        stored: stored name -> tensor. The shapes may show a size that is needed to split one number into two indices,
            as in names with `{(l e)}`.
        weights: the matched names of the weights, if `names` are names of optimizer states; None means that `names`
            includes the weights.

    Raises:
        UsageError: with the code UNKNOWN_AXIS if a size that is needed to compute an index is unknown; with the code
            AMBIGUOUS if the config does not determine which of two mapping rules a name matches.
        Refused: with the code NAME_COLLISION if two names differ only in the segments that module wrappers insert.
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
    """Build the error for names that are equal without the segments that module wrappers insert.

    Args:
        unwrapped: stored name -> name without the segments of wrappers.
        stored_names: name without the segments of wrappers -> stored name (if several stored names are equal without
            them, the last one).
    """
    message = "without the segments of wrappers it has the name of {}: {}"
    hint = "Wrappers such as torch.compile add a segment to a name; keep all names with --to safetensors:identity."
    return gathered(
        Refusal("NAME_COLLISION", message.format(stored_names[inner], inner), Where(None, name), hint)
        for name, inner in unwrapped.items()
        if stored_names[inner] != name
    )


def _with_stored_names(bound: BoundNames, stored_names: Mapping[str, str], encodings: Mapping[str, str]) -> BoundNames:
    """Replace the stripped names in `bound` by the stored names.

    A name that matches no mapping rule keeps the segment `module`, because only a match proves that a wrapper inserted
    the segment.
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
    """Match names that are unknown in the checkpoint's own dialect with further dialects of the family.

    The dialects are tried in this order: the target dialect, the family's first dialect (the hub's), and that of
    transformers in memory. Names of a second dialect come from earlier conversions, which kept the old name of each
    tensor that their target dialect could not name. A logical tensor that the checkpoint already has is not matched
    again. So a tensor that only the dialect `hf` describes survives conversions through other dialects, and conditions
    that depend on the tensor are true again.

    Args:
        bound: the stored names, matched with their own dialect.
        target: the dialect to which the checkpoint is converted.
        sizes: axis sizes from the config and the user.
        stored: the stored tensors by name.

    Raises:
        UsageError: the errors that `bind` raises.
    """
    family = bound.family
    for dialect in (target, family.dialects[0], family.dialect(IN_MEMORY)):
        bound = bound if dialect is None else _with_names_of(dialect, bound, sizes, stored)
    return bound


def with_state_of(
    bound: BoundNames, dialect: Dialect, prefix: str, sizes: Sizes, stored: Mapping[str, Stored]
) -> BoundNames:
    """Match the names of optimizer states with a different dialect than that of the weights; names of weights keep
    their match.

    Args:
        bound: all names, matched with the dialect of the weights.
        dialect: the dialect of the parameter names inside the names of optimizer states.
        prefix: prefix of the parameter names inside the names of optimizer states.
        sizes: axis sizes from the config and the user.
        stored: the stored tensors by name.

    Raises:
        UsageError: the errors that `bind` raises.
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
    """Match the names that are still unknown with the mapping rules of a further dialect."""
    if not bound.unknown or dialect is bound.dialect:
        return bound
    newly_bound = bind(bound.unknown, bound.family, dialect, sizes, encodings=bound.encodings, stored=stored)
    names: _NamesByLine = defaultdict(dict, {key: dict(of_line) for key, of_line in bound.names.items()})
    present = Presence(bound.names)
    read = set()
    for (line, slot), of_line in newly_bound.names.items():
        for position, name in of_line.items():
            index = line.name.index_at(position)
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
    """Match names with the mapping rules of a dialect; all sizes on which the numbers in the names depend must be
    known.
    """
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
    """Match parameters whose names differ only in numbers, one call for each group of such names; return the unmatched
    names in order.
    """
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
    """The mapping rules whose names merge several axes in one number (`{(l e)}`) that cannot be split, because a size
    is unknown.
    """

    def __init__(self, dialect: Dialect, sizes: Sizes, prefix: str) -> None:
        self._sizes = sizes
        self._prefix = prefix
        merged = [line for line in dialect.lines if line.name.inner]
        known_sizes = sizes.at({}) if merged else {}
        self.lines = frozenset(line for line in merged if not known_sizes.keys() >= set(line.name.inner))

    def matches(self, name: str) -> bool:
        """Return whether a stored name may match one of the mapping rules with merged numbers."""
        parameter = split_slot(name)[0]
        bare = parameter.removeprefix(self._prefix)
        return parameter.startswith(self._prefix) and any(line.name.match(bare) is not None for line in self.lines)

    def solve_sizes(self, bound: BoundNames, stored: Mapping[str, Stored], names: Iterable[str]) -> Sizes:
        """Add the sizes that the shapes of all other tensors show.

        Names alone do not show these sizes: 12 numbers in place of `{(l e)}` may mean 3 x 4 or 4 x 3.

        Raises:
            UsageError: with the code UNKNOWN_AXIS if the shapes do not show a necessary size.
        """
        equations: dict[Expression, dict[Shape, Mapping[str, int]]] = defaultdict(dict)
        for (line, slot), by_index in bound.names.items():
            for index, name in by_index.items():
                if slot == WEIGHT and name in stored:
                    at = line.name.index_at(index)
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
    """Build the error for names with a merged number that cannot be split; the hint suggests the size that the count of
    names implies.
    """
    place, hole = next((place, hole) for place, hole in enumerate(line.name.holes) if axis in hole.inner)
    count = len({numbers_of_name[place] for numbers_of_name in numbers})
    outer_axes = [other for other in (hole.axis, *hole.inner) if other != axis]
    guess = ""
    # Zero if a size is unknown; then the hint suggests no size.
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
"""Mapping rules that may match a stored name, each with the indices for which the rule's pattern equals that name."""
_NamesByLine = dict[tuple[Line, str], dict[Index, str]]


def _settle(
    doubtful: Iterable[tuple[str, _Fits]],
    bound_names: _NamesByLine,
    family: Family,
    sizes: Sizes,
    encodings: Mapping[str, str],
    weights: BoundNames | None,
) -> None:
    """Decide which mapping rule a name matches, where this depends on the presence of other tensors.

    All names that match a single rule have been matched before.

    Raises:
        UsageError: with the code AMBIGUOUS if conditions do not decide; there is one error for each group of rules.
    """
    settled: list[tuple[Line, Index, str]] = []
    problems: dict[tuple[Line, ...], Refusal] = {}
    present = Presence(bound_names if weights is None else weights.names)
    for name, fits in doubtful:
        encoding = words(encodings.get(name, PLAIN))

        def evaluate(
            formula: Formula, index: Mapping[str, int], encoding: Mapping[str, bool] = encoding
        ) -> bool | None:
            tensors_present = {tensor: present.at(tensor, index) for tensor in formula.names & family.tensors.keys()}
            return sizes.holds(formula, index, {**tensors_present, **encoding})

        indices = [line.name.index_at(position) for line, position in fits]
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


class Presence:
    """The logical tensors that the matched names contain, and for which indices."""

    def __init__(self, bound_names: Mapping[tuple[Line, str], Mapping[Index, str]]) -> None:
        self._indices: dict[str, list[tuple[Line, Iterable[Index]]]] = defaultdict(list)
        for (line, slot), names in bound_names.items():
            for component in line.expression.components if slot == WEIGHT else ():
                self._indices[component].append((line, names))
        self._projected: dict[tuple[Line, tuple[str, ...]], frozenset[Index]] = {}

    def at(self, tensor: str, index: Mapping[str, int]) -> bool:
        """Return whether a stored tensor may contain the logical tensor for these indices."""
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
    """Build the error for several mapping rules that exclude one another, if the config does not determine which one
    applies.

    Args:
        lines: the mapping rules in question.
        action: what only one of the rules can do, as a verb phrase for the message, such as "can have this name".
        family: the model family to which the rules belong.
        evaluate: function that returns the value of a formula, or None if the value is unknown.
    """
    names = dict.fromkeys(name for line in lines if line.when is not None for name in sorted(line.when.names))
    open_names = [n for n in names if n not in WORDS and n not in family.name_axes and evaluate(Formula(n)) is None]
    missing = ", ".join(open_names) or "what these conditions ask"
    message = f"only one of these lines {action}, and the config does not say which: {missing} is unknown"
    hint = "Give the model's config.json with --config FILE (config=): it decides which line applies."
    return Refusal("AMBIGUOUS", "\n".join([*(line.whole for line in lines), message]), hint=hint)


class _Candidate(msgspec.Struct, frozen=True):
    """A mapping rule whose name pattern equals a stored name except for numbers, so that the rule may match the
    name.
    """

    line: Line
    numbering: Numbering
    """Conversion between the indices of the rule's axes and the numbers in the name."""
    limits: tuple[float, ...]
    """Size of each axis in the name pattern, in the order of the pattern; infinite if the size is unknown."""

    def index(self, name: str) -> Index | None:
        """Return the indices for which the rule's pattern equals this name; None if the pattern does not match."""
        position = self.numbering.position(name)
        # An index must be below the size of its axis, if the size is known.
        return position if position is not None and all(map(lt, position, self.limits)) else None


class _NameReader:
    """Matches names with the mapping rules of a dialect; names that differ only in numbers are looked up once."""

    def __init__(self, dialect: Dialect, sizes: Sizes) -> None:
        self.dialect = dialect
        self.sizes = sizes
        self.known = sizes.at({})
        self.candidates: dict[str, list[_Candidate]] = {}

    def read(self, name: str, encoding: str = PLAIN) -> _Fits:
        """Return the mapping rules that match a name, each with the indices; several rules only if the config does not
        determine which applies.
        """
        fits = [(c.line, index) for c in self._candidates(name) if (index := c.index(name)) is not None]
        if len(fits) < 2:
            return fits
        outcomes = [self._holds(line, index, encoding) for line, index in fits]
        # A condition may have an unknown value (None). A rule whose condition is false is used only if no other rule is
        # left.
        best = [fit for fit, holds in zip(fits, outcomes, strict=True) if holds] or [
            fit for fit, holds in zip(fits, outcomes, strict=True) if holds is None
        ]
        return best or fits[:1]

    def read_all(self, names: Sequence[str], prefix: str) -> tuple[Line, list[Index]] | None:
        """Match many names that differ only in numbers: return the mapping rule, and the indices for each name; None
        means that the names must be matched one by one, with `read`.

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
        """Return the mapping rules whose name patterns equal a stored name except for numbers."""
        key = skeleton(name)
        candidates = self.candidates.get(key)
        if candidates is None:
            candidates = self.candidates[key] = [self._candidate(c) for c in self.dialect.by_skeleton.get(key, ())]
        return candidates

    def _candidate(self, line: Line) -> _Candidate:
        limits = tuple(self.known.get(axis, inf) for axis in line.name.axes)
        return _Candidate(line, line.name.numbering(self.known), limits)

    def _holds(self, line: Line, index: Index, encoding: str) -> bool | None:
        return self.sizes.holds(line.when, line.name.index_at(index), words(encoding))

    def ignores(self, name: str) -> bool:
        """Return whether the dialect ignores a name."""
        may_match = skeleton(name) in self.dialect.skeletons_to_ignore
        return may_match and any(pattern.match(name) is not None for pattern in self.dialect.ignored)
