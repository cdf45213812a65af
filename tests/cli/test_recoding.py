"""The command line decodes and encodes where it is told to, and says what it did to which tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import DIFFERENT, USAGE, Transaxle
from tests.engine import quantized

DOWN = "model.layers.0.mlp.down_proj.weight"
LINEAR = 7


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
    text = transaxle(
        "convert", fp8, "two", "--to", "torchtitan", "--decode", "fp32", "--only", "*.down_proj.*", "--verify"
    )
    assert text.code == 0
    assert "1 tensor decoded, float8_block (deepseek) -> F32; " in text.out
    assert "equal: " in text.out


@pytest.mark.parametrize("encoding", ["float8_block", "mxfp8", "nvfp4"])
def test_encode(bf16: Path, transaxle: Transaxle, encoding: str) -> None:
    shown = transaxle("plan", bf16, "out", "--to", "hf", "--encode", encoding)
    assert f"{LINEAR} tensors will be encoded, BF16 -> {encoding}" in shown.out
    done = transaxle("convert", bf16, "out", "--to", "hf", "--encode", encoding, "--verify")
    assert done.code == 0
    assert f"{LINEAR} tensors encoded, BF16 -> {encoding}" in done.out
    assert "max |Δ|" in done.out
    assert "equal: " in done.out
    info = transaxle("info", "out")
    assert f"{LINEAR} tensors in {encoding}" in info.out
    assert transaxle("info", "out", "--json").json["encodings"][0]["tensors"] == LINEAR
    raw = transaxle("diff", bf16, "out")
    assert raw.code == DIFFERENT
    assert "--numeric compares the values" in raw.out
    numeric = transaxle("diff", bf16, "out", "--numeric")
    assert numeric.code == DIFFERENT
    assert "relative" in numeric.out
    assert f"{LINEAR} tensors compared by value, stored as BF16 and {encoding}" in numeric.out


def test_a_damaged_result_of_an_encoding_is_found(bf16: Path, here: Path, transaxle: Transaxle) -> None:
    """`--verify` holds it against the source encoded once more, not only against its own hashes."""
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
        (["--decode", "bf16", "--encode", "mxfp8"], "exclude each other"),
        (["--only", "*"], "--only and --skip need --decode, --encode or --dtype"),
        (["--decode", "fp16"], "fp16"),
        (["--encode", "mxfp4"], "mxfp4"),
        (["--decode", "bf16", "--only", "*.mpl.*"], "no encoded tensor has a name like"),
    ],
)
def test_usage(fp8: Path, transaxle: Transaxle, options: list[str], said: str) -> None:
    done = transaxle("convert", fp8, "out", "--to", "hf", *options)
    assert done.code == USAGE
    assert said in done.err
    assert not Path("out").exists()


def test_decoded_sides_compare_with_plain_ones(fp8: Path, transaxle: Transaxle) -> None:
    transaxle("convert", fp8, "out", "--to", "megatron", "--decode", "fp32")
    assert transaxle("verify", fp8, "out").code == DIFFERENT
    assert transaxle("verify", fp8, "out", "--decode", "fp32").code == 0
    assert transaxle("diff", fp8, "out", "--decode", "fp32").code == 0
    assert transaxle("diff", fp8, "out", "--numeric").code == 0
    listed = transaxle("ls", fp8, "--as", "megatron", "--decode", "bf16")
    assert "F8_E4M3" not in listed.out
