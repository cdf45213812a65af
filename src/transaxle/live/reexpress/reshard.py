"""Resharding: from tensors of one mesh and dialect into those of another, over the process group, without a disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from msgspec.structs import replace

from transaxle.arguments import Axes, Config, PathLike, read_flag, read_optional_text, suggests
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.settings import Settings, model_config, settings
from transaxle.formats.catalog import Container, nbytes
from transaxle.live.derived.settle import settle
from transaxle.live.model.destination import Landing, Rooms, check_filled, overlapping
from transaxle.live.model.source_view import View, view
from transaxle.live.model.state_tensors import State, leaves, shared_config
from transaxle.live.reexpress.agreed_match import matched
from transaxle.live.reexpress.ties import Sides
from transaxle.live.sharding.global_tensors import Census, census
from transaxle.live.sharding.memory import Replicas, container, memory_of
from transaxle.live.sharding.value_checks import check_zero
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import World
from transaxle.move.mover import Movement
from transaxle.move.workers import Item, limits
from transaxle.torch_tensors.placement import local_shape
from transaxle.torch_tensors.torch_arguments import Ranks


@dataclass(frozen=True)
class ReshardReport:
    """What `reshard` did on this rank."""

    tensors: int
    """Target tensors of which this rank holds anything."""
    bytes_written: int
    """Bytes written into them."""
    bytes_received: int
    """Bytes that came from other ranks."""
    seconds: float
    """Wall time."""
    missing: tuple[str, ...] = ()
    """Names that only the target has (`strict=False`); their values are unchanged."""
    unexpected: tuple[str, ...] = ()
    """Names that only the source has (`strict=False`), as the target would name them."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return asdict(self)


@suggests
def reshard(
    src_state: State,
    dst_state: State,
    group: Ranks | None = None,
    *,
    config: Config | None = None,
    strict: bool = True,
    family: str | None = None,
    dialect: str | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
) -> ReshardReport:
    """Copy live tensors into others of any placement and dialect of the same family; collective over the group.

    Args:
        src_state: model or state dict to read, such as a trainer's; a rank without any of it passes `{}`.
        dst_state: model or state dict to write, such as an inference engine's; likewise.
        group: ranks of both sides, a process group or a mesh of one dim; None: all.
        config: the model's config, a path, a mapping or an object with `to_dict()`; None:
            `src_state.config`, if a rank has one.
        strict: refuse names that only one side has; otherwise the report lists them. A tied name (an embedding and its
            head) may be missing on either side, after a proof that the two are the same.
        family: model family, such as `qwen3_moe`; None: recognised.
        dialect: dialect of the target's names, such as `hf`; None: recognised.
        axes: sizes of axes that override everything: `{"g": 8}`, "g=8" or ["g=8"].
        rules: path of a table of your own.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank, before anything is written; also if the two sides have no name in common. Only
            values for tensors that overlap in part, and cannot hold them all, are refused afterwards.
    """
    begin = time.monotonic()
    world = World(group)
    with world.together():
        read_flag("strict", strict)
        said = settings(family=family, axes=axes, rules=rules)
        dialect = read_optional_text("dialect", dialect, "hf")
        given_config = model_config(config)
        own_source, own_target = leaves(src_state).tensors, leaves(dst_state)
    world.require_alike({"strict": strict, "dialect": dialect, "family": family, "axes": said.axes})
    source_config = shared_config(src_state, given_config, world)
    source, target = census(own_source, world), census(own_target.tensors, world)
    sides = Sides(own_source, own_target.tensors, source, target, world)
    with world.together():
        memory = container(source, own_source, world.rank, source_config)
        seen = _seen(memory, target, said, dialect)
        check_zero(seen.checkpoint.checks, own_source)
    plan = matched(sides, own_target, seen.tensors, strict=strict)
    with world.together():
        taken = {name: tensor for name, tensor in own_target.tensors.items() if name in plan.stored}
        shared = overlapping(taken)
        landings = {n: Landing(tensor, plan.stored[n].dtype, apart=n in shared) for n, tensor in taken.items()}
        items, names = _items(target, plan.stored, Replicas(source))
        movement = Movement(items, memory_of(memory), Rooms(landings, names), limits(jobs=1), RankExchange(world))
    with world.together():
        received = movement.run()
    with world.together():
        check_filled(landings)
    with world.together():
        settle(own_target.islands, own_target.tensors)
    written = sum(landing.written for landing in landings.values())
    seconds = time.monotonic() - begin
    return ReshardReport(len(landings), written, received, seconds, plan.missing, plan.unexpected)


def _seen(memory: Container, target: Census, said: Settings, dialect: str | None) -> View:
    """Return the source, the memory of all ranks, in the target's dialect."""
    shapes = {name: tensor.shape for name, tensor in target.items()}
    return view(Checkpoint(memory, replace(said, partial=True), None, None), shapes, said.family, dialect)


def _items(target: Census, stored: Mapping[str, StoredTensor], replicas: Replicas) -> tuple[list[Item], list[str]]:
    """Return what is moved: each part of a target tensor that ranks hold; and by its key the name of its tensor."""
    items, names = list[Item](), list[str]()
    for name, tensor in target.items():
        if name not in stored:
            continue
        for held, ranks in tensor.boxes.items():
            size = nbytes(stored[name].dtype, local_shape(held))
            items += replicas.near(Item(len(names), size, stored[name].transfers(held), ranks))
            names.append(name)
    return items, names
