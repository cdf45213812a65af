"""What each rank of a group carries of a save: all ranks carry one plan out, each its own byte ranges.

In a folder, rank 0 makes the files and everybody writes into them; a tensor that one rank writes is hashed on its way,
any other one as it lies in the files. Rank 0 adds what is known beforehand and the manifest, and commits.

A service takes a file from its beginning to its end: there every file has one rank that sends it, to which the others
send what they hold of it. All files are sent before any appears. Then the others' appear, and at last those of rank 0,
which has what makes them a checkpoint: index and manifest. Where a rank fails, each takes back what it has sent, unless
the manifest is there by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from transaxle.arguments import EVERYTHING, Overwrite
from transaxle.engine.copying.duplicate_checks import PlannedCheck
from transaxle.engine.execute.carry import carry, seal, write_fragments
from transaxle.engine.plan.conversion import Prepared
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.errors import TransaxleError, gathered
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.store.location import staging_at
from transaxle.formats.store.staging import Writer
from transaxle.formats.store.upload import Upload, opens
from transaxle.live.sharding.memory import Memory, memory_of, rank_of
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import Clock, World, is_loss
from transaxle.move.hashing import HashingFiles, digest_in
from transaxle.move.journal import Done
from transaxle.move.mover import Movement
from transaxle.move.workers import Item, Load, Unions, is_long, limits

if TYPE_CHECKING:
    from transaxle.formats.store.location import Stage
    from transaxle.move.endpoint import Writable

_FOLDED = 16 << 20
"""A tensor shorter than this may be one rank's where that leaves another one with less to write."""
_Hashes = dict[str, str]


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
    plan, share = prepared.plan, _RankShare(prepared, world, clock)
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
            write_fragments(stage, prepared.draft.early())
            return str(stage.path), stage.mark(), ()

        with clock.stage("prepare"):
            folder, run, ranks = world.pool(begin)[0]
        if ranks:
            share.send(dst, stage if isinstance(stage, Upload) else None, ranks, overwrite=overwrite)
        else:
            hashes = share.write(folder, run, sync=sync)
            with clock.stage("commit"), world.together():
                if stage is not None:
                    share.seal(stage, hashes)
                    stage.commit()
    return share.received, share.written


class _RankShare:
    """What a rank does of a save.

    Args:
        prepared: the plan, the same on all ranks.
        world: the ranks.
        clock: takes the time of the stages.
    """

    def __init__(self, prepared: Prepared, world: World, clock: Clock) -> None:
        self._prepared = prepared
        self._world = world
        self._clock = clock
        self.received = 0
        """Bytes received from other ranks."""
        self.written = 0
        """Bytes of tensors written, or sent to a service."""

    def _move(self, takers: Sequence[tuple[int, ...]], files: Writable | None, *, ordered: bool) -> _Hashes:
        """Carry the tensors of the plan; collective.

        Args:
            takers: for each tensor the rank that writes it; nobody: each rank what it holds of it.
            files: where this rank's go; None: nowhere, they are only hashed.
            ordered: the bytes of a file must be written in order, on all ranks; all tensors of a file have one taker.

        Returns:
            Hashes of the tensors that this rank has written whole.
        """
        exchange = RankExchange(self._world)
        self.written = 0

        def count(size: int) -> None:
            self.written += size

        tensors, memory = self._prepared.plan.tensors, memory_of(self._prepared.checkpoint.container)
        limit = limits(jobs=1).holding_runs
        done = carry(tensors, memory, files, limit, progress=count, ordered=ordered, takers=takers, exchange=exchange)
        self.received = exchange.received
        return {name: each.hash for name, each in done.items()}

    def seal(self, stage: Stage, hashes: _Hashes, foretold: _Hashes | None = None) -> None:
        """Write what is known now; on rank 0."""
        seal(self._prepared, stage, limits(jobs=1), {name: Done(xxh3) for name, xxh3 in hashes.items()}, None, foretold)

    def write(self, folder: str, run: str, *, sync: bool) -> _Hashes:
        """Write every run of bytes from its owner into the files, and return all hashes; collective.

        Args:
            folder: the hidden folder.
            run: the mark of this run in it.
            sync: make everything durable.
        """
        world, clock, tensors = self._world, self._clock, self._prepared.plan.tensors
        takers = owners(tensors, world)
        scattered = [tensor for tensor, ranks in zip(tensors, takers, strict=True) if not ranks]
        with clock.stage("prepare"), world.together():  # a machine may not see the folder, or a later one of its name
            writer = Writer(folder, sync=sync, run=run)

        def produce() -> _Hashes:
            hashes = self._move(takers, writer, ordered=False)
            writer.finish()
            return hashes

        with clock.stage("write"):
            hashes = _merged(world.pool(produce))
        with clock.stage("hash"):
            if scattered:
                hashes |= _merged(world.pool(lambda: _hashed(scattered, folder, world)))
        return hashes

    def send(self, dst: str, lead: Upload | None, ranks: tuple[int, ...], *, overwrite: Overwrite) -> None:
        """Send the plan's files, and let them appear all or none; collective.

        Args:
            dst: URL.
            lead: rank 0's upload, begun, on rank 0.
            ranks: those that can send files.
            overwrite: as `lead` has it.
        """
        plan, draft, world, clock = self._prepared.plan, self._prepared.draft, self._world, self._clock
        owner = senders(self._prepared, ranks)
        takers = [(owner[tensor.places[0].file],) if tensor.places else ranks[:1] for tensor in plan.tensors]
        mine = {file: size for file, size in draft.files.items() if owner[file] == world.rank}
        with ExitStack() as stack:
            stage = lead

            def begin() -> None:
                nonlocal stage
                if stage is None and mine:
                    # Rank 0 has looked what is there.
                    stage = stack.enter_context(Upload(dst, overwrite=EVERYTHING if overwrite else False))
                if stage is not None:
                    carried = plan.carried if lead is not None and lead.single is None else ()
                    stage.prepare(mine | {name: plan.files[name] for name in carried})
                    known = [*draft.early(), *(() if foretold is None else draft.late(foretold))]
                    write_fragments(stage, (fragment for fragment in known if fragment.file in mine))

            def send() -> _Hashes:
                hashes = self._move(takers, stage, ordered=True)
                if stage is not None and lead is None:
                    stage.complete()
                return hashes

            def ready() -> None:
                if lead is not None:
                    self.seal(lead, hashes, foretold)
                    lead.complete()
                    lead.make_way()

            with clock.stage("prepare"):
                # a stream cannot go back to digests that stand before what they are of: everything is moved twice
                foretold = (
                    _merged(world.pool(lambda: self._move(takers, None, ordered=True))) if draft.sealed_first else None
                )
                world.pool(begin)
            with clock.stage("write"):
                hashes = _merged(world.pool(send))
            with clock.stage("commit"):
                world.pool(ready)
                world.pool(lambda: stage.appear() if stage is not None and lead is None else None)
                try:
                    world.pool(lambda: lead.appear() if lead is not None else None)
                    world.pool(lambda: stage.recheck(owner if stage is lead else None) if stage is not None else None)
                except TransaxleError as error:
                    if is_loss(error) and stage is not None and stage.is_whole:
                        stage.keep()  # a rank was lost when everything was there already
                    raise
            if stage is not None:
                stage.keep()


def _merged(of_ranks: Iterable[Mapping[str, str]]) -> _Hashes:
    return {name: xxh3 for hashes in of_ranks for name, xxh3 in hashes.items()}


def owners(tensors: Sequence[PlannedTensor], world: World) -> list[tuple[int, ...]]:
    """Give each tensor whose bytes must come together anyway to one rank, so that all have equally much to write.

    Returns:
        For each tensor its rank; nobody where several ranks hold long runs, which each writes for itself.
    """
    load = Load.of(world.ranks)
    writers: dict[int, tuple[int, ...]] = {}
    from_several: list[int] = []
    for number, tensor in enumerate(tensors):
        ranks = {rank_of(transfer.file) for transfer in tensor.transfers}
        if len(ranks) == 1:
            writers[number] = (load.add(ranks.pop(), tensor.nbytes),)
        elif any(is_long(transfer) for transfer in tensor.transfers):
            writers[number] = ()
            for transfer in tensor.transfers:
                load.add(rank_of(transfer.file), transfer.size)
        else:
            from_several.append(number)
    fair = sum(tensor.nbytes for tensor in tensors) // world.size
    for number in from_several:
        size, rank = tensors[number].nbytes, load.least()
        if size > _FOLDED and load[rank] + size > fair + _FOLDED:
            writers[number] = ()  # one rank would be busy with it while the others wait
            for each in world.ranks:
                load.add(each, size // world.size)
        else:
            writers[number] = (load.add(rank, size),)
    return [writers[number] for number in range(len(tensors))]


def senders(prepared: Prepared, ranks: tuple[int, ...]) -> dict[str, int]:
    """Give each file a rank that sends it, so that all have equally many bytes to send.

    Files that share a tensor go together, and so do the ones that make the others a checkpoint: with the first rank.
    """
    files, together = prepared.draft.files, Unions[str]()
    for tensor in prepared.plan.tensors:
        for place in tensor.everywhere[1:]:
            together.join(place.file, tensor.places[0].file)
    with_tensors = {place.file for tensor in prepared.plan.tensors for place in tensor.everywhere}
    of_first_rank = {together.first(file) for file in files if opens(file) or file not in with_tensors}
    sizes: dict[str, int] = {}
    for file, size in files.items():
        sizes[together.first(file)] = sizes.get(together.first(file), 0) + size
    load, sender = Load.of(ranks), dict[str, int]()
    for file in sorted(sizes, key=lambda each: (each not in of_first_rank, -sizes[each], each)):
        sender[file] = load.add(ranks[0] if file in of_first_rank else load.least(), sizes[file])
    return {file: sender[together.first(file)] for file in files}


def _hashed(tensors: Sequence[PlannedTensor], folder: str, world: World) -> _Hashes:
    """Hash this rank's part of what was written, as it lies in the files."""
    load, hashes = Load.of(world.ranks), _Hashes()
    storage = LocalStorage(folder)
    for tensor in tensors:
        if load.add(load.least(), tensor.nbytes) == world.rank:
            hashes[tensor.name] = digest_in(storage, tensor.places)
    storage.close()
    return hashes


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
