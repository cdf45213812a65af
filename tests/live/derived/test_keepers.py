"""Parameters whose values are kept somewhere else: what is written into them would be lost, and is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracles.quiet import quiet
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.reshard import reshard
from transaxle.live.save import save

with quiet():
    from accelerate import cpu_offload, disk_offload, dispatch_model

CPU = torch.device("cpu")
MAP: Any = {"0": "cpu", "1": "disk"}


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


OFFLOADED: dict[str, Callable[[Path], Any]] = {
    "cpu_offload": lambda _: cpu_offload(_net(), execution_device=CPU),
    "disk_offload": lambda folder: disk_offload(_net(), folder, execution_device=CPU),
    "dispatch_model": lambda folder: dispatch_model(
        _net(), MAP, main_device="cpu", offload_dir=folder, force_hooks=True
    ),
}


@pytest.mark.parametrize("how", OFFLOADED)
def test_what_accelerate_has_offloaded_is_refused(tmp_path: Path, how: str) -> None:
    given = _net()
    save(given, tmp_path / "saved", to="safetensors")
    with quiet():
        model = OFFLOADED[how](tmp_path / "away")
    shown = model(torch.ones(1, 2))
    for ask in (lambda: load(model, tmp_path / "saved"), lambda: reshard(given, model)):
        with pytest.raises(TransaxleError) as found:
            ask()
        assert any(how in refusal.hint for refusal in found.value.refusals)
        assert {refusal.code for refusal in found.value.refusals} == {"UNSUPPORTED"}
    assert torch.equal(model(torch.ones(1, 2)), shown)
    assert all(parameter.is_meta for parameter in model[1].parameters())


def test_what_deepspeeds_optimizer_keeps_is_refused(tmp_path: Path) -> None:
    """The marks are those of its ZeRO-1 and 2 and of bf16 (`_hp_mapping`), and of ZeRO-3 (`ds_id`)."""
    save(_net(), tmp_path / "saved", to="safetensors")
    for mark, what in (("_hp_mapping", "would overwrite the loaded values"), ("ds_id", "ZeRO-3 has taken its values")):
        model: Any = _net()
        setattr(model[1].weight, mark, 1)
        before = model[1].weight.detach().clone()
        with pytest.raises(TransaxleError, match=what) as found:
            load(model, tmp_path / "saved")
        assert [refusal.where.tensor for refusal in found.value.refusals] == ["1.weight"]
        assert torch.equal(model[1].weight, before)


def test_torchs_own_quantized_modules_are_refused(tmp_path: Path) -> None:
    with quiet():
        import torch.ao.nn.quantized as quantized

        modules = [quantized.Linear(3, 4), quantized.Embedding(4, 8)]
    for module in modules:
        with pytest.raises(TransaxleError) as found:
            save(nn.Sequential(module), tmp_path / "saved", to="safetensors")
        assert {refusal.code for refusal in found.value.refusals} == {"UNSUPPORTED"}
        assert all(refusal.hint for refusal in found.value.refusals)
