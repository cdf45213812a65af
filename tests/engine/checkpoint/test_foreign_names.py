"""What is only a part of another model keeps its names, or is refused; they are never made up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transaxle as tx
from tests import checkpoints
from tests.families.test_layers_ahead import EVERY_SIZE
from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.model_tensors import Model
from transaxle.axes.notation.family import Sizes
from transaxle.axes.translation.translate import translate
from transaxle.engine.checkpoint.checkpoint import refuse_half_converted
from transaxle.errors import Refusal
from transaxle.families import builtin
from transaxle.formats.catalog import Entry, Extent

CONFIG = checkpoints.CONFIG
WRAPPED = {"model_type": "unheard_of_vl", "text_config": CONFIG}
SIGHT = {"vision.proj.weight": np.ones((2, 3), np.float32)}


def _store(folder: Path, prefix: str, config: Mapping[str, Any] | None, extra: Mapping[str, Any]) -> Path:
    held = {prefix + name: array for name, array in checkpoints.tensors().items()} | dict(extra)
    return checkpoints.write(folder, held, config=config)


@pytest.mark.parametrize("to", ["transformers", "dcp:automodel"])
@pytest.mark.parametrize(
    ("prefix", "config", "extra"),
    [
        ("language_model.", WRAPPED, SIGHT),
        ("model.language_model.", None, SIGHT),
        ("", WRAPPED, {}),
        ("model.", CONFIG, {"class_embed.weight": np.ones((2, 3), np.float32)}),  # which training loops put there
    ],
)
def test_a_model_around_a_known_one_is_refused(
    to: str, prefix: str, config: Mapping[str, Any] | None, extra: Mapping[str, Any], tmp_path: Path
) -> None:
    source = _store(tmp_path / "source", prefix, config, extra)
    (refusal,) = tx.plan(source, tmp_path / "out", to=to).refusals
    assert refusal.code == "UNKNOWN_FAMILY"
    assert f"qwen3_moe is only one part of this model{f' after {prefix!r}' if prefix else ''}" in refusal.message
    assert all(name in refusal.message for name in extra)
    assert "--to safetensors:identity" in refusal.hint
    assert "--rules" in refusal.hint
    with pytest.raises(tx.TransaxleError, match="UNKNOWN_FAMILY"):
        tx.convert(source, tmp_path / "out", to=to, sync=False)
    with tx.open(source) as checkpoint, pytest.raises(tx.TransaxleError, match="UNKNOWN_FAMILY"):
        checkpoint.as_dialect(to.rpartition(":")[2])


@pytest.mark.parametrize(
    ("prefix", "config", "to"), [("net.", CONFIG, "hf"), ("model.language_model.", None, "megatron")]
)
def test_a_prefix_may_be_a_larger_model(prefix: str, config: Mapping[str, Any] | None, to: str, tmp_path: Path) -> None:
    source = _store(tmp_path / "source", prefix, config, {})
    (refusal,) = tx.plan(source, tmp_path / "out", to=to).refusals
    assert refusal.code == "UNKNOWN_FAMILY"
    assert f"all names begin with {prefix!r}, so this may be part of a larger model" in refusal.message
    assert "only one part" not in refusal.message
    assert f"convert it without {prefix!r} with --family qwen3_moe" in refusal.hint
    tx.convert(source, tmp_path / "out", to=to, family="qwen3_moe", config=CONFIG, sync=False)
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", sync=False)
    assert set(tx.open(tmp_path / "back")) == set(checkpoints.tensors())


@pytest.mark.parametrize("container", ["model_state_dict", "state_dict", "model_state", "module"])
def test_the_container_of_a_training_loop_is_no_larger_model(container: str, tmp_path: Path) -> None:
    """PyTorch's tutorials save `{"model_state_dict": …}`: all names begin with the container, which is no module."""
    held = {name: torch.from_numpy(array.astype(np.float32)) for name, array in checkpoints.tensors().items()}
    beside, inside = ({name: torch.arange(3.0)} for name in ("router.bias", "model.layers.0.mlp.shift"))
    for number, extra in enumerate(({}, beside, inside)):
        torch.save({container: held | extra, "optimizer_state_dict": {}, "epoch": 3}, tmp_path / f"{number}.pt")
    for number, extra in enumerate(({}, beside)):
        report = tx.convert(tmp_path / f"{number}.pt", tmp_path / f"{number}", to="hf", config=CONFIG, sync=False)
        assert sum(name.endswith("router.bias") for name in report.kept) == len(extra)
    with tx.open(tmp_path / "0", config=CONFIG) as converted:
        values = {name: tensor.read() for name, tensor in converted.as_dialect("hf").items()}
    assert values.keys() - {"epoch"} == held.keys()
    assert all(np.array_equal(values[name], tensor.numpy()) for name, tensor in held.items())
    (refusal,) = tx.plan(tmp_path / "2.pt", tmp_path / "2", to="dcp:torchtitan", config=CONFIG).refusals
    assert refusal.code == "UNEXPECTED_TENSOR"
    assert "reads 1 tensor of layers" in refusal.message
    assert "model.layers.0.mlp.shift" in refusal.message


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod.module."])
def test_what_training_loops_put_before_all_names_is_no_other_model(prefix: str, tmp_path: Path) -> None:
    source = _store(tmp_path / "source", prefix, CONFIG, {})
    tx.convert(source, tmp_path / "out", to="megatron", sync=False)
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", sync=False)
    assert set(tx.open(tmp_path / "back")) == set(checkpoints.tensors())


def test_names_alone_do_not_say_what_strange_tensors_are_called_elsewhere(tmp_path: Path) -> None:
    """Older files of vision models call the text model in them just what it is called alone."""
    source = _store(tmp_path / "source", "", None, SIGHT)
    (refusal,) = tx.plan(source, tmp_path / "out", to="transformers").refusals
    assert (refusal.code, refusal.where.tensor) == ("UNEXPECTED_TENSOR", "vision.proj.weight")
    assert "--config" in refusal.hint
    assert not tx.plan(source, tmp_path / "out", to="hf").refusals
    assert tx.convert(source, tmp_path / "out", to="te", config=CONFIG, sync=False).kept == ("vision.proj.weight",)


BIASED = {"attention_bias": True, "mlp_bias": True, "use_bias": True}
NAMELESS = [
    ("llama", "hf", "torchtitan"), ("qwen3", "megatron", "torchtitan"), ("deepseek_v3", "hf", "te"),
    ("hy_v3", "vllm", "automodel"),
]  # fmt: skip
"""Families whose models may have biases, with a dialect that has some and one that has no line for them."""


def _half_converted(family: str, source: str, target: str, **changed: Any) -> tuple[list[Refusal], tuple[str, ...]]:
    """What is said of a model in another dialect, and which names it keeps there."""
    table = builtin()[family]
    own, wanted = table.dialect(source), table.dialect(target)
    assert own is not None
    assert wanted is not None
    sizes = Sizes(table, {**EVERY_SIZE, "model_type": family, **changed})
    shapes = dict(Model(table, sizes, tp=0).stored_shapes(own))
    entries = {n: Entry(n, "BF16", s, (Extent((0,) * len(s), s, "file", 0),)) for n, s in shapes.items()}
    bound = bind(list(entries), table, own, sizes, stored=entries)
    view = translate(bound, entries, wanted, sizes)
    return refuse_half_converted(bound, wanted, sizes, view, ()), view.kept_names


@pytest.mark.parametrize(("family", "source", "target"), NAMELESS)
def test_what_a_dialect_has_no_line_for_is_refused_in_layers_that_it_has(family: str, source: str, target: str) -> None:
    """As biases of attention in torchtitan's Llama: under the hub's names nobody would load them."""
    (refusal,), kept = _half_converted(family, source, target, **BIASED)
    assert (refusal.code, len(kept) > 1) == ("UNEXPECTED_TENSOR", True)
    assert any(name in refusal.message for name in kept)
    assert _half_converted(family, source, target, **dict.fromkeys(BIASED, False)) == ([], ())
