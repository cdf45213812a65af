"""What a save is asked for: the arguments of `save` and `async_save`, what all ranks must give alike, and its turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from transaxle.arguments import (
    Config,
    Overwrite,
    PathLike,
    Size,
    check_flags,
    check_keywords,
    read_axes,
    read_optional_text,
    read_path,
    read_size,
    read_text,
)
from transaxle.engine.checkpoint.recognise import IDENTITY, check_dialect, pick_dialect, pick_family
from transaxle.engine.checkpoint.settings import LONGEST_TABLE, model_config, settings
from transaxle.engine.plan.conversion import SHARD_SIZE
from transaxle.engine.plan.target_names import parse_to
from transaxle.formats.staging.location import on_this_machine
from transaxle.formats.storage.local import read_file
from transaxle.formats.storage.storage import is_url
from transaxle.live.model.state_tensors import State
from transaxle.live.training.optimizers import AnyOptimizer
from transaxle.live.transport.world import World, comparable
from transaxle.move.hashing import digest

_WAITS: dict[tuple[int, str], Callable[[], object]] = {}
"""For each process and target, what waits for the last save there in the background; a forked process has none."""


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
"""Where options stand that are not given, if not at None."""


@dataclass(frozen=True)
class SaveSettings:
    """What is written and how: everything but the tensors."""

    dst: str
    """Folder or URL, as typed."""
    to: str
    """`FORMAT[:DIALECT]`."""
    family: str | None
    """Model family; None: recognised."""
    dialect: str | None
    """Dialect of the model's names; None: recognised."""
    config: Mapping[str, Any] | None
    """The model's config."""
    optimizer: bool
    """Whether optimizer state is among the tensors."""
    shard_size: int
    """Bytes of tensors per file."""
    overwrite: Overwrite
    """Replace what is there."""
    sync: bool
    """Make everything durable first."""
    check_copies: bool
    """Compare what several ranks hold."""
    verify: bool = False
    """Read it back."""
    left: tuple[str, ...] = ()
    """Entries that are held and not written."""
    untrained: tuple[str, ...] = ()
    """Parameters of this rank that have gradients, and no optimizer."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Axis sizes that the user gave."""
    rules: str | None = None
    """A file with families and dialects of the user's own."""


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of `save` and `async_save`, which document them."""

    state: State
    """Model or state dict."""
    dst: PathLike
    """Folder or URL."""
    to: str = "hf"
    """`FORMAT[:DIALECT]`."""
    optimizer: AnyOptimizer | None = None
    """The model's optimizer, or several."""
    extra: Mapping[str, Any] | None = None
    """What else the run must remember."""
    family: str | None = None
    """Model family."""
    dialect: str | None = None
    """Dialect of the model's names."""
    config: Config | None = None
    """The model's config."""
    axes: Mapping[str, int] | None = None
    """Axis sizes."""
    rules: PathLike | None = None
    """A file with families and dialects."""
    shard_size: Size = SHARD_SIZE
    """Bytes of tensors per file."""
    overwrite: Overwrite = False
    """Replace what is there."""
    sync: bool = True
    """Make everything durable first."""
    check_copies: bool = True
    """Compare what several ranks hold."""
    verify: bool = False
    """Read it back."""

    def settings(self, config: Mapping[str, Any] | None) -> SaveSettings:
        """Return it without the tensors.

        Args:
            config: the model's config, as all ranks know it.

        Raises:
            TypeError: an argument of a type that it cannot have.
        """
        return SaveSettings(
            read_path("dst", self.dst),
            read_text("to", self.to, "safetensors:hf"),
            read_optional_text("family", self.family, "qwen3_moe"),
            read_optional_text("dialect", self.dialect, "hf"),
            config,
            self.optimizer is not None,
            read_size("shard_size", self.shard_size),
            self.overwrite,
            self.sync,
            self.check_copies,
            self.verify,
            axes=read_axes(self.axes),
            rules=None if self.rules is None else read_path("rules", self.rules),
        )


def check_options(function: str, to: str, options: Saving) -> None:
    """Refuse arguments of a save before there is anything to be saved.

    Raises:
        TypeError: an argument that there is not, or of a type that it cannot have.
        TransaxleError: a format, family or dialect that there is not; a config that cannot be read.
    """
    check_keywords(function, options, Saving.__annotations__)
    check_flags(**{name: options.get(name, True) for name in ("sync", "check_copies", "verify")})
    asked = SaveRequest({}, "", to, **options).settings(model_config(options.get("config")))
    families = settings(rules=asked.rules, axes=asked.axes).families
    labels = [each for each in (parse_to(asked.to)[1], asked.dialect) if each and each != IDENTITY]
    if asked.family is not None:
        family = pick_family(asked.family, families)
        for label in labels:
            pick_dialect(family, label)
        return
    for label in labels:
        check_dialect(label, families)


def contents(settings: SaveSettings, config: Mapping[str, Any] | None) -> dict[str, str | None]:
    """Return what stands for the contents of a table and of a config, by the arguments' names.

    Args:
        settings: what is written and how.
        config: as the user gave it; None: nothing given.

    Raises:
        Refused: UNSUPPORTED for a table that is no regular file or too long.
        StorageError: IO where it cannot be read.
    """
    table = None if settings.rules is None else read_file(settings.rules, LONGEST_TABLE)
    octets = {"rules": table, "config": None if config is None else comparable(config)}
    return {name: None if each is None else f"one with the hash {digest(each)}" for name, each in octets.items()}


def check_alike(settings: SaveSettings, read: Mapping[str, str | None], world: World) -> None:
    """Prove that all ranks ask for the same; collective.

    Args:
        settings: what is written and how; tables may have several paths.
        read: see `contents`.
        world: the ranks.

    Raises:
        UsageError: AMBIGUOUS, on every rank.
    """
    world.require_alike({**{each.name: getattr(settings, each.name) for each in fields(settings)}, **read})


def goes_on(target: str, wait: Callable[[], object]) -> None:
    """Say that a save in the background has begun: a later one to the same place waits for it.

    Otherwise the earlier one could be committed last, and its older values would take the place of the newer ones.

    Args:
        target: folder or URL, as typed.
        wait: returns when the save has ended, successfully or not.
    """
    _WAITS[_key(target)] = wait


def wait_for(target: str) -> None:
    """Return when no save of this process to a target, a folder or URL as typed, goes on any more."""
    key = _key(target)
    wait = _WAITS.get(key)
    if wait is not None:
        wait()  # what Ctrl-C ends is waited for the next time
        if _WAITS.get(key) is wait:
            del _WAITS[key]


def _key(target: str) -> tuple[int, str]:
    place = on_this_machine(target)
    return os.getpid(), place.rstrip("/") if is_url(place) else os.path.abspath(place)  # noqa: PTH100 - links stay
