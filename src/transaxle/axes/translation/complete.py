"""Completeness: the tensors that a checkpoint must have but lacks, and those of more layers or experts than it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import islice

from transaxle.axes.layout.bind import WEIGHT, Bound, Index, split_slot
from transaxle.axes.notation.family import Line, LogicalTensor, Sizes
from transaxle.axes.notation.name import skeleton
from transaxle.axes.translation.alike_tensors import Grid
from transaxle.axes.translation.holdings import Holdings, LineSources
from transaxle.errors import Refusal, Where

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


def classifies(bound: Bound) -> bool:
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


def beyond(bound: Bound, sizes: Sizes) -> Iterator[Refusal]:
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
        origin = "as given" if axis in sizes.given or formula is None else f"{formula.text} in the config"
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


def _called(bound: Bound, tensor: LogicalTensor) -> str:
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
