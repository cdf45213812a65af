"""The source of a load as all ranks read it: one checkpoint, whose bytes are compared with checksums.

Each rank opens the path for itself, and the checkpoint there may be replaced in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transaxle.arguments import read_source
from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike, open_checkpoint
from transaxle.errors import Refused, refuse
from transaxle.formats.catalog import Checksum
from transaxle.formats.checksums import Tally, Witness
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import Storage, layer, lowest, unpinned
from transaxle.live.transport import wire
from transaxle.live.transport.world import World, comparable
from transaxle.move.hashing import digest

wire.tellable(Checksum, Tally)
_LARGEST_MANIFEST = 1 << 30


@contextmanager
def opened(
    src: CheckpointLike, world: World, reading: Mapping[str, Any], *, with_state: bool, strict: bool
) -> Iterator[Checkpoint]:
    """Give the source; one that is opened here is closed again, the caller's own is not. Collective.

    Args:
        src: as `load` takes it.
        world: the ranks.
        reading: arguments of `load` for opening the source, None where they are not given.
        with_state: whether the optimizer's state is wanted, if there is any.
        strict: whether state whose parameters are not known is refused, rather than left out.

    Raises:
        TypeError: there are options for a source that is open already.
        TransaxleError: on every rank: what opening it raises; CORRUPT, AMBIGUOUS where the ranks have opened different
            ones, or in different ways.
    """
    if isinstance(src, Checkpoint):
        with world.together():
            given = [name for name, value in reading.items() if value is not None]
            if given:
                raise TypeError(f"{', '.join(given)}: pass this to open() instead; the checkpoint is already open")
        if world.size > 1:
            refuse_different(src, world)
        yield src
        return
    with world.together():
        state: dict[str, Any] = {"optimizer": True, "lenient": True} if with_state else {}
        try:
            checkpoint = open_checkpoint(read_source("src", src), **reading, **state)
        except Refused:
            if strict or not with_state:
                raise
            checkpoint = open_checkpoint(read_source("src", src), **reading)
    with checkpoint:
        if world.size > 1:
            refuse_different(checkpoint, world)
        yield checkpoint


def refuse_different(checkpoint: Checkpoint, world: World) -> None:
    """Prove that all ranks have opened one checkpoint, in one way; collective.

    Copies on the disks of several machines are one if their manifests are, or without manifests their files' sizes;
    they may have several paths. So may configs and tables of rules, whose contents are compared.

    Args:
        checkpoint: what this rank opened.
        world: the ranks.

    Raises:
        Refused: on every rank: CORRUPT where they have one path, else AMBIGUOUS.
    """
    with world.together():
        mine = unpinned(checkpoint.path), _identity(checkpoint), _reading(checkpoint)
    opened_by_rank = world.gather(mine)
    first_path, first_identity, first_reading = opened_by_rank[0]
    for rank, (path, identity, reading) in zip(world.ranks, opened_by_rank, strict=True):
        if identity != first_identity:
            message = f"ranks {world.ranks[0]} and {rank} opened different checkpoints"
            if path != first_path:
                message = f"{message}: {first_path} and {path}"
                raise refuse("AMBIGUOUS", message, hint="Give the same path on all ranks, or paths of equal copies.")
            message = f"{message}: it was replaced while they were opening it"
            raise refuse("CORRUPT", message, file=path, hint="Load again when no other program writes to this path.")
        if reading != first_reading:
            names = sorted({*first_reading, *reading})
            name = next(name for name in names if reading.get(name) != first_reading.get(name))
            message = f"{name}: rank {rank} reads the checkpoint with another value than rank {world.ranks[0]}"
            raise refuse("AMBIGUOUS", message, file=path, hint="Give the same arguments on all ranks.")


def _reading(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the arguments that say how a checkpoint is read, by name, as hashes of them."""
    how, settings = checkpoint.reopening, checkpoint.settings
    options: Mapping[str, Any] = {"config": settings.config, "axes": settings.axes}
    if how is not None:
        options = {**how.options, "rules": how.rules, "view": how.steps}
    return {name: digest(comparable(value)) for name, value in options.items() if value}


def _identity(checkpoint: Checkpoint) -> str:
    storage = checkpoint.container.storage
    if storage.single is None and MANIFEST in storage.names() and storage.size(MANIFEST) <= _LARGEST_MANIFEST:
        return digest(storage.read(MANIFEST, 0, storage.size(MANIFEST)))
    pinned = checkpoint.path if unpinned(checkpoint.path) != checkpoint.path else ""
    return digest(repr((pinned, sorted(checkpoint.container.files.items()))).encode())


def check_read(storage: Storage, world: World) -> None:
    """Prove that nobody has written to the files meanwhile, and that what was read has its checksums; collective.

    What a service sends is held against its version at every request.

    Raises:
        Refused: CORRUPT, on every rank.
        StorageError: IO.
    """
    with world.together():
        files = lowest(storage)
        if isinstance(files, LocalStorage):
            files.refuse_rewritten()
    _check_sums(storage, world)


def _check_sums(storage: Storage, world: World) -> None:
    """Hold every range that the ranks have read whole, alone or together, against its checksum; collective.

    What each rank has summed up is put together, also of runs between which others have read theirs. A range that was
    read in a way that cannot be summed up is read once more by one of the ranks. A range of which they need only a part
    is not checked: the rest of it would have to be read for that.

    Raises:
        Refused: CORRUPT, on every rank.
        StorageError: IO.
    """
    witness = layer(storage, Witness)
    of_all_ranks = world.gather(None if witness is None else {each: witness.tally(each) for each in witness.open()})
    if witness is None or any(tallies is None for tallies in of_all_ranks):
        return  # all ranks read the same files, which give no checksums
    with world.together():
        read: dict[Checksum, list[Tally]] = {}
        for tallies in of_all_ranks:
            for checksum, tally in (tallies or {}).items():
                read.setdefault(checksum, []).append(tally)
        ranges = sorted(read, key=lambda each: (each.file, each.offset))
        for checksum in ranges[world.ranks.index(world.rank) :: world.size]:
            witness.put_together(checksum, read[checksum])
            if witness.is_right(checksum) is None and sum(tally.read for tally in read[checksum]) >= checksum.size:
                witness.settle([checksum])
        witness.judge()
