"""Models of transformers with quantized weights: the same under FSDP2 as alone, and loaded back by transformers."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.live.ranks import run
from tests.quant.kinds import KINDS, raw
from transaxle.quant import Float8Block, MasterWeights, QuantizedTensor, Quantizer, quantize_, quantized_init

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
five = pytest.mark.parametrize("kind", KINDS)
HEAD = "lm_head"
"""Engines leave it as it is."""
GRADS = "eager", "batched_mm", "grouped_mm"
"""What transformers multiplies experts by."""


def _model(family: str, experts: str = GRADS[0], seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "head_dim": 32}
    torch.manual_seed(seed)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    more = {"moe_intermediate_size": 128, "num_experts": 5, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, **more)
    config._experts_implementation = experts
    return Qwen3MoeForCausalLM(config).bfloat16()


def _quantized(family: str, quantizer: Quantizer, **options: Any) -> Any:
    with quantized_init(quantizer, filter=lambda module: getattr(module, "out_features", 0) != options.get("skip")):
        return _model(family, **{key: value for key, value in options.items() if key != "skip"})


def _sharded(model: Any, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _steps(model: Any) -> list[float]:
    optimizer = MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=1e-2, foreach=False))
    tokens, losses = torch.arange(12).reshape(2, 6), []
    for _ in range(2):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    losses.append(model(tokens, labels=tokens).loss.item())
    return losses


def _train(rank: int, world: int, family: str, kind: str) -> tuple[list[float], int]:
    torch.use_deterministic_algorithms(True)
    try:
        model = _sharded(_quantized(family, KINDS[kind]), world)
        locals_ = [parameter.to_local() for parameter in model.parameters()]
        return _steps(model), sum(isinstance(one, QuantizedTensor) for one in locals_)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "mxfp8"), ("qwen3_moe", "float8_block"), ("qwen3_moe", "nvfp4")]
)
def test_training_under_fsdp_is_that_of_one_rank(family: str, kind: str) -> None:
    """All linear layers, and experts in stacks of five over two ranks."""
    torch.set_num_threads(1)
    alone = _steps(_quantized(family, KINDS[kind]))
    count = 15 if family == "llama" else 13
    assert alone[-1] < alone[0]
    assert run(2, _train, family, kind) == [(alone, count)] * 2


@pytest.mark.parametrize("kind", ["float8 delayed", "nvfp4"])
@pytest.mark.parametrize("experts", GRADS)
def test_experts_are_multiplied_as_their_values_are(experts: str, kind: str) -> None:
    wide = _model("qwen3_moe", experts)
    model = copy.deepcopy(wide)
    assert sum(".experts." in name for name in quantize_(model, KINDS[kind])) == 4
    named, tokens = dict(wide.named_parameters()), torch.arange(12).reshape(2, 6)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            named[name].data.copy_(parameter.dequantize())
    made, wanted = (one(tokens, labels=tokens) for one in (model, wide))
    assert torch.equal(made.logits, wanted.logits)
    made.loss.backward()
    wanted.loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, named[name].grad)


def _save(rank: int, world: int, family: str, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    model = _quantized(family, Float8Block(), skip=96)
    held = {
        name: {"": one.dequantize(), **one.components} if isinstance(one, QuantizedTensor) else {"": one}
        for name, one in model.named_parameters()
    }
    config = json.loads(model.config.to_json_string(use_diff=False))
    tx.save(_sharded(model, world), folder, to="hf", config=config)
    return {name: {part: raw(buffer.detach()) for part, buffer in one.items()} for name, one in held.items()}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_transformers_loads_what_two_ranks_saved_as_fp8(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantized, with equal values; and as its own FP8 modules, which it builds where there is a GPU only."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    wanted = run(2, _save, family, str(tmp_path / "saved"))[0]
    saved = tx.open(tmp_path / "saved")
    told = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert (told["quant_method"], told["weight_block_size"]) == ("fp8", [128, 128])
    codes = [name for name in saved if saved[name].dtype == "F8_E4M3"]
    assert all(f"{name}_scale_inv" in saved for name in codes)
    assert len(codes) == (14 if family == "llama" else 8 + 2 * 5 * 3)
    method = FineGrainedFP8Config(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=method, dtype=torch.bfloat16)
    theirs = dict(loaded.named_parameters())
    assert theirs.keys() == wanted.keys()
    assert all(torch.equal(raw(theirs[name].detach()), held[""]) for name, held in wanted.items())
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    theirs = dict(loaded.named_parameters())
    for name, held in wanted.items():
        assert torch.equal(raw(theirs[name].detach()), held.get("data", held[""]))
        if "data" in held:
            assert theirs[name].dtype == torch.float8_e4m3fn
            assert torch.equal(raw(theirs[f"{name}_scale_inv"].detach()), held["scale_inv"])
