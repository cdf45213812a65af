"""DeepSpeed checkpoints of about a gigabyte: our conversions against DeepSpeed's own tools, in one run.

Promises: a universal checkpoint in a quarter of ds_to_universal's time, a model in safetensors in a third of
zero_to_fp32's, both at half the speed of `cp` of what comes out, at most 1.05 bytes written for each byte of output,
and memory for no more than the largest tensor and 100 MB. Both sides are processes timed from start to end, with the
source in the page cache and nothing left to write back. They are compared twice: as they come (DeepSpeed's tools do not
wait for the disk; ours with `sync=False`), and durable (every file of DeepSpeed's output is synced afterwards; ours
with its default). They take turns, and of several rounds the best one of each counts, for the machine may be busy with
other things. Beside a ratio to `cp` that misses its promise stands a floor: a process that imports numpy and xxhash,
and whose two threads read what came out, hash it and write it.

    python benchmarks/zero.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert import FLOOR, run
from promises import Promises

HIDDEN, INNER, VOCAB, LAYERS, PARTS = 1024, 2816, 32000, 4, 2
TAG = "global_step3"
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": VOCAB,
}  # fmt: skip
TIME, DURABLE, MEMORY = "time", "durable", "memory"
TARGETS = {"universal": "deepspeed-universal", "hf": "hf"}
PROMISED = {"universal": 4.0, "hf": 3.0}
LIKE_CP = 0.5
ALLOWED_MEMORY, ALLOWED_WRITES = VOCAB * HIDDEN * 4 + (100 << 20), 1.05


def shapes() -> OrderedDict[str, tuple[int, ...]]:
    """A llama of about 85 million parameters: a gigabyte with its moments."""
    sizes: OrderedDict[str, tuple[int, ...]] = OrderedDict({"model.embed_tokens.weight": (VOCAB, HIDDEN)})
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            sizes[f"{stem}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        sizes[f"{stem}.mlp.gate_proj.weight"] = sizes[f"{stem}.mlp.up_proj.weight"] = (INNER, HIDDEN)
        sizes[f"{stem}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        sizes[f"{stem}.input_layernorm.weight"] = sizes[f"{stem}.post_attention_layernorm.weight"] = (HIDDEN,)
    sizes["model.norm.weight"] = (HIDDEN,)
    sizes["lm_head.weight"] = (VOCAB, HIDDEN)
    return sizes


def make(folder: Path, stage: int) -> None:
    """Write what DeepSpeed 0.19.8 writes for one optimizer group on two ranks: its own classes, random values."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    sizes = OrderedDict((name, torch.Size(shape)) for name, shape in shapes().items())
    total = sum(size.numel() for size in sizes.values())
    width = total // PARTS
    (folder / TAG).mkdir(parents=True)
    (folder / "latest").write_text(TAG, "utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    generator = torch.Generator().manual_seed(0)
    for part in range(PARTS):
        flat = {key: torch.rand(width, generator=generator) for key in ("fp32", "exp_avg", "exp_avg_sq")}
        moments = {"step": torch.tensor(3.0), "exp_avg": flat["exp_avg"], "exp_avg_sq": flat["exp_avg_sq"]}
        inner = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "weight_decay": 0.1, "params": [0]}]}
        state: dict[str, Any] = {
            "loss_scaler": LossScaler(1.0), "dynamic_loss_scale": False, "overflow": False, "ds_version": "0.19.8",
            "zero_stage": ZeroStageEnum(stage),
        }  # fmt: skip
        if stage == 3:
            state |= {"partition_count": PARTS, "optimizer_state_dict": inner, "fp32_flat_groups": [flat["fp32"]]}
        else:
            mapping, at = OrderedDict(), 0
            for name, size in sizes.items():
                low, high = max(at, part * width), min(at + size.numel(), (part + 1) * width)
                if low < high:
                    mapping[name] = fragment_address(numel=high - low, start=low - part * width)
                at += size.numel()
            state |= {
                "clip_grad": 1.0, "base_optimizer_state": inner, "group_paddings": [0], "partition_count": [PARTS],
                "param_alignment_paddings": [[0] * len(sizes)], "param_slice_mappings": [mapping],
                "single_partition_of_fp32_groups": [flat["fp32"]],
            }  # fmt: skip
        root = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(root, folder / TAG / f"bf16_zero_pp_rank_{part}_mp_rank_00_optim_states.pt")
        if stage == 3 or part == 0:
            module = OrderedDict(
                (name, torch.zeros(0 if stage == 3 else size, dtype=torch.bfloat16)) for name, size in sizes.items()
            )
            model = {
                "module": module, "buffer_names": [], "optimizer": None, "param_shapes": [sizes], "shared_params": {},
                "frozen_param_shapes": None, "frozen_param_fragments": None, "lr_scheduler": None,
                "skipped_steps": 0, "global_steps": 3, "global_samples": 3, "dp_world_size": PARTS, "mp_world_size": 1,
                "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_config": {},
                "ds_version": "0.19.8",
            }  # fmt: skip
            name = f"zero_pp_rank_{part}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch.save(model, folder / TAG / f"{name}_model_states.pt")


_WATCHED = """
import json, os, resource, subprocess, sys, time

def tree(pid):
    yield pid
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in open(f"/proc/{pid}/task/{task}/children").read().split():
            yield from tree(int(child))

def memory(pid):  # what processes share counts once
    rows = open(f"/proc/{pid}/smaps_rollup").read().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))

wanted, folder, *command = sys.argv[1:]
begin = time.monotonic()
process = subprocess.Popen(command, stdout=sys.stderr)
peak = 0
while wanted == "memory" and process.poll() is None:
    try:
        peak = max(peak, sum(map(memory, tree(process.pid))))
    except (OSError, StopIteration):
        pass  # one of them has just ended
    time.sleep(0.02)
process.wait()
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
if wanted == "durable":
    for at, folders, files in os.walk(folder):
        for name in [*files, "."]:
            file = os.open(os.path.join(at, name), os.O_RDONLY)
            os.fsync(file)
            os.close(file)
seconds = time.monotonic() - begin
written = next(int(row.split()[1]) for row in open("/proc/self/io") if row.startswith("wchar"))  # of all its children
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps({"code": process.returncode, "seconds": seconds, "cpu": cpu, "written": written, "peak": peak}))
"""
_OURS = """
import sys
import transaxle as tx
tx.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], sync=sys.argv[4] == "durable")
assert "torch" not in sys.modules
"""


@dataclass(frozen=True)
class Run:
    """Resources that a program used."""

    seconds: float
    """Seconds from start to end."""
    cpu: float
    """Seconds of processors that the program and its children used."""
    written: int
    """Bytes that the program and its children passed to write calls."""
    peak: int
    """Peak memory in bytes of the program and its children together, sampled every 20 ms; 0: not measured."""
    output: int
    """Bytes of the written files."""


def run_watched(command: list[str], output: Path, mode: str = TIME) -> Run:
    """Run a Python program.

    Args:
        command: arguments of `python`.
        output: folder that the program writes.
        mode: TIME; DURABLE: sync the written files too; MEMORY: sample the memory, which slows processes with many
            pages down.
    """
    os.sync()
    process = [sys.executable, "-c", _WATCHED, mode, str(output), sys.executable, *command]
    completed = subprocess.run(process, env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, check=True)
    result = json.loads(completed.stdout)
    if result.pop("code"):
        raise SystemExit(f"{command}: {completed.stderr.decode()[-2000:]}")
    return Run(**result, output=sum(path.stat().st_size for path in output.rglob("*") if path.is_file()))


def row(label: str, peer_value: float, own_value: float, unit: str, scale: float = 1.0) -> None:
    """Print one row of the table."""
    values = f"{peer_value / scale:8.2f} {unit} {own_value / scale:8.2f} {unit}"
    print(f"    {label:24} {values} {peer_value / own_value:7.1f} x", flush=True)


def best(runs: list[tuple[Run, Run]]) -> tuple[Run, Run]:
    """Return the fastest run of each side."""
    peer_runs, own_runs = zip(*runs, strict=True)
    return min(peer_runs, key=lambda run: run.seconds), min(own_runs, key=lambda run: run.seconds)


def copy_seconds(command: list[str], target: Path) -> float:
    """Return the seconds of a command that writes a folder; the folder is removed."""
    seconds, _ = run(command)
    shutil.rmtree(target)
    return seconds


def compare(base: Path, source: Path, target_name: str, to: str, rounds: int, promises: Promises) -> None:
    """Measure one conversion with both tools."""
    measured: dict[str, list[tuple[Run, Run]]] = {TIME: [], DURABLE: [], MEMORY: []}
    target, peer_target = base / "ours", base / "theirs"
    ratios, floors = list[float](), list[float]()
    for mode in [*(TIME, DURABLE) * rounds, MEMORY]:
        tools = {
            "universal": [
                "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--input_folder",
                str(source / TAG), "--output_folder", str(peer_target / TAG),
            ],
            "hf": ["-m", "deepspeed.utils.zero_to_fp32", str(source), str(peer_target), "--safe_serialization"],
        }  # fmt: skip
        own_run_now = run_watched(["-c", _OURS, str(source), str(target), to, mode], target, mode)
        measured[mode].append((run_watched(tools[target_name], peer_target, mode), own_run_now))
        if mode == TIME:
            seconds = copy_seconds(["cp", "-r", str(target), str(base / "copied")], base / "copied")
            ratios.append(seconds / own_run_now.seconds)
            if target_name == "hf":  # one folder without others in it
                floor = [sys.executable, "-c", FLOOR, str(target), str(base / "copied"), "2"]
                floors.append(seconds / copy_seconds(floor, base / "copied"))
        shutil.rmtree(target)
        shutil.rmtree(peer_target)
    runs = {mode: best(each) for mode, each in measured.items()}
    theirs_run, ours_run = runs[TIME]
    print(f"  {target_name:24} {'DeepSpeed':>10} {'Transaxle':>11}")
    row("time", theirs_run.seconds, ours_run.seconds, "s ")
    row("time, durable", *(run.seconds for run in runs[DURABLE]), "s ")
    row("output", theirs_run.output, ours_run.output, "MB", 1e6)
    row("written for each byte", theirs_run.written / theirs_run.output, ours_run.written / ours_run.output, "x ")
    row("peak memory", *(run.peak for run in runs[MEMORY]), "MB", 1e6)
    which = f"{source.name} -> {target_name}"
    promises.at_least(f"{which} against DeepSpeed", theirs_run.seconds / ours_run.seconds, PROMISED[target_name])
    promises.at_least(f"{which} against cp of the output", ratios, LIKE_CP, floor=floors)
    promises.at_most(f"{which}, written for each byte", ours_run.written / ours_run.output, ALLOWED_WRITES, "bytes")
    promises.at_most(f"{which}, peak memory", runs[MEMORY][1].peak / 1e6, ALLOWED_MEMORY / 1e6, "MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    promises = Promises()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        imports = run_watched(["-c", "import deepspeed"], base).seconds
        print(f"importing deepspeed alone takes {imports:.2f} s of each of DeepSpeed's times")
        for stage in (1, 3):
            source = base / f"zero{stage}"
            make(source, stage)
            size = sum(path.stat().st_size for path in (source / TAG).iterdir())
            print(f"ZeRO-{stage}, {PARTS} ranks, {size / 1e9:.2f} GB")
            for target_name, to in TARGETS.items():
                compare(base, source, target_name, to, rounds, promises)
    return promises.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
