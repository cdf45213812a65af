"""Rank files made by hand, in the pickled forms of torch 2.4 to 2.13, without a process group.

The classes have the names of torch's own while they are pickled, by `torch.save`: an object then pickles as in a job,
whatever its attributes say.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_wrapper_subclass

FORMS = ("2.4", "2.6", "2.8", "2.10", "2.12", "2.13")
"""Releases between which the pickled form differs."""
AXES = {"fsdp": 2}
_TENSOR = "torch.distributed.tensor"
_OLD = "torch.distributed._tensor"
_MESH = "torch.distributed.device_mesh"
_SHARDED = "torch.distributed._shard"


class _Made:
    """An object with the attributes that it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class _Parameter(_Made):
    """A tensor of a class of its own: torch pickles the class and the state."""

    state: Any

    def __reduce_ex__(self, _: Any) -> Any:
        cls: Any = type(self)
        args = (cls, torch.float32, (1,), (1,), 0, torch.strided, torch.device("cpu"), False)
        return _rebuild_from_type_v2, (_rebuild_wrapper_subclass, cls, args, self.state)


CLASSES: dict[str, dict[str, Any]] = {}
"""Module -> classes, by name."""


def _class(module: str, name: str, base: type = _Made) -> Any:
    made = type(name.rpartition(".")[2], (base,), {"__module__": module, "__qualname__": name})
    CLASSES.setdefault(module, {})[name] = made
    return made


def _record(module: str, name: str, fields: str) -> Any:
    made = namedtuple(name, fields, module=module)  # type: ignore[misc]
    CLASSES.setdefault(module, {})[name] = made
    return made


DTensor, OldDTensor = (_class(module, "DTensor", _Parameter) for module in (_TENSOR, f"{_OLD}.api"))
DeviceMesh = _class(_MESH, "DeviceMesh")
DTensorSpec, OldSpec = (
    _class(module, "DTensorSpec") for module in (f"{_TENSOR}._dtensor_spec", f"{_OLD}.placement_types")
)
TensorMeta, OldMeta = (
    _record(module, "TensorMeta", "shape stride dtype")
    for module in (f"{_TENSOR}._dtensor_spec", f"{_OLD}.placement_types")
)
ShardOrderEntry = _record(f"{_TENSOR}._dtensor_spec", "ShardOrderEntry", "tensor_dim mesh_dims")
MeshLayout = _class("torch.distributed._mesh_layout", "_MeshLayout")
FlatLayout = _class("torch.distributed._mesh_layout", "_FlatLayout")
PLACEMENTS = {
    (old, name): _class(f"{_OLD if old else _TENSOR}.placement_types", name)
    for old in (False, True)
    for name in ("Shard", "Replicate", "_StridedShard", "Partial")
}
ShardedTensor = _class(f"{_SHARDED}.sharded_tensor.api", "ShardedTensor", _Parameter)
ProcessGroupState = type("ProcessGroupState", (_Made,), {"__module__": f"{_SHARDED}.sharded_tensor.api"})
ProcessGroupState.__qualname__ = "ShardedTensor.ProcessGroupState"
ShardedTensor.ProcessGroupState = ProcessGroupState
LocalShard = _class(f"{_SHARDED}.sharded_tensor.shard", "Shard")
ShardMetadata = _class(f"{_SHARDED}.metadata", "ShardMetadata")
ShardedTensorMetadata = _class(f"{_SHARDED}.sharded_tensor.metadata", "ShardedTensorMetadata")


class _Properties(_Made):
    def __getstate__(self) -> Any:
        return (torch.float32, torch.strided, False)


TensorProperties = _class(f"{_SHARDED}.sharded_tensor.metadata", "TensorProperties", _Properties)


@contextmanager
def _known() -> Iterator[None]:
    """Let pickle find the classes under torch's names."""
    before = {module: sys.modules.get(module) for module in CLASSES}
    for module, classes in CLASSES.items():
        stand_in: Any = ModuleType(module)
        stand_in.__dict__.update(classes)
        sys.modules[module] = stand_in
    try:
        yield
    finally:
        for module, real in before.items():
            if real is None:
                del sys.modules[module]
            else:
                sys.modules[module] = real


def write(path: Path, state: Any) -> None:
    """Write one file."""
    with _known():
        torch.save(state, path)


def write_all(folder: Path, states: Sequence[Any], stem: str = "model") -> None:
    """Write the files of all ranks, with the names that verl gives them."""
    folder.mkdir(exist_ok=True)
    for rank, state in enumerate(states):
        write(folder / f"{stem}_world_size_{len(states)}_rank_{rank}.pt", state)


def mesh(rank: int, axes: Mapping[str, int], names: Sequence[str] = (), form: str = "2.13", **changed: Any) -> Any:
    """Return the device mesh of a rank.

    Args:
        rank: the rank.
        axes: sizes of the job's mesh dims, by name.
        names: those of which this mesh consists, which is then sliced out of the job's mesh; none means all.
        form: release of torch.
        changed: attributes that replace those of the mesh.
    """
    everyone = torch.arange(_product(axes.values()), dtype=torch.int32).view(tuple(axes.values()))
    place = dict(zip(axes, torch.unravel_index(torch.tensor(rank), tuple(axes.values())), strict=True))
    names = tuple(names or axes)
    part = everyone[tuple(slice(None) if name in names else int(place[name]) for name in axes)]
    coordinate = [int(place[name]) for name in names]
    if form in ("2.4", "2.6", "2.8"):
        attributes: dict[str, Any] = {
            "device_type": "cpu", "mesh": part, "mesh_dim_names": names, "_flatten_mesh_list": tuple(
                part.flatten().tolist()), "_thread_id": None, "_coordinate_on_dim": coordinate, "_hash": 5,
        }  # fmt: skip
        attributes |= {"_dim_group_names": ["1"]} if form == "2.8" else {"_dim_group_infos": [("ptd:0", [0, 1], "1")]}
        return DeviceMesh(**{**attributes, **changed})
    attributes = {
        "_device_type": "cpu", "_layout": layout([axes[name] for name in names], part.stride(), form),
        "_rank_map": everyone.flatten(), "_mesh_dim_names": names, "_flatten_rank_map": tuple(range(everyone.numel())),
        "_thread_id": None, "_flatten_mapping": {}, "_coordinate_on_dim": coordinate, "_hash": 5,
        "_root_mesh": mesh(rank, axes, form=form) if len(names) < len(axes) else None,
    }  # fmt: skip
    attributes |= {} if form == "2.10" else {"_rank": rank}
    return DeviceMesh(**{**attributes, **changed})


def layout(sizes: Sequence[Any], strides: Sequence[Any], form: str = "2.13") -> Any:
    """Return the layout of a mesh: sizes and strides of its dims."""
    if form == "2.13":
        axes = tuple(FlatLayout(shape=(size,), stride=(step,)) for size, step in zip(sizes, strides, strict=True))
        return MeshLayout(axes=axes)
    if len(sizes) == 1 and form == "2.10":
        return MeshLayout(shape=sizes[0], stride=strides[0])  # as `coalesce` leaves it
    return MeshLayout(shape=tuple(sizes), stride=tuple(strides))


def _product(sizes: Any) -> int:
    return int(torch.tensor(list(sizes)).prod())


def placement(text: str, form: str = "2.13") -> Any:
    """Return a placement: `R`, `S0`, `P`, or `_0x2` for `_StridedShard(0, split_factor=2)`."""
    made = {name: cls for (old, name), cls in PLACEMENTS.items() if old == (form == "2.4")}
    if text == "R":
        return made["Replicate"]()
    if text == "P":
        return made["Partial"](reduce_op="sum")
    if text.startswith("_"):
        dim, factor = text[1:].split("x")
        return made["_StridedShard"](dim=int(dim), split_factor=int(factor))
    return made["Shard"](dim=int(text[1:]))


def dtensor(
    whole: torch.Tensor,
    device_mesh: Any,
    kinds: Sequence[str],
    local: torch.Tensor | None = None,
    form: str = "2.13",
    **changed: Any,
) -> Any:
    """Return a rank's part of a tensor, cut by `torch.chunk` along each mesh dim in turn.

    Args:
        whole: the whole tensor.
        device_mesh: the mesh.
        kinds: one placement for each mesh dim, see `placement`.
        local: the rank's part, if it is not what `torch.chunk` gives.
        form: release of torch.
        changed: attributes that replace those of the specification.
    """
    if local is None:
        sizes, coordinate = _sizes(device_mesh), device_mesh._coordinate_on_dim
        local = whole
        for text, size, index in zip(kinds, sizes, coordinate, strict=True):
            if text[0] == "S":
                dim = int(text[1:])
                chunks = local.chunk(size, dim)
                local = chunks[index] if index < len(chunks) else local.narrow(dim, 0, 0)
        local = local.clone()
    meta = OldMeta if form == "2.4" else TensorMeta
    attributes: dict[str, Any] = {
        "mesh": device_mesh,
        "placements": tuple(placement(text, form) for text in kinds),
        "tensor_meta": meta(whole.shape, whole.stride(), whole.dtype),
        "_hash": 5,
    }
    if form in ("2.10", "2.12", "2.13"):
        dims = dict.fromkeys(int(text[1:]) for text in kinds if text[0] == "S")
        attributes["shard_order"] = tuple(
            ShardOrderEntry(dim, tuple(at for at, text in enumerate(kinds) if text == f"S{dim}")) for dim in dims
        )
    spec = (OldSpec if form == "2.4" else DTensorSpec)(**{**attributes, **changed})
    cls = OldDTensor if form == "2.4" else DTensor
    return cls(state=(None, {"_local_tensor": local, "_spec": spec}))


def _sizes(device_mesh: Any) -> Sequence[int]:
    if "mesh" in device_mesh.__dict__:
        return tuple(device_mesh.mesh.shape)
    pattern = device_mesh._layout
    if "axes" in pattern.__dict__:
        return [axis.shape[0] for axis in pattern.axes]
    return pattern.shape if isinstance(pattern.shape, tuple) else (pattern.shape,)


def sharded(whole: torch.Tensor, rank: int, world: int, local: torch.Tensor | None = None, **changed: Any) -> Any:
    """Return FSDP1's ShardedTensor of a rank; `changed` replaces attributes of the shard's description."""
    chunks = whole.chunk(world)
    group = ProcessGroupState(local_rank=rank, global_rank=rank, local_world_size=world, global_world_size=world)
    metadata = ShardedTensorMetadata(shards_metadata=[], size=whole.shape, tensor_properties=TensorProperties())
    shards = []
    if rank < len(chunks):
        start = [sum(chunk.shape[0] for chunk in chunks[:rank]), *[0] * (whole.dim() - 1)]
        box = {"shard_offsets": start, "shard_sizes": list(chunks[rank].shape), "placement": None, **changed}
        tensor = chunks[rank].clone() if local is None else local
        shards = [LocalShard(tensor=tensor, metadata=ShardMetadata(**box))]
    return ShardedTensor(state=(shards, metadata, group, None, False))
