"""Recoding: tensors whose values change, because they are decoded, encoded, cast, merged or averaged.

What a plan says of them, which tensors of a target are encoded, and, when it is carried out, how far they are from what
they were, and whether that may be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Container as Holding
from functools import cache
from math import isinf

from transaxle.axes.layout.bind import WEIGHT
from transaxle.axes.layout.solve import factors
from transaxle.axes.notation.family import Family, Line, NumberFormat, Recode
from transaxle.encodings.conventions.convention import COMPRESSED_TENSORS, CONVENTIONS, PREFERRED
from transaxle.encodings.encoding import ENCODINGS, FLOAT8_BLOCK, Encoded, Role
from transaxle.encodings.error import Error
from transaxle.encodings.value_steps import CASTING, Recoded
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY
from transaxle.engine.number_text import plural
from transaxle.engine.plan.planned import OutputTensor, PlannedTensor
from transaxle.engine.views.encode import Encode, Step, choose
from transaxle.engine.views.encoded import View
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog import Container, Recoding
from transaxle.move.workers import Limits, share

HUB, MEMORY = "hf", "transformers"
"""Dialects of a hub's files, and of the models that transformers makes of them."""
_STACKED = "it takes the codes of stacked matrices for values"
_TURNED = "it has no quantized layer with rows of inputs"
_SPLIT = "it splits them while it loads, but not their scales"
_SUBCLASS = "their layers are of a subclass of nn.Linear, which it does not replace"
_UNEVEN = "it takes the tiles of a weight for equally large, and the last one is smaller"
_SUBCLASSED = frozenset({"falcon"})
"""Families whose layers are of a subclass of `nn.Linear`."""
_NUMBERED = frozenset({"llama4", "llama4_text"})
"""Families of whose stacked experts transformers makes numbered ones where a config is of compressed-tensors."""
_OUT, _IN = ".out_proj.weight", ".in_proj_weight"
"""Ends of two names of an `nn.MultiheadAttention`, whose `out_proj` is of a subclass."""
_MATRIX = 2
"""Dims of a weight that is no stack."""


def recoding(names: Collection[str], encoding: str) -> Recode:
    """Return the function that tells the tables in which format each target is written."""
    encoded = frozenset(names)
    return lambda name, form: NumberFormat(form.dtype, encoding) if name in encoded else form


def components(checkpoint: Checkpoint, view: View | None) -> dict[str, Sequence[str]]:
    """Return the logical tensors of each target that a table reads.

    Args:
        checkpoint: the source.
        view: the target; None: the source's own names.
    """
    if view is not None:
        return {
            name: [part.component for part in target.parts] for name, target in view.targets.items() if target.component
        }
    if checkpoint.family is None:
        return {}
    bound_names = checkpoint.bound.names.items()
    return {name: line.expression.components for (line, _), names in bound_names for name in names.values()}


def across(checkpoint: Checkpoint, view: View | None) -> set[str]:
    """Return the targets whose rows do not run along the last axis of a logical tensor: the input of its layer.

    Arguments as those of `components`.
    """
    if checkpoint.family is None:
        return set()
    inputs = {name: tensor.axes[-1] for name, tensor in checkpoint.recognised.family.tensors.items() if tensor.axes}
    rows: list[tuple[str, str, Sequence[str]]]
    if view is None:
        bound_names = checkpoint.bound.names.items()
        rows = [
            (name, component, line.expression.axes_of(component))
            for (line, _), names in bound_names
            for name in names.values()
            for component in line.expression.components
        ]
    else:
        rows = [
            (name, component, [axis for axis, *_ in shares[-1].axes])
            for name, target in view.targets.items()
            for component, shares in target.layout.shares.items()
            if shares
        ]
    return {name for name, component, axes in rows if axes and factors(axes[-1])[-1] != inputs.get(component, axes[-1])}


def to_encode(
    checkpoint: Checkpoint, wanted: str, view: View, encode: Encode
) -> tuple[list[str], list[Refusal], list[str]]:
    """Choose the tensors of a target that are encoded.

    Args:
        checkpoint: the source.
        wanted: dialect of the target.
        view: the target.
        encode: what the user said.

    Returns:
        Their names, why others that are wanted cannot be encoded, and notes about what transformers would not read.

    Raises:
        UsageError: as `choose`.
    """
    target = None if wanted == IDENTITY else view
    parts, turned = components(checkpoint, target), across(checkpoint, target)
    label = (checkpoint.dialect if wanted == IDENTITY else wanted) or ""
    if checkpoint.family is None or label.partition("@")[0] not in (HUB, MEMORY):
        return choose(view, encode, parts, turned)
    family = checkpoint.recognised.family
    unread = _unread(family, view, encode.encoding, parts, turned)
    names, misfits, notes = choose(view, encode, parts, turned, unread)
    if PREFERRED[encode.encoding] == COMPRESSED_TENSORS:
        notes.extend(_of_experts(family, encode.encoding, {name: parts.get(name, ()) for name in names}))
    return names, misfits, notes


def _unread(
    family: Family, view: View, encoding: str, targets: Mapping[str, Sequence[str]], turned: Holding[str]
) -> dict[str, str]:
    """Return the targets whose codes transformers 5.23 would read wrongly, and why.

    Args:
        family: of the model.
        view: the target.
        encoding: key of `ENCODINGS`.
        targets: what `components` returns.
        turned: what `across` returns.
    """
    together = [frozenset(line.expression.components) for line in _memory(family)]
    known = frozenset[str]().union(*together)
    in_blocks = encoding == FLOAT8_BLOCK.name

    @cache
    def is_split(components: frozenset[str]) -> bool:
        return components <= known and not any(components <= each for each in together)

    def reason(name: str, components: Sequence[str]) -> str:
        shape = view.targets[name].shape
        if len(shape) > _MATRIX:
            return _STACKED if in_blocks or family.name not in _NUMBERED else ""
        if name in turned:
            return _TURNED
        if is_split(frozenset(components)):
            return _SPLIT
        in_attention = name.endswith(_OUT) and name.removesuffix(_OUT) + _IN in view.targets
        if in_blocks and (family.name in _SUBCLASSED or in_attention):
            return _SUBCLASS
        return _UNEVEN if in_blocks and any(map(_is_uneven, shape, FLOAT8_BLOCK.tile)) else ""

    present = ((name, components) for name, components in targets.items() if name in view.targets)
    return {name: why for name, components in present if (why := reason(name, components))}


def _is_uneven(size: int, tile: int) -> bool:
    """Tell whether a dim has a smaller last tile, and a number of tiles that divides it; else transformers raises."""
    count = -(-size // tile)
    return count > 1 and size % tile != 0 and size % count == 0


def _of_experts(family: Family, encoding: str, encoded: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield what transformers 5.23 does wrongly with the experts of compressed-tensors, which others read."""
    if family.name in _NUMBERED:
        yield "transformers 5.23 looks for numbered experts beside a config of compressed-tensors, and finds none here"
        return
    stacks = [line.expression for line in _memory(family) if len(line.expression.dims) > _MATRIX]
    stacked = {component for stack in stacks for component in stack.components}
    if any(not stacked.isdisjoint(components) for components in encoded.values()):
        yield (
            f"transformers 5.23 reads experts in {encoding} wrongly, vLLM and compressed-tensors do not; for "
            "transformers leave them plain:  --skip '*.experts.*'"
        )


def _memory(family: Family) -> Sequence[Line]:
    dialect = family.dialect(MEMORY)
    return () if dialect is None else dialect.lines


def computed(container: Container) -> dict[str, tuple[Recoded, ...]]:
    """Return the steps that compute tensors from stored ones, by the file that each is read from, in order.

    A tensor has one file, that of its last step; what is decoded or cast of a mean reads the mean.
    """
    by_name: dict[str, list[Recoded]] = {}
    for tensor in container.recoding.computed.values():
        by_name.setdefault(tensor.step.name, []).append(tensor.step)
    return {file: tuple(by_name[tensor.step.name]) for file, tensor in container.recoding.computed.items()}


def displaced(checkpoint: Checkpoint, names: Collection[str]) -> Iterator[Refusal]:
    """Yield why tensors cannot be recoded under their own names: the dialect orders the dims of codes and of values
    differently.

    Args:
        checkpoint: the source.
        names: tensors to be encoded; decoded ones are known.
    """
    changing = {*checkpoint.decoded, *names}
    if not changing or checkpoint.family is None:
        return
    for (line, slot), names_of_line in checkpoint.bound.names.items():
        if line.by_form and slot == WEIGHT:
            for name in [name for name in names_of_line.values() if name in changing]:
                message = f"{line.text}\nthe order of the dims depends on the encoding, which this conversion changes"
                hint = f"Name the dialect, so that the dims are reordered:  --to FORMAT:{checkpoint.dialect}."
                yield Refusal("UNSUPPORTED", message, Where(None, name), hint)


def recoded(
    checkpoint: Checkpoint, outputs: Mapping[str, OutputTensor], planned: Sequence[PlannedTensor]
) -> tuple[Recoded, ...]:
    """Return the tensors whose values change.

    Args:
        checkpoint: the source.
        outputs: all tensors that are written, by name.
        planned: those of which it is known where their bytes come from.
    """
    container = checkpoint.container
    read = {transfer.file for tensor in planned for transfer in tensor.transfers}
    averaged, changed = list[Recoded](), list[Recoded]()
    for file, tensor in container.recoding.computed.items():
        entry = container.entries.get(tensor.step.name)  # what is computed of it, if anything, is read in its place
        if file in read or (entry is not None and read.intersection(extent.file for extent in entry.extents)):
            (averaged if tensor.step.action == "averaged" else changed).append(tensor.step)
    changed.extend(averaged)
    written = (outputs[tensor.name] for tensor in planned)
    steps = {product.step.tensor: product.step for product in written if product.step is not None}
    for name, step in steps.items():
        changed.append(Recoded(name, "encoded", step.encoding, step.convention, step.dtype, step.shape))
    return tuple(changed)


def buffers_of(view: View, name: str, encoding: str) -> list[OutputTensor]:
    """Return the buffers that one tensor is written as."""
    convention, spec = CONVENTIONS[PREFERRED[encoding]], ENCODINGS[encoding]
    target = view.targets[name]
    dtype, shape = view.described(name)
    buffers = []
    for role in (Role.CODES, Role.SCALE, *([Role.GLOBAL] if spec.has_global else ())):
        step = Step(encoding, convention.name, role, name, dtype, shape)
        stored = convention.stored(name, role, spec)
        buffers.append(OutputTensor(stored, *convention.presented(spec, shape, role), target, step))
    return buffers


def encoded_tensors(view: View, written: Iterable[OutputTensor]) -> dict[str, Encoded]:
    """Return the encoded tensors of a target by table name, both moved and newly encoded.

    Args:
        view: the target's tensors.
        written: the tensors that are written.
    """
    encoded = dict(view.encoded)
    for product in written:
        step = product.step
        if step is not None:
            known_tensor = encoded.get(step.tensor)
            parts = {**(known_tensor.parts if known_tensor else {}), Role(step.role): product.name}
            encoded[step.tensor] = Encoded(step.tensor, step.spec, step.shape, parts, step.convention)
    return encoded


def measure(recoding: Recoding, steps: Iterable[Recoded], limit: Limits) -> dict[Recoded, tuple[Error, int]]:
    """Return the error of each computed tensor, and how many finite values became infinite; most are read once for it.

    Args:
        recoding: what is computed.
        steps: of the tensors to measure; those that are encoded are measured while they are written.
        limit: workers.
    """
    wanted = set(steps)
    computed = [tensor for tensor in recoding.computed.values() if tensor.step in wanted] if wanted else []
    errors: dict[Recoded, tuple[Error, int]] = {}

    def measure_one(_: object, number: int) -> None:
        errors[computed[number].step] = computed[number].measure()

    share(range(len(computed)), limit.jobs, lambda _: None, measure_one)
    return errors


def refuse_infinite(errors: Mapping[Recoded, tuple[Error, int]], dtype: str | None) -> None:
    """Refuse finite values that would become infinite: cast, merged, or decoded as the product of code and scale.

    Args:
        errors: from `measure`.
        dtype: to which plain tensors are cast; None: to their own.

    Raises:
        Refused: LOSSY, with every tensor that has such values.
    """
    what = dtype or "the type of the weight"
    hint = "Leave them out with --skip NAME, allow it with --allow-lossy, or use bf16, which has the range of fp32."
    if dtype is None:
        hint = "Cast the model first (convert with --dtype bf16), or allow it with --allow-lossy."
    decoded = "finite values (code times scale) would become infinite when decoded"
    keep = "Leave them encoded with --skip NAME, or allow it with --allow-lossy."
    problems = []
    for step, (error, count) in errors.items():
        if step.action in CASTING and count:
            message = f"{plural(count, 'finite value')} would become infinite in {what}"
            problems.append(Refusal("LOSSY", message, Where(None, step.name), hint))
        elif step.action == "decoded" and isinf(error.max):
            problems.append(Refusal("LOSSY", decoded, Where(None, step.name), keep))
    if problems:
        raise gathered(problems)
