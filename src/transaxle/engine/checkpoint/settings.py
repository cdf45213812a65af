"""Settings: what the user says about a checkpoint beside its path, as one value that every command passes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from transaxle.arguments import (
    Axes,
    Config,
    PathLike,
    Weights,
    check_flags,
    read_axes,
    read_config,
    read_optional_text,
    read_path,
)
from transaxle.errors import refuse
from transaxle.families import Families, builtin, with_rules
from transaxle.formats.storage.local import read_file
from transaxle.formats.storage.storage import NotJsonError, Storage, parsed
from transaxle.options import OPTIONS

CONFIG = "config.json"
LONGEST_CONFIG = 8 << 20
"""Cap on the bytes of a config; those that list every quantized layer have some hundred thousand."""
_AGAIN = "Correct it, or copy or download it again."
_AXES = "`transaxle info PATH` lists the axes of a checkpoint, each with its size: --axis takes these names."
LONGEST_TABLE = 1 << 18
"""Cap on the bytes of a rules file; the longest that ships has seven thousand."""


class Settings(msgspec.Struct, frozen=True):
    """How to read a checkpoint."""

    format: str | None = None
    """Container format; None: detected."""
    family: str | None = None
    """Family; None: recognised."""
    dialect: str | None = None
    """Dialect; None: recognised."""
    config: Mapping[str, Any] | None = None
    """config.json; None: the checkpoint's own."""
    axes: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Axis sizes that override everything."""
    families: Families = msgspec.field(default_factory=builtin)
    """Known families."""
    weights: Weights | None = None
    """Which weights to read where an optimizer keeps copies of its own; None: those of DeepSpeed's, not Megatron's."""
    optimizer: bool | None = None
    """Whether the optimizer's state is included; None: yes, except when writing `safetensors:hf`."""
    average: bool = False
    """Whether replicas of a DeepSpeed checkpoint that differ between ranks are replaced by their mean."""
    partial: bool = False
    """Whether it is deliberately a part of a model (one rank's, one stage's): tensors may be absent."""
    trained: frozenset[str] | None = None
    """Names, in the dialect wanted, of the parameters that have optimizer state there; None: see `translate`."""
    files: tuple[str, ...] = ()
    """Paths of config and rules as typed, if they are files."""


def settings(
    *,
    format: str | None = None,  # noqa: A002 - the contract's name
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    weights: Weights | None = None,
    optimizer: bool | None = None,
    average: bool = False,
) -> Settings:
    """Build settings from what the user wrote.

    Args:
        format: container format.
        family: model family.
        dialect: dialect of its names.
        config: the path of a config.json or of its folder, its content, or an object with `to_dict()`.
        axes: axis sizes.
        rules: path of a rules file.
        weights: of a checkpoint of DeepSpeed or Megatron, `fp32` (those the optimizer keeps) or `lp` (the model's own).
        optimizer: take the optimizer's state, or leave it; None: take it, except into `safetensors:hf`.
        average: take replicated parameters of a DeepSpeed checkpoint that differ between ranks as their mean.

    Raises:
        TypeError: an argument of a type that it cannot have.
        Refused: CORRUPT where the config or the rules do not parse, or are longer than 8 MiB and 256 KiB; UNSUPPORTED
            where they are no regular files.
        StorageError: IO where they cannot be read.
        UsageError: UNKNOWN_AXIS where no family has an axis of that name; AMBIGUOUS for other weights.
    """
    check_flags(average=average, **({} if optimizer is None else {"optimizer": optimizer}))
    if weights not in (None, *OPTIONS["weights"].choices):
        hint = f"Choose one of: {', '.join(OPTIONS['weights'].choices)}."
        raise refuse("AMBIGUOUS", f"weights cannot be {weights!r}", hint=hint)
    said_config = _file_of(read_config(config))
    table = None if rules is None else read_path("rules", rules)
    families = builtin() if table is None else with_rules(_text(table, LONGEST_TABLE), table)
    given = read_axes(axes)
    known = {axis for entry in families.entries.values() for axis in entry.axes}
    if not known.issuperset(given):
        known = {axis for entry in families.everything.entries.values() for axis in entry.axes}
    for axis in given:
        if axis not in known:
            raise refuse("UNKNOWN_AXIS", f"no family has an axis {axis!r}", hint=_AXES)
    return Settings(
        read_optional_text("format", format, "safetensors"),
        read_optional_text("family", family, "qwen3_moe"),
        read_optional_text("dialect", dialect, "hf"),
        model_config(said_config),
        given,
        families,
        weights,
        optimizer,
        average,
        files=tuple(path for path in (said_config, table) if isinstance(path, str)),
    )


def model_config(given: Config | None) -> Mapping[str, Any] | None:
    """Return the content of a config, as the user gave it; None where nothing is given.

    Raises:
        TypeError: it is no config.
        Refused: CORRUPT, UNSUPPORTED: its file is no JSON object, or no regular file.
        StorageError: IO where its file cannot be read.
    """
    found = _file_of(read_config(given))
    return parse_config(_text(found, LONGEST_CONFIG), found) if isinstance(found, str) else found


def _file_of(config: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    """Return the path of the config.json of a folder; anything else is what it is."""
    if not isinstance(config, str):
        return config
    # Of a path that cannot be examined, whoever reads it says why: `Path.is_dir` would raise.
    return str(Path(config, CONFIG)) if os.path.isdir(config) else config  # noqa: PTH112


def _text(path: str, most: int) -> str:
    try:
        return read_file(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse("CORRUPT", f"not UTF-8 text: {error}", file=str(path)) from None


def parse_config(text: str | bytes, file: str) -> Mapping[str, Any]:
    """Read a config.json.

    Raises:
        Refused: CORRUPT where it is no JSON object, or has a key twice.
    """
    try:
        config = parsed(text)
    except NotJsonError as error:
        raise refuse("CORRUPT", f"not JSON: {error}", file=file, hint=_AGAIN) from None
    if not isinstance(config, dict):
        raise refuse("CORRUPT", "not a JSON object", file=file, hint=_AGAIN)
    return config


def stored_config(storage: Storage, file: str = CONFIG) -> Mapping[str, Any]:
    """Read the config.json of a checkpoint's folder, or another config beside it; empty if it does not exist.

    Raises:
        Refused: CORRUPT.
        StorageError: IO.
    """
    if file not in storage.names():
        return {}
    size = storage.size(file)
    if size > LONGEST_CONFIG:
        raise refuse("CORRUPT", f"a config of {size} bytes is too long to be real", file=file)
    return parse_config(storage.read(file, 0, size), file)
