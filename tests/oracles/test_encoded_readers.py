"""What the notes on readers say, held against transformers: what it reads, misreads, and cannot load of what we encode.

Values are compared with those that are decoded here; that these are right, `tests/encodings` and
`tests/engine/peers/test_quantized_peers.py` prove. As on a GPU: transformers builds the layers that it has there, and
loads codes and scales into them, of which the test multiplies each tile out; kernels do not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from transformers import CompressedTensorsConfig, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import transaxle as tx
from tests.oracles.every_type import EXACT, HAND, recorded
from tests.oracles.peer_bytes import Tensors
from tests.oracles.quiet import quiet
from tests.oracles.test_encoded_types import tiny
from tests.oracles.tiny_models import drawn

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

BLOCK, MXFP8, NVFP4, INT4 = "float8_block", "mxfp8", "nvfp4", "int4"
TILE = 128
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
TYPES = sorted(each for each, (table, said) in recorded()["types"].items() if (table, said) == (HAND, EXACT))
KEPT, DECODED, GPU = "codes are kept", "decoded", "as on a GPU"
RIGHT, WRONG, FAILS = "right", "wrong", "fails"
EXPERTS = "*.experts.*"
AS_STACKS = "it reads stacks, which stay plain:  --to safetensors:transformers"
IN_MEMORY = "safetensors:transformers"


def model_of(model_type: str, sizes: dict[str, int]) -> Any:
    """A model whose tiles of 16, 32 and 128 have scales of their own."""
    with quiet():
        model = drawn(model_type, SIZES | sizes).to(torch.bfloat16).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                for dim in (-1, -2):
                    steps = torch.exp2(-(torch.arange(weight.shape[dim]) // 16 % 7).float()).to(weight.dtype)
                    weight.mul_(steps if dim == -1 else steps[:, None])
    return model


def multiplied(state: Tensors) -> Tensors:
    """The values of codes in layers as on a GPU."""
    values = {}
    for name, value in state.items():
        scales = state.get(f"{name}_scale_inv")
        if scales is not None:
            rows, columns = value.shape[-2:]
            spread = scales.float().repeat_interleave(TILE, -2).repeat_interleave(TILE, -1)
            value = value.float() * spread[..., :rows, :columns]
        values[name] = value
    return values


@contextmanager
def without_a_gpu_check() -> Iterator[None]:
    with patch.object(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None):
        yield


def read_as(way: str, kind: Any, folder: Path) -> Tensors:
    """What transformers reads of a folder, as values."""
    method = CompressedTensorsConfig if "compressed" in (folder / "config.json").read_text("utf-8") else None
    config = {"quantization_config": (method or FineGrainedFP8Config)(dequantize=True)} if way == DECODED else {}
    with quiet(), without_a_gpu_check() if way == GPU else nullcontext():
        model = kind.from_pretrained(folder, dtype=torch.bfloat16, **config)
        if way == KEPT:
            ModelCompressor.from_pretrained_model(model).decompress_model(model)
    return multiplied(model.state_dict())


def verdict(way: str, kind: Any, folder: Path, plain: Tensors) -> str:
    try:
        values = read_as(way, kind, folder)
    except (RuntimeError, ValueError, AttributeError, AssertionError):
        return FAILS
    equal = (
        name in values
        and values[name].shape == value.shape
        and torch.allclose(values[name].float(), value.float(), rtol=2**-7, atol=0)
        for name, value in plain.items()
    )
    return RIGHT if all(equal) else WRONG


def verdicts(
    model_type: str, encoding: str, folder: Path, to: str, sizes: dict[str, int], **patterns: Any
) -> tuple[str, list[str]]:
    """What transformers makes of an encoded model, in the two ways that it reads this encoding, and the notes of it."""
    model = model_of(model_type, sizes)
    folder.mkdir(exist_ok=True)
    with quiet():
        model.save_pretrained(folder / "base")
    report = tx.convert(folder / "base", folder / "out", to=to, encode=encoding, sync=False, **patterns)
    assert report.recoded
    tx.convert(folder / "out", folder / "plain", to=to, decode="bf16", sync=False)
    with quiet():
        plain = type(model).from_pretrained(folder / "plain", dtype=torch.bfloat16).state_dict()
    ways = (GPU, DECODED) if encoding == BLOCK else (KEPT, DECODED)
    found = " ".join(verdict(way, type(model), folder / "out", plain) for way in ways)
    return found, [note for note in report.notes if "transformers" in note]


BOTH_RIGHT, BOTH_WRONG, BOTH_FAIL = f"{RIGHT} {RIGHT}", f"{WRONG} {WRONG}", f"{FAILS} {FAILS}"
NAMED = "encoded on request"
PLAIN = "left plain"
CASES = [
    # what is right has no note
    ("qwen3_moe", BLOCK, "hf", {}, {}, BOTH_RIGHT, ()),
    ("qwen3_moe", MXFP8, "hf", {}, {"skip": EXPERTS}, BOTH_RIGHT, ()),
    ("llama", NVFP4, "hf", {}, {}, BOTH_RIGHT, ()),
    ("llama", MXFP8, "hf", {"intermediate_size": 160}, {}, BOTH_RIGHT, ()),
    ("falcon", MXFP8, "hf", {}, {}, BOTH_RIGHT, ()),
    ("qwen3_moe", INT4, "hf", {}, {}, BOTH_RIGHT, ()),
    ("qwen3_moe", INT4, "hf", {}, {"only": EXPERTS}, BOTH_RIGHT, ()),
    # numbered experts
    ("qwen3_moe", NVFP4, "hf", {}, {}, BOTH_WRONG, ("reads numbered experts in nvfp4 without", AS_STACKS)),
    ("qwen3_moe", NVFP4, "hf", {}, {"only": EXPERTS}, BOTH_WRONG, ("reads numbered experts in nvfp4 without",)),
    ("qwen3_moe", MXFP8, "hf", {}, {}, BOTH_FAIL, ("cannot load numbered experts in mxfp8", AS_STACKS)),
    ("qwen3_moe", NVFP4, "hf", {}, {"skip": EXPERTS}, BOTH_FAIL, ("cannot load plain numbered experts", AS_STACKS)),
    ("qwen3_moe", NVFP4, "hf", {}, {"only": "*layers.1.*.experts.*"}, BOTH_FAIL, ("cannot load plain",)),
    ("qwen3_moe", INT4, "hf", {}, {"skip": "*layers.1.*.experts.*"}, BOTH_FAIL, ("cannot load plain", AS_STACKS)),
    ("deepseek_v3", NVFP4, "hf", {}, {"skip": EXPERTS}, BOTH_FAIL, ("cannot load plain numbered experts",)),
    ("llama4_text", NVFP4, "hf", {}, {"skip": EXPERTS}, BOTH_WRONG, ("looks for numbered experts",)),
    # stacks
    ("qwen3_moe", BLOCK, IN_MEMORY, {}, {"only": "*experts*"}, f"{RIGHT} {WRONG}", (NAMED, "stacks of matrices")),
    ("qwen3_moe", MXFP8, IN_MEMORY, {}, {"only": "*experts*"}, BOTH_WRONG, (NAMED, "stacks of matrices")),
    ("qwen3_moe", NVFP4, IN_MEMORY, {}, {"only": "*experts*"}, BOTH_WRONG, (NAMED, "stacks of matrices")),
    ("qwen3_moe", INT4, IN_MEMORY, {}, {"only": "*experts*"}, BOTH_WRONG, (NAMED, "stacks of matrices")),
    ("gpt_oss", BLOCK, "hf", {}, {"only": "*experts*_proj"}, f"{FAILS} {WRONG}", (NAMED, "stacks of matrices")),
    ("gpt_oss", NVFP4, "hf", {}, {}, BOTH_RIGHT, (PLAIN, "stacks of matrices")),
    ("llama4_text", BLOCK, "hf", {}, {}, BOTH_RIGHT, (PLAIN, "stacks of matrices")),
    # what is split or merged, and where tiles end
    ("gte", BLOCK, "hf", {}, {"only": "*qkv_proj.weight"}, f"{RIGHT} {WRONG}", (NAMED, "it splits them")),
    ("gte", NVFP4, "hf", {}, {"only": "*qkv_proj.weight"}, BOTH_WRONG, (NAMED, "it splits them")),
    ("qwen3_moe", BLOCK, "hf", {"moe_intermediate_size": 64}, {}, BOTH_RIGHT, (PLAIN, "it merges matrices")),
    (
        "qwen3_moe", BLOCK, "hf", {"moe_intermediate_size": 64}, {"only": EXPERTS}, f"{WRONG} {RIGHT}",
        (NAMED, "on a GPU it merges matrices"),
    ),
    ("llama", BLOCK, "hf", {"intermediate_size": 192}, {}, BOTH_RIGHT, (PLAIN, "without a GPU it takes the tiles")),
    (
        "llama", BLOCK, "hf", {"intermediate_size": 192}, {"only": "*mlp*"}, f"{RIGHT} {WRONG}",
        (NAMED, "without a GPU it takes the tiles"),
    ),
    ("llama", BLOCK, "hf", {"intermediate_size": 320}, {}, f"{RIGHT} {FAILS}", ("loads 6 weights on a GPU only",)),
    # layers that are no nn.Linear
    ("gpt2", BLOCK, "hf", {}, {"only": "*.mlp.*weight"}, f"{WRONG} {RIGHT}", (NAMED, "on a GPU it has no quantized")),
    ("falcon", BLOCK, "hf", {}, {"only": "*mlp*weight"}, f"{WRONG} {RIGHT}", (NAMED, "on a GPU it does not replace")),
    ("falcon", INT4, "hf", {}, {}, f"{FAILS} {RIGHT}", ("in int4 with dequantize=True only",)),
    ("falcon", NVFP4, "hf", {}, {}, f"{FAILS} {RIGHT}", ("in nvfp4 with dequantize=True only",)),
]  # fmt: skip
"""Model type, encoding, target, sizes, patterns; what transformers makes of it where codes are kept and where they are
decoded; what the only note says."""


@pytest.mark.oracle
@pytest.mark.parametrize(("model_type", "encoding", "to", "sizes", "patterns", "expected", "note"), CASES)
def test_a_note_says_what_transformers_makes_of_it(
    model_type: str,
    encoding: str,
    to: str,
    sizes: dict[str, int],
    patterns: dict[str, str],
    expected: str,
    note: tuple[str, ...],
    tmp_path: Path,
) -> None:
    made, notes = verdicts(model_type, encoding, tmp_path, to, sizes, **patterns)
    assert made == expected
    assert len(notes) == bool(note), notes
    assert all(part in notes[0] for part in note), notes


STACKS = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe", "kimi_linear", "olmoe")


@pytest.mark.oracle
@pytest.mark.parametrize("encoding", [NVFP4, MXFP8, INT4])
@pytest.mark.parametrize("model_type", STACKS)
def test_transformers_reads_stacks_that_stay_plain(model_type: str, encoding: str, tmp_path: Path) -> None:
    made, notes = verdicts(model_type, encoding, tmp_path, IN_MEMORY, {})
    assert made == BOTH_RIGHT
    assert all(note.startswith(PLAIN) for note in notes)


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", TYPES)
def test_of_every_type_no_value_is_misread_without_a_note(model_type: str, tmp_path: Path) -> None:
    for encoding in (BLOCK, NVFP4):
        with tiny():
            made, notes = verdicts(model_type, encoding, tmp_path / encoding, "hf", {})
        assert WRONG not in made or any("so with wrong values" in note for note in notes), (encoding, made)
