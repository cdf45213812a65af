"""What all ranks have read together, held against the checksums that the files give."""

from __future__ import annotations

from transaxle.formats.catalog.catalog import Checksum
from transaxle.formats.catalog.checksums import Tally, witness_of
from transaxle.formats.storage.storage import Storage
from transaxle.live.transport.world import World


def check_sums(storage: Storage, world: World) -> None:
    """Check every range that the ranks have read whole, each alone or together; collective.

    What they have read in another order than it lies in is read once more by one of them. A range of which they need
    only a part is not checked: the rest of it would have to be read for that.

    Raises:
        Refused: CORRUPT, on every rank.
        StorageError: IO.
    """
    witness = witness_of(storage)
    told = world.gather(None if witness is None else {each: witness.tally(each) for each in witness.open()})
    if witness is None or any(rank is None for rank in told):
        return  # all ranks read the same files, which give none
    with world.together():
        known: dict[Checksum, list[Tally]] = {}
        for rank in told:
            for checksum, tally in (rank or {}).items():
                known.setdefault(checksum, []).append(tally)
        ranges = sorted(known, key=lambda each: (each.file, each.offset))
        for checksum in ranges[world.ranks.index(world.rank) :: world.size]:
            tallies = known[checksum]
            witness.count(checksum, [part for tally in tallies for part in tally.parts])
            if witness.is_right(checksum) is None and sum(tally.read for tally in tallies) >= checksum.size:
                witness.settle([checksum])
        witness.judge()
