"""Settings: one value that contains the user's options for reading a checkpoint, such as its format and its family."""

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
from transaxle.formats.storage.storage import NotJsonError, Storage, parse_json
from transaxle.options import OPTIONS

CONFIG = "config.json"
LONGEST_CONFIG = 8 << 20
"""Largest size of a config file in bytes; a config that lists every quantized layer has about 100 kB."""
_AGAIN = "Correct the file, or copy or download it again."
_AXES = "`transaxle info PATH` lists the axes of a checkpoint, each with its size: --axis takes these names."
LONGEST_TABLE = 1 << 18
"""Largest size of a rules file (the user's table of tensor names) in bytes; the largest built-in table has seven
thousand bytes.
"""


class Settings(msgspec.Struct, frozen=True):
    """The user's options for reading a checkpoint."""

    format: str | None = None
    """Container format of the checkpoint, such as `safetensors`; None means that the format is detected."""
    family: str | None = None
    """Name of the model family; None means that the family is recognised from the checkpoint."""
    dialect: str | None = None
    """Label of the dialect of the tensor names, such as `hf`; None means that the dialect is recognised from the
    checkpoint.
    """
    config: Mapping[str, Any] | None = None
    """Content of the model's config; None means the config.json in the checkpoint's folder."""
    axes: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Axis -> size that the user gave; it overrides any size from the config or the checkpoint."""
    families: Families = msgspec.field(default_factory=builtin)
    """All known model families: the built-in families and those in the user's rules file."""
    weights: Weights | None = None
    """Which weights to read if an optimizer stores its own copies of them. None means DeepSpeed's copies of the
    weights, but not Megatron's copies.
    """
    optimizer: bool | None = None
    """Whether to include optimizer state; None means yes, except when `safetensors:hf` is written."""
    average: bool = False
    """Whether copies of a tensor that differ between the ranks of a DeepSpeed checkpoint are replaced by their mean."""
    ranks: str | None = None
    """Template for the names of the files of ranks, such as `model_rank{}.pt`; None means verl's names."""
    partial: bool = False
    """Whether the source is deliberately part of a model (of one rank or pipeline stage), so that tensors may be
    missing.
    """
    trained: frozenset[str] | None = None
    """Names, in the target dialect, of the parameters with optimizer state; for None see `translate`."""
    files: tuple[str, ...] = ()
    """Paths of the config file and the rules file as the user typed them; a value that was not given as a file has no
    path.
    """


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
    ranks: str | None = None,
) -> Settings:
    """Build `Settings` from the user's arguments.

    Args:
        format: container format of the checkpoint.
        family: name of the model family.
        dialect: dialect of the checkpoint's tensor names.
        config: the path of a config.json or of its folder, its content, or an object with `to_dict()`.
        axes: axis -> size, for the axis sizes that the user gives.
        rules: path of a rules file (the user's table of tensor names).
        weights: for checkpoints of DeepSpeed or Megatron: `fp32` (copies that the optimizer keeps) or `lp` (the model's
            own).
        optimizer: whether to include optimizer state; None means yes, except when `safetensors:hf` is written.
        average: whether to replace replicated parameters of a DeepSpeed checkpoint that differ between ranks by their
            mean.
        ranks: template for the names of the files of ranks, with `{}` for the rank.

    Raises:
        TypeError: if an argument has the wrong type.
        Refused: with code CORRUPT, if the config or the rules file does not parse, or is too long (config: 8 MiB,
            rules: 256 KiB); with code UNSUPPORTED, if one of the two is not a regular file.
        StorageError: with code IO, if the config or the rules file cannot be read.
        UsageError: with code UNKNOWN_AXIS, if no family has one of the given axes; with code AMBIGUOUS, if `weights` is
            neither `fp32` nor `lp`.
    """
    check_flags(average=average, **({} if optimizer is None else {"optimizer": optimizer}))
    if weights not in (None, *OPTIONS["weights"].choices):
        hint = f"Choose one of: {', '.join(OPTIONS['weights'].choices)}."
        raise refuse("AMBIGUOUS", f"weights cannot be {weights!r}", hint=hint)
    config_source = _config_path(read_config(config))
    table = None if rules is None else read_path("rules", rules)
    families = builtin() if table is None else with_rules(_text(table, LONGEST_TABLE), table)
    axis_sizes = read_axes(axes)
    axis_names = {axis for entry in families.entries.values() for axis in entry.axes}
    if not axis_names.issuperset(axis_sizes):
        axis_names = {axis for entry in families.everything.entries.values() for axis in entry.axes}
    for axis in axis_sizes:
        if axis not in axis_names:
            raise refuse("UNKNOWN_AXIS", f"no family has an axis {axis!r}", hint=_AXES)
    return Settings(
        read_optional_text("format", format, "safetensors"),
        read_optional_text("family", family, "qwen3_moe"),
        read_optional_text("dialect", dialect, "hf"),
        model_config(config_source),
        axis_sizes,
        families,
        weights,
        optimizer,
        average,
        read_optional_text("ranks", ranks, "model_rank{}.pt"),
        files=tuple(path for path in (config_source, table) if isinstance(path, str)),
    )


def model_config(config: Config | None) -> Mapping[str, Any] | None:
    """Return the content of the config that the user gave; None if the user gave no config.

    Raises:
        TypeError: if the argument has a type that no config has.
        Refused: with code CORRUPT, if the config file contains no JSON object; with code UNSUPPORTED, if it is not a
            regular file.
        StorageError: with code IO, if the config file cannot be read.
    """
    source = _config_path(read_config(config))
    return parse_config(_text(source, LONGEST_CONFIG), source) if isinstance(source, str) else source


def _config_path(config: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    """If the argument is a folder, return the path of its config.json; otherwise return the argument unchanged."""
    if not isinstance(config, str):
        return config
    # `Path.is_dir` would raise an error for a path that cannot be examined; the code that reads the file has a better
    # error.
    return str(Path(config, CONFIG)) if os.path.isdir(config) else config  # noqa: PTH112


def _text(path: str, limit: int) -> str:
    try:
        return read_file(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse("CORRUPT", f"not UTF-8 text: {error}", file=str(path)) from None


def parse_config(text: str | bytes, file: str) -> Mapping[str, Any]:
    """Parse the text of a config.json.

    Raises:
        Refused: with code CORRUPT, if the text is not a JSON object, or contains a key twice.
    """
    try:
        config = parse_json(text)
    except NotJsonError as error:
        raise refuse("CORRUPT", f"not JSON: {error}", file=file, hint=_AGAIN) from None
    if not isinstance(config, dict):
        raise refuse("CORRUPT", "not a JSON object", file=file, hint=_AGAIN)
    return config


def read_stored_config(storage: Storage, file: str = CONFIG) -> Mapping[str, Any]:
    """Read config.json, or a config file with a different name, from a checkpoint's folder; return {} if the file is
    absent.

    Raises:
        Refused: with code CORRUPT, if the file contains no JSON object.
        StorageError: with code IO, if the file cannot be read.
    """
    if file not in storage.names():
        return {}
    size = storage.size(file)
    if size > LONGEST_CONFIG:
        raise refuse("CORRUPT", f"a config of {size} bytes is too long to be real", file=file)
    return parse_config(storage.read(file, 0, size), file)
