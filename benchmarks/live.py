"""Sharded checkpoints against torch's own: loading at another sharding, saving for a hub, saving in the background.

Promises, at about 1.3 GB on four ranks: a load at another sharding reads at most 1.05 bytes per byte needed, in half of
dcp.load's time, a quarter of it from rows to columns, and from safetensors faster than torch's HF reader, or each in at
most 1.1 of the floor's time; `dcp.load` with `tx.dcp.Reader` takes no longer than with torch's readers; a save in
safetensors takes a third of the time of DCP's HF writer with consolidation where the shards are rows, a tenth where
they are columns, and writes at most 1.02 bytes per byte; `async_save` keeps training for an eighth of what `save`
takes, the first time, after `prepare_async`, for a quarter.

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
OURS, DCP, HF, FLOOR, READER = "transaxle", "dcp", "dcp hf", "floor", "tx.dcp.Reader"
FIRST, PREPARED, WRITE, SEND = "first", "prepared", "write", "send"
BLOCK, CHUNK = 1 << 20, 8 << 20
NEAR = 0.9
"""Share of the floor's speed that always suffices."""
PARTS = ("load", "save", "stall")
State = dict[str, torch.Tensor]
Result = dict[str, Any]


def whole_matrix(number: int, side: int) -> torch.Tensor:
    """Return a weight whose numbers differ by row, by column and from other weights."""
    codes = torch.arange(side * side, dtype=torch.int32) * (2 * number + 3)
    return (codes % 32749).to(torch.int16).view(torch.bfloat16).reshape(side, side)


def state(count: int, side: int, dim: int, *, filled: bool) -> State:
    """Return a state dict of bfloat16 matrices, sharded along one dim over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors: State = {}
    for number in range(count):
        whole = whole_matrix(number, side) if filled else torch.zeros(side, side, dtype=torch.bfloat16)
        part = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
        local = part.to_local().clone()
        tensors[f"layers.{number}.weight"] = DTensor.from_local(
            local, mesh, [Shard(dim)], shape=whole.shape, stride=(side, 1)
        )
    return tensors


def check(loaded_state: State, side: int, dim: int) -> None:
    """Compare the first and the last loaded tensor with torch's own sharding of the whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for number in (0, len(loaded_state) - 1):
        truth = distribute_tensor(whole_matrix(number, side), mesh, [Shard(dim)], src_data_rank=None)
        check_loaded = loaded_state[f"layers.{number}.weight"]
        assert isinstance(check_loaded, DTensor)
        assert torch.equal(check_loaded.to_local().view(torch.int16), truth.to_local().view(torch.int16))


def io_bytes() -> tuple[int, int]:
    """Return (bytes read, bytes written) of this process so far."""
    lines = dict(
        print_comparison.split(": ") for print_comparison in Path("/proc/self/io").read_text("ascii").splitlines()
    )
    return int(lines["rchar"]), int(lines["write_bytes"])


def time_ranks(work: Callable[[], Any]) -> tuple[float, int, int]:
    """Run `work` on all ranks; return (seconds of the slowest, bytes read by all, bytes written by all)."""
    dist.barrier()
    begin, (read, check_saved) = time.monotonic(), io_bytes()
    work()
    took, now = time.monotonic() - begin, io_bytes()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (took, now[0] - read, now[1] - check_saved))
    slowest, reads, writes = zip(*every, strict=True)
    return max(slowest), sum(reads), sum(writes)


def best_rounds(rounds: int, sides: dict[str, Callable[[], Any]], after: Callable[[], None]) -> Result:
    """Run the sides in turns, with `after` after each but the floor; return the best and the first round of each."""
    results: Result = {FIRST: {}}
    for _ in range(rounds):
        for side, work in sides.items():
            took = time_ranks(work)
            if side != FLOOR:
                after()
            results[FIRST].setdefault(side, took[0])
            results[side] = min(results.get(side, took), took)
    return results


def remove(folder: Path) -> None:
    """Remove a saved folder, once all ranks have finished with it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def sources(folder: Path, options: argparse.Namespace) -> Result:
    """Write the sources of the loads from four ranks with row shards: a DCP folder, and files of whole tensors."""
    tensors = state(options.count, options.side, 0, filled=True)
    dcp.save(tensors, checkpoint_id=str(folder / DCP))
    hf_save(tensors, folder / HF)
    return {}


def hf_save(tensors: State, folder: Path) -> None:
    """Save with DCP's HF writer, consolidation included."""
    index = {name: 1 + number * FILES // len(tensors) for number, name in enumerate(tensors)}
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=index, save_distributed=True, enable_consolidation=True,
        thread_count_consolidation=FILES,
    )  # fmt: skip
    dcp.save(tensors, storage_writer=writer)


def read_floor(tensors: State, folder: Path) -> None:
    """Fill this rank's tensors with its share of a folder's blocks: a lower bound for the time of any load."""
    files = [path for path in sorted(folder.iterdir()) if path.stat().st_size >= BLOCK]
    opened = [os.open(path, os.O_RDONLY) for path in files]
    blocks = [(fd, at) for fd in opened for at in range(0, os.fstat(fd).st_size - BLOCK, BLOCK)]
    own_blocks = blocks[dist.get_rank() * len(blocks) // dist.get_world_size() :]
    locals_ = [tensor.to_local() for tensor in tensors.values() if isinstance(tensor, DTensor)]
    octets = [local.view(-1).view(torch.uint8).numpy().data for local in locals_]
    views = [view[start : start + BLOCK] for view in octets for start in range(0, len(view), BLOCK)]

    def read(view: memoryview, block: tuple[int, int]) -> None:
        os.preadv(block[0], [view], block[1])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(read, views, cycle(own_blocks)))
    for fd in opened:
        os.close(fd)


def loads(folder: Path, options: argparse.Namespace, dim: int) -> Result:
    """Load both sources with both tools, sharded along `dim` over all ranks."""
    tensors = state(options.count, options.side, dim, filled=False)
    needed = options.count * options.side * options.side * 2
    checked = []

    def check_loaded() -> None:
        check(tensors, options.side, dim)
        checked.append(True)
        for tensor in tensors.values():
            assert isinstance(tensor, DTensor)
            tensor.to_local().zero_()

    from_dcp = {
        OURS: lambda: tx.load(tensors, folder / DCP),
        DCP: lambda: dcp.load(tensors, checkpoint_id=str(folder / DCP)),
        READER: lambda: dcp.load(tensors, storage_reader=tx.dcp.Reader(folder / DCP)),
        FLOOR: lambda: read_floor(tensors, folder / DCP),
    }
    from_hf = {
        OURS: lambda: tx.load(tensors, folder / HF),
        HF: lambda: dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder / HF))),
        READER: lambda: dcp.load(tensors, storage_reader=tx.dcp.Reader(folder / HF)),
        FLOOR: lambda: read_floor(tensors, folder / HF),
    }
    results = {
        DCP: best_rounds(options.rounds, from_dcp, check_loaded),
        HF: best_rounds(options.rounds, from_hf, check_loaded),
        "needed": needed,
    }
    assert len(checked) == 6 * options.rounds
    return results


def saves(folder: Path, options: argparse.Namespace, dim: int) -> Result:
    """Save a state sharded along `dim` for a hub, with both tools."""
    tensors = state(options.count, options.side, dim, filled=True)
    size = -(-options.count // FILES) * options.side * options.side * 2
    target = folder / "saved"
    target.parent.mkdir(exist_ok=True)

    def check_saved() -> None:
        if dist.get_rank() == 0:
            ck = tx.open(target)
            name = f"layers.{options.count - 1}.weight"
            assert (
                ck[name].tobytes() == whole_matrix(options.count - 1, options.side).view(torch.int16).numpy().tobytes()
            )
        remove(target)

    sides = {
        OURS: lambda: tx.save(tensors, target, to="safetensors", shard_size=size, sync=False),
        HF: lambda: hf_save(tensors, target),
    }
    total = options.count * options.side * options.side * 2
    ranks = dist.get_world_size()
    floor = {WRITE: lambda: write_floor(target, total // ranks)}
    if dim:
        floor[SEND] = lambda: send_floor(total // ranks * (ranks - 1) // ranks)
    results = best_rounds(options.rounds, sides, check_saved)
    return {HF: results, "floor": best_rounds(options.rounds, floor, lambda: remove(target)), "needed": total}


def write_floor(folder: Path, size: int) -> None:
    """Write `size` bytes from each rank's memory into a preallocated file per rank."""
    folder.mkdir(exist_ok=True)
    block = memoryview(bytearray(CHUNK))
    fd = os.open(folder / str(dist.get_rank()), os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, size)
    for start in range(0, size, CHUNK):
        os.pwrite(fd, block[: min(CHUNK, size - start)], start)
    os.close(fd)


def send_floor(size: int) -> None:
    """Let each rank send `size` bytes to the others, in blocks."""
    ranks = dist.get_world_size()
    outgoing = torch.ones(ranks * CHUNK // 2, dtype=torch.uint8)
    received = torch.empty_like(outgoing)
    for _ in range(-(-size // ((ranks - 1) * CHUNK // 2))):
        dist.all_to_all_single(received, outgoing)


def stalls(folder: Path, options: argparse.Namespace) -> Result:
    """Save a state in the foreground and in the background, both synced to disk."""
    tensors = state(options.count, options.side, 0, filled=True)
    target = folder / "stalled"
    jobs: list[tx.SaveJob] = []
    locals_ = [tensor.to_local() for tensor in tensors.values() if isinstance(tensor, DTensor)]
    copies = [torch.ones_like(each) for each in locals_]
    sides = {
        "save": lambda: tx.save(tensors, target, to="safetensors"),
        "async_save": lambda: jobs.append(tx.async_save(tensors, target, to="safetensors")),
        FLOOR: lambda: [copy.copy_(each) for copy, each in zip(copies, locals_, strict=True)],
    }

    def check_saved() -> None:
        for job in jobs:
            job.result()
        jobs.clear()
        remove(target)

    prepared = time_ranks(lambda: tx.prepare_async(tensors))[0]
    first = time_ranks(sides["async_save"])[0]
    check_saved()
    return {"stall": best_rounds(options.rounds, sides, check_saved), FIRST: first, PREPARED: prepared}


def _rank(rank: int, world: int, task: Callable[..., Result], args: tuple[Any, ...], meeting: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
    result = task(*args)
    if rank == 0:
        Path(f"{meeting}.json").write_text(json.dumps(result), "utf-8")
    dist.barrier()
    gc.collect()  # DTensors that outlive the group may abort the process
    dist.destroy_process_group()


def run(world: int, task: Callable[..., Result], *args: Any) -> Result:
    """Run a task on `world` ranks; return the result of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder, "meeting"))
        mp.spawn(_rank, (world, task, args, meeting), nprocs=world, daemon=False)
        result: Result = json.loads(Path(f"{meeting}.json").read_text("utf-8"))
    return result


@contextmanager
def workplace(options: argparse.Namespace) -> Iterator[Path]:
    """Create a folder for all written files; the context gives its path."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="live-") as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Limits:
    """Promised limits of one comparison."""

    ratio: float
    """Least speed, as a multiple of the other side's; `NEAR` of the floor's speed suffices, too."""
    bytes_per_byte: float
    """Most bytes read or written per byte needed."""


def print_comparison(label: str, peer: str, result: Result, promised: Limits, at: int, promises: Promises) -> None:
    """Print one comparison: times, their ratio, and bytes per byte needed (`at`: 1 read, 2 written)."""
    needed = result["needed"]
    own_run, peer_run = result[OURS], result[peer]
    ratio, moved = peer_run[0] / own_run[0], own_run[at] / needed
    mapped = peer == HF and at == 1
    peer_text = "mapped" if mapped else f"{peer_run[at] / needed:6.2f}"
    floor = result[FLOOR][0]
    print(
        f"  {label:34s} {own_run[0]:7.3f} s {peer_run[0]:7.3f} s {floor:7.3f} s   bytes {moved:.2f}, torch {peer_text}"
    )
    reach = peer_run[0] / floor
    promises.at_least(f"{label} against torch", ratio, min(promised.ratio, NEAR * reach), floor=[reach])
    promises.at_most(
        f"{label}, {('read', 'check_saved')[at - 1]} for each byte needed", moved, promised.bytes_per_byte, "bytes"
    )


def print_first_round(first: dict[str, float], floor: Result) -> None:
    """Print the times of the first round of a save, and of the floor."""
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
    options = parser.parse_args()
    options.side = 2048 if options.quick else SIDE
    options.rounds = min(options.rounds, 2) if options.quick else options.rounds
    options.count = max(
        FILES, (67 if options.quick else options.megabytes) * 1_000_000 // (options.side * options.side * 2)
    )
    parts = options.part or PARTS
    total = options.count * options.side * options.side * 2
    label = f"{options.count} matrices of {options.side}^2 bf16"
    print(f"{total / 1e9:.2f} GB, {label}, {os.cpu_count()} cores, best of {options.rounds}")
    print(f"  {'':34s} {OURS:>9s} {'torch':>9s} {FLOOR:>9s}")
    promises = Promises()
    with workplace(options) as folder:
        if "load" in parts:
            run(RANKS, sources, folder, options)
            for label, world, dim, least in (
                ("rows 4 -> 2", 2, 0, 2),
                ("rows 4 -> 3", 3, 0, 2),
                ("rows -> columns", 4, 1, 4),
            ):
                results = run(world, loads, folder, options, dim)
                needed = {"needed": results["needed"]}
                print_comparison(
                    f"load {label}, DCP folder", DCP, results[DCP] | needed, Limits(least, 1.05), 1, promises
                )
                print_comparison(f"load {label}, safetensors", HF, results[HF] | needed, Limits(1.1, 1.05), 1, promises)
                for peer in (DCP, HF):
                    by_reader = {**results[peer], OURS: results[peer][READER]} | needed
                    title = f"dcp.load {label} with tx.dcp.Reader, {peer}"
                    print_comparison(title, peer, by_reader, Limits(1, 1.05), 1, promises)
        if "save" in parts:
            for label, dim, least in (("rows", 0, 3.0), ("columns", 1, 10.0)):
                results = run(RANKS, saves, folder, options, dim)
                at_all = sum(results["floor"][each][0] for each in (WRITE, SEND) if each in results["floor"])
                needed = {"needed": results["needed"], FLOOR: [at_all]}
                print_comparison(
                    f"save {label} as safetensors", HF, results[HF] | needed, Limits(least, 1.02), 2, promises
                )
                print_first_round(results[HF][FIRST], results["floor"])
        if "stall" in parts:
            outcome = run(RANKS, stalls, folder, options)
            results = outcome["stall"]
            (save, *_), (stall, *_), (copy, *_) = results["save"], results["async_save"], results[FLOOR]
            prepared = f"after {outcome[PREPARED]:.2f} s of prepare_async"
            print(f"  async_save {stall:.2f} s, the first one {outcome[FIRST]:.2f} s {prepared}; save {save:.2f} s")
            label = "async_save, training stands still, against save"
            promises.at_least(label, save / stall, 8, floor=[save / copy])
            promises.at_least("async_save, the first one, against save", save / outcome[FIRST], 4)
    return promises.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
