"""What configs say of quantization is read as their own readers do, and refused by code where it is malformed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.quiet import quiet
from tests.some import some
from transaxle.encodings.conventions.quantization import CONFIG, MODELOPT_CONFIG, read
from transaxle.encodings.conventions.scheme import CHANNEL, METHODS, SECTION
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4, WHOLE, Encoding
from transaxle.errors import TransaxleError

Q = "model.layers.0.self_attn.q_proj"
BLOCK_64 = replace(FLOAT8_BLOCK, tile=(64, 64))
FP8 = {"quant_method": "fp8"}
CT = {"quant_method": "compressed-tensors", "format": "float-quantized"}
INT = {"num_bits": 4, "type": "int"}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def grouped(weights: Mapping[str, Any], *targets: str, **rest: Any) -> dict[str, Any]:
    """A section of compressed-tensors with one group."""
    return {**CT, "config_groups": {"group_0": {"targets": [*(targets or ["Linear"])], "weights": weights}}, **rest}


def encodings(section: Mapping[str, Any], module: str = Q) -> tuple[Encoding, ...]:
    found = some(read({SECTION: section}))
    return found.encodings(module)


def test_nothing_said() -> None:
    assert read({}) is None
    assert read(None) is None
    assert read({"model_type": "llama", SECTION: None}) is None


@pytest.mark.parametrize(("section", "expected"), [
    (FP8, FLOAT8_BLOCK),
    ({**FP8, "weight_block_size": [64, 64], "activation_scheme": "Dynamic", "fmt": "e4m3"}, BLOCK_64),
    ({**FP8, "weight_block_size": None}, FLOAT8),
    ({**FP8, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, MXFP8),
    ({**FP8, "scale_fmt": "ue8m0"}, FLOAT8_BLOCK),
    ({"quant_method": "mxfp4"}, MXFP4),
    (MODELOPT, NVFP4),
    ({**MODELOPT, "quant_algo": "FP8"}, FLOAT8),
    ({**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, CHANNEL),
    ({**MODELOPT, "quant_algo": "FP8_PB_WO"}, FLOAT8_BLOCK),
    ({**MODELOPT, "quant_algo": "MXFP8"}, MXFP8),
    (grouped(WEIGHTS), FLOAT8),
    (grouped({"num_bits": 8, "type": "float"}), FLOAT8),
    (grouped({"num_bits": 8, "type": "float", "group_size": -1}), CHANNEL),
    (grouped({**WEIGHTS, "strategy": "channel"}), CHANNEL),
    (grouped({**WEIGHTS, "strategy": "block", "block_structure": "128x128"}), FLOAT8_BLOCK),
    (grouped({**WEIGHTS, "strategy": "group", "group_size": 128}), replace(FLOAT8_BLOCK, tile=(1, 128))),
    ({**CT, "config_groups": {"nvfp4": ["Linear"]}, "format": "nvfp4-pack-quantized"}, NVFP4),
])  # fmt: skip
def test_what_each_method_says(section: Mapping[str, Any], expected: Encoding) -> None:
    assert encodings(section) == (expected,)


def test_where_the_section_may_be() -> None:
    for key in ("text_config", "llm_config", "language_config"):
        found = some(read({key: {SECTION: FP8}}))
        assert found.paths == ((key, SECTION),)
    old = read({"compression_config": {key: value for key, value in grouped(WEIGHTS).items() if key != "quant_method"}})
    assert some(old).method == "compressed-tensors"
    twice = some(read({SECTION: FP8, "text_config": {SECTION: dict(FP8)}}))
    assert len(twice.paths) == 2


def test_modelopt_has_a_file_of_its_own() -> None:
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    found = some(read({"model_type": "llama"}, modelopt=own))
    assert (found.method, found.file) == ("modelopt", MODELOPT_CONFIG)
    assert found.encodings(Q) == (FLOAT8,)
    assert found.encodings("lm_head") == ()
    before = some(read({SECTION: FP8}, modelopt=own))
    assert before.method == "fp8"
    assert read({"quantization": {"quant_algo": "FP8"}}) is None


def test_a_model_of_several_precisions() -> None:
    layers = {Q: {"quant_algo": "FP8"}, "model.layers.*.mlp.*": {"quant_algo": "NVFP4", "group_size": 16}}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert encodings(section) == (FLOAT8,)
    assert encodings(section, "model.layers.7.mlp.up_proj") == (NVFP4,)
    assert encodings(section, "model.layers.7.other") == ()


def test_groups_claim_modules_by_name_before_they_do_by_class() -> None:
    groups = {
        "classes": {"targets": ["Linear"], "weights": WEIGHTS},
        "names": {"targets": ["re:.*q_proj$", "lm_head"], "weights": {**WEIGHTS, "strategy": "channel"}},
        "none": {"targets": ["re:.*k_proj$"], "weights": None},
    }
    section = {**CT, "config_groups": groups, "ignore": ["re:.*vision.*", "model.layers.0.mlp.gate"]}
    assert encodings(section) == encodings(section, "lm_head") == (CHANNEL,)
    assert encodings(section, "model.layers.0.mlp.up_proj") == (FLOAT8,)
    assert encodings(section, "model.layers.0.mlp.gate") == encodings(section, "vision.q_proj") == ()


@pytest.mark.parametrize("word", ["dense", "fakequant"])
def test_weights_that_are_stored_plain(word: str) -> None:
    found = some(read({SECTION: grouped(WEIGHTS, format=word)}))
    assert (found.conventions, found.encodings(Q)) == ((), ())


@pytest.mark.parametrize(("section", "code", "words"), [
    ([], "CORRUPT", "is not a JSON object"),
    ({}, "UNSUPPORTED", f"is missing; known: {', '.join(METHODS)}"),
    ({"quant_method": "hqq", "bits": 4}, "UNSUPPORTED", "is 'hqq'"),
    ({"quant_method": ["fp8"]}, "UNSUPPORTED", "known: fp8"),
    ({**FP8, "weight_block_size": "128"}, "CORRUPT", r"weight_block_size"),
    ({**FP8, "weight_block_size": [0, 128]}, "CORRUPT", ">= 1"),
    ({**FP8, "weight_block_size": [128, True]}, "CORRUPT", "weight_block_size"),
    ({**FP8, "modules_to_not_convert": "lm_head"}, "CORRUPT", "modules_to_not_convert"),
    ({**FP8, "modules_to_not_convert": [1]}, "CORRUPT", "modules_to_not_convert"),
    ({**FP8, "modules_to_not_convert": ["(a"]}, "UNSUPPORTED", r"missing \)"),
    ({**FP8, "scale_fmt": "e5m2"}, "UNSUPPORTED", "scale_fmt is 'e5m2'; known: float, ue8m0"),
    ({**FP8, "activation_scheme": "none"}, "UNSUPPORTED", "known: dynamic, static"),
    ({**FP8, "expert_dtype": "fp6"}, "UNSUPPORTED", "expert_dtype is 'fp6'"),
    ({**FP8, "fmt": "e5m2"}, "UNSUPPORTED", "fmt is 'e5m2'"),
    ({"quant_method": "torchao", "modules_to_not_convert": {}}, "CORRUPT", "modules_to_not_convert"),
    (CT, "CORRUPT", "config_groups"),
    ({**CT, "config_groups": {"group_0": {"weights": WEIGHTS}}}, "CORRUPT", "targets"),
    ({**CT, "config_groups": {"W3A16": ["Linear"]}}, "UNSUPPORTED", "config_groups.W3A16 is 'W3A16'"),
    (grouped({**WEIGHTS, "type": "int", "num_bits": 6}), "UNSUPPORTED", "is 'int6'; known: float8, float4, int4, int8"),
    (grouped({**WEIGHTS, "type": "int", "strategy": "channel"}), "CORRUPT", "stores codes of U8"),
    (grouped({**INT, "strategy": "group", "group_size": 0}, format="pack-quantized"), "CORRUPT", "group_size is 0"),
    (grouped({**INT, "strategy": "tensor"}, format="pack-quantized"), "UNSUPPORTED", "strategy of the format"),
    (grouped({**INT, "actorder": "group", "group_size": 32}, format="pack-quantized"), "UNSUPPORTED", "actorder"),
    (grouped({**WEIGHTS, "num_bits": "8"}), "CORRUPT", "num_bits"),
    (grouped({**WEIGHTS, "symmetric": False}), "UNSUPPORTED", "symmetric False"),
    (grouped({**WEIGHTS, "dynamic": True}), "UNSUPPORTED", "dynamic True"),
    (grouped({**WEIGHTS, "strategy": "token"}), "UNSUPPORTED", "strategy is 'token'"),
    (grouped({**WEIGHTS, "strategy": "group"}), "CORRUPT", "group_size is None"),
    (grouped({**WEIGHTS, "strategy": "block"}), "CORRUPT", "block_structure is None"),
    (grouped({**WEIGHTS, "strategy": "block", "block_structure": "ax²"}), "CORRUPT", "two positive numbers"),
    (grouped({"num_bits": 4, "type": "float", "strategy": "tensor"}), "UNSUPPORTED", "strategy is 'tensor'"),
    (grouped({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 64}, format="mixed-precision"),
     "UNSUPPORTED", "group_size is 64"),
    (grouped(WEIGHTS, format="nvfp4-pack-quantized"), "CORRUPT", "stores codes of F8_E4M3"),
    (grouped(WEIGHTS, format="pack-quantized"), "CORRUPT", "stores codes of F8_E4M3"),
    (grouped(WEIGHTS, format="marlin-24"), "UNSUPPORTED", "format is 'marlin-24'"),
    (grouped(WEIGHTS, sparsity_config={"format": "sparse-24-bitmask"}), "UNSUPPORTED", "sparse-24-bitmask"),
    (grouped(WEIGHTS, "re:(?!a)"), "UNSUPPORTED", "is not supported"),
    (grouped(WEIGHTS, ignore=["re:a**"]), "UNSUPPORTED", "repetition"),
    ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "UNSUPPORTED", "quant_algo is 'W4A8_AWQ'"),
    ({**MODELOPT, "quant_algo": 3}, "CORRUPT", "quant_algo"),
    ({**MODELOPT, "group_size": 32}, "UNSUPPORTED", "group_size is 32; known: 16"),
    ({**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT8_SQ"}}},
     "UNSUPPORTED", "quantized_layers.a.quant_algo is 'INT8_SQ'"),
    ({**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}}, "CORRUPT", "quantized_layers"),
])  # fmt: skip
def test_malformed_and_unknown_sections_are_refused(section: Any, code: str, words: str) -> None:
    with pytest.raises(TransaxleError, match=words) as caught:
        read({SECTION: section})
    assert caught.value.code == code
    assert caught.value.where.file == CONFIG


TRANSFORMS = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
MIXED = {**MODELOPT, "quant_algo": "MIXED_PRECISION"}
NOT_KNOWN: list[tuple[dict[str, Any], list[str]]] = [
    (grouped(WEIGHTS, transform_config=TRANSFORMS), ["transform_config"]),
    (grouped(WEIGHTS, transform_config={"config_groups": {}, "scale": 0}), ["transform_config"]),
    (grouped(WEIGHTS, moe_sparsity_config={"0": 4}, outliers=True), ["moe_sparsity_config", "outliers"]),
    (grouped({**WEIGHTS, "offset": 1}), ["config_groups.group_0.weights.offset"]),
    (grouped({**WEIGHTS, "actorder": "group"}), ["config_groups.group_0.weights.actorder"]),
    ({**CT, "config_groups": {"a": {"targets": ["Linear"], "weights": WEIGHTS, "rotate": 1}}},
     ["config_groups.a.rotate"]),
    ({**FP8, "weight_rotation": "hadamard", "smooth": 0.5}, ["weight_rotation", "smooth"]),
    ({**FP8, "modules_to_convert": ["embed_tokens"]}, ["modules_to_convert"]),
    ({"quant_method": "mxfp4", "block_rotation": True}, ["block_rotation"]),
    ({"quant_method": "torchao", "awq": {"scales": 1}}, ["awq"]),
    ({**MODELOPT, "pre_quant_scale": True}, ["pre_quant_scale"]),
    ({**MODELOPT, "has_zero_point": True}, ["has_zero_point"]),
    ({**MODELOPT, "smoothquant_val": 0.5}, ["smoothquant_val"]),
    ({**MIXED, "quantized_layers": {Q: {"quant_algo": "FP8", "pre_quant_scale": True}}},
     [f"quantized_layers.{Q}.pre_quant_scale"]),
    ({**MIXED, "quantized_layers": {Q: {"quant_algo": "FP8", "lora": 8}}}, [f"quantized_layers.{Q}.lora"]),
]  # fmt: skip


@pytest.mark.parametrize(("section", "keys"), NOT_KNOWN, ids=[", ".join(keys) for _, keys in NOT_KNOWN])
def test_what_a_section_says_beside_codes_and_scales_is_known_or_refused(
    section: dict[str, Any], keys: list[str]
) -> None:
    """By the name of each key; in ModelOpt's own file too, also where config.json has a section."""
    with pytest.raises(TransaxleError) as caught:
        read({SECTION: section})
    messages = [each.message for each in caught.value.refusals]
    assert [message.split()[0] for message in messages] == [f"{SECTION}.{key}" for key in keys]
    assert {each.code for each in caught.value.refusals} == {"UNSUPPORTED"}
    if section["quant_method"] == "modelopt":
        own = {"producer": {"name": "modelopt"}, "quantization": section}
        for config in ({}, {SECTION: FP8}):
            with pytest.raises(TransaxleError, match=f"quantization.{keys[0]}") as caught:
                read(config, modelopt=own)
            assert caught.value.where.file == MODELOPT_CONFIG


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [None, [], {}, {"config_groups": {}}, {"a": [None, {}]}])
def test_a_key_that_says_nothing_needs_not_be_known(method: str, value: Any) -> None:
    needed: dict[str, dict[str, Any]] = {"compressed-tensors": {**CT, "config_groups": {}}, "modelopt": MODELOPT}
    section = {"quant_method": method, **needed.get(method, {}), "anything": value}
    assert read({SECTION: section}) is not None


@pytest.mark.peers
def test_all_that_peers_write_of_floating_point_codes_is_known() -> None:
    """Their own classes, with what each says by itself, and with caches and activations."""
    with quiet():
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
        from torchao.quantization import Float8WeightOnlyConfig
        from transformers import CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config, TorchAoConfig

        cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        said = {"format": "mixed-precision", "kv_cache_scheme": cache, "ignore": ["lm_head"]}
        dumped = [QuantizationConfig(config_groups={name: ["Linear"]}, **said) for name in PRESETS]
        given = {"config_groups": {"FP8": ["Linear"]}, "format": "float-quantized", "kv_cache_scheme": cache}
        sections = [
            FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict(),
            FineGrainedFP8Config(weight_block_size=None, activation_scheme="static", dequantize=True).to_dict(),
            Mxfp4Config(modules_to_not_convert=["lm_head"]).to_dict(),
            TorchAoConfig(Float8WeightOnlyConfig()).to_dict(),
            CompressedTensorsConfig(**given).to_dict(),
            *(each.model_dump(mode="json") for each in dumped),
        ]
    assert set(PRESETS) <= set(PRESET_SCHEMES)
    for section in sections:
        assert read({SECTION: section}) is not None


def test_two_sections_that_differ_are_refused() -> None:
    words = r"quantization_config and text_config\.quantization_config differ"
    with pytest.raises(TransaxleError, match=words) as caught:
        read({SECTION: FP8, "text_config": {SECTION: {**FP8, "weight_block_size": [64, 64]}}})
    assert caught.value.code == "CORRUPT"


def test_a_list_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transaxle.encodings.conventions.linear_regex._MOST_SECONDS", 0.1)
    heavy = "re:(" + "|".join(f".{{{n}}}x" for n in range(80)) + ")*y"
    found = some(read({SECTION: grouped(WEIGHTS, ignore=[heavy])}))
    with pytest.raises(TransaxleError, match="takes too long") as caught:
        [found.encodings(f"{number * 7919:020b}".replace("1", "x") * 40) for number in range(100_000)]
    assert (caught.value.code, caught.value.where.file) == ("UNSUPPORTED", CONFIG)


PRESETS = [
    "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP4XFP8", "MXFP8", "MXFP8A16",
    "W4A16", "W4A16_ASYM", "W4A8", "W4AFP8", "W4A4", "W8A16", "W8A8", "INT8",
]  # fmt: skip


@pytest.mark.peers
def test_presets_are_those_of_compressed_tensors() -> None:
    """A preset named in a config and the same written out say the same; those of other codes are refused."""
    with quiet():
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    for name in PRESET_SCHEMES:
        section = {**CT, "format": "mixed-precision", "config_groups": {name: ["Linear"]}}
        with quiet():
            config = QuantizationConfig(config_groups={name: ["Linear"]}, format="mixed-precision")
            dumped = config.model_dump(mode="json")
        if name in PRESETS:
            assert encodings(section) == encodings(dumped), name
        elif name != "UNQUANTIZED":
            for each in (section, dumped):
                with pytest.raises(TransaxleError):
                    read({SECTION: each})
    assert set(PRESETS) <= set(PRESET_SCHEMES)


@pytest.mark.peers
def test_what_compressed_tensors_infers_is_inferred() -> None:
    with quiet():
        from compressed_tensors.quantization import QuantizationArgs
    for said in ({}, {"group_size": 64}, {"group_size": -1}):
        with quiet():
            strategy = QuantizationArgs(num_bits=8, type="float", **said).strategy
        weights = {"num_bits": 8, "type": "float", **said}
        assert encodings(grouped(weights)) == encodings(grouped({**weights, "strategy": str(strategy.value)}))
    assert encodings(grouped({**WEIGHTS, "strategy": "channel"}))[0].tile == (1, WHOLE)


KEYS = [
    *["quant_method", "weight_block_size", "modules_to_not_convert", "ignored_layers", "scale_fmt", "config_groups"],
    *["group_0", "targets", "weights", "num_bits", "type", "strategy", "group_size", "block_structure", "ignore"],
    *["format", "quant_algo", "quantized_layers", "exclude_modules", "sparsity_config", "quantization_config"],
    *["text_config", "compression_config", "producer", "quantization"],
]
WORDS = [
    *METHODS,
    *["float", "block", "group", "FP8", "NVFP4", "MIXED_PRECISION", "re:.*", "re:(", "*", "float-quantized"],
]
leaves = st.one_of(st.none(), st.booleans(), st.integers(-2, 200), st.sampled_from(WORDS), st.text(max_size=3))
documents = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner)),
    max_leaves=25,
)


@settings(max_examples=200)
@given(st.one_of(st.dictionaries(st.sampled_from(KEYS), documents), documents.map(lambda said: {SECTION: said})))
def test_any_config_is_read_or_refused(config: dict[str, Any]) -> None:
    try:
        found = read(config)
    except TransaxleError as error:
        codes = {refusal.code for refusal in error.refusals}
    else:
        codes = set()
        assert found is None or isinstance(found.encodings(Q), tuple)
    assert codes <= {"CORRUPT", "UNSUPPORTED"}
