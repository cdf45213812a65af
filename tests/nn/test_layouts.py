"""Experts in other frameworks' layouts: state dicts converted in one step, and files loaded into grouped layers."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transaxle as tx
from tests import checkpoints
from tests.nn.layers import layer, stacked
from tests.quant.kinds import MORE, raw
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear, accept_layouts, experts_as
from transaxle.quant import QuantizedTensor, kernels

E, D, F = 3, 4, 6
Tensors = dict[str, torch.Tensor]


def _layouts(start: int = 0, features: tuple[int, int] = (D, F)) -> dict[str, Tensors]:
    """One layer's experts in every layout: gate [E, F, D], up [E, F, D] and down [E, D, F] of other numbers each."""
    d, f = features
    gate, up, down = torch.arange(start, start + 3 * E * d * f, dtype=torch.float32).view(3, E, f, d)
    down = down.transpose(1, 2).contiguous()
    fused = torch.cat([gate, up], 1)
    return {
        "stacked": {"linear_fc1.weight": fused, "linear_fc2.weight": down},
        "separate": {f"linear_fc1.weight{e}": fused[e] for e in range(E)}
        | {f"linear_fc2.weight{e}": down[e] for e in range(E)},
        "hf": {f"{e}.gate_proj.weight": gate[e] for e in range(E)}
        | {f"{e}.up_proj.weight": up[e] for e in range(E)}
        | {f"{e}.down_proj.weight": down[e] for e in range(E)},
        "transformers": {"gate_up_proj": fused, "down_proj": down},
        "torchtitan": {"w1_EFD": gate, "w2_EDF": down, "w3_EFD": up},
        "torchtitan@0.2": {"w1": gate, "w2": down, "w3": up},
        "automodel": {
            "gate_and_up_projs": torch.cat([gate.transpose(1, 2), up.transpose(1, 2)], 2),
            "down_projs": down.transpose(1, 2),
        },
    }


def _same(found: dict[str, Any], wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("source", "target"), list(permutations(_layouts(), 2)))
@pytest.mark.parametrize("features", [(D, F), (5, 5)])
def test_each_layout_becomes_each_other(source: str, target: str, features: tuple[int, int]) -> None:
    """Also with square matrices, which fit every orientation."""
    every = _layouts(features=features)
    given = every[source]
    kept = {name: value.clone() for name, value in given.items()}
    _same(experts_as(given, target), every[target])
    _same(given, kept)


def test_names_around_it_and_states_of_an_optimizer_stay_or_follow() -> None:
    every, moments = _layouts(), _layouts(1000)
    at = "model.layers.1.mlp.experts."
    state: dict[str, Any] = {f"{at}{name}": value for name, value in every["hf"].items()}
    state |= {f"optim/{at}{name}/exp_avg": value for name, value in moments["hf"].items()}
    state |= {f"optim/{at}{name}/step": torch.tensor(3.0) for name in moments["hf"]}
    state |= {"model.norm.weight": torch.ones(2), "epoch": 7}
    wanted = {f"{at}{name}": value for name, value in every["automodel"].items()}
    wanted |= {f"optim/{at}{name}/exp_avg": value for name, value in moments["automodel"].items()}
    wanted |= {f"optim/{at}{name}/step": torch.tensor(3.0) for name in moments["automodel"]}
    found = experts_as(state, "automodel", prefix=at)
    assert found.pop("epoch") == 7
    _same(found, {**wanted, "model.norm.weight": torch.ones(2)})
    assert "epoch" in state


def test_what_is_no_layout_is_refused() -> None:
    every = _layouts()
    with pytest.raises(TransaxleError, match="no expert layout 'huggingface'"):
        experts_as(every["hf"], "huggingface")
    with pytest.raises(TransaxleError, match="no expert layout reads the names weight"):
        experts_as({"weight": torch.zeros(2)}, "hf")
    lacking = {name: value for name, value in every["hf"].items() if name != "1.up_proj.weight"}
    with pytest.raises(TransaxleError, match=r"1\.up_proj\.weight"):
        experts_as(lacking, "stacked")
    other = {**every["hf"], "2.up_proj.weight": torch.zeros(F + 1, D)}
    with pytest.raises(TransaxleError, match="SHAPE_MISMATCH"):
        experts_as(other, "stacked")
    codes = {name: value.to(torch.float8_e4m3fn) for name, value in every["hf"].items()}
    with pytest.raises(TransaxleError, match="cannot be moved without their scales"):
        experts_as(codes, "stacked")


class Experts(nn.Module):
    """One layer's experts as two grouped layers."""

    def __init__(self, single: bool) -> None:
        super().__init__()
        said: dict[str, Any] = {"bias": False, "single_grouped_weight": single}
        self.linear_fc1 = GroupedLinear(E, D, 2 * F, **said)
        self.linear_fc2 = GroupedLinear(E, F, D, **said)
        accept_layouts(self)


@pytest.mark.parametrize("layout", _layouts())
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_a_module_loads_any_layout(layout: str, single: bool, assign: bool) -> None:
    every = _layouts()
    for depth in range(3):
        made: nn.Module = Experts(single)
        prefix = ""
        for _ in range(depth):
            made, prefix = nn.ModuleDict({"experts": made}), f"experts.{prefix}"
        state = {f"{prefix}{name}": value for name, value in every[layout].items()}
        kept = dict(state)
        made.load_state_dict(state, assign=assign)
        wanted = every["stacked" if single else "separate"]
        _same(made.state_dict(), {f"{prefix}{name}": value for name, value in wanted.items()})
        assert state.keys() == kept.keys()
        assert all(state[name] is value for name, value in kept.items())


def test_another_number_of_experts_is_refused_in_every_layout() -> None:
    for state in _layouts().values():
        made = Experts(single=True)
        made.linear_fc1 = GroupedLinear(E + 1, D, 2 * F, bias=False)
        with pytest.raises(TransaxleError, match=f"has {E} experts, the layer {E + 1}"):
            made.load_state_dict(state, strict=False)


# Grouped layers and files: `transaxle.load` and the DCP planner read either form, and other frameworks' too.

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
    first, second = stacked(made.state_dict()), stacked(source.state_dict())
    assert first.keys() == second.keys()
    assert all(torch.equal(raw(value), raw(second[name])) for name, value in first.items())


def _megatron(single: bool) -> Any:
    """A Qwen3-MoE's experts under the names of megatron-core, in grouped layers."""
    d, f, e = SIZES["hidden_size"], SIZES["moe_intermediate_size"], SIZES["num_experts"]
    said: dict[str, Any] = {"bias": False, "single_grouped_weight": single, "params_dtype": torch.bfloat16}
    layers = nn.ModuleList()
    for _ in range(SIZES["num_hidden_layers"]):
        linears = {"linear_fc1": GroupedLinear(e, d, 2 * f, **said), "linear_fc2": GroupedLinear(e, f, d, **said)}
        layers.append(nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.ModuleDict(linears)})}))
    return nn.ModuleDict({"decoder": nn.ModuleDict({"layers": layers})})


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("dialect", ["hf", "torchtitan", "automodel", "transformers", "megatron", "te"])
def test_other_frameworks_in_one_step(dialect: str, single: bool, tmp_path: Path) -> None:
    """From the file of any framework into grouped layers, gate|up included, and from these to its names again."""
    source = checkpoints.tiny(tmp_path / "hf")
    held = {name: torch.from_numpy(value.view("int16")) for name, value in checkpoints.read(source).items()}
    if dialect != "hf":
        tx.convert(source, tmp_path / "other", to=f"safetensors:{dialect}")
    made = _megatron(single)
    tx.load(made, tmp_path / ("hf" if dialect == "hf" else "other"), strict=False, config=checkpoints.CONFIG)
    for number in range(SIZES["num_hidden_layers"]):
        experts: Any = made["decoder"]["layers"][number]["mlp"]["experts"]
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
