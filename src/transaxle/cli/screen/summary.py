"""A checkpoint on one line, and its tensors on as few lines as are true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transaxle.axes.notation.name import natural, skeleton
from transaxle.cli.screen.quantities import parameters, plural, size
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import pick_dialect
from transaxle.engine.facts.checkpoint_facts import totals
from transaxle.engine.facts.fold import FoldedRow, fold
from transaxle.errors import TransaxleError

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
        plural(amounts.tensors, "tensor"),
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
    position = _positions(view)
    names = sorted(view, key=lambda name: (position(name), natural(name)))
    keys = [(view[name].dtype, view[name].shape) for name in names]
    if everything:
        return [FoldedRow(name, (name,), key) for name, key in zip(names, keys, strict=True)]
    return fold(names, keys)


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


def _positions(view: Checkpoint) -> Callable[[str], int]:
    """Return a function that gives the position of a name in its table; names that no line reads come last."""
    if view.family is None or view.dialect is None:
        return lambda _: 0
    reading = view.recognised
    try:
        lines = pick_dialect(reading.family, view.dialect).lines
    except TransaxleError:
        return lambda _: 0
    order: dict[str, int] = {}
    for number, line in enumerate(lines):
        order.setdefault(line.name.skeleton, number)
    cut = len(reading.prefix)
    return lambda name: min(order.get(skeleton(name), len(lines)), order.get(skeleton(name[cut:]), len(lines)))
