"""Tensors that a checkpoint lacks, taken from another checkpoint: every value by name, from plain files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import Tensors, write
from tests.engine import demand_refusal
from tests.engine.quantized import read
from tests.some import some
from transaxle.axes.layout.model_tensors import Model
from transaxle.axes.notation.family import Sizes
from transaxle.families import builtin

GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "intermediate_size": 256,
    "moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "use_qk_norm": True, "attention_bias": True,
    "tie_word_embeddings": False,
}  # fmt: skip
AHEAD = "model.layers.3."
"""Beginning of the names of the layer that predicts ahead."""
COPIES = (f"{AHEAD}embed_tokens.weight", f"{AHEAD}shared_head.head.weight")
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "intermediate_size": 48,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "tie_word_embeddings": False, "attention_bias": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "qwen3_5", "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "in_channels": 3,
    "patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 5,
    "tie_word_embeddings": False, "text_config": {**TEXT, "rms_norm_eps": 1e-6}, "vision_config": VISION,
}  # fmt: skip


def _without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def random_weights(config: Mapping[str, Any], seed: int, dtype: Any = ml_dtypes.bfloat16) -> Tensors:
    """Random weights of a model, without layers ahead, under the hub's names."""
    (family,) = builtin().of_types([config["model_type"]])
    model, random = Model(family, Sizes(family, config)), np.random.default_rng(seed)
    shapes = model.stored_shapes(some(family.dialect("hf")))
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes}


def glm(seed: int, *, ahead: bool) -> Tensors:
    """Random weights of the GLM; the layer ahead is an ordinary one, with six more tensors."""
    weights = random_weights(GLM, seed)
    if not ahead:
        return weights
    random, width = np.random.default_rng(seed + 1), GLM["hidden_size"]
    shapes = {
        AHEAD + name[len("model.layers.2.") :]: each.shape for name, each in weights.items() if ".layers.2." in name
    }
    shapes |= {f"{AHEAD}{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= {f"{AHEAD}eh_proj.weight": (width, 2 * width), **dict.fromkeys(COPIES, (GLM["vocab_size"], width))}
    return weights | {name: random.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


PLAIN_GLM = _without(GLM, "num_nextn_predict_layers")
STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` and `source`, which lacks the layer ahead and says nothing of it."""
    folder = tmp_path_factory.mktemp("graft")
    write(folder / "base", glm(0, ahead=True), config=GLM)
    write(folder / "source", glm(10, ahead=False), config=_without(GLM, "num_nextn_predict_layers"))
    return folder


def _expected(folders: Path) -> Tensors:
    return read(folders / "base") | read(folders / "source")


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _same(folder: Path, expected: Mapping[str, np.ndarray]) -> None:
    written = read(folder)
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        assert (written[name].dtype, written[name].tobytes()) == (value.dtype, value.tobytes()), name


@pytest.mark.parametrize("bare", [False, True], ids=["config", "no config"])
@pytest.mark.parametrize("form", ["safetensors:hf", "dcp:transformers", "dcp:megatron", "torch:automodel"])
def test_a_layer_ahead_comes_from_the_base_bit_by_bit(form: str, bare: bool, folders: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tx.convert(folders / "source", source, to=form)
    (source / "transaxle.json").unlink()
    if bare:
        (source / "config.json").unlink()
    report = tx.convert(source, tmp_path / "out", to="hf", graft=folders / "base", verify=True)
    expected = _expected(folders)
    _same(tmp_path / "out", expected)
    grafted = {name for name in expected if name.startswith(AHEAD)}
    assert report.grafted == dict.fromkeys(grafted, str(folders / "base"))
    assert set(json.loads((tmp_path / "out" / "transaxle.json").read_text())["grafted"]["tensors"]) == grafted
    assert _config(tmp_path / "out")["num_nextn_predict_layers"] == 1
    assert any("config.json" in note and str(folders / "base") in note for note in report.notes)
    assert tx.verify(source, tmp_path / "out", graft=folders / "base")
    assert not tx.diff(folders / "source", tmp_path / "out")


def _with_texts(folder: Path, source: Path, texts: Mapping[str, str]) -> Path:
    """Copy a checkpoint, and write text files beside it."""
    shutil.copytree(source, folder)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


GENERATION, PROCESSOR = "generation_config.json", "preprocessor_config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
OTHER = ("run.log", "LICENSE")


@pytest.mark.parametrize("form", ["hf", "torch_dist"])
@pytest.mark.parametrize("own", [(), ("tokenizer.json", GENERATION)], ids=["none", "a tokenizer"])
def test_files_of_kinds_that_the_source_lacks_come_along(
    own: tuple[str, ...], form: str, folders: Path, tmp_path: Path
) -> None:
    texts = dict.fromkeys((*TOKENIZER, GENERATION, PROCESSOR, *OTHER), "base")
    base = _with_texts(tmp_path / "base", folders / "base", texts)
    source, out = _with_texts(tmp_path / "source", folders / "source", dict.fromkeys(own, "own")), tmp_path / "out"
    planned = tx.plan(source, out, to=form, graft=base).grafted_files
    report = tx.convert(source, out, to=form, graft=base, verify=True)
    taken = {PROCESSOR} if own else {*TOKENIZER, GENERATION, PROCESSOR}
    assert {Path(name).name for name in planned} == taken
    assert report.as_json()["grafted_files"] == planned == dict.fromkeys(planned, str(base))
    assert json.loads((out / "transaxle.json").read_text())["grafted"]["files"] == [*planned]
    written = {path.name: path.read_text() for path in out.rglob("*") if path.name in texts}
    assert written == dict.fromkeys(taken, "base") | dict.fromkeys(own, "own")


def test_the_manifest_says_from_which_base(folders: Path, tmp_path: Path) -> None:
    tx.convert(folders / "base", tmp_path / "base", to="dcp:automodel")
    written = json.loads((tmp_path / "base" / "transaxle.json").read_text())["checksum"]
    for base, checksum in ((folders / "base", None), (tmp_path / "base", written)):
        tx.convert(folders / "source", tmp_path / "out", to="hf", graft=base, verify=True, overwrite=True)
        grafted = json.loads((tmp_path / "out" / "transaxle.json").read_text())["grafted"]
        assert (grafted["base"], grafted.get("checksum")) == (str(base), checksum)


def test_a_damaged_file_of_the_base_is_refused(folders: Path, tmp_path: Path) -> None:
    base = _with_texts(tmp_path / "files", folders / "base", {TOKENIZER[0]: "a tokenizer"})
    tx.convert(base, tmp_path / "base", to="hf")
    (tmp_path / "base" / TOKENIZER[0]).write_bytes(b"a tokeni\xff\x00r")
    with demand_refusal("CORRUPT", TOKENIZER[0]):
        tx.convert(folders / "source", tmp_path / "out", to="hf", graft=tmp_path / "base")


def test_a_base_in_another_dialect_has_no_copies_to_give(folders: Path, tmp_path: Path) -> None:
    """Megatron's layers ahead use the model's own embedding and head; a source with copies keeps them."""
    tx.convert(folders / "source", tmp_path / "grown", to="dcp:megatron", graft=folders / "base", verify=True)
    tx.convert(folders / "source", tmp_path / "out", to="hf", graft=tmp_path / "grown", verify=True)
    _same(tmp_path / "out", {name: value for name, value in _expected(folders).items() if name not in COPIES})
    report = tx.convert(tmp_path / "grown", tmp_path / "again", to="hf", graft=folders / "base")
    assert set(report.grafted) == set(COPIES)


def test_what_the_source_has_is_kept_unless_it_is_named(folders: Path, tmp_path: Path) -> None:
    patterns = ["lm_head.weight", "model.layers.1.mlp.experts.2.*"]
    tx.convert(folders / "source", tmp_path / "out", to="hf", graft=folders / "base", graft_over=patterns, verify=True)
    base, expected = read(folders / "base"), _expected(folders)
    named = [name for name in base if name == patterns[0] or name.startswith(patterns[1][:-1])]
    assert len(named) == 4
    _same(tmp_path / "out", expected | {name: base[name] for name in named})
    with demand_refusal("AMBIGUOUS", "no tensor of the source has a name like 'lm_haed'"):
        tx.open(folders / "source", graft=folders / "base", graft_over="lm_haed")
    write(tmp_path / "part", {name: value for name, value in base.items() if name.startswith(AHEAD)}, config=GLM)
    with demand_refusal("MISSING_TENSOR", "has no tensor for it"):
        tx.open(folders / "source", graft=tmp_path / "part", graft_over="lm_head.weight")


def test_missing_experts_are_completed_and_a_base_may_be_a_part(folders: Path, tmp_path: Path) -> None:
    expert = "model.layers.2.mlp.experts.1.up_proj.weight"
    source = read(folders / "source")
    write(tmp_path / "source", {name: value for name, value in source.items() if name != expert}, config=GLM)
    base = read(folders / "base")
    write(tmp_path / "base", {expert: base[expert]}, config=GLM)
    report = tx.convert(tmp_path / "source", tmp_path / "out", to="dcp:transformers", graft=tmp_path / "base")
    stack = "model.layers.2.mlp.experts.gate_up_proj"
    assert report.grafted == {stack: str(tmp_path / "base")}
    with tx.open(tmp_path / "out").as_dialect("hf") as out:
        assert {name: tensor.tobytes() for name, tensor in out.items()} == {
            name: value.tobytes() for name, value in (source | {expert: base[expert]}).items()
        }


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in four dialects, whose experts are single, stacked, packed one by one, and packed in a stack."""
    folder = tmp_path_factory.mktemp("experts")
    write(folder / "single", glm(0, ahead=False), config=PLAIN_GLM)
    for name, dialect in (("stacked", "transformers"), ("packed", "megatron"), ("grouped", "te")):
        tx.convert(folder / "single", folder / name, to=f"safetensors:{dialect}", sync=False)
    return folder


@pytest.mark.parametrize("form", ["single", "stacked", "packed", "grouped"])
@pytest.mark.parametrize("dialect", ["hf", "transformers"])
def test_single_experts_between_stacks_are_completed(form: str, dialect: str, experts: Path, tmp_path: Path) -> None:
    """Layer 1 is stacked, layer 2 has single experts and lacks one: in whichever dialect the source is read."""
    single, base = glm(10, ahead=False), read(experts / "single")
    layer = "model.layers.{}.mlp.experts."
    lost = {name for name in single if name.startswith(f"{layer.format(2)}1.")}
    mixed = {name: value for name, value in single.items() if layer.format(1) not in name and name not in lost}
    parts = [
        [single[f"{layer.format(1)}{number}.{name}_proj.weight"] for number in range(GLM["n_routed_experts"])]
        for name in ("gate", "up", "down")
    ]
    mixed[layer.format(1) + STACKS[0]] = np.stack([np.concatenate(pair) for pair in zip(*parts[:2], strict=True)])
    mixed[layer.format(1) + STACKS[1]] = np.stack(parts[2])
    write(tmp_path / "mixed", mixed, config=PLAIN_GLM)
    options: dict[str, Any] = {"graft": experts / form, "dialect": dialect, "sync": False}
    report = tx.convert(tmp_path / "mixed", tmp_path / "out", to="hf", verify=True, **options)
    assert set(report.grafted) == lost
    _same(tmp_path / "out", single | {name: base[name] for name in lost})
    # a layer of which the source has nothing comes along as one, and nothing of it twice
    bare = {name: value for name, value in mixed.items() if layer.format(1) not in name}
    write(tmp_path / "bare", bare, config=PLAIN_GLM)
    tx.convert(tmp_path / "bare", tmp_path / "whole", to="hf", verify=True, **options)
    absent = lost | {name for name in single if layer.format(1) in name}
    _same(tmp_path / "whole", single | {name: base[name] for name in absent})


@pytest.mark.parametrize("form", ["single", "packed"])
def test_a_stack_that_lacks_experts_is_replaced_when_it_is_named(form: str, experts: Path, tmp_path: Path) -> None:
    """Nothing says which experts a short stack has, so it stays as it is, and is refused, unless it is named."""
    tx.convert(experts / "single", tmp_path / "whole", to="safetensors:transformers", sync=False)
    stack = f"model.layers.2.mlp.experts.{STACKS[1]}"
    tensors = {name: value + 1 for name, value in read(tmp_path / "whole").items()}
    write(tmp_path / "short", tensors | {stack: tensors[stack][:3]}, config=PLAIN_GLM)
    options: dict[str, Any] = {"graft": experts / form, "sync": False}
    with demand_refusal("AMBIGUOUS", "name tensors to replace with --graft-over PATTERN"):
        tx.convert(tmp_path / "short", tmp_path / "out", to="hf", **options)
    tx.convert(
        tmp_path / "short", tmp_path / "out", to="safetensors:transformers", graft_over=stack, verify=True, **options
    )
    _same(tmp_path / "out", tensors | {stack: read(tmp_path / "whole")[stack]})


def test_what_both_lack_is_refused_in_the_name_of_both(folders: Path, tmp_path: Path) -> None:
    lost = "model.layers.2.mlp.experts.1.up_proj.weight"
    for name in ("source", "base"):
        write(tmp_path / name, {key: value for key, value in read(folders / name).items() if key != lost}, config=GLM)
    with demand_refusal("MISSING_TENSOR", f"neither {tmp_path / 'source'} nor {tmp_path / 'base'} has it"):
        tx.convert(tmp_path / "source", tmp_path / "out", to="dcp:transformers", graft=tmp_path / "base")
    assert not (tmp_path / "out").exists()


def test_a_graft_of_nothing_and_another_model_are_refused(folders: Path, tmp_path: Path) -> None:
    with demand_refusal("AMBIGUOUS", "nothing to graft"):
        tx.open(folders / "base", graft=folders / "source")
    wide = {**GLM, "vocab_size": 128}
    write(tmp_path / "wide", random_weights(wide, 0), config=wide)
    with demand_refusal("SHAPE_MISMATCH", "n (vocab_size): 128 in the source, 96 in the base"):
        tx.open(tmp_path / "wide", graft=folders / "base")
    write(tmp_path / "unbiased", glm(0, ahead=False), config={**GLM, "attention_bias": False})
    with demand_refusal("SHAPE_MISMATCH", "attention_bias: False in the source, True in the base"):
        tx.open(tmp_path / "unbiased", graft=folders / "base")
    write(tmp_path / "other", random_weights(TEXT, 0), config=TEXT)
    with demand_refusal("UNSUPPORTED", "their tables do not fit"):
        tx.open(tmp_path / "other", graft=folders / "base")
    with pytest.raises(TypeError, match="graft_over needs graft"):
        tx.open(folders / "source", graft_over="*")


def test_the_base_is_never_overwritten_and_its_hashes_hold(folders: Path, tmp_path: Path) -> None:
    tx.convert(folders / "base", tmp_path / "base", to="hf")
    with demand_refusal("EXISTS", "the target is the base"):
        tx.convert(folders / "source", tmp_path / "base", to="hf", graft=tmp_path / "base", overwrite=True)
    file = tmp_path / "base" / "model.safetensors"
    offset = file.read_bytes().find(read(folders / "base")[f"{AHEAD}eh_proj.weight"].tobytes())
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(b"\xff\xff")
    with demand_refusal("CORRUPT", f"{AHEAD}eh_proj.weight"):
        tx.convert(folders / "source", tmp_path / "out", to="hf", graft=tmp_path / "base")
    assert not (tmp_path / "out").exists()


def _listed(folder: Path) -> list[str]:
    modules: list[str] = _config(folder)["quantization_config"]["modules_to_not_convert"]
    return modules


def test_quantized_and_plain_checkpoints_graft_from_each_other(folders: Path, tmp_path: Path) -> None:
    for name in ("base", "source"):
        tx.convert(folders / name, tmp_path / name, to="hf", encode="float8_block")
    source, base = read(tmp_path / "source"), read(tmp_path / "base")
    ahead = {name: value for name, value in base.items() if name.startswith(AHEAD)}
    tx.convert(tmp_path / "source", tmp_path / "coded", to="hf", graft=tmp_path / "base", verify=True)
    _same(tmp_path / "coded", source | ahead)
    assert f"{AHEAD}eh_proj" in _listed(tmp_path / "coded")
    tx.convert(tmp_path / "source", tmp_path / "plain", to="hf", graft=folders / "base", verify=True)
    _same(
        tmp_path / "plain",
        source | {name: read(folders / "base")[name] for name in _expected(folders) if AHEAD in name},
    )
    modules = _listed(tmp_path / "plain")
    assert {f"{AHEAD}self_attn.{name}_proj" for name in "qkvo"} <= {*modules}
    assert f"{AHEAD}mlp.experts" in modules
    report = tx.convert(folders / "source", tmp_path / "decoded", to="hf", graft=tmp_path / "base", verify=True)
    tx.convert(tmp_path / "base", tmp_path / "base values", to="hf", decode="bf16")
    values = read(tmp_path / "base values")
    _same(tmp_path / "decoded", read(folders / "source") | {name: values[name] for name in values if AHEAD in name})
    assert "quantization_config" not in _config(tmp_path / "decoded")
    coded = {name.removesuffix("_scale_inv") for name in ahead if name.endswith("_scale_inv")}
    assert {measured.what.name for measured in report.recoded} == coded


def test_other_encodings_are_decoded_and_listed_as_plain(folders: Path, tmp_path: Path) -> None:
    tx.convert(folders / "source", tmp_path / "source", to="hf", encode="float8_block")
    tx.convert(folders / "base", tmp_path / "base", to="hf", encode="nvfp4")
    tx.convert(tmp_path / "source", tmp_path / "out", to="hf", graft=tmp_path / "base", verify=True)
    tx.convert(tmp_path / "base", tmp_path / "values", to="hf", decode="bf16")
    values = read(tmp_path / "values")
    _same(tmp_path / "out", read(tmp_path / "source") | {name: values[name] for name in values if AHEAD in name})
    assert f"{AHEAD}mlp.experts" in _listed(tmp_path / "out")
    # what the config says of the grafted tensors holds when it is read again
    with tx.open(tmp_path / "out", decode="bf16") as out:
        assert not out.encoded


def test_a_tower_comes_back_to_a_text_model_that_was_trained_alone(tmp_path: Path) -> None:
    text, whole = random_weights(TEXT, 1), random_weights(WHOLE, 2)
    write(tmp_path / "text", text, config=TEXT)
    write(tmp_path / "whole", whole, config=WHOLE)
    report = tx.convert(tmp_path / "text", tmp_path / "out", to="hf", graft=tmp_path / "whole", verify=True)
    trained = {name.replace("model.", "model.language_model.", 1): value for name, value in text.items()}
    _same(tmp_path / "out", whole | trained)
    assert set(report.grafted) == {name for name in whole if ".visual." in name}
    config = _config(tmp_path / "out")
    assert (config["model_type"], config["text_config"]["rms_norm_eps"]) == ("qwen3_5", TEXT["rms_norm_eps"])
    assert config["vision_config"] == VISION
    assert tx.verify(tmp_path / "text", tmp_path / "out", graft=tmp_path / "whole")
    # the other way around, the text model has nothing that the whole one lacks, and may replace its part
    with demand_refusal("AMBIGUOUS", "nothing to graft"):
        tx.open(tmp_path / "whole", graft=tmp_path / "text")
    over: dict[str, Any] = {"graft": tmp_path / "text", "graft_over": ["model.language_model.*", "lm_head.weight"]}
    tx.convert(tmp_path / "whole", tmp_path / "over", to="hf", **over, verify=True)
    _same(tmp_path / "over", whole | trained)
    assert _config(tmp_path / "over") == WHOLE


def test_a_config_without_its_tower_gets_it_from_the_base(tmp_path: Path) -> None:
    whole = random_weights(WHOLE, 2)
    write(tmp_path / "whole", whole, config=WHOLE)
    write(
        tmp_path / "source",
        {name: value + 1 for name, value in whole.items() if ".visual." not in name},
        config=_without(WHOLE, "vision_config", "image_token_id"),
    )
    tx.convert(tmp_path / "source", tmp_path / "out", to="hf", graft=tmp_path / "whole")
    assert _config(tmp_path / "out") == {**_without(WHOLE, "vision_config", "image_token_id"), **WHOLE}
    _same(tmp_path / "out", whole | read(tmp_path / "source"))


CHANGES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "cast": ({"dtype": "fp32"}, lambda value: value.astype(np.float32)),
    "nothing": ({}, lambda value: value),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_options_apply_to_grafted_tensors_too(change: str, folders: Path, tmp_path: Path) -> None:
    options, changed = CHANGES[change]
    tx.convert(folders / "source", tmp_path / "out", to="hf", graft=folders / "base", verify=True, **options)
    precise = "e_score_correction_bias"
    _same(tmp_path / "out", {
        name: value if precise in name else changed(value) for name, value in _expected(folders).items()
    })  # fmt: skip


def test_workers_open_the_base_too(folders: Path, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        tx.convert(folders / "source", tmp_path / "out", to="hf", graft=folders / "base", on=pool, items=3)
    _same(tmp_path / "out", _expected(folders))
