"""DeepSpeed's universal-checkpoint metadata of a cut model: one record for each parameter, and a collection for the
model.

DeepSpeed's engine writes the collection into model and optimizer files, and restores universal checkpoints with the
records. The reference documents collection and records on the page Universal-checkpoint metadata.

The metadata contains the two forms that DeepSpeed 0.19.8 writes: the affine map, and lists of patterns for older
readers. Unlike in DeepSpeed, nothing is inferred from names: the caller lists the parameters with padded vocabularies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from transaxle.axes.geometry import local_sizes, segment_sizes
from transaxle.axes.layout.divide import ListedPositions
from transaxle.errors import Faults, refuse
from transaxle.formats.catalog import Shape
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.categories import exact_pattern
from transaxle.formats.deepspeed.spread import cut as spread_by
from transaxle.formats.deepspeed.spread import same, whole, write_affine
from transaxle.formats.deepspeed.universal_record import LayerKind, Record
from transaxle.parallel.cutting import cut_parameters
from transaxle.parallel.tp_plan import Cut, Shares


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The parameters that have one row per word of a vocabulary, by name, and the number of words."""

    names: Collection[str]
    rows: int
    """Number of words; the parameters' rows beyond this number are padding."""


def collected(
    parameters: Mapping[str, Record | Shape], ranks: int, vocabulary: Vocabulary | None = None
) -> dict[str, Any]:
    """Return the metadata of a model as plain data.

    Args:
        parameters: first name of each parameter -> its record, or its shape if every rank has the whole parameter, for
            which there is no record.
        ranks: tensor-parallel degree.
        vocabulary: the model's vocabulary, if it has one.

    Raises:
        Refused: with the code SHAPE_MISMATCH if a record describes a different number of ranks than `ranks`, or if a
            parameter of the vocabulary has fewer rows than the vocabulary has words.
    """
    faults = Faults()
    replicated, row = [], []
    fused: list[dict[str, Any]] = []
    widths: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    maps: dict[str, Any] = {}
    for name, record_or_shape in parameters.items():
        pattern = exact_pattern(name)
        if not isinstance(record_or_shape, Record):
            replicated.append(pattern)
            maps[pattern] = write_affine(whole(record_or_shape, ranks))
            continue
        if record_or_shape.spread is None:
            reasons[pattern] = record_or_shape.reason or ""
            continue
        if len(record_or_shape.spread.shards) != ranks:
            message = f"its record describes {len(record_or_shape.spread.shards)} ranks, but the model has {ranks}"
            faults.add("SHAPE_MISMATCH", message, keys.RECORD, name)
        maps[pattern] = write_affine(record_or_shape.spread)
        if record_or_shape.replicated:
            replicated.append(pattern)
        if record_or_shape.kind == keys.ROW and not record_or_shape.bias:
            row.append(pattern)
        if record_or_shape.view is not None and record_or_shape.dim is not None and record_or_shape.widths is not None:
            widths[pattern] = [list(part_widths) for part_widths in record_or_shape.widths]
            shape = [*record_or_shape.view]
            shape[record_or_shape.dim] = tuple(map(sum, record_or_shape.widths))
            fused.append({keys.PATTERNS: [pattern], keys.SHAPE: shape, keys.PARTITION_DIM: record_or_shape.dim})
    vocabulary_sizes = {} if vocabulary is None else _rows(vocabulary, parameters, faults)
    if faults:
        raise faults.error()
    return {
        keys.INFO_VERSION: keys.INFO_CURRENT,
        keys.ROW_PATTERNS: sorted(row),
        keys.REPLICATED_PATTERNS: sorted(replicated),
        keys.VOCABULARY_PATTERNS: sorted(map(exact_pattern, vocabulary.names)) if vocabulary is not None else [],
        keys.SUB_PARAMS: fused,
        keys.UNSUPPORTED_PATTERNS: reasons,
        **({keys.SHARD_WIDTHS: widths} if widths else {}),
        **vocabulary_sizes,
        **({keys.AFFINE: {keys.AFFINE_VERSION: keys.AFFINE_CURRENT, keys.AFFINE_PARAMS: maps}} if maps else {}),
    }


def _rows(vocabulary: Vocabulary, parameters: Mapping[str, Record | Shape], faults: Faults) -> dict[str, int]:
    """Return the true and the padded size of a vocabulary; without padding only the true size, as DeepSpeed's AutoTP
    does.
    """
    padded_sizes: dict[int, str] = {}
    for name in vocabulary.names:
        if name not in parameters:
            raise refuse(
                "MISSING_TENSOR",
                "it is listed as a vocabulary, but the model has no such parameter",
                file=keys.INFO,
                tensor=name,
            )
        record_or_shape = parameters[name]
        shape = record_or_shape.original if isinstance(record_or_shape, Record) else record_or_shape
        if not shape or shape[0] < vocabulary.rows:
            message = f"the vocabulary has {vocabulary.rows} words, but the parameter has the shape {list(shape)}"
            faults.add("SHAPE_MISMATCH", message, keys.INFO, name)
            continue
        padded_sizes.setdefault(shape[0], name)
    if len(padded_sizes) > 1:
        message = f"the model's vocabularies are padded to different sizes: {sorted(padded_sizes)}"
        faults.add("SHAPE_MISMATCH", message, keys.INFO, next(iter(padded_sizes.values())))
    padded = [(keys.PADDED_VOCABULARY, size) for size in padded_sizes if size != vocabulary.rows]
    return {keys.TRUE_VOCABULARY: vocabulary.rows, **dict(padded)}


_MODEL_PARALLEL = ("tensor_model_parallel", "model_parallel")
_PARSED = "ds_autotp_parsed"
"""Attribute that marks a model as already cut, so that DeepSpeed's AutoTP does not cut it again."""


def record_of(cut: Cut, shares: Shares | None, ranks: int) -> Record:
    """Return the universal-checkpoint record of a parameter.

    Args:
        cut: how the parameter is cut.
        shares: how the cut axis is divided among ranks; None if every rank has the whole parameter.
        ranks: tensor-parallel degree.
    """
    weight, bias = cut.weight, len(cut.weight.shape) == 1
    shape = weight.shape
    if cut.option is None or shares is None:
        return Record.shared(keys.COLUMN, shape, ranks, bias=bias)
    dim = cut.option.dim
    kind: LayerKind = keys.ROW if (len(shape), dim) == (2, 1) else keys.COLUMN
    node, spread = weight.expression.dims[dim], spread_by(shape, dim, ListedPositions(cut.positions_by_rank), ranks)
    rank_sizes = [segment_sizes(node, local_sizes(weight.sizes, ranges)) for ranges in shares.ranges]
    widths = list(zip(*rank_sizes, strict=True))
    parts = segment_sizes(node, weight.sizes)
    if [sum(rows) for rows in widths] == [*parts]:
        view = None
        if len(parts) > 1 or dim > 1:
            view = tuple(parts if number == dim else count for number, count in enumerate(shape))
        record = Record.cut(kind, shape, dim, widths, view=view, bias=bias)
        if record.spread is not None and same(record.spread, spread):
            return record
    return Record.placed(kind, shape, dim, spread, bias=bias)


def universal_checkpoint_info(model: nn.Module) -> dict[str, Any]:
    """Return the metadata of a cut model; also attach the metadata and the records to the attributes that DeepSpeed
    reads.

    Call this function again after sharding the model or giving it storage, because these operations create new
    parameters without records.

    Args:
        model: a model cut by `tensor_parallel`.

    Raises:
        Refused: with the code UNSUPPORTED if `tensor_parallel` has not cut the model.
    """
    parameters = list(cut_parameters(model))
    if not parameters:
        raise refuse("UNSUPPORTED", f"this {type(model).__name__} was not cut by tensor_parallel")
    ranks = len(parameters[0][2].positions_by_rank)
    info = collected({name: cut.record for name, _, cut in parameters}, ranks)
    for _, parameter, cut in parameters:
        setattr(parameter, keys.RECORD, cut.record.as_dict())
        setattr(parameter, keys.INFO, info)
        if not cut.record.replicated:
            for name in _MODEL_PARALLEL:
                setattr(parameter, name, cut.first)
    setattr(model, keys.INFO, info)
    setattr(model, _PARSED, True)
    return info
