"""Optimizers from torch to torch: by way of one nested torch file, and with their settings whatever lies between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import transaxle as tx
from tests.formats.refusals import refuses
from tests.formats.training_state.test_state import typed

MODEL, OPTIMIZER = "model", "optimizer"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "lr": torch.tensor(0.25)}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def states(**beside: Any) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(*trained())
    return {MODEL: model_state, OPTIMIZER: optimizer_state, **beside}


def by_torch(folder: Path) -> Any:
    dcp_to_torch_save(folder, folder.with_suffix(".oracle.pt"))
    return torch.load(folder.with_suffix(".oracle.pt"), weights_only=True)


def by_us(source: Path, target: Path) -> Any:
    tx.convert(source, target, to="torch")
    assert tx.verify(source, target)
    assert tx.verify(target)
    assert sorted(tx.open(source)) == sorted(tx.open(target))
    return torch.load(target, weights_only=True)


def plain(value: Any) -> Any:
    """A nested value without tensors, so that two can be compared; a number is a tensor without dims."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist()) if value.dim() else value.item()
    return value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with counters and tensors of its own beside model and optimizer."""
    averages = {"x": torch.ones(2), "list": [torch.zeros(1), {"key": torch.ones(1)}]}
    save(states(step=3, averages=averages), checkpoint_id=tmp_path / "run")
    return tmp_path / "run"


def test_it_is_nested_as_torch_nests_it(tmp_path: Path, folder: Path) -> None:
    assert plain(by_us(folder, tmp_path / "run.pt")) == plain(by_torch(folder))


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_alone_stays_flat(tmp_path: Path, nested: bool) -> None:
    state = trained()[0].state_dict()
    save({MODEL: state} if nested else state, checkpoint_id=tmp_path / "run")
    loaded = by_us(tmp_path / "run", tmp_path / "run.pt")
    assert plain(loaded) == plain(dict(state))
    trained()[0].load_state_dict(loaded)


def test_names_are_kept_on_the_way_back(tmp_path: Path, folder: Path) -> None:
    by_us(folder, tmp_path / "run.pt")
    tx.convert(tmp_path / "run.pt", tmp_path / "again", to="dcp")
    assert sorted(tx.open(tmp_path / "again")) == sorted(tx.open(folder))
    assert tx.verify(folder, tmp_path / "again")
    tx.convert(tmp_path / "run.pt", tmp_path / "again.pt", to="torch")
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "run.pt").read_bytes()


def test_numbered_parameters_stay_numbers(tmp_path: Path) -> None:
    """What a plain training loop saves: torch's optimizer takes it back."""
    model, optimizer = trained()
    torch.save({MODEL: model.state_dict(), OPTIMIZER: optimizer.state_dict()}, tmp_path / "loop.pt")
    loaded = by_us(tmp_path / "loop.pt", tmp_path / "copy.pt")
    assert plain(loaded) == plain(torch.load(tmp_path / "loop.pt", weights_only=True))
    trained()[1].load_state_dict(loaded[OPTIMIZER])


def test_a_tensor_in_the_way_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "optimizer": torch.ones(1), "optim": trained()[1].state_dict()}, tmp_path / "a.pt")
    with refuses("NAME_COLLISION"):
        tx.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    tx.convert(tmp_path / "a.pt", tmp_path / "folder", to="torch")
    assert tx.verify(tmp_path / "a.pt", tmp_path / "folder")


# Settings of an optimizer, from torch to torch: whatever they were converted to between.

GROUPS = "param_groups"
WAYS = [None, "dcp", "torch", "safetensors"]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def trained_in_two_groups(seed: int, **settings: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Two groups that differ in three settings, one of them a tensor in the first."""
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1, "lr": torch.tensor(1e-3)},
        {"params": vectors, "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]
    optimizer = torch.optim.AdamW([{**group, **settings} for group in groups], lr=2e-3, foreach=False)
    module(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def settings_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        {key: typed(value.numpy()[()] if isinstance(value, torch.Tensor) else value) for key, value in group.items()}
        for group in ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    ]


def saved(folder: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, options: Any = None) -> Path:
    state = {**module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer, options=options)}
    save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flattened"])
@pytest.mark.parametrize("way", WAYS)
def test_torch_resumes_with_them(tmp_path: Path, way: str | None, options: StateDictOptions | None) -> None:
    """What torch asks for is there, in the form that it asks for; every value is the one that was saved."""
    module, optimizer = trained_in_two_groups(0)
    source = saved(tmp_path / "source", module, optimizer, options)
    if way is not None:
        tx.convert(source, tmp_path / "between", to=way, shard_size=100, sync=False)
        assert tx.verify(tmp_path / "between").ok
        source = tmp_path / "between"
    tx.convert(source, tmp_path / "out", to="dcp", sync=False)
    for asked in (None, FLAT):
        other, resumed = trained_in_two_groups(1, weight_decay=7.0, eps=1.0)
        state = get_optimizer_state_dict(other, resumed, options=asked)
        held = {"optimizer": state}
        load(held, checkpoint_id=tmp_path / "out", no_dist=True)
        set_optimizer_state_dict(other, resumed, held["optimizer"], options=asked)
        assert settings_of(resumed) == settings_of(optimizer)
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            want, got = optimizer.state[mine], resumed.state[theirs]
            assert all(torch.equal(want[key], got[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_equal_settings_share_their_bytes(tmp_path: Path) -> None:
    """Two hundred parameters do not make two thousand archives."""
    parameters = {f"layers.{i}.weight": torch.nn.Parameter(torch.ones(1)) for i in range(200)}
    optimizer = torch.optim.SGD(parameters.items(), lr=0.1, momentum=0.9)
    sum(p.sum() for p in parameters.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    torch.save({"model": parameters, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    report = tx.convert(tmp_path / "a.pt", tmp_path / "out", to="dcp", sync=False)
    alone = tx.convert(tmp_path / "a.pt", tmp_path / "bare", to="dcp", optimizer=False, sync=False)
    data = [(tmp_path / folder / "__0_0.distcp").stat().st_size for folder in ("out", "bare")]
    assert report.tensors == 2 * alone.tensors
    assert data[0] < 2.1 * data[1]
    assert len(tx.open(tmp_path / "out").metadata[GROUPS][0]["params"]) == 200
