"""Adapters of the package peft (such as LoRA adapters), whose tensors are added to the tensors of a base model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transaxle.encodings.conventions.scheme import SECTION
from transaxle.engine.checkpoint.settings import CONFIG, model_config, read_stored_config
from transaxle.errors import refuse
from transaxle.formats.catalog import Container
from transaxle.formats.registry import ADAPTER_CONFIG

if TYPE_CHECKING:
    from transaxle.engine.adapter_files import Express

ADAPTED = "base_model."
"""Prefix of the names of a peft adapter's tensors."""
ADAPTER_STEM = "adapter_model"
"""Stem (name without suffix) of the only file in which peft looks for the tensors of an adapter."""
_KIND, _BASE = "peft_type", "base_model_name_or_path"
_HINT = (
    "To load it: tx.load(peft_model, …). To merge it:  transaxle convert BASE OUT --to hf --merge ADAPTER. To keep its "
    "names:  --to safetensors:identity. For another dialect, give its base's config:  --config BASE/config.json --to "
    "DIALECT."
)


def adapter_config(container: Container) -> Mapping[str, Any] | None:
    """Return the content of a checkpoint's adapter_config.json; None if the checkpoint is not an adapter.

    Raises:
        Refused: with code CORRUPT, if adapter_config.json is not valid JSON.
    """
    if ADAPTER_CONFIG not in container.carried:
        return None
    config = read_stored_config(container.storage, ADAPTER_CONFIG)
    return config if _KIND in config else None


def check_model(container: Container) -> None:
    """Refuse a checkpoint that is an adapter, because the families' tables of tensor names read only whole models.

    Raises:
        UsageError: with code UNKNOWN_FAMILY, if the checkpoint is an adapter.
        Refused: with code CORRUPT, if adapter_config.json is not valid JSON.
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


def base_config(container: Container, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of an adapter's base model: the user's, or else that in the folder which the adapter names.

    Args:
        container: files of the adapter.
        config: content of the config.json that the user gave; empty without one.

    Raises:
        UsageError: with code UNKNOWN_FAMILY, if there is neither.
    """
    folder = (adapter_config(container) or {}).get(_BASE)
    if not config and isinstance(folder, str) and folder and Path(folder, CONFIG).is_file():
        config = model_config(folder) or {}
    if not config:
        hint = "Give the base model's config:  --config BASE/config.json (config=)."
        raise refuse("UNKNOWN_FAMILY", "an adapter does not say what its base is like, and no config does", hint=hint)
    return config


def in_dialect(container: Container, config: Mapping[str, Any], dialect: str, express: Express) -> Container:
    """Return the files of an adapter for the same base model in a different dialect of tensor names.

    Args:
        container: files of the adapter.
        config: content of the base model's config.json.
        dialect: label of the dialect to write.
        express: function that opens a container of computed tensors as a checkpoint of the base model; see
            `convert_adapter`.

    Raises:
        TransaxleError: any error of `convert_adapter`; with code UNKNOWN_FAMILY, if the base model's config is missing.
    """
    from transaxle.engine.adapter_files import convert_adapter

    adapter_settings = ADAPTER_CONFIG, adapter_config(container) or {}
    plain = {key: value for key, value in base_config(container, config).items() if key != SECTION}
    return convert_adapter(container, adapter_settings, plain, dialect, express)
