"""TransformerEngine's tensors as encoded ones: told apart, decoded, and moved into other containers and dialects."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import transaxle as tx
from tests.encodings.conventions.test_buffer_group import Entry
from tests.oracles.te_pickles import Array, File, Tensor, blockwise, float8, mxfp8, nvfp4
from tests.some import a
from transaxle.encodings.conventions import convention as te
from transaxle.encodings.conventions.buffer_group import group
from transaxle.encodings.conventions.convention import CONVENTIONS, TE, TE_HALVED
from transaxle.encodings.encoding import FLOAT8_BLOCK, MXFP8, NVFP4, Role
from transaxle.errors import TransaxleError
from transaxle.formats.torch_file import quantized_tensors as quantized

NAME = "layer.weight"
LAYOUTS = ["square", "square columns", "rows", "rows compact", "columns", "columns compact"]
CASES: dict[str, Callable[[], Tensor]] = {
    "float8": lambda: float8(1),
    "float8 e5m2": lambda: float8(2, code="e5m2"),
    "float8 transposed": lambda: float8(3, transposed=True),
    "float8 of four dims": lambda: float8(4, (2, 3, 4, 5)),
    **{f"blockwise {layout}": (lambda layout=layout: blockwise(5, layout=layout)) for layout in LAYOUTS},  # type: ignore[misc]
    "mxfp8": lambda: mxfp8(6),
    "mxfp8 columns": lambda: mxfp8(7, sides="columns"),
    "mxfp8 stack": lambda: mxfp8(8, (2, 32, 64)),
    "nvfp4": lambda: nvfp4(9),
    "nvfp4 stack": lambda: nvfp4(10, (2, 3, 32)),
    "nvfp4 of 256": lambda: nvfp4(11, scale_max=256),
}


def write(folder: Path, tensors: dict[str, Tensor | Array]) -> Path:
    file = File()
    for key, tensor in tensors.items():
        file.items[key] = tensor.opcodes(file) if isinstance(tensor, Tensor) else file.tensor(tensor)
    place = folder / "model.pt"
    place.write_bytes(file.pickled())
    return place


def close(values: Array, tensor: Tensor) -> None:
    """Codes and scales have few bits: their product is exact. With the factor of nvfp4 it is rounded to float32."""
    if tensor.kind == "NVFP4Tensor":
        np.testing.assert_allclose(values, tensor.values, rtol=2.0**-22)
    else:
        np.testing.assert_array_equal(values, tensor.values)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_definition(case: str, tmp_path: Path) -> None:
    tensor = CASES[case]()
    with tx.open(write(tmp_path, {NAME: tensor})) as checkpoint:
        (one,) = checkpoint.encoded.values()
        assert (one.name, one.shape) == (NAME, tensor.shape)
        assert one.convention == (TE_HALVED if "256" in case else TE)
        assert one.encoding.scale_max == (256 if "256" in case else 448)
        close(checkpoint.decode("fp32")[NAME].read(), tensor)
        rounded = checkpoint.decode("bf16")[NAME].read()
        np.testing.assert_array_equal(rounded, checkpoint.decode("fp32")[NAME].read().astype(ml_dtypes.bfloat16))


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch"])
def test_containers_without_its_notes_say_the_same(case: str, to: str, tmp_path: Path) -> None:
    """After a raw move there are only names, types and shapes; the codes are the same, and so are the values."""
    tensor = CASES[case]()
    source = write(tmp_path, {NAME: tensor})
    tx.convert(source, tmp_path / "out", to=to)
    with tx.open(source) as before, tx.open(tmp_path / "out") as after:
        assert set(before) == set(after)
        assert all(before[key].tobytes() == after[key].tobytes() for key in before)
        assert after.encoded.keys() == {NAME}
        values = before.decode("fp32")[NAME].read()
        np.testing.assert_array_equal(values, after.decode("fp32")[NAME].read())


# Into another framework.

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 32, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = "decoder.layers.0."


def model(make: Callable[[int, tuple[int, int]], Tensor]) -> dict[str, Tensor | Array]:
    """A Llama of one layer under Megatron's names, its linears quantized."""
    norms = ("decoder.final_layernorm.weight", f"{LAYER}self_attention.linear_qkv.layer_norm_weight")
    plain = {name: np.random.default_rng(1).random(64).astype(np.float32) for name in norms}
    plain[f"{LAYER}mlp.linear_fc1.layer_norm_weight"] = plain[norms[0]] + 1
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        plain[name] = np.random.default_rng(2).random((32, 64)).astype(np.float32)
    return {
        **plain,
        f"{LAYER}self_attention.linear_qkv.weight": make(1, (128, 64)),
        f"{LAYER}self_attention.linear_proj.weight": make(2, (64, 64)),
        f"{LAYER}mlp.linear_fc1.weight": make(3, (192, 64)),
        f"{LAYER}mlp.linear_fc2.weight": make(4, (64, 96)),
    }


@pytest.mark.parametrize(
    ("make", "convention"),
    [(mxfp8, "deepseek"), (nvfp4, "compressed_tensors"), (float8, "compressed_tensors")],
    ids=["mxfp8", "nvfp4", "float8"],
)
def test_codes_and_scales_into_the_hub_s_layout(
    make: Callable[[int, tuple[int, int]], Tensor], convention: str, tmp_path: Path
) -> None:
    """q, k and v are taken out of Megatron's grouped rows by a plain slice of the values, and so are gate and up."""
    held = model(make)
    tx.convert(write(tmp_path, held), tmp_path / "out", to="safetensors:hf", config=CONFIG)
    (tmp_path / "out" / "config.json").unlink(missing_ok=True)
    qkv, fc1 = held[f"{LAYER}self_attention.linear_qkv.weight"], held[f"{LAYER}mlp.linear_fc1.weight"]
    assert isinstance(fc1, Tensor)
    groups = a(Tensor, qkv).values.reshape(2, 4, 16, 64)
    expected = {
        "self_attn.q_proj": groups[:, :2].reshape(64, 64),
        "self_attn.k_proj": groups[:, 2].reshape(32, 64),
        "self_attn.v_proj": groups[:, 3].reshape(32, 64),
        "mlp.gate_proj": fc1.values[:96],
        "mlp.up_proj": fc1.values[96:],
    }
    with tx.open(tmp_path / "out") as after:
        assert {one.convention for one in after.encoded.values()} == {convention}
        assert len(after.encoded) == 7
        decoded = after.decode("fp32")
        for key, values in expected.items():
            found = decoded[f"model.layers.0.{key}.weight"].read()
            np.testing.assert_allclose(found, values, rtol=2.0**-22 if make is nvfp4 else 0)


@pytest.mark.parametrize("scale_max", [448, 256])
def test_a_config_speaks_of_its_nvfp4(tmp_path: Path, scale_max: int) -> None:
    """Its per-tensor number is an amax; the hub's files have a divisor, which makes the same bfloat16 values."""
    source = write(tmp_path, model(partial(nvfp4, scale_max=scale_max)))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tx.convert(source, tmp_path / "out", to="safetensors:hf")
    tx.convert(source, tmp_path / "plain", to="safetensors:hf", decode="bf16")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["format"] == "nvfp4-pack-quantized"
    with tx.open(tmp_path / "out", decode="bf16") as ours, tx.open(tmp_path / "plain") as theirs:
        assert not theirs.encoded
        assert {name: ours[name].tobytes() for name in ours} == {name: theirs[name].tobytes() for name in theirs}


def test_its_e5m2_stays_out_of_the_hub_s_layout(tmp_path: Path) -> None:
    source = write(tmp_path, model(partial(float8, code="e5m2")))
    with pytest.raises(TransaxleError, match="F8_E5M2") as error:
        tx.convert(source, tmp_path / "out", to="safetensors:hf", config=CONFIG)
    assert [refusal.code for refusal in error.value.refusals] == ["UNSUPPORTED"] * 4


# The convention, and what the metadata says.


def test_both_rooms_have_the_same_names() -> None:
    """The reader names buffers without knowing conventions; it must be the convention's names."""
    assert quantized.NOTE == te.TE_NOTE
    for convention, end, encodings in ((TE, "", (MXFP8, FLOAT8_BLOCK, NVFP4)), (TE_HALVED, quantized.HALVED, (NVFP4,))):
        for encoding in encodings:
            found = CONVENTIONS[convention].buffers(NAME, encoding)
            assert found[Role.CODES] == NAME + quantized.CODES
            assert found[Role.SCALE] == NAME + quantized.SCALE + end
            assert found.get(Role.GLOBAL, NAME + quantized.AMAX + end) == NAME + quantized.AMAX + end
    assert CONVENTIONS[TE_HALVED].scale_max == 256
    # An amax is a factor over the largest values.
    for convention, most in ((TE, 448), (TE_HALVED, 256)):
        encoding = replace(NVFP4, scale_max=most)
        assert CONVENTIONS[convention].factor(5.0, encoding) == 5.0 / (most * 6)
        assert CONVENTIONS[convention].global_from_amax(5.0, encoding) == 5


SAID: dict[str, Any] = {"encoding": "mxfp8", "codes": "F8_E4M3", "scale": "F8_E8M0", "tile": [32, 1], "scale_max": 448}
CODES, SCALES = Entry("F8_E4M3", (64, 96)), Entry("F8_E8M0", (2, 96))


def test_metadata_says_which_tiles() -> None:
    found = group({NAME: CODES, f"{NAME}_scale_inv": SCALES}, None, {te.TE_NOTE: {NAME: SAID}})
    assert found.refusals == ()
    assert found.encoded[NAME].encoding.tile == (32, 1)
    wrong = group({NAME: CODES, f"{NAME}_scale_inv": SCALES}, None, {te.TE_NOTE: {NAME: {**SAID, "tile": [1, 32]}}})
    assert [refusal.code for refusal in wrong.refusals] == ["SHAPE_MISMATCH"]
    missing = group({NAME: CODES}, None, {te.TE_NOTE: {NAME: SAID}})
    assert [refusal.code for refusal in missing.refusals] == ["MISSING_TENSOR"]
    decoded = group({NAME: Entry("BF16", (64, 96))}, None, {te.TE_NOTE: {NAME: SAID, "gone": SAID}})
    assert (decoded.encoded, decoded.refusals, decoded.bare) == ({}, (), ())
