"""Translation: describes a checkpoint in a new dialect (another framework's tensor names and layouts), tensor by
tensor.

Each mapping rule of the target dialect requires certain logical tensors. `Gathering` finds the stored tensors that
contain these logical tensors, by the indices (layer, expert) in the target's name. Stored tensors without a mapping
rule in the target dialect keep their names. The translation reads only names and shapes. Errors are collected, not
raised one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, BoundNames, Index, join_slot, split_slot, with_kept
from transaxle.axes.layout.relayout import (
    EXACT,
    NOTHING,
    Check,
    Origin,
    Stored,
    Target,
    TargetPart,
    identity_target,
    indices,
    inseparable,
    unify,
    unknown_axis,
    with_products,
)
from transaxle.axes.notation.expression import Expression, Layout
from transaxle.axes.notation.family import PLAIN, Arithmetic, Dialect, Formula, Line, NumberFormat, Recode, Sizes, same
from transaxle.axes.notation.name import Numbering
from transaxle.axes.translation.holdings import (
    AlikePart,
    AlikeTensors,
    ComponentSources,
    Holdings,
    JoinedSources,
    LineSources,
    Sources,
    SourceTensor,
    agreements,
    check_substitutes,
    grids,
    solve_sizes,
)
from transaxle.axes.translation.unmatched import (
    HEAD,
    AbsentTensor,
    AddedTensors,
    LineConditions,
    Unplaced,
    classifies,
    find_absent,
    refuse_beyond,
    refuse_contradicted,
    refuse_incomplete,
    refuse_ruled_out,
    refuse_unfilled,
)
from transaxle.errors import Refusal, TransaxleError, Where, refuse

SourcesByComponent = Mapping[str, Sources]
"""Logical tensor in the target -> the stored tensors from which the logical tensor is read."""


class Gathering:
    """Finds the stored tensors from which target tensors are read.

    Args:
        holdings: where the checkpoint stores each logical tensor.
        tied: logical tensor -> tensors to which it is tied, nearest first.
        refuse: function that is called with the errors found.
    """

    def __init__(
        self,
        holdings: Holdings,
        tied: Mapping[str, Sequence[str]],
        refuse: Callable[[Iterable[Refusal]], None],
    ) -> None:
        self._holdings = holdings
        self._tied = tied
        self._refuse = refuse

    def sources(self, component: str, slot: str, line: Line) -> Mapping[Index, Sources]:
        """Return target index -> source tensors, for one logical tensor in the targets of a mapping rule.

        Several mapping rules of the source may store different parts of a tensor; a part that two rules store is read
        once.
        """
        gathered: dict[Index, ComponentSources] = {}
        # A tied tensor that is not stored is read from the nearest stored tensor to which it is tied.
        for name in (component, *self._tied.get(component, ())):
            if (name, slot) in self._holdings.sources:
                break
        line_sources_list = self._holdings.sources.get((name, slot), ())
        # Layers and experts are dims of one stored tensor, from which all targets are read.
        if len(line_sources_list) == 1 and len(line_sources_list[0].places) == 1:
            (place,) = line_sources_list[0].places.values()
            only = ComponentSources(line_sources_list[0], {frozenset(place.origin.index.items()): place})
            return dict.fromkeys((key for key, _ in self._with_target_index(line_sources_list[0], line)), only)
        if len(line_sources_list) == 1 and (joined := line_sources_list[0].join(line.name.axes)):
            return joined
        for line_sources in line_sources_list:
            for key, place in self._with_target_index(line_sources, line):
                entry = gathered.get(key) or gathered.setdefault(key, ComponentSources(line_sources, {}))
                # Mapping rules complete each other only if they number the same axes in names. If the axes differed, a
                # stack of tensors could overlap with single tensors.
                if entry.line_sources is line_sources or set(entry.line_sources.axes) == set(line_sources.axes):
                    self._agree(entry, place)
                    entry.places.setdefault(frozenset(place.origin.index.items()), place)
        return gathered

    def _with_target_index(self, line_sources: LineSources, line: Line) -> Iterator[tuple[Index, SourceTensor]]:
        """Yield, for each source tensor, the index of every target tensor that reads the source tensor.

        Raises:
            UsageError: with the code UNKNOWN_AXIS if the size of an axis in the target's names is unknown.
        """
        order = [line_sources.axes.index(axis) if axis in line_sources.axes else None for axis in line.name.axes]
        for position, place in line_sources.places.items():
            # All axes in the target's name are also in the source's name, so each source belongs to one target.
            if None not in order:
                yield tuple(position[p] for p in order if p is not None), place
                continue
            ranges = []
            for axis, p in zip(line.name.axes, order, strict=True):
                if p is None and axis not in place.sizes:
                    raise unknown_axis(axis, line.text)
                ranges.append(range(place.sizes[axis]) if p is None else (position[p],))
            yield from ((key, place) for key in product(*ranges))

    def _agree(self, entry: ComponentSources, place: SourceTensor) -> None:
        """Refuse a target tensor if its sources show different sizes for the same axis."""
        # The same dict object means the same mapping rule and shape, so nothing has to be compared. All experts but the
        # first usually have the same dict object.
        if not entry.places or place.sizes is entry.first.sizes:
            return
        origin, expected = place.origin, entry.first
        sized = {axis: count for share in origin.layout.shares[origin.component] for axis, count, _ in share.axes}
        if any(expected.sizes.get(axis) != count for axis, count in sized.items()):
            shapes = (
                f"expected {list(expected.whole.shape)} as in {expected.origin.name}, got {list(place.whole.shape)}"
            )
            message = f"{entry.line_sources.line.text}\n{shapes}"
            self._refuse([Refusal("SHAPE_MISMATCH", message, Where(None, origin.name))])


def common_sources(parts: Mapping[str, Mapping[Index, Sources]], keys: Collection[Index]) -> SourcesByComponent:
    """Return the sources of each logical tensor if all targets of a mapping rule have the same sources; otherwise an
    empty mapping.
    """
    shared = {}
    for component, by_key in parts.items():
        if isinstance(by_key, JoinedSources):
            return {}
        sources = {id(each): each for each in by_key.values()}
        if len(by_key) != len(keys) or len(sources) != 1:
            return {}
        (shared[component],) = sources.values()
    return shared


def all_joined(parts: Mapping[str, Mapping[Index, Sources]], keys: Collection[Index]) -> Mapping[str, JoinedSources]:
    """Return the sources of each logical tensor if all targets of a mapping rule read similar tensors; otherwise an
    empty mapping.
    """
    joined = {component: of_all for component, of_all in parts.items() if isinstance(of_all, JoinedSources)}
    return joined if len(joined) == len(parts) and all(len(each) == len(keys) for each in joined.values()) else {}


def sources_at(parts: Mapping[str, Mapping[Index, Sources]], key: Index) -> SourcesByComponent:
    """Return logical tensor -> source tensors for one target index; logical tensors that are not stored are absent."""
    return {component: sources[key] for component, sources in parts.items() if key in sources}


_MOST_INDICES = 100_000
"""Maximum number of indices of an axis for which a condition is evaluated; a config may claim any size."""

_ONE_FORM = (
    "Cast plain tensors to one type with --dtype (dtype=); decode others with --decode (decode=), or choose a dialect "
    "that stores them apart."
)


class Translation(msgspec.Struct, frozen=True):
    """A checkpoint, translated into another dialect: which tensors to write, to check and to report."""

    targets: Mapping[str, Target]
    """Target tensors by name, in the order of the target dialect's mapping rules."""
    checks: tuple[Check, ...]
    """Equality checks that must succeed before output is committed."""
    kept_names: tuple[str, ...]
    """Names of stored tensors that have no mapping rule in the target dialect and therefore keep their names."""
    ignored: tuple[str, ...]
    """Names of stored tensors that are omitted because they do not belong to the model."""
    aliases: Mapping[str, str]
    """Name of a target tensor -> name of the target tensor to which it is tied."""
    refusals: tuple[Refusal, ...]
    """Errors; if there is at least one, the translation cannot be used."""
    axes: Mapping[str, int]
    """Sizes of the axes whose size is the same in every layer, from the config, the user, names and shapes."""
    notes: tuple[str, ...] = ()
    """Notes on tensors that are written as zeros, or omitted, because zeros mean the same as absence."""


class _Model(NamedTuple):
    """The first target tensor of a mapping rule, as a pattern for the rule's further target tensors."""

    target: Target
    sources: SourcesByComponent
    form: NumberFormat
    """Dtype and encoding that all sources of the target have."""
    joined: Sequence[tuple[str, AlikeTensors, tuple[Arithmetic | None, Arithmetic | None], list[AlikePart]]]
    """For each logical tensor with similar sources: its name, its sources, its arithmetic, and a list of the tensors
    that targets have read.
    """

    def use_parts(self, index: Mapping[str, int]) -> tuple[TargetPart, ...]:
        """Return the parts of the target with this index, and record which stored tensors these parts read."""
        parts = []
        for component, tensors, arithmetic, used_parts in self.joined:
            part = AlikePart(tensors, index)
            used_parts.append(part)
            parts.append(TargetPart(component, part, arithmetic))
        return tuple(parts)


class _Translator:
    """Builds the target tensors of one mapping rule after the other, and collects every error."""

    def __init__(
        self,
        bound: BoundNames,
        stored: Mapping[str, Stored],
        target: Dialect,
        sizes: Sizes,
        recode: Recode,
        state_lines: Collection[Line],
    ) -> None:
        # Optimizer state that keeps its stored name is excluded, because its mapping rules would separate axes that no
        # other rule separates.
        self.bound, self.state_as_stored = _without_state_of(bound, state_lines)
        bound = self.bound
        self.stored = stored
        self.target = target
        self.recode = recode
        self.refusals: dict[tuple[str, ...], Refusal] = {}
        self.lacking: dict[tuple[Line, tuple[str, ...]], list[str]] = defaultdict(list)
        if target is not bound.dialect:
            self.refuse(refuse_beyond(bound, sizes))
        self.checks: list[Check] = []
        alike = grids(bound, stored)
        self.sizes = solve_sizes(bound, stored, sizes, alike)
        self.tied = self.sizes.originals
        if classifies(bound):
            self.tied = {alias: chain for alias, chain in self.tied.items() if alias not in HEAD}
        # Only mapping rules for tensors in the source are used: a table may describe far more tensors than a model has.
        lines = self._target_lines()
        with_state = _with_state(bound)
        self.state_lines = [line for line in state_lines if not with_state.isdisjoint(line.expression.components)]
        self.fused = {component for line in self.state_lines for component in line.expression.components}
        self.lines = (*lines, *self.state_lines)
        written = {name for line in self.lines for name in line.expression.components}
        self.spare = {
            alias: (original, *self.tied.get(original, ()))
            for alias, original in bound.family.copies.items()
            if alias not in written
        }
        tied = {**self.tied, **self.spare}
        # The mapping rules of both dialects are rewritten over common axes (one dialect may merge axes that the other
        # splits), so that their pieces overlap.
        used = dict.fromkeys(line.expression for line, _ in bound.names)
        self.basis = unify(
            [*used, *(line.expression for line in self.lines)], {alias: chain[-1] for alias, chain in tied.items()}
        )
        parties = [*(line for line, _ in bound.names), *self.lines]
        names = {name for alias, chain in tied.items() for name in (alias, *chain)}
        self.whole = inseparable(parties, bound.family.tensors, names, self.basis)
        self.holdings = Holdings(bound, stored, self.sizes, self.basis, self.whole, alike)
        self.gathering = Gathering(self.holdings, self.tied, self.refuse)
        self.conditions = LineConditions(lines, self.holdings)
        self.unplaced = Unplaced(self.holdings, target, self.lines)
        self.added = AddedTensors(self.holdings, target, self.conditions)
        self._layouts: dict[Hashable, Layout] = {}
        self._varying = frozenset(self.sizes.layer_axes)
        self._single: dict[tuple[str, str, frozenset[tuple[str, int]]], str] = {}

    def run(self, *, partial: bool) -> Translation:
        self.refuse([*self.holdings.refusals, *self.holdings.contradictions])
        self.refuse(refuse_contradicted(self.holdings))
        if self.holdings.contradictions:  # further errors would only follow from the contradictory sizes
            self.refuse(() if partial else refuse_incomplete(self.holdings, self.tied))
            return Translation({}, (), (), (), {}, tuple(self.refusals.values()), self.sizes.at({}))
        built: dict[str, Target] = {}
        slots = tuple(dict.fromkeys(slot for _, slot in self.holdings.sources))
        for line in self.lines:
            for slot in slots:
                if not self._is_written(line, slot):
                    continue
                try:
                    self._build(line, slot, built)
                except TransaxleError as error:
                    self.refuse(error.refusals)
        self.refuse(refuse_unfilled(self.lacking))
        notes = self._add_zeros(built)
        if self.target is not self.bound.dialect:
            self.refuse(refuse_ruled_out(self.holdings))
        if not partial:
            self.refuse(refuse_incomplete(self.holdings, self.tied))
        checks, unequal = agreements(self.holdings, self.tied)
        self.checks.extend(checks)
        self.refuse(unequal)
        # Tensors without a mapping rule in the target dialect are copied unchanged, under their own names.
        kept_names = (*self.bound.unknown, *self.unplaced.names(self.checks, clean=not self.refusals))
        self.refuse(self.unplaced.refusals)
        checks, unequal = check_substitutes(self.holdings, self.spare, self.target.label)
        self.checks.extend(checks)
        self.refuse(unequal)
        left_out = dict[str, None]()
        for line, zero in self.added.omissions(frozenset(kept_names), self.stored):
            self.checks.extend(zero)
            left_out.update((check.first.name, None) for check in zero)
            notes.append(
                f"left out, as {self.target.label} has no such tensor and zeros are the same as none: {line.name.text}"
            )
        as_stored = {name: self._without_prefix(name) for name in self.state_as_stored}
        for stored_name in (*kept_names, *as_stored):
            if stored_name in left_out:
                continue
            tensor = self.stored[stored_name]
            name = as_stored.get(stored_name) or self.bound.own.get(stored_name, stored_name)
            if name in built:
                message = f"a tensor without a line in {self.target.label} has a name that this dialect writes"
                self.refuse([Refusal("NAME_COLLISION", message, Where(None, stored_name))])
            form = self.recode(name, NumberFormat(tensor.dtype, self.bound.encodings.get(stored_name, PLAIN)))
            target = identity_target(stored_name, tensor)
            built[name] = replace(target, name=name, dtype=form.dtype, encoding=form.encoding)
        kept = tuple([self.bound.own.get(name, name) for name in kept_names if name not in left_out])
        refusals = tuple(self.refusals.values())
        ignored, sizes = (*self.bound.ignored, *self.unplaced.empty, *left_out), self.sizes.at({})
        return Translation(built, tuple(self.checks), kept, ignored, self._aliases(), refusals, sizes, tuple(notes))

    def _add_zeros(self, built: dict[str, Target]) -> list[str]:
        """Add the target tensors that are written as zeros; return one note for each mapping rule."""
        try:
            zeros = list(self.added.zeros())
        except TransaxleError as error:
            self.refuse(error.refusals)
            return []
        built.update({target.name: target for target in zeros})
        return [
            f"written as zeros, which are the same as none: {rule}"
            for rule in dict.fromkeys(target.rule for target in zeros)
        ]

    def refuse(self, refusals: Iterable[Refusal], tensor: str | None = None) -> None:
        """Add errors, omitting duplicates."""
        for refusal in refusals:
            where = Where(refusal.where.file, refusal.where.tensor or tensor)
            # An axis of unknown size is reported once, not for every tensor of every layer.
            place = "" if refusal.code == "UNKNOWN_AXIS" else str(where)
            key = refusal.code, refusal.message, place
            self.refusals.setdefault(key, Refusal(refusal.code, refusal.message, where, refusal.hint))

    def _target_lines(self) -> tuple[Line, ...]:
        """Return the target's mapping rules for logical tensors in the source; `_build` checks conditions on
        indices.
        """
        present = {name for line, _ in self.bound.names for name in line.expression.components}
        present |= {alias for alias, chain in self.tied.items() if not present.isdisjoint(chain)}
        written = [line for line in self.target.lines if not line.read_only]
        lines = [line for line in written if present.intersection(line.expression.components)]
        return tuple(line for line in lines if line.name.axes or self.sizes.holds(line.when, {}) is not False)

    def _is_written(self, line: Line, slot: str) -> bool:
        """Return whether a mapping rule writes a slot. Optimizer states of a fused parameter are written for the fused
        parameter only, and not again for its components.
        """
        if slot == WEIGHT:
            return not line.of_state
        return line.of_state or self.fused.isdisjoint(line.expression.components)

    def _without_prefix(self, name: str) -> str:
        parameter, slot = split_slot(self.bound.own.get(name, name))
        return join_slot(parameter.removeprefix(self.bound.prefix), slot)

    def _build(self, line: Line, slot: str, built: dict[str, Target]) -> None:
        """Build the target tensors of one mapping rule and slot.

        Raises:
            UsageError: with the code UNKNOWN_AXIS if the size of an axis in the targets' names is unknown.
        """
        parts = {component: self.gathering.sources(component, slot, line) for component in line.expression.components}
        keys = dict.fromkeys(key for by_component in parts.values() for key in by_component)
        if not keys:
            return
        rewritten = self.basis.rewrite(line.expression)
        # A condition that is still unknown (None) counts as possible. The encoding of the tensor, determined further
        # below, decides.
        is_certain = line.when is None or line.of_state
        possible_keys = keys if is_certain else [key for key in keys if self._is_possible(line, key)]
        if self.added.concern(line):
            possible_keys = [key for key in possible_keys if self.added.have_place(line, self._index(line, key))]
        model: _Model | None = None
        alike = self._are_alike(line)
        shared, joined = common_sources(parts, keys), all_joined(parts, keys) if alike else {}
        index_at = indices(line.name.axes)
        for key, name in self._names(line, slot, possible_keys):
            index = index_at(key)
            if model and name not in built and self.recode(name, model.form) == model.target.form:
                if joined:
                    built[name] = model.target.at(name, index, model.use_parts(index))
                    continue
                if shared or model.sources == sources_at(parts, key):  # such as one stored tensor with all layers
                    built[name] = model.target.at(name, index, model.target.parts)
                    continue
            by_component = shared or sources_at(parts, key)
            form = self._build_one(line, slot, rewritten, name, index, by_component, parts, built)
            if alike and form and not any(each.line_sources.scalar for each in by_component.values()):
                alike_sources = [
                    (
                        component,
                        sources.alike,
                        _arithmetic(line, sources.line_sources),
                        self.unplaced.parts_taken(line, sources.line_sources),
                    )
                    for component, sources in joined.items()
                ]
                model = _Model(built[name], by_component, form, alike_sources)

    def _build_one(
        self,
        line: Line,
        slot: str,
        rewritten: Expression,
        name: str,
        index: Mapping[str, int],
        by_component: SourcesByComponent,
        components: Collection[str],
        built: dict[str, Target],
    ) -> NumberFormat | None:
        """Build one target tensor. Return the dtype and encoding of its sources if the target was built and all sources
        have the same.
        """
        stored_forms = {form for sources in by_component.values() for form in sources.forms}
        forms = self._forms(name, stored_forms)
        encoding = forms[0].encoding if len(forms) == 1 else None
        if line.by_form and self.conditions.holds(line, index, encoding) is False:
            return None
        if not line.of_state:
            self.refuse(self.conditions.rivals(line, index, encoding))
        missing = [component for component in components if component not in by_component]
        if missing:
            # A source is missing here because an error was recorded for it before, so no second error is added.
            if self.holdings.broken.isdisjoint((component, slot) for component in missing):
                self.lacking[line, tuple(missing)].append(name)
            return None
        if name in built:
            message = f"{line.text}\nwrites the same name as {built[name].rule}"
            self.refuse([Refusal("NAME_COLLISION", message, Where(None, name))])
            return None
        try:
            built[name] = self._target(line, rewritten, name, index, by_component, forms)
        except TransaxleError as error:
            self.refuse(error.refusals, name)
        self.unplaced.use(line, by_component)
        if len(by_component) == 1:
            self._single[line.expression.components[0], slot, frozenset(index.items())] = name
        return stored_forms.pop() if name in built and len(stored_forms) == 1 else None

    def _are_alike(self, line: Line) -> bool:
        """Return whether all targets of a mapping rule that are read by the same mapping rules of the source differ
        only in name and index.
        """
        return line.when is None and not self.tied and self._varying.isdisjoint(line.name.axes)

    def _is_possible(self, line: Line, key: Index) -> bool:
        index = self._index(line, key)
        return self._holds_throughout(line, index) and self.conditions.holds(line, index) is not False

    def _holds_throughout(self, line: Line, index: Mapping[str, int]) -> bool:
        """Return whether a mapping rule's condition is true for all layers that are stacked in the rule's tensor.

        Raises:
            Refused: with the code UNSUPPORTED if the condition is true for only some of the stacked layers.
        """
        along = [] if line.when is None else sorted(line.expression.axes & self._axes_of_condition(line.when))
        sizes = self.sizes.at(index)
        if not along or not sizes.keys() >= set(along):
            return True
        positions = islice(product(*(range(sizes[axis]) for axis in along)), _MOST_INDICES)
        outcomes = {self.holdings.holds(line.when, {**index, **dict(zip(along, at, strict=True))}) for at in positions}
        if {True, False} <= outcomes:
            axis = ", ".join(along)
            message = f"{line.text}\nis one tensor for all of {axis}, but holds for some of them only"
            hint = f"Choose another dialect: in {self.target.label}, tensors along {axis} are all of one kind."
            raise refuse("UNSUPPORTED", message, hint=hint)
        return outcomes != {False}

    def _axes_of_condition(self, condition: Formula) -> frozenset[str]:
        """Return the axes in names on whose index a condition depends, directly or through a tensor that it names."""
        family = self.bound.family
        tensors = (family.tensors[name].axes for name in condition.names & family.tensors.keys())
        return family.name_axes & condition.names.union(*tensors)

    def _index(self, line: Line, key: Index) -> dict[str, int]:
        return line.name.index_at(key)

    def _names(self, line: Line, slot: str, keys: Collection[Index]) -> Iterator[tuple[Index, str]]:
        """Yield each index with the name of its target tensor; axis sizes are needed only if there is at least one
        index.

        Raises:
            UsageError: with the code UNKNOWN_AXIS if a number in the name depends on an axis of unknown size.
            Refused: with the code SHAPE_MISMATCH if an index is beyond the range that the name pattern allows.
        """
        if not keys:
            return
        numbering, names = line.name.numbering(self.sizes.at({})), map(line.name.format, keys)
        if not numbering.is_index:
            names = map(line.name.format, self._numbers(line, numbering, keys))
        yield from zip(keys, names if slot == WEIGHT else (join_slot(name, slot) for name in names), strict=True)

    def _numbers(self, line: Line, numbering: Numbering, keys: Iterable[Index]) -> Iterator[tuple[int, ...]]:
        """Yield the numbers in the name of each target tensor of a mapping rule.

        Raises:
            Refused: with the code SHAPE_MISMATCH if an index is beyond the range that the name pattern allows.
        """
        for key in keys:
            numbers = tuple([-1 if number is None else number for number in numbering.numbers(key)])
            if min(numbers) < 0:
                at = ", ".join(f"{axis}={i}" for axis, i in self._index(line, key).items())
                raise refuse("SHAPE_MISMATCH", f"{line.text}\nthe name would get the number {min(numbers)} for {at}")
            yield numbers

    def _forms(self, name: str, stored: Collection[NumberFormat]) -> list[NumberFormat]:
        """Return the distinct dtypes and encodings in which the parts of a target would be written. If there are
        several, the parts cannot form one tensor.
        """
        return [self.recode(name, *stored)] if len(stored) == 1 else sorted({self.recode(name, f) for f in stored})

    def _target(
        self,
        line: Line,
        rewritten: Expression,
        name: str,
        index: Mapping[str, int],
        by_component: SourcesByComponent,
        forms: Sequence[NumberFormat],
    ) -> Target:
        if len(forms) > 1:
            kinds = " and ".join(" ".join(word for word in form if word) for form in forms)
            raise refuse("DTYPE_MIXED", f"{line.text}\nits parts are stored as {kinds}", hint=_ONE_FORM)
        scalar = {sources.line_sources.scalar for sources in by_component.values()}
        if scalar == {True}:
            self._refuse_some(line, index, by_component)
            return self._scalar(line, name, by_component, forms[0].dtype)
        if True in scalar:
            message = f"{line.text}\nsome of its parts have one number per tensor, others one per element"
            raise refuse("SHAPE_MISMATCH", message)
        layout = self._layout(line, rewritten, index, by_component)
        parts = _parts(line, by_component)
        return Target(name, forms[0].dtype, layout, index, parts, line.text, ", ".join(by_component), forms[0].encoding)

    def _refuse_some(self, line: Line, index: Mapping[str, int], by_component: SourcesByComponent) -> None:
        """Refuse a state of one number (an optimizer's step) that only some of a target's sources have; the target
        would apply it to all.

        Raises:
            Refused: with the code INCOMPLETE if some sources of the tensor lack the state.
        """
        for component, sources in by_component.items():
            weights = self.holdings.sources.get((component, WEIGHT), ())
            required = sum(
                line_sources.count(index)
                for line_sources in weights
                if set(line_sources.axes) == set(sources.line_sources.axes)
            )
            if len(sources.places) < required:
                message = (
                    f"{line.text}\njoins {required} tensors of {component}, but only {len(sources.places)} of them "
                    "have this state"
                )
                raise refuse("INCOMPLETE", message)

    def _scalar(self, line: Line, name: str, by_component: SourcesByComponent, dtype: str) -> Target:
        """Build a target that is a single number (a step) for the whole tensor; checks verify that all sources have the
        same number.
        """
        origins = {
            place.origin.name: place.origin for sources in by_component.values() for place in sources.places.values()
        }
        first_target, *other_targets = (_single_source(origin, name, dtype, line.text) for origin in origins.values())
        why = f"{line.text}\none number would have to stand for all of them"
        self.checks.extend(Check(first_target, other_target, why) for other_target in other_targets)
        return replace(first_target, component=", ".join(by_component))

    def _layout(
        self, line: Line, rewritten: Expression, index: Mapping[str, int], by_component: SourcesByComponent
    ) -> Layout:
        """Return the target's layout. Axis sizes are those of the sources, which must be equal; padding of unknown size
        gets the size 0.
        """
        # Targets with equal keys have equal layouts, which are computed once per kind of layer so that planning takes
        # linear time.
        alike = (
            id(line),
            tuple([index.get(axis) for axis in self._varying]),
            tuple(
                (component, id(sources.line_sources), id(sources.first.sizes), id(sources.first.origin.layout))
                for component, sources in by_component.items()
            ),
        )
        if alike not in self._layouts:
            self._layouts[alike] = self._fill(line, rewritten, index, by_component)
        return self._layouts[alike]

    def _fill(
        self, line: Line, rewritten: Expression, index: Mapping[str, int], by_component: SourcesByComponent
    ) -> Layout:
        sizes = self.sizes.at(index)
        owner: dict[str, str] = {}
        for component, sources in by_component.items():
            for axis, count in sources.sizes.items():
                # `sizes` contains the sizes of earlier logical tensors; later logical tensors must have the same sizes.
                if owner.setdefault(axis, component) != component and sizes[axis] != count:
                    message = f"axis {axis} is {sizes[axis]} in {owner[axis]} and {count} in {component}"
                    raise refuse("SHAPE_MISMATCH", f"{line.text}\n{message}")
                sizes[axis] = count
        if NOTHING in sizes:  # the dim is never separated, so the rule is used unchanged
            rewritten = self.whole[line.expression]
        for axis in rewritten.padding:
            sizes.setdefault(axis, 0)
        sizes = with_products(sizes, rewritten)
        axes = sorted(rewritten.axes)
        for axis in axes:
            if axis not in sizes:
                raise unknown_axis(axis, line.text)
        key = id(line), tuple(sizes[axis] for axis in axes)
        if key not in self._layouts:
            self._layouts[key] = rewritten.layout(sizes)
        return self._layouts[key]

    def _aliases(self) -> dict[str, str]:
        """Return target name -> name of the target to which the tensor is tied."""
        aliases: dict[str, str] = {}
        for (component, slot, index), name in self._single.items():
            written = [
                self._single[original, slot, index]
                for original in self.tied.get(component, ())
                if (original, slot, index) in self._single
            ]
            if written:
                aliases[name] = written[-1]
        return aliases


def _with_state(bound: BoundNames) -> set[str]:
    """Return the names of the logical tensors that have optimizer state."""
    return {name for line, slot in bound.names if slot != WEIGHT for name in line.expression.components}


def _state_lines(
    bound: BoundNames, target: Dialect, sizes: Sizes, trained: Collection[str] | None, *, split_by_format: bool
) -> list[Line]:
    """Return the mapping rules of fused parameters (such as qkv) whose optimizer state is fused too; see
    `translate`.
    """
    lines, stored = list[Line](), _with_state(bound)
    for line in target.lines:
        if not line.of_state or stored.isdisjoint(line.expression.components):
            continue
        if trained is not None:
            is_fused = any(line.name.match(name) is not None for name in trained)
        else:
            holds = sizes.holds(line.when, {})
            undecided = target is not bound.dialect or split_by_format
            is_fused = undecided or any(each is line and slot for each, slot in bound.names) if holds is None else holds
        if is_fused:
            lines.append(line)
    return lines


def _without_state_of(bound: BoundNames, lines: Collection[Line]) -> tuple[BoundNames, tuple[str, ...]]:
    """Remove optimizer states whose names belong to the given mapping rules, unless other parameters have the same kind
    of state.

    Returns:
        The remaining matched names, and the removed names.
    """
    of_others: defaultdict[str, set[str]] = defaultdict(set)
    for line, slot in bound.names:
        if line not in lines:
            of_others[slot].update(line.expression.components)
    keys = {
        (line, slot)
        for line, slot in bound.names
        if line in lines and slot != WEIGHT and of_others[slot].isdisjoint(line.expression.components)
    }
    if not keys:
        return bound, ()
    names = {key: of_line for key, of_line in bound.names.items() if key not in keys}
    removed = tuple(name for key, of_line in bound.names.items() if key in keys for name in of_line.values())
    return msgspec.structs.replace(bound, names=names), removed


def _parts(line: Line, by_component: SourcesByComponent) -> tuple[TargetPart, ...]:
    """Return the parts of a target, one for each logical tensor in the target, with the sources of each part."""
    parts = [
        TargetPart(component, sources.origins, _arithmetic(line, sources.line_sources))
        for component, sources in by_component.items()
    ]
    return tuple(parts)


def _arithmetic(line: Line, of: LineSources) -> tuple[Arithmetic | None, Arithmetic | None]:
    pair = of.line.lossy, line.lossy
    return EXACT if pair == EXACT else pair


def _single_source(origin: Origin, name: str, dtype: str, rule: str) -> Target:
    """Return a target that is read from a single stored tensor, even if the target's name represents several
    tensors.
    """
    part = TargetPart(origin.component, (msgspec.structs.replace(origin, index={}),))
    return Target(name, dtype, origin.layout, {}, (part,), rule)


def translate(
    bound: BoundNames,
    stored: Mapping[str, Stored],
    target: Dialect,
    sizes: Sizes,
    recode: Recode = same,
    *,
    partial: bool = False,
    trained: Collection[str] | None = None,
    split_by_format: bool = False,
) -> Translation:
    """Translate a checkpoint, whose names were matched with its dialect, into another dialect.

    Args:
        bound: the checkpoint's names, matched with the mapping rules of the checkpoint's dialect.
        stored: stored name -> tensor, for all tensors of the checkpoint.
        target: the dialect to translate into.
        sizes: axis sizes from the config and the user.
        recode: function that returns the dtype and encoding in which a tensor is written; the default keeps the
            source's.
        partial: whether tensors of the model may be missing, because the source is intentionally only a part of the
            model.
        trained: names of parameters with optimizer state in the target. None means that the config determines whether
            these parameters are fused; without a config value, a source of the same dialect determines it; otherwise
            they are fused.
        split_by_format: whether the source's format never contains optimizer states of fused parameters.

    Returns:
        The target tensors with their sources. If `refusals` is not empty, nothing may be written.
    """
    bound = with_kept(bound, target, sizes, stored)
    state_lines = _state_lines(bound, target, sizes, trained, split_by_format=split_by_format)
    return _Translator(bound, stored, target, sizes, recode, state_lines).run(partial=partial)


def absent_tensors(bound: BoundNames, stored: Mapping[str, Stored], sizes: Sizes) -> list[AbsentTensor]:
    """Return the tensors that a model must have and a checkpoint lacks; arguments as those of `translate`.

    The result is empty if the tensors contradict the sizes of the model, or if too many are absent to count them.

    Raises:
        TransaxleError: the errors that `solve_sizes` raises.
    """
    bound = with_kept(bound, bound.dialect, sizes, stored)
    translator = _Translator(bound, stored, bound.dialect, sizes, same, ())
    holdings = translator.holdings
    if holdings.contradictions or holdings.broken:
        return []
    return find_absent(holdings, translator.tied) or []
