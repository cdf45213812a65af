"""Settings: what the user says about a checkpoint beside its path, as one value that every command passes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transaxle.errors import refuse
from transaxle.families import Families, builtin, with_rules
from transaxle.formats.deepspeed.reader import Weights
from transaxle.formats.storage.local import read_file

CONFIG = "config.json"
LONGEST_CONFIG = 8 << 20
"""Cap on the bytes of a config; those that list every quantized layer have some hundred thousand."""
LONGEST_TABLE = 1 << 18
"""Cap on the bytes of a rules file; the longest that ships has seven thousand."""


@dataclass(frozen=True)
class Settings:
    """How to read a checkpoint."""

    format: str | None = None
    """Container format; None: detected."""
    family: str | None = None
    """Family; None: recognised."""
    dialect: str | None = None
    """Dialect; None: recognised."""
    config: Mapping[str, Any] | None = None
    """config.json; None: the checkpoint's own."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Axis sizes that override everything."""
    families: Families = field(default_factory=builtin)
    """Known families."""
    weights: Weights | None = None
    """Which weights of a DeepSpeed checkpoint to read; None: those that the optimizer keeps."""
    optimizer: bool | None = None
    """Whether the optimizer's state is included; None: yes, except when writing `safetensors:hf`."""
    average: bool = False
    """Whether replicas of a DeepSpeed checkpoint that differ between ranks are replaced by their mean."""
    partial: bool = False
    """Whether it is deliberately a part of a model (one rank's, one stage's): tensors may be absent."""
    files: tuple[str, ...] = ()
    """Paths of config and rules as typed, if they are files."""


def settings(
    *,
    format: str | None = None,  # noqa: A002 - the contract's name
    family: str | None = None,
    dialect: str | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    axes: Mapping[str, int] | None = None,
    rules: str | Path | None = None,
    weights: Weights | None = None,
    optimizer: bool | None = None,
    average: bool = False,
) -> Settings:
    """Build settings from what the user wrote.

    Args:
        format: container format.
        family: model family.
        dialect: dialect of its names.
        config: a mapping, or the path of a config.json.
        axes: axis sizes.
        rules: path of a rules file.
        weights: of a DeepSpeed checkpoint, `fp32` (those the optimizer keeps) or `lp` (the module's own).
        optimizer: take the optimizer's state, or leave it; None: take it, except into `safetensors:hf`.
        average: take replicated parameters of a DeepSpeed checkpoint that differ between ranks as their mean.

    Raises:
        Refused: CORRUPT where the config or the rules do not parse, or are longer than 8 MiB and 256 KiB; UNSUPPORTED
            where they are no regular files.
        StorageError: IO where they cannot be read.
        UsageError: UNKNOWN_AXIS where no family has an axis of that name.
    """
    files = tuple(str(path) for path in (config, rules) if isinstance(path, str | Path))
    families = builtin() if rules is None else with_rules(_text(rules, LONGEST_TABLE), str(rules))
    given = dict(axes or {})
    known = {axis for entry in families.entries.values() for axis in entry.axes}
    for axis in given:
        if axis not in known:
            raise refuse("UNKNOWN_AXIS", f"no family has an axis {axis!r}", hint=f"axes: {', '.join(sorted(known))}")
    if config is not None and not isinstance(config, Mapping):
        config = parse_config(_text(config, LONGEST_CONFIG), str(config))
    return Settings(format, family, dialect, config, given, families, weights, optimizer, average, files=files)


def _text(path: str | Path, most: int) -> str:
    try:
        return read_file(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse("CORRUPT", f"not UTF-8 text: {error}", file=str(path)) from None


def parse_config(text: str | bytes, file: str) -> Mapping[str, Any]:
    """Read a config.json.

    Raises:
        Refused: CORRUPT where it is no JSON object.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse("CORRUPT", f"not JSON: {error}", file=file) from None
    if not isinstance(config, dict):
        raise refuse("CORRUPT", "not a JSON object", file=file)
    return config
