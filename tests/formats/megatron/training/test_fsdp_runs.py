"""Folders that Megatron-FSDP itself saves: converted is what torch reads of them, and Megatron continues from that."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

import transaxle as tx
from tests.formats.megatron.training.conftest import PYTHON, ROOT, Megatron
from tests.formats.megatron.training.peer import RANK, Case
from tests.formats.megatron.training.sharded_job import ROWS, STEPS, launch

pytestmark = pytest.mark.megatron
EXPERTS = "--qk-layernorm --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2"
VOCABULARY = {"embedding.word_embeddings.weight", "output_layer.weight"}
APART = "--untie-embeddings-and-output-weights"


class FsdpRun(NamedTuple):
    """A run of Megatron-FSDP."""

    name: str
    words: str
    ranks: int = 2


RUNS = [
    FsdpRun("tied", ""),
    FsdpRun("three", f"{APART} --global-batch-size 24", 3),
    FsdpRun("biases-tp2", f"{APART} --add-qkv-bias --tensor-model-parallel-size 2"),
    FsdpRun("experts-ep2", f"{APART} {EXPERTS} --expert-model-parallel-size 2"),
]


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """What torch reads of a DCP folder."""
    items = FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in items
        if isinstance(item, TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore"):
        load(state, checkpoint_id=folder, no_dist=True)
    return state


def expected(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of Megatron-FSDP under the names of parameters, gate above up."""
    tensors: dict[str, torch.Tensor] = {}
    for key, value in stored.items():
        state = re.fullmatch(r"optimizer\.state\.module\.module\.module\.(.+)\.(exp_avg|exp_avg_sq)", key)
        name, prefix, end = (
            (state[1], "optim/", f"/{state[2]}") if state else (key.removeprefix("model.module."), "", "")
        )
        if name.endswith("_v"):
            continue
        if name.endswith("_w"):
            name = name.removesuffix("_w")
            value = torch.cat([value, stored[key.replace(f"{name}_w", f"{name}_v")]])
        tensors[f"{prefix}{name}{end}"] = value
    return tensors


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_what_it_saves_continues_in_the_distributed_optimizer(run: FsdpRun, megatron: Megatron, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip(f"Megatron has no environment at {PYTHON}: make megatron")
    folder = tmp_path / "run"
    launch(PYTHON, ROOT, folder, run.ranks, run.words)
    stored = expected(tensors_in(folder / f"iter_{STEPS:07d}"))
    with tx.open(folder) as checkpoint:
        steps = {name for name in checkpoint if name.endswith("/step")}
        assert set(checkpoint) - steps == set(stored)
        for name, value in stored.items():
            assert torch.equal(torch.from_numpy(checkpoint[name].read()), value), name
        assert {int(checkpoint[name].read()) for name in steps} == {STEPS}
        assert len(steps) == sum(name.endswith("/exp_avg") for name in stored)
        groups = checkpoint.metadata["param_groups"]
        assert {name for group in groups for name in group["params"]} == {
            n for n in stored if not n.startswith("optim/")
        }
        assert {group["weight_decay"] for group in groups} == {0.0, 0.01}
    tx.convert(folder, tmp_path / "dist", to="torch_dist", optimizer=True)
    words = f"""--load {tmp_path / "dist"} --use-checkpoint-args --vocab-size {ROWS} --make-vocab-size-divisible-by 2
        --transformer-impl local --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --bf16
        --override-opt_param-scheduler --max-position-embeddings 64 --position-embedding-type rope --swiglu
        --normalization RMSNorm --disable-bias-linear
        {"--qk-layernorm --expert-model-parallel-size 2" if "experts" in run.name else ""}"""
    out = tmp_path / "loaded"
    out.mkdir()
    megatron([Case(str(out), words, 2 if "experts" in run.name else 1)])
    told = torch.load(out / RANK.format(0), weights_only=False)
    assert told["iteration"] == STEPS
    assert {group["step"] for group in told["first"]["groups"]} == {STEPS}
    for name, value in told["first"]["parameters"].items():
        rows = ROWS if name in VOCABULARY else None  # the rows after those are padding
        expected_value = stored[name][:rows].to(value.dtype)
        assert torch.equal(value[:rows], expected_value), name
