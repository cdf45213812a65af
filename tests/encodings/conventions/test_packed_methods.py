"""Sections of GPTQ and AWQ in configs: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from transaxle.encodings.conventions.packed_methods import Kind, make_section, with_section
from transaxle.encodings.conventions.quantization import read_packed
from transaxle.encodings.conventions.scheme import SECTION
from transaxle.errors import Refused

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
TRANSFORMERS = GPTQ | {
    "backend": "auto", "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True,
    "checkpoint_format": "gptq", "damp_percent": 0.1, "dataset": "c4", "format": "gptq", "max_input_length": None,
    "meta": None, "model_seqlen": None, "module_name_preceding_first_block": None, "act_group_aware": True,
    "modules_in_block_to_quantize": None, "pad_token_id": None, "tokenizer": None, "true_sequential": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (GPTQ, ("gptq", 4, 128, False, 1)),
        (TRANSFORMERS, ("gptq", 4, 128, False, 1)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "format": "gptq_v2"}, ("gptq", 4, 128, False, 0)),
        (GPTQ | {"format": "GPTQ_V2"}, ("gptq", 4, 128, False, 0)),
        (GPTQ | {"bits": 8, "group_size": -1, "desc_act": True}, ("gptq", 8, -1, False, 1)),
        (GPTQ | {"group_size": -1, "desc_act": True, "dynamic": {"a": {"group_size": 32}}}, ("gptq", 4, -1, True, 1)),
        (AWQ, ("awq", 4, 128, False, 0)),
        (AWQ | {"version": "GEMM", "backend": "autoawq", "modules_to_not_convert": ["a"]}, ("awq", 4, 128, False, 0)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, ("awq", 4, 64, False, 0)),
    ],
)
def test_read(section: dict[str, Any], expected: tuple[object, ...]) -> None:
    method = read_packed({SECTION: section})
    assert method is not None
    assert (method.name, method.bits, method.group, method.reordered, method.shift) == expected


def test_other_methods_are_not_read_here() -> None:
    assert read_packed({}) is None
    assert read_packed({SECTION: {"quant_method": "fp8"}}) is None
    assert read_packed({SECTION: "gptq"}) is None


@pytest.mark.parametrize(
    ("section", "code", "message"),
    [
        (GPTQ | {"bits": 3}, "UNSUPPORTED", "quantization_config.bits is 3; known: 4, 8"),
        (GPTQ | {"bits": "4"}, "CORRUPT", "quantization_config"),
        (GPTQ | {"group_size": 0}, "CORRUPT", "group_size is 0; expected -1 or a positive number"),
        (GPTQ | {"checkpoint_format": "marlin"}, "UNSUPPORTED", "checkpoint_format is 'marlin'; known: gptq, gptq_v2"),
        (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, "CORRUPT", "but quantization_config.format is"),
        (GPTQ | {"is_marlin_format": True}, "UNSUPPORTED", "is_marlin_format is True"),
        (GPTQ | {"pack_dtype": "int16"}, "UNSUPPORTED", "pack_dtype is 'int16'; known: int32"),
        (GPTQ | {"rotation": "hadamard"}, "UNSUPPORTED", "rotation is not known here, and may change"),
        (GPTQ | {"activation": "w4afp8"}, "UNSUPPORTED", "activation is not known here, and may change"),
        ({"quant_method": "gptq"}, "CORRUPT", "missing required field `bits`"),
        (AWQ | {"version": "gemv"}, "UNSUPPORTED", "version is 'gemv'; known: gemm"),
        (AWQ | {"backend": "llm-awq"}, "UNSUPPORTED", "version is 'llm-awq'; known: gemm"),
        (AWQ | {"bits": 8}, "UNSUPPORTED", "bits is 8; known: 4"),
        (AWQ | {"w_bit": 8}, "CORRUPT", "bits is stated twice: 4 and 8"),
        (AWQ | {"zero_point": False}, "UNSUPPORTED", "zero_point is False; known: True"),
    ],
)
def test_refused(section: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(Refused) as refused:
        read_packed({SECTION: section})
    assert (refused.value.code, refused.value.where.file) == (code, "config.json")
    assert message in str(refused.value)


def test_sections_of_multimodal_configs_are_replaced_where_they_are() -> None:
    config = {"text_config": {SECTION: GPTQ, "hidden_size": 8}, "model_type": "kimi_k25"}
    method = read_packed(config)
    assert method is not None
    section = make_section({Kind(4, 128): ["a"]})
    changed = with_section(config, method.path, section)
    assert changed == {"text_config": {SECTION: section, "hidden_size": 8}, "model_type": "kimi_k25"}
    assert config["text_config"] == {SECTION: GPTQ, "hidden_size": 8}
