"""Recoded tensors: the operations on a stored tensor's values during a conversion, and the error they cause.

The steps of an output tensor, in the order in which they are applied: replicas are averaged, codes are decoded, values
are cast or merged with an adapter's; elements are copied to their positions; a table's arithmetic is applied; and the
result is encoded.
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
"""Action -> its step, in the order in which steps are applied."""
CASTING = frozenset({"cast", "merged"})
"""Actions that round to a floating-point dtype."""
MEASURED_BY_READING = frozenset({"decoded", *CASTING})
"""Actions whose errors are only measured by reading the tensor again."""


class RecodedTensor(msgspec.Struct, frozen=True):
    """A tensor whose values are decoded, encoded, averaged, cast or merged with an adapter's."""

    name: str
    """Table name: the target's if the tensor is encoded, the source's otherwise."""
    action: Action
    """Operation on the tensor."""
    encoding: str
    """Encoding before decoding or after encoding; empty for averages; for casts and merges, the dtype before."""
    convention: str
    """Convention of that encoding."""
    dtype: str
    """Dtype of the plain values, as a safetensors code."""
    shape: tuple[int, ...]
    """Shape in elements."""


class MeasuredTensor(msgspec.Struct, frozen=True):
    """A recoded tensor with the difference of its values from the source's."""

    what: RecodedTensor
    """The recoded tensor."""
    error: Error
    """Difference of decoded values from code x scale; of encoded values, read back, from the input; of replicas from
    their mean; of cast values from the originals; of merged values from the exact sums.
    """
    infinite: int = 0
    """Number of finite values that became infinite."""

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain JSON data."""
        error_data: dict[str, Any] = {"max_abs": self.error.max, "rms": self.error.rms, "exact": self.error.exact}
        if self.infinite:
            error_data["infinite"] = self.infinite
        data: dict[str, Any] = msgspec.to_builtins(self.what)
        return {**data, "shape": list(self.what.shape), **error_data}


class ComputedTensor(Protocol):
    """A stored tensor as a virtual, row-major file of computed values."""

    @property
    def step(self) -> RecodedTensor:
        """Operation on the tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the bytes from `offset` on; thread-safe."""

    def measure(self) -> tuple[Error, int]:
        """Return the difference between the values and the stored ones, and how many finite values became infinite."""
