"""Adapters: peft's folders, whose tensors are added to those of a model and mean nothing without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transaxle.engine.checkpoint.settings import stored_config
from transaxle.errors import refuse
from transaxle.formats.catalog.catalog import Container

ADAPTER_CONFIG = "adapter_config.json"
"""peft's description of an adapter."""
_KIND, _BASE = "peft_type", "base_model_name_or_path"
_HINT = (
    "Load it with tx.load(peft_model, …), merge it:  transaxle convert BASE OUT --to hf --merge ADAPTER, or "
    "keep its names:  --to FORMAT:identity."
)


def adapter_config(container: Container) -> Mapping[str, Any] | None:
    """Return what a checkpoint says of itself as an adapter; None for one that is a model.

    Raises:
        Refused: CORRUPT.
    """
    if ADAPTER_CONFIG not in container.carried:
        return None
    config = stored_config(container.storage, ADAPTER_CONFIG)
    return config if _KIND in config else None


def check_model(container: Container) -> None:
    """Refuse an adapter, whose tensors no table may read as a model's.

    Raises:
        UsageError: UNKNOWN_FAMILY for an adapter.
        Refused: CORRUPT.
    """
    config = adapter_config(container)
    if config is not None:
        base = config.get(_BASE) or "an unnamed model"
        description = f"a {str(config[_KIND])[:40]} adapter of {str(base)[:200]}"
        raise refuse(
            "UNKNOWN_FAMILY",
            f"{description}: an adapter is not a whole model, and no table describes its tensors",
            hint=_HINT,
        )
