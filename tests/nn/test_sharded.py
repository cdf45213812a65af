"""Grouped layers under FSDP2 and expert parallelism, on real ranks: what they compute, save and load."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import full
from tests.nn.layers import EXPERTS, FORMS, SPLITS, assert_close, layer, rows
from tests.nn.layers import run as ran
from tests.quant.kinds import MORE, raw, values
from transaxle.nn import GroupedLinear, GroupedTensor
from transaxle.quant import MasterWeights

WORLD = 2
QUANTIZED = ("float8_block", "mxfp8", "nvfp4")


def _layer(seed: int, form: str, kind: str | None = None) -> GroupedLinear:
    said: dict[str, Any] = dict(FORMS[form])
    if kind is not None:
        said |= {"recipe": MORE[kind], "bias": False, "params_dtype": torch.bfloat16}
        said.pop("single_grouped_bias", None)
    return layer(seed, in_features=64, out_features=64, **said)


def _whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: raw(full(value).detach()).clone() for name, value in state.items()}


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    first, second = _whole(one), _whole(two)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _fsdp(rank: int, world: int, form: str, kind: str | None, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    alone, made = _layer(1, form, kind), _layer(1, form, kind)
    dtype = torch.float32 if kind is None else torch.bfloat16
    fully_shard(made, mesh=mesh)
    assert all(isinstance(one, DTensor) for one in made.parameters())
    x = rows(alone, dtype=dtype)
    results = ran(made, x, torch.tensor(SPLITS[0]))
    assert_close({name: full(result) for name, result in results.items()}, ran(alone, x, SPLITS[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tx.save(made, Path(folder, "saved"), to="dcp:identity")
        for other in FORMS:  # the other topology, and both forms
            fresh = _layer(5, other, kind)
            fully_shard(fresh, mesh=mesh)
            tx.load(fresh, Path(folder, "saved"))
            again = _layer(6, form, kind)
            again.load_state_dict({name: full(value) for name, value in fresh.state_dict().items()})
            assert _same(again.state_dict(), alone.state_dict()), other


@pytest.mark.oracle
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [None, *QUANTIZED])
def test_under_fsdp2(form: str, kind: str | None, tmp_path: Path) -> None:
    """Computes as if unsharded, and its checkpoint loads in both forms: sharded again here, alone below."""
    run(WORLD, _fsdp, form, kind, str(tmp_path))
    source = _layer(1, form, kind)
    for other in FORMS:
        made = _layer(9, other, kind)
        tx.load(made, tmp_path / "saved")
        again = _layer(6, form, kind)
        again.load_state_dict(made.state_dict())
        assert _same(again.state_dict(), source.state_dict())


def _back(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    made = _layer(3, "packed")
    for name, parameter in list(made.named_parameters()):
        setattr(made, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    tx.load(made, Path(folder, "saved"))
    source = _layer(1, "experts")
    for place in range(EXPERTS):
        assert torch.equal(made.weight.full_tensor()[place], getattr(source, f"weight{place}"))
    # A state dict of DTensors per expert is stacked into DTensors.
    many = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in source.state_dict().items()}
    other = _layer(4, "packed")
    fully_shard(other, mesh=mesh)
    other.load_state_dict(many)
    assert torch.equal(other.weight.full_tensor(), made.weight.full_tensor())
    # And a packed one is taken apart.
    apart = _layer(5, "experts")
    fully_shard(apart, mesh=mesh)
    apart.load_state_dict(other.state_dict())
    assert torch.equal(apart.weight2.full_tensor(), source.weight2)
    shared = GroupedTensor(made.weight)
    assert shared.num_tensors == EXPERTS


def test_per_expert_into_expert_parallelism_and_back(tmp_path: Path) -> None:
    tx.save(_layer(1, "experts"), tmp_path / "saved", to="safetensors:identity")
    run(WORLD, _back, str(tmp_path))


def _begun(made: GroupedLinear, seed: int) -> torch.Tensor:
    """Give a layer of the meta device its values; return what is drawn next."""
    made.to_empty(device="cpu")
    torch.manual_seed(seed)
    made.reset_parameters()
    return torch.rand(3)


def _initial(rank: int, world: int) -> list[str]:
    """Ways to shard a layer after which its initial values are not those of the whole one."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
    flat, wrong, experts = mesh._flatten("all"), [], 5
    with torch.random.fork_rng():
        for form, kind in [(form, None) for form in FORMS] + [("packed", "float8_block"), ("experts", "mxfp8")]:
            said: dict[str, Any] = {**FORMS[form], "device": "meta", "params_dtype": torch.bfloat16}
            if kind is not None:
                said |= {"recipe": MORE[kind], "bias": False, "single_grouped_bias": False}
            whole = GroupedLinear(experts, 64, 96, **said)
            after = _begun(whole, 3)
            wanted = _whole(whole.state_dict())
            for way in ("fsdp", "ep", "ep and fsdp", "ep and columns") if kind is None else ("fsdp",):
                made = GroupedLinear(experts, 64, 96, **said)
                if "ep" in way:
                    made.divide(mesh["ep"])
                if "fsdp" in way:
                    fully_shard(made, mesh=flat if way == "fsdp" else mesh["ep_shard"])
                elif way != "ep":
                    fully_shard(made, mesh=mesh["ep_shard"], shard_placement_fn=lambda one: Shard(one.dim() - 1))
                next_ = _begun(made, 3)
                found = _whole(made.state_dict())
                own = [name for name in wanted if not name[-1].isdigit() or int(name[-1]) in made.experts]
                alike = list(found) == own and all(torch.equal(one, wanted[name]) for name, one in found.items())
                if not alike or not torch.equal(next_, after):
                    wrong.append(f"{form} {kind} {way}")
    return wrong


def test_initial_values_are_those_of_the_whole_layer() -> None:
    """Whatever ranks have of the experts, with one seed; and what is drawn afterwards is the same too."""
    assert run(4, _initial) == [[]] * 4


def _experts(kind: str, count: int, seed: int, mesh: DeviceMesh | None = None, *, meta: bool = False) -> GroupedLinear:
    torch.manual_seed(seed)
    said: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "single_grouped_weight": True}
    made = GroupedLinear(count, 256, 256, **said, device="meta" if meta else None)
    if mesh is not None:
        made.divide(mesh)
    return made.quantize_(MORE[kind])


def _quantized_experts(rank: int, world: int, kind: str, count: int, folder: str) -> None:
    """Experts in one parameter, divided over ranks, quantized, and cut by FSDP2 along each dim."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
    splits = torch.arange(3, 3 + count)
    ends = [0, *splits.cumsum(0).tolist()]

    def cut(seed: int, dim: int, *, meta: bool = False) -> GroupedLinear:
        made = _experts(kind, count, seed, mesh["ep"], meta=meta)
        fully_shard(made, mesh=mesh["ep_shard"], shard_placement_fn=lambda _: Shard(dim))
        return made

    alone = _experts(kind, count, 1)
    _trained(alone, values(ends[-1], 256), splits)
    wanted, source = alone.state_dict(), _experts(kind, count, 1).state_dict()
    for dim in range(3):
        made = cut(1, dim)
        assert _same(made.state_dict(), source)
        start, stop = made.experts.start, made.experts.stop
        _trained(made, values(ends[-1], 256)[ends[start] : ends[stop]], splits[start:stop])
        assert _same(made.state_dict(), wanted)
        saved = Path(folder, str(dim))
        saved.mkdir(exist_ok=True)
        tx.save(made, saved / "ours", to="safetensors:identity")
        dcp_save({"model": made.state_dict()}, checkpoint_id=str(saved / "dcp"))
        for place, fresh in (("ours", cut(7, dim)), ("dcp", cut(8, (dim + 1) % 3, meta=True))):
            tx.load(fresh, saved / place)
            assert _same(fresh.state_dict(), wanted)
        fresh = cut(9, (dim + 1) % 3)
        fresh.load_state_dict(made.state_dict())
        assert _same(fresh.state_dict(), wanted)
        fresh.load_state_dict(source)
        assert _same(fresh.state_dict(), source)


def _trained(made: GroupedLinear, x: torch.Tensor, splits: torch.Tensor) -> None:
    optimizer = MasterWeights(made.parameters(), partial(torch.optim.AdamW, lr=1e-2, foreach=False))
    made(x, splits).float().square().sum().backward()
    optimizer.step()


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["float8 delayed", "nvfp4, both ways"])
def test_quantized_experts_in_one_parameter_are_divided_and_cut(kind: str, tmp_path: Path) -> None:
    """Bit for bit those of one rank, trained, saved and loaded."""
    count = 5
    run(4, _quantized_experts, kind, count, str(tmp_path))
    for form in ("experts", "packed"):
        made = GroupedLinear(count, 256, 256, False, params_dtype=torch.bfloat16, **WEIGHTS[form], recipe=MORE[kind])
        tx.load(made, tmp_path / "0" / "ours")
        source = tx.open(tmp_path / "1" / "ours")
        codes = torch.stack([raw(each) for each in _codes(made, form)])
        assert codes.numpy().tobytes() == source["weight"].tobytes()


WEIGHTS: dict[str, dict[str, Any]] = {"experts": {}, "packed": {"single_grouped_weight": True}}


def _codes(made: GroupedLinear, form: str) -> list[torch.Tensor]:
    """The codes of each expert."""
    state = made.state_dict()
    return list(state["weight"]) if form == "packed" else [state[f"weight{place}"] for place in range(made.num_gemms)]
