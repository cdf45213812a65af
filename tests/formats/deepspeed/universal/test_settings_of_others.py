"""Settings that another framework's optimizer has otherwise than DeepSpeed: they are written as DeepSpeed has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transaxle as tx


def test_a_learning_rate_that_is_a_tensor_becomes_a_number(tmp_path: Path) -> None:
    """torch's optimizers take tensors, for graphs and compiled steps."""
    weights = torch.nn.ParameterDict({"w": torch.randn(4, 4)})
    optimizer = torch.optim.AdamW(weights.parameters(), lr=torch.tensor(0.001))
    weights["w"].grad = torch.randn(4, 4)
    optimizer.step()
    tx.save(weights, tmp_path / "run", to="dcp", optimizer=optimizer)
    tx.convert(tmp_path / "run", tmp_path / "out", to="deepspeed-universal")
    (file,) = (tmp_path / "out").rglob("optimizer_state.pt")
    group = torch.load(file, weights_only=False)["param_groups"][0]
    assert type(group["lr"]) is float
    assert (group["lr"], group["betas"]) == (torch.tensor(0.001).item(), (0.9, 0.999))


def trained(folder: Path, updates: dict[str, int], groups: list[list[str]]) -> Path:
    """Save weights after so many updates of each, as those have that get no gradients at times."""
    weights = torch.nn.ParameterDict({name: torch.randn(4, 4) for name in updates})
    optimizer = torch.optim.AdamW([{"params": [weights[name] for name in group]} for group in groups], lr=0.001)
    for round_number in range(max(updates.values())):
        for name, count in updates.items():
            weights[name].grad = torch.randn(4, 4) if round_number < count else None
        optimizer.step()
    tx.save(weights, folder, to="dcp", optimizer=optimizer)
    return folder


def test_parameters_of_a_group_that_were_updated_less_often_are_refused(tmp_path: Path) -> None:
    """DeepSpeed has one step for a group: ZeRO-3 would count all of them as the first one."""
    run = trained(tmp_path / "run", {"seldom": 2, "w": 3}, [["seldom", "w"]])
    with pytest.raises(tx.TransaxleError) as told:
        tx.convert(run, tmp_path / "out", to="deepspeed-universal")
    (refusal,) = told.value.refusals
    assert (refusal.code, refusal.where.tensor) == ("UNSUPPORTED", "optim/w/step")
    assert refusal.message.startswith("it was updated 3 times, seldom 2 times")
    assert not (tmp_path / "out").exists()
    tx.convert(run, tmp_path / "out", to="deepspeed-universal", optimizer=False)


@pytest.mark.parametrize(("seldom", "common"), [(3, {"step"}), (2, set[str]())])
def test_steps_of_groups_are_kept_where_deepspeed_has_places_for_them(
    tmp_path: Path, seldom: int, common: set[str]
) -> None:
    """ZeRO-1 and 2 take each from the files of its parameters, ZeRO-3 one for all from the settings."""
    run = trained(tmp_path / "run", {"seldom": seldom, "w": 3}, [["seldom"], ["w"]])
    tx.convert(run, tmp_path / "out", to="deepspeed-universal")
    steps = {path.parent.name: torch.load(path).item() for path in (tmp_path / "out").rglob("step.pt")}
    (file,) = (tmp_path / "out").rglob("optimizer_state.pt")
    settings = torch.load(file, weights_only=False)["optimizer_state_dict"]["state"][0]
    assert steps == {"seldom": seldom, "w": 3}
    assert settings.keys() == common
