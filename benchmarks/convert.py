"""Promise: converting is about as fast as copying, in fixed memory.

A Qwen3-MoE-like checkpoint (8 layers x 64 experts, 1.3 GB of random bf16 in shards of 500 MB) goes hf -> transformers,
which stacks and fuses every expert, with a hash of every tensor. Whole processes, in turn with `cp -r` and with the
script people write (`safe_open`, `torch.stack`, `save_file`); ratios are taken pair by pair within one run.

    python benchmarks/convert.py [--rounds 5] [--layers 8] [--experts 64] [--jobs 2] [--to transformers] [--sync]
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
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HIDDEN, EXPERT, HEADS, KV_HEADS, HEAD, VOCABULARY = 1024, 416, 16, 4, 64, 4096
SHARD = 500_000_000

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
    total = held = number = 0
    for name, shape in [*shapes.items(), ("", ())]:
        size = 2 * int(np.prod(shape))
        if not name or held + size > SHARD:
            number += 1
            file = f"model-{number:05d}.safetensors"
            save_file(shard, folder / file, {"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
            shard, held = {}, 0
        if name:
            shard[name] = random.integers(0, 1 << 16, shape, np.uint16).view(ml_dtypes.bfloat16)
            held += size
            total += size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def run(command: list[str]) -> tuple[float, float]:
    """Return a command's wall seconds and its peak resident MB."""
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{command[:3]} failed with {status}")
    return time.perf_counter() - begin, usage.ru_maxrss / 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--to", default="transformers")
    parser.add_argument("--sync", action="store_true")
    said = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="transaxle-bench-") as name:
        folder = Path(name)
        source = folder / "source"
        # A process of its own: a child's peak memory starts with that of the process it was forked from.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            total = pool.submit(make, source, said.layers, said.experts).result()
        (folder / "script.py").write_text(SCRIPT)
        ours = [sys.executable, "-m", "transaxle", "convert", str(source), "OUT", "--to", said.to, "--jobs", said.jobs]
        commands = {
            "transaxle": ours if said.sync else [*ours, "--no-sync"],
            "cp -r": ["cp", "-r", str(source), "OUT"],
            "script": [sys.executable, str(folder / "script.py"), str(source), "OUT"],
        }
        seconds: dict[str, list[float]] = {key: [] for key in commands}
        memory: dict[str, float] = {}
        for turn in range(said.rounds + 1):
            for key, command in commands.items():
                target = folder / "out"
                took, peak = run([str(target) if word == "OUT" else word for word in command])
                shutil.rmtree(target)
                if turn:
                    seconds[key].append(took)
                    memory[key] = max(memory.get(key, 0.0), peak)
        print(f"{total / 1e9:.2f} GB, hf -> {said.to}, {said.jobs} workers, median of {said.rounds} rounds")
        for key, took in seconds.items():
            middle = statistics.median(took)
            ratio = statistics.median(t / mine for t, mine in zip(took, seconds["transaxle"], strict=True))
            print(
                f"  {key:10s} {middle:6.2f} s  {total / middle / 1e9:5.2f} GB/s  peak {memory[key]:6.0f} MB"
                f"  time / transaxle's {ratio:5.2f}"
            )


if __name__ == "__main__":
    main()
