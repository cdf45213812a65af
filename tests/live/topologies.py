"""Real models under every parallelism, and how they train: shards, tensor parallel, pipeline stages, one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tests.oracles import hub

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "tie_word_embeddings": False,
}  # fmt: skip
MOE = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
}  # fmt: skip
ROWS, TOKENS = 4, 8
"""Rows of the batch, and tokens of each; ranks that are data parallel share the rows out."""
_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")
PLAN: dict[str, ParallelStyle] = {
    **{name: ColwiseParallel() for name in _COLUMNS}, **{name: RowwiseParallel() for name in _ROWS},
}  # fmt: skip
Tensors = dict[str, torch.Tensor]
ALONE, FSDP, HSDP, TP, FSDP_TP, PP = "one process", "fsdp", "hsdp", "tp", "fsdp x tp", "pp"
_EPSILONS = ("exp_avg", "exp_avg_sq")


def source(folder: Path, config: dict[str, Any], seed: int = 0) -> str:
    settings, tensors = hub.make(config, seed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.float() for name, tensor in tensors.items()}, folder / hub.WEIGHTS)
    return str(folder)


class Elsewhere(nn.Identity):
    """What a stage has in the place of a module that another stage has."""

    def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        return hidden


def stage(model: Any, place: int, size: int) -> Any:
    """Leave a model the part that one pipeline stage has: some of its layers, and perhaps an end."""
    layers = model.model.layers
    for number in range(len(layers)):
        if number * size // len(layers) != place:
            layers[number] = Elsewhere()
    if place:
        model.model.embed_tokens = Elsewhere()
    if place + 1 < size:
        model.model.norm, model.lm_head = Elsewhere(), Elsewhere()
    return model


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Cut a model's layers, and then the rest, by FSDP2."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensor_parallel(model: Any, data: int) -> None:
    """Cut a model's layers: a Llama as torch does it, a mixture as transformers does, then over the rest FSDP."""
    degree = dist.get_world_size() // data
    if model.config.model_type == LLAMA["model_type"]:
        grid = init_device_mesh("cpu", (data, degree), mesh_dim_names=("dp", "tp"))
        for layer in model.model.layers:
            parallelize_module(layer, grid["tp"], PLAN)
        if data > 1:
            shard(model, grid["dp"])
        return
    from transformers.distributed import DistributedConfig

    said, _, meshes = type(model).prepare_distribute_model(DistributedConfig(tp_size=degree, fsdp_size=data))
    type(model).maybe_distribute_model(model, said, meshes)


_WAYS: Mapping[str, Callable[[Any], object]] = {
    ALONE: lambda model: model,
    FSDP: lambda model: shard(model, init_device_mesh("cpu", (dist.get_world_size(),))),
    HSDP: lambda model: shard(
        model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    ),
    TP: lambda model: _tensor_parallel(model, 1),
    FSDP_TP: lambda model: _tensor_parallel(model, 2),
    PP: lambda model: stage(model, dist.get_rank(), dist.get_world_size()),
}


def build(config: Mapping[str, Any], how: str, *, meta: bool) -> Any:
    """Return a model under one of the topologies, of all ranks there are."""
    with torch.device("meta" if meta else "cpu"):
        model = hub.model(config, torch.float32).train()
    _WAYS[how](model)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with two groups, whose settings differ."""
    named = dict(model.named_parameters())
    cold = [p for name, p in named.items() if "norm" in name]
    rest = [p for name, p in named.items() if "norm" not in name]
    groups = [{"params": rest, "weight_decay": 0.2}, {"params": cold, "lr": 3e-3}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, foreach=False)


def settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """What each parameter is trained with."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """All weights and all state of this rank's tensors, in full."""
    found = {name: full(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = full(value)
    return found


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, given: Mapping[str, torch.Tensor]) -> None:
    """Give a model and its AdamW their part of full tensors, cut by torch itself."""

    def put(value: torch.Tensor, into: torch.Tensor) -> None:
        if isinstance(into, DTensor):
            cut = distribute_tensor(value, into.device_mesh, into.placements, src_data_rank=None)
            into.to_local().copy_(cut.to_local())
        else:
            into.copy_(value)

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            put(given[name], tensor)
        for name, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            for key in _EPSILONS:
                state[key] = torch.zeros_like(parameter)
                put(given[f"{name}/{key}"], state[key])
            state["step"] = given[f"{name}/step"].clone()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class _Piece(nn.Module):
    """A stage as a function of one tensor."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.first = not isinstance(model.model.embed_tokens, Elsewhere)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        said = {"input_ids": given} if self.first else {"inputs_embeds": given}
        found: torch.Tensor = self.model(**said, use_cache=False).logits
        return found


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, how: str, *, begin: int = 0) -> list[float]:
    """Train on the rows that this rank has of each batch; return the losses, of a pipeline its last stage's."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    place, data = {FSDP: (rank, world), HSDP: (rank, world), FSDP_TP: (rank * 2 // world, 2)}.get(how, (0, 1))
    schedule = None
    if how == PP:
        piece = PipelineStage(_Piece(model), rank, world, torch.device("cpu"))
        schedule = ScheduleGPipe(piece, n_microbatches=2, loss_fn=_loss)
    losses = []
    for number in range(begin, begin + steps):
        tokens = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * (number + 1) % 96
        tokens = tokens[place * ROWS // data : (place + 1) * ROWS // data]
        if schedule is None:
            loss = _loss(model(input_ids=tokens, use_cache=False).logits, tokens)
            loss.backward()
            losses.append(float(loss.detach()))
        else:
            parts: list[torch.Tensor] = []
            said: dict[str, Any] = {"target": tokens, "losses": parts} if rank + 1 == world else {}
            schedule.step(*([] if rank else [tokens]), **said)
            losses += [float(torch.stack(parts).mean())] if said else []
        optimizer.step()
        optimizer.zero_grad()
    return losses
