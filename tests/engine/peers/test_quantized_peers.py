"""What peers made themselves is decoded to their own values, moved raw, and what we encode is read by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import transaxle as tx
from tests.engine import quantized
from tests.oracles import MISSING
from tests.oracles.quantized_peers import MOE, Made, compressed, fp8, gpt_oss, torchao

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("ignore"),
]

OSS = "gpt_oss"
BF16 = np.dtype(ml_dtypes.bfloat16)


def _preset(name: str) -> Callable[[Path], Made]:
    return lambda folder: compressed({name: ["Linear"]}, ["lm_head"], 1, folder)


def _torchao(kind: str) -> Callable[[Path], Made]:
    return lambda _: torchao(kind, 2)


TORCHAO = ("float8_row", "float8_block", "mxfp8", "nvfp4", "nvfp4_swizzled", "mxfp8_swizzled", "mxfp4_swizzled")
CASES: dict[str, Callable[[Path], Made]] = {
    **{f"compressed-tensors {name}": _preset(name) for name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP8")},
    **{f"torchao {kind}": _torchao(kind) for kind in TORCHAO},
    "transformers fp8": lambda _: fp8((32, 32), "float", 3),
    "gpt-oss": lambda _: gpt_oss(4),
}
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


def saved(make: Callable[[Path], Made], folder: Path) -> Made:
    """Make a checkpoint, and write it as the peer does."""
    (folder / "work").mkdir()
    made = make(folder / "work")
    made.save(folder / "source")
    return made


def close(found: np.ndarray, peer: torch.Tensor) -> bool:
    """Equal where the peer computes in float32 as we do; where it rounds to bf16 on the way, as close as that is."""
    rtol = 2.0**-7 if peer.dtype == torch.bfloat16 else 2.0**-22
    return bool(np.allclose(found.astype(np.float64), peer.double().numpy(), rtol=rtol, atol=1e-30))


def in_order(made: Made) -> set[bytes]:
    """Scales that torchao keeps in the order of a kernel, put in order by torchao."""
    from torchao.prototype.mx_formats.utils import from_blocked

    found = set()
    for name, value in made.values.items():
        head, _, segment = name.rpartition(".")
        scale = made.tensors.get(f"{head}._{segment}_scale")
        if scale is None:
            continue
        rows, columns = value.shape
        for block in (16, 32):
            if scale.numel() == -(-rows // 128) * -(-columns // block // 4) * 512:
                whole = from_blocked(scale.view(torch.uint8).reshape(-1), rows, -(-columns // block))
                found.add(whole.contiguous().numpy().tobytes())
    return found


@every_case
def test_values_are_those_of_the_peer(make: Callable[[Path], Made], tmp_path: Path) -> None:
    made = saved(make, tmp_path)
    with tx.open(tmp_path / "source", decode="fp32") as checkpoint:
        for name, value in made.values.items():
            assert checkpoint[name].dtype == "F32"
            assert close(checkpoint[name].read(), value), name
        plain = set(checkpoint) - made.values.keys()
        assert plain <= made.tensors.keys()
        assert not checkpoint.catalog.refusals
        assert not checkpoint.encoded
    if made.config["model_type"] == OSS:  # its dialect is needed, and what the peer gives is no whole model
        return
    tx.convert(tmp_path / "source", tmp_path / "out", to="safetensors", decode="bf16", sync=False)
    written = quantized.read(tmp_path / "out")
    for name, value in made.values.items():
        assert written[name].dtype == BF16
        assert np.allclose(written[name].astype(np.float64), value.double().numpy(), rtol=2.0**-7, atol=1e-30)
    with tx.open(tmp_path / "out") as checkpoint:
        assert not checkpoint.encoded
        assert not checkpoint.catalog.refusals
    assert "quantization_config" not in quantized.config_of(tmp_path / "out")


@pytest.mark.oracle
@every_case
def test_they_move_raw_and_come_back(make: Callable[[Path], Made], tmp_path: Path) -> None:
    """In another dialect, where that keeps tiles whole; the way back gives the values, under one ecosystem's names."""
    made = saved(make, tmp_path)
    tx.convert(tmp_path / "source", tmp_path / "same", to="safetensors", sync=False)
    assert quantized.same(tmp_path / "source", tmp_path / "same")
    family = made.config["model_type"]
    if family == OSS:
        return
    tx.convert(tmp_path / "source", tmp_path / "out", to="torchtitan", family=family, sync=False)
    back_to = "transformers" if family == MOE["model_type"] else "hf"
    tx.convert(tmp_path / "out", tmp_path / "back", to=back_to, sync=False)
    with tx.open(tmp_path / "out") as out, tx.open(tmp_path / "back") as back:
        assert len(out.encoded) > 0
        assert back.encoded.keys() == made.values.keys()
        assert not back.catalog.refusals
        plain = back.decode("fp32")
        for name, value in made.values.items():
            assert close(plain[name].read(), value), name
    source = {name: value.contiguous().reshape(-1).view(torch.uint8) for name, value in made.tensors.items()}
    codes = {name: array for name, array in quantized.read(tmp_path / "back").items() if array.itemsize == 1}
    by_bytes = {value.numpy().tobytes() for value in source.values()} | in_order(made)
    assert all(array.tobytes() in by_bytes for array in codes.values())


@pytest.mark.parametrize("encoding", ["float8_block", "mxfp8", "nvfp4"])
def test_what_we_encode_is_read_by_transformers(tmp_path: Path, encoding: str) -> None:
    """It opens the folder with compressed-tensors or its own FP8 integration, and dequantizes to our values."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    source = quantized.store(tmp_path / "source", quantized.plain_llama(d=128, f=256, g=2, r=2, head=32))
    tx.convert(source, tmp_path / "out", to="hf", encode=encoding, sync=False)
    said = {} if encoding == "float8_block" else {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, **said)
    theirs = model.state_dict()
    with tx.open(tmp_path / "out", decode="bf16") as checkpoint:
        assert len(checkpoint) == 12
        for name, tensor in checkpoint.items():
            assert theirs[name].contiguous().view(torch.uint8).numpy().tobytes() == tensor.tobytes(), name


def test_mxfp4_that_came_through_another_dialect_is_read_by_transformers(tmp_path: Path) -> None:
    """gpt-oss to Megatron, where gate and up of each expert lie apart, and back: it dequantizes the same values."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    source = quantized.store(tmp_path / "source", quantized.gpt_oss(d=96, f=64, e=4))
    tx.convert(source, tmp_path / "out", to="megatron", sync=False)
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", sync=False)
    said = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.bfloat16, quantization_config=said
    ).state_dict()
    held, name = quantized.read(source), "model.layers.0.mlp.experts.gate_up_proj"
    values = quantized.of_fours(held[f"{name}_blocks"], held[f"{name}_scales"]).swapaxes(1, 2)
    assert np.array_equal(theirs[name].double().numpy(), values.astype(BF16).astype(np.float64))
