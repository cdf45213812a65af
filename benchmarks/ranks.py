"""Rank files of verl of 1.3 GB, made into a hub folder: our conversion against verl's own `model_merger`, in one run.

Promises: a fifth of the merger's time, and a tenth of its peak memory, on the same files in the same rounds. Both sides
are processes timed from start to end, with the source in the page cache and nothing left to write back; neither waits
for the disk (ours with `sync=False`). They take turns, of several rounds the median of the ratios counts, and in the
first round the tensors that they wrote must be equal bit by bit. What importing verl takes is measured and printed, and
the ratio without it as well, as that part of the merger's time does not grow with the model.

The files are torch's own pickles of DTensors with random values: one process takes the place of each rank in turn.

    python benchmarks/ranks.py [--rounds 3] [--worlds 4 8]
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
from pathlib import Path
from typing import Any

from promises import Promises
from zero import MEMORY, TIME, Run, run_watched

WORLDS = (4, 8)
SPEED, MEMORY_SHARE = 5.0, 0.1
CONFIG = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
"""A model as large as Qwen3-0.6B, whose head is its embedding."""
PACKAGES = Path(os.environ.get("VERL_PACKAGES", f"{sys.prefix}/verl"))
"""The folder into which `make` installs verl."""
OURS = """
import sys
import transaxle as tx
tx.convert(sys.argv[1], sys.argv[2], to="hf", sync=False)
assert "torch" not in sys.modules
"""
MERGER = """
import os, sys
sys.path.append(os.environ["PACKAGES"])  # verl's wheel has a package `tests`, which must not come first
source, target = sys.argv[1:]
sys.argv = ["merger", "merge", "--backend", "fsdp", "--local_dir", source, "--target_dir", target]
from verl.model_merger.__main__ import main
main()
"""
IMPORTS = MERGER.replace("main()\n", "import verl.model_merger.fsdp_model_merger\n")


def make(folder: Path, world: int) -> int:
    """Write what verl writes for a model of FSDP2 on `world` ranks, without the optimizer; return the size in bytes."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3", **CONFIG, architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    folder.mkdir()
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        state: dict[str, Any] = {}
        for name, shape in shapes.items():
            if name == "lm_head.weight":
                state[name] = state["model.embed_tokens.weight"]
                continue
            local = torch.randn(shape[0] // world, *shape[1:]).bfloat16()
            state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
        dist.destroy_process_group()
    config.save_pretrained(folder / "huggingface")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}), "utf-8")
    return sum(file.stat().st_size for file in folder.glob("*.pt"))


def assert_equal(first: Path, second: Path) -> None:
    """Check that two hub folders contain the same tensors, bit by bit."""
    import transaxle as tx

    with tx.open(first) as one, tx.open(second) as two:
        common = set(one) & set(two)
        assert {*one, *two} - common <= {"lm_head.weight"}, set(one) ^ set(two)
        for name in common:
            assert one[name].numpy().tobytes() == two[name].numpy().tobytes(), name


def compare(base: Path, source: Path, world: int, rounds: int, promises: Promises) -> None:
    """Measure both tools on one folder."""
    theirs, ours = base / "theirs", base / "ours"
    runs: dict[str, list[tuple[Run, Run]]] = {TIME: [], MEMORY: []}
    imports = []
    for mode in [*(TIME,) * rounds, MEMORY]:
        merged = run_watched(["-c", MERGER, str(source), str(theirs)], theirs, mode)
        converted = run_watched(["-c", OURS, str(source), str(ours)], ours, mode)
        if not runs[TIME]:
            assert_equal(theirs, ours)
        runs[mode].append((merged, converted))
        imports.append(run_watched(["-c", IMPORTS, "", ""], base))
        shutil.rmtree(theirs)
        shutil.rmtree(ours)
    ratios = [peer.seconds / own.seconds for peer, own in runs[TIME]]
    without = [(peer.cpu - load.cpu) / own.cpu for (peer, own), load in zip(runs[TIME], imports, strict=False)]
    for label, values in (("verl", 0), ("Transaxle", 1)):
        seconds = statistics.median(pair[values].seconds for pair in runs[TIME])
        cpu = statistics.median(pair[values].cpu for pair in runs[TIME])
        peak = runs[MEMORY][0][values].peak / 1e6
        print(f"    {label:10} {seconds:6.2f} s, {cpu:6.2f} s of processors, {peak:7.0f} MB")
    load_cpu = statistics.median(load.cpu for load in imports)
    print(f"    importing verl: {load_cpu:.2f} s of processors; without it {statistics.median(without):.1f} x of ours")
    promises.at_least(f"{world} rank files -> hf against verl's merger", ratios, SPEED)
    peer, own = runs[MEMORY][0]
    promises.at_most(f"{world} rank files -> hf, part of the merger's memory", own.peak / peer.peak, MEMORY_SHARE, "x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--make", nargs=2, metavar=("FOLDER", "WORLD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make(Path(arguments.make[0]), int(arguments.make[1]))
        return 0
    if not PACKAGES.is_dir():
        raise SystemExit(f"verl is not in {PACKAGES}: run make .venv/verl, or set VERL_PACKAGES")
    os.environ["PACKAGES"] = str(PACKAGES)
    promises = Promises()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        for world in arguments.worlds:
            source = base / f"ranks{world}"
            subprocess.run([sys.executable, __file__, "--make", str(source), str(world)], check=True)
            size = sum(file.stat().st_size for file in source.glob("*.pt"))
            print(f"{world} rank files, {size / 1e9:.2f} GB")
            compare(base, source, world, arguments.rounds, promises)
            shutil.rmtree(source)
    return promises.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
