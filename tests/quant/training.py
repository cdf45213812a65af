"""A small transformer with quantized weights, trained on several ranks; and what it holds, as plain bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests.quant.kinds import KINDS, raw
from transaxle.quant import NVFP4, MasterWeights, NVFP4BlockScaling, QuantizedTensor, Quantizer, quantize_

SIX: dict[str, Quantizer] = {**KINDS, "nvfp4": NVFP4(square=True), "nvfp4 training": NVFP4BlockScaling()}
"""One quantizer for each kind of scaling; that of nvfp4 has amaxes of 16 x 16 elements, which cuts go through."""
WORDS, WIDTH, HEADS, HIDDEN, CHOICES = 29, 48, 4, 166, 3
"""Sizes that four ranks do not cut evenly, nor into whole tiles; of the last, one rank has no row."""


class Block(nn.Module):
    """Attention, a gated sum of two halves, and a router of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.router = nn.Linear(WIDTH, CHOICES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, WIDTH]."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).split(WIDTH, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        weight = self.router(x).softmax(-1)[..., :1]
        made: torch.Tensor = x + weight * self.down(functional.gelu(self.up(x)))
        return made


class Transformer(nn.Module):
    """A block between an embedding, which stays as it is, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, WORDS]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        made: torch.Tensor = self.head(x)
        return made


def mesh_of(world: int) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (world,))


def built(kind: str, mesh: DeviceMesh | None, seed: int = 0, *, meta: bool = False) -> Transformer:
    """Return a quantized model, sharded over a mesh if there is one."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        model = Transformer().bfloat16()
    quantize_(model, SIX[kind])
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def trainer(model: nn.Module, **options: Any) -> MasterWeights:
    """AdamW on masters, in two groups."""
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return MasterWeights(groups, partial(torch.optim.AdamW, lr=1e-2, **options))


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Train on tokens that every rank and step has its own of; return this rank's losses."""
    losses = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        tokens = torch.randint(WORDS, (2, 9), generator=generator)
        logits = model(tokens[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All of each tensor as bytes, gathered from its ranks without torch's help for what it is."""
    mine = {
        name: raw(tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in tensors.items()
    }
    held: list[Any] = [mine]
    if dist.is_initialized():
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, mine)
    cut = {
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
    }
    return {name: torch.cat([one[name] for one in held]) if name in cut else mine[name] for name in tensors}


def bytes_of(model: nn.Module, optimizer: MasterWeights | None = None) -> dict[str, torch.Tensor]:
    """Everything that a run holds, whole, by name."""
    found = dict(model.state_dict())
    if optimizer is not None:
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, state in optimizer.states.items():
            found |= {f"{names[parameter]} {key}": value for key, value in state.items()}
    return whole(found)


def equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Whether two runs hold the same bytes under the same names."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def started(kind: str, world: int, kept: Mapping[str, torch.Tensor]) -> tuple[Transformer, MasterWeights]:
    """Start a run of bytes that another one had: written into place by slicing, with nothing of Transaxle's."""
    model = built(kind, mesh_of(world), seed=3)
    optimizer = trainer(model)
    train(model, optimizer, range(1))  # makes the moments
    rank = dist.get_rank()
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for name, entry in model.state_dict().items():
        _write(entry, kept[name], rank, world)
    with torch.no_grad():
        for parameter, state in optimizer.states.items():
            for key, value in state.items():
                _write(value, kept[f"{names[parameter]} {key}"], rank, world)
    return model, optimizer


def _write(tensor: torch.Tensor, octets: torch.Tensor, rank: int, world: int) -> None:
    part = octets
    if isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements):
        rows = tensor.shape[0]
        step = -(-rows // world)
        part = octets.reshape(rows, -1)[min(rank * step, rows) : min((rank + 1) * step, rows)]
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    raw(local).copy_(part.reshape(raw(local).shape))


def inverted(model: nn.Module) -> None:
    """Turn over every bit of what a model holds, in place."""
    for entry in model.state_dict().values():
        local = entry.to_local() if isinstance(entry, DTensor) else entry
        raw(local.detach()).bitwise_not_()


def quantized_of(model: nn.Module) -> dict[str, QuantizedTensor]:
    """This rank's rows of every quantized parameter, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        inner = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if isinstance(inner, QuantizedTensor):
            found[name] = inner
    return found


class CountingGather:
    """An all-gather that counts bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See torch."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather, and count."""
        assert output_tensor.dtype == torch.uint8
        self.bytes += output_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
