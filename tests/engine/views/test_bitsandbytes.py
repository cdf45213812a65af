"""Weights of bitsandbytes, quantized and dequantized by bitsandbytes itself on the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.oracles.quiet import quiet
from transaxle.errors import Refused

with quiet():
    import bitsandbytes.functional as peer

NAME = "model.layers.0.mlp.up_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"


def four_bits(
    kind: str = "nf4",
    *,
    nested: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    block: int = 64,
    shape: tuple[int, ...] = (48, 1024),
    storage: torch.dtype = torch.uint8,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight as transformers saves it, and what bitsandbytes makes of it."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, state = peer.quantize_4bit(
        values, blocksize=block, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )
    buffers = {f"{NAME}.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    return {NAME: codes, **buffers}, peer.dequantize_4bit(codes, state)


def section(kind: str = "nf4") -> dict[str, Any]:
    """A section as transformers writes it."""
    return {
        "quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True,
        "load_in_8bit": False, "bnb_4bit_quant_type": kind, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_use_double_quant": True, "llm_int8_threshold": 6.0,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None,
    }  # fmt: skip


EIGHT = section() | {"load_in_4bit": False, "load_in_8bit": True}


def write(path: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any] | None) -> Path:
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    config = {"torch_dtype": "bfloat16"} | ({} if quantization is None else {"quantization_config": quantization})
    (path / "config.json").write_text(json.dumps(config))
    return path


def decode(tmp_path: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any] | None, to: str) -> Any:
    """All tensors of a conversion that decodes, and the new config."""
    source = write(tmp_path / "source", {"a.weight": torch.ones(2, 2), **tensors}, quantization)
    tx.convert(source, tmp_path / "out", to="safetensors", decode=to)
    return load_file(tmp_path / "out" / "model.safetensors"), json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("nested", [False, True], ids=["", "double"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_are_what_bitsandbytes_dequantizes(
    kind: str, nested: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors, values = four_bits(kind, nested=nested, dtype=dtype)
    to = "bf16" if dtype is torch.bfloat16 else "fp32"
    decoded, config = decode(tmp_path, tensors, section(kind), to)
    assert decoded.keys() == {NAME, "a.weight"}
    assert torch.equal(decoded[NAME], values)
    assert decoded[NAME].dtype is dtype
    assert "quantization_config" not in config


@pytest.mark.parametrize(
    "options",
    [
        {"block": 128}, {"block": 256, "nested": True}, {"shape": (2, 8, 128)}, {"shape": (3, 64), "nested": True},
        {"storage": torch.bfloat16},
    ],
    ids=str,
)  # fmt: skip
def test_block_sizes_shapes_and_storages(options: dict[str, Any], tmp_path: Path) -> None:
    tensors, values = four_bits(**options)
    decoded, _ = decode(tmp_path, tensors, section(), "bf16")
    assert torch.equal(decoded[NAME], values)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_every_code_has_its_value(kind: str, tmp_path: Path) -> None:
    tensors, _ = four_bits(kind, shape=(16, 64), dtype=torch.float32)
    buffers = {name.removeprefix(f"{NAME}."): tensor for name, tensor in tensors.items() if name != NAME}
    state = peer.QuantState.from_dict(buffers, torch.device("cpu"))
    codes = torch.arange(16, dtype=torch.uint8).repeat(64).view(-1, 2)
    tensors[NAME] = (codes[:, :1] << 4) | codes[:, 1:]
    decoded, _ = decode(tmp_path, tensors, section(kind), "fp32")
    expected = peer.dequantize_4bit(tensors[NAME], state)
    # With some instruction sets its kernel for CPUs rounds once more: a unit in the last place.
    units = (decoded[NAME].view(torch.int32) - expected.view(torch.int32)).abs()
    assert int(units.max()) <= 1


def test_the_weights_describe_themselves_without_a_config(tmp_path: Path) -> None:
    tensors, values = four_bits("fp4")
    decoded, config = decode(tmp_path, tensors, None, "bf16")
    assert torch.equal(decoded[NAME], values)
    assert "quantization_config" not in config


def test_eight_bits_are_equal_in_bf16_and_nearly_in_fp32(tmp_path: Path) -> None:
    """bitsandbytes rounds `code x SCB` and then `x (1/127)`; the product of code and scale is rounded once."""
    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (64, 256), dtype=torch.int8, generator=draw)
    scales = torch.rand(64, generator=draw) * 3
    tensors = {
        NAME: codes,
        NAME.replace("weight", "SCB"): scales,
        NAME.replace("weight", "weight_format"): torch.zeros((), dtype=torch.uint8),
    }
    decoded, config = decode(tmp_path, tensors, EIGHT, "fp32")
    expected = peer.int8_vectorwise_dequant(codes, scales)
    assert decoded.keys() == {NAME, "a.weight"}
    assert "quantization_config" not in config
    steps = (decoded[NAME].view(torch.int32) - expected.view(torch.int32)).abs()
    assert steps.max() <= 2
    tx.convert(tmp_path / "source", tmp_path / "half", to="safetensors", decode="bf16")
    assert torch.equal(load_file(tmp_path / "half" / "model.safetensors")[NAME], expected.bfloat16())


def text(tensors: Mapping[str, torch.Tensor], **changes: Any) -> torch.Tensor:
    """The description of a weight, with other values for some keys."""
    described = json.loads(bytes(tensors[STATE].tolist())) | changes
    return torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)


FOUR, _ = four_bits(nested=True, shape=(16, 128))
PLAIN, _ = four_bits(shape=(16, 128))
MISFITS: dict[str, tuple[Mapping[str, torch.Tensor], str, str]] = {
    "no scales": ({k: v for k, v in PLAIN.items() if not k.endswith(".absmax")}, "MISSING_TENSOR", "need absmax below"),
    "no weight": ({k: v for k, v in PLAIN.items() if k != NAME}, "MISSING_TENSOR", "which is missing"),
    "no nested scales": (
        {k: v for k, v in FOUR.items() if not k.endswith("nested_absmax")}, "MISSING_TENSOR", "need nested_absmax",
    ),
    "fewer codes": (PLAIN | {NAME: PLAIN[NAME][:-1]}, "SHAPE_MISMATCH", "are not the codes of [16, 128]"),
    "fewer scales": (PLAIN | {f"{NAME}.absmax": torch.ones(31)}, "SHAPE_MISMATCH", "absmax must be F32 [32]"),
    "scales of bytes": (
        PLAIN | {f"{NAME}.absmax": torch.ones(32, dtype=torch.uint8)}, "DTYPE_MISMATCH", "absmax must be F32 [32]",
    ),
    "another table": (
        PLAIN | {f"{NAME}.quant_map": torch.linspace(-1, 1, 16)}, "UNSUPPORTED", "code 1 has the value -0.8666667",
    ),
    "rows that are not whole blocks": (
        PLAIN | {STATE: text(PLAIN, shape=[32, 64], blocksize=128)}, "UNSUPPORTED", "are not whole blocks of 128",
    ),
    "another type than the name says": (PLAIN | {STATE: text(PLAIN, quant_type="af4")}, "UNSUPPORTED", "'af4'"),
    "no JSON": (PLAIN | {STATE: torch.zeros(9, dtype=torch.uint8)}, "CORRUPT", "it does not describe a weight"),
    "a shape of text": (PLAIN | {STATE: text(PLAIN, shape="16, 128")}, "CORRUPT", "it does not describe a weight"),
    "a negative shape": (PLAIN | {STATE: text(PLAIN, shape=[-16, -128])}, "SHAPE_MISMATCH", "are not the codes of"),
    "blocks of a size that the program has not": (
        PLAIN | {STATE: text(PLAIN, shape=[16, 128], blocksize=16)}, "UNSUPPORTED", "blocksize is 16; known: 32, 64",
    ),
    "nested blocks of no size": (FOUR | {STATE: text(FOUR, nested_blocksize=0)}, "UNSUPPORTED", "blocksize is 0"),
    "a shown name that exists": (PLAIN | {f"{NAME}_absmax": torch.ones(1)}, "NAME_COLLISION", "would be shown under"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "code", "message"), MISFITS.values(), ids=MISFITS)
def test_buffers_that_do_not_fit_are_refused(
    tensors: Mapping[str, torch.Tensor], code: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(Refused) as refused:
        decode(tmp_path, tensors, section(), "bf16")
    assert refused.value.code == code
    assert message in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quantization", [section("fp4"), EIGHT], ids=["fp4", "8 bits"])
def test_a_config_that_contradicts_the_weights_is_refused(quantization: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Refused, match="it is nf4, but the config's quantization_config describes another type"):
        decode(tmp_path, PLAIN, quantization, "bf16")


def test_eight_bit_codes_in_the_order_of_a_kernel_are_refused(tmp_path: Path) -> None:
    tensors = {"m.weight": torch.ones(4, 4, dtype=torch.int8), "m.SCB": torch.ones(4)}
    with pytest.raises(Refused, match="order of a matrix-multiplication kernel"):
        decode(tmp_path, tensors | {"m.weight_format": torch.ones((), dtype=torch.uint8)}, EIGHT, "bf16")
