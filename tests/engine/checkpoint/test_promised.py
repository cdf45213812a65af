"""What a config promises and the files lack, on checkpoints of which tensors were taken away."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import pytest
from safetensors.numpy import save_file

import transaxle as tx
from tests import checkpoints
from tests.engine import quantized
from transaxle.engine.checkpoint.promised import find_lacks

LAYERS = range(checkpoints.SIZES["num_hidden_layers"])
HEAD = "lm_head.weight"
BIASED = {f"model.layers.{layer}.self_attn.{name}_proj.bias" for layer in LAYERS for name in "qkvo"}
FIRST_LAYER = {name for name in checkpoints.shapes() if name.startswith("model.layers.0.")}


def missing(folder: Path, **options: Any) -> dict[str, set[str]]:
    """What promises tensors, without its beginning -> the names that are missing."""
    with tx.open(folder, **options) as checkpoint:
        return {lack.promise.removeprefix("the config "): set(lack.names) for lack in find_lacks(checkpoint)}


def without(folder: Path, *names: str, **config: object) -> Path:
    """The tiny model without these tensors, and with other values of config keys; None removes a key."""
    held = {name: tensor for name, tensor in checkpoints.tensors().items() if name not in names}
    changed = {key: value for key, value in {**checkpoints.CONFIG, **config}.items() if value is not None}
    return checkpoints.write(folder, held, config=changed)


@pytest.mark.parametrize(("names", "config", "expected"), [
    ((), {}, {}),
    ((HEAD,), {}, {"has tie_word_embeddings false": {HEAD}}),
    ((HEAD,), {"tie_word_embeddings": True}, {}),
    ((HEAD,), {"tie_word_embeddings": None}, {}),  # a default of the program decides
    ((), {"attention_bias": True}, {"has attention_bias true": BIASED}),
    ((checkpoints.GATE,), {}, {"describes a larger model": {checkpoints.GATE}}),
    (sorted(FIRST_LAYER), {"decoder_sparse_step": 1, "mlp_only_layers": []}, {"describes a larger model": FIRST_LAYER}),
    ((), {"num_mtp_layers": 2}, {"has num_mtp_layers 2": set()}),  # the table has no such layers
    ((), {"num_mtp_layers": 2, "use_mtp": False}, {}),
    ((), {"num_mtp_layers": 0}, {}),
])  # fmt: skip
def test_each_missing_tensor_is_named_with_what_promises_it(
    names: tuple[str, ...], config: Mapping[str, object], expected: dict[str, set[str]], tmp_path: Path
) -> None:
    folder = without(tmp_path / "model", *names, **config)
    assert missing(folder) == expected
    facts = tx.info(folder)["missing"]
    assert [fact["tensors"] for fact in facts] == [len(named) for named in expected.values()]
    notes = tx.plan(folder, tmp_path / "out", to="safetensors").notes
    assert [fact["text"] for fact in facts] == list(notes)
    assert all("\n" not in note for note in notes)


def test_a_conversion_into_another_dialect_refuses_and_does_not_repeat_it(tmp_path: Path) -> None:
    plan = tx.plan(without(tmp_path / "model", HEAD), tmp_path / "out", to="megatron")
    assert [refusal.code for refusal in plan.refusals] == ["MISSING_TENSOR"]
    assert not any(HEAD in note for note in plan.notes)


def test_without_a_config_or_a_table_nothing_is_promised(tmp_path: Path) -> None:
    held = {name: tensor for name, tensor in checkpoints.tensors().items() if name != HEAD}
    assert missing(checkpoints.write(tmp_path / "bare", held)) == {}
    assert missing(without(tmp_path / "unknown", HEAD, model_type="never_heard_of")) == {}


def test_tensors_that_the_config_describes_otherwise_are_named(tmp_path: Path) -> None:
    held, config = quantized.llama(d=256, f=384, g=2, r=2, head=128, layers=2)
    section, first = "quantization_config", "model.layers.0.mlp.up_proj.weight"
    scales = [name for name in held if name.endswith("_scale_inv")]
    decoded = {
        name: held[name].astype(ml_dtypes.bfloat16) if f"{name}_scale_inv" in held else held[name]
        for name in held
        if name not in scales
    }
    promise = "has quantization_config fp8"
    assert missing(checkpoints.write(tmp_path / "good", held, config=config)) == {}
    assert missing(checkpoints.write(tmp_path / "plain", decoded, config=config)) == {promise: set()}
    assert missing(checkpoints.write(tmp_path / "decoded", decoded, config=without_key(config, section))) == {}
    one = {name: tensor for name, tensor in held.items() if name != f"{first}_scale_inv"} | {first: decoded[first]}
    mixed = checkpoints.write(tmp_path / "one", one, config=config)
    assert missing(mixed) == {promise: {first}}
    listed = {**config, section: {**config[section], "modules_to_not_convert": ["lm_head", first[: -len(".weight")]]}}
    assert missing(checkpoints.write(tmp_path / "listed as plain", one, config=listed)) == {}
    wrong = checkpoints.write(tmp_path / "wrongly listed", held, config=listed)
    assert missing(wrong) == {promise: {first}}
    # what the lines advise, and the findings of `check`
    remedies: dict[Path, dict[str, Any]] = {mixed: {"decode": "bf16"}, wrong: {}}
    for folder, options in remedies.items():
        with tx.open(folder) as checkpoint:
            (lack,) = find_lacks(checkpoint)
        assert not lack.is_lost
        tx.convert(folder, folder.with_suffix(".mended"), to="hf", **options)
        assert missing(folder.with_suffix(".mended")) == {}


def without_key(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def test_a_file_that_no_index_lists_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    held = checkpoints.tensors()
    rest = {name: held.pop(name) for name in (HEAD, "model.norm.weight")}
    checkpoints.write(folder, held, shards=2, config=checkpoints.CONFIG)
    save_file(rest, folder / "rest.safetensors")
    save_file({"layers.0.attention.wq.weight": rest[HEAD]}, folder / "consolidated.safetensors")  # of another program
    lines = [fact["text"] for fact in tx.info(folder)["missing"]]
    (line,) = (line for line in lines if line.startswith("rest.safetensors"))
    assert checkpoints.INDEX in line
    assert "2 tensors, lm_head.weight, model.norm.weight" in line
    assert not any("consolidated" in line for line in lines)
    index = json.loads((folder / checkpoints.INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(rest, "rest.safetensors")
    (folder / checkpoints.INDEX).write_text(json.dumps(index))
    assert tx.info(folder)["missing"] == []


@pytest.mark.parametrize("further", [None, "model.mtp_layers.0.input_proj.weight", "model.layers.2.enorm.weight"])
def test_layers_ahead_of_a_model_that_no_table_has_are_known_by_names(further: str | None, tmp_path: Path) -> None:
    held = checkpoints.tensors()
    held |= {} if further is None else {further: held["model.norm.weight"]}
    config = {**checkpoints.CONFIG, "model_type": "mimo", "num_nextn_predict_layers": 1}
    folder = checkpoints.write(tmp_path / "model", held, config=config)
    lines = [fact["text"] for fact in tx.info(folder)["missing"]]
    assert [line.partition(",")[0] for line in lines] == ["the config has num_nextn_predict_layers 1"] * (not further)
    checkpoints.write(tmp_path / "none", held, config={**config, "num_nextn_predict_layers": 0})
    assert tx.info(tmp_path / "none")["missing"] == []


def test_a_config_without_files_lacks_nothing() -> None:
    config = {**checkpoints.CONFIG, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_mtp_layers": 2}
    answer = tx.supports(config, source="safetensors:hf", target="safetensors:hf")
    assert answer
    assert not any("is stored" in note for note in answer.notes)
