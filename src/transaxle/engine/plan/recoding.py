"""Recoding: what a plan says about tensors whose values change, because they are decoded, encoded, cast or averaged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from transaxle.axes.layout.bind import WEIGHT
from transaxle.axes.layout.unify import factors
from transaxle.axes.notation.number_format import NumberFormat, Recode
from transaxle.encodings.conventions.convention import CONVENTIONS, PREFERRED
from transaxle.encodings.encoding import ENCODINGS, Encoded, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.copying.replica_mean import averages_of
from transaxle.engine.plan.planned import OutputTensor, Recoded
from transaxle.engine.views.cast import casts_of
from transaxle.engine.views.decoded import decoders_of
from transaxle.engine.views.encode import Step
from transaxle.engine.views.encoded import View
from transaxle.errors import Refusal, Where
from transaxle.move.transfer import Transfer


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
            for name in changing.intersection(names_of_line.values()):
                message = f"{line.text}\nthe order of the dims depends on the encoding, which this conversion changes"
                hint = f"Name the dialect, so that the dims are reordered:  --to FORMAT:{checkpoint.dialect}."
                yield Refusal("UNSUPPORTED", message, Where(None, name), hint)


def recoded(checkpoint: Checkpoint, written: Sequence[tuple[OutputTensor, Sequence[Transfer]]]) -> list[Recoded]:
    """Return the tensors whose values change.

    Args:
        checkpoint: the source.
        written: each tensor written, with the transfers that fill it.
    """
    read = {transfer.file for _, transfers in written for transfer in transfers}
    changed = []
    for file, decoder in decoders_of(checkpoint.container.storage).items():
        if file in read:
            tensor = decoder.tensor
            changed.append(
                Recoded(tensor.name, "decoded", tensor.encoding.name, tensor.convention, decoder.dtype, tensor.shape)
            )
    for file, caster in casts_of(checkpoint.container.storage).by_file.items():
        if file in read:
            cast_entry = caster.entry
            changed.append(
                Recoded(cast_entry.name, caster.action, cast_entry.dtype, "", caster.dtype, cast_entry.shape)
            )
    for name in averages_of(checkpoint.container.storage):
        entry = checkpoint.container.entries.get(name)
        if entry is not None and read.intersection(extent.file for extent in entry.extents):
            changed.append(Recoded(name, "averaged", "", "", entry.dtype, entry.shape))
    steps = {product.step.tensor: product.step for product, _ in written if product.step is not None}
    for name, step in steps.items():
        changed.append(Recoded(name, "encoded", step.encoding, step.convention, step.dtype, step.shape))
    return changed


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
