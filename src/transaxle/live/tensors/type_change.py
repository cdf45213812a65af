"""Conversions that `decode=` and `dtype=` allow: which types become which, and whether a value was rounded on the way.

Codes without their scales are no values: a tensor of fp8 that no encoding explains is converted by nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from glob import escape

import torch

from transaxle.encodings.plain_types import CASTS, PLAIN
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.errors import refuse

_DECODED_AS: Mapping[str, str] = {"bf16": "bf16", "fp16": "fp32", "fp32": "fp32"}
"""Type in which encoded values are computed."""
_CODES = "F8"
"""Begin of the safetensors codes that stand for no values."""


@dataclass(frozen=True)
class Conversion:
    """One tensor whose values were not copied as they are."""

    name: str
    """The model's name."""
    stored: str
    """Safetensors code it had, or the encoding's name."""
    to: str
    """Safetensors code it has now."""
    exact: bool | None
    """Whether every value is the stored one; None for an encoded tensor: how far codes times scales are from what they
    became is not measured while loading."""


def may_become(stored: str, wanted: str, allowed: str | None) -> bool:
    """Tell whether values of one type may become another: `allowed` is `dtype`, or `decode` of what was encoded."""
    return allowed is not None and stored in PLAIN and CASTS[allowed] == wanted


def check_dtype(dtype: str) -> None:
    """Refuse a `dtype=` that parameters cannot be cast to.

    Raises:
        Refused: UNSUPPORTED.
    """
    if dtype not in CASTS:
        named = ", ".join(f'dtype="{one}"' for one in CASTS)
        raise refuse("UNSUPPORTED", f"parameters cannot be cast to dtype={dtype!r}", hint=f"Give {named}.")


def is_plain(stored: str) -> bool:
    """Tell whether a safetensors code is that of values, not of codes that need scales."""
    return stored in PLAIN


def decode_hint(stored: str, wanted: str, decode: str | None = None) -> str:
    """Return what a user can do about two types that differ, although `decode` was given."""
    said = next((key for key, code in CASTS.items() if code == wanted), None)
    if stored in PLAIN and wanted.startswith(_CODES):
        return "To quantize, use transaxle convert --encode, or a parameter of tx.quant."
    if said is None or not stored.startswith(("F", "BF")):
        return ""
    if stored in PLAIN:
        return f'Use dtype="{said}" to cast the stored values to the parameter\'s dtype.'
    if said == decode:
        return "These are codes without scales, which have no values."
    return f'Use decode="{said}" to convert the stored tensor to the parameter\'s dtype.'


def decoded(checkpoint: Checkpoint, decode: str | None, keep: Iterable[str] = ()) -> Checkpoint:
    """Return a checkpoint whose encoded tensors are plain ones, if `decode` says so.

    Args:
        checkpoint: under its stored names.
        decode: as `load` takes it.
        keep: names of encoded tensors, as tables have them, that stay as they are.

    Raises:
        Refused: what stands against telling encoded buffers apart.
    """
    if decode is None:
        return checkpoint
    if decode not in CASTS:
        named = ", ".join(f'decode="{one}"' for one in CASTS)
        raise refuse("UNSUPPORTED", f"parameters cannot be decoded to decode={decode!r}", hint=f"Give {named}.")
    if not checkpoint.catalog.encoded and not checkpoint.catalog.refusals:
        return checkpoint  # a plain source needs no decoding, and what is of another type needs `dtype`
    return checkpoint.decode(_DECODED_AS[decode], skip=[escape(name) for name in keep])


def cast(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """Convert values; also tell whether all of them, NaN included, are what they were."""
    found = values.to(dtype)
    back = found.to(values.dtype)
    same = (back == values) | (values != values)
    return found, bool(same.all())
