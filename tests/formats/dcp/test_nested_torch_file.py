"""A DCP folder as one torch file: nested as what was saved, which is what torch's own converter writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import transaxle as tx
from transaxle.errors import TransaxleError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MODEL, OPTIMIZER = "model", "optimizer"


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after one step."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "lr": torch.tensor(0.25)}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def states(**beside: Any) -> dict[str, Any]:
    """What a trainer saves, as `torch.distributed.checkpoint.state_dict` gives it."""
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
    with pytest.raises(TransaxleError) as error:
        tx.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    assert error.value.code == "NAME_COLLISION"
    tx.convert(tmp_path / "a.pt", tmp_path / "folder", to="torch")
    assert tx.verify(tmp_path / "a.pt", tmp_path / "folder")
