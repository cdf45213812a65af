"""Drafting the metadata of a model, `universal_checkpoint_info`, from the records of its parameters.

Both forms are written, as DeepSpeed 0.19.8 does: lists of patterns for earlier readers, and the affine map. Unlike
DeepSpeed, nothing is inferred from names: the caller says which parameters are padded vocabularies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transaxle.errors import Faults, refuse
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.metadata import affine
from transaxle.formats.deepspeed.metadata.name_patterns import escaped
from transaxle.formats.deepspeed.metadata.record import Record
from transaxle.formats.deepspeed.metadata.spread import Shape, whole


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The parameters that have a row for each word."""

    names: Collection[str]
    rows: int
    """Number of words; rows beyond it are padding."""


def collected(
    parameters: Mapping[str, Record | Shape], ranks: int, vocabulary: Vocabulary | None = None
) -> dict[str, Any]:
    """Return the metadata of a model as plain data.

    Args:
        parameters: every parameter under its first name: its record, or the shape of one that has none because every
            rank holds all of it.
        ranks: tensor-parallel degree.
        vocabulary: where there is one.

    Raises:
        Refused: SHAPE_MISMATCH for records of another degree, and for a vocabulary whose parameters do not have that
            many rows.
    """
    faults = Faults()
    replicated, row = [], []
    fused: list[dict[str, Any]] = []
    widths: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    maps: dict[str, Any] = {}
    for name, record_or_shape in parameters.items():
        pattern = escaped(name)
        if not isinstance(record_or_shape, Record):
            replicated.append(pattern)
            maps[pattern] = affine.write(whole(record_or_shape, ranks))
            continue
        if record_or_shape.spread is None:
            reasons[pattern] = record_or_shape.reason or ""
            continue
        if len(record_or_shape.spread.shards) != ranks:
            message = f"its record describes {len(record_or_shape.spread.shards)} ranks, but the model has {ranks}"
            faults.add("SHAPE_MISMATCH", message, keys.RECORD, name)
        maps[pattern] = affine.write(record_or_shape.spread)
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
        keys.VOCABULARY_PATTERNS: sorted(map(escaped, vocabulary.names)) if vocabulary is not None else [],
        keys.SUB_PARAMS: fused,
        keys.UNSUPPORTED_PATTERNS: reasons,
        **({keys.SHARD_WIDTHS: widths} if widths else {}),
        **vocabulary_sizes,
        **({keys.AFFINE: {keys.AFFINE_VERSION: keys.AFFINE_CURRENT, keys.AFFINE_PARAMS: maps}} if maps else {}),
    }


def _rows(vocabulary: Vocabulary, parameters: Mapping[str, Record | Shape], faults: Faults) -> dict[str, int]:
    """Return the two sizes of a vocabulary; without padding only the true one, as DeepSpeed's AutoTP has it."""
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
