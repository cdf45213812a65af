"""Which stored tensors belong together: by name, type, shape and config; what is almost so is refused."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transaxle.encodings.conventions.buffer_group import BufferGroups, group
from transaxle.encodings.conventions.convention import CONVENTIONS
from transaxle.encodings.conventions.quantization import read
from transaxle.encodings.conventions.scheme import CHANNEL, SECTION
from transaxle.encodings.conventions.torchao_convention import NAMES
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4, WHOLE, Encoding, Role

Shape = tuple[int, ...]
W = "model.layers.0.mlp.up_proj.weight"
E = "model.layers.0.mlp.experts.gate_up_proj"
BARE = "model.layers.0.mlp.up_proj"


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: Shape


Entries = dict[str, Entry]


def entries(**given: tuple[str, Shape]) -> Entries:
    """Entries of the module BARE, by their last segments."""
    return {f"{BARE}.{name}": Entry(*entry) for name, entry in given.items()}


def grouped(
    section: Mapping[str, Any] | None, found: Entries, metadata: Mapping[str, str] | None = None
) -> BufferGroups:
    return group(found, read({SECTION: section}) if section else None, metadata)


def only(found: BufferGroups) -> tuple[str, Encoding, Shape]:
    assert found.refusals == ()
    ((name, one),) = found.encoded.items()
    assert name == one.name
    return name, one.encoding, one.shape


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TENSOR = {"quant_method": "fp8", "weight_block_size": None}
OSS = {"quant_method": "mxfp4"}
NVIDIA = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def ct(preset: str, word: str = "mixed-precision", **rest: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": word, "config_groups": {preset: ["Linear"]}, **rest}


DEEPSEEK = entries(weight=("F8_E4M3", (576, 7168)), weight_scale_inv=("F32", (5, 56)))
COMPRESSED = entries(weight=("F8_E4M3", (96, 64)), weight_scale=("BF16", (96, 1)), input_scale=("BF16", (1,)))
PACKED = entries(weight_packed=("U8", (96, 32)), weight_scale=("F8_E4M3", (96, 4)), weight_global_scale=("F32", (1,)))
MX = entries(weight_packed=("U8", (96, 32)), weight_scale=("U8", (96, 2)))
BLOCKS = {f"{E}_blocks": Entry("U8", (3, 96, 2, 16)), f"{E}_scales": Entry("U8", (3, 96, 2))}
MODELOPT = entries(
    weight=("U8", (96, 32)), weight_scale=("F8_E4M3", (96, 4)), weight_scale_2=("F32", ()), input_scale=("F32", ())
)


@pytest.mark.parametrize(("section", "found", "convention", "expected"), [
    (FP8, DEEPSEEK, "deepseek", (W, FLOAT8_BLOCK, (576, 7168))),
    (ct("FP8_DYNAMIC"), COMPRESSED, "compressed_tensors", (W, replace(CHANNEL, scale="BF16"), (96, 64))),
    (ct("NVFP4A16"), PACKED, "compressed_tensors", (W, NVFP4, (96, 64))),
    (ct("MXFP4"), MX, "compressed_tensors", (W, MXFP4, (96, 64))),
    (OSS, BLOCKS, "gpt_oss", (E, MXFP4, (3, 96, 64))),
    (NVIDIA, MODELOPT, "modelopt", (W, NVFP4, (96, 64))),
])  # fmt: skip
@pytest.mark.parametrize("said", [True, False])
def test_each_convention_with_and_without_a_config(
    section: dict[str, Any], found: Entries, convention: str, expected: object, said: bool
) -> None:
    result = grouped(section if said else None, found)
    assert only(result) == expected
    (one,) = result.encoded.values()
    assert one.convention == convention
    assert set(one.parts.values()) == found.keys()
    assert result.bare == ()


@pytest.mark.parametrize(("section", "codes", "scale", "expected"), [
    (FP8, ("F8_E5M2", (128, 128)), ("F32", (1, 1)), replace(FLOAT8_BLOCK, code="F8_E5M2")),
    (FP8, ("F8_E4M3", (4, 300, 256)), ("BF16", (4, 3, 2)), replace(FLOAT8_BLOCK, scale="BF16")),
    (FP8, ("F8_E4M3", (256, 256)), ("F8_E8M0", (2, 2)), replace(FLOAT8_BLOCK, scale="F8_E8M0")),
    (FP8, ("F8_E4M3", (256, 256)), ("U8", (2, 2)), replace(FLOAT8_BLOCK, scale="F8_E8M0")),
    ({**FP8, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, ("F8_E4M3", (4, 64)), ("U8", (4, 2)), MXFP8),
    (TENSOR, ("F8_E4M3", (96, 64)), ("F32", ()), FLOAT8),
    (TENSOR, ("F8_E4M3", (96, 64)), ("F32", (1,)), FLOAT8),
    (TENSOR, ("F8_E4M3", (8, 96, 64)), ("F32", (8, 1, 1)), FLOAT8),
    (TENSOR, ("F8_E4M3", (8, 96, 64)), ("F32", (8,)), FLOAT8),
    (TENSOR, ("F8_E4M3", (8, 96, 64)), ("F32", ()), replace(FLOAT8, tile=(WHOLE,) * 3)),
    (TENSOR, ("F8_E4M3", (96,)), ("F32", (1,)), replace(FLOAT8, tile=(WHOLE,))),
    (TENSOR, ("F8_E4M3", (8, 96, 64)), ("F32", (8, 2, 1)),
     replace(FLOAT8, tile=(48, WHOLE), name="float8_block", power_of_two=True)),
    (FP8, ("F8_E4M3", (8, 96, 256)), ("F32", (8, 2, 2)), replace(FLOAT8_BLOCK, tile=(48, 128))),
    (FP8, ("F8_E4M3", (0, 256)), ("F32", (0, 2)), FLOAT8_BLOCK),
    (None, ("F8_E4M3", (300, 256)), ("F32", (3, 2)), FLOAT8_BLOCK),
    (None, ("F8_E4M3", (300, 256)), ("F8_E8M0", (300, 8)), MXFP8),
])  # fmt: skip
def test_scales_as_deepseek_and_transformers_store_them(
    section: dict[str, Any] | None, codes: tuple[str, Shape], scale: tuple[str, Shape], expected: Encoding
) -> None:
    assert only(grouped(section, entries(weight=codes, weight_scale_inv=scale))) == (W, expected, codes[1])


@pytest.mark.parametrize(("algorithm", "scale", "expected"), [
    ("FP8", ("F32", ()), FLOAT8),
    ("FP8_PER_CHANNEL_PER_TOKEN", ("F32", (256,)), CHANNEL),
    ("FP8_PB_WO", ("F32", (2, 1, 3, 1)), FLOAT8_BLOCK),
    ("MXFP8", ("U8", (256, 12)), MXFP8),
])  # fmt: skip
def test_fp8_of_modelopt(algorithm: str, scale: tuple[str, Shape], expected: Encoding) -> None:
    found = entries(weight=("F8_E4M3", (256, 384)), weight_scale=scale)
    assert only(grouped({**NVIDIA, "quant_algo": algorithm}, found)) == (W, expected, (256, 384))
    # AutoFP8's checkpoints say `fp8`, have no blocks, and name their scales as ModelOpt does.
    found = entries(weight=("F8_E4M3", (96, 64)), weight_scale=("F32", ()), input_scale=("F32", ()))
    section = {"quant_method": "fp8", "activation_scheme": "static"}
    assert only(grouped(section, found)) == (W, FLOAT8, (96, 64))


def test_codes_of_four_bits_are_counted_one_by_one() -> None:
    for codes, whole in ((("F4", (96, 64)), ()), (("U8", (96, 32)), ()), (("U8", (5, 96, 32)), (5,))):
        scale, most = ("F8_E4M3", (*whole, 96, 4)), ("F32", whole or (1,))
        found = entries(weight_packed=codes, weight_scale=scale, weight_global_scale=most)
        assert only(grouped(ct("NVFP4"), found)) == (W, NVFP4, (*whole, 96, 64))
    # They may lack a global scale.
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}
    section = {**ct("NVFP4"), "config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}
    found = {name: entry for name, entry in PACKED.items() if "global" not in name}
    assert only(grouped(section, found)) == (W, replace(NVFP4, has_global=False), (96, 64))


PLAIN: list[tuple[dict[str, Any] | None, Entries]] = [
    (OSS, {f"{E}_blocks": Entry("BF16", (3, 96, 64)), f"{E}_bias": Entry("BF16", (3, 96))}),
    (None, {f"{E}_blocks": Entry("BF16", (3, 96, 64))}),
    (None, {f"{E}_scales": Entry("F32", (3, 96))}),
    (None, entries(weight=("BF16", (8, 8)), weight_scale=("F32", (8,)), input_scale=("F32", ()))),
    (None, entries(weight=("U8", (8, 8)), logit_scale=("F32", ()), a_packed=("U8", (4,)))),
    (FP8, entries(weight=("BF16", (8, 8)), bias=("BF16", (8,)))),
    (ct("FP8", "dense"), entries(weight=("BF16", (8, 8)), weight_scale=("BF16", (1,)))),
    (OSS, entries(weight=("U8", (8, 8)), blocks=("U8", (8, 16)))),
    (FP8, {"k_proj.k_scale": Entry("F32", ()), "e_score_correction_bias": Entry("F32", (8,))}),
    (FP8, {"weight_scale_inv.weight": Entry("BF16", (8, 8)), "a_blocks.weight": Entry("U8", (8, 16))}),
]


@pytest.mark.parametrize(("section", "found"), PLAIN)
def test_what_only_looks_like_it_is_plain(section: dict[str, Any] | None, found: Entries) -> None:
    assert grouped(section, found) == BufferGroups({}, (), ())


def test_codes_that_stand_alone_are_plain_and_listed() -> None:
    found = entries(weight=("F8_E4M3", (8, 8)), other=("F8_E5M2", (8,)))
    assert grouped(None, found) == BufferGroups({}, (), tuple(found))
    assert grouped({**FP8, "modules_to_not_convert": ["up_proj"]}, found) == BufferGroups({}, (), tuple(found))


BESIDE = (
    (DEEPSEEK, "pre_quant_scale"), (COMPRESSED, "pre_quant_scale"), (PACKED, "pre_quant_scale"),
    (MODELOPT, "pre_quant_scale"), (MX, "smooth_factor"), (DEEPSEEK, "svdquant_lora_a"),
    (COMPRESSED, "R1_weight_input.weight"), (PACKED, "u_weight_output.hadamard.weight"), (BLOCKS, "hadamard_input"),
    (MODELOPT, "input_zero_point"),
)  # fmt: skip
HARMLESS = ("bias", "layer_norm_weight", "layer_norm_bias", "_extra_state", "k_scale", "lora_A.default.weight")


@pytest.mark.parametrize(("found", "end"), BESIDE)
def test_what_changes_a_layer_beside_its_codes_is_refused(found: Entries, end: str) -> None:
    module = next(iter(found)).rpartition(".")[0]
    (refusal,) = grouped(None, {**found, f"{module}.{end}": Entry("BF16", (64,))}).refusals
    assert (refusal.code, refusal.where.tensor) == ("UNSUPPORTED", f"{module}.{end}")
    assert "more than code times scale" in refusal.message
    elsewhere = {**found, f"model.layers.1.mlp.other.{end}": Entry("BF16", (64,))}
    assert grouped(None, elsewhere).refusals == ()


@pytest.mark.parametrize("end", HARMLESS)
@pytest.mark.parametrize("found", [DEEPSEEK, COMPRESSED, PACKED, MX, MODELOPT])
def test_parameters_and_scales_of_caches_may_lie_beside_codes(found: Entries, end: str) -> None:
    groups = grouped(None, {**found, f"{BARE}.{end}": Entry("BF16", (64,))})
    assert (groups.refusals, list(groups.encoded)) == ((), [W])


@pytest.mark.parametrize("columns", range(2, 66, 2))
@pytest.mark.parametrize(("found", "block"), [(PACKED, 16), (MX, 32), (MODELOPT, 16)])
def test_packed_rows_are_whole_blocks(found: Entries, block: int, columns: int) -> None:
    """As compressed-tensors and torchao make them; else the last byte may have a code that belongs to no column."""
    codes = next(name for name, entry in found.items() if entry.shape == (96, 32))
    scale = next(name for name, entry in found.items() if name.endswith("weight_scale"))
    narrow = {codes: Entry("U8", (96, columns // 2)), scale: Entry(found[scale].dtype, (96, -(-columns // block)))}
    groups = grouped(None, {**found, **narrow})
    if columns % block == 0:
        assert groups.refusals == ()
        assert groups.encoded[W].shape == (96, columns)
    else:
        (refusal,) = groups.refusals
        assert (refusal.code, refusal.where.tensor) == ("SHAPE_MISMATCH", codes)
        assert f"whole blocks of {block}; found {columns} codes" in refusal.message


def without(found: Entries, *ends: str) -> Entries:
    return {name: entry for name, entry in found.items() if not name.endswith(ends)}


def changed(found: Entries, end: str, dtype: str | None = None, shape: Shape | None = None) -> Entries:
    """The entries with another type or shape for the one whose last segment is, or ends with, `end`."""
    (name,) = (name for name in found if name.endswith((f".{end}", f"proj_{end}")))
    entry = found[name]
    return {**found, name: Entry(dtype or entry.dtype, entry.shape if shape is None else shape)}


MALFORMED: list[tuple[dict[str, Any] | None, Entries, str, str]] = [
    # Codes without scales.
    (FP8, without(DEEPSEEK, "_inv"), "MISSING_TENSOR", "its scales weight_scale_inv are missing"),
    (ct("FP8"), without(COMPRESSED, "_scale"), "MISSING_TENSOR", "its scales weight_scale are missing"),
    (ct("NVFP4"), without(PACKED, "weight_scale"), "MISSING_TENSOR", "weight_scale of packed codes U8"),
    (ct("NVFP4"), without(PACKED, "global_scale"), "MISSING_TENSOR", "needs its global"),
    (None, without(PACKED, "global_scale"), "MISSING_TENSOR", "needs its global"),
    (OSS, without(BLOCKS, "_scales"), "MISSING_TENSOR", "gate_up_proj_scales of packed codes"),
    (None, without(BLOCKS, "_scales"), "MISSING_TENSOR", "gate_up_proj_scales of packed codes"),
    (NVIDIA, without(MODELOPT, "weight_scale"), "MISSING_TENSOR", "weight_scale of packed codes"),
    (NVIDIA, without(MODELOPT, "_2"), "MISSING_TENSOR", "weight_scale_2"),
    # Scales without codes, or of another convention.
    (FP8, without(DEEPSEEK, ".weight"), "UNEXPECTED_TENSOR", "scales without codes; expected"),
    (None, without(DEEPSEEK, ".weight"), "UNEXPECTED_TENSOR", "scales without codes; expected"),
    (ct("FP8"), without(COMPRESSED, ".weight"), "UNEXPECTED_TENSOR", "weight or .*weight_packed"),
    (OSS, without(BLOCKS, "_blocks"), "UNEXPECTED_TENSOR", "gate_up_proj_blocks"),
    (None, without(MODELOPT, ".weight", ".weight_scale"), "UNEXPECTED_TENSOR", "scales without codes"),
    (ct("FP8"), DEEPSEEK, "UNEXPECTED_TENSOR", "do not belong to the encoding"),
    (ct("MXFP4"), {**MX, **entries(weight_global_scale=("F32", (1,)))}, "UNEXPECTED_TENSOR", "do not belong"),
    # Types.
    (FP8, changed(DEEPSEEK, "weight", "BF16"), "DTYPE_MISMATCH", r"has scales, but is BF16"),
    (None, changed(DEEPSEEK, "weight", "BF16"), "DTYPE_MISMATCH", "has scales"),
    (ct("FP8"), changed(COMPRESSED, "weight", "BF16"), "DTYPE_MISMATCH", "has scales"),
    (None, changed(BLOCKS, "blocks", "BF16"), "DTYPE_MISMATCH", "has scales"),
    (None, changed(BLOCKS, "blocks", "I8"), "DTYPE_MISMATCH", "has scales"),
    (FP8, changed(DEEPSEEK, "weight_scale_inv", "F64"), "DTYPE_MISMATCH", r"found F64 \[5, 56\]"),
    (FP8, changed(DEEPSEEK, "weight_scale_inv", "I8"), "DTYPE_MISMATCH", "found I8"),
    (TENSOR, entries(weight=("F8_E4M3", (8, 8)), weight_scale_inv=("U8", ())), "DTYPE_MISMATCH", "float8 must be F32"),
    (ct("MXFP8"), entries(weight=("F8_E4M3", (8, 32)), weight_scale=("F32", (8, 1))), "DTYPE_MISMATCH", "F8_E8M0"),
    (ct("NVFP4"), changed(PACKED, "weight_scale", "U8"), "DTYPE_MISMATCH", "scales of nvfp4 must be F8_E4M3; found U8"),
    (OSS, changed(BLOCKS, "scales", "F32"), "DTYPE_MISMATCH", "F8_E8M0 or U8; found F32"),
    (ct("NVFP4"), changed(PACKED, "weight_global_scale", "I32"), "DTYPE_MISMATCH", "global must be F32"),
    (NVIDIA, changed(MODELOPT, "input_scale", "U8"), "DTYPE_MISMATCH", "input_scale must be F32"),
    # Shapes.
    (FP8, changed(DEEPSEEK, "weight_scale_inv", shape=(4, 56)), "SHAPE_MISMATCH",
     r"128 x 128 must be \[5, 56\]; found F32 \[4, 56\]"),
    (FP8, changed(DEEPSEEK, "weight_scale_inv", shape=(56, 5)), "SHAPE_MISMATCH", r"found F32 \[56, 5\]"),
    (FP8, changed(DEEPSEEK, "weight_scale_inv", shape=(280,)), "SHAPE_MISMATCH", r"found F32 \[280\]"),
    (FP8, changed(DEEPSEEK, "weight_scale_inv", shape=()), "SHAPE_MISMATCH", r"found F32 \[\]"),
    (FP8, entries(weight=("F8_E4M3", (576,)), weight_scale_inv=("F32", (5,))), "SHAPE_MISMATCH",
     "must be of more dims"),
    ({**FP8, "weight_block_size": [64, 64]}, DEEPSEEK, "SHAPE_MISMATCH", r"64 x 64 must be \[9, 112\]"),
    (None, changed(DEEPSEEK, "weight_scale_inv", shape=(9, 112)), "SHAPE_MISMATCH", r"found F32 \[9, 112\]"),
    (TENSOR, DEEPSEEK, "SHAPE_MISMATCH", r"all x all must be \[1, 1\]"),
    (ct("FP8"), COMPRESSED, "SHAPE_MISMATCH", r"all x all must be \[1, 1\]; found BF16 \[96, 1\]"),
    (ct("NVFP4"), changed(PACKED, "weight_scale", shape=(96, 5)), "SHAPE_MISMATCH", r"1 x 16 must be \[96, 4\]"),
    (ct("NVFP4"), changed(PACKED, "weight_packed", shape=(96, 64)), "SHAPE_MISMATCH", r"1 x 16 must be \[96, 8\]"),
    (ct("NVFP4"), changed(PACKED, "weight_packed", shape=()), "SHAPE_MISMATCH", r"packed codes must be"),
    (ct("NVFP4"), changed(PACKED, "weight_global_scale", shape=(2,)), "SHAPE_MISMATCH", "the global .* is one number"),
    (ct("FP8_DYNAMIC"), changed(COMPRESSED, "input_scale", shape=(96,)), "SHAPE_MISMATCH", "the input_scale of"),
    (OSS, changed(BLOCKS, "blocks", shape=(3, 96, 2, 8)), "SHAPE_MISMATCH", r"\[..., K/32, 16\]; found U8"),
    (OSS, changed(BLOCKS, "scales", shape=(3, 96, 4)), "SHAPE_MISMATCH", r"1 x 32 must be \[3, 96, 2\]"),
    (NVIDIA, changed(MODELOPT, "weight_scale_2", shape=(2,)), "SHAPE_MISMATCH", "the global of"),
    # An odd number of columns, which no pairs of codes give: compressed-tensors refuses to make them.
    (ct("NVFP4"), changed(changed(PACKED, "weight_packed", "F4", (96, 63)), "weight_scale", shape=(96, 4)),
     "SHAPE_MISMATCH", "in pairs along the last dim"),
    (NVIDIA, changed(MODELOPT, "weight", "F4", (96, 63)), "SHAPE_MISMATCH", "in pairs along the last dim"),
    (OSS, changed(BLOCKS, "blocks", "F4", (3, 96, 63)), "SHAPE_MISMATCH", "in pairs along the last dim"),
    (ct("NVFP4"), changed(PACKED, "weight_packed", "F4", ()), "SHAPE_MISMATCH", "in pairs along the last dim"),
    # Others.
    (OSS, {**BLOCKS, E: Entry("BF16", (3, 64, 96))}, "NAME_COLLISION", "exists too"),
    (ct("NVFP4"), {**PACKED, **entries(weight=("BF16", (96, 64)))}, "NAME_COLLISION", "exists too"),
    (ct("FP8_DYNAMIC"), {**COMPRESSED, **entries(weight_zero_point=("I8", (96, 1)))}, "UNSUPPORTED",
     "more than code times scale"),
    # Integers: bitsandbytes, and compressed-tensors with a config that does not say so.
    (None, entries(weight=("I8", (8, 8)), SCB=("F32", (8,)), weight_format=("U8", ())), "UNSUPPORTED", "integers"),
    (None, entries(weight=("I8", (8, 8)), weight_scale=("BF16", (8, 1))), "UNSUPPORTED", "integers, I8"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "found", "code", "words"), MALFORMED)
def test_what_does_not_fit_is_refused(section: dict[str, Any] | None, found: Entries, code: str, words: str) -> None:
    result = grouped(section, found)
    match = [refusal for refusal in result.refusals if refusal.code == code]
    assert match, result
    assert re.search(words, match[0].message), match[0].message
    assert match[0].where.tensor is not None
    assert not result.encoded or "do not belong" in words


def test_every_problem_is_found_at_once() -> None:
    found = {
        name.replace("up_proj", f"{n}"): entry for n in range(5) for name, entry in without(DEEPSEEK, "_inv").items()
    }
    refusals = grouped(FP8, found).refusals
    assert [refusal.code for refusal in refusals] == ["MISSING_TENSOR"] * 5
    assert len({refusal.message for refusal in refusals}) == 1, "they are shown as one"


def test_the_order_of_names_does_not_matter() -> None:
    everything = {**DEEPSEEK, **{name.replace("up", "down"): entry for name, entry in DEEPSEEK.items()}}
    backwards = dict(reversed(everything.items()))
    assert grouped(FP8, everything).encoded == grouped(FP8, backwards).encoded
    packed = dict(reversed(PACKED.items()))
    assert grouped(ct("NVFP4"), packed) == grouped(ct("NVFP4"), PACKED)
    assert grouped(None, packed).bare == ()


def test_several_classes_are_told_apart_by_what_is_stored() -> None:
    section = {**ct("FP8"), "config_groups": {"FP8": ["Linear"], "NVFP4": ["Embedding"], "FP8_DYNAMIC": ["Conv1D"]}}
    assert only(grouped(section, PACKED))[1] == NVFP4
    assert only(grouped(section, COMPRESSED))[1] == replace(CHANNEL, scale="BF16")


def test_it_is_linear_in_the_number_of_tensors() -> None:
    """70,000 names, as DeepSeek-V3 has them."""
    found: Entries = {}
    for layer, expert, name in product(range(61), range(192), ("gate", "up", "down")):
        weight = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
        found[weight] = Entry("F8_E4M3", (2048, 7168))
        found[f"{weight}_scale_inv"] = Entry("F32", (16, 56))
    quantization = read({SECTION: {**FP8, "modules_to_not_convert": [f"model.layers.{n}.mlp.gate" for n in range(61)]}})
    began = time.process_time()
    result = group(found, quantization)
    assert time.process_time() - began < 3  # 0.4 s on an idle machine
    assert (len(result.encoded), result.refusals) == (len(found) // 2, ())


# What torchao's metadata describes.

FLOAT8_TENSOR = {"_type": "Float8Tensor", "_data": {"block_size": [1, 64]}, "_tensor_data_names": ["qdata", "scale"]}
ROWS = {
    f"{BARE}._weight_qdata": Entry("F8_E4M3", (96, 64)),
    f"{BARE}._weight_scale": Entry("F32", (96, 1)),
    f"{BARE}.bias": Entry("BF16", (96,)),
}


def metadata(said: object, *names: str) -> dict[str, str]:
    return {NAMES: json.dumps([W, *names]), W: json.dumps(said), f"{BARE}.bias": json.dumps({"_type": "Tensor"})}


@pytest.mark.parametrize(("block", "shape", "scale", "tile"), [
    ([1, 64], (96, 64), (96, 1), (1, WHOLE)),
    ([96, 64], (96, 64), (1, 1), (WHOLE, WHOLE)),
    ([], (96, 64), (), (WHOLE, WHOLE)),
    ([128, 128], (256, 128), (2, 1), (128, 128)),
    ([1, 1, 64], (4, 96, 64), (4, 96, 1), (1, WHOLE)),
    ([1, 96, 64], (4, 96, 64), (4, 1, 1), (WHOLE, WHOLE)),
])  # fmt: skip
def test_blocks_of_torchao(block: list[int], shape: Shape, scale: Shape, tile: Shape) -> None:
    said = {**FLOAT8_TENSOR, "_data": {"block_size": block}}
    found = {f"{BARE}._weight_qdata": Entry("F8_E4M3", shape), f"{BARE}._weight_scale": Entry("F32", scale)}
    name, encoding, elements = only(grouped(None, found, metadata(said)))
    assert (name, encoding.tile, elements) == (W, tile, shape)


def test_files_that_list_different_tensors_are_read_together() -> None:
    one = metadata(FLOAT8_TENSOR)
    both = {f"a.safetensors:{NAMES}": one[NAMES], f"b.safetensors:{NAMES}": json.dumps([f"{BARE}.bias"]), **one}
    del both[NAMES]
    assert only(grouped(None, ROWS, both))[0] == W


@pytest.mark.parametrize(("said", "found", "code", "words"), [
    ({**FLOAT8_TENSOR, "_tensor_data_names": ["qdata", "scale", "act_pre_scale"]}, ROWS, "UNSUPPORTED",
     "more than code times scale, by its act_pre_scale"),
    ({**FLOAT8_TENSOR, "_data": {"block_size": [1, 64], "rotation": "hadamard"}}, ROWS, "UNSUPPORTED",
     "more than code times scale, by its rotation"),
    ({**FLOAT8_TENSOR, "_type": "Int4Tensor"}, ROWS, "UNSUPPORTED",
     "class 'Int4Tensor' is not supported; known: Float8Tensor"),
    ({**FLOAT8_TENSOR, "_data": {"block_size": "1"}}, ROWS, "CORRUPT", "an attribute of its Float8Tensor"),
    ({**FLOAT8_TENSOR, "_data": {"block_size": [0, 64]}}, ROWS, "CORRUPT", "an attribute"),
    ({**FLOAT8_TENSOR, "_data": []}, ROWS, "CORRUPT", "malformed"),
    ({"_data": {}}, ROWS, "CORRUPT", "malformed"),
    (7, ROWS, "CORRUPT", "malformed"),
    ({**FLOAT8_TENSOR, "_type": "MXTensor", "_data": {"block_size": 32}}, ROWS, "CORRUPT", "elem_dtype"),
    ({**FLOAT8_TENSOR, "_type": "MXTensor", "_data": {"block_size": 32,
        "elem_dtype": {"_type": "torch.dtype", "_data": "float6"}}}, ROWS, "UNSUPPORTED", "elements of 'float6'"),
    ({**FLOAT8_TENSOR, "_type": "NVFP4Tensor", "_data": {"block_size": 16, "is_swizzled_scales": True}}, ROWS,
     "UNSUPPORTED", "order of a matrix-multiply kernel"),
    (FLOAT8_TENSOR, without(ROWS, "_qdata"), "MISSING_TENSOR", "needs its codes"),
    (FLOAT8_TENSOR, without(ROWS, "_scale"), "MISSING_TENSOR", "needs its scale"),
    (FLOAT8_TENSOR, changed(ROWS, "_weight_scale", shape=(1, 96)), "SHAPE_MISMATCH", "found F32"),
    (FLOAT8_TENSOR, changed(ROWS, "_weight_qdata", "U8"), "DTYPE_MISMATCH", "found U8"),
    (FLOAT8_TENSOR, {**ROWS, W: Entry("BF16", (96, 64))}, "NAME_COLLISION", "exists too"),
])  # fmt: skip
def test_malformed_descriptions_are_refused(said: object, found: Entries, code: str, words: str) -> None:
    result = grouped(None, found, metadata(said))
    assert [refusal.code for refusal in result.refusals] == [code]
    assert words in result.refusals[0].message
    assert not result.encoded


@pytest.mark.parametrize(("key", "repeated"), [
    ('"block_size": [1, 64]', '"block_size": [96, 64], "block_size": [1, 64]'),
    ('"block_size": [1, 64]', '"block_size": [1, 64], "block\\u005fsize": [1, 64]'),
    ('"_type": "Float8Tensor"', '"_type": "Tensor", "_type": "Float8Tensor"'),
    ('"_type": "Float8Tensor"', '"_data": {"is_swizzled_scales": false}, "_type": "Float8Tensor"'),
])  # fmt: skip
def test_a_description_that_two_readers_may_read_in_two_ways_is_refused(key: str, repeated: str) -> None:
    notes = metadata({**FLOAT8_TENSOR, "_data": {"block_size": [1, 64]}})
    assert only(grouped(None, ROWS, notes))[0] == W
    notes[W] = notes[W].replace(key, repeated)
    refusals = grouped(None, ROWS, notes).refusals
    assert [(each.code, each.where.tensor) for each in refusals] == [("CORRUPT", W)]
    assert "there twice" in refusals[0].message


@pytest.mark.parametrize("text", ["[1]", "{", "7", '["a", "' + "b" * 3])
def test_a_malformed_list_is_refused(text: str) -> None:
    assert [refusal.code for refusal in grouped(None, {}, {NAMES: text}).refusals] == ["CORRUPT"]


def test_parts_of_torchao_that_are_not_described_are_refused() -> None:
    result = grouped(None, ROWS, metadata(FLOAT8_TENSOR, "other.weight"))
    assert [(refusal.code, refusal.where.tensor) for refusal in result.refusals] == [("CORRUPT", "other.weight")]
    result = grouped({"quant_method": "torchao"}, ROWS)
    assert [refusal.code for refusal in result.refusals] == ["UNSUPPORTED"]
    assert grouped(None, ROWS).bare == (f"{BARE}._weight_qdata",)


def test_a_stored_tensor_is_part_of_one_tensor_at_most() -> None:
    together = {**DEEPSEEK, **BLOCKS, **{name.replace("up", "x"): entry for name, entry in MODELOPT.items()}}
    parts = [stored for one in grouped(None, together).encoded.values() for stored in one.parts.values()]
    assert sorted(parts) == sorted(together)
    assert all(Role.CODES in one.parts for one in grouped(None, together).encoded.values())
    assert {one.convention for one in grouped(None, together).encoded.values()} <= CONVENTIONS.keys()


SEGMENTS = [
    *["weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed", "weight_global_scale", "bias"],
    *["input_scale", "a", "a_blocks", "a_scales", "a_scale_inv", "_weight_qdata", "_weight_scale", "weight_zero_point"],
]
KINDS = ["F8_E4M3", "F8_E5M2", "U8", "F4", "F32", "BF16", "F8_E8M0", "I32"]
shapes = st.lists(st.sampled_from([0, 1, 2, 16, 32, 64, 128]), max_size=4).map(tuple)
any_entries = st.dictionaries(
    st.tuples(st.sampled_from(["", "x.", "x.y."]), st.sampled_from(SEGMENTS)).map("".join),
    st.builds(Entry, st.sampled_from(KINDS), shapes),
)
CONFIGS = [None, FP8, TENSOR, OSS, NVIDIA, ct("FP8"), ct("NVFP4"), ct("MXFP8"), {"quant_method": "torchao"}]


@settings(max_examples=300)
@given(any_entries, st.sampled_from(CONFIGS), st.sampled_from([None, metadata(FLOAT8_TENSOR)]))
def test_any_entries_are_grouped_or_refused(
    found: Entries, section: dict[str, Any] | None, said: dict[str, str] | None
) -> None:
    """Each stored tensor is part of one tensor at most, its parts fit, and nothing fails in another way."""
    result = grouped(section, found, said)
    parts = [stored for one in result.encoded.values() for stored in one.parts.values()]
    assert len(parts) == len(set(parts))
    assert not set(parts) & set(result.bare)
    for one in result.encoded.values():
        assert prod(found[one.parts[Role.SCALE]].shape) == prod(one.encoding.grid(one.shape))
        bits = 8 * prod(found[one.parts[Role.CODES]].shape)
        if found[one.parts[Role.CODES]].dtype != "F4":
            assert bits == prod(one.shape) * one.encoding.code_bits
