"""Options of `save` that callbacks of trainers pass on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transaxle.arguments import check_flags
from transaxle.engine.checkpoint.recognise import IDENTITY, check_dialect, pick_dialect, pick_family
from transaxle.engine.checkpoint.settings import settings
from transaxle.engine.plan.target_names import parse_to
from transaxle.live.save.save import read_settings

SAVING = ("family", "dialect", "config", "axes", "rules", "shard_size", "sync", "check_copies", "verify")
"""Options of `save` that whatever saves the steps of a run has, too."""


def check_options(to: str, options: Mapping[str, Any]) -> None:
    """Refuse arguments of a save before there is anything to be saved.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: a format, family or dialect that there is not; a config that cannot be read.
    """
    check_flags(**{name: options[name] for name in ("sync", "check_copies", "verify")})
    asked = read_settings("", to, optimizer=False, overwrite=False, **options)
    families = settings(rules=asked.rules, axes=asked.axes).families
    labels = [each for each in (parse_to(asked.to)[1], asked.dialect) if each and each != IDENTITY]
    if asked.family is not None:
        family = pick_family(asked.family, families)
        for label in labels:
            pick_dialect(family, label)
        return
    for label in labels:
        check_dialect(label, families)
