"""Saving: every rank writes its own byte ranges straight into the final files of the checkpoint, in one pass.

All ranks compute the same plan from what they hold together; nothing is consolidated afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from transaxle.engine.checkpoint import Checkpoint
from transaxle.engine.plan import SHARD_SIZE, make_plan, ready
from transaxle.engine.settings import Settings
from transaxle.errors import refuse
from transaxle.formats.company import WHOLE
from transaxle.formats.groups import Group
from transaxle.live.census import Census, census
from transaxle.live.clock import Clock
from transaxle.live.config import shared_config
from transaxle.live.extras import EXTRA, FILE, MODEL, STATE, state_of, written
from transaxle.live.groups import all_groups, groups_of
from transaxle.live.leaves import State, leaves
from transaxle.live.memory import container
from transaxle.live.optimizer import as_tensor, names_of, states_of
from transaxle.live.report import SaveReport
from transaxle.live.world import World
from transaxle.live.writing import write


@dataclass(frozen=True)
class Holding:
    """What is to be saved, as all ranks hold it."""

    everything: Census
    """The tensors of all ranks."""
    groups: Sequence[Group]
    """The optimizer's groups, by the names of the parameters."""
    files: Mapping[str, bytes]
    """Files that travel along."""


@dataclass(frozen=True)
class Wish:
    """What is to be written, and how: everything but the tensors."""

    dst: str
    """Folder, as typed."""
    to: str
    """`FORMAT[:DIALECT]`."""
    family: str | None
    """Model family; None: recognised."""
    dialect: str | None
    """Dialect of the names; None: recognised."""
    config: Mapping[str, Any] | None
    """The model's config."""
    optimizer: bool
    """Whether optimizer state is among the tensors."""
    shard_size: int
    """Bytes of tensors per file."""
    overwrite: bool
    """Replace what is there."""
    sync: bool
    """Make everything durable first."""


def save(
    state: State,
    dst: str | Path,
    *,
    to: str = "hf",
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    family: str | None = None,
    dialect: str | None = None,
    config: Mapping[str, Any] | None = None,
    shard_size: int = SHARD_SIZE,
    overwrite: bool = False,
    sync: bool = True,
    group: dist.ProcessGroup | None = None,
) -> SaveReport:
    """Save a model or state dict; collective over the group.

    Args:
        state: a model under any parallelism, or a state dict whose leaves are tensors or DTensors.
        dst: folder or URL; it must not exist unless `overwrite`, and then stays readable until the new one is complete.
            A service takes files from their beginning to their end only: rank 0 sends them, and the others send to it.
        to: `FORMAT[:DIALECT]`; `hf` is short for `safetensors:hf`.
        optimizer: the model's optimizer, whose state and groups are saved too, beside the weights.
        extra: what else the run must remember, by name: plain data, or anything with `state_dict` and
            `load_state_dict` whose state is plain data, such as `Random()`, a scheduler, a data loader.
        family: model family; None: recognised.
        dialect: dialect of the model's names; None: recognised.
        config: the model's config; None: `model.config`, where it has one.
        shard_size: bytes of tensors per file.
        overwrite: replace the checkpoint at `dst`.
        sync: make everything durable before `dst` appears.
        group: the ranks that save together; None: all.

    Raises:
        TransaxleError: on every rank; the target is then as it was.
    """
    world, clock = World(group), Clock()
    with clock.stage("plan"):
        tensors, holding = held(state, optimizer, extra, world)
        told = shared_config(state, config, world)
    wish = Wish(
        str(dst),
        to,
        family,
        dialect,
        told,
        optimizer is not None,
        shard_size=shard_size,
        overwrite=overwrite,
        sync=sync,
    )
    return fulfil(wish, tensors, holding, world, clock)


def held(
    state: State, optimizer: Optimizer | None, extra: Mapping[str, Any] | None, world: World
) -> tuple[dict[str, torch.Tensor], Holding]:
    """Return what this rank holds, and what all ranks hold; collective.

    Args:
        state: model or state dict.
        optimizer: the model's optimizer, if its state belongs to it.
        extra: what else the run must remember.
        world: the ranks.

    Raises:
        TransaxleError: on every rank.
    """
    groups: Sequence[Group] = ()
    with world.together():
        found = leaves(state)
        tensors = dict(found.tensors)
        if optimizer is not None:
            named = names_of(optimizer, tensors)
            groups = groups_of(optimizer, named)
            tensors |= states_of(optimizer, named)
        numbers = {} if isinstance(state, nn.Module) else {n: as_tensor(value) for n, value in found.others.items()}
        tensors |= {name: number for name, number in numbers.items() if number is not None}
        rest = {name: value for name, value in found.others.items() if numbers.get(name) is None}
        owner = MODEL if isinstance(state, nn.Module) else STATE
        states = {f"{owner}/{name}": value for name, value in rest.items()}
        states |= {f"{EXTRA}/{name}": state_of(each) for name, each in (extra or {}).items()}
    text = written(states, world)
    files = {} if text is None else {FILE: text}
    return tensors, Holding(census(tensors, world), all_groups(groups, world), files)


def fulfil(wish: Wish, tensors: Mapping[str, torch.Tensor], holding: Holding, world: World, clock: Clock) -> SaveReport:
    """Write what a wish says; collective.

    Args:
        wish: what and how; the same on all ranks.
        tensors: what this rank holds; the local tensors will do.
        holding: what all ranks hold.
        world: the ranks.
        clock: takes the time of the stages.

    Raises:
        TransaxleError: on every rank; the target is then as it was.
    """
    with clock.stage("plan"), world.together():
        if wish.dst.endswith(WHOLE) and holding.files:
            message = "states that are no tensors need a file of their own, and the target is one file"
            raise refuse("UNSUPPORTED", message, file=wish.dst, hint="Give a folder.")
        everything, rank = holding.everything, world.rank
        source = container(everything, tensors, rank, wish.config, groups=holding.groups, files=holding.files)
        said = Settings(family=wish.family, dialect=wish.dialect, optimizer=wish.optimizer)
        checkpoint = Checkpoint(source, said, None, None)
        prepared = make_plan(checkpoint, wish.to, shard_size=wish.shard_size, target=wish.dst)
        plan = ready(prepared)
    received, own = write(prepared, wish.dst, world, clock, overwrite=wish.overwrite, sync=wish.sync)
    return SaveReport(
        path=wish.dst,
        format=plan.format,
        dialect=plan.dialect,
        tensors=len(plan.tensors),
        bytes_written=sum(plan.files.values()),
        bytes_own=own,
        bytes_received=received,
        kept=plan.kept,
        ignored=plan.ignored,
        seconds=clock.seconds,
    )
