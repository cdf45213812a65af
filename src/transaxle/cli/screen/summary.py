"""A checkpoint on one line, and its tensors on as few lines as are true."""

from __future__ import annotations

from typing import Any

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint_facts import totals
from transaxle.engine.wording import FoldedRow, parameters, plural, size, tensors_in_words

UNKNOWN = "unknown family"


def headline(checkpoint: Checkpoint, view: Checkpoint) -> str:
    """Describe a checkpoint: format, family, dialect, and amount of data.

    Args:
        checkpoint: as it is stored.
        view: the same in the dialect that is shown.
    """
    amounts = totals(view)
    descriptions = [checkpoint.family, view.dialect] if checkpoint.family else [UNKNOWN]
    if view is not checkpoint:
        descriptions.append(f"stored as {checkpoint.dialect}")
    amount = f"{size(amounts.bytes)} in {plural(amounts.files, 'file')}" if view is checkpoint else size(amounts.bytes)
    parts = [
        checkpoint.format,
        *descriptions,
        tensors_in_words(amounts.tensors, amounts.optimizer),
        parameters(amounts.parameters),
        amount,
    ]
    return " · ".join(text for text in parts if text)


def rows(view: Checkpoint, *, everything: bool = False) -> list[FoldedRow]:
    """Return a checkpoint's tensors in the order of its dialect's table, folded where dtype and shape are alike.

    Args:
        view: the checkpoint, in the dialect that is shown.
        everything: a row for each name.

    Returns:
        Rows whose keys are `(dtype, shape)`.
    """
    if everything:
        return [FoldedRow(name, (name,), (view[name].dtype, view[name].shape)) for name in view.in_order()]
    return view.folded()


def cells(row: FoldedRow) -> list[str]:
    """Return a row of `rows` as printed cells: name, count, dtype, shape."""
    dtype, shape = _key(row)
    return [row.name, row.times, dtype, str(list(shape))]


def as_json(row: FoldedRow) -> dict[str, Any]:
    """Return a row of `rows` as JSON data."""
    dtype, shape = _key(row)
    return {"name": row.name, "count": row.count, "dtype": dtype, "shape": list(shape)}


def _key(row: FoldedRow) -> tuple[str, tuple[int, ...]]:
    assert isinstance(row.key, tuple)
    dtype, shape = row.key
    return dtype, shape
