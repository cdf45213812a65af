"""Optimizer state follows its parameter: the moments as the weight itself, the step as one number per tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal
from transaxle.errors import Code

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
DIALECTS = ["automodel", "torchtitan", "torchtitan@0.2", "transformers", "megatron", "te"]
GATE = checkpoints.GATE
STACK = "model.layers.0.mlp.experts.gate_and_up_projs"

Array = npt.NDArray[Any]


def state_of(parameter: str, state: str) -> str:
    return f"optim/{parameter}/{state}"


def trained(*, prefix: str = "", step: Array | None = None, weights: bool = True) -> dict[str, Array]:
    """The tiny model with the state of an Adam, under one prefix."""
    random = np.random.default_rng(1)
    held: dict[str, Array] = {}
    for name, weight in checkpoints.tensors().items():
        if weights:
            held[prefix + name] = weight
        for moment in MOMENTS:
            held[state_of(prefix + name, moment)] = random.standard_normal(weight.shape).astype(np.float32)
        held[state_of(prefix + name, STEP)] = np.array(7, np.float32) if step is None else step
    return held


def store(folder: Path, held: dict[str, Array], **config: Any) -> Path:
    return checkpoints.write(folder, held, config={**checkpoints.CONFIG, **config})


def alone(held: dict[str, Array], state: str) -> dict[str, Array]:
    """One state of every parameter, under the parameter's own name."""
    end = f"/{state}"
    return {name.removeprefix("optim/").removesuffix(end): a for name, a in held.items() if name.endswith(end)}


def _trained(held: dict[str, Array]) -> dict[str, Array]:
    """All but the load-balancing state of torchtitan, which no optimizer trains."""
    return {name: array for name, array in held.items() if "expert_bias" not in name}


@pytest.mark.oracle
@pytest.mark.parametrize("dialect", DIALECTS)
def test_moments_move_as_the_weight_moves(tmp_path: Path, dialect: str) -> None:
    """Each moment, taken alone and converted as if it were the weights, gives the same tensors, where no parameter is
    fused.
    """
    held = trained()
    source = store(tmp_path / "source", held, fuse_qkv=False)
    tx.convert(source, tmp_path / "out", to=dialect, sync=False)
    got = checkpoints.read(tmp_path / "out")
    weights = {name for name in _trained(got) if not name.startswith("optim/")}
    for moment in MOMENTS:
        tx.convert(store(tmp_path / moment, alone(held, moment)), tmp_path / f"{moment} out", to=dialect, sync=False)
        wanted = _trained(checkpoints.read(tmp_path / f"{moment} out"))
        found = alone(got, moment)
        assert found.keys() == wanted.keys() == weights
        assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in wanted.items()}
    steps = alone(got, STEP)
    assert steps.keys() == weights
    assert {(array.shape, array.dtype.name, float(array)) for array in steps.values()} == {((), "float32", 7.0)}
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", optimizer=True, sync=False)
    assert checkpoints.same(source, tmp_path / "back")
    assert tx.diff(source, tmp_path / "out").equal


def test_moments_of_fused_attention_are_those_of_the_whole(tmp_path: Path) -> None:
    """torchtitan's default: for each group of heads its queries, its key and its value, in one parameter."""
    held = trained()
    report = tx.convert(store(tmp_path / "source", held), tmp_path / "out", to="torchtitan", sync=False)
    assert any('"fuse_qkv": false' in note for note in report.notes)
    found = checkpoints.read(tmp_path / "out")
    groups, head = (checkpoints.SIZES[key] for key in ("num_key_value_heads", "head_dim"))
    for layer in range(checkpoints.SIZES["num_hidden_layers"]):
        fused = f"layers.{layer}.attention.qkv_linear.wqkv.weight"
        for moment in MOMENTS:
            names = (state_of(f"model.layers.{layer}.self_attn.{part}_proj.weight", moment) for part in "qkv")
            parts = [held[name].reshape(groups, -1, head, held[name].shape[1]) for name in names]
            whole = np.concatenate(parts, axis=1).reshape(-1, parts[0].shape[-1])
            assert found[state_of(fused, moment)].tobytes() == whole.tobytes()
        assert float(found[state_of(fused, STEP)]) == 7
        assert fused not in found
    assert not any(f"{part}.weight/" in name for name in found for part in ("wq", "wk", "wv"))


@pytest.mark.parametrize("step", [np.array(7, np.int64), np.array([[7]], np.float32)])
def test_steps_keep_their_type_and_shape(tmp_path: Path, step: Array) -> None:
    source = store(tmp_path / "source", trained(step=step))
    tx.convert(source, tmp_path / "out", to="automodel", sync=False)
    steps = alone(checkpoints.read(tmp_path / "out"), STEP)
    assert {(array.shape, array.dtype) for array in steps.values()} == {(step.shape, step.dtype)}


def test_steps_become_one_only_if_they_are_equal(tmp_path: Path) -> None:
    held = trained()
    held[state_of(GATE, STEP)] = np.array(8, np.float32)
    source = store(tmp_path / "source", held)
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(source, tmp_path / "out", to="automodel")
    codes: set[Code] = {refusal.code for refusal in caught.value.refusals}
    assert codes == {"UNEQUAL_COPIES"}
    assert state_of(STACK, STEP) in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert tx.convert(source, tmp_path / "same", to="hf", optimizer=True, sync=False).checks == 0
    assert checkpoints.same(source, tmp_path / "same")
    # megatron keeps an expert's gate and up together, and those of no two experts.
    with pytest.raises(tx.TransaxleError, match="UNEQUAL_COPIES"):
        tx.convert(source, tmp_path / "out", to="megatron")
    assert tx.diff(source, tmp_path / "same").equal


def test_a_step_of_some_experts_only_is_not_spread_to_all(tmp_path: Path) -> None:
    held = trained()
    step = state_of(GATE, STEP)
    others = [n for n in held if n.endswith(f"gate_proj.weight/{STEP}") and ".layers.0." in n and n != step]
    source = store(tmp_path / "source", {name: array for name, array in held.items() if name not in others})
    with demand_refusal("INCOMPLETE") as found:
        tx.convert(source, tmp_path / "out", to="automodel", sync=False)
    assert found.value.where.tensor == state_of(STACK, STEP)
    assert not (tmp_path / "out").exists()


def test_state_of_some_parameters_only(tmp_path: Path) -> None:
    """Frozen parameters have none; a tensor of which one half is frozen has half of one, which is refused."""
    held = trained()
    frozen = [name for name in held if name.startswith("optim/model.layers.1.")]
    some = {name: array for name, array in held.items() if name not in frozen}
    tx.convert(store(tmp_path / "source", some), tmp_path / "out", to="automodel", sync=False)
    got = checkpoints.read(tmp_path / "out")
    assert state_of(STACK, "exp_avg") in got
    assert state_of(STACK.replace("layers.0", "layers.1"), "exp_avg") not in got
    del some[state_of(GATE, "exp_avg")]
    plan = tx.plan(store(tmp_path / "half", some), tmp_path / "x", to="automodel")
    assert [refusal.code for refusal in plan.refusals]
    assert all(refusal.code in {"MISSING_TENSOR", "INCOMPLETE"} for refusal in plan.refusals)


def test_state_that_names_no_parameter_is_refused_or_keeps_its_name(tmp_path: Path) -> None:
    extra = {"optim/#3/exp_avg": np.zeros(3, np.float32), "optim/no.such.parameter/step": np.array(1.0)}
    source = store(tmp_path / "source", {**trained(), **extra})
    refusals = tx.plan(source, tmp_path / "out", to="te").refusals
    assert {refusal.code: refusal.where.tensor for refusal in refusals} == {
        "UNSUPPORTED": "#3",
        "MISSING_TENSOR": "no.such.parameter",
    }
    report = tx.convert(source, tmp_path / "out", to="safetensors", sync=False)
    assert any("#3" in note and "no.such.parameter" in note for note in report.notes)
    found = checkpoints.read(tmp_path / "out")
    assert {name: found[name].tobytes() for name in extra} == {name: array.tobytes() for name, array in extra.items()}


def test_a_model_for_a_hub_is_written_without_it(tmp_path: Path) -> None:
    """`hf` leaves the optimizer's state behind and says so; asked, it takes it; so does every other target."""
    held = trained()
    source = store(tmp_path / "source", held)
    state = {name for name in held if name.startswith("optim/")}
    report = tx.convert(source, tmp_path / "hub", to="hf", sync=False)
    assert checkpoints.read(tmp_path / "hub").keys() == held.keys() - state
    assert set(report.ignored) == state
    assert report.checks == 0
    for to in ("safetensors", "torch:hf", "dcp:hf", "transformers"):
        assert not tx.plan(source, tmp_path / "x", to=to).ignored, to
    assert not tx.plan(source, tmp_path / "x", to="hf", optimizer=True).ignored
    assert tx.plan(source, tmp_path / "x", to="dcp", optimizer=False).ignored == report.ignored


def test_a_checkpoint_can_be_seen_without_it(tmp_path: Path) -> None:
    source = store(tmp_path / "source", trained())
    tx.convert(source, tmp_path / "whole", to="safetensors", sync=False)
    tx.convert(source, tmp_path / "hub", to="hf", sync=False)
    found = tx.diff(source, tmp_path / "hub")
    assert not found
    assert not tx.verify(source, tmp_path / "hub")
    assert found.optimizer_only
    assert tx.verify(source, tmp_path / "hub", optimizer=False).equal
    held = checkpoints.tensors()
    with tx.open(tmp_path / "whole", optimizer=False) as checkpoint:
        assert checkpoint.keys() == held.keys()
        alone = tx.verify(checkpoint)
        assert alone.ok
        assert alone.tensors == len(trained()), "a verdict is on all bytes"
