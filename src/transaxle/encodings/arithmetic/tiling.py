"""Tiling: how the tiles of an encoding lie over the rows at hand."""

from __future__ import annotations

import msgspec

from transaxle.encodings.encoding import WHOLE, Encoding
from transaxle.errors import refuse


class Tiling(msgspec.Struct, frozen=True):
    """A matrix, part of a larger one, and its tiles. Along a dim, position `i` is in tile `(phase + i) // tile`."""

    shape: tuple[int, int]
    """Rows and columns, in elements."""
    tile: tuple[int, int]
    """Rows and columns of a tile."""
    phase: tuple[int, int] = (0, 0)
    """Where in its tile the first element lies."""

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles that the matrix touches, along each dim."""
        rows, columns = (
            -(-(phase + size) // tile) if size else 0
            for size, tile, phase in zip(self.shape, self.tile, self.phase, strict=True)
        )
        return rows, columns


def tiling(encoding: Encoding, shape: tuple[int, int], phase: tuple[int, int] = (0, 0)) -> Tiling:
    """Return how an encoding's tiles lie over a matrix. A tile without an end covers all that the matrix has.

    Raises:
        Refused: UNSUPPORTED for tiles over more than two dims, or a first element outside its tile.
    """
    if len(encoding.tile) > 2:
        raise refuse("UNSUPPORTED", f"{encoding.name}: tiles over {len(encoding.tile)} dims")
    matrix_tile = (1,) * (2 - len(encoding.tile)) + encoding.tile
    rows, columns = (
        max(phase_along + size, 1) if step == WHOLE else step
        for step, size, phase_along in zip(matrix_tile, shape, phase, strict=True)
    )
    if not (0 <= phase[0] < rows and 0 <= phase[1] < columns):
        raise refuse("UNSUPPORTED", f"{encoding.name}: element {phase} of a tile of {rows} x {columns}")
    return Tiling(shape, (rows, columns), phase)
