"""Mixtures made of grouped layers: every expert is cut inside, and computes what the whole one does."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh

import transaxle as tx
from tests.live.ranks import run
from tests.oracles import hub
from tests.parallel.models import tokens
from transaxle.errors import TransaxleError
from transaxle.live.landing import local_of
from transaxle.nn.moe import MoE
from transaxle.parallel.cutting import everything
from transaxle.parallel.tensor_parallel import tensor_parallel

INNER, EXPERTS, CHOSEN = 10, 3, 2
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": INNER,
    "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True, "tie_word_embeddings": False,
    "pad_token_id": 5, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip


def _model(seed: int, *, single: bool, ep: Any = None) -> nn.Module:
    model = hub.model(CONFIG, torch.float32)
    for layer in model.model.layers:
        made = MoE(CONFIG["hidden_size"], INNER, EXPERTS, CHOSEN, single_grouped_weight=single, ep=ep)
        layer.mlp = made
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        local_of(parameter).copy_(torch.randn(local_of(parameter).shape, generator=generator) * 0.2)
    found: nn.Module = model.train()
    return found


def _off(mine: Tensor, wanted: Tensor) -> float:
    return float((mine - wanted).abs().max() / wanted.abs().max())


def _compare(rank: int, world: int, single: bool, out: str) -> tuple[dict[str, float], list[str], int]:
    with torch.no_grad():
        whole = _model(0, single=single)
        same, other = (_model(1, single=each) for each in (single, not single))
    mesh = init_device_mesh("cpu", (world,))
    cut = tensor_parallel(deepcopy(whole), mesh)
    ids = tokens(CONFIG)
    outputs = [model(input_ids=ids, labels=ids) for model in (whole, cut)]
    for output in outputs:
        output.loss.backward()
    named, found = dict(whole.named_parameters()), {"logits": _off(outputs[1].logits, outputs[0].logits)}
    experts = 0
    for name, parameter, kept in everything(cut):
        grad = named[name].grad
        assert grad is not None
        assert parameter.grad is not None
        found[name] = _off(local_of(parameter.grad), kept.take(grad))
        experts += "experts" in name and sum(kept.widths) in (INNER, 2 * INNER)
    tx.save(cut, out, to="dcp")
    resumed = tensor_parallel(other, mesh)  # one parameter for each expert where it was one for all, and the reverse
    tx.load(resumed, out)
    back = _model_of(whole, single=not single)
    wrong = _through_torch(cut, tensor_parallel(same, mesh), f"{out}-torch")
    wrong += [n for n, p, kept in everything(resumed) if not torch.equal(local_of(p), kept.take(back[n]))]
    return found, wrong, experts


def _through_torch(cut: nn.Module, other: nn.Module, out: str) -> list[str]:
    """Names of what torch's checkpoint and state dicts do not carry from one cut model to another."""
    dcp_save(cut.state_dict(), checkpoint_id=out)
    state = other.state_dict()
    dcp_load(state, checkpoint_id=out)
    other.load_state_dict(state)
    pairs = zip(cut.named_parameters(), other.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.equal(local_of(p), local_of(q))]


def _model_of(whole: nn.Module, *, single: bool) -> dict[str, Tensor]:
    """The weights of a model in the names of the other form, written out."""
    found = {}
    for name, value in whole.state_dict().items():
        stem, _, last = name.rpartition(".")
        if "experts" not in name:
            found[name] = value
        elif not single:
            found |= {f"{name}{place}": part for place, part in enumerate(value)}
        elif last == "weight0":
            found[f"{stem}.weight"] = torch.stack([whole.state_dict()[f"{stem}.weight{e}"] for e in range(EXPERTS)])
    return found


@pytest.mark.parametrize(("single", "world"), [(True, 2), (False, 3)])
def test_every_expert_is_cut_inside(single: bool, world: int, tmp_path: Path) -> None:
    for found, wrong, experts in run(world, _compare, single, str(tmp_path / "saved")):
        assert {name: off for name, off in found.items() if not off < 2e-5} == {}
        assert wrong == []
        assert experts == 2 * 2 * (1 if single else EXPERTS)


def _refused(rank: int, world: int) -> list[str]:
    mesh, said = init_device_mesh("cpu", (world,)), []
    with torch.no_grad():
        cut, quantized = tensor_parallel(_model(0, single=True), mesh), _model(0, single=True)
        shared_out = _model(0, single=True, ep=mesh)
    tx.quant.quantize_(quantized, tx.quant.MXFP8())
    for call in (
        lambda: tx.quant.quantize_(cut, tx.quant.MXFP8()),
        lambda: tensor_parallel(quantized, mesh),
        lambda: tensor_parallel(shared_out, mesh),
    ):
        with pytest.raises(TransaxleError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_quantized_and_shared_out_experts_are_refused() -> None:
    for after, before, shared_out in run(3, _refused):
        assert "its part of a weight that tensor parallelism has cut" in after
        assert "it is quantized" in before
        assert all("model.layers.1.mlp.experts.linear_fc2.weight" in said for said in (after, before, shared_out))
        assert "it is sharded already" in shared_out
