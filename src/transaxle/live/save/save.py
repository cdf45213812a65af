"""Saving: every rank writes its own byte ranges straight into the final files of the checkpoint, in one pass.

All ranks compute the same plan from what they hold together; nothing is consolidated afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from transaxle.arguments import Overwrite, PathLike, check_keywords, shows
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.settings import settings as settings_of
from transaxle.engine.plan.conversion import Prepared, make_plan, ready
from transaxle.errors import refuse
from transaxle.formats.registry import is_one_file
from transaxle.live.model.report import SaveReport
from transaxle.live.model.state_tensors import State
from transaxle.live.save.collected_state import CollectedState, collect
from transaxle.live.save.rank_shares import write
from transaxle.live.save.save_request import UNSAID, SaveRequest, SaveSettings, Saving
from transaxle.live.sharding.memory import container
from transaxle.live.sharding.replica_check import compare_copies
from transaxle.live.training.optimizers import AnyOptimizer
from transaxle.live.transport import wire
from transaxle.live.transport.world import Clock, World
from transaxle.torch_tensors.torch_arguments import Ranks

if TYPE_CHECKING:
    from transaxle.engine.compare.verification import Verification


@shows(Saving, **UNSAID)
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
        **options: `family` (None: recognised), `dialect` (of the model's names; None: recognised), `config` (a path, a
            mapping or an object with `to_dict()`; None: `model.config`, where it has one), `axes` (axis -> size),
            `rules` (path of a table of your own), `shard_size` (bytes of tensors per file, 5_000_000_000 or "5GB"),
            `sync` (sync everything to disk before `dst` appears), `check_copies` (compare copies that several ranks
            have and no mesh keeps equal, and refuse those that differ), `verify` (read the checkpoint back on one rank
            once it is there, and compare every byte with what was written; the report has the verification).

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank; the target is then as it was, unless `verify` found the error.
    """
    world, clock = World(group), Clock()

    def request() -> SaveRequest:
        check_keywords("save", options, Saving.__annotations__)
        return SaveRequest(state, dst, to, optimizer, extra, overwrite=overwrite, **options)

    with clock.stage("plan"):
        settings, collected = collect(request, world)
    return write_checkpoint(settings, collected, world, clock)


def check_savable(
    state: State, dst: PathLike, *, to: str = "hf", group: Ranks | None = None, **options: Unpack[Saving]
) -> None:
    """Plan a save without optimizer, and write nothing: long before the first one, it shows what would be refused.

    Collective. The arguments are those of `save`.

    Raises:
        TransaxleError: on every rank, as from `save`.
    """
    world = World(group)
    settings, collected = collect(lambda: SaveRequest(state, dst, to, None, None, **options), world)
    with world.together():
        ready(_planned(settings, collected, world.rank))


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
        ignored=(*plan.ignored, *settings.left),
        notes=plan.notes,
        untrained=settings.untrained,
        verification=verification,
        seconds=clock.total,
        stages=clock.stages,
    )


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

    found = world.pool(read)[0]
    assert found is not None  # of the first rank
    return found


def _planned(settings: SaveSettings, state: CollectedState, rank: int) -> Prepared:
    """Plan the target's files, with the memory of all ranks as the source."""
    if is_one_file(settings.dst) and state.files:
        message = "states that are not tensors need separate files, but the target is a single file"
        raise refuse("UNSUPPORTED", message, file=settings.dst, hint="Give a folder.")
    memory = container(state.global_tensors, state.own, rank, settings.config, groups=state.groups, files=state.files)
    reading = settings_of(
        family=settings.family,
        dialect=settings.dialect,
        optimizer=settings.optimizer,
        axes=settings.axes,
        rules=settings.rules,
    )
    checkpoint = Checkpoint(memory, reading, None, None)
    return make_plan(checkpoint, settings.to, shard_size=settings.shard_size, target=settings.dst)
