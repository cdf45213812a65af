"""The norm of all gradients: every element of the model once, whoever holds it."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import transaxle as tx
from tests.live.ranks import run
from tests.parallel.models import CONFIGS, build, tokens


def _norms(rank: int, world: int) -> tuple[float, float]:
    """FSDP over two of tensor parallel over two: our norm, and that of the whole model."""
    config, ids = CONFIGS["phi3"], tokens(CONFIGS["phi3"])
    whole, model = build(config), build(config)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    tx.parallel.tensor_parallel(model, mesh["tp"])
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for each in (whole, model):
        each(input_ids=ids, labels=ids).loss.backward()
    cut = tx.parallel.tensor_parallel(build(config), mesh["tp"])
    cut(input_ids=ids, labels=ids).loss.backward()
    for each, said in ((model, "same mesh"), (cut, "mixed")):
        with pytest.raises(RuntimeError, match=said):  # torch's own never takes a part beside DTensors for the whole
            clip_grad_norm_(each.parameters(), 1e9)
    wanted = clip_grad_norm_(whole.parameters(), 1e9)
    return float(tx.parallel.clip_grad_norm_(model, 1e9)), float(wanted)


def test_norm_under_fsdp() -> None:
    for mine, wanted in run(4, _norms):
        assert mine == pytest.approx(wanted, rel=1e-5)


def _shared(rank: int, world: int) -> list[tuple[float, float]]:
    """Ranks that share one head of keys and values, whose rows in a fused projection follow those of its queries."""
    found = []
    for kind, heads in (("phi3", 1), ("phi3", 2), ("llama", 1)):
        config = {**CONFIGS[kind], "num_key_value_heads": heads}
        whole, ids = build(config), tokens(config)
        cut = tx.parallel.tensor_parallel(build(config), init_device_mesh("cpu", (world,)))
        for each in (whole, cut):
            each(input_ids=ids, labels=ids).loss.backward()
        found.append((float(tx.parallel.clip_grad_norm_(cut, 1e9)), float(clip_grad_norm_(whole.parameters(), 1e9))))
    return found


def test_norm_of_heads_that_ranks_share() -> None:
    for found in run(4, _shared):
        for mine, wanted in found:
            assert mine == pytest.approx(wanted, rel=1e-5)
