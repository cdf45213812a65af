"""Plain types: the floating-point types of values that are not encoded, by their safetensors codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Wide = Literal["BF16", "F16", "F32"]
"""Code of a type that values are encoded from, or decoded or cast to."""
WIDE: tuple[str, ...] = ("BF16", "F16", "F32")
"""All of them."""
PLAIN = frozenset({"F64", *WIDE})
"""Codes of the types that can be cast."""
CASTS: Mapping[str, Wide] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Types that users can cast to -> their codes."""
