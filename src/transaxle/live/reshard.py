"""Models with other shardings: agreeing on a match, moving values, and describing what each rank has.

**Resharding**: from tensors of one mesh and dialect into those of another, over the process group, without a disk.

What is copied between two live states, as all ranks have agreed: every problem of every rank is found before.

Who holds what of a live model, told by its ranks to each other, without looking at a value.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from transaxle.arguments import Axes, Config, PathLike, read_flag, read_optional_text, suggests
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.settings import Settings, model_config, settings
from transaxle.engine.checkpoint_facts import HeldTensor, Sharding
from transaxle.errors import Refusal, gathered, refuse
from transaxle.formats.catalog import Container, nbytes
from transaxle.live.derived import settle, untaken
from transaxle.live.global_tensors import Census, census
from transaxle.live.memory import Replicas, check_zero, container, memory_of
from transaxle.live.model.destination import Landing, Rooms, check_filled, overlapping
from transaxle.live.model.source_view import View, compared, left_out, unmatched, view
from transaxle.live.model.state_tensors import Leaves, State, leaves, shared_config, unwritable
from transaxle.live.ties import Sides, filled_by_ties, spare, torn
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import World
from transaxle.move.mover import Movement
from transaxle.move.workers import Item, limits
from transaxle.torch_tensors import Ranks, local_shape

if TYPE_CHECKING:
    import torch


_CAST = "Resharding never changes dtypes. Give both sides the same, for example {name: tensor.to(torch.bfloat16)}."
_SHOWN = 3
"""Names of each side that an error shows."""


@dataclass(frozen=True)
class Match:
    """What all ranks have agreed to copy."""

    stored: Mapping[str, StoredTensor]
    """The source's tensors by the target's names."""
    missing: tuple[str, ...]
    """Names that only the target has."""
    unexpected: tuple[str, ...]
    """Names that only the source has."""


def matched(
    sides: Sides,
    own_target: Leaves,
    tensors: Callable[[], Mapping[str, StoredTensor]],
    *,
    strict: bool,
    others: Callable[[], list[Refusal]] = list,
    hint: str = _CAST,
    once: bool = True,
) -> Match:
    """Match both sides and gather every problem; collective.

    Args:
        sides: what is copied from and to.
        own_target: what this rank's target holds.
        tensors: returns the source's tensors by the target's names.
        strict: refuse names that only one side has.
        others: returns what else stands against it.
        hint: what to do about types that differ.
        once: the values of now are all that is copied: then tensors that are equal now count as one.

    Raises:
        TransaxleError: on every rank.
    """
    world = sides.world
    with world.together():
        stored = tensors()
        differences, missing, unexpected = compared(sides.target, stored, optimizer=True)
        problems = [
            dataclasses.replace(each, hint=hint) if each.code == "DTYPE_MISMATCH" else each for each in differences
        ]
        unloadable_modules, omitted = untaken(() if own_target.kept else own_target.islands)
        problems += [*unwritable(sides.own_target), *own_target.kept, *unloadable_modules, *others()]
    ties = filled_by_ties(sides, stored) | spare(sides, stored, unexpected, once=once)
    problems += torn(sides, stored, once=once)
    missing, unexpected = (tuple(name for name in names if name not in ties) for names in (missing, unexpected))
    with world.together():
        if not any(name in stored for name in sides.target) and (sides.target or sides.source):
            shown = (", ".join([*names][:_SHOWN]) or "(none)" for names in (sides.target, stored))
            message = "target and source have no tensor name in common\ntarget: {}\nsource: {}".format(*shown)
            raise refuse(
                "UNKNOWN_FAMILY",
                message,
                hint="Check that both are the same model; if they are, give family= and dialect=.",
            )
        if strict:
            problems += [*unmatched(missing, unexpected), *left_out(omitted)]
        if problems:
            raise gathered(problems)
    return Match(stored, missing, unexpected)


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


def sharding(state: State, *, group: Ranks | None = None) -> Sharding:
    """Tell who holds what of a live model; collective: all ranks call it, and all get the same.

    Only names, types, shapes and placements are exchanged. `tx.report(found, "sharding.html")` draws it, on one rank.

    Args:
        state: a module, or a state dict of tensors and DTensors; of any placements, also on the meta device.
        group: the ranks; None: all, or this process alone where there is no process group.

    Returns:
        The ranks with what each holds of every tensor; its `rank_bytes`, `imbalance` and `spare_bytes` sum up.

    Raises:
        Refused: on every rank: SHAPE_MISMATCH, DTYPE_MISMATCH where ranks differ; UNSUPPORTED for placements that are
            not known and for sharded state dicts; INCOMPLETE where a rank of a tensor's mesh has no such tensor.
    """
    world = World(group)
    with world.together():
        tensors = leaves(state).tensors
        names: dict[int, str] = {}
        own: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        for name, tensor in tensors.items():
            first = names.setdefault(id(tensor), name)
            if first == name:
                own[name] = tensor
            else:
                aliases[name] = first
    everything = census(own, world)
    told = world.pool(lambda: (aliases, _coordinates(own.values())))
    meshes = dict(zip(world.ranks, (places for _, places in told), strict=True))
    aliases = {name: to for each, _ in told for name, to in each.items()}
    held = tuple(HeldTensor(each.name, each.dtype, each.shape, each.held) for each in everything.values())
    return Sharding(tuple(world.ranks), held, aliases, _without_ambiguous(meshes))


def _coordinates(tensors: Iterable[torch.Tensor]) -> dict[str, set[int]]:
    """Return where this rank is along each named dim of the tensors' meshes; several places where meshes disagree."""
    found: dict[str, set[int]] = {}
    meshes = {id(mesh): mesh for tensor in tensors if (mesh := getattr(tensor, "device_mesh", None)) is not None}
    for mesh in meshes.values():
        names, places = mesh.mesh_dim_names, mesh.get_coordinate()
        for name, place in zip(names, places, strict=True) if names and places else ():
            found.setdefault(name, set()).add(place)
    return found


def _without_ambiguous(told: Mapping[int, Mapping[str, Collection[int]]]) -> dict[int, dict[str, int]]:
    """Leave out dims whose name means different places on different meshes, on all ranks."""
    ambiguous = {name for places in told.values() for name, each in places.items() if len(each) > 1}
    found = {
        rank: {name: place for name, (place, *_) in places.items() if name not in ambiguous}
        for rank, places in told.items()
    }
    return {rank: places for rank, places in found.items() if places}
