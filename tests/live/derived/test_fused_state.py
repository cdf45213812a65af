"""Optimizer state of torchtitan's fused attention: one parameter, of which its state dict and its files have the parts.

The oracles are torchtitan's own: its models with their registered defaults, its optimizers, what `torch.distributed.
checkpoint` saves and loads of both, and the hooks of its module, which cut a moment as they cut the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import transaxle as tx
from tests.live.ranks import run
from tests.live.titan import titans
from tests.live.topologies import full, same
from tests.oracles.quiet import quiet
from transaxle.families import builtin
from transaxle.live.model.state_tensors import leaves

LLAMA, QWEN, MOE, OSS = "llama3 debugmodel", "qwen3 debugmodel", "qwen3 debugmodel_moe", "gpt_oss debugmodel"
AXES: dict[str, dict[str, int]] = {LLAMA: {"g": 16, "r": 1, "h": 1}, QWEN: {"g": 8}, MOE: {"g": 8}, OSS: {"g": 8}}
"""Sizes that the folders of torchtitan do not say."""
FAMILIES = {
    "llama3": "llama", "qwen3": "qwen3", MOE: "qwen3_moe", "gpt_oss": "gpt_oss", "deepseek_v3": "deepseek_v3",
    "kimi_k2_7": "kimi_k25", "muse_glimmer": "muse_glimmer",
}  # fmt: skip
"""Beginnings of flavours, and the tables of their models; the last one counts."""
FUSED, SEPARATE = "fused", "separate"
OPTIMIZER, MEGATRON = "optimizer", "torch_dist"
MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, torch.Tensor]


def build(flavour: str, kind: str = FUSED, *, steps: int = 0, seed: int = 1) -> tuple[nn.Module, Any]:
    """A model with the optimizers that torchtitan has by default, after some steps of any gradients."""
    with quiet():
        model = titans()[f"{flavour} {kind}"]()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.03)
        for buffer in model.buffers():
            buffer.zero_()
    optimizer = optimizers(model)
    step(model, optimizer, steps)
    return model, optimizer


def optimizers(model: nn.Module) -> Any:
    with quiet():
        from torchtitan.components.optimizer import OptimizersContainer, default_adamw

        config = default_adamw(lr=1e-3)
        config.implementation = "foreach"  # its default needs a GPU
        return OptimizersContainer(config, model_parts=[model])


def step(model: nn.Module, optimizer: Any, count: int) -> None:
    for number in range(count):
        torch.manual_seed(number)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def own_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What torchtitan's checkpointer saves: the model's entries flat, the optimizer's under a name of its own."""
    from torchtitan.components.checkpoint import ModelWrapper

    return {**ModelWrapper(model).state_dict(), OPTIMIZER: optimizer.state_dict()}


def tensors(model: nn.Module, optimizer: Any) -> State:
    """Copies of the whole tensors in it."""
    found = own_state(model, optimizer)
    flat = {**found.pop(OPTIMIZER), **found}
    return {name: full(tensor) for name, tensor in flat.items() if isinstance(tensor, torch.Tensor)}


def save_own(folder: Path, model: nn.Module, optimizer: Any) -> Path:
    with quiet():
        dcp_save(own_state(model, optimizer), checkpoint_id=folder, no_dist=True)
    return folder


def load_own(folder: Path, flavour: str, kind: str = FUSED) -> State:
    """What torchtitan resumes from a folder, strictly, into another model."""
    from torchtitan.components.checkpoint import ModelWrapper

    model, optimizer = build(flavour, kind, steps=1, seed=9)
    wanted = own_state(model, optimizer)
    with quiet():
        dcp_load(wanted, checkpoint_id=folder, no_dist=True)
    optimizer.load_state_dict(wanted.pop(OPTIMIZER))
    ModelWrapper(model).load_state_dict(wanted)
    return tensors(model, optimizer)


def cut_moments(model: Any, optimizer: Any) -> State:
    """Moments by the names of the parts, as the module's own hooks cut what its parameter holds."""
    found: State = {}
    for one in optimizer:
        for moment in MOMENTS:
            kept = {parameter: parameter.detach().clone() for parameter in one.state}
            with torch.no_grad():
                for parameter, state in one.state.items():
                    parameter.copy_(state[moment])
                shown = {name: entry.clone() for name, entry in model.state_dict().items()}
                for parameter, values in kept.items():
                    parameter.copy_(values)
            buffers = {name for name, _ in model.named_buffers()}
            found |= {f"optim/{name}/{moment}": entry for name, entry in shown.items() if name not in buffers}
    return found


@pytest.mark.oracle
def test_tables_know_what_torchtitan_fuses() -> None:
    """Of every flavour that torchtitan registers for debugging, however it is built."""
    with quiet():
        models = titans()
    asked = {key: name for key in models for flavour, name in FAMILIES.items() if key.startswith(f"{flavour} ")}
    assert models.keys() - asked.keys() == {"flux flux-debug"}
    for key, family in asked.items():
        model = models[key]()
        dialect = builtin()[family].dialect("torchtitan")
        assert dialect is not None
        lines = [line for line in dialect.lines if line.of_state]
        hidden = leaves(model).unshown
        assert all(any(line.name.match(name) is not None for line in lines) for name in hidden)
        assert bool(hidden) == bool(lines and not key.endswith(SEPARATE))


@pytest.mark.oracle
@pytest.mark.parametrize("flavour", [LLAMA, QWEN, MOE, OSS])
def test_fused_models_and_torchtitans_folders_exchange_state(tmp_path: Path, flavour: str) -> None:
    model, optimizer = build(flavour, steps=2)
    truth = tensors(model, optimizer)
    source = save_own(tmp_path / "theirs", model, optimizer)
    taken, resumed = build(flavour, seed=2)
    tx.load(taken, source, optimizer=resumed)
    assert same(tensors(taken, resumed), truth)
    for number, to in enumerate(("dcp", "dcp:torchtitan")):
        tx.save(model, tmp_path / str(number), to=to, optimizer=optimizer)
        assert same(load_own(tmp_path / str(number), flavour), truth)
    tx.convert(source, tmp_path / "again", to="dcp:torchtitan", sync=False)
    assert same(load_own(tmp_path / "again", flavour), truth)
    step(model, optimizer, 1)
    step(taken, resumed, 1)
    assert same(tensors(taken, resumed), tensors(model, optimizer))


@pytest.mark.oracle
@pytest.mark.parametrize("flavour", [LLAMA, QWEN, OSS])
def test_fused_moments_are_split_as_the_module_splits_weights(tmp_path: Path, flavour: str) -> None:
    model, optimizer = build(flavour, steps=2)
    source = save_own(tmp_path / "theirs", model, optimizer)
    config = {"fuse_qkv": False}
    tx.convert(source, tmp_path / "parts", to="dcp:torchtitan", axes=AXES[flavour], config=config, sync=False)
    with tx.open(tmp_path / "parts") as parts:
        moments = {name: torch.from_numpy(parts[name].read()) for name in parts if name.endswith(MOMENTS)}
        (group,) = parts.metadata["param_groups"]
    truth = cut_moments(model, optimizer)
    assert same(moments, truth)
    assert {f"optim/{name}/{moment}" for name in group["params"] for moment in MOMENTS} == truth.keys()
    assert load_own(tmp_path / "parts", flavour, SEPARATE)  # strict: torchtitan's unfused model resumes from it
    separate, its_own = build(flavour, SEPARATE, seed=3)
    tx.load(separate, source, optimizer=its_own, axes=AXES[flavour])
    assert same(cut_moments(separate, its_own), truth)
    tx.save(separate, tmp_path / "separate", to="dcp:torchtitan", optimizer=its_own)  # as the model has it
    fused, resumed = build(flavour, seed=4)
    tx.load(fused, tmp_path / "separate", optimizer=resumed, axes=AXES[flavour])
    assert same(tensors(fused, resumed), tensors(model, optimizer))
    assert tx.verify(source, tmp_path / "parts", axes=AXES[flavour]).equal


def test_fused_state_survives_conversion_to_other_formats_and_back(tmp_path: Path) -> None:
    model, optimizer = build(QWEN, steps=2)
    source = save_own(tmp_path / "theirs", model, optimizer)
    for to in ("deepspeed-universal:hf", MEGATRON):
        there = tmp_path / to.replace(":", "-")
        options: dict[str, Any] = {"axes": AXES[QWEN], "sync": False}
        tx.convert(source, there, to=to, optimizer=True, **options)
        report = tx.convert(there, tmp_path / f"{there.name}.back", to="dcp:torchtitan", optimizer=True, **options)
        assert any("fuse_qkv" in note for note in report.notes)
        with tx.open(source) as first, tx.open(tmp_path / f"{there.name}.back") as second:
            assert {name: first[name].tobytes() for name in first} == {name: second[name].tobytes() for name in second}
        if to != MEGATRON:  # it keeps no settings but its own, and torchtitan asks for all
            assert same(load_own(tmp_path / f"{there.name}.back", QWEN), tensors(model, optimizer))
        with tx.open(there) as target:
            states = {name.rpartition("/")[0].removeprefix("optim/") for name in target if name.startswith("optim/")}
            assert states == {name for name in target if not name.startswith("optim/")}


def test_loadable_as_fills_fused_weights() -> None:
    (model, _), (taken, _) = build(QWEN, seed=1), build(QWEN, seed=2)
    state, give_back = tx.loadable_as(taken, "torchtitan", source="torchtitan", family="qwen3")
    for name, tensor in model.state_dict().items():
        state[name].copy_(tensor)
    give_back()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), taken.parameters(), strict=True))


class Gated(nn.Module):
    """Gate and up as one weight, shown as two, as torchtitan's override `FusedSwiGLU` has them: no table knows it."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(inner, 2, width))
        self.w2 = nn.Linear(inner, width, bias=False)
        self.register_state_dict_post_hook(self._cut)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._joined)  # type: ignore[no-untyped-call]

    @staticmethod
    def _cut(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        both = state.pop(f"{prefix}w13")
        state[f"{prefix}w1.weight"], state[f"{prefix}w3.weight"] = both[:, 0].clone(), both[:, 1].clone()

    @staticmethod
    def _joined(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        pair = [state.pop(f"{prefix}{name}.weight") for name in ("w1", "w3")]
        state[f"{prefix}w13"] = torch.stack(pair, 1)


def test_a_fused_parameter_that_no_table_knows_keeps_its_name_or_is_refused(tmp_path: Path) -> None:
    def gated(seed: int, steps: int) -> tuple[nn.Module, Any]:
        model, _ = build(QWEN, seed=seed)
        for layer in cast(Any, model).layers.values():
            layer.feed_forward = Gated(*layer.feed_forward.w1.weight.shape)
        optimizer = optimizers(model)
        step(model, optimizer, steps)
        return model, optimizer

    (model, optimizer), (taken, resumed) = gated(1, 2), gated(2, 0)
    tx.save(model, tmp_path / "out", to="dcp", optimizer=optimizer)
    tx.load(taken, tmp_path / "out", optimizer=resumed)
    assert same(tensors(taken, resumed), tensors(model, optimizer))
    with pytest.raises(tx.TransaxleError) as saved:
        tx.save(model, tmp_path / "hub", to="hf", optimizer=optimizer)
    with pytest.raises(tx.TransaxleError) as converted:
        tx.convert(tmp_path / "out", tmp_path / "hub", to="dcp:automodel", sync=False)
    for error in (saved.value, converted.value):
        assert error.code == "MISSING_TENSOR"
        assert "layers.0.feed_forward.w13" in str(error)
    assert not (tmp_path / "hub").exists()


def test_a_parameter_that_the_state_dict_shows_in_another_form_is_refused(tmp_path: Path) -> None:
    model = Turned()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(tx.TransaxleError, match="shows others in its place") as caught:
        tx.save(model, tmp_path / "out", to="dcp", optimizer=optimizer)
    assert "extra={" in (caught.value.hint or "")


class Turned(nn.Module):
    """A weight that the state dict has transposed, under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach().t().contiguous()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.weight.data.copy_(state[f"{prefix}weight"].t())


def _cut(model: Any, world: int, way: str) -> None:
    """Cut a model by FSDP2, by tensor parallelism of the fused projection, or by both."""
    if way == "whole":
        return
    tp = {"fsdp": 1, "tp": world, "fsdp x tp": 2}[way]
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("fsdp", "tp"))
    for layer in model.layers.values():
        if tp > 1:
            parallelize_module(layer, mesh["tp"], {"attention.qkv_linear.wqkv": ColwiseParallel()})
        if world > tp:
            fully_shard(layer, mesh=mesh["fsdp"])
    if world > tp:
        fully_shard(model, mesh=mesh["fsdp"])


def _begin(rank: int, world: int, way: str, folder: str) -> State:
    model, _ = build(QWEN)
    _cut(model, world, way)
    optimizer = optimizers(model)
    step(model, optimizer, 2)
    for to in ("dcp", "hf"):
        tx.save(model, f"{folder}/{to}", to=to, optimizer=optimizer, axes=AXES[QWEN])
    return tensors(model, optimizer)


def _resume(rank: int, world: int, way: str, folder: str) -> list[State]:
    found = []
    for to in ("dcp", "hf"):
        model, _ = build(QWEN, seed=2 + rank)
        _cut(model, world, way)
        optimizer = optimizers(model)
        tx.load(model, f"{folder}/{to}", optimizer=optimizer, axes=AXES[QWEN])
        found.append(tensors(model, optimizer))
    return found


@pytest.mark.parametrize(
    ("begun", "resumed"),
    [
        (("fsdp", 2), [("tp", 2)]),
        pytest.param(("fsdp", 2), [("fsdp x tp", 4)], marks=pytest.mark.oracle),
        pytest.param(("fsdp x tp", 4), [("fsdp", 3), ("tp", 2), ("whole", 1)], marks=pytest.mark.oracle),
    ],
)
def test_fused_models_resume_on_other_ranks(
    tmp_path: Path, begun: tuple[str, int], resumed: Sequence[tuple[str, int]]
) -> None:
    way, count = begun
    truth, *others = run(count, _begin, way, str(tmp_path))
    assert all(same(truth, other) for other in others)
    for way, count in resumed:
        for states in run(count, _resume, way, str(tmp_path)):
            assert all(same(state, truth) for state in states)
    assert same(load_own(tmp_path / "dcp", QWEN), truth)
