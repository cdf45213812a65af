"""Portable checkpoints for large PyTorch models: one model, many layouts, exactly.

import transaxle as tx

ck = tx.open("Qwen3-30B-A3B/")          # a mapping; nothing is loaded, torch is not imported
tx.convert(ck, "out/", to="torchtitan")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transaxle.errors import CODES, Refusal, TransaxleError

__version__ = "0.1.0"

_LAZY = "transaxle._api"
"""Where everything below lives that is not imported above: it is loaded when it is first used."""

if TYPE_CHECKING:
    from transaxle._api import (
        Checkpoint,
        Comparison,
        Plan,
        Report,
        StoredTensor,
        Verification,
        convert,
        diff,
        open,  # noqa: A004
        plan,
        verify,
    )


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_LAZY), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CODES",
    "Checkpoint",
    "Comparison",
    "Plan",
    "Refusal",
    "Report",
    "StoredTensor",
    "TransaxleError",
    "Verification",
    "__version__",
    "convert",
    "diff",
    "open",
    "plan",
    "verify",
]
