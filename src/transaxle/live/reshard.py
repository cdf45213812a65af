"""Resharding: copies values between two sharded models, and describes how one model is sharded.

**Resharding** copies tensors on one mesh into tensors on a different mesh and in a different dialect. The bytes are
sent over the process group, without a disk. The ranks first match source and target tensors by name, and collect every
problem. The copy begins only if there is no problem.

**Sharding**: the ranks of a live model exchange descriptions of the shards that they hold; no values are read.
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
from transaxle.engine.checkpoint_facts import ShardedTensor, Sharding
from transaxle.errors import Refusal, gathered, refuse
from transaxle.formats.catalog import Container, nbytes
from transaxle.live.derived import find_unloadable, settle
from transaxle.live.global_tensors import Census, census
from transaxle.live.memory import Replicas, check_zero, container, memory_of
from transaxle.live.model.destination import LocalSink, TensorDestination, check_filled, find_overlapping
from transaxle.live.model.source_view import View, match_tensors, refuse_omitted, refuse_unmatched, view
from transaxle.live.model.state_tensors import Leaves, State, common_config, leaves, unwritable
from transaxle.live.ties import Sides, find_unequal_ties, names_filled_by_ties, spare_names
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import World
from transaxle.move.mover import Movement
from transaxle.move.workers import Item, limits
from transaxle.torch_tensors import Ranks, local_shape

if TYPE_CHECKING:
    import torch


_CAST = (
    "Resharding never changes dtypes. Give source and target the same dtype, for example "
    "{name: tensor.to(torch.bfloat16)}."
)
_SHOWN = 3
"""Largest number of source names, and of target names, that an error lists."""


@dataclass(frozen=True)
class Match:
    """The tensors that all ranks have agreed to copy."""

    stored: Mapping[str, StoredTensor]
    """Target tensor name -> source tensor."""
    missing: tuple[str, ...]
    """Names of tensors that only the target has."""
    unexpected: tuple[str, ...]
    """Names of tensors that only the source has."""


def match_sides(
    sides: Sides,
    own_target: Leaves,
    tensors: Callable[[], Mapping[str, StoredTensor]],
    *,
    strict: bool,
    find_others: Callable[[], list[Refusal]] = list,
    hint: str = _CAST,
    once: bool = True,
) -> Match:
    """Match source and target tensors by name, and collect every problem; all ranks must call this function.

    Args:
        sides: source and target of the copy.
        own_target: this rank's tensors of the target.
        tensors: function that returns target tensor name -> source tensor.
        strict: whether to refuse tensor names that only the source or only the target has.
        find_others: function that returns additional refusals, which are raised together with the mismatches found by
            this function.
        hint: hint for the refusal of tensors whose dtypes differ.
        once: whether the tensors are copied only once, so that two tensors with equal present values may be treated as
            tied.

    Raises:
        TransaxleError: raised on every rank, with every problem of every rank.
    """
    world = sides.world
    with world.together():
        stored = tensors()
        differences, missing, unexpected = match_tensors(sides.target, stored, optimizer=True)
        problems = [
            dataclasses.replace(each, hint=hint) if each.code == "DTYPE_MISMATCH" else each for each in differences
        ]
        unloadable_modules, omitted = find_unloadable(() if own_target.refusals else own_target.custom_modules)
        problems += [*unwritable(sides.own_target), *own_target.refusals, *unloadable_modules, *find_others()]
    ties = names_filled_by_ties(sides, stored) | spare_names(sides, stored, unexpected, once=once)
    problems += find_unequal_ties(sides, stored, once=once)
    missing, unexpected = (tuple(name for name in names if name not in ties) for names in (missing, unexpected))
    with world.together():
        if not any(name in stored for name in sides.target) and (sides.target or sides.source):
            shown = (", ".join([*names][:_SHOWN]) or "(none)" for names in (sides.target, stored))
            message = "target and source have no tensor name in common\ntarget: {}\nsource: {}".format(*shown)
            raise refuse(
                "UNKNOWN_FAMILY",
                message,
                hint="Check that source and target are the same model; if they are, give family= and dialect=.",
            )
        if strict:
            problems += [*refuse_unmatched(missing, unexpected), *refuse_omitted(omitted)]
        if problems:
            raise gathered(problems)
    return Match(stored, missing, unexpected)


@dataclass(frozen=True)
class ReshardReport:
    """The result of `reshard` on one rank."""

    tensors: int
    """Number of target tensors that this rank holds, whole or as a shard."""
    bytes_written: int
    """Number of bytes written into this rank's target tensors."""
    bytes_received: int
    """Number of bytes that other ranks sent to this rank."""
    seconds: float
    """Wall time of the copy in seconds."""
    missing: tuple[str, ...] = ()
    """Names of tensors that only the target has (if `strict` was False); the values of these tensors are unchanged."""
    unexpected: tuple[str, ...] = ()
    """Names of tensors that only the source has (if `strict` was False), as the target's dialect spells them."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, which `json.dumps` accepts."""
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
    """Copy the live tensors of one model into those of another, which may have any placement and dialect of the family;
    all ranks of the group must call this function.

    Args:
        src_state: the model or state dict to read, such as a trainer's; a rank that holds none of its tensors passes
            `{}`.
        dst_state: the model or state dict to write, such as an inference engine's; a rank that holds none of its
            tensors passes `{}`.
        group: all ranks that hold source or target tensors, as a process group or a mesh with one dim; None means all
            ranks.
        config: the model's config, as a path, a mapping or an object with `to_dict()`; None means `src_state.config`,
            if a rank has it.
        strict: whether to refuse tensor names that only one of the two states has; if False, the report lists such
            names. A tied name (an embedding and its head) may be missing from either state, if both names are proved to
            be the same tensor.
        family: model family, such as `qwen3_moe`; None means that it is recognised from the tensor names.
        dialect: dialect of the target's tensor names, such as `hf`; None means that it is recognised from the names.
        axes: axis sizes, which override sizes from configs and shapes: `{"g": 8}`, "g=8" or ["g=8"].
        rules: path of a rules file with your own families and dialects.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank, before anything is written; also if the two states have no name in common.
            Only one error is raised during the copy: if target tensors that share memory would get unequal values.
    """
    begin = time.monotonic()
    world = World(group)
    with world.together():
        read_flag("strict", strict)
        options = settings(family=family, axes=axes, rules=rules)
        dialect = read_optional_text("dialect", dialect, "hf")
        given_config = model_config(config)
        own_source, own_target = leaves(src_state).tensors, leaves(dst_state)
    world.require_alike({"strict": strict, "dialect": dialect, "family": family, "axes": options.axes})
    source_config = common_config(src_state, given_config, world)
    source, target = census(own_source, world), census(own_target.tensors, world)
    sides = Sides(own_source, own_target.tensors, source, target, world)
    with world.together():
        memory = container(source, own_source, world.rank, source_config)
        source_view = _view_source(memory, target, options, dialect)
        check_zero(source_view.checkpoint.checks, own_source)
    plan = match_sides(sides, own_target, source_view.tensors, strict=strict)
    with world.together():
        matched_targets = {name: tensor for name, tensor in own_target.tensors.items() if name in plan.stored}
        shared = find_overlapping(matched_targets)
        destinations = {
            n: TensorDestination(tensor, plan.stored[n].dtype, apart=n in shared)
            for n, tensor in matched_targets.items()
        }
        items, names = _items(target, plan.stored, Replicas(source))
        movement = Movement(
            items, memory_of(memory), LocalSink(destinations, names), limits(jobs=1), RankExchange(world)
        )
    with world.together():
        received = movement.run()
    with world.together():
        check_filled(destinations)
    with world.together():
        settle(own_target.custom_modules, own_target.tensors)
    written = sum(destination.bytes_written for destination in destinations.values())
    seconds = time.monotonic() - begin
    return ReshardReport(len(destinations), written, received, seconds, plan.missing, plan.unexpected)


def _view_source(memory: Container, target: Census, options: Settings, dialect: str | None) -> View:
    """Return a translation into the target's dialect of the source tensors, which are in the memory of all ranks."""
    shapes = {name: tensor.shape for name, tensor in target.items()}
    return view(Checkpoint(memory, replace(options, partial=True), None, None), shapes, options.family, dialect)


def _items(target: Census, stored: Mapping[str, StoredTensor], replicas: Replicas) -> tuple[list[Item], list[str]]:
    """Return an item for each shard of a target tensor, and a list in which the key of an item is the index of its
    tensor name.
    """
    items, names = list[Item](), list[str]()
    for name, tensor in target.items():
        if name not in stored:
            continue
        for intervals, ranks in tensor.boxes.items():
            size = nbytes(stored[name].dtype, local_shape(intervals))
            items += replicas.near(Item(len(names), size, stored[name].transfers(intervals), ranks))
            names.append(name)
    return items, names


def sharding(state: State, *, group: Ranks | None = None) -> Sharding:
    """Describe which rank holds which shard of each tensor of a live model. Every rank must call this function, and
    gets the same result.

    Only names, dtypes, shapes and placements of tensors are exchanged. `tx.report(result, "sharding.html")`, called on
    one rank, draws the result.

    Args:
        state: a module, or a state dict of tensors and DTensors, with any placements; tensors may be on the meta
            device.
        group: the ranks; None means all ranks, or only this process if there is no process group.

    Returns:
        The shards of every tensor by rank. The totals are in `rank_bytes`, `imbalance` and `spare_bytes` of the result.

    Raises:
        Refused: raised on every rank. The code is SHAPE_MISMATCH or DTYPE_MISMATCH, if ranks differ in a tensor's shape
            or dtype; UNSUPPORTED, for unknown placements and for Megatron's sharded state dicts; INCOMPLETE, if a rank
            of a tensor's mesh lacks the tensor.
    """
    world = World(group)
    with world.together():
        tensors = leaves(state).tensors
        names: dict[int, str] = {}
        first_tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        for name, tensor in tensors.items():
            first = names.setdefault(id(tensor), name)
            if first == name:
                first_tensors[name] = tensor
            else:
                aliases[name] = first
    global_tensors = census(first_tensors, world)
    of_ranks = world.pool(lambda: (aliases, _coordinates(first_tensors.values())))
    meshes = dict(zip(world.ranks, (places for _, places in of_ranks), strict=True))
    aliases = {name: to for each, _ in of_ranks for name, to in each.items()}
    shards = tuple(ShardedTensor(each.name, each.dtype, each.shape, each.positions) for each in global_tensors.values())
    return Sharding(tuple(world.ranks), shards, aliases, _without_ambiguous(meshes))


def _coordinates(tensors: Iterable[torch.Tensor]) -> dict[str, set[int]]:
    """Return mesh dim -> this rank's coordinates along that dim; a rank has several coordinates if the meshes of two
    tensors disagree.
    """
    coordinates: dict[str, set[int]] = {}
    meshes = {id(mesh): mesh for tensor in tensors if (mesh := getattr(tensor, "device_mesh", None)) is not None}
    for mesh in meshes.values():
        names, places = mesh.mesh_dim_names, mesh.get_coordinate()
        for name, place in zip(names, places, strict=True) if names and places else ():
            coordinates.setdefault(name, set()).add(place)
    return coordinates


def _without_ambiguous(coordinates_by_rank: Mapping[int, Mapping[str, Collection[int]]]) -> dict[int, dict[str, int]]:
    """Remove mesh dims along which a rank has different coordinates in two meshes."""
    ambiguous = {name for places in coordinates_by_rank.values() for name, each in places.items() if len(each) > 1}
    unambiguous = {
        rank: {name: place for name, (place, *_) in places.items() if name not in ambiguous}
        for rank, places in coordinates_by_rank.items()
    }
    return {rank: places for rank, places in unambiguous.items() if places}
