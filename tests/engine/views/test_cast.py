"""Issue 15, files 4: `--dtype` casts plain numbers as torch does, and `--decode` concerns codes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests import checkpoints
from tests.engine import quantized
from transaxle.encodings.arithmetic.casting import cast
from transaxle.encodings.plain_types import CASTS
from transaxle.errors import UsageError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SOURCES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}
RULES = "family toy\n  model_type toy\n  axes l=n d=d\n  x : l d\n  bias : l d\n  precise bias\n"
RULES += "dialect hf\n  {l}.x = x[d]\n  {l}.bias = bias[d]\ndialect b\n  x{l} = x[d]\n  b{l} = bias[d]\n"


def hostile(dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of 16 bits; of wider types random ones, ties, subnormals, edges, infinities and NaN."""
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    generator = np.random.default_rng(7)
    single = [generator.integers(0, 1 << 32, 60_000, dtype=np.uint64).astype(np.uint32).view(np.float32)]
    every = np.arange(1 << 16, dtype=np.uint32) << 16
    single += [(every | low).astype(np.uint32).view(np.float32) for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    single += [(halves + np.uint32(low)).astype(np.uint32).view(np.float32) for low in (0, 0xFFF, 0x1000, 0x1001)]
    found = torch.from_numpy(np.concatenate(single))
    if dtype == torch.float32:
        return found
    near = [found.double() * factor for factor in (1, 1 + 2**-30, 1 - 2**-30)]
    return torch.cat([*near, torch.tensor([1e300, -1e300, 5e-324, 1.7e308, float("inf"), float("nan")]).double()])


def bits(values: torch.Tensor) -> Any:
    """The bits of values; every NaN the same."""
    given = torch.where(values.isnan(), torch.full_like(values, float("nan")), values)
    return given.view(torch.int16 if values.dtype.itemsize == 2 else torch.int32).numpy()


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_value_is_what_torch_makes_of_it(source: torch.dtype, to: str, tmp_path: Path) -> None:
    values = hostile(source)
    wanted = values.to(DTYPES[to])
    if source != torch.bfloat16:
        own = cast(values.numpy(), CASTS[to]).view(np.int16 if wanted.dtype.itemsize == 2 else np.int32)
        assert np.array_equal(own[~wanted.isnan().numpy()], bits(wanted)[~wanted.isnan().numpy()])
    save_file({"a": values.reshape(2, -1), "n": torch.arange(3)}, tmp_path / "source.safetensors")
    out = tmp_path / "out.safetensors"
    report = tx.convert(tmp_path / "source.safetensors", out, to="safetensors", dtype=to, allow_lossy=True, sync=False)
    found = load_file(out)
    assert torch.equal(found["n"], torch.arange(3))
    assert found["a"].dtype == DTYPES[to]
    assert np.array_equal(bits(found["a"].reshape(-1)), bits(wanted))
    if source != DTYPES[to]:
        (told,) = report.recoded
        infinite = int((values.isfinite() & wanted.isinf()).sum())
        exact = bool(((wanted.double() == values.double()) | values.isnan()).all())
        assert (told.what.action, told.infinite, told.error.exact) == ("cast", infinite, exact)
        finite = values.isfinite() & wanted.isfinite()
        if not infinite and not exact:
            gap = (wanted.double() - values.double())[finite].abs()
            assert told.error.max == gap.max()


def test_values_that_would_become_infinite_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    held = {"a": torch.tensor([1.0, 65519.0, 65520.0, -1e9]), "b": torch.tensor([70000.0]), "c": torch.tensor([2.0])}
    save_file(held, tmp_path / "s.safetensors")
    with pytest.raises(tx.TransaxleError, match="LOSSY") as caught:
        tx.convert(tmp_path / "s.safetensors", tmp_path / "out", to="safetensors", dtype="fp16", sync=False)
    assert {(r.where.tensor, r.message.split()[0]) for r in caught.value.refusals} == {("a", "2"), ("b", "1")}
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]
    tx.convert(
        tmp_path / "s.safetensors", tmp_path / "out", to="safetensors", dtype="fp16", skip=["a", "b"], sync=False
    )


def test_a_type_and_a_dialect_change_together_and_the_config_agrees(tmp_path: Path) -> None:
    config = {**checkpoints.CONFIG, "torch_dtype": "float32"}
    held = {name: array.astype(np.float32) * np.float32(1.001) for name, array in checkpoints.tensors().items()}
    source = checkpoints.write(tmp_path / "source", held, config=config)
    report = tx.convert(source, tmp_path / "out", to="automodel", dtype="bf16", sync=False)
    tx.convert(source, tmp_path / "plain", to="automodel", sync=False)
    wanted = {
        name: tensor.to(torch.bfloat16) for name, tensor in load_file(tmp_path / "plain/model.safetensors").items()
    }
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert len(report.recoded) == len(held)
    with tx.open(source, dtype="bf16") as cast_source:
        assert tx.verify(cast_source, tmp_path / "out")


def test_what_keeps_its_type_is_told(tmp_path: Path) -> None:
    rules = tmp_path / "my.rules"
    rules.write_text(RULES)
    ones = np.full(3, 1 + 2**-12, np.float32)
    held = {f"{layer}.{name}": ones for layer in range(2) for name in ("x", "bias")} | {"optim/0.x/exp_avg": ones}
    config = {"model_type": "toy", "n": 2, "d": 3, "dtype": "float32"}
    source = checkpoints.write(tmp_path / "source", held, config=config)
    report = tx.convert(source, tmp_path / "out", to="safetensors", dtype="bf16", rules=rules, sync=False)
    assert set(report.stayed) == {"0.bias", "1.bias", "optim/0.x/exp_avg"}
    assert {each.what.name for each in report.recoded} == {"0.x", "1.x"}
    assert all(each.error.max == 2**-12 for each in report.recoded)
    asked = tx.convert(
        source, tmp_path / "asked", to="safetensors", dtype="bf16", only=["*bias", "optim/*"], rules=rules, sync=False
    )
    assert {each.what.name for each in asked.recoded} == {"0.bias", "1.bias", "optim/0.x/exp_avg"}
    assert json.loads((tmp_path / "asked/config.json").read_text())["dtype"] == "float32"
    assert set(asked.stayed) == {"0.x", "1.x"}


def test_codes_and_scales_are_not_cast(tmp_path: Path) -> None:
    source = quantized.store(tmp_path / "source", quantized.llama(d=128, f=128, g=1, r=1, head=128))
    tx.convert(source, tmp_path / "out", to="safetensors", dtype="fp32", sync=False)
    before, after = quantized.read(source), quantized.read(tmp_path / "out")
    changed = {name for name in before if before[name].dtype != after[name].dtype}
    assert changed
    with tx.open(source) as checkpoint:
        parts = {stored for one in checkpoint.encoded.values() for stored in one.parts.values()}
    assert parts.isdisjoint(changed)


def test_decode_where_nothing_is_encoded_is_refused_with_the_way(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    with pytest.raises(UsageError, match=r"(?s)AMBIGUOUS.*no encoded tensors.*--dtype fp32"):
        tx.convert(source, tmp_path / "out", to="hf", decode="fp32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("said", [{"decode": "bf16"}, {"encode": "mxfp8"}])
def test_one_change_of_numbers_at_a_time(said: dict[str, Any], tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    with pytest.raises(TypeError, match="exclude each other"):
        tx.convert(source, tmp_path / "out", to="hf", dtype="bf16", **said)


def test_a_pattern_that_nothing_has_and_a_type_that_there_is_not(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    with pytest.raises(UsageError, match="no plain floating-point tensor has a name like"):
        tx.plan(source, tmp_path / "out", to="hf", dtype="bf16", only="nothing*")
    with pytest.raises(UsageError, match="cannot cast to 'int8'"):
        tx.plan(source, tmp_path / "out", to="hf", dtype="int8")
    checkpoints.write(tmp_path / "whole", {"a": np.arange(3)})
    with pytest.raises(UsageError, match="no plain floating-point tensor"):
        tx.plan(tmp_path / "whole", tmp_path / "out", to="safetensors", dtype="bf16")


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5])
def test_any_range_of_bytes(offset: int, tmp_path: Path) -> None:
    values = torch.randn(700_001)
    save_file({"a": values}, tmp_path / "s.safetensors")
    with tx.open(tmp_path / "s.safetensors", dtype="bf16") as checkpoint:
        whole = values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        (transfer,) = checkpoint["a"].transfers()
        for size in (1, 7, 524_288 * 2 + 3):
            out = bytearray(size)
            checkpoint.container.storage.read_into(transfer.file, offset, memoryview(out))
            assert bytes(out) == whole[offset : offset + size]
