"""Recoded tensors: the operations that change a stored tensor's values during a conversion, and the resulting errors.

The steps for an output tensor are applied in this order. Replicas are averaged, quantized codes are decoded, and values
are cast or merged with an adapter's weights. Elements are copied to their positions. The arithmetic from the family's
table (such as `norm - 1`) is applied. The result is encoded, if that was requested.
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
"""Action on a tensor (past participle) -> name of the step that performs it, in the order of the steps."""
CASTING = frozenset({"cast", "merged"})
"""Actions that round values to a floating-point dtype."""
MEASURED_BY_READING = frozenset({"decoded", *CASTING})
"""Actions whose rounding errors are unknown until the tensor is read a second time."""


class RecodedTensor(msgspec.Struct, frozen=True):
    """A tensor whose values are decoded, encoded, averaged, cast or merged with an adapter's."""

    name: str
    """Tensor name as the family's table has it: of the target tensor where the action is `encoded`, else of the source.
    """
    action: Action
    """What was done to the tensor's values."""
    encoding: str
    """Encoding that was decoded or written; for casts and merges, the dtype before the action; empty for averages."""
    convention: str
    """Naming convention of the encoded buffers, a key of `CONVENTIONS`; empty where nothing is encoded or decoded."""
    dtype: str
    """Dtype of the values outside of the encoding, as a safetensors code."""
    shape: tuple[int, ...]
    """Shape of the tensor, counted in elements."""


class MeasuredTensor(msgspec.Struct, frozen=True):
    """A recoded tensor, with the measured difference between its new values and its old ones."""

    what: RecodedTensor
    """Which tensor was recoded, and how."""
    error: Error
    """Error by action: decoded values against the exact code x scale; encoded values, read back, against the input;
    replicas against their mean; cast values against the originals; merged values against the exact sums.
    """
    infinite: int = 0
    """Number of values that were finite before the action and are infinite after it."""

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
        """Operation that computes the values from the stored tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the computed values in bytes."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a writable, contiguous view with the computed bytes that begin at `offset`; thread-safe."""

    def measure(self) -> tuple[Error, int]:
        """Return the error of the computed values against the stored ones, and the number of new infinities."""
