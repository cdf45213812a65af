"""Jobs of several ranks, each of which saves its own files with `torch.save`, as verl does."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
TRUTH = ".truth"
"""End of the name of the file with whole tensors, beside the folder."""
KINDS = {
    "fsdp2": (1, 2, 3, 4), "hsdp": (2, 4), "mesh dim of one": (1, 3), "tp": (2, 4), "sliced": (4,), "fsdp1": (2, 3),
    "fsdp1 flat": (2,), "fsdp1 mesh": (2,), "fsdp1 hybrid": (4,),
}  # fmt: skip
"""How a model is divided -> numbers of ranks."""
LARGE = {"fsdp2": (8,), "hsdp": (6, 8), "tp": (6, 8), "hsdp and tp": (8,), "fsdp1": (8,)}


class Odd(nn.Module):
    """Parameters of uneven sizes, tied weights and buffers of full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.row = nn.Parameter(torch.randn(1, 5))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.to(torch.bfloat16)
        self.register_buffer("count", torch.tensor(7.5))
        self.register_buffer("scales", torch.randn(3))
        self.register_buffer("steps", torch.tensor(12))


def _divide(model: nn.Module, kind: str, world: int) -> nn.Module:
    if kind.startswith("fsdp1"):
        return _wrap(model, kind, world)
    mesh = _mesh(kind, world)
    if "tp" in kind:
        layers = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], layers)
        mesh = mesh["ddp", "fsdp"] if "hsdp" in kind else mesh["fsdp"]
    fully_shard(model, mesh=mesh["fsdp"] if kind == "sliced" else mesh)
    return model


def _mesh(kind: str, world: int) -> DeviceMesh:
    sizes = {
        "fsdp2": {"fsdp": world},
        "hsdp": {"ddp": 2, "fsdp": world // 2},
        "mesh dim of one": {"ddp": 1, "fsdp": world},
        "tp": {"fsdp": world // 2, "tp": 2},
        "hsdp and tp": {"ddp": 2, "fsdp": world // 4, "tp": 2},
        "sliced": {"fsdp": world // 2, "other": 2},
    }[kind]
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _wrap(model: nn.Module, kind: str, world: int) -> nn.Module:
    mesh = None
    if kind == "fsdp1 mesh":
        mesh = init_device_mesh("cpu", (world,))
    if kind == "fsdp1 hybrid":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp"))
    strategy = ShardingStrategy.HYBRID_SHARD if kind == "fsdp1 hybrid" else ShardingStrategy.FULL_SHARD
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=strategy,
        use_orig_params=kind != "fsdp1 flat",
        device_id=torch.device("cpu"),
    )


def save(rank: int, world: int, folder: Path, kind: str) -> None:
    """Save a model that is divided over all ranks, and on rank 0 its whole tensors."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = _divide(Odd(), kind, world)
    write(folder, MODEL, state_of(model), rank, world)
    if rank:
        whole(state_of(model))
        return
    torch.save(whole(state_of(model)), folder.with_suffix(TRUTH))


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a rank."""
    if not isinstance(model, FullyShardedDataParallel):
        return model.state_dict()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict()


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a state dict, which all ranks must ask for together."""
    return {name: _whole(value) for name, value in state.items()}


def _whole(value: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if not hasattr(value, "local_shards"):
        return torch.as_tensor(value).detach().clone()
    full = torch.empty(value.size(), dtype=value.dtype)
    value.gather(0, full if dist.get_rank() == 0 else None)
    return full


def file_name(part: str, rank: int, world: int) -> str:
    """Return the name that verl gives to a rank's file."""
    return f"{part}_world_size_{world}_rank_{rank}.pt"


def write(folder: Path, part: str, state: Any, rank: int, world: int) -> None:
    """Write the file of one rank."""
    torch.save(state, folder / file_name(part, rank, world))


def train(model: nn.Module, names: Iterable[str] = ()) -> tuple[torch.optim.Optimizer, Any]:
    """Take two steps of AdamW, with two parameter groups and a schedule; gradients are random, and alike on all ranks.

    Args:
        model: the divided model.
        names: parts of the names of parameters that are in the second group.
    """
    parameters = dict(model.named_parameters())
    second = [name for name in parameters if any(part in name for part in names)]
    groups = [
        {"params": [parameter for name, parameter in parameters.items() if name not in second], "lr": 1e-3},
        {"params": [parameters[name] for name in second], "lr": 1e-3, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)
    torch.manual_seed(1)
    for _ in range(2):
        for parameter in parameters.values():
            gradient = torch.randn(parameter.shape, dtype=parameter.dtype)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
        schedule.step()
    return optimizer, schedule


def _decay(step: int) -> float:
    return 1 / (1 + step)


def save_training(rank: int, world: int, folder: Path, kind: str, model_type: str) -> None:
    """Save a transformers model with its optimizer's state, schedule and random state, and on rank 0 the truth."""
    warnings.simplefilter("ignore")
    from tests.live.tiny import builder

    torch.manual_seed(0)
    build = builder(model_type)
    assert not isinstance(build, str)
    model: Any = build()
    _divide(model, kind, world)
    optimizer, schedule = train(model, ("norm",))
    state = model.state_dict()
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        f"optim/{names[parameter]}/{key}": value
        for parameter, of_parameter in optimizer.state.items()
        for key, value in of_parameter.items()
    }
    write(folder, MODEL, state, rank, world)
    write(folder, OPTIMIZER, optimizer.state_dict(), rank, world)
    torch.manual_seed(100 + rank)
    extra = {"lr_scheduler": schedule.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    write(folder, EXTRA, extra, rank, world)
    truth = whole({**state, **moments})
    if rank == 0:
        (folder / "huggingface").mkdir()
        model.config.save_pretrained(folder / "huggingface")
        torch.save(truth, folder.with_suffix(TRUTH))


def save_partial(rank: int, world: int, folder: Path) -> None:
    """Save a DTensor that is a sum over the ranks, and not a concatenation."""
    mesh = init_device_mesh("cpu", (world,))
    write(folder, MODEL, {"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, rank, world)


def save_local(rank: int, world: int, folder: Path, kind: str) -> None:
    """Save what FSDP1 keeps on a rank: parts of flat parameters, and the state that its optimizer has of them."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = _divide(Odd(), kind, world)
    optimizer, _ = train(model)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        write(folder, MODEL, model.state_dict(), rank, world)
    write(folder, OPTIMIZER, optimizer.state_dict(), rank, world)


def load_live(rank: int, world: int, folder: Path, model_type: str) -> None:
    """Load a folder of rank files into a model on another number of ranks, and compare it with the whole tensors."""
    import transaxle as tx
    from tests.live.tiny import builder

    build = builder(model_type)
    assert not isinstance(build, str)
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    tx.load(model, folder)
    truth = torch.load(folder.with_suffix(TRUTH))
    for name, value in whole(model.state_dict()).items():
        assert torch.equal(value, truth[name]), name
