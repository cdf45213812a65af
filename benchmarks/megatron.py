"""Promises: to Megatron's distributed checkpoints and back at half the speed of `cp`, in 128 MB; planned in 2 s.

The model of `convert.py` (Qwen3-MoE, 8 layers x 64 experts, 1.3 GB of random bf16) goes hub -> torch_dist and back,
with a hash of every tensor: whole processes with bytecode cached, in turn with `cp -r` of the same folder. Each
result is removed before the system writes it, so neither shares the machine with what the other has left. Ratios are
taken pair by pair within one run, and what comes back must have the hashes of what went. `cp` needs one core, a
conversion all: on a busy machine the ratio is lower, and of what is printed only the processor time can be compared.
Then a folder of 61 layers x 384 experts of a few numbers each is opened and planned for the hub, once as we write it
and once with a `.metadata` that Python's pickler made of torch's own classes, with the plan of the save that Megatron
keeps in it; the least of the times counts.

With `--bridge PYTHON`, the interpreter that `make megatron` installs, Megatron-Bridge 0.6.2 takes the same ways on the
CPU, once: its own mappings fill a model of megatron-core, and `dist_checkpointing` saves it; back, `dist_checkpointing`
loads it and Bridge exports the weights. Its own commands for that need modelopt, and do no less.

    python benchmarks/megatron.py [--rounds 5] [--layers 8] [--experts 64] [--jobs 2] [--bridge PYTHON]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from convert import make, run, take_memory
from promises import Promises
from startup import model

ROOT = Path(__file__).parents[1]
SPEED, MEMORY, PLANNED = 0.5, 128, 2.0
"""Promises: least share of cp's speed; most MB of memory; most seconds of planning."""
DEEP = 61, 384
KEYS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "hidden_act": "silu", "max_position_embeddings": 64, "dtype": "bfloat16",
}  # fmt: skip
"""Keys that Megatron-Bridge needs in config.json besides the sizes."""

PLAN = """
import os, resource, sys, time
begin, used = time.perf_counter(), os.times()
import transaxle as tx
plan = tx.plan(tx.open(sys.argv[1]), sys.argv[2], to="safetensors:hf")
assert not plan.refusals
now = os.times()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
print(len(plan.tensors), time.perf_counter() - begin, now.user + now.system - used.user - used.system, peak)
"""

TORCHS_OWN = """
import copy, pickle, sys
from torch import Size
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
with open(sys.argv[1], "rb") as file:
    saved = pickle.load(file)
items = []
for key, item in saved.state_dict_metadata.items():
    if isinstance(item, BytesStorageMetadata):
        items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, BytesIOWriteData(4)))
    else:
        for chunk in item.chunks:
            data = TensorWriteData(chunk, copy.copy(item.properties), item.size)
            items.append(WriteItem(MetadataIndex(key, chunk.offsets[:]), WriteItemType.SHARD, tensor_data=data))
saved.all_local_plans = [SavePlan(items)]
with open(sys.argv[1], "wb") as file:
    pickle.dump(saved, file)
"""

PEER = """
import sys
from pathlib import Path
from tests.oracles.bridge_peer import without_cuda, without_kernels
without_cuda.pretend()
without_kernels.install()
import torch
from torch import distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
from megatron.bridge import AutoBridge
from megatron.core import dist_checkpointing
way, hub, folder, out = sys.argv[1:]
auto = AutoBridge.from_hf_pretrained(hub)
provider = auto.to_megatron_provider(load_weights=way == "to")
provider.use_cpu_initialization, provider.gradient_accumulation_fusion = True, False
provider.finalize()
provider.initialize_model_parallel(seed=0)
parts = provider.provide_distributed_model(
    wrap_with_ddp=False, mixed_precision_wrapper=None, use_cpu_initialization=True
)
state = {"model": parts[0].sharded_state_dict(), "iteration": 0}
if way == "to":
    Path(folder).mkdir()
    dist_checkpointing.save(state, folder)
else:
    parts[0].load_state_dict(dist_checkpointing.load(state, folder)["model"])
    from safetensors.torch import save_file
    Path(out).mkdir()
    weights = auto.export_hf_weights(parts, show_progress=False)
    save_file({each.param_name: each.weight.contiguous() for each in weights}, out + "/model.safetensors")
dist.destroy_process_group()
"""


def hashes(folder: Path) -> dict[str, str]:
    """Return the hash of every tensor in the manifest of a folder."""
    tensors = json.loads((folder / "transaxle.json").read_text("utf-8"))["tensors"]
    return {name: record["xxh3"] for name, record in tensors.items()}


def conversions(folder: Path, options: argparse.Namespace, total: int, promises: Promises) -> None:
    """Measure conversions there and back, in turns with cp."""
    hub, dist = folder / "hub", folder / "dist"
    own_command = [
        sys.executable,
        "-m",
        "transaxle",
        "convert",
        "IN",
        "OUT",
        "--no-sync",
        "--jobs",
        str(options.jobs),
        "--to",
    ]
    run([word.replace("IN", str(hub)).replace("OUT", str(dist)) for word in [*own_command, "torch_dist"]])
    run([word.replace("IN", str(dist)).replace("OUT", str(folder / "back")) for word in [*own_command, "hf"]])
    run([word.replace("IN", str(hub)).replace("OUT", str(folder / "same")) for word in [*own_command, "hf"]])
    assert hashes(folder / "back") == hashes(folder / "same")
    shutil.rmtree(folder / "back")
    shutil.rmtree(folder / "same")
    ways = {"hub -> torch_dist": (hub, "torch_dist"), "torch_dist -> hub": (dist, "hf")}
    print(f"{total / 1e9:.2f} GB, {options.jobs} workers, {options.rounds} rounds")
    os.sync()  # removed files that are not yet on disk are never written
    for way, (source, to) in ways.items():
        commands = {"transaxle": [*own_command, to], "cp -r": ["cp", "-r", "IN", "OUT"]}
        seconds: dict[str, list[float]] = {key: [] for key in commands}
        used: dict[str, list[float]] = {key: [] for key in commands}
        memory = 0.0
        for turn in range(options.rounds + 1):
            for key, command in commands.items():
                take_memory(folder, total * 5 // 4)
                before = os.times()
                took, peak = run([{"IN": str(source), "OUT": str(folder / "out")}.get(word, word) for word in command])
                after = os.times()
                shutil.rmtree(folder / "out")
                if turn:
                    times = after.children_user - before.children_user, after.children_system - before.children_system
                    used[key].append(sum(times))
                    seconds[key].append(took)
                    memory = max(memory, peak if key == "transaxle" else 0.0)
        ratios = [c / t for t, c in zip(seconds["transaxle"], seconds["cp -r"], strict=True)]
        median_own, copied = (statistics.median(seconds[key]) for key in commands)
        processor = " and ".join(f"{statistics.median(used[key]):.2f} s" for key in commands)
        promises.at_least(f"{way} against cp", ratios, SPEED)
        promises.at_most(f"{way}, peak memory", memory, MEMORY, "MB")
        print(f"    {median_own:.2f} s, cp {copied:.2f} s; processor time {processor}")


def bridge(folder: Path, python: str) -> None:
    """Run Megatron-Bridge in both directions once, and print its time and memory."""
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    for way in ("to", "from"):
        words = [python, "-c", PEER, way, *(str(folder / name) for name in ("hub", "bridge", "bridge_back"))]
        took, peak = run(words)
        print(f"  Megatron-Bridge, {way} torch_dist: {took:.1f} s, peak {peak:.0f} MB")


def measure_planning(folder: Path, rounds: int) -> list[tuple[str, float]]:
    """Open and plan a folder of many experts, with our `.metadata` and with torch's; return the least times."""
    model(folder / "many", *DEEP)
    own_command = [sys.executable, "-m", "transaxle", "convert", str(folder / "many"), str(folder / "deep"), "--to"]
    run([*own_command, "torch_dist", "--no-sync"])
    results = []
    for by in ("us", "torch"):
        if by == "torch":
            (metadata,) = folder.glob("deep/*/.metadata")
            subprocess.run([sys.executable, "-c", TORCHS_OWN, str(metadata)], check=True)
        command = [sys.executable, "-c", PLAN, str(folder / "deep"), str(folder / "planned")]
        times = [
            list(map(float, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()))
            for _ in range(rounds)
        ]
        (count, *_), (wall, used, peak) = times[0], (min(column) for column in list(zip(*times, strict=True))[1:])
        print(f"{count:.0f} tensors, described by {by}: {wall:.2f} s, peak {peak:.0f} MB")
        results.append((f"{DEEP[0]} x {DEEP[1]} experts by {by}, opened and planned, processor", used))
    return results


def main() -> int:
    """Measure and print; return 0 if all promises are kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--bridge", default=os.environ.get("MEGATRON_PYTHON"))
    options = parser.parse_args()
    promises = Promises()
    with tempfile.TemporaryDirectory(prefix="transaxle-bench-") as name:
        folder = Path(name)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        # A process of its own: a child's peak memory starts with that of the process it was forked from.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            total = pool.submit(make, folder / "hub", options.layers, options.experts).result()
        config = folder / "hub" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | KEYS), "utf-8")
        conversions(folder, options, total, promises)
        if options.bridge:
            bridge(folder, options.bridge)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            for label, used in pool.submit(measure_planning, folder, min(options.rounds, 3)).result():
                promises.at_most(label, used, PLANNED, "s")
    return promises.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
