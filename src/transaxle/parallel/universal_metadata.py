"""DeepSpeed's universal-checkpoint metadata of a cut model: a record on each parameter, a collection on the model.

DeepSpeed's engine writes the collection into model and optimizer files, and its universal checkpoints are restored by
the records; see the reference, page Universal-checkpoint metadata.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from transaxle.axes.geometry.ranges import local_sizes, segment_sizes
from transaxle.axes.layout.divide import ListedPositions
from transaxle.errors import refuse
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.metadata.info_draft import collected
from transaxle.formats.deepspeed.metadata.record import LayerKind, Record
from transaxle.formats.deepspeed.metadata.spread import cut as spread_by
from transaxle.formats.deepspeed.metadata.spread import same
from transaxle.parallel.cutting import everything
from transaxle.parallel.tp_plan import Cut, Shares

_MODEL_PARALLEL = ("tensor_model_parallel", "model_parallel")
_PARSED = "ds_autotp_parsed"
"""Attribute of a model that DeepSpeed's AutoTP need not cut any more."""


def record_of(cut: Cut, shares: Shares | None, ranks: int) -> Record:
    """Return the record of a parameter.

    Args:
        cut: how it is cut.
        shares: how its axis is shared out; None for a parameter that every rank holds.
        ranks: tensor-parallel degree.
    """
    weight, bias = cut.weight, len(cut.weight.shape) == 1
    shape = weight.shape
    if cut.option is None or shares is None:
        return Record.shared(keys.COLUMN, shape, ranks, bias=bias)
    dim = cut.option.dim
    kind: LayerKind = keys.ROW if (len(shape), dim) == (2, 1) else keys.COLUMN
    node, spread = weight.expression.dims[dim], spread_by(shape, dim, ListedPositions(cut.held), ranks)
    each = [segment_sizes(node, local_sizes(weight.sizes, ranges)) for ranges in shares.ranges]
    widths = list(zip(*each, strict=True))
    parts = segment_sizes(node, weight.sizes)
    if [sum(rows) for rows in widths] == [*parts]:
        view = None
        if len(parts) > 1 or dim > 1:
            view = tuple(parts if at == dim else count for at, count in enumerate(shape))
        record = Record.cut(kind, shape, dim, widths, view=view, bias=bias)
        if record.spread is not None and same(record.spread, spread):
            return record
    return Record.placed(kind, shape, dim, spread, bias=bias)


def universal_checkpoint_info(model: nn.Module) -> dict[str, Any]:
    """Return the metadata of a cut model, and attach it and the records where DeepSpeed looks for them.

    Call it again after sharding the model or giving it storage, which create new parameters; the result is the same.

    Args:
        model: a model cut by `tensor_parallel`.

    Raises:
        Refused: UNSUPPORTED for a model that is not cut.
    """
    parameters = list(everything(model))
    if not parameters:
        raise refuse("UNSUPPORTED", f"this {type(model).__name__} was not cut by tensor_parallel")
    ranks = len(parameters[0][2].held)
    info = collected({name: kept.record for name, _, kept in parameters}, ranks)
    for _, parameter, kept in parameters:
        setattr(parameter, keys.RECORD, kept.record.as_dict())
        setattr(parameter, keys.INFO, info)
        if not kept.record.replicated:
            for name in _MODEL_PARALLEL:
                setattr(parameter, name, kept.first)
    setattr(model, keys.INFO, info)
    setattr(model, _PARSED, True)
    return info
