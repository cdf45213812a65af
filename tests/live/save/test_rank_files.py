"""Files of ranks, as FSDP2's trainers save them with `torch.save`: torch itself loads what we write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import transaxle as tx
from tests.live import ranks

CONFIG = {"model_type": "toy"}


class Model(nn.Module):
    """Parameters whose rows do not divide by the ranks, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ten = nn.Parameter(torch.randn(10, 3))
        self.one = nn.Parameter(torch.randn(1, 5))
        self.norm = nn.Parameter(torch.randn(7))
        self.inner = nn.Linear(4, 6)
        self.register_buffer("running_mean", torch.randn(3))
        self.register_buffer("num_batches_tracked", torch.tensor(5))


def sharded(world: int, dim: str | None = "fsdp") -> Model:
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=None if dim is None else (dim,)))
    return model


def optimizer_of(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    """AdamW with two groups, the second parameter first, after some steps with gradients that are equal everywhere."""
    named = dict(model.named_parameters())
    decayed = [named[name] for name in ("one", "ten", "inner.weight")]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": [named["norm"], named["inner.bias"]], "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups)
    torch.manual_seed(7)
    for _ in range(steps):
        for parameter in named.values():
            assert isinstance(parameter, DTensor)
            whole = torch.randn(parameter.shape)
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        optimizer.step()
    return optimizer


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def equal(first: Any, second: Any) -> bool:
    return bool(torch.equal(whole(first), whole(second))) and first.dtype == second.dtype


def loaded(folder: str, kind: str, rank: int, world: int, **how: Any) -> Any:
    return torch.load(Path(folder, f"{kind}_world_size_{world}_rank_{rank}.pt"), **{"weights_only": False, **how})


def load_weights(rank: int, world: int, folder: str) -> None:
    model = sharded(world)
    expected = {name: whole(value).clone() for name, value in model.state_dict().items()}
    for value in (*model.parameters(), *model.buffers()):
        value.detach().zero_()
    for how in ({}, {"weights_only": True}, {"mmap": True}):
        model.load_state_dict(loaded(folder, "model", rank, world, **how))
        assert all(equal(value, expected[name]) for name, value in model.state_dict().items())
    assert isinstance(model.ten, DTensor)
    mesh = model.ten.device_mesh
    assert {
        value.device_mesh == mesh for value in loaded(folder, "model", rank, world).values() if value.dim() > 1
    } == {True}


def source(folder: Path) -> Path:
    folder.mkdir()
    save_file({name: value.clone() for name, value in Model().state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_torch_loads_the_files_of_its_ranks(tmp_path: Path, world: int) -> None:
    src, dst = source(tmp_path / "src"), tmp_path / "dst"
    assert tx.convert(src, dst, to="ranks", dp=world, device="cpu", verify=True).verification
    assert tx.verify(src, dst)
    assert json.loads((dst / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": world}
    assert json.loads((dst / "huggingface/config.json").read_text()) == CONFIG
    ranks.run(world, load_weights, str(dst))


def save_live(_rank: int, world: int, folder: str, dim: str | None) -> tuple[str, ...]:
    model = sharded(world, dim)
    report = tx.save(model, folder, to="ranks", optimizer=optimizer_of(model), config=CONFIG, verify=True)
    return report.notes


def compare_saved(rank: int, world: int, folder: str, dim: str | None) -> None:
    model = sharded(world, dim)
    optimizer = optimizer_of(model)
    state, optimizer_state = loaded(folder, "model", rank, world), loaded(folder, "optim", rank, world)
    for name, value in model.state_dict().items():
        assert type(value) is type(state[name])
        assert not isinstance(value, DTensor) or value._spec == state[name]._spec
        assert equal(value, state[name])
    expected = optimizer.state_dict()
    assert optimizer_state["state"].keys() == expected["state"].keys()
    for number, states in expected["state"].items():
        assert all(equal(value, optimizer_state["state"][number][slot]) for slot, value in states.items())
    assert [{k: v for k, v in group.items() if k != "param_names"} for group in optimizer_state["param_groups"]] == (
        expected["param_groups"]
    )
    fresh = sharded(world, dim)
    fresh.load_state_dict(state)
    resumed = optimizer_of(fresh, 0)
    resumed.load_state_dict(optimizer_state)
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        one.grad, two.grad = torch.ones_like(one), torch.ones_like(two)
    optimizer.step()
    resumed.step()
    assert all(equal(one, two) for one, two in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize(("world", "dim"), [(1, "fsdp"), (2, "dp_shard"), (3, None)])
def test_a_trainer_saves_and_resumes(tmp_path: Path, world: int, dim: str | None) -> None:
    ranks.run(world, save_live, str(tmp_path / "dst"), dim)
    ranks.run(world, compare_saved, str(tmp_path / "dst"), dim)


def test_another_number_of_ranks_resumes(tmp_path: Path) -> None:
    ranks.run(2, save_live, str(tmp_path / "two"), "fsdp")
    tx.convert(tmp_path / "two", tmp_path / "three", to="ranks", dp=3, device="cpu", verify=True)
    ranks.run(3, compare_saved, str(tmp_path / "three"), "fsdp")


def load_by_name(rank: int, world: int, folder: str) -> None:
    model = sharded(world)
    expected = optimizer_of(model)
    fresh = sharded(world)
    resumed = optimizer_of(fresh, 0)
    set_optimizer_state_dict(fresh, resumed, loaded(folder, "optim", rank, world))
    for number, states in expected.state_dict()["state"].items():
        assert all(equal(value, resumed.state_dict()["state"][number][slot]) for slot, value in states.items())


def save_dcp(_rank: int, world: int, folder: str) -> None:
    model = sharded(world)
    tx.save(model, folder, to="dcp", optimizer=optimizer_of(model), config=CONFIG)


def test_without_the_order_of_the_optimizer_its_files_have_names(tmp_path: Path) -> None:
    ranks.run(2, save_dcp, str(tmp_path / "dcp"))
    report = tx.convert(tmp_path / "dcp", tmp_path / "ranks", to="ranks", dp=2, device="cpu", verify=True)
    assert any("set_optimizer_state_dict" in note for note in report.notes)
    assert tx.verify(tmp_path / "dcp", tmp_path / "ranks")
    ranks.run(2, load_by_name, str(tmp_path / "ranks"))


def save_hsdp(_rank: int, _world: int, folder: str) -> None:
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("ddp", "fsdp")))
    tx.save(model, folder, to="ranks", config=CONFIG)


def test_only_one_dim_of_all_ranks_is_saved(tmp_path: Path) -> None:
    errors = ranks.ranks(2).refusals(save_hsdp, str(tmp_path / "dst"))
    assert {error.code for error in errors} == {"UNSUPPORTED"}
    assert "on one dim of all 2 ranks" in str(errors[0])


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("ranks", {"tp": 2}, "has the parts of FSDP ranks, not of tensor-parallel ranks"),
        ("hf", {"dp": 2}, "has no files for FSDP ranks"),
        ("dcp", {"device": "cpu"}, "has no files for FSDP ranks"),
    ],
)
def test_degrees_that_a_format_does_not_have(tmp_path: Path, to: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(tx.TransaxleError, match=message):
        tx.convert(source(tmp_path / "src"), tmp_path / "dst", to=to, **options)
    assert not (tmp_path / "dst").exists()


def test_what_counts_as_a_buffer_is_told_and_stays_so(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    parameters = {"a.weight": torch.randn(0, 5), "b.weight": torch.randn(7, 3).bfloat16(), "f.weight": torch.randn(1)}
    buffers = {"c.scale": torch.tensor(2.0), "d.codes": torch.arange(12).reshape(4, 3), "e.running_var": torch.ones(4)}
    save_file({**parameters, **buffers}, tmp_path / "src/model.safetensors")
    report = tx.convert(tmp_path / "src", tmp_path / "five", to="ranks", dp=5, verify=True)
    assert "3 tensors are buffers, whole in the files of 5: c.scale, d.codes, e.running_var" in report.notes[0]
    report = tx.convert(tmp_path / "five", tmp_path / "two", to="ranks", dp=2, verify=True)
    assert not any("buffers" in note for note in report.notes)
    assert tx.verify(tmp_path / "src", tmp_path / "two")
    saved = loaded(str(tmp_path / "two"), "model", 1, 2)
    assert {name for name, value in saved.items() if isinstance(value, DTensor)} == parameters.keys()
    assert saved["b.weight"].to_local().shape == (3, 3)
    assert saved["b.weight"].device_mesh.device_type == "cuda"
