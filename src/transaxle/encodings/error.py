"""Error: how far values are from the values they stand for."""

from __future__ import annotations

import math

import msgspec


class Error(msgspec.Struct, frozen=True):
    """Summed differences of two arrays of equal size. The errors of a tensor's parts add up to that of the whole.

    Two NaN do not differ. A NaN differs from any number by infinity, and so does an infinity from anything else.
    """

    max: float = 0.0
    """The largest absolute difference."""
    square_sum: float = 0.0
    """Sum of the squared differences. Its last digits depend on the order of summation, and so on the path."""
    count: int = 0
    """How many values there are."""
    unequal: int = 0
    """How many of them differ."""

    @property
    def exact(self) -> bool:
        """Whether no value differs."""
        return self.unequal == 0

    @property
    def rms(self) -> float:
        """Root of the mean squared difference; 0 for no values."""
        return math.sqrt(self.square_sum / self.count) if self.count else 0.0

    def __add__(self, other: Error) -> Error:
        return Error(
            max(self.max, other.max),
            self.square_sum + other.square_sum,
            self.count + other.count,
            self.unequal + other.unequal,
        )
