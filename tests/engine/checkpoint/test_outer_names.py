"""Names around a model's own: wrappers are no part of it, and what is only a part of another model is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal
from tests.families.test_layers_ahead import EVERY_SIZE
from transaxle.axes.layout.bind import bind
from transaxle.axes.layout.model_tensors import Model
from transaxle.axes.notation.family import Sizes
from transaxle.axes.translation.translate import translate
from transaxle.engine.checkpoint.recognise import recognise
from transaxle.engine.unnamed import refuse_half_converted
from transaxle.errors import Refusal
from transaxle.families import builtin
from transaxle.formats.catalog import Entry, Extent

COMPILED, CHECKPOINTED, FSDP1, DDP = "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"


def layers(*segments: str) -> Callable[[str], str]:
    """Wrap every layer."""
    return lambda name: _after(name, 3, segments) if name.startswith("model.layers.") else name


def _after(name: str, count: int, segments: Sequence[str]) -> str:
    parts = name.split(".")
    return ".".join([*parts[:count], *segments, *parts[count:]])


PLACES: dict[str, Callable[[str], str]] = {
    "each layer compiled": layers(COMPILED),
    "each layer under DDP": layers(DDP),
    "three at one place": layers(FSDP1, COMPILED, CHECKPOINTED),
    "the model and its layers": lambda name: f"{COMPILED}.{layers(COMPILED)(name)}",
    "the body alone": lambda name: _after(name, 1, [COMPILED]) if name.startswith("model.") else name,
    "attention alone": lambda name: _after(name, 4, [COMPILED, DDP]) if ".self_attn." in name else name,
    "the modules of weights": lambda name: f"{name.removesuffix('.weight')}.{CHECKPOINTED}.weight",
}
"""What was wrapped when a model was saved -> the names that its state dict has."""


def _stored(folder: Path, wrapped: Callable[[str], str]) -> Path:
    held = {wrapped(name): array for name, array in checkpoints.tensors().items()}
    return checkpoints.write(folder, held, config=checkpoints.CONFIG)


@pytest.mark.parametrize("place", PLACES)
def test_a_wrapped_model_converts_as_the_model_itself(place: str, tmp_path: Path) -> None:
    source, plain = _stored(tmp_path / "source", PLACES[place]), checkpoints.tiny(tmp_path / "plain")
    for to in ("hf", "safetensors:transformers", "safetensors:megatron"):
        out = [tx.convert(path, tmp_path / f"{path.name}-{to}", to=to, sync=False).path for path in (source, plain)]
        assert checkpoints.same(Path(out[0]), Path(out[1])), to
    assert tx.verify(source, plain)
    assert tx.verify(plain, source)
    assert not tx.diff(source, plain).differences
    with tx.open(source) as checkpoint:
        assert set(checkpoint) == set(map(PLACES[place], checkpoints.tensors()))


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", "qwen3_next"])
def test_names_of_any_family_are_read_without_wrappers(family: str) -> None:
    """In front of every segment of the names, one place after the other."""
    known = builtin()[family]
    for dialect in (each for each in known.dialects if each.name != "vllm"):
        names = [line.name.text for line in dialect.lines if not line.name.axes]
        names += [line.name.format((0,) * len(line.name.holes)) for line in dialect.lines if line.name.axes][:40]
        names = [name for name in dict.fromkeys(names) if "(" not in name]
        expected = recognise(names, {}, builtin(), family, dialect.label)
        for place in range(1, 4):
            wrapped = [_after(name, place, [COMPILED]) if name.count(".") > place else name for name in names]
            assert wrapped != names
            found = recognise(wrapped, {}, builtin(), family, dialect.label)
            assert (found.dialect.label, found.matched) == (expected.dialect.label, expected.matched)


def test_the_state_of_an_optimizer_and_its_groups_follow(tmp_path: Path) -> None:
    wrapped = PLACES["the model and its layers"]
    arrays = {name: array.astype(np.float32) for name, array in checkpoints.tensors().items()}
    model = {wrapped(name): torch.from_numpy(array) for name, array in arrays.items()}
    state = {wrapped(name): {"exp_avg": torch.from_numpy(array + 1)} for name, array in arrays.items()}
    groups = [{"lr": 0.5, "params": list(state)}]
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "run.pt")
    tx.convert(tmp_path / "run.pt", tmp_path / "out", to="dcp:hf", config=checkpoints.CONFIG, sync=False)
    with tx.open(tmp_path / "out") as out:
        assert set(out) == {*arrays, *(f"optim/{name}/exp_avg" for name in arrays)}
        assert sorted(out.metadata["param_groups"][0]["params"]) == sorted(arrays)
        for name, array in arrays.items():
            assert np.array_equal(out[f"optim/{name}/exp_avg"].read(), array + 1)
            assert np.array_equal(out[name].read(), array)


def test_two_names_that_are_one_without_wrappers_are_refused(tmp_path: Path) -> None:
    twice = {f"model.{segment}.norm.weight": np.full(16, 7, np.float32) for segment in (COMPILED, FSDP1)}
    source = checkpoints.write(tmp_path / "source", checkpoints.tensors() | twice, config=checkpoints.CONFIG)
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(source, tmp_path / "out", to="megatron", sync=False)
    assert [refusal.code for refusal in caught.value.refusals] == ["NAME_COLLISION"] * len(twice)
    assert {refusal.where.tensor for refusal in caught.value.refusals} == {*twice}
    assert not (tmp_path / "out").exists()
    tx.convert(source, tmp_path / "same", to="safetensors:identity", sync=False)
    assert checkpoints.same(source, tmp_path / "same")


def test_module_beside_others_is_a_module(tmp_path: Path) -> None:
    """A wrapper has nothing beside it: else it is one of the model's own, which no table reads."""
    held = {layers(DDP)(name): array for name, array in checkpoints.tensors().items()}
    held["model.layers.0.gate.weight"] = np.ones((2, 3), np.float32)
    source = checkpoints.write(tmp_path / "source", held, config=checkpoints.CONFIG)
    with pytest.raises(tx.TransaxleError, match="MISSING_TENSOR"):
        tx.convert(source, tmp_path / "out", to="megatron", sync=False)


@pytest.mark.parametrize("name", ["extra.module.bias", "heads.module.0.weight"])
def test_a_module_that_is_called_so_keeps_its_name_where_no_line_reads_it(name: str, tmp_path: Path) -> None:
    held = {**checkpoints.tensors(), name: np.arange(6, dtype=np.float32)}
    source = checkpoints.write(tmp_path / "source", held, config=checkpoints.CONFIG)
    for to in ("hf", "megatron"):
        assert tx.convert(source, tmp_path / to, to=to, sync=False).kept == (name,)
        with tx.open(tmp_path / to) as out:
            assert np.array_equal(out[name].read(), np.arange(6))


_TORCHTUNE = {
    "model.embed_tokens": "tok_embeddings", "model.layers": "layers", "self_attn": "attn", "o_proj": "output_proj",
    "input_layernorm.weight": "sa_norm.scale", "post_attention_layernorm.weight": "mlp_norm.scale",
    "model.norm.weight": "norm.scale", "lm_head": "output",
}  # fmt: skip
"""Parts of the hub's names -> torchtune's, by its own `convert_weights` of Llama."""


@pytest.mark.parametrize("kind", ["wrapped", "without config", "adapter"])
def test_names_of_torchtune_are_called_so(kind: str, tmp_path: Path) -> None:
    held = {}
    for name, array in checkpoints.tensors().items():
        own = name
        for theirs, ours in _TORCHTUNE.items():
            own = own.replace(theirs, ours)
        if kind == "wrapped":
            own = own.replace("layers.0.", f"layers.0.{COMPILED}.")
        if kind == "adapter":
            own = own.replace("attn.q_proj.weight", "attn.q_proj.lora_a.weight")
        if kind != "adapter" or "lora" in own:
            held[own] = array
    config = None if kind == "without config" else checkpoints.CONFIG
    source = checkpoints.write(tmp_path / "source", held, config=config)
    with demand_refusal("UNKNOWN_FAMILY", "names of torchtune") as caught:
        tx.convert(source, tmp_path / "out", to="hf", sync=False)
    assert "FullModelHFCheckpointer" in caught.value.hint
    tx.convert(source, tmp_path / "same", to="safetensors:identity", sync=False)
    assert checkpoints.same(source, tmp_path / "same")


# What is only a part of another model keeps its names, or is refused; they are never made up.

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
