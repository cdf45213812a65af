"""Handles stored tensors that the target dialect cannot name, and mapping rules for which no tensor is stored.

- Undecided mapping rules: the config does not determine whether their condition is true. The source's names may: a
  tensor stored under the name of a rule `when x` proves that x is true. If names do not decide either, a rule applies
  only if no other rule could store the same tensor. If two undecided rules for one tensor both applied, both names
  would be written, one of them wrongly.
- Added tensors: tensors that some frameworks add to a model, such as a router bias for load balancing, and for which
  zeros mean the same as absence. A dialect whose framework always has the tensor gets zeros if the source lacks the
  tensor. If a target has no place for the tensor, zeros are omitted. Other values would change the model's results, so
  they are refused.
- Unplaced tensors: a tensor without a mapping rule in the target dialect keeps its name, and is never dropped silently.
- Missing tensors: tensors that a checkpoint must have but lacks, and tensors of layers or experts beyond their number.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, product
from typing import NamedTuple

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
    """Evaluates the conditions of the target dialect's mapping rules, from the config and the source's tensor names.

    Args:
        lines: the mapping rules of the target dialect that may be written.
        holdings: where the source checkpoint stores each logical tensor.
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
            # The encoding of a stored tensor does not determine the encoding in which it will be written.
            if slot == WEIGHT and sources.line.when is not None and not sources.line.by_form
        }
        self._known: dict[tuple[Line, str | None, tuple[tuple[str, int], ...]], bool | None] = {}

    def holds(self, line: Line, index: Mapping[str, int], encoding: str | None = None) -> bool | None:
        """Return whether a mapping rule applies for these indices; None if neither config nor stored names determine
        it.
        """
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
        """Return the truth value of a condition that follows from the fact that the mapping rules of all stored tensors
        apply.
        """

        def evaluate(part: Formula) -> bool | None:
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
        if not shown or not may_all_hold(shown, evaluate):
            return None  # the stored names contradict each other and prove nothing
        if not may_all_hold([(condition, index), *shown], evaluate):
            return False
        opposite = Formula(f"not ({condition.text})", condition.let_formulas)
        return None if may_all_hold([(opposite, index), *shown], evaluate) else True

    def rivals(self, line: Line, index: Mapping[str, int], encoding: str | None) -> list[Refusal]:
        """Return errors for a mapping rule whose condition is undecided: one for each other rule that may store the
        same tensor.
        """
        if self.holds(line, index, encoding) is not None:
            return []
        refusals = []
        for component in line.expression.components:
            for rival in self._by_component[component]:
                at = {axis: index[axis] for axis in rival.name.axes if axis in index}
                if rival is not line and self.holds(rival, at, encoding) is not False:
                    line_pair = sorted((line, rival), key=self._by_component[component].index)
                    evaluate = partial(self._holdings.holds, index=index)
                    refusals.append(
                        refusal_of_undecided(line_pair, f"can hold {component}", self._holdings.bound.family, evaluate)
                    )
        return refusals


_FLOAT = "F32"
"""Dtype of tensors that are added as zeros: frameworks have these tensors in float32."""
_CORRECT = (
    "If the model has them, correct its config (--config FILE, config=); else remove them, or keep all names with "
    '--to safetensors:identity (to="safetensors:identity").'
)
_NONZERO = (
    "The model computes with these values: choose a dialect that has the tensor, or keep all names with --to "
    'safetensors:identity (to="safetensors:identity").'
)


class AddedTensors:
    """Optional tensors, such as a router bias, for which zeros mean the same as absence.

    Args:
        holdings: where the source checkpoint stores each logical tensor.
        target: the target dialect.
        conditions: evaluates the conditions of the target dialect's mapping rules.
    """

    def __init__(self, holdings: Holdings, target: Dialect, conditions: LineConditions) -> None:
        self._holdings = holdings
        self._target = target
        self._conditions = conditions
        self._added = holdings.bound.family.added

    def concern(self, line: Line) -> bool:
        """Return whether a mapping rule stores an added tensor, for which zeros mean the same as absence."""
        return not self._added.keys().isdisjoint(line.expression.components)

    def have_place(self, line: Line, index: Mapping[str, int]) -> bool:
        """Return whether the target's framework has the tensor of a mapping rule; some frameworks have it whatever the
        config states.
        """
        if line.else_zeros or self._target is self._holdings.bound.dialect:
            return True
        tensors = (self._holdings.bound.family.tensors[component] for component in line.expression.components)
        return all(self._holdings.holds(tensor.when, index) is not False for tensor in tensors)

    def zeros(self) -> Iterator[Target]:
        """Yield the tensors to write as zeros, which the target's framework has and the source lacks.

        Raises:
            UsageError: with the code UNKNOWN_AXIS if the size of an axis of these tensors is unknown.
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
                index = line.name.index_at(position)
                if self._holdings.holds(when, index) and self._conditions.holds(line, index) is not False:
                    numbers = line.name.numbering(sizes).numbers(position)
                    name = line.name.format(tuple(number or 0 for number in numbers))
                    yield Target(name, _FLOAT, layout, index, (), line.text, component)

    def omissions(self, unplaced: Collection[str], stored: Mapping[str, Stored]) -> Iterator[tuple[Line, list[Check]]]:
        """Yield the mapping rules of added tensors that the target cannot store, with checks that each such tensor is
        zero.

        Args:
            unplaced: stored names without a mapping rule in the target.
            stored: stored name -> tensor, for all tensors of the source.
        """
        for (line, slot), names in self._holdings.bound.names.items() if self._added else ():
            if slot != WEIGHT or not self.concern(line):
                continue
            sources = [identity_target(name, stored[name]) for name in names.values() if name in unplaced]
            why = f"{line.text}\n{self._target.label} has no such tensor"
            checks = [Check(source, replace(source, parts=()), why, _NONZERO) for source in sources]
            if checks:
                yield line, checks


def refuse_ruled_out(holdings: Holdings) -> Iterator[Refusal]:
    """Yield an error for each mapping rule of the source whose stored tensors should not exist according to the config.

    Frameworks would ignore these tensors, and compute a different result than the trained model. Conditions on the
    layer or on other tensors are not checked, because names show more about such conditions than a table of rules.

    Args:
        holdings: where the checkpoint stores each logical tensor.
    """
    family, settings = holdings.bound.family, holdings.sizes.settings
    for (component, slot), lines in holdings.sources.items():
        when = family.tensors[component].when
        if slot != WEIGHT or when is None or component in family.copies:
            continue
        for line in (sources.line for sources in lines):
            if line.else_zeros or (line.read_only and component in family.added):
                continue  # frameworks have this tensor with any config
            keys = [(key, settings.get(key)) for key in sorted(when.names - family.tensors.keys())]
            values = [f"{key}: {json.dumps(value)}" for key, value in keys if isinstance(value, bool | int | str)]
            names = holdings.bound.names[line, WEIGHT]
            # Without an index, a formula may fall back to the default for layers that its config does not list.
            indices = chain([{}], map(line.name.index_at, names))
            if values and all(holdings.sizes.holds(when, index) is False for index in indices):
                name = next(iter(names.values()))
                message = f"{line.text}\nis there, but a {family.name} of this config has none ({', '.join(values)})"
                yield Refusal("UNEXPECTED_TENSOR", message, Where(None, name), _CORRECT)


def _origins(side: Target) -> set[tuple[str, str]]:
    """Return the source tensors of a target in a check, as pairs `(stored name, logical tensor)`."""
    return {(origin.name, origin.component) for part in side.parts for origin in part.origins}


class Unplaced:
    """Finds the stored tensors that no target tensor reads.

    Args:
        holdings: where the checkpoint stores each logical tensor.
        target: the target dialect.
        lines: the mapping rules of the target dialect that are written.

    Attributes:
        empty: names of tensors that have no elements and no place in the target.
        refusals: errors for stored tensors that can be written only in part.
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
        """Record that a target tensor reads these sources, so that the sources have a place in the target dialect."""
        for sources in by_component.values():
            if isinstance(sources, AlikeSources):
                self.parts_taken(line, sources.line_sources).append(sources.origins)
            else:
                origins = (place.origin for place in sources.places.values())
                self._used.update((origin.name, origin.component) for origin in origins)

    def parts_taken(self, line: Line, of: LineSources) -> list[AlikePart]:
        """Return the list of similar tensors that the targets of a mapping rule read; the caller appends to the
        list.
        """
        return self._alike[of, line]

    def names(self, checks: Iterable[Check], *, clean: bool) -> Iterator[str]:
        """Yield the stored tensors that keep their names.

        A tensor that has a place in the target only for some of its parts cannot be kept whole, and is refused. A
        tensor without elements is omitted if its axis of size 0 numbers the target's tensors (zero experts).

        Args:
            checks: equality checks. A tensor that only a check reads counts as placed if the tensor with which it is
                compared is placed.
            clean: whether no error has occurred so far.
        """
        checked = [(_origins(check.first), _origins(check.second)) for check in checks]
        # All stored tensors of one mapping rule contain the same number of logical tensors.
        wholly = {of for (of, _), parts in self._alike.items() if len(parts) * len(parts[0]) == len(of.places)}
        open_lines = [(line, slot) for line, slot in self._holdings.bound.names if not self._all_in(wholly, line, slot)]
        lines_to_check = {line for line, _ in open_lines}
        used = set(self._used)
        for (of, _), parts in self._alike.items():
            if checked or of.line in lines_to_check:
                used.update((origin.name, origin.component) for each in parts for origin in each)
        for first, second in checked:
            if first <= used or second <= used:
                used |= first | second
            else:  # no target reads either duplicate: the second keeps its name
                used |= first - second
        for line, slot in open_lines:
            yield from self._homeless(line, slot, used, clean=clean)

    def _all_in(self, wholly: Container[LineSources], line: Line, slot: str) -> bool:
        """Return whether every tensor of a stored mapping rule certainly has a place; single tensors are not
        visited.
        """
        are_placed = [
            any(
                sources.line is line and sources in wholly
                for sources in self._holdings.sources.get((component, slot), ())
            )
            for component in line.expression.components
        ]
        return all(are_placed)

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
        """Return whether every target tensor for a stored mapping rule would be numbered along an axis of size 0."""
        sizes = self._holdings.sizes.at({})
        empty = {axis for axis in line.expression.axes if sizes.get(axis) == 0}
        if not empty:
            return False
        target_lines = [
            other
            for other in self._lines
            if not set(other.expression.components).isdisjoint(line.expression.components)
        ]
        return bool(target_lines) and all(not empty.isdisjoint(other.name.axes) for other in target_lines)


_LISTED = 20
"""Maximum number of missing tensors that an error lists."""
_BESIDE = 4
"""Maximum number of further target tensors of the same mapping rule that an error lists after the first."""
_COUNTED = 10_000
"""Maximum number of missing tensors that are counted; a config may claim a billion layers."""
AHEAD_KEYS = (
    "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_modules",
)  # fmt: skip
"""Config keys for the number of multi-token-prediction layers, which many checkpoints number after the last layer."""
_BEYOND = (
    "Correct --axis {axis}=N or --config, if you gave them; otherwise the config.json of the checkpoint is that of a "
    "smaller model. To keep all names: --to safetensors:identity."
)
_UNREAD = (
    'Add lines for them to a table of your own (--rules FILE, rules="FILE"), or keep all names with --to '
    'safetensors:identity (to="safetensors:identity").'
)
_TIED = (
    'If the head of the model is its embedding, its config.json contains "tie_word_embeddings": true: give that file '
    "with --config FILE."
)
_ASKED = 300_000
"""Maximum number of absent tensors whose conditions are evaluated; real models have fewer."""
HEAD = frozenset({"head", "head_bias", "lm_head"})
"""Names of the logical tensors in the language-model head."""
_IN_ITS_PLACE = frozenset({"score.weight", "classifier.weight", "qa_outputs.weight"})
"""Names of tensors in heads that a model may have instead of the language-model head: heads that classify texts or
tokens, or find answers. These tensors keep their names.
"""
_BELOW_ADAPTERS = ".base_layer."
"""Name segment that peft inserts into the names of weights with adapters."""
_ADAPTED = (
    f"Names with {_BELOW_ADAPTERS} are those of a model with adapters (peft), which no dialect has: keep them, --to "
    'safetensors:identity (to="safetensors:identity"); write the sum, after merge_and_unload(); or the adapter alone, '
    "tx.save(dict(peft.get_peft_model_state_dict(model)), …)."
)


class AbsentTensor(NamedTuple):
    """A stored tensor that a model must have and a checkpoint lacks."""

    name: str
    """Name of the tensor; its pattern, as the table has it, if `in_no_layer`."""
    tensor: LogicalTensor
    """One of the logical tensors in it."""
    in_no_layer: bool
    """Whether the checkpoint stores the logical tensor in no layer."""


def find_absent(holdings: Holdings, tied: Container[str]) -> list[AbsentTensor] | None:
    """Return the tensors that a model must have and a checkpoint lacks; None if there are too many to count.

    Args:
        holdings: where the checkpoint stores each logical tensor.
        tied: logical tensors that may be absent, because they are tied to other tensors.
    """
    budget = iter(range(_ASKED))
    # A missing stored tensor that contains several logical tensors counts once.
    absent = list(islice(_each_once(_walk_absent(holdings, tied, budget)), _COUNTED))
    return None if not absent and next(budget, None) is None else absent


def refuse_incomplete(holdings: Holdings, tied: Container[str]) -> list[Refusal]:
    """Refuse a checkpoint that lacks tensors which its model must have; arguments as those of `find_absent`."""
    absent = find_absent(holdings, tied)
    if absent is None:
        missing = [f"(the config claims more layers or experts than can be checked: {_ASKED} of them are missing)"]
    else:
        missing = [f"{each.name} (in no layer)" if each.in_no_layer else each.name for each in absent]
    if not missing:
        return []
    bound = holdings.bound
    head = f"{bound.family.name} in dialect {bound.dialect.label} lacks these tensors:"
    omitted_count = len(missing) - _LISTED
    tail = [f"… and {omitted_count}{' or more' if len(missing) == _COUNTED else ' more'}"] if omitted_count > 0 else []
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
    """Return whether the config leaves open if the head is tied to the embedding, because the key for the tie is
    missing.
    """
    stored = {component for component, _ in holdings.sources}
    return any(
        tie.alias in HEAD and tie.alias not in stored and holdings.holds(tie.when, {}) is None
        for tie in holdings.bound.family.ties
    )


def classifies(bound: BoundNames) -> bool:
    """Return whether a model has, instead of the language-model head, a classification head that its table lacks."""
    stored = (component for line, _ in bound.names for component in line.expression.components)
    unknown = (bound.own.get(name, name).removeprefix(bound.prefix) for name in bound.unknown)
    return not _IN_ITS_PLACE.isdisjoint(unknown) and HEAD.isdisjoint(stored)


def refuse_contradicted(holdings: Holdings) -> Iterator[Refusal]:
    """Yield an error if stored names imply more tensors (such as a head) than the dialect's mapping rules describe.

    The tensors without a mapping rule would keep their names, and the renamed tensors would form a model that has no
    place for them.

    Args:
        holdings: where the checkpoint stores each logical tensor.
    """
    bound = holdings.bound
    for (line, slot), names in bound.names.items() if bound.unknown else ():
        position, name = next(iter(names.items()))
        index = line.name.index_at(position)
        if slot == WEIGHT and line.when is not None and not line.by_form and holdings.holds(line.when, index) is False:
            unread_names = [
                other
                for other in bound.dialect.lines
                if other.expression == line.expression and other.name.axes == line.name.axes
            ]
            if line in unread_names and any(holdings.holds(other.when, index) for other in unread_names):
                unread = ", ".join(bound.unknown[:_BESIDE])
                message = f"{line.whole}\nhas this name, so the model has more than what the table reads: {unread}"
                yield Refusal("UNEXPECTED_TENSOR", message, Where(None, name), _UNREAD)
                return


def refuse_beyond(bound: BoundNames, sizes: Sizes) -> Iterator[Refusal]:
    """Yield one error for each mapping rule and axis with stored names whose number is beyond the size of the axis.

    Tensors of layers or experts beyond the size would keep their names, and so be missing from the converted model.
    Multi-token-prediction layers are an exception. Multi-token-prediction layers are kept if the table has no mapping
    rule for them and they are numbered after the last layer, or if the config states that there are none. For an axis
    of ordinary layers there is no exception, because a model always has layers.

    Args:
        bound: the stored names, matched with the lines of a dialect.
        sizes: the axis sizes with which the names were matched.
    """
    names_beyond: dict[tuple[Line, str], list[tuple[int, str]]] = defaultdict(list)
    known_sizes = sizes.at({})
    numbers = [sizes.settings.get(key) for key in AHEAD_KEYS]
    ahead = max((number for number in numbers if isinstance(number, int)), default=0)
    for name in bound.unknown:
        parameter = split_slot(bound.own.get(name, name))[0]
        bare = parameter.removeprefix(bound.prefix)
        over = [
            (line, axis, index)
            for line in bound.dialect.by_skeleton.get(skeleton(bare), ())
            if parameter.startswith(bound.prefix)
            for axis, index in _indices_of(line, bare, known_sizes)
            if axis in known_sizes and index >= known_sizes[axis]
        ]
        # The first number in a name is the index of the layer.
        layers = [(line, known_sizes[axis], index) for line, axis, index in over if axis == line.name.axes[0]]
        if over and not any(
            index < count + ahead or (count == 0 and _may_be_left_out(line, sizes)) for line, count, index in layers
        ):
            line, axis, index = over[0]
            names_beyond[line, axis].append((index, name))
    for (line, axis), names in names_beyond.items():
        formula = bound.family.axes.get(axis)
        origin = "as given" if axis in sizes.overrides or formula is None else f"{formula.text} in the config"
        index, first = names[0]
        message = f"{line.text}\nnumber {index} of axis {axis} is beyond its size, {known_sizes[axis]} ({origin})"
        if len(names) > 1:
            message += f"\nso are those of {len(names) - 1:,} more tensors of this line"
        yield Refusal("UNEXPECTED_TENSOR", message, Where(None, first), _BEYOND.format(axis=axis))


def _may_be_left_out(line: Line, sizes: Sizes) -> bool:
    """Return whether a model may lack all tensors of a mapping rule, such as those of multi-token-prediction layers.

    A model may lack them if the config would not require these tensors even with one layer of each kind.
    """
    least = Sizes(sizes.family, sizes.config, {axis: count or 1 for axis, count in sizes.at({}).items()})
    tensors = (sizes.family.tensors[component] for component in line.expression.components)
    return not any(least.holds(tensor.when, dict.fromkeys(line.name.axes, 0)) for tensor in tensors)


def _indices_of(line: Line, name: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield `(axis, index)` for the axes in a rule's name pattern; nothing if the pattern does not match the stored
    name.
    """
    position = line.name.numbering(sizes).position(name)
    yield from zip(line.name.axes, position or (), strict=position is not None)


def refuse_unfilled(lacking: Mapping[tuple[Line, tuple[str, ...]], Sequence[str]]) -> Iterator[Refusal]:
    """Yield one error for each mapping rule whose target tensors cannot be completed.

    Args:
        lacking: (mapping rule, logical tensors missing in the source) -> names of the target tensors that need them.
    """
    for (line, missing), names in lacking.items():
        first, *further_names = names
        message = f"{line.text}\nneeds {', '.join(missing)}, which the source does not have here"
        if further_names:
            omitted = [f"… and {len(further_names) - _BESIDE:,} more"] if len(further_names) > _BESIDE else []
            message += f"\nnor for {', '.join([*further_names[:_BESIDE], *omitted])}"
        yield Refusal("MISSING_TENSOR", message, Where(None, first))


def _each_once(absent: Iterator[AbsentTensor]) -> Iterator[AbsentTensor]:
    names = set[str]()
    for tensor in absent:
        if tensor.name not in names:
            names.add(tensor.name)
            yield tensor


def _walk_absent(holdings: Holdings, tied: Container[str], budget: Iterator[int]) -> Iterator[AbsentTensor]:
    known_sizes = holdings.sizes.at({})
    is_headless = classifies(holdings.bound)
    for tensor in holdings.bound.family.tensors.values():
        # A model with zero dense layers, or zero experts, has no stored tensors of this kind.
        numbered = holdings.bound.family.name_axes.intersection(tensor.axes)
        if any(known_sizes.get(axis) == 0 for axis in numbered):
            continue
        lines = holdings.sources.get((tensor.name, WEIGHT), [])
        if lines:
            for name in _absent_names(holdings, lines, tensor, budget):
                yield AbsentTensor(name, tensor, in_no_layer=False)
        elif tensor.name in HEAD and is_headless:
            continue
        elif tensor.name not in tied and _must_exist(holdings, tensor, budget):
            yield AbsentTensor(_display_name(holdings.bound, tensor), tensor, in_no_layer=bool(numbered))


def _display_name(bound: BoundNames, tensor: LogicalTensor) -> str:
    """Return the dialect's name pattern of a tensor that is not stored, or the tensor's name in the family."""
    names = (bound.prefix + line.name.text for line in bound.dialect.lines if _holds(line, tensor))
    return next(names, tensor.name)


def _holds(line: Line, tensor: LogicalTensor) -> bool:
    return tensor.name in line.expression.components


def _must_exist(holdings: Holdings, tensor: LogicalTensor, budget: Iterator[int]) -> bool:
    """Return whether a tensor that is not stored must exist for some index."""
    if tensor.when is None:
        return True
    lines = frozenset(holdings.bound.dialect.lines)
    if lines.issuperset(line for line, _ in holdings.bound.names) and not any(_holds(line, tensor) for line in lines):
        # A tensor whose existence depends on other tensors is not missing if the dialect has no name for it.
        return bool(holdings.sizes.holds(tensor.when, {}))
    known_sizes = holdings.sizes.at({})
    axes = [axis for axis in tensor.axes if axis in tensor.when.names and axis in known_sizes]
    return any(
        holdings.holds(tensor.when, dict(zip(axes, index, strict=True)))
        for _, index in zip(budget, _indices([known_sizes[axis] for axis in axes]), strict=False)
    )


def _indices(counts: Sequence[int]) -> Iterator[Index]:
    """Yield every index in order, like `itertools.product` of ranges, but lazily, because a claimed size may be
    huge.
    """
    if not counts:
        yield ()
        return
    for first in range(counts[0]):
        for following in _indices(counts[1:]):
            yield (first, *following)


def _absent(counts: Sequence[int], present: Collection[Index]) -> Iterator[Index]:
    """Yield the indices for which no tensor is stored, in order; in a grid of indices, stored ones are skipped
    at once.
    """
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
    """Return whether ascending numbers begin with 0 to count - 1, in constant time: a config may claim any count."""
    return count <= len(numbers) and (count == 0 or numbers[count - 1] == count - 1)


def _absent_names(
    holdings: Holdings, lines: list[LineSources], tensor: LogicalTensor, budget: Iterator[int]
) -> Iterator[str]:
    """Yield the names that are missing: one for every index at which the tensor must exist, but no mapping rule stores
    it.

    If the config does not determine whether the tensor must exist, it must exist at all indices or at none. Added
    tensors, for which zeros mean the same as absence, must also exist at all indices or at none.
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
    """Return the name that a missing tensor would have, by the mapping rule that would store it."""
    line = next((h.line for h in lines if holdings.holds(h.line.when, index) is not False), lines[0].line)
    position = [index.get(axis, 0) for axis in line.name.axes]
    numbers = line.name.numbering(holdings.sizes.at({})).numbers(position)
    return line.name.format(tuple(number or 0 for number in numbers))
