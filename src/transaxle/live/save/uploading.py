"""Uploading: every file of a checkpoint on a service has one rank that sends it; the others send to that rank.

All files are sent before any appears. Then the others' appear, and at last those of rank 0, which has what makes them a
checkpoint: index and manifest. Where a rank fails, each takes back what it has sent, unless the manifest is there by
then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from transaxle.arguments import EVERYTHING, Overwrite
from transaxle.engine.execute.commit import carry, write_known, write_rest
from transaxle.engine.plan.conversion import Prepared
from transaxle.errors import TransaxleError
from transaxle.formats.staging.upload import Upload, opens
from transaxle.live.save.memory_to_files import Moved, move
from transaxle.live.transport.world import Clock, World, is_loss


def upload(
    prepared: Prepared,
    dst: str,
    lead: Upload | None,
    ranks: tuple[int, ...],
    world: World,
    clock: Clock,
    *,
    overwrite: Overwrite,
) -> tuple[int, int]:
    """Send a plan's files from all ranks' memory, and let them appear all or none; collective.

    Args:
        prepared: the plan, the same on all ranks.
        dst: URL.
        lead: rank 0's upload, begun, on rank 0.
        ranks: those that can send files.
        world: the ranks.
        clock: takes the time of the stages.
        overwrite: as `lead` has it.

    Returns:
        bytes received from other ranks, and bytes of tensors sent by this one.

    Raises:
        TransaxleError: on every rank.
    """
    plan = prepared.plan
    owners = senders(prepared, ranks)
    takers = [(owners[tensor.places[0].file],) if tensor.places else ranks[:1] for tensor in plan.tensors]
    sealed_first = prepared.draft.sealed_first
    mine = {file: size for file, size in prepared.draft.files.items() if owners[file] == world.rank}
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
                known = [*prepared.draft.early(), *(() if foretold is None else prepared.draft.late(foretold))]
                write_known(stage, (fragment for fragment in known if fragment.file in mine))

        def send() -> Moved:
            moved = move(prepared, takers, stage, world, ordered=True)
            if stage is not None and lead is None:
                stage.complete()
            return moved

        with clock.stage("prepare"):
            # a stream cannot go back to digests that stand before what they are of: everything is moved twice
            foretold = _digests(world.pool(lambda: move(prepared, takers, None, world))) if sealed_first else None
            world.pool(begin)
        with clock.stage("write"):
            sent = world.pool(send)
        hashes = _digests(sent)
        with clock.stage("commit"):
            world.pool(lambda: _ready(prepared, lead, hashes, foretold))
            world.pool(lambda: stage.appear() if stage is not None and lead is None else None)
            try:
                world.pool(lambda: lead.appear() if lead is not None else None)
                world.pool(lambda: stage.recheck(owners if stage is lead else None) if stage is not None else None)
            except TransaxleError as error:
                if is_loss(error) and stage is not None and stage.is_whole:
                    stage.keep()  # a rank was lost when everything was there already
                raise
        if stage is not None:
            stage.keep()
    own = sent[world.ranks.index(world.rank)]
    return own.received, own.taken


def _digests(everyone: Sequence[Moved]) -> dict[str, str]:
    return {name: digest for moved in everyone for name, digest in moved.digests.items()}


def senders(prepared: Prepared, ranks: tuple[int, ...]) -> dict[str, int]:
    """Give each file a rank that sends it, so that all have equally many bytes to send.

    Files that share a tensor go together, and so do the ones that make the others a checkpoint: with the first rank.
    """
    files = prepared.draft.files
    parent = {file: file for file in files}

    def root(file: str) -> str:
        """Return the file that stands for all that go together with this one."""
        while parent[file] != file:
            file = parent[file]
        return file

    for tensor in prepared.plan.tensors:
        for place in tensor.everywhere[1:]:
            parent[root(place.file)] = root(tensor.places[0].file)
    with_tensors = {place.file for tensor in prepared.plan.tensors for place in tensor.everywhere}
    of_first_rank = {root(file) for file in files if opens(file) or file not in with_tensors}
    sizes: dict[str, int] = {}
    for file, size in files.items():
        sizes[root(file)] = sizes.get(root(file), 0) + size
    load = dict.fromkeys(ranks, 0)
    senders_of_roots: dict[str, int] = {}
    for file in sorted(sizes, key=lambda each: (each not in of_first_rank, -sizes[each], each)):
        sender = ranks[0] if file in of_first_rank else min(ranks, key=lambda rank: (load[rank], rank))
        senders_of_roots[file] = sender
        load[sender] += sizes[file]
    return {file: senders_of_roots[root(file)] for file in files}


def _ready(
    prepared: Prepared, lead: Upload | None, hashes: Mapping[str, str], foretold: Mapping[str, str] | None
) -> None:
    """Write on rank 0 what is known now, and take away what is replaced."""
    if lead is None:
        return
    carried = carry(prepared, lead) if lead.single is None else {}
    write_rest(lead, prepared, hashes, carried, foretold=foretold)
    lead.complete()
    lead.make_way()
