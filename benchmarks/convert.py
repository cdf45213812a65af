"""Promise: converting is about as fast as copying, in fixed memory, and many times as fast as what people use instead.

A Qwen3-MoE-like checkpoint (8 layers x 64 experts, 1.3 GB of random bf16 in shards of 500 MB) is converted with a hash
of every tensor: into `transformers`, which stacks and fuses every expert; into `automodel`, which transposes them too;
and out of folders that torch's DCP wrote from four ranks, cut along the rows or along the last dim. Whole processes
with bytecode cached, in turn with `cp -r` of the same files; ratios are taken pair by pair within one run. Beside them,
on the same files: the script people write (`safe_open`, `torch.stack`, `save_file`), transformers' own load and save,
and torch's `consolidate_safetensors_files_on_every_rank`.

Beside a ratio that misses its promise stands a floor, from the same rounds, but for the durable case: a process that
imports numpy and xxhash and nothing of ours, and whose threads take the source's files from one another, read each in
order, hash what they read and write it. So fast could be any Python process that hashes on the way. Pieces are of 1 MB:
with 8 MB, which no cache near a core holds, the floor takes twice the processor time.

Then 36 layers, 6 GB, by two workers and by one, in a file system in memory: a disk cannot hold back so much, and both
would wait for it. `--quick` leaves this out, and transformers and the consolidation.

Nothing waits for the disk, but for the durable case, which stands against `cp -r` and `sync`. On a busy machine the
ratios to `cp` are lower: it needs one core, a conversion all. What all of them do alike, making pages for the files,
takes several times as long where a host must first find the memory, as on most virtual machines. So before each run
a file of as many bytes is written and removed.

    python benchmarks/convert.py [--rounds 5] [--layers 8] [--experts 64] [--jobs 2] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import ml_dtypes
import numpy as np
from promises import Promises
from safetensors.numpy import save_file

HIDDEN, EXPERT, HEADS, KV_HEADS, HEAD, VOCABULARY = 1024, 416, 16, 4, 64, 4096
SHARD = 500_000_000
LARGE, MEMORY_FILES = 36, "/dev/shm"
"""Layers of 6 GB, and where they lie with two copies of them."""
HANDED_BACK = 2.5
"""Seconds after which a virtual machine has handed free memory back."""
MEMORY = 64
"""MB of a whole process at most, of which the interpreter and numpy are half."""

SCRIPT = """
import glob, os, re, sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
source, target = sys.argv[1:]
os.makedirs(target)
held = {}
for file in sorted(glob.glob(source + "/*.safetensors")):
    with safe_open(file, "pt") as f:
        for name in f.keys():
            held[name] = f.get_tensor(name)
out = {}
for name in list(held):
    found = re.fullmatch(r"(model.layers.[0-9]+.mlp.experts.)0.gate_proj.weight", name)
    if found:
        base, experts = found[1], range(sum(n.startswith(found[1]) for n in held) // 3)
        gate = [held.pop(f"{base}{e}.gate_proj.weight") for e in experts]
        up = [held.pop(f"{base}{e}.up_proj.weight") for e in experts]
        out[base + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
        out[base + "down_proj"] = torch.stack([held.pop(f"{base}{e}.down_proj.weight") for e in experts])
save_file({**held, **out}, target + "/model.safetensors")
"""


def make(folder: Path, layers: int, experts: int) -> int:
    """Write the checkpoint and return its bytes."""
    random = np.random.default_rng(0)
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": layers, "num_experts": experts, "hidden_size": HIDDEN,
        "moe_intermediate_size": EXPERT, "intermediate_size": 4 * EXPERT, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCABULARY, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "attention_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(layers):
        base = f"model.layers.{layer}."
        shapes |= {f"{base}{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{base}self_attn.{norm}.weight": (HEAD,) for norm in ("q_norm", "k_norm")}
        shapes[f"{base}self_attn.q_proj.weight"] = (HEADS * HEAD, HIDDEN)
        shapes[f"{base}self_attn.k_proj.weight"] = (KV_HEADS * HEAD, HIDDEN)
        shapes[f"{base}self_attn.v_proj.weight"] = (KV_HEADS * HEAD, HIDDEN)
        shapes[f"{base}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        shapes[f"{base}mlp.gate.weight"] = (experts, HIDDEN)
        for expert in range(experts):
            shapes[f"{base}mlp.experts.{expert}.gate_proj.weight"] = (EXPERT, HIDDEN)
            shapes[f"{base}mlp.experts.{expert}.up_proj.weight"] = (EXPERT, HIDDEN)
            shapes[f"{base}mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, EXPERT)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    total = shard_bytes = number = 0
    for name, shape in [*shapes.items(), ("", ())]:
        size = 2 * int(np.prod(shape))
        if not name or shard_bytes + size > SHARD:
            number += 1
            file = f"model-{number:05d}.safetensors"
            save_file(shard, folder / file, {"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
            shard, shard_bytes = {}, 0
        if name:
            shard[name] = random.integers(0, 1 << 16, shape, np.uint16).view(ml_dtypes.bfloat16)
            shard_bytes += size
            total += size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def take_memory(folder: Path, size: int) -> None:
    """Write `size` bytes into a file and remove it, so that the next command finds its memory already allocated.

    A virtual machine gives free memory back to its host after some two seconds, and gets it back slowly.
    """
    time.sleep(HANDED_BACK)
    piece = bytes(1 << 20)
    file = folder / "taken"
    with file.open("wb", buffering=0) as taken:
        for _ in range(size >> 20):
            taken.write(piece)
    file.unlink()


def run(command: list[str]) -> tuple[float, float]:
    """Return a command's (wall seconds, peak resident MB); its output is shown only if it fails."""
    with tempfile.TemporaryFile() as printed:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=printed, stderr=printed)
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            printed.seek(0)
            raise SystemExit(f"{command[:3]} failed with {status}: {printed.read().decode(errors='replace')}")
    return time.perf_counter() - begin, usage.ru_maxrss / 1000


DCP = """
import os, shutil, socket, sys
from pathlib import Path
import torch
from safetensors import safe_open
from torch import distributed as dist, multiprocessing as mp
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

def write(rank, source, target, dim, kind, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=4)
    mesh, held = init_device_mesh("cpu", (4,)), {}
    for file in sorted(Path(source).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                tensor = opened.get_tensor(name)
                at = dim % tensor.ndim
                local = tensor.chunk(4, at)[rank].contiguous()
                held[name] = DTensor.from_local(local, mesh, [Shard(at)], run_check=False)
    if kind == "safetensors":
        writer = checkpoint.HuggingFaceStorageWriter(target, dict.fromkeys(held, 1), save_distributed=True)
        checkpoint.save(held, storage_writer=writer)
    else:
        checkpoint.save(held, checkpoint_id=target)
    dist.destroy_process_group()

if __name__ == "__main__":
    source, target, dim, kind = sys.argv[1:]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    mp.spawn(write, (source, target, int(dim), kind, port), nprocs=4)
    shutil.copy(source + "/config.json", target)
"""
TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
source, target = sys.argv[1:]
AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target)
"""
CONSOLIDATE = """
import sys
from pathlib import Path
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
source, target = sys.argv[1:]
Path(target).mkdir()
names = set()
for file in Path(source).glob("*.safetensors"):
    with safe_open(file, "pt") as opened:
        names |= set(opened.keys())
consolidate_safetensors_files_on_every_rank(source, target, dict.fromkeys(names, 1), num_threads=2)
"""
FLOOR = """
import os, sys, threading
import numpy, xxhash
source, target, jobs, *more = sys.argv[1:]
if target:
    os.mkdir(target)
files = [file for folder in (source, *more) for file in os.scandir(folder)]
files = iter(sorted(files, key=lambda file: -file.stat().st_size))
lock = threading.Lock()

def work():
    piece = memoryview(bytearray(1 << 20))
    while True:
        with lock:
            file = next(files, None)
        if file is None:
            return
        read = os.open(file.path, os.O_RDONLY)
        if target:
            written = os.open(os.path.join(target, file.name), os.O_WRONLY | os.O_CREAT, 0o644)
        at, hashed = 0, xxhash.xxh3_128()
        while count := os.preadv(read, [piece], at):
            hashed.update(piece[:count])
            if target:
                os.pwrite(written, piece[:count], at)
            at += count

threads = [threading.Thread(target=work) for _ in range(int(jobs))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
"""Hashes the files of `source` and `more`, and writes them into `target`, unless that is empty."""
COPY = ("cp", "-r", "IN", "OUT")


@dataclass(frozen=True)
class Case:
    """One conversion, and the command that it is compared with."""

    label: str
    source: str
    to: str
    at_least: float
    """Promised speed, as a multiple of the other side's."""
    peer: Sequence[str] = COPY
    """Command of the other side; IN and OUT stand for the folders."""
    options: Sequence[str] = ("--no-sync",)
    floor: Sequence[str] = ()
    """Command of the floor; empty: not measured."""
    jobs: int | None = None
    """Number of workers; None: the script's option `--jobs`."""


def ours(case: Case, jobs: int) -> list[str]:
    """Return our command of a case."""
    workers = str(case.jobs or jobs)
    command = [sys.executable, "-m", "transaxle", "convert", "IN", "OUT", "--to", case.to, "--jobs", workers]
    return [*command, *case.options]


def script(folder: Path, name: str, text: str) -> list[str]:
    """Write a script, and return the command that runs it."""
    file = folder / f"{name}.py"
    file.write_text(text)
    return [sys.executable, str(file), "IN", "OUT"]


def large_cases(folder: Path) -> list[Case]:
    """Return the conversions of 6 GB."""
    floor = script(folder, "floor", FLOOR)
    return [
        Case("6 GB, hf -> transformers against cp", "hub", "transformers", 1.1, floor=[*floor, "2"], jobs=2),
        Case("6 GB, hf -> transformers, one worker", "hub", "transformers", 0.75, floor=[*floor, "1"], jobs=1),
        Case("6 GB, hf -> automodel (transposed) against cp", "hub", "automodel", 0.75, floor=[*floor, "2"], jobs=2),
    ]


def cases(folder: Path, jobs: int, *, quick: bool) -> list[Case]:
    """Return the conversions of the default size."""
    floor = [*script(folder, "floor", FLOOR), str(jobs)]
    stacked = script(folder, "stack", SCRIPT)
    synced = ["sh", "-c", 'cp -r "$1" "$2" && sync "$2"/*', "sh", "IN", "OUT"]
    all_cases = [
        Case("hf -> transformers against cp", "hub", "transformers", 0.8, floor=floor),
        Case("hf -> transformers, durable, against cp and sync", "hub", "transformers", 0.85, synced, ()),
        Case("hf -> automodel (transposed) against cp", "hub", "automodel", 0.5, floor=floor),
        Case("DCP folder, rows -> hf against cp", "rows", "hf", 0.8, floor=floor),
        Case("DCP folder, last dim -> hf against cp", "columns", "hf", 0.4, floor=floor),
        Case("hf -> transformers against a script", "hub", "transformers", 10, stacked, floor=floor),
    ]
    if not quick:
        peer_script = script(folder, "transformers_both", TRANSFORMERS)
        merged = script(folder, "consolidate", CONSOLIDATE)
        all_cases += [
            Case("hf -> hf against transformers' load and save", "hub", "hf", 20, peer_script, floor=floor),
            Case("DCP's safetensors -> hf against consolidate", "shards", "hf", 10, merged, floor=floor),
        ]
    return all_cases


@dataclass
class Rounds:
    """Measurements of a case, without the warm-up round."""

    ratios: list[float] = field(default_factory=list)
    """Our speed in each round, as a multiple of the other side's."""
    floors: list[float] = field(default_factory=list)
    """Speed of the floor in each round, as a multiple of the other side's."""
    peaks: list[float] = field(default_factory=list)
    """Our peak memory in each round, in MB."""


def rounds_of(case: Case, folder: Path, options: argparse.Namespace) -> Rounds:
    """Measure a case."""
    target, rounds = folder / "out", Rounds()
    needed = sum(file.stat().st_size for file in (folder / case.source).iterdir()) * 5 // 4
    places = {"IN": str(folder / case.source), "OUT": str(target)}
    for turn in range(options.rounds + 1):
        seconds, peaks = [], []
        for command in (ours(case, options.jobs), case.peer, *([case.floor] if case.floor else [])):
            take_memory(folder, needed)
            took, peak = run([places.get(word, word) for word in command])
            shutil.rmtree(target)
            seconds.append(took)
            peaks.append(peak)
        if turn:
            rounds.ratios.append(seconds[1] / seconds[0])
            rounds.floors += [seconds[1] / each for each in seconds[2:]]
            rounds.peaks.append(peaks[0])
    return rounds


def write_hub(folder: Path, layers: int, experts: int) -> int:
    """Write the checkpoint in its own process, because the peak memory of a child starts with that of its parent."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(make, folder / "hub", layers, experts).result()


def measure(
    promises: Promises, measured_cases: Sequence[Case], folder: Path, options: argparse.Namespace
) -> list[float]:
    """Measure cases in the folder of their sources; return our peak memory in each, in MB."""
    peaks: list[float] = []
    for case in measured_cases:
        measured = rounds_of(case, folder, options)
        limit = case.at_least if case.jobs or options.jobs > 1 else None
        promises.at_least(case.label, measured.ratios, limit, floor=measured.floors)
        peaks += measured.peaks
    return peaks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="skip the 6 GB cases and the other converters")
    options = parser.parse_args()
    promises = Promises()
    with tempfile.TemporaryDirectory(prefix="transaxle-bench-") as name:
        folder = Path(name)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        total = write_hub(folder, options.layers, options.experts)
        (folder / "dcp.py").write_text(DCP)
        for target, dim, kind in [
            ("rows", 0, "dcp"), ("columns", -1, "dcp"), *([] if options.quick else [("shards", 0, "safetensors")])
        ]:  # fmt: skip
            words = [str(folder / "dcp.py"), str(folder / "hub"), str(folder / target), str(dim), kind]
            subprocess.run([sys.executable, *words], check=True)
        os.sync()  # removed files that are not yet on disk are never written
        print(f"{total / 1e9:.2f} GB, {options.jobs} workers, {options.rounds} rounds, times the other's speed")
        peaks = measure(promises, cases(folder, options.jobs, quick=options.quick), folder, options)
        if not options.quick:
            with tempfile.TemporaryDirectory(prefix="transaxle-bench-", dir=MEMORY_FILES) as in_memory:
                write_hub(Path(in_memory), LARGE, options.experts)
                peaks += measure(promises, large_cases(Path(in_memory)), Path(in_memory), options)
    promises.at_most("peak memory of a process that converts", max(peaks), MEMORY, "MB")
    return promises.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
