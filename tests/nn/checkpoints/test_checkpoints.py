"""Grouped layers and files: `transaxle.load` and the DCP planner read either form, and other frameworks' too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transaxle as tx
from tests import checkpoints
from tests.nn.layers import layer
from tests.quant.kinds import MORE, raw
from transaxle.nn import GroupedLinear
from transaxle.quant import QuantizedTensor, kernels

SIZES = checkpoints.SIZES
SAFETENSORS = "safetensors:identity"
CASES = [
    *((SAFETENSORS, kind) for kind in ("plain", *MORE)),
    *((form, kind) for form in ("dcp:identity", "torch:identity") for kind in ("plain", "mxfp8", "float8 delayed")),
]
"""Containers and kinds; what is inside a container does not depend on it, so not every pair is here."""


class Model(nn.Module):
    """Grouped layers in blocks, among other parameters."""

    def __init__(self, single: bool, seed: int, kind: str = "plain") -> None:
        super().__init__()
        said: dict[str, Any] = {"in_features": 64, "out_features": 64, "params_dtype": torch.bfloat16}
        said |= {"recipe": MORE[kind], "bias": False} if kind in MORE else {"single_grouped_bias": single}
        blocks = [layer(seed + place, single_grouped_weight=single, **said) for place in range(2)]
        self.blocks = nn.ModuleList(nn.ModuleDict({"fc1": one}) for one in blocks)
        self.norm = nn.LayerNorm(64)


def _stacked(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The bytes of a state dict by the packed form's names: what is per expert is stacked here."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        before, dot, last = name.rpartition(".")
        whole = "".join(c for c in last if not c.isdigit())
        found.setdefault(f"{before}{dot}{whole}", []).append(value)
    return {name: raw(held[0] if len(held) == 1 else torch.stack(held)) for name, held in found.items()}


def _same(one: nn.Module, two: nn.Module) -> None:
    first, second = _stacked(one.state_dict()), _stacked(two.state_dict())
    assert first.keys() == second.keys()
    assert all(torch.equal(value.view(-1), second[name].view(-1)) for name, value in first.items())


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(("form", "kind"), CASES)
def test_transaxle_load_reads_either_form(
    form: str, kind: str, single: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, made = Model(not single, 1, kind), Model(single, 5, kind)
    tx.save(source, tmp_path / "saved", to=form)
    calls: list[Any] = []
    monkeypatch.setattr(kernels, "dequantize", lambda *a, **_: calls.append(a))
    monkeypatch.setattr(QuantizedTensor, "dequantize", lambda *a, **_: calls.append(a))
    report = tx.load(made, tmp_path / "saved")
    assert calls == []
    assert report.bytes_written == report.bytes_needed == report.bytes_read
    assert not report.missing
    assert not report.unexpected
    _same(made, source)


class Megatron(nn.Module):
    """A Qwen3-MoE's experts under the names of megatron-core, in grouped layers."""

    def __init__(self, single: bool) -> None:
        super().__init__()
        d, f, e = SIZES["hidden_size"], SIZES["moe_intermediate_size"], SIZES["num_experts"]
        said: dict[str, Any] = {"bias": False, "single_grouped_weight": single, "params_dtype": torch.bfloat16}

        def experts() -> nn.ModuleDict:
            return nn.ModuleDict(
                {"linear_fc1": GroupedLinear(e, d, 2 * f, **said), "linear_fc2": GroupedLinear(e, f, d, **said)}
            )

        layers = [
            nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts()})}) for _ in range(SIZES["num_hidden_layers"])
        ]
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("dialect", ["hf", "torchtitan", "automodel", "transformers", "megatron", "te"])
def test_other_frameworks_in_one_step(dialect: str, single: bool, tmp_path: Path) -> None:
    """From the file of any framework into grouped layers, gate|up included, and from these to its names again."""
    source = checkpoints.tiny(tmp_path / "hf")
    held = {name: torch.from_numpy(value.view("int16")) for name, value in checkpoints.read(source).items()}
    if dialect != "hf":
        tx.convert(source, tmp_path / "other", to=f"safetensors:{dialect}")
    made = Megatron(single)
    tx.load(made, tmp_path / ("hf" if dialect == "hf" else "other"), strict=False, config=checkpoints.CONFIG)
    for number in range(SIZES["num_hidden_layers"]):
        experts: Any = made.decoder["layers"][number]["mlp"]["experts"]  # type: ignore[index]
        for e in range(SIZES["num_experts"]):
            parts = [
                held[f"model.layers.{number}.mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")
            ]
            one, two = experts["linear_fc1"], experts["linear_fc2"]
            first = one.weight[e] if single else getattr(one, f"weight{e}")
            second = two.weight[e] if single else getattr(two, f"weight{e}")
            assert torch.equal(first.view(torch.int16), torch.cat(parts[:2]))
            assert torch.equal(second.view(torch.int16), parts[2])
    back = tx.state_dict_as(
        made, "hf", family="qwen3_moe", source="te" if single else "megatron", config=checkpoints.CONFIG
    )
    assert len(back) == SIZES["num_hidden_layers"] * checkpoints.EXPERTS_OF_A_LAYER
    assert all(torch.equal(value.view(torch.int16), held[name]) for name, value in back.items())
