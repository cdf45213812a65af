"""Experts on a mesh (ep_shard, ep), from dialect to dialect: the placements that come out, and every local value.

Nothing is sent, so each rank is played in turn by this process, under torch's `fake` process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.oracles import automodel_peer, hub
from transaxle.errors import TransaxleError
from transaxle.live.state_dict_adapter import loadable_as, state_dict_as
from transaxle.torch_tensors import local_of

Tensors = dict[str, torch.Tensor]
LAYER = 1
SIZES = [(10, 7, 9), (12, 6, 10)]
"""Experts, width of the model, width of an expert."""
OWN = (0, 1)
"""Mesh dims that a tensor of all experts is on."""


def config(family: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
    experts, width, inner = sizes
    both = {"model_type": family, "num_hidden_layers": LAYER + 1, "hidden_size": width, "moe_intermediate_size": inner}
    if family == hub.STEP:
        return {**both, "moe_num_experts": experts, "moe_layers_enum": str(LAYER), "intermediate_size": 2 * inner}
    return {**both, "num_experts": experts, "decoder_sparse_step": 1}


def native(family: str, sizes: tuple[int, int, int]) -> Tensors:
    """Automodel's experts, `[E, D, 2F]` and `[E, F, D]`; no bit pattern is there twice."""
    experts, width, inner = sizes
    place = f"model.layers.{LAYER}.{'moe' if family == hub.STEP else 'mlp'}.experts."
    count = experts * width * inner
    both = torch.arange(2 * count, dtype=torch.int16).view(torch.bfloat16).reshape(experts, width, 2 * inner)
    down = torch.arange(2 * count, 3 * count, dtype=torch.int16).view(torch.bfloat16).reshape(experts, inner, width)
    return {f"{place}gate_and_up_projs": both, f"{place}down_projs": down}


def stored(family: str, sizes: tuple[int, int, int]) -> Tensors:
    """The same on the hub, in torch operations: stacked for Step-3.5, one by one for Qwen3-MoE."""
    inner = sizes[2]
    both, down = native(family, sizes).values()
    parts = {"gate": both[:, :, :inner].mT, "up": both[:, :, inner:].mT, "down": down.mT}
    if family == hub.STEP:
        return {f"model.layers.{LAYER}.moe.{name}_proj.weight": part.contiguous() for name, part in parts.items()}
    return {
        f"model.layers.{LAYER}.mlp.experts.{expert}.{name}_proj.weight": part[expert].contiguous()
        for name, part in parts.items()
        for expert in range(sizes[0])
    }


def chunk(tensor: torch.Tensor, dim: int, count: int, place: int) -> torch.Tensor:
    """What `torch.chunk` would give a rank, nothing included."""
    size = tensor.shape[dim]
    width = -(-size // count)
    first, last = min(place * width, size), min((place + 1) * width, size)
    return tensor.narrow(dim, first, last - first)


def by_hand(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> torch.Tensor:
    """What a rank holds, written out: mesh dim after mesh dim."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for placement, count, place in zip(placements, mesh.mesh.shape, coordinate, strict=True):
        if isinstance(placement, _StridedShard):
            factor = int(placement.split_factor)
            pieces = [chunk(tensor, placement.dim, factor, number) for number in range(factor)]
            tensor = torch.cat([chunk(piece, placement.dim, count, place) for piece in pieces], placement.dim)
        elif isinstance(placement, Shard):
            tensor = chunk(tensor, placement.dim, count, place)
    return tensor.contiguous()


def placed(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    return DTensor.from_local(
        by_hand(full, mesh, placements), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


@contextmanager
def played(world: int) -> Iterator[Iterator[DeviceMesh]]:
    """Be each rank in turn; gives the mesh of each."""

    def ranks() -> Iterator[DeviceMesh]:
        for rank in range(world):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            yield init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
            dist.destroy_process_group()

    try:
        yield ranks()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check(found: Mapping[str, torch.Tensor], truth: Tensors, meshes: dict[str, DeviceMesh | None], wanted: Any) -> None:
    """Hold tensors against the full ones, cut by hand, and their placements against those wanted."""
    assert found.keys() == meshes.keys()
    for name, tensor in found.items():
        assert tensor.shape == truth[name].shape, name
        mesh = meshes[name]
        if mesh is None:
            assert not isinstance(tensor, DTensor)
            assert torch.equal(tensor, truth[name]), name
            continue
        assert isinstance(tensor, DTensor)
        assert tensor.device_mesh == mesh
        assert tensor.placements == wanted[name], name
        assert tensor.stride() == truth[name].stride(), name
        assert torch.equal(tensor.to_local(), by_hand(truth[name], mesh, tensor.placements)), name


def _strided(dim: int, factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=factor)


EP = -1
"""Stands for the number of ranks along `ep`."""
TO_HUB: list[tuple[Any, Any, Any]] = [
    ((1, 0), (2, 0), (2, 0)),
    ((-2, -3), (2, 0), (2, 0)),
    (((2, 2), 0), (1, 0), ((1, 2), 0)),
    (((0, EP), 0), ((0, EP), 0), ((0, EP), 0)),
]
"""Placements of Automodel's tensors, then of gate and up, then of down."""
FROM_HUB: list[tuple[Any, Any, Any]] = [
    ((1, 0), ((2, 2), 0), (2, 0)),
    ((2, 0), (1, 0), (1, 0)),
    ((-1, -3), (1, 0), (1, 0)),
    (((0, EP), 0), ((0, EP), 0), ((0, EP), 0)),
]
"""Placements of the hub's tensors, then of gate with up, then of down."""


def placements(said: tuple[Any, ...], world: int) -> tuple[Any, ...]:
    """A pair is a strided shard."""
    return tuple(
        _strided(each[0], world // 2 if each[1] == EP else each[1]) if isinstance(each, tuple) else Shard(each)
        for each in said
    )


@pytest.mark.oracle
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world", [4, 8])
def test_to_the_hub_and_back(world: int, sizes: tuple[int, int, int]) -> None:
    full, truth, said = native(hub.STEP, sizes), stored(hub.STEP, sizes), config(hub.STEP, sizes)
    with played(world) as ranks:
        for mesh in ranks:
            for given, gates, down in TO_HUB:
                state = {name: placed(tensor, mesh, placements(given, world)) for name, tensor in full.items()}
                with CommDebugMode() as sent:
                    found = state_dict_as(state, "hf", config=said, source="automodel")
                    again = state_dict_as(found, "automodel", config=said, source="hf")
                assert sent.get_total_counts() == 0
                with CommDebugMode() as sent:
                    next(iter(state.values())).full_tensor()
                assert sent.get_total_counts() > 0  # it would have been seen
                wanted = {name: placements(down if "down" in name else gates, world) for name in truth}
                check(found, truth, dict.fromkeys(truth, mesh), wanted)
                check(again, full, dict.fromkeys(full, mesh), {name: t.placements for name, t in state.items()})


@pytest.mark.oracle
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world", [4, 8])
def test_from_the_hub(world: int, sizes: tuple[int, int, int]) -> None:
    full, truth, said = stored(hub.STEP, sizes), native(hub.STEP, sizes), config(hub.STEP, sizes)
    with played(world) as ranks:
        for mesh in ranks:
            for given, gates, down in FROM_HUB:
                state = {name: placed(tensor, mesh, placements(given, world)) for name, tensor in full.items()}
                with CommDebugMode() as sent:
                    found = state_dict_as(state, "automodel", config=said, source="hf")
                assert sent.get_total_counts() == 0
                wanted = {name: placements(down if "down" in name else gates, world) for name in truth}
                check(found, truth, dict.fromkeys(truth, mesh), wanted)


@pytest.mark.oracle
@pytest.mark.parametrize("family", [hub.STEP, "qwen3_moe"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world", [4, 8])
def test_a_cut_through_gate_and_up_gives_one_to_each_half(world: int, sizes: tuple[int, int, int], family: str) -> None:
    """`(Shard(2), Shard(0))`: the ranks of one half of the mesh have the gates, the others the ups."""
    full, truth, said = native(family, sizes), stored(family, sizes), config(family, sizes)
    seen: set[str] = set()
    with played(world) as ranks:
        for mesh in ranks:
            half, part = mesh.get_coordinate() or ()
            state = {name: placed(tensor, mesh, (Shard(2), Shard(0))) for name, tensor in full.items()}
            with CommDebugMode() as sent:
                found = state_dict_as(state, "hf", config=said, source="automodel")
            assert sent.get_total_counts() == 0
            own = chunk(torch.arange(sizes[0]), 0, world // 2, part).tolist()
            names = [n for n in truth if family == hub.STEP or int(n.split(".")[5]) in own]
            names = [n for n in names if ("gate_proj", "up_proj")[1 - half] not in n]
            stacked = family == hub.STEP
            meshes = {n: mesh if "down" in n else mesh["ep"] for n in names}
            lone: dict[str, DeviceMesh | None] = {n: mesh["ep_shard"] if "down" in n else None for n in names}
            wanted = {n: (Shard(1), Shard(0)) if "down" in n else (Shard(0),) for n in names}
            check(
                found, truth, {**meshes} if stacked else lone, wanted if stacked else dict.fromkeys(names, (Shard(0),))
            )
            seen |= found.keys()
    assert seen == truth.keys()


@pytest.mark.oracle
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world", [4, 8])
def test_experts_one_by_one_and_back(world: int, sizes: tuple[int, int, int]) -> None:
    """Each rank names its own experts, on the other dim of the mesh: alone they make no stack, but fill one."""
    family = "qwen3_moe"
    full, truth, said = native(family, sizes), stored(family, sizes), config(family, sizes)
    cases = [((1, 0), (1,), (1,)), (((2, 2), 0), (0,), ((0, 2),))]
    seen: set[str] = set()
    with played(world) as ranks:
        for mesh in ranks:
            own = chunk(torch.arange(sizes[0]), 0, world // 2, mesh["ep"].get_local_rank()).tolist()
            names = [name for name in truth if int(name.split(".")[5]) in own]
            for given, gates, down in cases:
                state = {name: placed(tensor, mesh, placements(given, world)) for name, tensor in full.items()}
                with CommDebugMode() as sent:
                    found = state_dict_as(state, "hf", config=said, source="automodel")
                assert sent.get_total_counts() == 0
                wanted = {name: placements(down if "down" in name else gates, world) for name in names}
                check(found, truth, dict.fromkeys(names, mesh["ep_shard"]), wanted)
                seen |= found.keys()
                with pytest.raises(TransaxleError) as refused:
                    state_dict_as(found, "automodel", config=said, source="hf")
                assert refused.value.code == "INCOMPLETE"
                again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
                made, give_back = loadable_as(again, "hf", config=said, source="automodel")
                for name, tensor in made.items():
                    local_of(tensor).copy_(local_of(found[name]))
                give_back()
                assert all(torch.equal(local_of(again[n]), local_of(t)) for n, t in state.items())
    assert seen == truth.keys()


@pytest.mark.parametrize("world", [4, 8])
def test_automodel_says_the_same(world: int) -> None:
    """Its adapter, without and with DTensors, where it is right: even cuts, and none through gate and up."""
    sizes = (16, 6, 10)
    said = config(hub.STEP, sizes)
    full, truth = native(hub.STEP, sizes), stored(hub.STEP, sizes)
    theirs = automodel_peer.to_hf(said, full)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in truth.items())
    plain = state_dict_as(full, "hf", config=said, source="automodel")
    assert plain.keys() == theirs.keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in theirs.items())
    back = state_dict_as(plain, "automodel", config=said, source="hf")
    theirs = automodel_peer.from_hf(said, plain)
    assert all(torch.equal(back[name], tensor) and torch.equal(full[name], tensor) for name, tensor in theirs.items())
    with played(world) as ranks:
        for mesh in ranks:
            state = {name: placed(tensor, mesh, (Shard(1), Shard(0))) for name, tensor in full.items()}
            ours = state_dict_as(state, "hf", config=said, source="automodel")
            _alike(ours, automodel_peer.to_hf(said, dict(state)))
            given = {name: placed(tensor, mesh, (Shard(2), Shard(0))) for name, tensor in truth.items()}
            ours = state_dict_as(given, "automodel", config=said, source="hf")
            _alike(ours, automodel_peer.from_hf(said, dict(given)))


def _alike(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        own = ours[name]
        assert isinstance(own, DTensor)
        assert isinstance(tensor, DTensor)
        assert (own.placements, own.shape, own.device_mesh) == (tensor.placements, tensor.shape, tensor.device_mesh)
        assert torch.equal(own.to_local(), tensor.to_local()), name
