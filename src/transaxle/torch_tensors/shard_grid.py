"""Grids: one tensor of which this rank holds several parts, each a tensor of its own, such as the layers of a stack.

Megatron describes its parameters so: layer 3 is row 3 of a tensor that has all layers, half of the MLP's rows are the
gate and half are the up projection. Nothing here knows Megatron; a grid is what is left of such a description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from transaxle.axes.geometry.chunk import Intervals
from transaxle.errors import refuse
from transaxle.torch_tensors.tp_shard import Part, mark

Cell = tuple[Intervals, ...]
"""Per dim, the one interval that a part holds."""


class ShardGrid(torch.Tensor):
    """The whole tensor's shape, type and device, and this rank's parts of it; it can be loaded and saved only.

    Attributes:
        held: per dim, the intervals that this rank holds; every combination of them is a part.
        cells: the parts, each with as many dims as the whole, in the order of `cells_of(held)`.
        spare: another rank holds the same, and that one is to be saved.
        padded: the first dim may be longer than in a checkpoint; the rows beyond mean nothing.
    """

    held: tuple[Intervals, ...]
    cells: tuple[torch.Tensor, ...]
    spare: bool
    padded: bool

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        held: tuple[Intervals, ...],
        cells: Sequence[torch.Tensor],
        *,
        spare: bool = False,
        padded: bool = False,
    ) -> ShardGrid:
        """Make one; see the attributes."""
        first = cells[0]
        grid: ShardGrid = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=first.dtype, device=first.device
        )
        grid.held, grid.cells, grid.spare, grid.padded = held, tuple(cells), spare, padded
        mark(grid, Part(tuple(shape), held))
        return grid

    def named_parts(self, name: str, shape: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the parts, without the rows that a tensor of another shape lacks.

        Args:
            name: the grid's.
            shape: of what fills it; its own: all rows.
        """
        for cell, part in zip(cells_of(self.held), self.cells, strict=True):
            rows = count_inside(cell, shape) if self.padded else part.shape[0]
            if rows:
                yield cell_name(name, cell), part.narrow(0, 0, rows)

    def clear_beyond(self, shape: Sequence[int]) -> None:
        """Set the rows to zero that a tensor of another shape lacks."""
        with torch.no_grad():
            for cell, part in zip(cells_of(self.held), self.cells, strict=True):
                part[count_inside(cell, shape) :].zero_()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for an ordinary method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse every operation.

        Raises:
            Refused: UNSUPPORTED.
        """
        message = f"this stands for a rank's shards of a tensor, and does not support {func}"
        raise refuse("UNSUPPORTED", message, hint="A sharded state dict can be given to tx.load and tx.save.")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # the values are not shown
        return f"ShardGrid({list(self.shape)}, {self.dtype}, {self.held})"


def cells_of(held: Sequence[Intervals]) -> Iterator[Cell]:
    """Yield the combinations of intervals, the last dim fastest."""
    return product(*([(interval,) for interval in intervals] for intervals in held))


def cell_name(name: str, cell: Cell) -> str:
    """Return what the part of a tensor is called that begins at a cell's offsets."""
    return f"{name}[{', '.join(str(start) for ((start, _),) in cell)}]"


def inside(cell: Cell, shape: Sequence[int]) -> Cell:
    """Return the positions of a cell that a tensor with fewer rows has as well."""
    ((start, stop),) = cell[0]
    return (((min(start, shape[0]), min(stop, shape[0])),), *cell[1:])


def count_inside(cell: Cell, shape: Sequence[int]) -> int:
    """Return the number of a cell's rows that a tensor of this shape has as well."""
    ((start, stop),) = inside(cell, shape)[0]
    return stop - start
