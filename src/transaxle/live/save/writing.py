"""Writing: all ranks carry one plan out, each its own byte ranges, straight into the final files.

Rank 0 makes the hidden folder and the files; everybody writes into them; rank 0 adds what is known beforehand and the
manifest, and moves the result to its place. A tensor that one rank writes is hashed on its way, any other one as it
lies in the files.

A service takes a file from its beginning to its end: there every file has one rank that sends it, to which the others
send what they hold of it. Files appear when all are sent: the tensors' first, then rank 0's manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from transaxle.arguments import Overwrite
from transaxle.engine.copying.duplicate_checks import PlannedCheck
from transaxle.engine.execute.commit import carry, write_known, write_rest
from transaxle.engine.plan.conversion import Prepared
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.errors import gathered
from transaxle.formats.staging.location import staging_at
from transaxle.formats.staging.staging import Writer
from transaxle.formats.staging.upload import Upload
from transaxle.formats.storage.local import LocalStorage
from transaxle.live.save.memory_to_files import Moved, move
from transaxle.live.save.uploading import upload
from transaxle.live.sharding.memory import Memory, memory_of, rank_of
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import Clock, World
from transaxle.move.hashing import HashingFiles, digest_in
from transaxle.move.mover import Movement
from transaxle.move.runs import Item, is_long
from transaxle.move.workers import limits

if TYPE_CHECKING:
    from transaxle.formats.staging.location import Stage

_FOLDED = 16 << 20
"""A tensor shorter than this may be one rank's where that leaves another one with less to write."""


def write(
    prepared: Prepared, dst: str, world: World, clock: Clock, *, overwrite: Overwrite, sync: bool
) -> tuple[int, int]:
    """Carry a plan out from all ranks' memory, and commit the result whole or not at all; collective.

    Args:
        prepared: the plan, the same on all ranks.
        dst: where.
        world: the ranks.
        clock: takes the time of the stages.
        overwrite: replace the checkpoint at `dst`; `everything`: with whatever else is there.
        sync: make everything durable before the commit.

    Returns:
        bytes received from other ranks, and bytes written by this one.

    Raises:
        TransaxleError: on every rank; the target is then as it was.
    """
    plan = prepared.plan
    if plan.checks:
        with clock.stage("check"), world.together():
            _check_copies(plan.checks, memory_of(prepared.checkpoint.container), world)
    with ExitStack() as stack:
        stage: Stage | None = None

        def begin() -> tuple[str, str, tuple[int, ...]]:
            nonlocal stage
            if world.rank != world.ranks[0]:
                return "", "", ()
            stage = staging_at(dst, overwrite=overwrite, sync=sync)
            stack.enter_context(stage)
            if isinstance(stage, Upload):
                return "", "", world.ranks if stage.shared else world.ranks[:1]
            stage.prepare(plan.files if stage.single is None else prepared.draft.files)
            write_known(stage, prepared.draft.early())
            return str(stage.path), stage.mark(), ()

        with clock.stage("prepare"):
            folder, run, senders = world.pool(begin)[0]
        if senders:
            lead = stage if isinstance(stage, Upload) else None
            return upload(prepared, dst, lead, senders, world, clock, overwrite=overwrite)
        received, own, hashes = _write(prepared, (folder, run), world, clock, sync=sync)
        with clock.stage("commit"), world.together():
            if stage is not None:
                write_rest(stage, prepared, hashes, carry(prepared, stage) if stage.single is None else {})
                stage.commit()
    return received, own


def _write(
    prepared: Prepared, place: tuple[str, str], world: World, clock: Clock, *, sync: bool
) -> tuple[int, int, dict[str, str]]:
    """Write every run of bytes from its owner into the files; return bytes received and written, and all hashes.

    Args:
        prepared: the plan, the same on all ranks.
        place: the hidden folder, and the mark of this run in it.
        world: the ranks.
        clock: takes the time of the stages.
        sync: make everything durable.
    """
    folder, run = place
    tensors = prepared.plan.tensors
    takers = owners(tensors, world)
    scattered = [tensor for tensor, ranks in zip(tensors, takers, strict=True) if not ranks]
    with clock.stage("prepare"), world.together():  # a machine may not see the folder, or a later one of its name
        writer = Writer(folder, sync=sync, run=run)

    def produce() -> Moved:
        moved = move(prepared, takers, writer, world)
        writer.finish()
        return moved

    with clock.stage("write"):
        everyone = world.pool(produce)
    hashes = {name: digest for moved in everyone for name, digest in moved.digests.items()}
    with clock.stage("hash"):
        for found in world.pool(lambda: _hashed(scattered, folder, world)) if scattered else ():
            hashes |= found
    mine = everyone[world.ranks.index(world.rank)]
    return mine.received, mine.taken, hashes


def owners(tensors: Sequence[PlannedTensor], world: World) -> list[tuple[int, ...]]:
    """Give each tensor whose bytes must come together anyway to one rank, so that all have equally much to write.

    Returns:
        For each tensor its rank; nobody where several ranks hold long runs, which each writes for itself.
    """
    load = dict.fromkeys(world.ranks, 0)
    writers: dict[int, tuple[int, ...]] = {}
    from_several: list[int] = []
    for number, tensor in enumerate(tensors):
        ranks = {rank_of(transfer.file) for transfer in tensor.transfers}
        if len(ranks) == 1:
            writers[number] = tuple(ranks)
            load[writers[number][0]] += tensor.nbytes
        elif any(is_long(transfer) for transfer in tensor.transfers):
            writers[number] = ()
            for transfer in tensor.transfers:
                load[rank_of(transfer.file)] += transfer.size
        else:
            from_several.append(number)
    fair = sum(tensor.nbytes for tensor in tensors) // world.size
    for number in from_several:
        size = tensors[number].nbytes
        rank = min(load, key=lambda each: (load[each], each))
        if size > _FOLDED and load[rank] + size > fair + _FOLDED:
            writers[number] = ()  # one rank would be busy with it while the others wait
            for each in world.ranks:
                load[each] += size // world.size
        else:
            writers[number] = (rank,)
            load[rank] += size
    return [writers[number] for number in range(len(tensors))]


def _hashed(tensors: Sequence[PlannedTensor], folder: str, world: World) -> dict[str, str]:
    """Hash this rank's share of what was written, as it lies in the files."""
    load = dict.fromkeys(world.ranks, 0)
    digests: dict[str, str] = {}
    storage = LocalStorage(folder)
    for tensor in tensors:
        rank = min(load, key=lambda each: (load[each], each))
        load[rank] += tensor.nbytes
        if rank != world.rank:
            continue
        digests[tensor.name] = digest_in(storage, tensor.places)
    storage.close()
    return digests


def _check_copies(checks: Sequence[PlannedCheck], memory: Memory, world: World) -> None:
    """Prove tensors equal that are stored once for several names; each pair comes together at one rank.

    Raises:
        Refused: UNEQUAL_COPIES, UNEXPECTED_TENSOR, on the rank that compared.
    """
    items = []
    for number, check in enumerate(checks):
        taker = (world.ranks[number % world.size],)
        items.append(Item(2 * number, check.nbytes, check.first, taker))
        items.append(Item(2 * number + 1, check.nbytes, check.second, taker))
    seen = HashingFiles(None, (), range(len(items)))
    Movement(items, memory, seen, limits(jobs=1), RankExchange(world)).run()
    problems = [
        check.refusal
        for number, check in enumerate(checks)
        if 2 * number in seen.digests and seen.digests[2 * number] != seen.digests[2 * number + 1]
    ]
    if problems:
        raise gathered(problems)
