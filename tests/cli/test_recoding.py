"""`--decode`, `--encode`, `--dtype` and `--merge` on the command line, and the lists of changed tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import checkpoints
from tests.cli.running import DIFFERENT, USAGE, Transaxle
from tests.engine import quantized

DOWN = "model.layers.0.mlp.down_proj.weight"
LINEAR = 7
TARGET = "model.layers.0.self_attn.q_proj"
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [TARGET]}


@pytest.fixture
def fp8(here: Path) -> Path:
    quantized.store(here / "fp8", quantized.llama(d=128, f=256, g=1, r=2, head=128))
    return Path("fp8")


@pytest.fixture
def bf16(here: Path) -> Path:
    quantized.store(here / "bf16", quantized.plain_llama(d=128, f=256, g=1, r=2, head=64))
    return Path("bf16")


def test_decode(fp8: Path, transaxle: Transaxle) -> None:
    shown = transaxle("plan", fp8, "out", "--to", "hf", "--decode", "bf16")
    assert f"{LINEAR} tensors will be decoded, float8_block (deepseek) -> BF16" in shown.out
    assert DOWN in shown.out
    assert (
        transaxle("plan", fp8, "out", "--to", "hf", "--decode", "bf16", "--json").json["recoded"][0]["action"]
        == "decoded"
    )
    done = transaxle("convert", fp8, "out", "--to", "hf", "--decode", "bf16", "--verify", "--json").json
    assert done["comparison"]["equal"]
    assert done["verification"]["ok"]
    assert {one["name"] for one in done["recoded"]} >= {DOWN}
    assert all(one["rms"] > 0 and one["max_abs"] >= one["rms"] and not one["exact"] for one in done["recoded"])
    transaxle(
        "convert", fp8, "two", "--to", "torchtitan", "--decode", "fp32", "--only", "*.down_proj.*", "--verify"
    ).expect(0, out=("1 tensor decoded, float8_block (deepseek) -> F32; ", "equal: "))


@pytest.mark.parametrize("encoding", ["float8_block", "mxfp8", "nvfp4"])
def test_encode(bf16: Path, transaxle: Transaxle, encoding: str) -> None:
    shown = transaxle("plan", bf16, "out", "--to", "hf", "--encode", encoding)
    assert f"{LINEAR} tensors will be encoded, BF16 -> {encoding}" in shown.out
    transaxle("convert", bf16, "out", "--to", "hf", "--encode", encoding, "--verify").expect(
        0, out=(f"{LINEAR} tensors encoded, BF16 -> {encoding}", "max |Δ|", "equal: ")
    )
    info = transaxle("info", "out")
    assert f"{LINEAR} tensors in {encoding}" in info.out
    assert transaxle("info", "out", "--json").json["encodings"][0]["tensors"] == LINEAR
    transaxle("diff", bf16, "out").expect(DIFFERENT, out="--numeric compares the values")
    transaxle("diff", bf16, "out", "--numeric").expect(
        DIFFERENT, out=("relative", f"{LINEAR} tensors compared by value, stored as BF16 and {encoding}")
    )


def test_a_damaged_result_of_an_encoding_is_found(bf16: Path, here: Path, transaxle: Transaxle) -> None:
    """`--verify` encodes the source once more and compares, instead of only comparing hashes."""
    held, config = quantized.plain_llama(d=128, f=256, g=1, r=2, head=64)
    quantized.store(here / "other", ({**held, DOWN: quantized.plain((128, 256), 77)}, config))
    transaxle("convert", "other", "out", "--to", "hf", "--encode", "mxfp8")
    from transaxle.engine.checkpoint.checkpoint import open_checkpoint
    from transaxle.engine.plan.conversion import make_plan
    from transaxle.engine.read_back import compare_with_plan
    from transaxle.engine.views.encode import Encode
    from transaxle.move.workers import limits, no_progress

    with open_checkpoint(bf16) as source, open_checkpoint(here / "out") as written:
        found = compare_with_plan(make_plan(source, "hf", encode=Encode("mxfp8")), written, limits(), no_progress)
    assert {difference.name for difference in found.differences} == {DOWN, f"{DOWN}_scale"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--decode", "fp64"], "fp64"),
        (["--encode", "mxfp4"], "mxfp4"),
        (["--decode", "bf16", "--only", "*.mpl.*"], "no encoded tensor has a name like"),
    ],
)
def test_usage(fp8: Path, transaxle: Transaxle, options: list[str], said: str) -> None:
    transaxle("convert", fp8, "out", "--to", "hf", *options).expect(USAGE, err=said)
    assert not Path("out").exists()


def test_decoded_sides_compare_with_plain_ones(fp8: Path, transaxle: Transaxle) -> None:
    transaxle("convert", fp8, "out", "--to", "megatron", "--decode", "fp32")
    assert transaxle("verify", fp8, "out").code == DIFFERENT
    assert transaxle("verify", fp8, "out", "--decode", "fp32").code == 0
    assert transaxle("diff", fp8, "out", "--decode", "fp32").code == 0
    assert transaxle("diff", fp8, "out", "--numeric").code == 0
    listed = transaxle("ls", fp8, "--as", "megatron", "--decode", "bf16")
    assert "F8_E4M3" not in listed.out


def test_a_cast_lists_its_errors_and_is_verified(here: Path, transaxle: Transaxle) -> None:
    held = {name: array.astype("float32") * 1.001 for name, array in checkpoints.tensors().items()}
    checkpoints.write(Path("source"), held, config={**checkpoints.CONFIG, "dtype": "float32"})
    planned = transaxle("plan", "source", "out", "--to", "automodel", "--dtype", "bf16")
    assert "will be cast, F32 -> BF16" in planned.out
    transaxle("convert", "source", "out", "--to", "automodel", "--dtype", "bf16", "--verify").expect(
        0, out=("cast, F32 -> BF16", "RMS")
    )
    assert transaxle("verify", "out").code == 0


def adapter(folder: Path, rows: int, columns: int) -> None:
    """Write an adapter of one weight."""
    folder.mkdir()
    factors = {"A": torch.ones(2, columns), "B": torch.full((rows, 2), 0.125)}
    named = {f"base_model.model.{TARGET}.lora_{which}.weight": value for which, value in factors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(LORA), "utf-8")


def test_a_merged_weight_is_listed_and_verified(here: Path, transaxle: Transaxle) -> None:
    checkpoints.tiny(Path("source"))
    adapter(Path("adapter"), *checkpoints.tensors()[f"{TARGET}.weight"].shape)
    planned = transaxle("plan", "source", "out", "--to", "automodel", "--merge", "adapter")
    assert "1 tensor will be merged, with the adapter" in planned.out
    transaxle("convert", "source", "out", "--to", "automodel", "--merge", "adapter", "--verify").expect(
        0, out="1 tensor merged, with the adapter"
    )
    assert transaxle("verify", "out").code == 0
    compared = transaxle("diff", "source", "out", "--numeric", "--json").json
    assert [each["name"] for each in compared["differences"]] == [f"{TARGET}.weight"]
