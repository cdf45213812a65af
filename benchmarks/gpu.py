"""Checkpoints into a GPU and out of it: against the libraries' own ways, and against the least possible work.

Loads: bfloat16 matrices of about 1.3 GB in four safetensors files, into tensors that are on the GPU already, row-major
and transposed ones, against `safetensors.torch.load_file(device="cuda")` with copies into the same tensors; and a
Qwen3-MoE, an expert a tensor in the hub's layout, into a model of transformers with stacked experts, against
`from_pretrained(device_map="cuda")`. Saves: the same matrices, against `save_file` of copies in memory; and how long
`async_save` keeps training waiting.

The floor reads the same bytes with `preadv` into pinned buffers by as many threads as we use, and copies from there
while they read on. The page cache holds the files. Sides take turns; the median of the rounds counts. The first round
has a line of its own, for it allocates pinned memory. What has been loaded is compared with what was saved.

    python benchmarks/gpu.py [--megabytes 1342] [--rounds 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import transaxle as tx

SIDE, FILES, BLOCK = 4096, 4, 16 << 20
SIZES = {
    "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 2, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "tie_word_embeddings": False,
}  # fmt: skip
State = dict[str, torch.Tensor]
Sides = dict[str, Callable[[], Any]]


def matrices(count: int) -> State:
    """Return random matrices on the GPU."""
    torch.manual_seed(0)
    return {
        f"layers.{number}.weight": torch.randn(SIDE, SIDE, device="cuda").to(torch.bfloat16) for number in range(count)
    }


def save_files(state: State, folder: Path) -> list[Path]:
    """Save a state dict in `FILES` files with an index; return their paths."""
    size = sum(tensor.nbytes for tensor in state.values())
    tx.save(state, folder, to="safetensors", shard_size=-(-size // FILES), sync=False)
    return sorted(folder.glob("*.safetensors"))


def take_turns(sides: Sides, rounds: int, after: Callable[[], object] = lambda: None) -> dict[str, list[float]]:
    """Run the sides in turns, with `after` after each; return the seconds of each round, including the first."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, work in sides.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            took[name].append(time.perf_counter() - start)
            after()
    return took


def print_rows(label: str, size: int, took: dict[str, list[float]]) -> None:
    """Print a row for each side."""
    for name, (first, *later_rounds) in took.items():
        middle = statistics.median(later_rounds)
        spread = f"{min(later_rounds):.3f} to {max(later_rounds):.3f}"
        print(f"| {label} | {name} | {middle:.3f} | {spread} | {size / middle / 1e9:.1f} | {first:.3f} |", flush=True)


def check_equal(loaded: State, expected: State) -> None:
    """Check that two states are equal bit by bit."""
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name].view(torch.int16), expected[name].view(torch.int16)) for name in expected)


def floor(paths: list[Path], room: torch.Tensor) -> None:
    """Read files into GPU memory through pinned buffers, with two buffers per thread."""
    parts, start = list[tuple[Path, int, int, int]](), 0
    for path in paths:
        size = path.stat().st_size
        parts += [(path, at, min(BLOCK, size - at), start + at) for at in range(0, size, BLOCK)]
        start += size
    lock, stack = threading.Lock(), parts[::-1]

    def work() -> None:
        buffers = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
        events = [torch.cuda.Event() for _ in buffers]
        stream, turn = torch.cuda.Stream(), 0
        with torch.cuda.stream(stream):
            while True:
                with lock:
                    if not stack:
                        return
                    path, at, size, to = stack.pop()
                turn ^= 1
                events[turn].synchronize()
                with path.open("rb", buffering=0) as file:
                    os.preadv(file.fileno(), [memoryview(buffers[turn].numpy())[:size]], at)
                room[to : to + size].copy_(buffers[turn][:size], non_blocking=True)
                events[turn].record()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for job in [pool.submit(work) for _ in range(min(8, os.cpu_count() or 1))]:
            job.result()


def loads(folder: Path, state: State, rounds: int) -> None:
    """Measure loads into existing tensors."""
    paths = save_files(state, folder)
    size = sum(tensor.nbytes for tensor in state.values())
    row_major = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    turned = {name: torch.zeros_like(tensor).t().contiguous().t() for name, tensor in state.items()}
    room = torch.empty(sum(path.stat().st_size for path in paths), dtype=torch.uint8, device="cuda")
    for label, target in (("load", row_major), ("load, transposed tensors", turned)):

        def ours(target: State = target) -> None:
            tx.load(target, folder)

        def peer(target: State = target) -> None:
            for path in paths:
                for name, tensor in load_file(path, device="cuda").items():
                    target[name].copy_(tensor)

        took = take_turns({"transaxle": ours}, 0)
        check_equal(target, state)  # before the peer fills the same tensors
        first = took["transaxle"]
        took = take_turns({"transaxle": ours, "safetensors": peer, "floor": lambda: floor(paths, room)}, rounds)
        took["transaxle"][:1] = first
        print_rows(label, size, took)


def model_loads(folder: Path, rounds: int) -> None:
    """Measure loads of a hub checkpoint with one tensor per expert into a transformers model with stacked experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(SIZES)
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    size = sum(tensor.nbytes for tensor in expected.values())
    models: list[Any] = []

    def empty() -> None:
        with torch.device("meta"):
            fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tx.load(fresh, folder, dialect="transformers")
        models.append(fresh)

    def peer() -> None:
        models.append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda"))

    def after() -> None:
        check_equal(dict(models.pop().state_dict()), expected)

    print_rows(
        "load a Qwen3-MoE, built empty", size, take_turns({"transaxle": empty, "transformers": peer}, rounds, after)
    )


def saves(folder: Path, state: State, rounds: int) -> None:
    """Measure saves from the GPU: until the files are complete, and until training continues."""
    size = sum(tensor.nbytes for tensor in state.values())
    jobs: list[tx.SaveJob] = []
    target = folder / "saved"

    def peer() -> None:
        target.mkdir()
        names = list(state)
        for number in range(FILES):
            save_file({name: state[name].cpu() for name in names[number::FILES]}, target / f"{number}.safetensors")

    def after() -> None:
        for job in jobs:
            job.result()
        jobs.clear()
        saved: State = {}
        for path in target.glob("*.safetensors"):
            saved |= load_file(path, device="cuda")
        check_equal(saved, state)
        shutil.rmtree(target)

    sides: Sides = {
        "transaxle": lambda: tx.save(state, target, to="safetensors", sync=False),
        "safetensors": peer,
        "transaxle, async: training waits": lambda: jobs.append(tx.async_save(state, target, to="safetensors")),
    }
    print_rows("save", size, take_turns(sides, rounds, after))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1342)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary folder if not given")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return 0
    print(f"On {torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores.\n")
    print("| what | by | s | rounds | GB/s | first, s |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        state = matrices(max(FILES, options.megabytes * 1_000_000 // (2 * SIDE * SIDE)))
        loads(Path(folder, "matrices"), state, options.rounds)
        saves(Path(folder), state, options.rounds)
        model_loads(Path(folder, "qwen"), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
