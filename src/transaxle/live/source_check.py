"""Checks the bytes that ranks read from a checkpoint: against checksums in the files, and against recorded hashes.

Ranks often read a part of a tensor each, and a hash is that of the whole tensor. Therefore the ranks first combine what
they have read. A tensor that they have read completely is compared with its hash: by the rank that has read all of it,
while it did so, or else by one rank, which reads it a second time. A tensor of which all ranks together need less than
half is not compared, because the rest of it would have to be read for that; the report names it.
"""

from __future__ import annotations

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.source_hashes import (
    UNCHECKED,
    HashWitness,
    containers_of,
    hash_evidence,
    problems_of,
    watch_hashes,
)
from transaxle.errors import gathered
from transaxle.formats.catalog import Checksum
from transaxle.formats.checksums import Tally, Witness
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import Storage, layer, lowest
from transaxle.live.transport.world import World


class SourceCheck:
    """The check of the bytes that the ranks read from a checkpoint. All ranks must create it before they read, and call
    `finish` afterwards.

    Copies of a checkpoint on several machines count as one: each tensor is compared on one machine.

    Args:
        checkpoint: the checkpoint.
        world: all ranks that take part.
        is_enabled: whether to compare anything; if False, only a file that is rewritten while it is read is refused.

    Attributes:
        against: what the bytes are compared with: `manifest`, `digests`, `structure` or `unchecked`.
        partly_read: names of the tensors that have a hash, but were not compared with it, because the ranks have read
            less than half of them; empty before `finish`.

    Raises:
        Refused: raised on every rank with code CORRUPT, if files do not match their hashes outside their tensors.
        StorageError: with code IO, if a file cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, world: World, *, is_enabled: bool) -> None:
        self._containers = tuple(containers_of(checkpoint.container))
        self._world, self._is_enabled = world, is_enabled
        self.against, self.partly_read = UNCHECKED, tuple[str, ...]()
        if not is_enabled:
            return
        with world.together():
            self.against = hash_evidence(checkpoint.container)
            for container in self._containers:
                watch_hashes(container.storage)
            if world.rank == world.ranks[0]:  # every rank has read the headers, and one compares them
                _refuse_changed_files(checkpoint)

    def finish(self) -> None:
        """Check that no file was rewritten while it was read, and that the bytes match their checksums and hashes; all
        ranks must call this method.

        For an object in a storage service, the version is checked at every request instead.

        Raises:
            Refused: raised on every rank with code CORRUPT, if files have changed or bytes do not match.
            StorageError: with code IO, if the source cannot be read.
        """
        for container in self._containers:
            with self._world.together():
                files = lowest(container.storage)
                if isinstance(files, LocalStorage):
                    files.refuse_rewritten()
            if self._is_enabled:
                _check_sums(container.storage, self._world)
                self.partly_read += _check_hashes(container.storage, self._world)


def _refuse_changed_files(checkpoint: Checkpoint) -> None:
    """Compare the bytes outside the tensors with their hashes. A file may be missing: a load that needs its tensors
    refuses that.

    Raises:
        Refused: with code CORRUPT, if files have changed.
        StorageError: with code IO, if a file cannot be read.
    """
    problems = [
        problem
        for container in containers_of(checkpoint.container)
        for problem in problems_of(
            container.storage,
            copies_about_use=False,
            config_given=checkpoint.settings.config is not None or container is not checkpoint.container,
        )
        if problem.code != "INCOMPLETE"
    ]
    if problems:
        raise gathered(problems)


def _check_hashes(storage: Storage, world: World) -> tuple[str, ...]:
    """Compare each tensor of which the ranks together have read half or more with its hash; all ranks must call this
    function.

    Returns:
        the names of the tensors of which less was read.

    Raises:
        Refused: raised on every rank with code CORRUPT, if a tensor does not match its hash.
        StorageError: with code IO, if the source cannot be read.
    """
    witness = layer(storage, HashWitness)
    is_watching = witness is not None and witness.is_watching
    of_all_ranks = world.gather(witness.reads() if witness is not None and is_watching else None)
    reads = [bytes_read for bytes_read in of_all_ranks if bytes_read is not None]
    if witness is None or len(reads) < world.size:
        return ()  # the source has no hashes, and all ranks come to the same result
    read_mostly = witness.read_mostly(reads)
    unproved = [number for number, mostly in read_mostly.items() if mostly]
    with world.together():
        witness.compare(unproved[world.ranks.index(world.rank) :: world.size])
    return tuple(witness.name_of(number) for number, mostly in read_mostly.items() if not mostly)


def _check_sums(storage: Storage, world: World) -> None:
    """Compare each byte range that the ranks together have read completely with its checksum; all ranks must call this
    function.

    The partial checksums of all ranks are combined, even if the ranks read alternating runs. If the checksums cannot be
    combined, one rank reads the range again. A range that was read only in part is not checked, because the rest of it
    would have to be read for this.

    Raises:
        Refused: raised on every rank with code CORRUPT, if bytes do not match their checksums.
        StorageError: with code IO, if the source cannot be read.
    """
    witness = layer(storage, Witness)
    of_all_ranks = world.gather(
        None if witness is None else {summed: witness.tally(summed) for summed in witness.open()}
    )
    if witness is None or any(tallies is None for tallies in of_all_ranks):
        return  # the source's files have no checksums, and all ranks come to the same result
    with world.together():
        read: dict[Checksum, list[Tally]] = {}
        for tallies in of_all_ranks:
            for checksum, tally in (tallies or {}).items():
                read.setdefault(checksum, []).append(tally)
        ranges = sorted(read, key=lambda summed: (summed.file, summed.offset))
        for checksum in ranges[world.ranks.index(world.rank) :: world.size]:
            witness.combine_tallies(checksum, read[checksum])
            if witness.is_right(checksum) is None and sum(tally.read for tally in read[checksum]) >= checksum.size:
                witness.check_rest([checksum])
        witness.refuse_wrong()
