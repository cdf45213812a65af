"""A plan says which rank reads each file that it will write, and which part of each tensor is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import transaxle as tx
from tests.checkpoints import CONFIG, tiny
from tests.cli import documents

_DEFAULTS = {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "dtype": "bfloat16"}
"""Keys of the tiny model's config that transformers writes too."""


def _local_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a rank loads; of a DTensor, the rank's part."""
    if isinstance(value, DTensor):
        yield value._local_tensor
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _local_tensors(each)


@pytest.mark.parametrize(
    ("target", "mesh"),
    [
        ("megatron_torch", {"pp": 2, "ep": 2, "tp": 2}),
        ("vllm_sharded", {"tp": 2}),
        ("vllm_sharded", {"tp": 2, "ep": 2}),
        ("ranks:hf", {"dp": 3}),
    ],
)
def test_owners_are_the_ranks_of_the_files(target: str, mesh: dict[str, int], tmp_path: Path) -> None:
    """Each rank's file names the rank as its program does, and has the bytes of the pieces that the plan writes there.

    A config alone gives the same owners and pieces.
    """
    source = tiny(tmp_path / "model")
    options: dict[str, Any] = {**mesh, **({"device": "cpu"} if "dp" in mesh else {})}
    plan = tx.plan(source, tmp_path / "out", to=target, **options).document()
    documents.check(documents.PLAN_DOCUMENT, plan)
    tx.convert(source, tmp_path / "out", to=target, sync=False, **options)
    planned = Counter[str]()
    for tensor in plan["tensors"]:
        for piece in tensor["writes"]:
            planned[piece["file"]] += piece["nbytes"]
    assert plan["mesh"] == mesh
    assert planned.keys() == plan["owners"].keys()
    for file, owner in plan["owners"].items():
        path = tmp_path / "out" / file
        value = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)
        if target == "vllm_sharded":
            scales = {name for name in value if name.endswith("_scale")}  # constants of the engine's own
            value = {name: value[name] for name in value.keys() - scales}
            assert file.startswith(f"model-rank-{owner['tp']}-part-")
            assert set(owner.values()) == {owner["tp"]}
        elif "dp" in mesh:
            meshes = [each.device_mesh for each in value.values() if isinstance(each, DTensor)]
            assert {mesh.get_coordinate() for mesh in meshes} == {(owner["dp"],)}
        else:
            assert file.split("/")[1] == f"mp_rank_{owner['tp']:02}_{owner['pp']:03}_{owner['ep']:03}"
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in _local_tensors(value)}  # Megatron's files have aliases
        assert sum(sizes.values()) == planned[file], file
    answer = tx.supports({**CONFIG, **_DEFAULTS}, target, mesh=mesh)
    assert answer.plan is not None
    implied = answer.plan.document()
    assert (implied["mesh"], implied["owners"]) == (plan["mesh"], plan["owners"])
    for side in (plan, implied):
        side["tensors"] = {
            tensor["name"]: [(piece["file"], piece["box"]) for piece in tensor["writes"]] for tensor in side["tensors"]
        }
    assert implied["tensors"] == plan["tensors"]


@pytest.mark.parametrize("target", ["dcp:torchtitan", "torch_dist", "deepspeed-universal", "hf"])
def test_files_that_any_rank_reads_have_no_owner(target: str, tmp_path: Path) -> None:
    plan = tx.plan(tiny(tmp_path / "model"), tmp_path / "out", to=target).document()
    documents.check(documents.PLAN_DOCUMENT, plan)
    assert plan["mesh"] == plan["owners"] == {}
