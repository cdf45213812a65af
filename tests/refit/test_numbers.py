"""Numbers on the way: a target that keeps codes has those of the whole tensor, whoever holds which part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.live.ranks import run
from tests.live.save.test_published_codes import HEAD, _model
from tests.quant.kinds import MORE, raw
from transaxle.live.model.state_tensors import leaves
from transaxle.quant import quantize_
from transaxle.torch_tensors.local_tensor import local_of

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = "plain"


def _model_of(kind: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A llama, in codes or plain."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if kind != PLAIN:
        return _model("llama", kind, seed)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "head_dim": 32}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype)


def _sharded(model: Any, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _bytes(model: nn.Module) -> Mapping[str, torch.Tensor]:
    return {name: raw(local_of(tensor).contiguous()) for name, tensor in leaves(model).tensors.items()}


def _quantized(rank: int, world: int, source: str, target: str, dtype: torch.dtype) -> list[str]:
    """Push twice; return the entries of the target that are not those of a model that was quantized whole."""
    trainer = _sharded(_model_of(source, 1, dtype), world)
    engine = _sharded(_model_of(target, 2), world)
    refit = tx.Refit(trainer, engine, dtype="bf16" if dtype == torch.float32 else None)
    wrong = []
    for step in range(2):
        whole = _model_of(source, 1, dtype)
        if source == PLAIN:
            with torch.no_grad():
                for parameter in trainer.parameters():
                    local_of(parameter).mul_(1 + step)
                for parameter in whole.parameters():
                    parameter.mul_(1 + step)
            quantize_(whole.to(torch.bfloat16), MORE[target], lambda name, _: name != HEAD)
        truth = _bytes(_sharded(whole, world))
        refit.push()
        found = _bytes(engine)
        wrong += [name for name in truth if not torch.equal(found[name], truth[name])]
    return wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["float8", "float8_block", "mxfp8", "nvfp4"])
def test_codes_are_those_of_the_whole(kind: str, dtype: torch.dtype) -> None:
    for wrong in run(2, _quantized, PLAIN, kind, dtype):
        assert wrong == []


@pytest.mark.parametrize("kind", ["float8_block", "nvfp4"])
def test_codes_travel_as_they_are(kind: str) -> None:
    for wrong in run(2, _quantized, kind, kind, torch.bfloat16):
        assert wrong == []
