"""A checkpoint on one line, and its tensors on as few as are true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transaxle.axes.notation.name import natural, skeleton
from transaxle.cli.screen.fold import Row, fold
from transaxle.cli.screen.quantities import parameters, plural, size
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import pick_dialect
from transaxle.errors import TransaxleError

UNKNOWN = "unknown family"


@dataclass(frozen=True, slots=True)
class Totals:
    """How much a checkpoint holds."""

    tensors: int
    """Stored tensors."""
    parameters: int
    """Elements of all of them."""
    bytes: int
    """Bytes of all of them."""
    files: int
    """Files that hold tensors."""


def totals(checkpoint: Checkpoint) -> Totals:
    """Count a checkpoint, in the dialect in which it is seen."""
    tensors = list(checkpoint.values())
    held = {extent.file for entry in checkpoint.container.entries.values() for extent in entry.extents}
    return Totals(len(tensors), checkpoint.parameters, sum(t.nbytes for t in tensors), len(held))


def headline(checkpoint: Checkpoint, view: Checkpoint) -> str:
    """Return what a checkpoint is: format, family, dialect, and how much there is of it.

    Args:
        checkpoint: as it is stored.
        view: the same in the dialect that is shown.
    """
    found = totals(view)
    known = [checkpoint.family, view.dialect] if checkpoint.family else [UNKNOWN]
    if view is not checkpoint:
        known.append(f"stored as {checkpoint.dialect}")
    amount = f"{size(found.bytes)} in {plural(found.files, 'file')}" if view is checkpoint else size(found.bytes)
    parts = [checkpoint.format, *known, plural(found.tensors, "tensor"), parameters(found.parameters), amount]
    return " · ".join(part for part in parts if part)


def rows(view: Checkpoint, *, everything: bool = False) -> list[Row]:
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
        return [Row(name, (name,), key) for name, key in zip(names, keys, strict=True)]
    return fold(names, keys)


def cells(row: Row) -> list[str]:
    """Return a row of `rows` as it is printed: name, count, dtype, shape."""
    dtype, shape = _key(row)
    return [row.name, row.times, dtype, str(list(shape))]


def as_json(row: Row) -> dict[str, Any]:
    """Return a row of `rows` as JSON data."""
    dtype, shape = _key(row)
    return {"name": row.name, "count": row.count, "dtype": dtype, "shape": list(shape)}


def _key(row: Row) -> tuple[str, tuple[int, ...]]:
    assert isinstance(row.key, tuple)
    dtype, shape = row.key
    return dtype, shape


def _positions(view: Checkpoint) -> Callable[[str], int]:
    """Return where in its table a name stands; names that no line reads come last."""
    if view.family is None or view.dialect is None:
        return lambda _: 0
    found = view.recognised
    try:
        lines = pick_dialect(found.family, view.dialect).lines
    except TransaxleError:
        return lambda _: 0
    order: dict[str, int] = {}
    for number, line in enumerate(lines):
        order.setdefault(line.name.skeleton, number)
    cut = len(found.prefix)
    return lambda name: min(order.get(skeleton(name), len(lines)), order.get(skeleton(name[cut:]), len(lines)))
