"""One source for all ranks: each opens the path for itself, and the checkpoint there may be replaced in between."""

from __future__ import annotations

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.manifest import digest
from transaxle.errors import refuse
from transaxle.formats.catalog.sidecar_files import MANIFEST
from transaxle.live.transport.world import World

_LONGEST = 1 << 30


def refuse_different(checkpoint: Checkpoint, world: World) -> None:
    """Prove that all ranks which opened one path have one checkpoint; collective.

    Copies on the disks of several machines are one if their manifests are, or without manifests their files' sizes.

    Args:
        checkpoint: what this rank opened.
        world: the ranks.

    Raises:
        Refused: CORRUPT, on every rank.
    """
    with world.together():
        mine = checkpoint.path, _identity(checkpoint)
    found = world.gather(mine)
    for rank, (path, identity) in zip(world.ranks, found, strict=True):
        if path == found[0][0] and identity != found[0][1]:
            first = world.ranks[0]
            message = f"rank {rank} opened another checkpoint there than rank {first}: it was replaced meanwhile"
            raise refuse("CORRUPT", message, file=path, hint="Load again, when nobody writes there.")


def _identity(checkpoint: Checkpoint) -> str:
    storage = checkpoint.container.storage
    if storage.single is None and MANIFEST in storage.names() and storage.size(MANIFEST) <= _LONGEST:
        return digest(storage.read(MANIFEST, 0, storage.size(MANIFEST)))
    return digest(repr(sorted(checkpoint.container.files.items())).encode())
