"""Options of `save` that callbacks of trainers pass on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from transaxle.arguments import Config, PathLike, Size, check_flags, check_keywords
from transaxle.engine.checkpoint.recognise import IDENTITY, check_dialect, pick_dialect, pick_family
from transaxle.engine.checkpoint.settings import settings
from transaxle.engine.plan.conversion import SHARD_SIZE
from transaxle.engine.plan.target_names import parse_to
from transaxle.live.save.save import read_settings


class Saving(TypedDict, total=False):
    """How a model is saved: keyword arguments of every function that saves one."""

    family: str | None
    """Model family, such as `qwen3_moe`; None: recognised."""
    dialect: str | None
    """Dialect of the model's names, such as `hf`; None: recognised."""
    config: Config | None
    """The model's config; None: `model.config`, where it has one."""
    axes: Mapping[str, int] | None
    """Axis sizes that override everything, such as `{"g": 8}`."""
    rules: PathLike | None
    """A file with families and dialects of your own."""
    shard_size: Size
    """Bytes of tensors per file."""
    sync: bool
    """Make everything durable before the target appears."""
    check_copies: bool
    """Compare what several ranks hold without a mesh that keeps it equal, and refuse what differs."""
    verify: bool
    """Read the checkpoint back once it is there, and compare every byte with what was written."""


UNSAID: dict[str, Any] = {"shard_size": SHARD_SIZE, "sync": True, "check_copies": True, "verify": False}
"""Defaults of the options that are not None."""


def check_options(function: str, to: str, options: Saving) -> None:
    """Refuse arguments of a save before there is anything to be saved.

    Raises:
        TypeError: an argument that there is not, or of a type that it cannot have.
        TransaxleError: a format, family or dialect that there is not; a config that cannot be read.
    """
    check_keywords(function, options, Saving.__annotations__)
    check_flags(**{name: options.get(name, True) for name in ("sync", "check_copies", "verify")})
    given: dict[str, Any] = {**dict.fromkeys(Saving.__annotations__), **UNSAID, **options}
    asked = read_settings("", to, optimizer=False, overwrite=False, **given)
    families = settings(rules=asked.rules, axes=asked.axes).families
    labels = [each for each in (parse_to(asked.to)[1], asked.dialect) if each and each != IDENTITY]
    if asked.family is not None:
        family = pick_family(asked.family, families)
        for label in labels:
            pick_dialect(family, label)
        return
    for label in labels:
        check_dialect(label, families)
