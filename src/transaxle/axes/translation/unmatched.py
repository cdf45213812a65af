"""Unmatched tensors: what a translation does with tensors and lines that have no counterpart on the other side.

- Undecided lines: the config does not decide their condition. The source's names may: a tensor that is stored under the
  name of a line `when x` says that x is true. Where they do not either, a line applies only if no other line could hold
  the same tensor instead; else both names would be written, and one of them is wrong.
- Added tensors: what a program adds on its own account, such as a bias of the router that balances the load. Zeros of
  it are the same as none. So a dialect whose program always has it gets zeros where the source has none, and where a
  target has no place for it, zeros are left out; other values would change what the model computes.
- Unplaced tensors: what the target dialect has no place for keeps its name, and is never lost in silence.
- Missing tensors: what a checkpoint must have but lacks, and those of more layers or experts than it has.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, product

from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, BoundNames, Index, refusal_of_undecided, split_slot
from transaxle.axes.layout.relayout import Check, Stored, Target, identity_target, unknown_axis
from transaxle.axes.notation.family import Dialect, Formula, Line, LogicalTensor, Sizes
from transaxle.axes.notation.name import skeleton
from transaxle.axes.notation.overlap import may_all_hold
from transaxle.axes.translation.holdings import AlikePart, AlikeSources, Grid, Holdings, LineSources, Sources
from transaxle.errors import Refusal, Where

_Condition = tuple[Formula, Mapping[str, int]]


class LineConditions:
    """The conditions of a target's lines, as far as the config and the source's names tell.

    Args:
        lines: the lines that may be written.
        holdings: the source.
    """

    def __init__(self, lines: Sequence[Line], holdings: Holdings) -> None:
        self._holdings = holdings
        self._by_component: dict[str, list[Line]] = {}
        for line in lines:
            for component in line.expression.components:
                self._by_component.setdefault(component, []).append(line)
        self._stored = {
            sources.line: sources
            for (_, slot), held in holdings.sources.items()
            for sources in held
            # In which encoding a tensor is stored says nothing about that in which it will be written.
            if slot == WEIGHT and sources.line.when is not None and not sources.line.by_form
        }
        self._known: dict[tuple[Line, str | None, tuple[tuple[str, int], ...]], bool | None] = {}

    def holds(self, line: Line, index: Mapping[str, int], encoding: str | None = None) -> bool | None:
        """Tell whether a line applies at these indices; None where neither the config nor the names tell."""
        if line.when is None:
            return True
        value = self._holdings.holds(line.when, index, encoding)
        if value is not None or not self._stored:
            return value
        key = line, encoding, tuple(index.items())
        if key not in self._known:
            self._known[key] = self._from_names(line.when, index, encoding)
        return self._known[key]

    def _from_names(self, condition: Formula, index: Mapping[str, int], encoding: str | None) -> bool | None:
        """Return what the names of stored tensors say of a condition: lines that are stored apply."""

        def known(part: Formula) -> bool | None:
            return self._holdings.holds(part, index, encoding)

        axes = self._holdings.bound.family.name_axes
        shown: list[_Condition] = [
            (line.when, index)
            for line, sources in self._stored.items()
            if line.when is not None
            and not line.when.names.isdisjoint(condition.names - axes)
            and axes & line.when.names <= index.keys()
            and sources.at(index)
        ]
        if not shown or not may_all_hold(shown, known):
            return None  # names that contradict each other say nothing
        if not may_all_hold([(condition, index), *shown], known):
            return False
        opposite = Formula(f"not ({condition.text})", condition.let_formulas)
        return None if may_all_hold([(opposite, index), *shown], known) else True

    def rivals(self, line: Line, index: Mapping[str, int], encoding: str | None) -> list[Refusal]:
        """Return why an undecided line may not be written: others that may hold one of its tensors instead."""
        if self.holds(line, index, encoding) is not None:
            return []
        found = []
        for component in line.expression.components:
            for other in self._by_component[component]:
                at = {axis: index[axis] for axis in other.name.axes if axis in index}
                if other is not line and self.holds(other, at, encoding) is not False:
                    both = sorted((line, other), key=self._by_component[component].index)
                    known = partial(self._holdings.holds, index=index)
                    found.append(
                        refusal_of_undecided(both, f"can hold {component}", self._holdings.bound.family, known)
                    )
        return found


_FLOAT = "F32"
"""Type of the zeros: that in which programs add."""
_CORRECT = (
    "If the model has them, correct its config (--config FILE, config=); else remove them, or keep all names with "
    '--to safetensors:identity (to="safetensors:identity").'
)
_NONZERO = (
    "The model computes with these values: choose a dialect that has the tensor, or keep all names with --to "
    'safetensors:identity (to="safetensors:identity").'
)


class AddedTensors:
    """The added tensors of a source and a target dialect.

    Args:
        holdings: the source.
        target: the dialect.
        conditions: of its lines.
    """

    def __init__(self, holdings: Holdings, target: Dialect, conditions: LineConditions) -> None:
        self._holdings = holdings
        self._target = target
        self._conditions = conditions
        self._added = holdings.bound.family.added

    def concern(self, line: Line) -> bool:
        """Tell whether a line is of added tensors."""
        return not self._added.keys().isdisjoint(line.expression.components)

    def have_place(self, line: Line, index: Mapping[str, int]) -> bool:
        """Tell whether the target's program has what a line holds: it may have more than the config says."""
        if line.else_zeros or self._target is self._holdings.bound.dialect:
            return True
        tensors = (self._holdings.bound.family.tensors[component] for component in line.expression.components)
        return all(self._holdings.holds(tensor.when, index) is not False for tensor in tensors)

    def zeros(self) -> Iterator[Target]:
        """Yield the tensors that are written as zeros: those that the target's program has, and the source has not.

        Raises:
            UsageError: UNKNOWN_AXIS where a size is not known.
        """
        for line in self._target.lines:
            (component, *_) = line.expression.components
            if not line.else_zeros or line.read_only or (component, WEIGHT) in self._holdings.sources:
                continue
            sizes = self._holdings.sizes.at({})
            for axis in (*line.name.axes, *sorted(line.expression.axes)):
                if axis not in sizes:
                    raise unknown_axis(axis, line.text)
            layout, when = line.expression.layout(sizes), self._added[component]
            for position in product(*(range(sizes[axis]) for axis in line.name.axes)):
                index = dict(zip(line.name.axes, position, strict=True))
                if self._holdings.holds(when, index) and self._conditions.holds(line, index) is not False:
                    numbers = line.name.numbering(sizes).numbers(position)
                    name = line.name.format(tuple(number or 0 for number in numbers))
                    yield Target(name, _FLOAT, layout, index, (), line.text, component)

    def left_out(self, kept: Collection[str], stored: Mapping[str, Stored]) -> Iterator[tuple[Line, list[Check]]]:
        """Yield the lines of added tensors that have no place in the target, with the checks that each is zero.

        Args:
            kept: the stored tensors that have no place.
            stored: the source's tensors by name.
        """
        for (line, slot), names in self._holdings.bound.names.items() if self._added else ():
            if slot != WEIGHT or not self.concern(line):
                continue
            sources = [identity_target(name, stored[name]) for name in names.values() if name in kept]
            why = f"{line.text}\n{self._target.label} has no such tensor"
            checks = [Check(source, replace(source, parts=()), why, _NONZERO) for source in sources]
            if checks:
                yield line, checks


def ruled_out(holdings: Holdings) -> Iterator[Refusal]:
    """Yield a refusal for each line of the source whose tensors exist although the config says that the model has none.

    Programs leave them out, and what they build computes something else than what was trained. What depends on the
    layer, or on other tensors, is passed over: names say more of it than a table knows.

    Args:
        holdings: the checkpoint.
    """
    family, settings = holdings.bound.family, holdings.sizes.settings
    for (component, slot), lines in holdings.sources.items():
        when = family.tensors[component].when
        if slot != WEIGHT or when is None or component in family.copies:
            continue
        for line in (sources.line for sources in lines):
            if line.else_zeros or (line.read_only and component in family.added):
                continue  # programs have it on their own account
            keys = [(key, settings.get(key)) for key in sorted(when.names - family.tensors.keys())]
            said = [f"{key}: {json.dumps(value)}" for key, value in keys if isinstance(value, bool | int | str)]
            if said and holdings.sizes.holds(when, {}) is False:
                name = next(iter(holdings.bound.names[line, WEIGHT].values()))
                message = f"{line.text}\nis there, but a {family.name} of this config has none ({', '.join(said)})"
                yield Refusal("UNEXPECTED_TENSOR", message, Where(None, name), _CORRECT)


def _origins(side: Target) -> set[tuple[str, str]]:
    """Return what a side of a check is read from: stored tensors, each with the logical tensor in it."""
    return {(origin.name, origin.component) for part in side.parts for origin in part.origins}


class Unplaced:
    """Finds the stored tensors that no target is made of.

    Args:
        holdings: the stored tensors.
        target: the dialect of the targets.
        lines: those of its lines that are written.

    Attributes:
        empty: tensors that have no elements, and no place for that reason.
        refusals: tensors of which only some parts have a place.
    """

    def __init__(self, holdings: Holdings, target: Dialect, lines: Sequence[Line]) -> None:
        self.empty: list[str] = []
        self.refusals: list[Refusal] = []
        self._holdings = holdings
        self._target = target
        self._lines = lines
        self._used: set[tuple[str, str]] = set()
        self._alike: dict[tuple[LineSources, Line], list[AlikePart]] = defaultdict(list)

    def use(self, line: Line, by_component: Mapping[str, Sources]) -> None:
        """Take the sources of one target of a line for placed."""
        for sources in by_component.values():
            if isinstance(sources, AlikeSources):
                self.parts_taken(line, sources.line_sources).append(sources.origins)
            else:
                origins = (place.origin for place in sources.places.values())
                self._used.update((origin.name, origin.component) for origin in origins)

    def parts_taken(self, line: Line, of: LineSources) -> list[AlikePart]:
        """Return the alike tensors of a stored line that the targets of a line take; those of other targets are added
        by the caller.
        """
        return self._alike[of, line]

    def names(self, checks: Iterable[Check], *, clean: bool) -> Iterator[str]:
        """Yield the tensors that keep their names.

        A tensor of which only some parts have a place cannot be kept whole: that is refused. One without elements has
        no place where its axis of size 0 numbers the target's tensors (zero experts): it is left out.

        Args:
            checks: a copy that only a check reads has the place of the other one.
            clean: nothing was refused so far.
        """
        checked = [(_origins(check.first), _origins(check.second)) for check in checks]
        # The targets of a line take equally many.
        wholly = {of for (of, _), found in self._alike.items() if len(found) * len(found[0]) == len(of.places)}
        left = [(line, slot) for line, slot in self._holdings.bound.names if not self._all_in(wholly, line, slot)]
        asked = {line for line, _ in left}
        used = set(self._used)
        for (of, _), found in self._alike.items():
            if checked or of.line in asked:
                used.update((origin.name, origin.component) for each in found for origin in each)
        for first, second in checked:
            if first <= used or second <= used:
                used |= first | second
            else:  # neither has a place: the second one keeps its name
                used |= first - second
        for line, slot in left:
            yield from self._homeless(line, slot, used, clean=clean)

    def _all_in(self, wholly: Container[LineSources], line: Line, slot: str) -> bool:
        """Tell whether each tensor of a stored line has a place, as far as that is known without a look at them."""
        found = [
            any(
                sources.line is line and sources in wholly
                for sources in self._holdings.sources.get((component, slot), ())
            )
            for component in line.expression.components
        ]
        return all(found)

    def _homeless(self, line: Line, slot: str, used: Container[tuple[str, str]], *, clean: bool) -> Iterator[str]:
        components = line.expression.components
        nowhere = self._numbers_nothing(line)
        for name in self._holdings.bound.names[line, slot].values():
            homeless = [component for component in components if (name, component) not in used]
            if len(homeless) == len(components):
                if nowhere:
                    self.empty.append(name)
                else:
                    yield name
            elif homeless and clean:
                message = f"{line.text}\n{', '.join(homeless)} does not fit into dialect {self._target.label}"
                hint = "Add a line for it with --rules, or choose another dialect."
                self.refusals.append(Refusal("UNSUPPORTED", message, Where(None, name), hint))

    def _numbers_nothing(self, line: Line) -> bool:
        """Tell whether every target tensor of a stored line would have a number of an axis of size 0 in its name."""
        known = self._holdings.sizes.at({})
        empty = {axis for axis in line.expression.axes if known.get(axis) == 0}
        wanted = [
            other
            for other in self._lines
            if not set(other.expression.components).isdisjoint(line.expression.components)
        ]
        return bool(empty and wanted) and all(not empty.isdisjoint(other.name.axes) for other in wanted)


_LISTED = 20
"""Cap on the missing tensors that a refusal names."""
_BESIDE = 4
"""Target tensors that a refusal names beside the first one of its rule."""
_COUNTED = 10_000
"""Cap on the missing tensors that are counted: a config that claims a billion layers must not keep us busy."""
_AHEAD = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers")
"""Keys of configs with the number of layers that predict ahead, which many checkpoints number behind the last layer."""
_BEYOND = (
    "Correct --axis {axis}=N or --config, if you gave them, or the config.json of the checkpoint: it is that of a "
    "smaller model. All tensors keep their names with --to safetensors:identity."
)
_UNREAD = (
    'Add lines for them to a table of your own (--rules FILE, rules="FILE"), or keep all names with --to '
    'safetensors:identity (to="safetensors:identity").'
)
_TIED = (
    'If the model has its embedding as its head, its config.json says so ("tie_word_embeddings": true): give that with '
    "--config FILE."
)
_ASKED = 300_000
"""Cap on the absent tensors for which the conditions are evaluated; no model has as many."""
HEAD = frozenset({"head", "head_bias", "lm_head"})
"""Logical tensors that make tokens of a model's states."""
_IN_ITS_PLACE = frozenset({"score.weight", "classifier.weight", "qa_outputs.weight"})
"""What models have in place of it that classify texts or tokens, or find answers; it keeps its name."""
_BELOW_ADAPTERS = ".base_layer."
"""In the names of weights that a model with adapters has below them."""
_ADAPTED = (
    f"Names with {_BELOW_ADAPTERS} are those of a model with adapters (peft), which no dialect has: keep them, --to "
    'safetensors:identity (to="safetensors:identity"); write the sum, after merge_and_unload(); or the adapter alone, '
    "tx.save(dict(peft.get_peft_model_state_dict(model)), …)."
)


def incomplete(holdings: Holdings, tied: Container[str]) -> list[Refusal]:
    """Refuse a checkpoint that lacks tensors of its family.

    Args:
        holdings: the checkpoint.
        tied: logical tensors that need not be stored, as they equal others.
    """
    budget = iter(range(_ASKED))
    # A stored tensor of several logical ones is missing once.
    missing = list(islice(_each_once(_lacking(holdings, tied, budget)), _COUNTED))
    if not missing and next(budget, None) is None:
        missing = [f"(the config claims more layers or experts than can be checked: {_ASKED} of them are missing)"]
    if not missing:
        return []
    bound = holdings.bound
    head = f"{bound.family.name} in dialect {bound.dialect.label} lacks these tensors:"
    more = len(missing) - _LISTED
    tail = [f"… and {more}{' or more' if len(missing) == _COUNTED else ' more'}"] if more > 0 else []
    table = ", or the table lacks a line for it" if bound.unknown else ""
    hint = (
        f"Check whether a shard is missing{table}; a part of a checkpoint can be converted under its own names:  --to "
        "safetensors:identity."
    )
    if any(_BELOW_ADAPTERS in name for name in bound.unknown):
        hint = _ADAPTED
    elif len(missing) == 1 and _may_be_tied(holdings):
        hint = f"{_TIED} Else check whether a shard is missing{table}."
    return [Refusal("MISSING_TENSOR", "\n".join([head, *missing[:_LISTED], *tail]), Where(), hint)]


def _may_be_tied(holdings: Holdings) -> bool:
    """Tell whether a config could say that the head is another tensor: there is none that says anything of it."""
    stored = {component for component, _ in holdings.sources}
    return any(
        tie.alias in HEAD and tie.alias not in stored and holdings.holds(tie.when, {}) is None
        for tie in holdings.bound.family.ties
    )


def classifies(bound: BoundNames) -> bool:
    """Tell whether a model has another head, which its table does not know, in place of the one that makes tokens."""
    stored = (component for line, _ in bound.names for component in line.expression.components)
    unknown = (bound.own.get(name, name).removeprefix(bound.prefix) for name in bound.unknown)
    return not _IN_ITS_PLACE.isdisjoint(unknown) and HEAD.isdisjoint(stored)


def contradicted(holdings: Holdings) -> Iterator[Refusal]:
    """Yield a refusal where names say that there is more, such as a head, than what any line reads.

    What no line reads keeps its name; names that depend on it would be those of a model without it.

    Args:
        holdings: the checkpoint.
    """
    bound = holdings.bound
    for (line, slot), names in bound.names.items() if bound.unknown else ():
        position, name = next(iter(names.items()))
        index = dict(zip(line.name.axes, position, strict=True))
        if slot == WEIGHT and line.when is not None and not line.by_form and holdings.holds(line.when, index) is False:
            others = [
                other
                for other in bound.dialect.lines
                if other.expression == line.expression and other.name.axes == line.name.axes
            ]
            if line in others and any(holdings.holds(other.when, index) for other in others):
                unread = ", ".join(bound.unknown[:_BESIDE])
                message = f"{line.whole}\nhas this name, so the model has more than what the table reads: {unread}"
                yield Refusal("UNEXPECTED_TENSOR", message, Where(None, name), _UNREAD)
                return


def beyond(bound: BoundNames, sizes: Sizes) -> Iterator[Refusal]:
    """Yield one refusal for each rule and axis that names count beyond: of more layers, or experts, than there are.

    Kept under their names, they would be missing from the converted model. Layers that predict ahead are kept where the
    table has no line for them, numbered behind the last one, and where the config says that there are none. No model is
    without layers of its own.

    Args:
        bound: the stored names.
        sizes: the sizes they were read with.
    """
    found: dict[tuple[Line, str], list[tuple[int, str]]] = defaultdict(list)
    known = sizes.at({})
    numbers = [sizes.settings.get(key) for key in _AHEAD]
    ahead = max((number for number in numbers if isinstance(number, int)), default=0)
    for name in bound.unknown:
        parameter = split_slot(bound.own.get(name, name))[0]
        bare = parameter.removeprefix(bound.prefix)
        over = [
            (line, axis, index)
            for line in bound.dialect.by_skeleton.get(skeleton(bare), ())
            if parameter.startswith(bound.prefix)
            for axis, index in _indices_of(line, bare, known)
            if axis in known and index >= known[axis]
        ]
        # The first number of a name is that of its layer.
        layers = [(line, known[axis], index) for line, axis, index in over if axis == line.name.axes[0]]
        if over and not any(
            index < count + ahead or (count == 0 and _may_be_left_out(line, sizes)) for line, count, index in layers
        ):
            line, axis, index = over[0]
            found[line, axis].append((index, name))
    for (line, axis), names in found.items():
        formula = bound.family.axes.get(axis)
        origin = "as given" if axis in sizes.overrides or formula is None else f"{formula.text} in the config"
        index, first = names[0]
        message = f"{line.text}\nnumber {index} of axis {axis} is beyond its size, {known[axis]} ({origin})"
        if len(names) > 1:
            message += f"\nso are those of {len(names) - 1:,} more tensors of this line"
        yield Refusal("UNEXPECTED_TENSOR", message, Where(None, first), _BEYOND.format(axis=axis))


def _may_be_left_out(line: Line, sizes: Sizes) -> bool:
    """Tell whether a model may be without all that a line holds, as of layers that predict ahead: were there one layer
    of each kind, the config would still not ask for it.
    """
    least = Sizes(sizes.family, sizes.config, {axis: count or 1 for axis, count in sizes.at({}).items()})
    tensors = (sizes.family.tensors[component] for component in line.expression.components)
    return not any(least.holds(tensor.when, dict.fromkeys(line.name.axes, 0)) for tensor in tensors)


def _indices_of(line: Line, name: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield each axis in the name of a line with its index; none if the line cannot have the name."""
    position = line.name.numbering(sizes).position(name)
    yield from zip(line.name.axes, position or (), strict=position is not None)


def unfilled(lacking: Mapping[tuple[Line, tuple[str, ...]], Sequence[str]]) -> Iterator[Refusal]:
    """Yield one refusal for each rule whose tensors lack parts.

    Args:
        lacking: rule and the logical tensors that the source does not have -> names of target tensors that need them.
    """
    for (line, missing), names in lacking.items():
        first, *others = names
        message = f"{line.text}\nneeds {', '.join(missing)}, which the source does not have here"
        if others:
            more = [f"… and {len(others) - _BESIDE:,} more"] if len(others) > _BESIDE else []
            message += f"\nnor for {', '.join([*others[:_BESIDE], *more])}"
        yield Refusal("MISSING_TENSOR", message, Where(None, first))


def _each_once(names: Iterator[str]) -> Iterator[str]:
    seen = set[str]()
    for name in names:
        if name not in seen:
            seen.add(name)
            yield name


def _lacking(holdings: Holdings, tied: Container[str], budget: Iterator[int]) -> Iterator[str]:
    known_sizes = holdings.sizes.at({})
    is_headless = classifies(holdings.bound)
    for tensor in holdings.bound.family.tensors.values():
        # Of no dense layers, or of zero experts, nothing is stored.
        numbered = holdings.bound.family.name_axes.intersection(tensor.axes)
        if any(known_sizes.get(axis) == 0 for axis in numbered):
            continue
        lines = holdings.sources.get((tensor.name, WEIGHT), [])
        if lines:
            yield from _missing_names(holdings, lines, tensor, budget)
        elif tensor.name in HEAD and is_headless:
            continue
        elif tensor.name not in tied and _must_exist(holdings, tensor, budget):
            yield f"{_called(holdings.bound, tensor)} (in no layer)" if numbered else _called(holdings.bound, tensor)


def _called(bound: BoundNames, tensor: LogicalTensor) -> str:
    """Return the name of a tensor that nothing holds, as the dialect stores it, or else as the family calls it."""
    names = (bound.prefix + line.name.text for line in bound.dialect.lines if _holds(line, tensor))
    return next(names, tensor.name)


def _holds(line: Line, tensor: LogicalTensor) -> bool:
    return tensor.name in line.expression.components


def _must_exist(holdings: Holdings, tensor: LogicalTensor, budget: Iterator[int]) -> bool:
    """Tell whether a tensor that nothing holds must exist at any index at all."""
    if tensor.when is None:
        return True
    lines = frozenset(holdings.bound.dialect.lines)
    if lines.issuperset(line for line, _ in holdings.bound.names) and not any(_holds(line, tensor) for line in lines):
        # What is there only because other tensors are is not missing where a dialect has no name for it.
        return bool(holdings.sizes.holds(tensor.when, {}))
    known_sizes = holdings.sizes.at({})
    axes = [axis for axis in tensor.axes if axis in tensor.when.names and axis in known_sizes]
    return any(
        holdings.holds(tensor.when, dict(zip(axes, index, strict=True)))
        for _, index in zip(budget, _indices([known_sizes[axis] for axis in axes]), strict=False)
    )


def _indices(counts: Sequence[int]) -> Iterator[Index]:
    """Yield every index in order, like `itertools.product` of ranges, but lazily: a claimed size may be huge."""
    if not counts:
        yield ()
        return
    for first in range(counts[0]):
        for following in _indices(counts[1:]):
            yield (first, *following)


def _absent(counts: Sequence[int], present: Collection[Index]) -> Iterator[Index]:
    """Yield the indices that are not present, in order; along alike tensors without a walk over those that are."""
    if not isinstance(present, Grid):
        yield from (index for index in _indices(counts) if index not in present)
        return
    if not counts:
        return
    along, inner = set(present.numbers[0]), Grid(present.numbers[1:])
    is_whole = all(_begin_with(count, numbers) for count, numbers in zip(counts[1:], inner.numbers, strict=True))
    for first in range(counts[0]):
        if first not in along:
            yield from ((first, *following) for following in _indices(counts[1:]))
        elif not is_whole:
            yield from ((first, *following) for following in _absent(counts[1:], inner))


def _begin_with(count: int, numbers: Sequence[int]) -> bool:
    """Tell whether ascending numbers begin with 0 to count - 1: a config may claim any count."""
    return count <= len(numbers) and (count == 0 or numbers[count - 1] == count - 1)


def _missing_names(
    holdings: Holdings, lines: list[LineSources], tensor: LogicalTensor, budget: Iterator[int]
) -> Iterator[str]:
    """Yield the names that should be there: every index for which the tensor must exist, in any of its lines.

    Where the config does not tell whether it must, it must be whole: there at all indices or at none. So must what a
    program adds on its own account.
    """
    known_sizes, added = holdings.sizes.at({}), holdings.bound.family.added
    axes = lines[0].axes
    for position in _absent([known_sizes[axis] for axis in axes], lines[0].present):
        if next(budget, None) is None:
            return
        index = dict(zip(axes, position, strict=True))
        if any(line.at(index) for line in lines):
            continue
        must = holdings.holds(tensor.when, index)
        if must is None:
            names = tensor.when.names if tensor.when is not None else frozenset()
            must = any(line.at({axis: i for axis, i in index.items() if axis in names}) for line in lines)
        if not must and tensor.name in added:
            must = holdings.holds(added[tensor.name], index)
        if must:
            yield holdings.bound.prefix + _name(holdings, lines, index)


def _name(holdings: Holdings, lines: list[LineSources], index: Mapping[str, int]) -> str:
    """Return the name of the missing tensor, in the line that would hold it."""
    line = next((h.line for h in lines if holdings.holds(h.line.when, index) is not False), lines[0].line)
    position = [index.get(axis, 0) for axis in line.name.axes]
    numbers = line.name.numbering(holdings.sizes.at({})).numbers(position)
    return line.name.format(tuple(number or 0 for number in numbers))
