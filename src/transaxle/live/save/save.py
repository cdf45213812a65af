"""Saving: every rank writes its own byte ranges straight into the final files of the checkpoint, in one pass.

All ranks compute the same plan from what they hold together; nothing is consolidated afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from transaxle.arguments import (
    Config,
    PathLike,
    Size,
    check_keywords,
    read_config,
    read_optional_text,
    read_path,
    read_size,
    read_text,
)
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.settings import Settings, model_config
from transaxle.engine.plan.conversion import SHARD_SIZE, for_hub, make_plan, ready
from transaxle.errors import gathered, refuse
from transaxle.formats.registry import is_one_file
from transaxle.formats.staging.belongings import Overwrite
from transaxle.formats.training_state.state_groups import Group
from transaxle.live.derived.settle import unnamed
from transaxle.live.model.live_config import shared_config
from transaxle.live.model.published_codes import published
from transaxle.live.model.report import SaveReport
from transaxle.live.model.state_tensors import State, leaves, unsavable
from transaxle.live.save.writing import write
from transaxle.live.sharding.global_tensors import Census, census
from transaxle.live.sharding.memory import container
from transaxle.live.sharding.replica_check import compare_copies
from transaxle.live.tensors.clock import Clock
from transaxle.live.training.extra_state import EXTRA, FILE, MODEL, STATE, state_of, written
from transaxle.live.training.group_options import all_groups, groups_of
from transaxle.live.training.optimizer_state import as_tensor, names_of, states_of, untrained
from transaxle.live.training.optimizers import AnyOptimizer, apart
from transaxle.live.transport.world import World
from transaxle.torch_tensors.torch_arguments import Ranks


class Saving(TypedDict, total=False):
    """How a model is saved: keyword arguments of every function that saves one."""

    family: str | None
    """Model family, such as `qwen3_moe`; None: recognised."""
    dialect: str | None
    """Dialect of the model's names, such as `hf`; None: recognised."""
    config: Config | None
    """The model's config; None: `model.config`, where it has one."""
    shard_size: Size
    """Bytes of tensors per file."""
    sync: bool
    """Make everything durable before the target appears."""
    check_copies: bool
    """Compare what several ranks hold without a mesh that keeps it equal, and refuse what differs."""


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
    overwrite: Overwrite
    """Replace what is there."""
    sync: bool
    """Make everything durable first."""
    check_copies: bool
    """Compare what several ranks hold."""
    left: tuple[str, ...] = ()
    """Names of what is held and not written."""
    untrained: tuple[str, ...] = ()
    """Names of parameters of this rank that have gradients, and no optimizer."""


@dataclass(frozen=True)
class Request:
    """What is asked of `save` and `async_save`: their arguments, which are documented there."""

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
    shard_size: Size = SHARD_SIZE
    """Bytes of tensors per file."""
    overwrite: Overwrite = False
    """Replace what is there."""
    sync: bool = True
    """Make everything durable first."""
    check_copies: bool = True
    """Compare what several ranks hold."""

    def wish(self, config: Mapping[str, Any] | None) -> Wish:
        """Return it without the tensors.

        Args:
            config: the model's config, as all ranks know it.

        Raises:
            TypeError: an argument of a type that it cannot have.
        """
        return Wish(
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
        )


def check_options(function: str, to: str, options: Saving) -> None:
    """Refuse arguments of a save before there is anything to be saved.

    Raises:
        TypeError: an argument that there is not, or of a type that it cannot have.
    """
    check_keywords(function, options, Saving.__annotations__)
    read_config(options.get("config"))
    Request({}, "", to, **options).wish(None)


def save(
    state: State,
    dst: PathLike,
    *,
    to: str = "hf",
    optimizer: AnyOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: Overwrite = False,
    group: Ranks | None = None,
    **options: Unpack[Saving],
) -> SaveReport:
    """Save a model or state dict; collective over the group.

    Args:
        state: a model under any parallelism, or a state dict whose leaves are tensors or DTensors.
        dst: folder or URL; it must not exist unless `overwrite`, and then stays readable until the new one is complete.
            A service takes files from their beginning to their end only: each is sent by one rank, which gets from the
            others what they have of it.
        to: `FORMAT[:DIALECT]`; `hf` is short for `safetensors:hf`.
        optimizer: the model's optimizer, whose state and groups are saved too, beside the weights. Also several in a
            list or dict, and a wrapper or container of some (ZeRO, accelerate, torchtitan).
        extra: what else the run must remember, by name: plain data, or anything with `state_dict` and
            `load_state_dict` whose state is plain data, such as `Random()`, a scheduler, a data loader.
        overwrite: replace the checkpoint at `dst`. Where its folder holds anything else, that is refused, or goes too
            if this is `"everything"`.
        group: the ranks that save together, a process group or a mesh of one dim; None: all.
        **options: `family` (None: recognised), `dialect` (of the model's names; None: recognised), `config` (a path, a
            mapping or an object with `to_dict()`; None: `model.config`, where it has one), `shard_size` (bytes of
            tensors per file, 5_000_000_000 or "5GB"), `sync` (make everything durable before `dst` appears),
            `check_copies` (compare what several ranks hold without a mesh that keeps it equal, and refuse what
            differs).

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank; the target is then as it was.
    """
    check_keywords("save", options, Saving.__annotations__)
    request = Request(state, dst, to, optimizer, extra, overwrite=overwrite, **options)
    world, clock = World(group), Clock()
    with clock.stage("plan"):
        tensors, holding, wish = held(request, world)
    return fulfil(wish, tensors, holding, world, clock)


def held(request: Request, world: World) -> tuple[dict[str, torch.Tensor], Holding, Wish]:
    """Return what this rank holds, what all ranks hold, and what is to be done with it; collective.

    Args:
        request: what this rank was asked.
        world: the ranks.

    Raises:
        TransaxleError: on every rank.
    """
    state, optimizer = request.state, request.optimizer
    groups: Sequence[Group] = ()
    alone: tuple[str, ...] = ()
    with world.together():
        asked, given_config = request.wish(None), model_config(request.config)
        found = leaves(state)
        tensors = dict(found.tensors)
        if problems := unsavable(tensors):
            raise gathered(problems)
        if optimizer is not None:
            optimizers = apart(optimizer)
            nameless = unnamed((parameter for _, _, parameter in optimizers.parameters()), found.islands)
            if nameless:
                raise gathered(nameless)
            named = names_of(optimizers, found.parameters)
            groups = groups_of(optimizers, named)
            tensors |= states_of(optimizers, named)
            alone = untrained(named, found.parameters)
        numbers = {} if isinstance(state, nn.Module) else {n: as_tensor(value) for n, value in found.others.items()}
        tensors |= {name: number for name, number in numbers.items() if number is not None}
        rest = {name: value for name, value in found.others.items() if numbers.get(name) is None}
        owner = MODEL if isinstance(state, nn.Module) else STATE
        states = {f"{owner}/{name}": value for name, value in rest.items()}
        states |= {f"{EXTRA}/{name}": state_of(each) for name, each in (request.extra or {}).items()}
    _check_alike(asked, world)
    text = written(states, world)
    files = {} if text is None else {FILE: text}
    everything, config = census(tensors, world), shared_config(state, given_config, world)
    wish = replace(request.wish(config), untrained=alone)
    if for_hub(request.to):
        made = published(tensors, everything, found.weights, config, world)
        tensors, everything = dict(made.tensors), made.everything
        wish = replace(wish, config=made.config, left=made.left)
    return tensors, Holding(everything, all_groups(groups, world), files), wish


def _check_alike(asked: Wish, world: World) -> None:
    """Prove that all ranks ask for the same; collective.

    Raises:
        UsageError: AMBIGUOUS, on every rank.
    """
    first, *others = world.gather(asked)
    for rank, other in zip(world.ranks[1:], others, strict=True):
        if other != first:
            unlike = next(each.name for each in fields(Wish) if getattr(other, each.name) != getattr(first, each.name))
            told = f"rank {rank} gave {getattr(other, unlike)!r}, rank {world.ranks[0]} {getattr(first, unlike)!r}"
            raise refuse("AMBIGUOUS", f"{unlike}: {told}", hint="give the same arguments on all ranks")


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
        if is_one_file(wish.dst) and holding.files:
            message = "states that are no tensors need a file of their own, and the target is one file"
            raise refuse("UNSUPPORTED", message, file=wish.dst, hint="Give a folder.")
        everything, rank = holding.everything, world.rank
        source = container(everything, tensors, rank, wish.config, groups=holding.groups, files=holding.files)
        said = Settings(family=wish.family, dialect=wish.dialect, optimizer=wish.optimizer)
        checkpoint = Checkpoint(source, said, None, None)
        prepared = make_plan(checkpoint, wish.to, shard_size=wish.shard_size, target=wish.dst)
        plan = ready(prepared)
    if wish.check_copies:
        with clock.stage("check"):
            compare_copies(everything, tensors, world)
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
        ignored=(*plan.ignored, *wish.left),
        untrained=wish.untrained,
        seconds=clock.seconds,
    )
