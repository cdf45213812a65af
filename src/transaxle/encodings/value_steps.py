"""Recoded tensors: what is done to the values of a stored tensor on its way, and how far that moves them.

The steps of an output tensor, in the order in which they are composed: the mean of replicas is taken, codes are
decoded, values are cast or merged with an adapter's; elements are copied to their places; a table's arithmetic is
done; and the result is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

from transaxle.encodings.encoding import Error

Action = Literal["decoded", "encoded", "averaged", "cast", "merged"]
STEPS: Mapping[Action, str] = {
    "averaged": "average", "decoded": "decode", "cast": "cast", "merged": "merge", "encoded": "encode",
}  # fmt: skip
"""The step that does each action, in the order in which they are composed."""
CASTING = frozenset({"cast", "merged"})
"""Actions that round to a floating-point type."""
MEASURED_BY_READING = frozenset({"decoded", *CASTING})
"""Actions whose errors only another read of the tensor shows."""


class Recoded(msgspec.Struct, frozen=True):
    """A tensor whose values are decoded, encoded, averaged, cast or merged with an adapter's."""

    name: str
    """Table name: the target's if it is encoded, the source's otherwise."""
    action: Action
    """What is done."""
    encoding: str
    """The encoding it is decoded from or encoded to; empty for averages; if cast or merged, the dtype it had."""
    convention: str
    """The convention of that encoding."""
    dtype: str
    """Safetensors code of the plain values."""
    shape: tuple[int, ...]
    """Elements along each dim."""


class Measured(msgspec.Struct, frozen=True):
    """A recoded tensor and how far its values are from the source's."""

    what: Recoded
    """The tensor."""
    error: Error
    """Difference of decoded values from the products of code and scale; of encoded values, read back, from those
    given; of replicas from their mean; of cast values from the originals; of merged values from the exact sums.
    """
    infinite: int = 0
    """Number of finite values that became infinite."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        error_data: dict[str, Any] = {"max_abs": self.error.max, "rms": self.error.rms, "exact": self.error.exact}
        if self.infinite:
            error_data["infinite"] = self.infinite
        data: dict[str, Any] = msgspec.to_builtins(self.what)
        return {**data, "shape": list(self.what.shape), **error_data}


class Computed(Protocol):
    """A stored tensor as a file of computed values, row-major; the file does not exist on disk."""

    @property
    def step(self) -> Recoded:
        """What is done to the tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the bytes that start at `offset`; safe from several threads."""

    def measure(self) -> tuple[Error, int]:
        """Return how far the values are from the stored ones, and how many finite ones became infinite."""
