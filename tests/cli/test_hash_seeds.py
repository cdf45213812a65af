"""Identities under hash seeds: plans, manifests, files, reports and work plans do not depend on the order of sets.

Python chooses a seed for every process, and with it the order in which sets are walked. Whoever continues a conversion,
or takes a share of one, plans it again and must get the same plan.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import transaxle as tx
from tests import checkpoints
from tests.engine import quantized

SEEDS = 3
KINDS: Mapping[str, tuple[str, ...]] = {
    "merge": ("source", "--to", "automodel", "--merge", "adapter"),
    "decode": ("fp8", "--to", "hf", "--decode", "bf16"),
    "encode": ("plain", "--to", "hf", "--encode", "mxfp8"),
    "ties": ("tied", "--to", "dcp:transformers"),
    "zeros": ("titan", "--to", "hf"),
    "ranks": ("source", "--to", "megatron_torch", "--tp", "2"),
}
"""Conversions, as the command line has them; each is planned, written to a file for workers, reported and done."""
RUN = """
import json, sys
from transaxle.cli import main
def said(*arguments):
    assert not main(list(arguments)), arguments
for kind, (source, *options) in json.loads(sys.argv[1]).items():
    target = f"{kind}-out"
    written = ["--json", "--report", f"{kind}.html", "--write", f"{kind}.work", "--items", "3"]
    said("plan", source, target, *options, *written)
    said("convert", source, target, *options, "--no-sync", "--quiet")
    said("report", target, "--output", f"{kind}-out.html")
    said("info", target, "--json")
"""


def _adapter(folder: Path) -> None:
    """Write an adapter of many weights, with copies of those of the base that it changes as peft stores them."""
    random, base, rank = np.random.default_rng(1), checkpoints.tensors(), 2
    modules = [name.removesuffix(".weight") for name in base if "_proj" in name and "experts" not in name]
    low: dict[str, np.ndarray] = {}
    for module in [*modules, "lm_head"]:
        rows, columns = base[f"{module}.weight"].shape
        shapes = {"A": (rank, columns), "B": (rows, rank)}
        low |= {
            f"base_model.model.{module}.lora_{which}.weight": random.standard_normal(shape).astype(np.float32)
            for which, shape in shapes.items()
        }
    for name in ("lm_head", "model.norm"):
        inside = ".base_layer" if name == "lm_head" else ""
        low[f"base_model.model.{name}{inside}.weight"] = base[f"{name}.weight"].astype(np.float32)
    folder.mkdir()
    save_file(low, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 3, "target_modules": [*modules, "lm_head"]}
    (folder / "adapter_config.json").write_text(json.dumps(said), "utf-8")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    checkpoints.tiny(folder / "source", shards=3)
    _adapter(folder / "adapter")
    sizes = {"d": 128, "f": 256, "g": 2, "r": 2, "head": 64, "layers": 2}
    quantized.store(folder / "fp8", quantized.llama(**sizes))
    quantized.store(folder / "plain", quantized.plain_llama(**sizes))
    tensors = checkpoints.tensors()
    del tensors["lm_head.weight"]
    checkpoints.write(folder / "tied", tensors, config={**checkpoints.CONFIG, "tie_word_embeddings": True})
    tx.convert(folder / "source", folder / "titan", to="dcp:torchtitan", sync=False)
    return folder


def _under(seed: int, folder: Path, *command: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, check=False)


def test_files_and_plans_are_the_same_under_every_seed(inputs: Path, tmp_path: Path) -> None:
    made: list[dict[str, bytes]] = []
    for seed in range(SEEDS):
        folder = tmp_path / "here"  # work plans have whole paths
        folder.mkdir()
        for path in inputs.iterdir():
            (folder / path.name).symlink_to(path)
        outcome = _under(seed, folder, "-c", RUN, json.dumps(KINDS))
        assert outcome.returncode == 0, outcome.stderr.decode()[-2000:]
        files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        made.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
        made[-1]["said"] = outcome.stdout
        shutil.rmtree(folder)
    assert sum(name.endswith((".work", ".html")) for name in made[0]) == 3 * len(KINDS)
    assert sum(name.endswith("transaxle.json") for name in made[0]) == len(KINDS)
    for seed, each in enumerate(made):
        assert each.keys() == made[0].keys()
        different = [name for name, content in each.items() if content != made[0][name]]
        assert not different, f"seed {seed}: {different}"


LIVE = """
import json
from pathlib import Path
import torch
import transaxle as tx
source = tx.open("source")
state = {name: torch.from_numpy(tensor.read().astype("float32")) for name, tensor in source.items()}
for to in ("hf", "dcp:transformers", "megatron_torch"):
    tx.save(state, to.partition(":")[0], to=to, config=dict(source.config), sync=False)
torch.manual_seed(1)
layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "abcdefgh"})
optimizer = torch.optim.AdamW(layers.parameters())
sum(each(torch.ones(2)).sum() for each in layers.values()).backward()
optimizer.step()
tx.save(layers, "trained", to="dcp:identity", optimizer=optimizer, extra={"run": {"a": 1, "b": 2}}, sync=False)
refit = tx.Refit(state, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
print(refit.names, [(item.size, item.transfers) for item in refit._plan.items], refit._plan.parts)
tx.convert("source", "ranks", to="megatron_torch", tp=2, sync=False)
(drifted,) = Path("ranks").rglob("mp_rank_01*/*.pt")
held = torch.load(drifted, weights_only=False)
norms = [name for name in held["model"] if "norm" in name]
for name in norms:
    held["model"][name] += 1
torch.save(held, drifted)
Path("ranks/transaxle.json").unlink()
report = tx.convert("ranks", "mean", to="hf", average=True, sync=False)
assert len(report.recoded) > 3, (report, norms)
print(json.dumps({**report.as_json(), "seconds": 0}))
"""


def test_saves_and_averages_are_the_same_under_every_seed(inputs: Path, tmp_path: Path) -> None:
    """Live saves, the plan of a refit, and the means of replicas."""
    made: list[dict[str, bytes]] = []
    for seed in range(2):  # each imports torch
        folder = tmp_path / "here"
        folder.mkdir()
        (folder / "source").symlink_to(inputs / "source")
        outcome = _under(seed, folder, "-c", LIVE)
        assert outcome.returncode == 0, outcome.stderr.decode()[-2000:]
        files = [path for path in folder.rglob("*") if path.is_file() and "ranks" not in path.parts]
        made.append({str(path.relative_to(folder)): path.read_bytes() for path in files} | {"said": outcome.stdout})
        shutil.rmtree(folder)
    assert len(made[0]) > 15
    assert [name for name, content in made[0].items() if made[1].get(name) != content] == []


KILLED = """
import os
import transaxle as tx
blocks = iter(range(20))
def progress(_):
    if next(blocks, None) is None:
        os._exit(9)
tx.convert("source", "out", to="automodel", merge="adapter", resume=True, jobs=1, progress=progress)
"""
RESUMED = """
import transaxle as tx
print(tx.convert("source", "out", to="automodel", merge="adapter", resume=True, jobs=1).resumed)
"""


def test_a_merge_is_continued_and_shared_under_other_seeds(inputs: Path, tmp_path: Path) -> None:
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert _under(1, tmp_path, "-c", KILLED).returncode == 9
    resumed = _under(2, tmp_path, "-c", RESUMED)
    assert resumed.returncode == 0, resumed.stderr.decode()[-2000:]
    assert int(resumed.stdout) > 0
    steps = ("--begin", "--items=0", "--items=1", "--commit")
    planned = ("plan", "source", "shared", *KINDS["merge"][1:], "--write", "work", "--items", "2")
    for seed, command in enumerate([planned, *(("work", "work", step) for step in steps)], 3):
        outcome = _under(seed, tmp_path, "-m", "transaxle", *command)
        assert outcome.returncode == 0, outcome.stderr.decode()[-2000:]
    assert (tmp_path / "shared" / checkpoints.WHOLE).read_bytes() == (tmp_path / "out" / checkpoints.WHOLE).read_bytes()
