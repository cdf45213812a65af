"""The operations that change a stored tensor's values during a conversion, and the errors that the operations cause.

The steps for an output tensor are applied in this order. Replicas are averaged, quantized codes are decoded, and values
are cast or merged with an adapter's weights. Elements are copied to their positions in the output tensor. The
arithmetic from the mapping rule (such as `norm - 1`) is applied. The result is encoded, if the user asked for it.
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
    """A tensor whose values are decoded, encoded, averaged, cast, or merged with an adapter's weights."""

    name: str
    """Name of the target tensor if the action is `encoded`, else of the source tensor, without buffer suffixes."""
    action: Action
    """What was done to the tensor's values."""
    encoding: str
    """Encoding that was decoded or written. For casts and merges, the dtype before the action; for averages, empty."""
    convention: str
    """Naming convention of the encoded buffers, a key of `CONVENTIONS`; empty if nothing is encoded or decoded."""
    dtype: str
    """Dtype of the values outside of the encoding, as a safetensors code."""
    shape: tuple[int, ...]
    """Shape of the tensor, counted in elements."""


class MeasuredTensor(msgspec.Struct, frozen=True):
    """A tensor whose values were changed, with the measured difference between its new and its old values."""

    what: RecodedTensor
    """Which tensor was changed, and by which action."""
    error: Error
    """The measured difference, which depends on the action: decoded values against the exact products of codes and
    scales; encoded values, read back, against the input; replicas against their mean; cast values against the
    originals; merged values against the exact sums.
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
    """A stored tensor whose values are computed when they are read, as a virtual row-major file."""

    @property
    def step(self) -> RecodedTensor:
        """Operation that computes the values from the stored tensor."""

    @property
    def nbytes(self) -> int:
        """Size of the computed values in bytes."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a writable, contiguous view with the computed bytes that begin at `offset`; thread-safe."""

    def measure(self) -> tuple[Error, int]:
        """Return the error of the computed values against the stored values, and the number of values that became
        infinite.
        """
