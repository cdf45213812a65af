"""What plain torch writes: ranks save every case at one world size, with the truth beside it.

`run` leaves `<case>/checkpoint` and `<case>/truth.pt` in a folder: the whole tensors by the names that Transaxle gives
them, gathered by torch and not read from the checkpoint.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

CHECKPOINT, TRUTH = "checkpoint", "truth.pt"
STEPS = 3
Tensors = dict[str, torch.Tensor]

FULL: Tensors = {
    "rows": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "columns": torch.arange(30, dtype=torch.bfloat16).reshape(3, 10),
    "last": torch.arange(54, dtype=torch.float16).reshape(2, 3, 9),
    "few": torch.arange(6, dtype=torch.int32).reshape(2, 3),
    "one": torch.arange(4).to(torch.uint16).reshape(1, 4),
    "empty": torch.empty(0, 3),
    "codes": torch.arange(32, dtype=torch.uint8).reshape(8, 4).view(torch.float8_e4m3fn),
    "scales": torch.arange(100, 108, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "replicated": torch.arange(9).reshape(3, 3),
    "größe": torch.tensor([True, False, True]),
}
"""Tensors that are cut over the ranks, and how: see `PLACED`."""
PLACED: dict[str, Placement] = {
    "rows": Shard(0), "columns": Shard(1), "last": Shard(-1), "few": Shard(0), "one": Shard(0), "empty": Shard(0),
    "codes": Shard(0), "scales": Shard(0), "replicated": Replicate(), "größe": Shard(0),
}  # fmt: skip
PLAIN: Tensors = {
    "plain": torch.tensor([1.5, -0.0, float("nan")]),
    "scalar": torch.tensor(0.1, dtype=torch.float64),
    "transposed": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
    "complex": torch.tensor([1 + 2j]),
}
"""Tensors that every rank holds whole."""


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def local(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """Cut without communication: gloo refuses some types."""
    return distribute_tensor(full, mesh, list(placements), src_data_rank=None)


def line(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def cut(world: int) -> dict[str, Any]:
    return {name: local(FULL[name], line(world), placement) for name, placement in PLACED.items()} | PLAIN


class Net(nn.Module):
    """Two linear layers of odd sizes, one norm, no two parameters of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.down = nn.Linear(12, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return y


def trained(world: int, *, tensor_parallel: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2, or under tensor parallelism as well, after a few steps of AdamW."""
    torch.manual_seed(0)
    net = Net()
    if tensor_parallel:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        net.norm = nn.Identity()  # type: ignore[assignment]
        net.up.bias = None  # type: ignore[assignment]
        fully_shard(net, mesh=mesh["data"])
    else:
        fully_shard(net, mesh=line(world))
    decayed, others = [net.up.weight, net.down.weight], [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, *([{"params": others, "lr": 3e-3}] if others else [])]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(torch.ones(4, 6) * step).square().mean().backward()
        optimizer.step()
    return net, optimizer


def gathered(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def states(
    net: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(net, optimizer, options=options)
    return dict(model), dict(optim)


def moments(states: Mapping[str, Mapping[str, torch.Tensor]]) -> Tensors:
    """The optimizer's state under the names it must have."""
    return {f"optim/{name}/{key}": gathered(t) for name, state in states.items() for key, t in state.items()}


def sharded(world: int, target: str) -> Tensors:
    save({**cut(world), "steps": 7, "rate": 0.1, "note": "left behind"}, checkpoint_id=target)
    return {**FULL, **PLAIN, "steps": torch.tensor(7), "rate": torch.tensor(0.1, dtype=torch.float64)}


def staged(world: int, target: str) -> Tensors:
    async_save(cut(world), checkpoint_id=target).result()  # type: ignore[union-attr]
    return FULL | PLAIN


def as_safetensors(world: int, target: str) -> Tensors:
    state = {**{name: tensor for name, tensor in cut(world).items() if name != "transposed"}, "steps": 7}
    writer = FileSystemWriter(target, serialization_format=SerializationFormat.SAFETENSORS)
    save(state, storage_writer=writer)
    return {**FULL, **{n: t for n, t in PLAIN.items() if n != "transposed"}, "steps": torch.tensor(7)}


def threaded(world: int, target: str) -> Tensors:
    save(cut(world), storage_writer=FileSystemWriter(target, thread_count=3))
    return FULL | PLAIN


def a_file_per_tensor(world: int, target: str) -> Tensors:
    save(cut(world), storage_writer=FileSystemWriter(target, single_file_per_rank=False))
    return FULL | PLAIN


def uncoordinated(world: int, target: str) -> Tensors:
    save({**cut(world), "steps": 7}, checkpoint_id=target, use_collectives=False)
    return {**FULL, **PLAIN, "steps": torch.tensor(7)}


def nested(world: int, target: str) -> Tensors:
    net, optimizer = trained(world)
    model, optim = states(net, optimizer)
    save({"model": model, "optim": optim}, checkpoint_id=target)
    return {name: gathered(tensor) for name, tensor in model.items()} | moments(optim["state"])


def app(world: int, target: str) -> Tensors:
    """The shape of torch's own tutorial."""
    net, optimizer = trained(world)
    model, optim = states(net, optimizer)
    save({"app": {"model": model, "optim": optim}}, checkpoint_id=target)
    return {name: gathered(tensor) for name, tensor in model.items()} | moments(optim["state"])


def titan(world: int, target: str) -> Tensors:
    """The shape of torchtitan's checkpoints: the model at the root, a flat optimizer, other state beside it."""
    net, optimizer = trained(world)
    model, optim = states(net, optimizer, flat=True)
    others: dict[str, dict[str, Any]] = {
        "train_state": {"step": torch.tensor(3, dtype=torch.int32)},
        "lr_scheduler": {"last_epoch": 3, "base_lrs": [0.1]},
        "dataloader": {"dp_rank_0": b"opaque"},
    }
    save({**model, "optimizer": optim, **others}, checkpoint_id=target)
    kept = {"train_state.step": others["train_state"]["step"]}
    return (
        {name: gathered(tensor) for name, tensor in model.items()} | moments(states(net, optimizer)[1]["state"]) | kept
    )


def unnamed(world: int, target: str) -> Tensors:
    """An optimizer's own state dict: its parameters are numbers."""
    net, optimizer = trained(world)
    model = net.state_dict()
    raw = optimizer.state_dict()
    save({"model": model, "optim": raw}, checkpoint_id=target)
    named = {f"#{number}": state for number, state in raw["state"].items()}
    return {name: gathered(tensor) for name, tensor in model.items()} | moments(named)


def meshed(world: int, target: str) -> Tensors:
    """Two mesh dims on one tensor, in every order, with sizes that do not divide."""
    mesh = init_device_mesh("cpu", (2, world // 2))
    strided = _StridedShard(0, split_factor=2)
    full = {
        "both": torch.arange(77.0).reshape(7, 11),
        "same": torch.arange(18.0).reshape(9, 2),
        "strided": torch.arange(40.0).reshape(20, 2),
        "half": torch.arange(15.0).reshape(5, 3),
        "other": torch.arange(21.0).reshape(7, 3),
    }
    placed: dict[str, tuple[Placement, Placement]] = {
        "both": (Shard(0), Shard(1)),
        "same": (Shard(0), Shard(0)),
        "strided": (strided, Shard(0)),
        "half": (Replicate(), Shard(0)),
        "other": (Shard(1), Replicate()),
    }
    save({name: local(full[name], mesh, *placed[name]) for name in full}, checkpoint_id=target)
    return full


def two_dimensional(world: int, target: str) -> Tensors:
    net, optimizer = trained(world, tensor_parallel=True)
    model, optim = states(net, optimizer)
    assert any(isinstance(p, _StridedShard) for t in model.values() for p in t.placements)
    save({"model": model, "optim": optim}, checkpoint_id=target)
    return {name: gathered(tensor) for name, tensor in model.items()} | moments(optim["state"])


def hugging_face(world: int) -> dict[str, Any]:
    """What that writer can write: no views, and no types that safetensors lacks."""
    return {name: tensor for name, tensor in cut(world).items() if name not in ("transposed", "scales", "complex")}


def hf_shards(world: int, target: str) -> Tensors:
    state = hugging_face(world)
    save(state, storage_writer=HuggingFaceStorageWriter(target, save_distributed=True))
    return {name: (FULL | PLAIN)[name] for name in state}


def hf_two_files(world: int, target: str) -> Tensors:
    state = hugging_face(world)
    files = {name: 1 + at % 2 for at, name in enumerate(state)}
    save(state, storage_writer=HuggingFaceStorageWriter(target, files, save_distributed=True))
    return {name: (FULL | PLAIN)[name] for name in state}


def hf_consolidated(world: int, target: str) -> Tensors:
    names = ("rows", "columns", "last")  # torch consolidates no integers
    state = {name: tensor for name, tensor in cut(world).items() if name in names}
    writer = HuggingFaceStorageWriter(target, save_distributed=True, enable_consolidation=True)
    save(state, storage_writer=writer)
    return {name: FULL[name] for name in names}


def hf_whole(world: int, target: str) -> Tensors:
    """One rank saves everything: an ordinary safetensors checkpoint, but for a note in its header."""
    state = {name: (FULL | PLAIN)[name] for name in hugging_face(world)}
    save(state, storage_writer=HuggingFaceStorageWriter(target))
    return state


Boxes = Sequence[tuple[list[int], list[int]]]
"""First index and size of each."""


class Cut(torch.Tensor):
    """A tensor in any boxes, by the methods through which torch lets others than its own classes save chunks."""

    whole: torch.Tensor
    boxes: Boxes

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.whole)
        return [
            WriteItem(
                MetadataIndex(fqn, start),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(start), torch.Size(size)), properties, self.whole.size()
                ),
            )
            for start, size in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        (size,) = (size for start, size in self.boxes if torch.Size(start) == index.offset)
        spans = tuple(slice(at, at + many) for at, many in zip(index.offset or (), size, strict=True))
        return self.whole[spans].contiguous()


def in_boxes(whole: torch.Tensor, boxes: Boxes) -> Cut:
    made: Cut = torch.Tensor._make_subclass(Cut, torch.empty(whole.shape))
    made.whole, made.boxes = whole, boxes
    return made


def freely(_world: int, target: str) -> Tensors:
    """Chunks that are no grid; and packed types, cut along the dim that they are packed along."""
    pinwheel = [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])]
    full = {
        "pinwheel": torch.arange(9).reshape(3, 3),
        "packed": torch.arange(12, dtype=torch.uint8).reshape(2, 6).view(torch.float4_e2m1fn_x2),
    }
    save(
        {
            "pinwheel": in_boxes(full["pinwheel"], pinwheel),
            "packed": in_boxes(full["packed"], [([0, 0], [2, 4]), ([0, 4], [2, 2])]),
        },
        checkpoint_id=target,
    )
    return full


Case = Callable[[int, str], Tensors]
EVERYWHERE: tuple[Case, ...] = (
    sharded, staged, as_safetensors, threaded, a_file_per_tensor, uncoordinated, nested, app, titan, hf_shards,
    hf_two_files, hf_consolidated,
)  # fmt: skip
BY_WORLD: dict[int, tuple[Case, ...]] = {
    1: (*EVERYWHERE, unnamed, hf_whole, freely),
    2: EVERYWHERE,
    4: (*EVERYWHERE, meshed, two_dimensional),
}
"""World size -> what is saved at it."""


@contextmanager
def group(rank: int, world: int, folder: str) -> Iterator[None]:
    """A process group over loopback; its ranks meet in a file, so no port is taken."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", meeting, timeout=timedelta(seconds=120), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(rank: int, world: int, folder: str) -> None:
    with group(rank, world, folder):
        for case in BY_WORLD[world]:
            place = Path(folder, case.__name__)
            place.mkdir(exist_ok=True)
            dist.barrier()
            truth = case(world, str(place / CHECKPOINT))
            if rank == 0:
                torch.save({name: tensor.detach().clone() for name, tensor in truth.items()}, place / TRUTH)
            dist.barrier()
