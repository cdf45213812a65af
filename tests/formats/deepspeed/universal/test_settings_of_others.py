"""Settings that another framework's optimizer has otherwise than DeepSpeed: they are written as DeepSpeed has them."""

from __future__ import annotations

from pathlib import Path

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
