"""Writing: all ranks carry one plan out, each its own byte ranges, straight into the final files.

Rank 0 makes the hidden folder and the files; everybody writes into them; rank 0 adds what is known beforehand and the
manifest, and moves the result to its place. What was written is hashed as it lies in the files.

A service takes a file from its beginning to its end: there the runs go to rank 0 over the process group, which sends
them on, so the network of one machine is the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import xxhash

from transaxle.engine.copies import PlannedCheck
from transaxle.engine.finished import manifest_of
from transaxle.engine.manifest import digest, encode
from transaxle.engine.plan import PlannedTensor, Prepared
from transaxle.engine.transfer import Reader, Transfer
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.company import MANIFEST
from transaxle.formats.local import LocalStorage
from transaxle.formats.location import Stage, staging_at
from transaxle.live.assemble import Item, Run, assemble
from transaxle.live.clock import Clock
from transaxle.live.landing import Bytes
from transaxle.live.world import World
from transaxle.live.writer import Writer

Put = Callable[[PlannedTensor, tuple[str, int], memoryview], None]
"""Takes bytes of a tensor: which one, file and offset, the bytes."""
_HASHED = 4 << 20
"""Bytes hashed at once."""


def write(prepared: Prepared, dst: str, world: World, clock: Clock, *, overwrite: bool, sync: bool) -> tuple[int, int]:
    """Carry a plan out from all ranks' memory, and commit the result whole or not at all; collective.

    Args:
        prepared: the plan, the same on all ranks.
        dst: where.
        world: the ranks.
        clock: takes the time of the stages.
        overwrite: replace the checkpoint at `dst`.
        sync: make everything durable before the commit.

    Returns:
        bytes received from other ranks, and bytes written by this one.

    Raises:
        TransaxleError: on every rank; the target is then as it was.
    """
    plan = prepared.plan
    with clock.stage("check"), world.together():
        _check_copies(plan.checks, prepared.checkpoint.container.storage, world)
    lead = world.rank == world.ranks[0]
    with ExitStack() as stack:
        stage: Stage | None = None
        with world.together():
            if lead:
                stage = staging_at(dst, overwrite=overwrite, sync=sync)
                stack.enter_context(stage)
                stage.prepare(plan.files if stage.single is None else prepared.draft.files)
                for fragment in prepared.draft.fragments:
                    stage.pwrite(fragment.file, fragment.offset, memoryview(fragment.data))
        folder, ordered = world.gather(None if stage is None else (str(stage.path), stage.ordered))[0] or ("", False)
        if ordered:
            received, own, hashes = _send(prepared, stage, world, clock)
        else:
            received, own, hashes = _write(prepared, folder, world, clock, sync=sync)
        with clock.stage("commit"), world.together():
            if stage is not None:
                if stage.single is None:
                    stage.write(MANIFEST, encode(manifest_of(prepared, hashes, _carry(prepared, stage))))
                stage.commit()
    return received, own


def _write(
    prepared: Prepared, folder: str, world: World, clock: Clock, *, sync: bool
) -> tuple[int, int, dict[str, str]]:
    """Write every run of bytes from its owner into the files; return bytes received and written, and all hashes."""
    with clock.stage("write"), world.together():
        writer = Writer(folder, sync=sync)
        received, own = _produce(prepared, world, (), lambda _, place, data: writer.pwrite(*place, data))
        writer.finish()
    with clock.stage("hash"), world.together():
        hashes = _hashed(prepared.plan.tensors, folder, world)
    return received, own, {name: digest for each in world.gather(hashes) for name, digest in each.items()}


def _send(prepared: Prepared, stage: Stage | None, world: World, clock: Clock) -> tuple[int, int, dict[str, str]]:
    """Send the files from their beginning to their end: all runs go to the first rank, in order.

    Returns:
        as `_write`; the hashes are known to the first rank only, which alone needs them.
    """
    hashes = {tensor.name: xxhash.xxh3_128() for tensor in prepared.plan.tensors}

    def put(tensor: PlannedTensor, place: tuple[str, int], data: memoryview) -> None:
        if stage is not None:
            stage.pwrite(*place, data)
            hashes[tensor.name].update(data)

    with clock.stage("write"), world.together():
        received, own = _produce(prepared, world, world.ranks[:1], put)
    return received, own, {name: hashed.hexdigest() for name, hashed in hashes.items()}


def _produce(prepared: Prepared, world: World, takers: tuple[int, ...], put: Put) -> tuple[int, int]:
    """Produce the tensors, and put every run of bytes where it belongs, at its owner or at `takers`."""
    tensors = prepared.plan.tensors
    storage = prepared.checkpoint.container.storage
    own = 0

    def write(run: Run, data: Bytes) -> None:
        nonlocal own
        tensor = tensors[run.item.key]
        for place in _places(tensor.places, run.start, run.stop):
            put(tensor, (place.file, place.source), data[place.target - run.start :][: place.width].data)
        own += run.size

    items = [Item(number, tensor.nbytes, tensor.transfers, takers) for number, tensor in enumerate(tensors)]
    received = assemble(items, storage, world, write)
    return received, own


def _places(places: Sequence[Transfer], start: int, stop: int) -> Iterator[Transfer]:
    """Yield the parts of a tensor's places that hold its bytes `[start, stop)`."""
    for place in places:
        low, high = max(start, place.target), min(stop, place.target_end)
        if low < high:
            yield Transfer(place.file, place.source + low - place.target, low, high - low)


def _hashed(tensors: Sequence[PlannedTensor], folder: str, world: World) -> dict[str, str]:
    """Hash this rank's share of what was written, as it lies in the files."""
    load = dict.fromkeys(world.ranks, 0)
    found: dict[str, str] = {}
    storage = LocalStorage(folder)
    block = memoryview(bytearray(_HASHED))
    for tensor in tensors:
        rank = min(load, key=lambda each: (load[each], each))
        load[rank] += tensor.nbytes
        if rank != world.rank:
            continue
        hashed = xxhash.xxh3_128()
        for place in tensor.places:
            for start in range(0, place.width, _HASHED):
                view = block[: min(_HASHED, place.width - start)]
                storage.read_into(place.file, place.source + start, view)
                hashed.update(view)
        found[tensor.name] = hashed.hexdigest()
    storage.close()
    return found


def _carry(prepared: Prepared, stage: Stage) -> dict[str, str]:
    """Write the carried files; return their hashes."""
    storage = prepared.checkpoint.container.storage
    found = {}
    for name in prepared.plan.carried:
        data = storage.read(name, 0, storage.size(name))
        stage.pwrite(name, 0, memoryview(data))
        found[name] = digest(data)
    return found


def _check_copies(checks: Sequence[PlannedCheck], reader: Reader, world: World) -> None:
    """Prove tensors equal that are stored once for several names; each pair comes together at one rank.

    Raises:
        Refused: UNEQUAL_COPIES, on the rank that compared.
    """
    items = []
    for number, check in enumerate(checks):
        taker = (world.ranks[number % world.size],)
        items.append(Item(2 * number, check.nbytes, check.first, taker))
        items.append(Item(2 * number + 1, check.nbytes, check.second, taker))
    hashes: dict[int, xxhash.xxh3_128] = {}

    def take(run: Run, data: Bytes) -> None:
        hashes.setdefault(run.item.key, xxhash.xxh3_128()).update(data.data)

    assemble(items, reader, world, take)
    problems = [
        Refusal("UNEQUAL_COPIES", f"{check.why}\nbut their bytes differ", Where(None, check.name))
        for number, check in enumerate(checks)
        if 2 * number in hashes and hashes[2 * number].digest() != hashes[2 * number + 1].digest()
    ]
    if problems:
        raise gathered(problems)
