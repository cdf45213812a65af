"""Recoding: what a plan says of tensors whose numbers change, because they are decoded or encoded on the way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from transaxle.axes.layout.bind import WEIGHT
from transaxle.axes.notation.number_format import NumberFormat, Recode
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.copying.replica_mean import averages_of
from transaxle.engine.plan.output_tensors import Product, Recoded
from transaxle.engine.views.cast import casts_of
from transaxle.engine.views.decoded import decoders_of
from transaxle.engine.views.encoded import View
from transaxle.errors import Refusal, Where
from transaxle.move.transfer import Transfer


def recoding(names: Collection[str], encoding: str) -> Recode:
    """Return what tells the tables in which form each target is written: some of them are encoded."""
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
    found = checkpoint.bound.names.items()
    return {name: line.expression.components for (line, _), names in found for name in names.values()}


def displaced(checkpoint: Checkpoint, names: Collection[str]) -> Iterator[Refusal]:
    """Yield why tensors cannot be recoded under their own names: the dialect keeps codes in another order than values.

    Args:
        checkpoint: the source.
        names: its tensors that are to be encoded; those that are decoded are known.
    """
    changing = {*checkpoint.decoded, *names}
    if not changing or checkpoint.family is None:
        return
    for (line, slot), held in checkpoint.bound.names.items():
        if line.by_form and slot == WEIGHT:
            for name in changing.intersection(held.values()):
                message = f"{line.text}\nthe order of its dims depends on the encoding, and that is about to change"
                hint = f"name the dialect, which brings them into order:  --to FORMAT:{checkpoint.dialect}"
                yield Refusal("UNSUPPORTED", message, Where(None, name), hint)


def recoded(checkpoint: Checkpoint, written: Sequence[tuple[Product, Sequence[Transfer]]]) -> list[Recoded]:
    """Return the tensors whose numbers change.

    Args:
        checkpoint: the source.
        written: what is written, and where its bytes come from.
    """
    read = {transfer.file for _, transfers in written for transfer in transfers}
    found = []
    for file, decoder in decoders_of(checkpoint.container.storage).items():
        if file in read:
            one = decoder.tensor
            found.append(Recoded(one.name, "decoded", one.encoding.name, one.convention, decoder.dtype, one.shape))
    for file, caster in casts_of(checkpoint.container.storage).by_file.items():
        if file in read:
            was = caster.entry
            found.append(Recoded(was.name, "cast", was.dtype, "", caster.dtype, was.shape))
    for name in averages_of(checkpoint.container.storage):
        entry = checkpoint.container.entries.get(name)
        if entry is not None and read.intersection(extent.file for extent in entry.extents):
            found.append(Recoded(name, "averaged", "", "", entry.dtype, entry.shape))
    steps = {product.step.tensor: product.step for product, _ in written if product.step is not None}
    for name, step in steps.items():
        found.append(Recoded(name, "encoded", step.encoding, step.convention, step.dtype, step.shape))
    return found
