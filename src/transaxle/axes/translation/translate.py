"""Translation: a bound checkpoint in another dialect, target tensor by target tensor, with everything that stands
against it.

Each target line asks for its logical tensors; the source's lines that hold them are gathered by the indices in the
target's name. What the target has no line for keeps its name. Nothing is read but names and shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from transaxle.axes.layout.bind import WEIGHT, Bound, Index, join_slot
from transaxle.axes.layout.inseparable import NOTHING, inseparable
from transaxle.axes.layout.relayout import Check, Origin, Stored, Target, TargetPart, unchanged
from transaxle.axes.layout.solve import unknown_axis, with_products
from transaxle.axes.layout.unify import unify
from transaxle.axes.notation.expression import Expression, Layout
from transaxle.axes.notation.family import Dialect, Line, Sizes
from transaxle.axes.notation.formula import Formula
from transaxle.axes.notation.name import Numbering
from transaxle.axes.notation.number_format import PLAIN, NumberFormat, Recode, same
from transaxle.axes.translation.agree import agreements
from transaxle.axes.translation.alike_tensors import SourceTensor, grids
from transaxle.axes.translation.complete import incomplete, unfilled
from transaxle.axes.translation.holdings import AlikeSources, ComponentSources, Holdings, LineSources, Sources, solved
from transaxle.axes.translation.undecided_lines import LineConditions
from transaxle.axes.translation.unplaced import Unplaced
from transaxle.errors import Refusal, TransaxleError, Where, refuse

_MOST_INDICES = 100_000
"""Cap on the indices of an axis for which a condition is asked: a config may claim any size."""


@dataclass(frozen=True)
class Translation:
    """A checkpoint in another dialect."""

    targets: Mapping[str, Target]
    """Its tensors, in table order."""
    checks: tuple[Check, ...]
    """Copies that must prove equal before anything is committed."""
    kept: tuple[str, ...]
    """Stored tensors that the target dialect has no line for; they keep their names."""
    ignored: tuple[str, ...]
    """Stored tensors that are left out because they hold nothing of the model."""
    aliases: Mapping[str, str]
    """Target name -> target name of the tensor it is tied to."""
    refusals: tuple[Refusal, ...]
    """Everything that makes the translation impossible."""
    axes: Mapping[str, int]
    """Axis sizes that are the same in every layer: given ones, and those that names and shapes imply."""


_SourcesByComponent = Mapping[str, Sources]
"""Component -> its sources."""


class _Translator:
    """Builds the target's tensors line by line, and collects every refusal."""

    def __init__(
        self, bound: Bound, stored: Mapping[str, Stored], target: Dialect, sizes: Sizes, recode: Recode
    ) -> None:
        self.bound = bound
        self.stored = stored
        self.target = target
        self.recode = recode
        self.refusals: dict[tuple[str, ...], Refusal] = {}
        self.lacking: dict[tuple[Line, tuple[str, ...]], list[str]] = defaultdict(list)
        self.checks: list[Check] = []
        alike = grids(bound, stored)
        self.sizes = solved(bound, stored, sizes, alike)
        self.tied = self.sizes.originals
        # Only lines of tensors that the source has: a table may describe far more than one model uses.
        self.lines = self._target_lines()
        # Both dialects are rewritten over common axes (one may merge what the other splits), so that their pieces can
        # meet.
        used = dict.fromkeys(line.expression for line, _ in bound.names)
        self.basis = unify(
            [*used, *(line.expression for line in self.lines)], {alias: chain[-1] for alias, chain in self.tied.items()}
        )
        parties = [*(line for line, _ in bound.names), *self.lines]
        tied = {name for alias, chain in self.tied.items() for name in (alias, *chain)}
        self.whole = inseparable(parties, bound.family.tensors, tied, self.basis)
        self.holdings = Holdings(bound, stored, self.sizes, self.basis, self.whole, alike)
        self.conditions = LineConditions(self.lines, self.holdings)
        self.unplaced = Unplaced(self.holdings, target, self.lines)
        self._layouts: dict[Hashable, Layout] = {}
        self._varying = frozenset(self.sizes.varying)
        self._single: dict[tuple[str, str, frozenset[tuple[str, int]]], str] = {}

    def run(self, *, partial: bool) -> Translation:
        self.refuse(self.holdings.refusals)
        built: dict[str, Target] = {}
        for line in self.lines:
            for slot in dict.fromkeys(slot for _, slot in self.holdings.sources):
                try:
                    self._build(line, slot, built)
                except TransaxleError as error:
                    self.refuse(error.refusals)
        self.refuse(unfilled(self.lacking))
        if not partial:
            self.refuse(incomplete(self.holdings, self.tied))
        checks, unequal = agreements(self.holdings, self.tied)
        self.checks.extend(checks)
        self.refuse(unequal)
        # What the target dialect has no line for is passed on unchanged, under its own name.
        kept_names = (*self.bound.unknown, *self.unplaced.names(self.checks, clean=not self.refusals))
        self.refuse(self.unplaced.refusals)
        for name in kept_names:
            if name in built:
                message = f"a tensor without a line in {self.target.label} has a name that this dialect writes"
                self.refuse([Refusal("NAME_COLLISION", message, Where(None, name))])
            form = self.recode(name, NumberFormat(self.stored[name].dtype, self.bound.encodings.get(name, PLAIN)))
            built[name] = replace(unchanged(name, self.stored[name]), dtype=form.dtype, encoding=form.encoding)
        refusals = tuple(self.refusals.values())
        ignored, sizes = (*self.bound.ignored, *self.unplaced.empty), self.sizes.at({})
        return Translation(built, tuple(self.checks), kept_names, ignored, self._aliases(), refusals, sizes)

    def refuse(self, refusals: Iterable[Refusal], tensor: str | None = None) -> None:
        """Keep refusals, each once: an axis that is unknown is unknown in every layer."""
        for refusal in refusals:
            where = Where(refusal.where.file, refusal.where.tensor or tensor)
            # One unknown axis fails in every tensor of every layer; said once, it is readable.
            place = "" if refusal.code == "UNKNOWN_AXIS" else str(where)
            key = refusal.code, refusal.message, place
            self.refusals.setdefault(key, Refusal(refusal.code, refusal.message, where, refusal.hint))

    def _target_lines(self) -> tuple[Line, ...]:
        """Return the target's lines for what the source holds; conditions on the index are left to `_build`."""
        present = {name for line, _ in self.bound.names for name in line.expression.components}
        present |= {alias for alias, chain in self.tied.items() if not present.isdisjoint(chain)}
        written = [line for line in self.target.lines if not line.read_only]
        lines = [line for line in written if present.intersection(line.expression.components)]
        return tuple(line for line in lines if line.name.axes or self.sizes.holds(line.when, {}) is not False)

    def _build(self, line: Line, slot: str, built: dict[str, Target]) -> None:
        """Build the target tensors of one line and slot.

        Raises:
            UsageError: UNKNOWN_AXIS where an axis is needed to name them.
        """
        parts = {component: self._gather(component, slot, line) for component in line.expression.components}
        keys = dict.fromkeys(key for by_component in parts.values() for key in by_component)
        if not keys:
            return
        rewritten = self.basis.rewrite(line.expression)
        # None (not known yet) counts as possible: the encoding of the tensor, known below, decides then.
        possible_keys = keys if line.when is None else [key for key in keys if self._is_possible(line, key)]
        model: tuple[Target, _SourcesByComponent, NumberFormat] | None = None
        model_form: NumberFormat | None = None
        alike = self._are_alike(line)
        shared, are_stamped = _shared(parts, keys), alike and _divide_alike_tensors(parts, keys)
        axes, is_recoded = line.name.axes, self.recode is not same
        for key, name in self._names(line, slot, possible_keys):
            index = dict(zip(axes, key, strict=True))
            by_component = shared or {part: sources[key] for part, sources in parts.items() if key in sources}
            if (
                model
                and (are_stamped or model[1] is by_component or model[1] == by_component)
                and name not in built
                and (not is_recoded or self.recode(name, model[2]) == model_form)
            ):
                if are_stamped:
                    built[name] = model[0].at(name, index, _parts(line, by_component))
                    self.unplaced.use(line, by_component)
                else:  # as with layers and experts that are dims of one tensor
                    built[name] = model[0].at(name, index, model[0].parts)
                continue
            stored_forms = {form for sources in by_component.values() for form in sources.forms}
            forms = self._forms(name, stored_forms)
            encoding = forms[0].encoding if len(forms) == 1 else None
            if line.by_form and self.conditions.holds(line, index, encoding) is False:
                continue
            self.refuse(self.conditions.rivals(line, index, encoding))
            missing = [component for component in parts if component not in by_component]
            if missing:
                # Where a source was refused already, its absence here is only a consequence.
                if self.holdings.broken.isdisjoint((component, slot) for component in missing):
                    self.lacking[line, tuple(missing)].append(name)
                continue
            if name in built:
                message = f"{line.text}\nwrites the same name as {built[name].rule}"
                self.refuse([Refusal("NAME_COLLISION", message, Where(None, name))])
                continue
            try:
                built[name] = self._target(line, rewritten, name, index, by_component, forms)
            except TransaxleError as error:
                self.refuse(error.refusals, name)
            self.unplaced.use(line, by_component)
            if alike and name in built and not any(each.line_sources.scalar for each in by_component.values()):
                model = (built[name], by_component, stored_forms.pop()) if len(stored_forms) == 1 else None
                model_form = built[name].form
            if len(by_component) == 1:
                self._single[line.expression.components[0], slot, frozenset(index.items())] = name

    def _are_alike(self, line: Line) -> bool:
        """Tell whether targets of a line that have the same sources differ in name and index alone."""
        return line.when is None and not self.tied and self._varying.isdisjoint(line.name.axes)

    def _is_possible(self, line: Line, key: Index) -> bool:
        index = self._index(line, key)
        return self._holds_throughout(line, index) and self.conditions.holds(line, index) is not False

    def _holds_throughout(self, line: Line, index: Mapping[str, int]) -> bool:
        """Tell whether the condition of a line holds along its dims: all layers in one tensor are of one kind.

        Raises:
            Refused: UNSUPPORTED where it holds for some indices of an axis only.
        """
        along = [] if line.when is None else sorted(line.expression.axes & self._asked_by(line.when))
        known = self.sizes.at(index)
        if not along or not known.keys() >= set(along):
            return True
        positions = islice(product(*(range(known[axis]) for axis in along)), _MOST_INDICES)
        found = {self.holdings.holds(line.when, {**index, **dict(zip(along, at, strict=True))}) for at in positions}
        if {True, False} <= found:
            axis = ", ".join(along)
            message = f"{line.text}\nis one tensor for all of {axis}, but holds for some of them only"
            hint = f"Choose another dialect: in {self.target.label}, tensors along {axis} are all of one kind."
            raise refuse("UNSUPPORTED", message, hint=hint)
        return found != {False}

    def _asked_by(self, condition: Formula) -> frozenset[str]:
        """Return the axes in names on whose index a condition depends, itself or through a tensor that it names."""
        family = self.bound.family
        tensors = (family.tensors[name].axes for name in condition.names & family.tensors.keys())
        return family.name_axes & condition.names.union(*tensors)

    def _index(self, line: Line, key: Index) -> dict[str, int]:
        return dict(zip(line.name.axes, key, strict=True))

    def _names(self, line: Line, slot: str, keys: Iterable[Index]) -> Iterator[tuple[Index, str]]:
        """Yield each index with the name of its target tensor; sizes are asked for only where there is one.

        Raises:
            UsageError: UNKNOWN_AXIS where a number depends on the size of an axis that is not known.
            Refused: SHAPE_MISMATCH for an index that has no number.
        """
        numbering: Numbering | None = None
        named, bare = line.name.format, join_slot("", slot) == ""
        for key in keys:
            if numbering is None:
                numbering = line.name.numbering(self.sizes.at({}))
            if numbering.is_index:
                numbers = key
            else:
                numbers = tuple([-1 if number is None else number for number in numbering.numbers(key)])
            if not numbering.is_index and min(numbers) < 0:
                at = ", ".join(f"{axis}={i}" for axis, i in self._index(line, key).items())
                raise refuse("SHAPE_MISMATCH", f"{line.text}\nthe name would get the number {min(numbers)} for {at}")
            yield key, named(numbers) if bare else join_slot(named(numbers), slot)

    def _forms(self, name: str, stored: Collection[NumberFormat]) -> list[NumberFormat]:
        """Return the forms in which the parts of a target tensor would be written; one, unless they do not fit."""
        return [self.recode(name, *stored)] if len(stored) == 1 else sorted({self.recode(name, f) for f in stored})

    def _gather(self, component: str, slot: str, line: Line) -> Mapping[Index, Sources]:
        """Collect the sources of one component of a target line, by the target's index.

        Where several lines of the source hold it, they complete each other; a tensor that two lines hold is taken once.
        """
        gathered: dict[Index, ComponentSources] = {}
        # A tied tensor that is not stored is read from the first that is, of those that it is tied to.
        for name in (component, *self.tied.get(component, ())):
            if (name, slot) in self.holdings.sources:
                break
        held = self.holdings.sources.get((name, slot), ())
        if len(held) == 1 and len(held[0].places) == 1:  # layers and experts are dims of it: all have the same source
            (place,) = held[0].places.values()
            only = ComponentSources(held[0], {frozenset(place.origin.index.items()): place})
            return {key: only for key, _ in self._keyed(held[0], line)}
        if len(held) == 1 and (joined := held[0].joined(line.name.axes)):
            return joined
        for line_sources in held:
            for key, place in self._keyed(line_sources, line):
                entry = gathered.get(key) or gathered.setdefault(key, ComponentSources(line_sources, {}))
                # Lines complete each other only if they number the same axes in names: a stack and single tensors would
                # overlap.
                if entry.line_sources is line_sources or set(entry.line_sources.axes) == set(line_sources.axes):
                    self._agree(entry, place)
                    entry.places.setdefault(frozenset(place.origin.index.items()), place)
        return gathered

    def _keyed(self, line_sources: LineSources, line: Line) -> Iterator[tuple[Index, SourceTensor]]:
        """Yield each source with the index of every target tensor that it contributes to.

        Raises:
            UsageError: UNKNOWN_AXIS where an axis is in the target's names, and its size is unknown.
        """
        order = [line_sources.axes.index(axis) if axis in line_sources.axes else None for axis in line.name.axes]
        for position, place in line_sources.places.items():
            # All axes of the target's names are in the source's names too: each source belongs to one target.
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
        """Refuse stored tensors of different sizes for one target tensor."""
        # The same dict object means the same line and shape, so there is nothing to compare: the usual case, for every
        # expert but the first.
        if not entry.places or place.sizes is entry.first.sizes:
            return
        origin, expected = place.origin, entry.first
        sized = {axis: count for share in origin.layout.shares[origin.component] for axis, count, _ in share.axes}
        if any(expected.sizes.get(axis) != count for axis, count in sized.items()):
            shapes = (
                f"expected {list(expected.whole.shape)} as in {expected.origin.name}, got {list(place.whole.shape)}"
            )
            message = f"{entry.line_sources.line.text}\n{shapes}"
            self.refuse([Refusal("SHAPE_MISMATCH", message, Where(None, origin.name))])

    def _target(
        self,
        line: Line,
        rewritten: Expression,
        name: str,
        index: Mapping[str, int],
        by_component: _SourcesByComponent,
        forms: Sequence[NumberFormat],
    ) -> Target:
        if len(forms) > 1:
            kinds = " and ".join(" ".join(word for word in form if word) for form in forms)
            raise refuse("DTYPE_MIXED", f"{line.text}\nits parts are stored as {kinds}")
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

    def _refuse_some(self, line: Line, index: Mapping[str, int], by_component: _SourcesByComponent) -> None:
        """Refuse a scalar state (a step) for a tensor where only some sources have one: the others would inherit it.

        Raises:
            Refused: INCOMPLETE.
        """
        for component, sources in by_component.items():
            weights = self.holdings.sources.get((component, WEIGHT), ())
            wanted = sum(
                line_sources.count(index)
                for line_sources in weights
                if set(line_sources.axes) == set(sources.line_sources.axes)
            )
            if len(sources.places) < wanted:
                message = (
                    f"{line.text}\njoins {wanted} tensors of {component}, but only {len(sources.places)} of them "
                    "have this state"
                )
                raise refuse("INCOMPLETE", message)

    def _scalar(self, line: Line, name: str, by_component: _SourcesByComponent, dtype: str) -> Target:
        """One number for the whole target tensor: all sources must agree, which the checks prove."""
        origins = {
            place.origin.name: place.origin for sources in by_component.values() for place in sources.places.values()
        }
        first_target, *other_targets = (_single_source(origin, name, dtype, line.text) for origin in origins.values())
        why = f"{line.text}\none number would have to stand for all of them"
        self.checks.extend(Check(first_target, other_target, why) for other_target in other_targets)
        return replace(first_target, component=", ".join(by_component))

    def _layout(
        self, line: Line, rewritten: Expression, index: Mapping[str, int], by_component: _SourcesByComponent
    ) -> Layout:
        """Return the target's layout: sizes come from its sources, which must agree; unsized padding is empty."""
        # Equal keys give equal layouts; computing them once per kind of layer keeps planning linear.
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
        self, line: Line, rewritten: Expression, index: Mapping[str, int], by_component: _SourcesByComponent
    ) -> Layout:
        sizes = self.sizes.at(index)
        owner: dict[str, str] = {}
        for component, sources in by_component.items():
            for axis, count in sources.sizes.items():
                # Sizes of earlier components are already in `sizes`; a later one must agree with them.
                if owner.setdefault(axis, component) != component and sizes[axis] != count:
                    message = f"axis {axis} is {sizes[axis]} in {owner[axis]} and {count} in {component}"
                    raise refuse("SHAPE_MISMATCH", f"{line.text}\n{message}")
                sizes[axis] = count
        if NOTHING in sizes:  # the sources stand for a sum that is moved whole
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
        """Return the target names that are one tensor by a tie."""
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


def _shared(parts: Mapping[str, Mapping[Index, Sources]], keys: Collection[Index]) -> _SourcesByComponent:
    """Return the sources of each component, if all targets of a line have the same; nothing otherwise."""
    shared = {}
    for component, by_key in parts.items():
        sources = {id(each): each for each in by_key.values()}
        if len(by_key) != len(keys) or len(sources) != 1:
            return {}
        (shared[component],) = sources.values()
    return shared


def _divide_alike_tensors(parts: Mapping[str, Mapping[Index, Sources]], keys: Collection[Index]) -> bool:
    """Tell whether the targets of a line have the same sources but for their numbers."""
    sources = [(len(by_key), next(iter(by_key.values()), None)) for by_key in parts.values()]
    return all(count == len(keys) and isinstance(first, AlikeSources) for count, first in sources)


def _parts(line: Line, by_component: _SourcesByComponent) -> tuple[TargetPart, ...]:
    """Return the logical tensors of a line's target with their sources."""
    parts = [
        TargetPart(component, sources.origins, (sources.line_sources.line.lossy, line.lossy))
        for component, sources in by_component.items()
    ]
    return tuple(parts)


def _single_source(origin: Origin, name: str, dtype: str, rule: str) -> Target:
    """Return the target that is one stored tensor, whatever its name says."""
    part = TargetPart(origin.component, (replace(origin, index={}),))
    return Target(name, dtype, origin.layout, {}, (part,), rule)


def translate(
    bound: Bound,
    stored: Mapping[str, Stored],
    target: Dialect,
    sizes: Sizes,
    recode: Recode = same,
    *,
    partial: bool = False,
) -> Translation:
    """Express a bound checkpoint in another dialect.

    Args:
        bound: its names read through its own dialect.
        stored: its tensors by name.
        target: the dialect wanted.
        sizes: what its config and the user say of axis sizes.
        recode: in which form each tensor is written; as it is stored unless numbers are to change.
        partial: tensors of the family may be absent: what is there is a part of a model on purpose.

    Returns:
        The target tensors with their origins. Where `refusals` is not empty nothing may be written.
    """
    return _Translator(bound, stored, target, sizes, recode).run(partial=partial)
