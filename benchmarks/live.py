"""Sharded checkpoints against torch's own: loading at another sharding, saving for a hub, saving in the background.

Promises, at about 1.3 GB on four ranks: a load at another sharding reads at most 1.05 bytes per byte needed, in half of
dcp.load's time, a quarter of it from rows to columns, and from safetensors faster than torch's HF reader, or each in at
most 1.1 of the floor's time; a save in safetensors takes a third of the time of DCP's HF writer with consolidation
where the shards are rows, a tenth where they are columns, and writes at most 1.02 bytes per byte; `async_save` keeps
training for an eighth of what `save` takes, the first time, after `prepare_async`, for a quarter.

Both sides run in the same processes (gloo on loopback), one after the other, with the source in the page cache. A run
takes as long as its slowest rank; of several rounds the best one of each side counts, for the machine may be busy with
other things. Bytes read are those of read calls, bytes written those of pages handed to the disk, as Linux counts them
for all ranks together (/proc/self/io; on a file system in memory the latter are 0). DCP's HF reader maps its files, so
its reads are not counted. The floor is the time that the same processes need for as many bytes of the same files, read
into the same tensors by nothing but `preadv` of 1 MB. Ours hashes what it writes (rows it reads back for that); DCP
does not. Both sides leave out waiting for the disk, but for the stall. Below each save stands its first round, which
also sets things up, and what the machine needs at least: to write the same bytes from memory into files, and to send
over gloo what changes ranks (between ranks of one machine ours goes through shared memory).

    python benchmarks/live.py [--quick] [--megabytes 1342] [--rounds 3] [--part load] [--folder DIR]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from promises import Promises
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import transaxle as tx

RANKS, SIDE, FILES = 4, 4096, 4
OURS, DCP, HF, FLOOR = "transaxle", "dcp", "dcp hf", "floor"
FIRST, PREPARED, WRITE, SEND = "first", "prepared", "write", "send"
BLOCK, CHUNK = 1 << 20, 8 << 20
NEAR = 0.9
"""Of the floor's speed: who is so near need not be faster."""
PARTS = ("load", "save", "stall")
State = dict[str, torch.Tensor]
Found = dict[str, Any]


def full(number: int, side: int) -> torch.Tensor:
    """One weight: numbers that differ from row to row, column to column and weight to weight."""
    codes = torch.arange(side * side, dtype=torch.int32) * (2 * number + 3)
    return (codes % 32749).to(torch.int16).view(torch.bfloat16).reshape(side, side)


def state(count: int, side: int, dim: int, *, filled: bool) -> State:
    """A state dict of bfloat16 matrices, cut along one dim over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: State = {}
    for number in range(count):
        whole = full(number, side) if filled else torch.zeros(side, side, dtype=torch.bfloat16)
        part = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
        own = part.to_local().clone()
        found[f"layers.{number}.weight"] = DTensor.from_local(
            own, mesh, [Shard(dim)], shape=whole.shape, stride=(side, 1)
        )
    return found


def check(found: State, side: int, dim: int) -> None:
    """Hold the first and the last loaded tensor against a cut by torch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for number in (0, len(found) - 1):
        truth = distribute_tensor(full(number, side), mesh, [Shard(dim)], src_data_rank=None)
        loaded = found[f"layers.{number}.weight"]
        assert isinstance(loaded, DTensor)
        assert torch.equal(loaded.to_local().view(torch.int16), truth.to_local().view(torch.int16))


def counted() -> tuple[int, int]:
    """Bytes that this process has read and written so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
    return int(lines["rchar"]), int(lines["write_bytes"])


def timed(work: Callable[[], Any]) -> tuple[float, int, int]:
    """Run something on all ranks; return the slowest one's seconds, and the bytes that all read and wrote."""
    dist.barrier()
    begin, (read, written) = time.monotonic(), counted()
    work()
    took, now = time.monotonic() - begin, counted()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (took, now[0] - read, now[1] - written))
    slowest, reads, writes = zip(*every, strict=True)
    return max(slowest), sum(reads), sum(writes)


def best(rounds: int, sides: dict[str, Callable[[], Any]], after: Callable[[], None]) -> Found:
    """Let the sides take turns, each but the floor followed by `after`; keep the best round of each, and the first."""
    found: Found = {FIRST: {}}
    for _ in range(rounds):
        for side, work in sides.items():
            took = timed(work)
            if side != FLOOR:
                after()
            found[FIRST].setdefault(side, took[0])
            found[side] = min(found.get(side, took), took)
    return found


def remove(folder: Path) -> None:
    """Remove what a save has written, once all ranks are done with it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def sources(folder: Path, said: argparse.Namespace) -> Found:
    """Write what the loads read: by four ranks, cut by rows; as a DCP folder, and as files of whole tensors."""
    held = state(said.count, said.side, 0, filled=True)
    dcp.save(held, checkpoint_id=str(folder / DCP))
    hf_save(held, folder / HF)
    return {}


def hf_save(held: State, folder: Path) -> None:
    """Save with DCP's HF writer, consolidation included."""
    index = {name: 1 + number * FILES // len(held) for number, name in enumerate(held)}
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=index, save_distributed=True, enable_consolidation=True,
        thread_count_consolidation=FILES,
    )  # fmt: skip
    dcp.save(held, storage_writer=writer)


def bare(held: State, folder: Path) -> None:
    """Fill this rank's tensors with its share of a folder's blocks: what no load of them can beat."""
    files = [path for path in sorted(folder.iterdir()) if path.stat().st_size >= BLOCK]
    opened = [os.open(path, os.O_RDONLY) for path in files]
    blocks = [(fd, at) for fd in opened for at in range(0, os.fstat(fd).st_size - BLOCK, BLOCK)]
    own = blocks[dist.get_rank() * len(blocks) // dist.get_world_size() :]
    locals_ = [tensor.to_local() for tensor in held.values() if isinstance(tensor, DTensor)]
    octets = [local.view(-1).view(torch.uint8).numpy().data for local in locals_]
    views = [view[start : start + BLOCK] for view in octets for start in range(0, len(view), BLOCK)]

    def read(view: memoryview, block: tuple[int, int]) -> None:
        os.preadv(block[0], [view], block[1])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(read, views, cycle(own)))
    for fd in opened:
        os.close(fd)


def loads(folder: Path, said: argparse.Namespace, dim: int) -> Found:
    """Load both sources, cut along `dim` over the ranks there are, with both tools."""
    held = state(said.count, said.side, dim, filled=False)
    needed = said.count * said.side * said.side * 2
    checked = []

    def loaded() -> None:
        check(held, said.side, dim)
        checked.append(True)
        for tensor in held.values():
            assert isinstance(tensor, DTensor)
            tensor.to_local().zero_()

    from_dcp = {
        OURS: lambda: tx.load(held, folder / DCP),
        DCP: lambda: dcp.load(held, checkpoint_id=str(folder / DCP)),
        FLOOR: lambda: bare(held, folder / DCP),
    }
    from_hf = {
        OURS: lambda: tx.load(held, folder / HF),
        HF: lambda: dcp.load(held, storage_reader=HuggingFaceStorageReader(str(folder / HF))),
        FLOOR: lambda: bare(held, folder / HF),
    }
    found = {DCP: best(said.rounds, from_dcp, loaded), HF: best(said.rounds, from_hf, loaded), "needed": needed}
    assert len(checked) == 4 * said.rounds
    return found


def saves(folder: Path, said: argparse.Namespace, dim: int) -> Found:
    """Save a state cut along `dim` for a hub, with both tools."""
    held = state(said.count, said.side, dim, filled=True)
    size = -(-said.count // FILES) * said.side * said.side * 2
    target = folder / "saved"
    target.parent.mkdir(exist_ok=True)

    def written() -> None:
        if dist.get_rank() == 0:
            ck = tx.open(target)
            name = f"layers.{said.count - 1}.weight"
            assert ck[name].tobytes() == full(said.count - 1, said.side).view(torch.int16).numpy().tobytes()
        remove(target)

    sides = {
        OURS: lambda: tx.save(held, target, to="safetensors", shard_size=size, sync=False),
        HF: lambda: hf_save(held, target),
    }
    total = said.count * said.side * said.side * 2
    ranks = dist.get_world_size()
    floor = {WRITE: lambda: bare_write(target, total // ranks)}
    if dim:
        floor[SEND] = lambda: bare_send(total // ranks * (ranks - 1) // ranks)
    found = best(said.rounds, sides, written)
    return {HF: found, "floor": best(said.rounds, floor, lambda: remove(target)), "needed": total}


def bare_write(folder: Path, size: int) -> None:
    """Write so many bytes from each rank's memory, into a file for each that has its space already."""
    folder.mkdir(exist_ok=True)
    block = memoryview(bytearray(CHUNK))
    fd = os.open(folder / str(dist.get_rank()), os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, size)
    for start in range(0, size, CHUNK):
        os.pwrite(fd, block[: min(CHUNK, size - start)], start)
    os.close(fd)


def bare_send(size: int) -> None:
    """Let each rank send so many bytes to the others, in blocks."""
    ranks = dist.get_world_size()
    sent = torch.ones(ranks * CHUNK // 2, dtype=torch.uint8)
    received = torch.empty_like(sent)
    for _ in range(-(-size // ((ranks - 1) * CHUNK // 2))):
        dist.all_to_all_single(received, sent)


def stalls(folder: Path, said: argparse.Namespace) -> Found:
    """Save a state in the foreground and in the background, both durable."""
    held = state(said.count, said.side, 0, filled=True)
    target = folder / "stalled"
    jobs: list[tx.SaveJob] = []
    own = [tensor.to_local() for tensor in held.values() if isinstance(tensor, DTensor)]
    copies = [torch.ones_like(each) for each in own]
    sides = {
        "save": lambda: tx.save(held, target, to="safetensors"),
        "async_save": lambda: jobs.append(tx.async_save(held, target, to="safetensors")),
        FLOOR: lambda: [copy.copy_(each) for copy, each in zip(copies, own, strict=True)],
    }

    def written() -> None:
        for job in jobs:
            job.result()
        jobs.clear()
        remove(target)

    prepared = timed(lambda: tx.prepare_async(held))[0]
    first = timed(sides["async_save"])[0]
    written()
    return {"stall": best(said.rounds, sides, written), FIRST: first, PREPARED: prepared}


def _rank(rank: int, world: int, task: Callable[..., Found], args: tuple[Any, ...], meeting: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
    found = task(*args)
    if rank == 0:
        Path(f"{meeting}.json").write_text(json.dumps(found), "utf-8")
    dist.barrier()
    gc.collect()  # DTensors that outlive the group may abort the process
    dist.destroy_process_group()


def run(world: int, task: Callable[..., Found], *args: Any) -> Found:
    """Run a task on so many ranks; return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        mp.spawn(_rank, (world, task, args, meeting), nprocs=world, daemon=False)
        found: Found = json.loads(Path(f"{meeting}.json").read_text("utf-8"))
    return found


@contextmanager
def workplace(said: argparse.Namespace) -> Iterator[Path]:
    """A folder for all that is written."""
    with tempfile.TemporaryDirectory(dir=said.folder, prefix="live-") as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Promised:
    """What is promised of one comparison."""

    ratio: float
    """Times the other's speed at least; `NEAR` of the floor will do."""
    most: float
    """Bytes for each byte needed at most."""


def line(what: str, other: str, found: Found, promised: Promised, at: int, promises: Promises) -> None:
    """Print one comparison: times, their ratio, and bytes for each byte needed (`at`: 1 read, 2 written)."""
    needed = found["needed"]
    mine, theirs = found[OURS], found[other]
    ratio, moved = theirs[0] / mine[0], mine[at] / needed
    mapped = other == HF and at == 1
    peer = "mapped" if mapped else f"{theirs[at] / needed:6.2f}"
    floor = found[FLOOR][0]
    print(f"  {what:34s} {mine[0]:7.3f} s {theirs[0]:7.3f} s {floor:7.3f} s   bytes {moved:.2f}, torch {peer}")
    reach = theirs[0] / floor
    promises.at_least(f"{what} against torch", ratio, min(promised.ratio, NEAR * reach), floor=[reach])
    promises.at_most(f"{what}, {('read', 'written')[at - 1]} for each byte needed", moved, promised.most, "bytes")


def below(first: dict[str, float], floor: Found) -> None:
    """Print the first round of a save, and what the machine needs for its bytes."""
    print(f"  {'  the first one':34s} {first[OURS]:7.2f} s {first[HF]:7.2f} s")
    sending = f", and {floor[SEND][0]:.2f} s to send over gloo what changes ranks" if SEND in floor else ""
    print(f"  {'  at least':34s} {floor[WRITE][0]:7.2f} s to write it{sending}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="67 MB of smaller matrices, at most two rounds")
    parser.add_argument("--megabytes", type=int, default=1342, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the best one counts")
    parser.add_argument("--part", choices=PARTS, action="append", help="what to measure; default: everything")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    said = parser.parse_args()
    said.side = 2048 if said.quick else SIDE
    said.rounds = min(said.rounds, 2) if said.quick else said.rounds
    said.count = max(FILES, (67 if said.quick else said.megabytes) * 1_000_000 // (said.side * said.side * 2))
    parts = said.part or PARTS
    total = said.count * said.side * said.side * 2
    what = f"{said.count} matrices of {said.side}^2 bf16"
    print(f"{total / 1e9:.2f} GB, {what}, {os.cpu_count()} cores, best of {said.rounds}")
    print(f"  {'':34s} {OURS:>9s} {'torch':>9s} {FLOOR:>9s}")
    promises = Promises()
    with workplace(said) as folder:
        if "load" in parts:
            run(RANKS, sources, folder, said)
            for what, world, dim, least in (
                ("rows 4 -> 2", 2, 0, 2),
                ("rows 4 -> 3", 3, 0, 2),
                ("rows -> columns", 4, 1, 4),
            ):
                found = run(world, loads, folder, said, dim)
                held = {"needed": found["needed"]}
                line(f"load {what}, DCP folder", DCP, found[DCP] | held, Promised(least, 1.05), 1, promises)
                line(f"load {what}, safetensors", HF, found[HF] | held, Promised(1.1, 1.05), 1, promises)
        if "save" in parts:
            for what, dim, least in (("rows", 0, 3.0), ("columns", 1, 10.0)):
                found = run(RANKS, saves, folder, said, dim)
                at_all = sum(found["floor"][each][0] for each in (WRITE, SEND) if each in found["floor"])
                held = {"needed": found["needed"], FLOOR: [at_all]}
                line(f"save {what} as safetensors", HF, found[HF] | held, Promised(least, 1.02), 2, promises)
                below(found[HF][FIRST], found["floor"])
        if "stall" in parts:
            told = run(RANKS, stalls, folder, said)
            found = told["stall"]
            (save, *_), (stall, *_), (copy, *_) = found["save"], found["async_save"], found[FLOOR]
            prepared = f"after {told[PREPARED]:.2f} s of prepare_async"
            print(f"  async_save {stall:.2f} s, the first one {told[FIRST]:.2f} s {prepared}; save {save:.2f} s")
            what = "async_save, training stands still, against save"
            promises.at_least(what, save / stall, 8, floor=[save / copy])
            promises.at_least("async_save, the first one, against save", save / told[FIRST], 4)
    return promises.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
