"""Saving: every rank writes its own byte ranges straight into the final files of the checkpoint, in one pass.

All ranks compute the same plan from what they hold together; nothing is consolidated afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from transaxle.arguments import (
    Axes,
    Config,
    Overwrite,
    PathLike,
    Size,
    check_flags,
    read_axes,
    read_optional_text,
    read_path,
    read_size,
    read_text,
    suggests,
)
from transaxle.encodings.plain_types import PLAIN
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY, check_dialect, pick_dialect, pick_family
from transaxle.engine.checkpoint.settings import LONGEST_TABLE, model_config
from transaxle.engine.checkpoint.settings import settings as reading_settings
from transaxle.engine.plan.conversion import Prepared, for_hub, make_plan, parse_to, ready
from transaxle.errors import gathered, refuse
from transaxle.formats.registry import is_one_file
from transaxle.formats.storage.local import read_file
from transaxle.formats.storage.storage import is_url
from transaxle.formats.store.location import on_this_machine
from transaxle.formats.training_state.state_groups import ParamGroup
from transaxle.live.model.published_codes import published
from transaxle.live.model.report import SaveReport
from transaxle.live.model.state_tensors import State, leaves, shared_config, unsavable
from transaxle.live.save.rank_shares import write
from transaxle.live.sharding.global_tensors import Census, census
from transaxle.live.sharding.memory import container
from transaxle.live.sharding.value_checks import compare_copies
from transaxle.live.training.extra_state import EXTRA, FILE, MODEL, STATE, state_of, written
from transaxle.live.training.group_options import all_groups, groups_of
from transaxle.live.training.optimizer_state import as_tensor, by_name, states_of, untrained
from transaxle.live.training.optimizers import AnyOptimizer
from transaxle.live.transport import wire
from transaxle.live.transport.world import Clock, World, comparable
from transaxle.move.hashing import digest
from transaxle.options import SHARD_SIZE
from transaxle.torch_tensors.placement import local_parts
from transaxle.torch_tensors.torch_arguments import Ranks

if TYPE_CHECKING:
    from transaxle.engine.compare.verification import Verification

SAVING = ("family", "dialect", "config", "axes", "rules", "shard_size", "sync", "check_copies", "verify")
"""Options of `save` that whatever saves the steps of a run has, too."""
_UNFINISHED: dict[tuple[int, str], Callable[[], object]] = {}
"""By process and target, what waits for the last save there in the background; a forked process has none."""


@dataclass(frozen=True)
class SaveSettings:
    """What is written and how: the arguments of `save`, checked, without the tensors."""

    dst: str
    """Folder or URL, as typed."""
    to: str
    """`FORMAT[:DIALECT]`."""
    family: str | None
    """Model family; None: recognised."""
    dialect: str | None
    """Dialect of the model's names; None: recognised."""
    config: Mapping[str, Any] | None
    """The model's config as the user gave it; None: the model's own."""
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
    verify: bool
    """Read it back."""
    axes: Mapping[str, int]
    """Axis sizes that the user gave."""
    rules: str | None
    """A file with families and dialects of the user's own."""


@dataclass(frozen=True)
class CollectedState:
    """What is saved, as all ranks hold it together."""

    own: Mapping[str, torch.Tensor]
    """This rank's tensors, by the names of the parts (`local_parts`); their local parts will do."""
    global_tensors: Census
    """The tensors of all ranks."""
    config: Mapping[str, Any] | None
    """The model's config, the same on all ranks."""
    groups: Sequence[ParamGroup]
    """The optimizers' groups, by the names of the parameters."""
    files: Mapping[str, bytes]
    """Files that travel along."""
    left_out: tuple[str, ...]
    """Names of entries that are not written."""
    untrained: tuple[str, ...]
    """Parameters of this rank that have gradients, and no optimizer."""


@suggests
def save(
    state: State,
    dst: PathLike,
    *,
    to: str = "hf",
    optimizer: AnyOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: Overwrite = False,
    group: Ranks | None = None,
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    shard_size: Size = SHARD_SIZE,
    sync: bool = True,
    check_copies: bool = True,
    verify: bool = False,
) -> SaveReport:
    """Save a model or state dict; collective over the group.

    Args:
        state: a model under any parallelism, or a state dict whose leaves are tensors, DTensors or numpy arrays.
        dst: folder or URL; it must not exist unless `overwrite`, and then stays readable until the new one is complete.
            To a service, one rank sends each file from beginning to end, and receives the other ranks' parts of it.
        to: `FORMAT[:DIALECT]`; `hf` is short for `safetensors:hf`.
        optimizer: the model's optimizer, whose state and groups are saved too, beside the weights. Also a list or dict
            of several, or a wrapper or container (ZeRO, accelerate, torchtitan).
        extra: other state that the run must remember, by name: plain data, or objects with `state_dict` and
            `load_state_dict` whose state is plain data, such as `Random()`, a scheduler, a data loader.
        overwrite: replace the checkpoint at `dst`. If its folder contains anything else, True refuses, and
            `"everything"` removes that too.
        group: the ranks that save together, a process group or a mesh of one dim; None: all.
        family: the model's family, such as `qwen3_moe`; None: recognised.
        dialect: dialect of the model's names, such as `hf`; None: recognised.
        config: the model's config: a path, a mapping or an object with `to_dict()`; None: `model.config`, where it has
            one.
        axes: axis -> size, which overrides everything, such as `{"g": 8}`.
        rules: path of a table of your own, with families and dialects.
        shard_size: bytes of tensors per file, 5_000_000_000 or "5GB".
        sync: make everything durable on disk before `dst` appears.
        check_copies: compare copies that several ranks have and no mesh keeps equal, and refuse those that differ.
        verify: read the checkpoint back on one rank once it is there, and compare every byte with what was written; the
            report has the verification.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank; the target is then as it was, unless `verify` found the error.
    """
    world, clock = World(group), Clock()
    settings_of = partial(
        read_settings, dst, to, optimizer=optimizer is not None, family=family, dialect=dialect, config=config,
        axes=axes, rules=rules, shard_size=shard_size, overwrite=overwrite, sync=sync, check_copies=check_copies,
        verify=verify,
    )  # fmt: skip
    with clock.stage("plan"):
        settings, collected = collect(settings_of, state, optimizer, extra, world)
    return write_checkpoint(settings, collected, world, clock)


def check_savable(
    state: State,
    dst: PathLike,
    *,
    to: str = "hf",
    group: Ranks | None = None,
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    shard_size: Size = SHARD_SIZE,
    sync: bool = True,
    check_copies: bool = True,
    verify: bool = False,
) -> None:
    """Plan a save without optimizer, and write nothing: long before the first one, it shows what would be refused.

    Collective. The arguments are those of `save`.

    Raises:
        TransaxleError: on every rank, as from `save`.
    """
    world = World(group)
    settings_of = partial(
        read_settings, dst, to, optimizer=False, family=family, dialect=dialect, config=config, axes=axes, rules=rules,
        shard_size=shard_size, overwrite=False, sync=sync, check_copies=check_copies, verify=verify,
    )  # fmt: skip
    settings, collected = collect(settings_of, state, None, None, world)
    with world.together():
        ready(_planned(settings, collected, world.rank))


def read_settings(
    dst: PathLike,
    to: str,
    *,
    optimizer: bool,
    family: str | None,
    dialect: str | None,
    config: Config | None,
    axes: Axes | None,
    rules: PathLike | None,
    shard_size: Size,
    overwrite: Overwrite,
    sync: bool,
    check_copies: bool,
    verify: bool,
) -> SaveSettings:
    """Check arguments of `save`, which has those of the same names; `optimizer`: whether one is given.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: a config that cannot be read.
    """
    check_flags(sync=sync, check_copies=check_copies, verify=verify)
    return SaveSettings(
        dst=read_path("dst", dst),
        to=read_text("to", to, "safetensors:hf"),
        family=read_optional_text("family", family, "qwen3_moe"),
        dialect=read_optional_text("dialect", dialect, "hf"),
        optimizer=optimizer,
        shard_size=read_size("shard_size", shard_size),
        overwrite=overwrite,
        sync=sync,
        check_copies=check_copies,
        verify=verify,
        axes=read_axes(axes),
        rules=None if rules is None else read_path("rules", rules),
        config=model_config(config),
    )


def check_options(to: str, options: Mapping[str, Any]) -> None:
    """Refuse arguments of a save before there is anything to be saved.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: a format, family or dialect that there is not; a config that cannot be read.
    """
    asked = read_settings("", to, optimizer=False, overwrite=False, **options)
    families = reading_settings(rules=asked.rules, axes=asked.axes).families
    labels = [each for each in (parse_to(asked.to)[1], asked.dialect) if each and each != IDENTITY]
    if asked.family is not None:
        family = pick_family(asked.family, families)
        for label in labels:
            pick_dialect(family, label)
        return
    for label in labels:
        check_dialect(label, families)


def collect(
    settings_of: Callable[[], SaveSettings],
    state: State,
    optimizer: AnyOptimizer | None,
    extra: Mapping[str, Any] | None,
    world: World,
) -> tuple[SaveSettings, CollectedState]:
    """Collect what all ranks hold; collective.

    Args:
        settings_of: returns what this rank asks for; where it raises, the other ranks do not wait for this one.
        state: see `save`.
        optimizer: see `save`.
        extra: see `save`.
        world: the ranks.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank.
    """
    groups: list[ParamGroup] = []
    states: dict[str, torch.Tensor] = {}
    without_optimizer: tuple[str, ...] = ()
    with world.together():
        settings = settings_of()
        contents = _contents(settings)
        wait_for(settings.dst)
        state_leaves = leaves(state, sharded=True)
        if problems := unsavable(state_leaves.tensors):
            raise gathered(problems)
        if optimizer is not None:
            optimizers, parameters = by_name(optimizer, state_leaves)
            groups, states = groups_of(optimizers, parameters), states_of(optimizers, parameters)
            without_optimizer = untrained(parameters, state_leaves.parameters)
        numbers, others = _numbers(state, state_leaves.others)
        own = {**state_leaves.tensors, **states, **numbers}
        owner = MODEL if isinstance(state, nn.Module) else STATE
        extra_states = {f"{owner}/{name}": value for name, value in others.items()}
        extra_states |= {f"{EXTRA}/{name}": state_of(value) for name, value in (extra or {}).items()}
    world.require_alike({**{field.name: getattr(settings, field.name) for field in fields(settings)}, **contents})
    extra_file = written(extra_states, world)
    global_tensors, config = census(own, world), shared_config(state, settings.config, world)
    left_out = state_leaves.untouched
    if for_hub(settings.to) and any(tensor.dtype not in PLAIN for tensor in global_tensors.values()):
        of_hub = published(own, global_tensors, state_leaves.weights, config, world)
        own, global_tensors, config = dict(of_hub.tensors), of_hub.everything, of_hub.config
        left_out = (*of_hub.left, *left_out)
    return settings, CollectedState(
        own={part: tensor for _, part, tensor in local_parts(own)},
        global_tensors=global_tensors,
        config=config,
        groups=all_groups(groups, world) if settings.optimizer else [],
        files={} if extra_file is None else {FILE: extra_file},
        left_out=left_out,
        untrained=without_optimizer,
    )


def _contents(settings: SaveSettings) -> dict[str, str | None]:
    """Return hashes of a table and of a config, by the arguments' names: ranks may have copies under several paths.

    Raises:
        Refused: UNSUPPORTED for a table that is no regular file or too long.
        StorageError: IO where it cannot be read.
    """
    table = None if settings.rules is None else read_file(settings.rules, LONGEST_TABLE)
    contents = {"rules": table, "config": None if settings.config is None else comparable(settings.config)}
    return {
        name: None if octets is None else f"one with the hash {digest(octets)}" for name, octets in contents.items()
    }


def _numbers(state: State, others: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Divide entries that are no tensors into numbers, which are saved as tensors without dims, and the rest."""
    if isinstance(state, nn.Module):
        return {}, dict(others)
    tensors = {name: as_tensor(value) for name, value in others.items()}
    numbers = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return numbers, {name: value for name, value in others.items() if name not in numbers}


def write_checkpoint(settings: SaveSettings, state: CollectedState, world: World, clock: Clock) -> SaveReport:
    """Write what all ranks hold; collective.

    Args:
        settings: what is written and how; the same on all ranks.
        state: what all ranks hold.
        world: the ranks.
        clock: takes the time of the stages.

    Raises:
        TransaxleError: on every rank; the target is then as it was, unless it was read back and is wrong.
    """
    with clock.stage("plan"), world.together():
        prepared = _planned(settings, state, world.rank)
        plan = ready(prepared)
    if settings.check_copies and world.size > 1:
        with clock.stage("check"):
            compare_copies(state.global_tensors, state.own, world)
    received, own = write(prepared, settings.dst, world, clock, overwrite=settings.overwrite, sync=settings.sync)
    verification = None
    if settings.verify:
        with clock.stage("verify"):
            verification = _read_back(settings.dst, world)
    return SaveReport(
        path=settings.dst,
        format=plan.format,
        dialect=plan.dialect,
        tensors=len(plan.tensors),
        bytes_written=sum(plan.files.values()),
        bytes_own=own,
        bytes_received=received,
        kept=plan.kept,
        ignored=(*plan.ignored, *state.left_out),
        notes=plan.notes,
        untrained=state.untrained,
        verification=verification,
        seconds=clock.total,
        stages=clock.stages,
    )


def _planned(settings: SaveSettings, state: CollectedState, rank: int) -> Prepared:
    """Plan the target's files, with the memory of all ranks as the source."""
    if is_one_file(settings.dst) and state.files:
        message = "states that are not tensors need separate files, but the target is a single file"
        raise refuse("UNSUPPORTED", message, file=settings.dst, hint="Give a folder.")
    memory = container(state.global_tensors, state.own, rank, state.config, groups=state.groups, files=state.files)
    reading = reading_settings(
        family=settings.family,
        dialect=settings.dialect,
        optimizer=settings.optimizer,
        axes=settings.axes,
        rules=settings.rules,
    )
    checkpoint = Checkpoint(memory, reading, None, None)
    return make_plan(checkpoint, settings.to, shard_size=settings.shard_size, target=settings.dst)


def _read_back(target: str, world: World) -> Verification:
    """Read on the first rank what all have written; collective.

    Raises:
        Refused: CORRUPT, on every rank.
    """
    from transaxle.engine.compare.verification import Verification
    from transaxle.engine.execute.read_back import check_saved

    wire.tellable(Verification)

    def read() -> Verification | None:
        return check_saved(target) if world.rank == world.ranks[0] else None

    verification = world.pool(read)[0]
    assert verification is not None  # of the first rank
    return verification


def add_unfinished(target: str, wait: Callable[[], object]) -> None:
    """Let later saves to a target wait for one that has begun in the background.

    Otherwise the earlier one could be committed last, and its older values would take the place of the newer ones.

    Args:
        target: folder or URL, as typed.
        wait: returns when the save has ended, successfully or not.
    """
    _UNFINISHED[_key(target)] = wait


def wait_for(target: str) -> None:
    """Return when no save of this process to a target, a folder or URL as typed, goes on any more."""
    key = _key(target)
    wait = _UNFINISHED.get(key)
    if wait is not None:
        wait()  # what Ctrl-C ends is waited for the next time
        if _UNFINISHED.get(key) is wait:
            del _UNFINISHED[key]


def _key(target: str) -> tuple[int, str]:
    place = on_this_machine(target)
    return os.getpid(), place.rstrip("/") if is_url(place) else os.path.abspath(place)  # noqa: PTH100 - links stay
