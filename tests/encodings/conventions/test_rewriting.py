"""The config that is written says what is stored: read back here, and taken by the peers."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.quiet import quiet
from tests.some import some
from transaxle.encodings.conventions.buffer_group import group
from transaxle.encodings.conventions.convention import CONVENTIONS, PREFERRED
from transaxle.encodings.conventions.quantization import read
from transaxle.encodings.conventions.rewriting import rewrite_config
from transaxle.encodings.conventions.scheme import CHANNEL, SECTION
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4, EncodedTensor, Encoding, Role
from transaxle.errors import TransaxleError

Shape = tuple[int, ...]
Config = dict[str, Any]

LAYER = "model.layers.{}.{}.weight"
PARTS = (
    "self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.gate_proj", "mlp.experts.0.up_proj",
    "mlp.experts.1.up_proj",
)  # fmt: skip
NAMES = [
    *(LAYER.format(layer, part) for layer in (0, 1, 11) for part in PARTS),
    "lm_head.weight",
    "model.my_lm_head.weight",
]
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
SHAPE = (256, 384)

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@dataclass(frozen=True)
class Buffer:
    dtype: str
    shape: Shape


def one(
    name: str, encoding: Encoding, convention: str | None = None, *, without: Iterable[str] = ("input_scale",)
) -> EncodedTensor:
    key = convention or PREFERRED[encoding.name]
    parts = {role: to for role, to in CONVENTIONS[key].buffers(name, encoding).items() if role not in without}
    return EncodedTensor(name, encoding, SHAPE, parts, key)


def encoded(names: Iterable[str], encoding: Encoding, convention: str | None = None) -> dict[str, EncodedTensor]:
    return {name: one(name, encoding, convention) for name in names}


def plain(encoded_ones: Mapping[str, EncodedTensor]) -> dict[str, Shape]:
    return {**{name: SHAPE for name in [*NAMES, EMBED] if name not in encoded_ones}, NORM: (384,)}


def check(result: Mapping[str, Any], given_ones: Mapping[str, EncodedTensor], decoded: Iterable[str] = ()) -> None:
    """Read a config back: the same tensors are encoded, in the same way, and those decoded are not."""
    said = some(read(result))
    buffers = {}
    for each in given_ones.values():
        for role, name in each.parts.items():
            buffers[name] = Buffer(*CONVENTIONS[each.convention].presented(each.encoding, each.shape, role))
        assert said.encodings(each.name.rpartition(".")[0])
    found = group(buffers, said)
    assert found.refusals == ()
    assert found.encoded == given_ones
    for name in decoded:
        assert said.encodings(name.rpartition(".")[0]) == (), name


SECTIONS: list[tuple[Config, Encoding, str]] = [
    (FP8, FLOAT8_BLOCK, "deepseek"),
    ({**FP8, "modules_to_not_convert": ["lm_head", "gate"]}, FLOAT8_BLOCK, "deepseek"),
    ({"quant_method": "fp8", "weight_block_size": None, "ignored_layers": ["q_proj"]}, FLOAT8, "deepseek"),
    ({**FP8, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, MXFP8, "deepseek"),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, FLOAT8, "modelopt"),
    (OSS, MXFP4, "gpt_oss"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*gate"]}, NVFP4, "modelopt"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
      "ignore": ["lm_head", "re:.*mlp.gate$"], "config_groups": {"NVFP4A16": ["Linear"]}}, NVFP4, "compressed_tensors"),
    ({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["model.layers.0.self_attn.q_proj"],
      "kv_cache_scheme": {"num_bits": 8, "type": "float"}, "config_groups": {"group_0": {
          "targets": ["re:.*proj$"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
          "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
      }}}, CHANNEL, "compressed_tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "encoding", "convention"), SECTIONS)
@settings(max_examples=30)
@given(data=st.data())
def test_whatever_stays_encoded_or_is_decoded_is_read_back(
    section: Config, encoding: Encoding, convention: str, data: st.DataObject
) -> None:
    names = data.draw(st.sets(st.sampled_from(NAMES), min_size=1))
    ones = encoded(sorted(names), encoding, convention)
    decoded = data.draw(st.sets(st.sampled_from(NAMES))) - names
    config = {"model_type": "x", "dtype": "bfloat16", SECTION: section}
    before = copy.deepcopy(config)
    result = rewrite_config(config, ones, plain(ones), decoded=decoded)
    assert config == before
    check(result, ones, decoded)
    assert {key: value for key, value in result.items() if key != SECTION} == {"model_type": "x", "dtype": "bfloat16"}


@settings(max_examples=60)
@given(
    encoding=st.sampled_from([FLOAT8, CHANNEL, FLOAT8_BLOCK, MXFP8, MXFP4, NVFP4]),
    names=st.sets(st.sampled_from(NAMES), min_size=1),
)
def test_what_is_encoded_here_is_read_back(encoding: Encoding, names: set[str]) -> None:
    ones = encoded(sorted(names), encoding)
    result = rewrite_config({"model_type": "x"}, ones, plain(ones))
    check(result, ones, decoded=[name for name in NAMES if name not in names])


def test_a_config_that_is_true_stays_as_it_is() -> None:
    for section, encoding, convention in SECTIONS:
        said = some(read({SECTION: section}))
        names = [name for name in NAMES if said.encodings(name.rpartition(".")[0])]
        ones = encoded(names, encoding, convention)
        assert rewrite_config({SECTION: section}, ones, plain(ones)) == {SECTION: section}


def test_without_encoded_tensors_the_section_is_gone() -> None:
    config = {"torch_dtype": "float16", SECTION: FP8, "text_config": {"dtype": "bfloat16", SECTION: FP8, "a": 1}}
    result = rewrite_config(config, {}, {}, decoded=NAMES, dtype="F32")
    assert result == {"torch_dtype": "float32", "text_config": {"dtype": "float32", "a": 1}}
    assert rewrite_config({"dtype": "bfloat16"}, {}, {}) == {"dtype": "bfloat16"}
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    assert rewrite_config(own, {}, {}) == {"producer": {"name": "modelopt"}}


def test_a_section_stays_where_it_was() -> None:
    ones = encoded([LAYER.format(0, "mlp.gate_proj")], FLOAT8_BLOCK)
    inside = rewrite_config({"text_config": {SECTION: FP8}}, ones, plain(ones), decoded=["lm_head.weight"])
    assert inside == {"text_config": {SECTION: {**FP8, "modules_to_not_convert": ["lm_head"]}}} or SECTION not in inside
    check(inside, ones, ["lm_head.weight"])
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    ones = encoded([LAYER.format(0, "mlp.gate_proj")], NVFP4, "modelopt")
    result = rewrite_config(own, ones, plain(ones), decoded=[LAYER.format(1, "mlp.gate")])
    assert result["quantization"]["exclude_modules"] == ["lm_head", "model.layers.1.mlp.gate"]
    assert rewrite_config({"model_type": "x"}, ones, plain(ones), elsewhere=True) == {"model_type": "x"}


def test_an_entry_that_hits_what_is_encoded_gives_way_to_names() -> None:
    ones = encoded([LAYER.format(0, "self_attn.q_proj")], FLOAT8_BLOCK)
    section = {**FP8, "modules_to_not_convert": ["q_proj", "model.layers.1"]}
    result = rewrite_config({SECTION: section}, ones, plain(ones))
    assert result[SECTION]["modules_to_not_convert"] == ["model.layers.1", "model.layers.11.self_attn.q_proj"]


def test_a_name_that_is_another_ones_end_is_listed_so_that_it_hits_no_other() -> None:
    ones = encoded(["model.my_lm_head.weight"], FLOAT8_BLOCK)
    result = rewrite_config({}, ones, {"lm_head.weight": SHAPE})
    assert result[SECTION]["modules_to_not_convert"] == ["^lm_head$"]
    check(result, ones, ["lm_head.weight"])


def test_modules_around_encoded_ones_are_not_listed() -> None:
    """They have parameters of their own; listed, they would stand for all that is inside them, and no name for all."""
    ones = encoded(["vision.layers.0.fc.weight"], FLOAT8_BLOCK)
    left = {"queries": SHAPE, "vision.positions": SHAPE, "model.vision.positions": SHAPE, "vision.patch.weight": SHAPE}
    result = rewrite_config({}, ones, left, in_memory=["model.vision.layers.0.fc.weight"])
    assert result[SECTION]["modules_to_not_convert"] == ["vision.patch"]


def test_the_experts_of_a_layer_are_listed_together() -> None:
    experts = {f"model.layers.{layer}.mlp.experts.{n}.up_proj.weight": SHAPE for layer in (0, 1) for n in range(4)}
    ones = encoded(["model.layers.1.mlp.experts.2.up_proj.weight"], FLOAT8_BLOCK)
    left = {name: shape for name, shape in experts.items() if name not in ones}
    others = [f"model.layers.1.mlp.experts.{n}.up_proj" for n in (0, 1, 3)]
    assert rewrite_config({}, ones, left)[SECTION]["modules_to_not_convert"] == ["model.layers.0.mlp.experts", *others]
    ones = encoded(ones, NVFP4)
    result = rewrite_config({}, ones, left)
    assert result[SECTION]["ignore"] == [r"re:model\.layers\.0\.mlp\.experts\..*", *others]
    check(result, ones, left)


def test_names_that_a_conversion_has_changed() -> None:
    """A list in the words of another dialect no longer says anything: all that is plain is listed by name."""
    ones = encoded(["layers.0.attention.wq.weight"], FLOAT8_BLOCK)
    section = {**FP8, "modules_to_not_convert": ["model.layers.0.mlp.gate", "lm_head"]}
    left = {"layers.0.moe.router.weight": SHAPE, "output.weight": SHAPE, "norm.weight": (4,)}
    result = rewrite_config({SECTION: section}, ones, left)
    assert result[SECTION]["modules_to_not_convert"][2:] == ["layers.0.moe.router", "output"]
    for entry in ("model.layers.0.mlp.gate", "gate", "model.layers.0.mlp", r"^model\..*gate$"):
        section = {**FP8, "modules_to_not_convert": [entry, "lm_head"]}
        shapes = {"layers.0.moe.router.weight": SHAPE}
        result = rewrite_config({SECTION: section}, ones, shapes, renamed=["model.layers.0.mlp.gate.weight"])
        assert result[SECTION]["modules_to_not_convert"] == ["lm_head", "layers.0.moe.router"], "a tied head is plain"


@pytest.mark.parametrize(("section", "key"), [
    (FP8, "modules_to_not_convert"),
    ({**FP8, "modules_to_not_convert": None}, "ignored_layers"),
    (SECTIONS[-1][0], "ignore"),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "exclude_modules"),
])  # fmt: skip
def test_a_list_names_a_module_in_its_new_words_beside_those_of_memory(section: Config, key: str) -> None:
    """A reader of a hub's files asks under the names of its model, another one under those of the files."""
    listed = {**section, key: ["lm_head", "model.layers.0.mlp.gate"]}
    convention = {"fp8": "deepseek"}.get(section["quant_method"], section["quant_method"].replace("-", "_"))
    encoding = CHANNEL if convention == "compressed_tensors" else FLOAT8_BLOCK
    ones = encoded(["model.layers.0.block_sparse_moe.experts.0.w1.weight"], encoding, convention)
    gates = {f"model.layers.0.{name}.gate.weight": SHAPE for name in ("mlp", "block_sparse_moe")}
    result = rewrite_config({SECTION: listed}, ones, gates, renamed=["model.layers.0.mlp.gate.weight"])
    new = result[SECTION][key]
    assert new == ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.block_sparse_moe.gate"]


def test_groups_whose_targets_no_longer_match_name_their_modules() -> None:
    section = SECTIONS[-1][0]
    ones = encoded(["layers.0.attention.wq.weight"], CHANNEL, "compressed_tensors")
    result = rewrite_config({SECTION: section}, ones, {"output.weight": SHAPE})[SECTION]
    assert result["config_groups"]["group_0"]["targets"] == ["layers.0.attention.wq"]
    activations = section["config_groups"]["group_0"]["input_activations"]
    assert result["config_groups"]["group_0"]["input_activations"] == activations
    assert result["kv_cache_scheme"] == section["kv_cache_scheme"]


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ATTENTION = {"targets": ["LlamaAttention"], "input_activations": CACHE}


def test_what_is_no_matter_of_weights_stays_where_all_are_decoded() -> None:
    """The cache's numbers and those of attention; in the words of the method, which says nothing of weights then."""
    section = SECTIONS[-1][0]
    groups = {**section["config_groups"], "attention": ATTENTION}
    result = rewrite_config({SECTION: {**section, "config_groups": groups}}, {}, plain({}), decoded=NAMES)[SECTION]
    assert result == {**section, "config_groups": {"attention": ATTENTION}, "format": "dense"}
    outputs = {**section["config_groups"]["group_0"], "output_activations": CACHE}
    result = rewrite_config({SECTION: {**section, "config_groups": {"group_0": outputs}}}, {}, {})[SECTION]
    of_outputs = {"targets": outputs["targets"], "output_activations": CACHE}
    none = dict.fromkeys(("weights", "input_activations", "format"))
    assert result["config_groups"] == {"group_0": {**of_outputs, **none}}
    for key, value in {"kv_cache_scheme": CACHE, "kv_cache_quant_algo": "FP8"}.items():
        modelopt = {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, key: value, "ignore": ["lm_head"],
        }  # fmt: skip
        result = rewrite_config({SECTION: modelopt}, {}, plain({}), decoded=NAMES)[SECTION]
        assert result == {"quant_method": "modelopt", "quant_algo": None, key: value, "ignore": ["lm_head"]}
        again = some(read({SECTION: result}))
        assert again.encodings("model.layers.0.self_attn.q_proj") == ()
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    assert rewrite_config(own, {}, {})["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    for method in ({**FP8, "kv_cache_scheme": None}, {"quant_method": "modelopt", "quant_algo": "FP8"}):
        assert SECTION not in rewrite_config({SECTION: method}, {}, {})


def test_where_a_method_cannot_speak_of_the_cache_alone_decoding_everything_is_refused() -> None:
    section = {**FP8, "kv_cache_scheme": "static"}
    with pytest.raises(TransaxleError, match=r"quantization_config\.kv_cache_scheme cannot be kept") as caught:
        rewrite_config({SECTION: section}, {}, plain({}), decoded=NAMES)
    assert caught.value.code == "UNSUPPORTED"
    ones = encoded(NAMES[:1], FLOAT8_BLOCK)
    result = rewrite_config({SECTION: section}, ones, plain(ones), decoded=NAMES[1:3])
    assert result[SECTION]["kv_cache_scheme"] == "static"


def test_weights_that_are_encoded_beside_a_section_of_the_cache_alone() -> None:
    section = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {"group_0": ATTENTION},
        "kv_cache_scheme": CACHE,
    }
    ones = encoded(NAMES[:3], NVFP4)
    result = rewrite_config({SECTION: section}, ones, plain(ones))
    check(result, ones)
    assert result[SECTION]["kv_cache_scheme"] == CACHE
    assert ATTENTION in result[SECTION]["config_groups"].values()
    with pytest.raises(TransaxleError, match="cannot also say that some are fp8"):
        rewrite_config({SECTION: section}, encoded(NAMES[:3], FLOAT8_BLOCK), {})


def test_a_second_encoding_beside_that_of_the_config() -> None:
    """Codes of another width are told from their dtypes when they are read, so the groups must say it by themselves."""
    first, second = encoded(NAMES[:3], NVFP4), encoded(NAMES[3:6], MXFP8)
    before = rewrite_config({}, first, plain(first))
    result = rewrite_config(before, {**first, **second}, plain({**first, **second}))
    check(result, {**first, **second}, [EMBED])
    groups = result[SECTION]["config_groups"].values()
    assert [group["format"] for group in groups] == ["nvfp4-pack-quantized", "mxfp8-quantized"]
    assert [len(group["targets"]) for group in groups] == [3, 3]


def test_an_entry_for_a_module_that_is_now_around_encoded_ones_is_dropped() -> None:
    experts = "model.layers.0.mlp.experts"
    before = rewrite_config({}, encoded(NAMES[:1], NVFP4), {f"{experts}.gate_up_proj": (2, 4, 4)})
    assert before[SECTION]["ignore"] == [experts]
    ones = encoded([*NAMES[:1], f"{experts}.0.up_proj.weight"], NVFP4)
    assert not rewrite_config(before, ones, {}, in_memory=[f"{experts}.up_proj"])[SECTION]["ignore"]


def test_several_encodings_in_one_config() -> None:
    ones = {**encoded(NAMES[:3], NVFP4), **encoded(NAMES[3:6], MXFP8), **encoded(NAMES[6:8], CHANNEL)}
    result = rewrite_config({}, ones, plain(ones))
    check(result, ones, [EMBED])
    assert result[SECTION]["format"] == "mixed-precision"
    mixed = {**encoded(NAMES[:3], NVFP4, "modelopt"), **encoded(NAMES[3:6], FLOAT8, "modelopt")}
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    check(rewrite_config({SECTION: section}, mixed, plain(mixed)), mixed)


@pytest.mark.parametrize(("ones", "words"), [
    ({**encoded(NAMES[:1], FLOAT8_BLOCK), **encoded(NAMES[1:2], NVFP4)}, "compressed_tensors and deepseek"),
    ({**encoded(NAMES[:1], FLOAT8_BLOCK), **encoded(NAMES[1:2], MXFP8, "deepseek")},
     "of the method fp8 cannot describe"),
    (encoded(NAMES[:1], CHANNEL, "deepseek"), "of the method fp8 cannot describe"),
    (encoded(NAMES[:1], replace(NVFP4, tile=(1, 8)), "compressed_tensors"), "cannot describe"),
    (encoded(NAMES[:1], NVFP4, "torchao"), "can be read, but not written"),
])  # fmt: skip
@pytest.mark.parametrize("config", [{}, {SECTION: FP8}])
def test_what_one_config_cannot_say_is_refused(ones: dict[str, EncodedTensor], words: str, config: Config) -> None:
    with pytest.raises(TransaxleError, match=words) as caught:
        rewrite_config(config, ones, plain(ones))
    assert caught.value.code == "UNSUPPORTED"


def test_a_module_of_which_a_part_is_decoded_is_refused() -> None:
    names = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]
    ones = encoded(names[:1], FLOAT8_BLOCK)
    with pytest.raises(TransaxleError, match="stay encoded") as caught:
        rewrite_config({SECTION: FP8}, ones, {names[1]: (4, 8, 8)}, decoded=names[1:])
    assert (caught.value.code, caught.value.where.tensor) == ("UNSUPPORTED", names[1])


def test_long_lists_of_a_large_model_take_seconds() -> None:
    """35,000 encoded tensors and a list of 183 modules; 1 s on an idle machine."""
    parts = [f"mlp.experts.{expert}.{name}_proj" for expert in range(192) for name in ("gate", "up", "down")]
    ones = encoded([LAYER.format(layer, part) for layer in range(61) for part in parts], FLOAT8_BLOCK)
    listed = [f"model.layers.{layer}.{part}" for layer in range(61) for part in ("mlp.gate", "eh_proj", "shared_head")]
    left = {f"{module}.weight": SHAPE for module in listed}
    began = time.process_time()
    config = {SECTION: {**FP8, "modules_to_not_convert": listed}}
    result = rewrite_config(config, ones, left, decoded=["lm_head.weight"])
    assert time.process_time() - began < 8
    assert result[SECTION]["modules_to_not_convert"] == [*listed, "lm_head"]


def test_what_is_said_of_scales() -> None:
    """Whether those of inputs are static, and whether those of weights are exponents."""
    static = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    both = one(NAMES[0], FLOAT8, "deepseek", without=())
    result = rewrite_config({SECTION: static}, {NAMES[0]: both}, {})
    assert result[SECTION]["activation_scheme"] == "static"
    result = rewrite_config({SECTION: static}, encoded(NAMES[:1], FLOAT8, "deepseek"), {})
    assert result[SECTION]["activation_scheme"] == "dynamic"
    ones = encoded(NAMES[:1], replace(FLOAT8_BLOCK, scale="F8_E8M0"))
    assert rewrite_config({}, ones, {})[SECTION]["scale_fmt"] == "ue8m0"


# The peers take it.

CHOSEN = [name for name in NAMES if "experts.0" in name or "gate_proj" in name]


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("encoding", "block"), [(FLOAT8_BLOCK, [128, 128]), (MXFP8, [1, 32]), (FLOAT8, None)])
def test_transformers_takes_fp8(encoding: Encoding, block: list[int] | None) -> None:
    with quiet():
        from transformers import FineGrainedFP8Config
        from transformers.quantizers.quantizers_utils import should_convert_module
    ones = encoded(CHOSEN, encoding, "deepseek")
    section = rewrite_config({}, ones, plain(ones))[SECTION]
    with quiet():
        config = FineGrainedFP8Config.from_dict(section)
    assert config.weight_block_size == block
    for name in [*NAMES, EMBED]:
        module = name.removesuffix(".weight")
        assert should_convert_module(module, config.modules_to_not_convert) == (name in ones), module


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_transformers_takes_mxfp4() -> None:
    with quiet():
        from transformers import Mxfp4Config
        from transformers.quantizers.quantizers_utils import should_convert_module
    names = [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in ("gate_up_proj", "down_proj")]
    ones = {name: msgspec.structs.replace(one(name, MXFP4), shape=(2, 64, 64)) for name in names[:2]}
    left = dict.fromkeys(names[2:], (2, 64, 64)) | {f"{name}_bias": (2, 64) for name in names}
    for config in ({}, {SECTION: OSS}):
        section = rewrite_config(config, ones, left, decoded=names[2:])[SECTION]
        with quiet():
            said = Mxfp4Config.from_dict(section)
        for n, converted in enumerate((True, False)):
            assert should_convert_module(f"model.layers.{n}.mlp.experts", said.modules_to_not_convert) is converted


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", [(NVFP4,), (MXFP8,), (MXFP4,), (FLOAT8,), (CHANNEL,), (NVFP4, MXFP8, CHANNEL)])
def test_compressed_tensors_takes_its_own(kinds: tuple[Encoding, ...]) -> None:
    """It validates the config, gives each module of a model the scheme of its weight, and none to the others."""
    ones: dict[str, EncodedTensor] = {}
    for number, kind in enumerate(kinds):
        ones |= encoded(CHOSEN[number :: len(kinds)], kind, "compressed_tensors")
    section = rewrite_config({}, ones, plain(ones))[SECTION]
    with quiet():
        import torch
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
        from transformers.utils.quantization_config import CompressedTensorsConfig

        assert CompressedTensorsConfig.from_dict(dict(section)).quantization_config is not None
        model = torch.nn.Module()
        for name in NAMES:
            place = model
            *outer, last = name.removesuffix(".weight").split(".")
            for segment in outer:
                if not hasattr(place, segment):
                    place.add_module(segment, torch.nn.Module())
                place = getattr(place, segment)
            place.add_module(last, torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False))
        apply_quantization_config(model, QuantizationConfig.model_validate(section))
        for name in NAMES:
            module = model.get_submodule(name.removesuffix(".weight"))
            scheme = getattr(module, "quantization_scheme", None)
            assert (scheme is not None) == (name in ones), name
            if scheme is not None:
                kind = ones[name].encoding
                assert scheme.weights.num_bits == kind.code_bits
                packed = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}
                inferred = infer_module_format(torch.nn.Linear, scheme).value
                assert inferred == packed.get(kind.name, "naive-quantized")
                shape = CONVENTIONS["compressed_tensors"].presented(kind, SHAPE, Role.SCALE)[1]
                assert shape == tuple(module.get_parameter("weight_scale").shape)
