"""Tensors that share memory: what a source has for each of them is what they hold, or the load is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import run

A, B = "a", "b"


class Pair(nn.Module):
    """Two weights, which may be one."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, 3))
        self.b = self.a if how == "object" else nn.Parameter(self.a.data if how == "memory" else torch.zeros(4, 3))


def _values(*, equal: bool) -> dict[str, torch.Tensor]:
    values = torch.arange(12.0).reshape(4, 3)
    other = values.clone()
    other[2, 1] += 0 if equal else 1e-3
    return {A: values, B: other}


@pytest.mark.parametrize("how", ["object", "memory"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_names_of_one_tensor_take_equal_values_only(tmp_path: Path, how: str, device: str) -> None:
    if (how, device) == ("memory", "meta"):
        device = "cpu"  # on the meta device there is no memory to be shared
    for equal in (True, False):
        place = tmp_path / f"{equal}"
        tx.save(_values(equal=equal), place, to="safetensors")
        with torch.device(device):
            model = Pair(how)
        if equal:
            tx.load(model, place)
            assert all(torch.equal(held, model.a) for held in _values(equal=True).values())
            assert torch.equal(model.a, model.b)
            continue
        with pytest.raises(tx.TransaxleError, match="one tensor for it and a\n") as found:
            tx.load(model, place)
        assert [(each.code, each.where.tensor) for each in found.value.refusals] == [("UNEQUAL_COPIES", B)]
        assert model.a.is_meta or not model.a.any()


def test_values_of_two_types_are_no_copies(tmp_path: Path) -> None:
    values = _values(equal=True)
    tx.save({A: values[A], B: values[B].bfloat16()}, tmp_path / "out", to="safetensors")
    with pytest.raises(tx.TransaxleError, match="one is F32 in the source, the other BF16"):
        tx.load(Pair("object"), tmp_path / "out", dtype="fp32")


def _sharded(rank: int, world: int, place: str) -> bool:
    mesh = init_device_mesh("cpu", (world,))
    held = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])
    tx.load({A: held, B: held}, place)
    return bool(held.full_tensor().eq(torch.arange(15.0).reshape(5, 3)).all())


def test_all_ranks_compare_what_they_share(tmp_path: Path) -> None:
    values = torch.arange(15.0).reshape(5, 3)
    tx.save({A: values, B: values.clone()}, tmp_path / "same", to="safetensors")
    assert run(2, _sharded, str(tmp_path / "same")) == [True, True]
    tx.save({A: values, B: values + (torch.arange(5) == 4)[:, None]}, tmp_path / "other", to="safetensors")
    with pytest.raises(tx.TransaxleError) as found:
        run(2, _sharded, str(tmp_path / "other"))
    assert [(each.code, each.where.tensor) for each in found.value.refusals] == [("UNEQUAL_COPIES", B)]


VIEWS: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], bool]] = {
    "windows": (lambda memory: {A: memory[:20], B: memory[12:]}, True),
    "the whole and a part": (lambda memory: {A: memory, B: memory[4:9]}, True),
    "transposed": (lambda memory: {A: memory.view(4, 8), B: memory.view(4, 8).t()}, True),
    "folded": (lambda memory: {A: memory.as_strided((5, 3), (2, 1))}, True),
    "columns": (lambda memory: {A: memory.view(4, 8)[:, :3], B: memory.view(4, 8)[:, 3:]}, False),
    "parts": (lambda memory: {A: memory[:20], B: memory[20:]}, False),
    "gaps": (lambda memory: {A: memory.as_strided((2, 2), (3, 2)), B: memory[20:]}, False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_memory_take_what_they_can_hold(tmp_path: Path, name: str) -> None:
    views, cross = VIEWS[name]
    consistent = {key: view.clone() for key, view in views(torch.arange(32.0)).items()}
    tx.save(consistent, tmp_path / "consistent", to="safetensors")
    filled = views(torch.zeros(32))
    tx.load(filled, tmp_path / "consistent")
    assert all(torch.equal(filled[key], values) for key, values in consistent.items())
    unlike = {key: torch.arange(1.0, 1 + view.numel()).view(view.shape) ** 1.5 for key, view in consistent.items()}
    tx.save(unlike, tmp_path / "unlike", to="safetensors")
    filled = views(torch.zeros(32))
    if cross:
        with pytest.raises(tx.TransaxleError) as found:
            tx.load(filled, tmp_path / "unlike")
        assert {each.code for each in found.value.refusals} == {"UNEQUAL_COPIES"}
        return
    tx.load(filled, tmp_path / "unlike")
    assert all(torch.equal(filled[key], values) for key, values in unlike.items())


def _resharded(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    tx.reshard(source, target)


def _refitted(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    with tx.Refit(source, target) as refit:
        refit.push()


def _refitted_in_place(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
    with tx.Refit(source, target, in_place=True) as refit:
        refit.push()


@pytest.mark.parametrize("copy", [_resharded, _refitted, _refitted_in_place])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_memory_take_live_values_as_those_of_files(
    name: str, copy: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]
) -> None:
    views, cross = VIEWS[name]
    consistent = {key: view.clone() for key, view in views(torch.arange(1.0, 33.0)).items()}
    unlike = {key: torch.arange(1.0, 1 + view.numel()).view(view.shape) ** 1.5 for key, view in consistent.items()}
    memory = torch.zeros(32)
    filled = views(memory)
    if cross:
        with pytest.raises(tx.TransaxleError) as found:
            copy(unlike, filled)
        assert {each.code for each in found.value.refusals} == {"UNEQUAL_COPIES"}
        assert copy is _resharded or not memory.any()  # a refit leaves its target as it was
    else:
        copy(unlike, filled)
        assert all(torch.equal(filled[key], values) for key, values in unlike.items())
    copy(consistent, filled)
    assert all(torch.equal(filled[key], values) for key, values in consistent.items())


def test_conjugates_and_negatives_are_saved_and_filled_as_values(tmp_path: Path) -> None:
    """torch puts both off: the memory has other values, and its bytes may not be looked at."""
    plain = torch.arange(6.0) * (1 + 2j)
    held = {A: plain.conj(), B: torch._neg_view(torch.arange(3.0))}
    kept = {"tensor": plain.conj()}
    tx.save(held, tmp_path / "out", to="safetensors", extra={"kept": kept}, verify=True)
    filled = {A: torch.zeros(6, dtype=torch.complex64).conj(), B: torch._neg_view(torch.zeros(3))}
    report = tx.load(filled, tmp_path / "out", extra={"kept": None})
    assert filled[A].tolist() == plain.conj().tolist() == report.extra["kept"]["tensor"].tolist()
    assert filled[B].tolist() == [0, -1, -2]


class Tied(nn.Module):
    """An embedding and a head, which may be one."""

    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(self.embed.weight)
        if tie:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("unlike", ["", "state", "settings"])
def test_a_tied_weight_takes_one_state_and_one_group(tmp_path: Path, unlike: str) -> None:
    """The weights are equal; what an optimizer knows of them need not be."""
    source = Tied(tie=False)
    groups = [{"params": [each]} for each in source.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    for scale, each in enumerate(source.parameters(), 1):
        each.grad = torch.full_like(each, float(scale if unlike == "state" else 1))
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.5 if unlike == "settings" else 0.0
    tx.save(source, tmp_path / "untied", to="dcp", optimizer=optimizer)
    target = Tied(tie=True)
    follower = torch.optim.SGD(target.parameters(), lr=0.1, momentum=0.9)
    if not unlike:
        report = tx.load(target, tmp_path / "untied", optimizer=follower)
        assert report.unexpected == ()
        assert follower.state[target.embed.weight]["momentum_buffer"].eq(1).all()
        return
    before = target.embed.weight.detach().clone()
    with pytest.raises(tx.TransaxleError) as found:
        tx.load(target, tmp_path / "untied", optimizer=follower)
    told = [(each.code, each.where.tensor) for each in found.value.refusals]
    state, settings = ("UNEQUAL_COPIES", "optim/head.weight/momentum_buffer"), ("UNSUPPORTED", "head.weight")
    assert told == [state if unlike == "state" else settings]
    assert torch.equal(target.embed.weight, before)
    assert not follower.state
