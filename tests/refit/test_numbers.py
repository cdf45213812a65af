"""Encoded targets: a target with codes gets those of the whole tensor, whichever rank holds which part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import run
from tests.live.save.test_published_codes import HEAD, PLAIN, model_of
from tests.live.topologies import shard
from tests.quant.kinds import MORE, raw
from transaxle.live.model.state_tensors import leaves
from transaxle.quant import quantize_
from transaxle.torch_tensors import as_dtensor, local_of

pytestmark = pytest.mark.filterwarnings("ignore")


def _sharded(model: Any, world: int) -> Any:
    shard(model, init_device_mesh("cpu", (world,)))
    return model


def _bytes(model: nn.Module) -> Mapping[str, torch.Tensor]:
    return {name: raw(local_of(tensor).contiguous()) for name, tensor in leaves(model).tensors.items()}


def _quantized(rank: int, world: int, source: str, target: str, dtype: torch.dtype) -> list[str]:
    """Push twice; return the entries of the target that are not those of a model that was quantized whole."""
    trainer = _sharded(model_of("llama", source, 1, dtype), world)
    engine = _sharded(model_of("llama", target, 2), world)
    refit = tx.Refit(trainer, engine, dtype="bf16" if dtype == torch.float32 else None)
    wrong = []
    for step in range(2):
        whole = model_of("llama", source, 1, dtype)
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


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["float8", "float8_block", "mxfp8", "nvfp4"])
def test_codes_are_those_of_the_whole(kind: str, dtype: torch.dtype) -> None:
    for wrong in run(2, _quantized, PLAIN, kind, dtype):
        assert wrong == []


@pytest.mark.parametrize("kind", ["float8_block", "nvfp4"])
def test_codes_are_copied_unchanged(kind: str) -> None:
    for wrong in run(2, _quantized, kind, kind, torch.bfloat16):
        assert wrong == []


def _truth(folder: Path, name: str, kind: str, dtype: torch.dtype, to: str) -> dict[str, torch.Tensor]:
    """Return what a conversion makes of a saved model, each rank for itself."""
    source = folder / "saved"
    if dtype == torch.float32:
        source = folder / f"{name} cast"
        tx.convert(folder / "saved", source, to="hf", dtype="bf16")
    tx.convert(source, folder / name, to=f"safetensors:{to}", encode=kind, only="*_proj*")
    return load_file(folder / name / "model.safetensors")


def _mesh_cut(name: str, tensor: torch.Tensor) -> Placement:
    """How an engine cuts a weight, or its scales: what comes after along columns."""
    if tensor.dim() < 2:
        return Replicate()
    return Shard(tensor.dim() - (1 if "o_proj" in name or "down_proj" in name else 2))


def _cut(truth: Mapping[str, torch.Tensor], world: int) -> dict[str, torch.Tensor]:
    """Cut codes and scales over all ranks, as bytes where gloo and torch know no more of them."""
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in truth.items():
        shown = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        whole = distribute_tensor(shown, mesh, [_mesh_cut(name, tensor)], src_data_rank=None)
        local = local_of(whole).contiguous().clone().view(tensor.dtype)
        found[name] = as_dtensor(local, mesh, [_mesh_cut(name, tensor)], tensor.shape)
    return found


def _encoded(rank: int, world: int, folder: Path, kind: str, dtype: torch.dtype, to: str) -> list[str]:
    """Push values into plain tensors of codes and scales, cut in the midst of tiles; return what is wrong."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 192, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 48}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 320}
    sizes |= {"tie_word_embeddings": False}
    if to == "hf":
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        sizes |= {"moe_intermediate_size": 160, "num_experts": 3, "num_experts_per_tok": 2}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    trainer, wrong = _sharded(model.to(dtype), world), []
    engine: dict[str, torch.Tensor] = {}
    refit: tx.Refit | None = None
    for step in range(2):
        with torch.no_grad():
            for parameter in trainer.parameters():
                local_of(parameter).mul_(1 + step / 3)
        tx.save(trainer, folder / "saved", to="hf", overwrite=True)
        truth = _cut(_truth(folder, f"{rank}.{step}", kind, dtype, to), world)
        if refit is None:
            engine = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
            refit = tx.Refit(trainer, engine, dtype="bf16" if dtype == torch.float32 else None)
        report = refit.push()
        assert report.bytes_received == report.bytes_needed
        wrong += [n for n in truth if not torch.equal(raw(local_of(engine[n])), raw(local_of(truth[n])))]
    return wrong


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["float8_block", "mxfp8", "nvfp4"])
def test_plain_tensors_get_codes_of_the_whole(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """As engines have them: cut by rows, or columns, wherever tiles begin; what a conversion writes is the truth."""
    for wrong in run(2, _encoded, tmp_path, kind, dtype, "hf"):
        assert wrong == []


def test_stacks_of_experts_get_codes_of_the_whole(tmp_path: Path) -> None:
    """Three experts in one tensor, over three ranks: every matrix has tiles, and a scale of the whole, of its own."""
    for wrong in run(3, _encoded, tmp_path, "nvfp4", torch.bfloat16, "transformers"):
        assert wrong == []
