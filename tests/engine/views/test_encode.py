"""Encoding: the planned tensor's last step gives what the codec gives for each whole matrix, whatever the bands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints
from tests.engine import quantized
from tests.engine.quantized import SCALE, Array, Tensors
from transaxle.encodings.arithmetic.codec import amax, encode_rows
from transaxle.encodings.encoding import FLOAT8_BLOCK, MXFP8, NVFP4, Encoding
from transaxle.errors import UsageError
from transaxle.move.workers import MIN_MEMORY

ENCODINGS: dict[str, Encoding] = {"float8_block": FLOAT8_BLOCK, "mxfp8": MXFP8, "nvfp4": NVFP4}
SIZES = {"d": 256, "f": 320, "g": 2, "r": 2, "head": 32}
LINEAR = "model.layers.0.mlp.down_proj.weight"
PLAIN = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight",
         "model.layers.0.post_attention_layernorm.weight")  # fmt: skip
SMALL = 400_000
"""Bytes for all buffers: a band of 128 rows does not fit into a fair share of it."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return quantized.store(tmp_path / "source", quantized.plain_llama(**SIZES))


def buffers(encoding: str, values: Array) -> dict[str, Array]:
    """What a matrix is stored as, by the end of each name: the codec on all of it at once."""
    size = float(amax(values)) if encoding == "nvfp4" else None
    codes, scale = encode_rows(ENCODINGS[encoding], values, amax=size)
    if encoding == "nvfp4":
        top = np.array([448 * 6 / np.float32(size)], np.float32)
        return {"_packed": codes, "_scale": scale, "_global_scale": top}
    return {"": codes, SCALE if encoding == "float8_block" else "_scale": scale}


def expected(encoding: str, held: Tensors, linear: list[str]) -> dict[str, bytes]:
    found = {name: array.tobytes() for name, array in held.items() if name not in linear}
    for name in linear:
        values = held[name]
        parts = [buffers(encoding, matrix) for matrix in values.reshape(-1, *values.shape[-2:])]
        for end in parts[0]:
            found[name + end] = b"".join(part[end].tobytes() for part in parts)
    return found


def written(folder: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in quantized.read(folder).items()}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_of_linear_layers_become_what_the_codec_gives(source: Path, encoding: str) -> None:
    out = source.parent / "out"
    report = tx.convert(source, out, to="hf", encode=encoding, memory=SMALL, sync=False)
    held = quantized.read(source)
    linear = [name for name in held if name not in PLAIN]
    assert written(out) == expected(encoding, held, linear)
    assert {measured.what.name for measured in report.recoded} == set(linear)
    with tx.open(out) as checkpoint:
        assert checkpoint.encoded.keys() == set(linear)
        assert {one.encoding.name for one in checkpoint.encoded.values()} == {encoding}
        plain = checkpoint.decode("fp32")
        for measured in report.recoded:
            name = measured.what.name
            apart = np.abs(plain[name].read().astype(np.float64) - held[name].astype(np.float64))
            assert measured.error.max == apart.max()
            assert measured.error.rms == pytest.approx(np.sqrt((apart**2).mean()), rel=1e-6)
            assert measured.error.exact == (not apart.any())
    assert tx.verify(out).ok
    found = tx.diff(source, out, numeric=True)
    assert {difference.name for difference in found.differences} == set(linear)
    for difference in found.differences:
        (measured,) = [m for m in report.recoded if m.what.name == difference.name]
        assert difference.max_abs == measured.error.max
        assert difference.rms == pytest.approx(measured.error.rms, rel=1e-6)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_each_expert_of_a_stack_is_tiled_for_itself(tmp_path: Path, encoding: str) -> None:
    """160 rows per expert: tiles of 128 rows begin anew with every expert, in whatever bands they come."""
    sizes = {**checkpoints.SIZES, "hidden_size": 64, "moe_intermediate_size": 160}
    source = checkpoints.write(tmp_path / "source", checkpoints.tensors(sizes), config={**checkpoints.CONFIG, **sizes})
    tx.convert(source, tmp_path / "stacked", to="transformers", sync=False)
    held = quantized.read(tmp_path / "stacked")
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert held[stack].shape == (8, 320, 64)
    how: dict[str, Any] = {"encode": encoding, "only": "*.experts.*", "memory": MIN_MEMORY, "sync": False}
    tx.convert(source, tmp_path / "out", to="transformers", **how)
    linear = [name for name in held if ".experts." in name]
    assert written(tmp_path / "out") == expected(encoding, held, linear)
    if encoding == "float8_block":  # each half ends inside a tile
        found = tx.plan(tmp_path / "out", tmp_path / "back", to="hf").refusals
        assert {refusal.code for refusal in found} == {"BLOCK_MISALIGNED"}
        return
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", sync=False)  # per expert again, raw
    got = quantized.read(tmp_path / "back")
    wanted = buffers(encoding, held[stack][3])
    for end in {"mxfp8": ("", "_scale"), "nvfp4": ("_packed", "_scale")}[encoding]:
        halves = [got[f"model.layers.0.mlp.experts.3.{half}_proj.weight{end}"] for half in ("gate", "up")]
        assert np.concatenate(halves).tobytes() == wanted[end].tobytes()


def test_rows_that_are_the_outputs_of_a_layer_are_refused(tmp_path: Path) -> None:
    """Tiles of one row have one scale for some inputs, so they need them side by side; square tiles do not."""
    rules = tmp_path / "turned.rules"
    rules.write_text("""
family turned
  axes o=outs i=ins
  up : o i
dialect hf
  up.weight = up[o i]
dialect turned
  turned.weight = up[i o]
""")
    config = {"outs": 64, "ins": 96}
    source = quantized.store(tmp_path / "source", ({"up.weight": quantized.plain((64, 96))}, config))
    said: dict[str, Any] = {"rules": rules, "family": "turned"}
    for encoding in ("mxfp8", "nvfp4"):
        (found,) = tx.plan(source, tmp_path / "x", to="turned", encode=encoding, **said).refusals
        assert (found.code, found.where.tensor) == ("UNSUPPORTED", "turned.weight")
        assert "up[i o]" in found.message
        assert not tx.plan(source, tmp_path / "x", to="hf", encode=encoding, **said).refusals
    tx.convert(source, tmp_path / "turned", to="turned", sync=False, **said)
    for to in ("turned", "safetensors"):
        assert tx.plan(tmp_path / "turned", tmp_path / "x", to=to, encode="mxfp8", **said).refusals
        assert not tx.plan(tmp_path / "turned", tmp_path / "x", to=to, encode="float8_block", **said).refusals


def test_codes_that_transformers_would_read_wrongly_are_not_written_unless_they_are_named(tmp_path: Path) -> None:
    """A stack, a matrix with rows of inputs, one that is split in memory, and one whose last tile is smaller."""
    rules = tmp_path / "odd.rules"
    rules.write_text("""
family odd
  axes e=experts i=ins o=outs u=uneven
  stack : e o i
  turned : o i
  a : o i
  b : o i
  uneven : u i
  plain : o i
dialect hf
  experts.stack = stack[e o i]
  turned.weight = turned[i o]
  fused.weight = [[a:o | b:o] i]
  uneven.weight = uneven[u i]
  plain.weight = plain[o i]
dialect transformers like hf
  a.weight = a[o i]
  b.weight = b[o i]
dialect mine like hf
""")
    shapes = {
        "experts.stack": (2, 64, 96),
        "turned.weight": (96, 64),
        "fused.weight": (128, 96),
        "uneven.weight": (192, 96),
    }
    shapes["plain.weight"] = (64, 96)
    held = {name: quantized.plain(shape) for name, shape in shapes.items()}
    source = quantized.store(tmp_path / "source", (held, {"experts": 2, "ins": 96, "outs": 64, "uneven": 192}))
    said: dict[str, Any] = {"rules": rules, "family": "odd", "encode": "float8_block"}
    for to in ("hf", "safetensors"):
        report = tx.convert(source, tmp_path / to, to=to, sync=False, **said)
        assert written(tmp_path / to) == expected("float8_block", held, ["plain.weight"])
        assert len(report.notes) == len(shapes) - 1
        assert all("left plain: 1 weight whose codes transformers" in note for note in report.notes)
    named = tx.plan(source, tmp_path / "x", to="hf", only="*", **said)
    assert {each.name for each in named.recoded} == set(shapes)
    assert all("encoded on request: 1 weight whose codes" in note for note in named.notes)
    mine = tx.plan(source, tmp_path / "x", to="mine", **said)  # nothing of transformers reads it
    assert {each.name for each in mine.recoded} == set(shapes)
    assert not mine.notes


def test_sizes_that_only_the_memory_of_transformers_needs_may_be_unknown(tmp_path: Path) -> None:
    rules = tmp_path / "fused.rules"
    rules.write_text("""
family fused
  axes g c d=width
  q : g c d
  k : g c d
dialect hf
  q.weight = q[(g c) d]
  k.weight = k[(g c) d]
dialect transformers
  qk.weight = [(g [q:c | k:c]) d]
""")
    held: Tensors = {f"{name}.weight": quantized.plain((64, 32)) for name in ("q", "k")}
    source = quantized.store(tmp_path / "source", (held, {"width": 32}))
    tx.convert(source, tmp_path / "out", to="hf", encode="mxfp8", rules=rules, family="fused", sync=False)
    assert written(tmp_path / "out") == expected("mxfp8", held, list(held))


def test_fused_targets_are_encoded_as_they_lie_there(source: Path) -> None:
    out = source.parent / "out"
    tx.convert(source, source.parent / "plain", to="megatron", sync=False)
    tx.convert(source, out, to="megatron", encode="nvfp4", sync=False)
    held = quantized.read(source.parent / "plain")
    linear = [name for name in held if any(part in name for part in ("linear_qkv.weight", "linear_proj", "linear_fc"))
              and not name.endswith("layer_norm_weight")]  # fmt: skip
    assert written(out) == expected("nvfp4", held, linear)


def test_patterns_choose_and_plans_tell(source: Path) -> None:
    out = source.parent / "out"
    said: dict[str, Any] = {"to": "hf", "encode": "mxfp8", "only": ["*.mlp.*", "lm_head*"], "skip": "*.up_proj.*"}
    plan = tx.plan(source, out, **said)
    wanted = {"lm_head.weight", *(f"model.layers.0.mlp.{half}_proj.weight" for half in ("gate", "down"))}
    assert {what.name for what in plan.recoded} == wanted
    assert {(what.action, what.encoding, what.convention, what.dtype) for what in plan.recoded} == {
        ("encoded", "mxfp8", "compressed_tensors", "BF16")
    }
    assert "recoded" in plan.as_json()
    report = tx.convert(source, out, sync=False, **said)
    assert {measured.what.name for measured in report.recoded} == wanted
    with tx.open(out) as checkpoint:
        assert checkpoint.encoded.keys() == wanted
    for only, skip in (("*.mpl.*", ()), ((), "*.mpl.*")):
        with pytest.raises(UsageError, match="no tensor has a name like"):
            tx.plan(source, out, to="hf", encode="mxfp8", only=only, skip=skip)
    with pytest.raises(UsageError, match="cannot encode to"):
        tx.plan(source, out, to="hf", encode="int8")
    with pytest.raises(TypeError, match="exclude each other"):
        tx.plan(source, out, to="hf", encode="mxfp8", decode="bf16")


def test_without_a_table_patterns_are_needed(tmp_path: Path) -> None:
    source = quantized.store(tmp_path / "source", ({"a": quantized.plain((64, 64))}, {}))
    with pytest.raises(UsageError, match="--only"):
        tx.plan(source, tmp_path / "x", to="safetensors", encode="mxfp8")
    tx.convert(source, tmp_path / "out", to="safetensors", encode="mxfp8", only="a", sync=False)
    assert written(tmp_path / "out") == expected("mxfp8", quantized.read(source), ["a"])


@pytest.mark.parametrize(
    ("array", "encoding", "message"),
    [
        (quantized.plain((64, 40)), "mxfp8", "rows here have 40"),
        (quantized.plain((64, 24)), "nvfp4", "rows here have 24"),
        (quantized.plain((64,)), "float8_block", "encodes matrices"),
        (np.arange(64 * 64).reshape(64, 64), "mxfp8", "values of I64"),
        (np.zeros((4, 0), np.float32), "nvfp4", "[4, 0]"),
    ],
)
def test_what_cannot_be_encoded_is_refused(tmp_path: Path, array: Array, encoding: str, message: str) -> None:
    source = quantized.store(tmp_path / "source", ({"a": array, "b": quantized.plain((64, 64))}, {}))
    (found,) = tx.plan(source, tmp_path / "x", to="safetensors", encode=encoding, only="*").refusals
    assert (found.code, found.where.tensor) == ("UNSUPPORTED", "a")
    assert message in found.message
    assert "--skip" in found.hint
    with pytest.raises(tx.TransaxleError, match="UNSUPPORTED"):
        tx.convert(source, tmp_path / "x", to="safetensors", encode=encoding, only="*")
    assert not (tmp_path / "x").exists()


def test_what_is_encoded_is_not_encoded_again(tmp_path: Path) -> None:
    source = quantized.store(tmp_path / "source", quantized.llama(d=128, f=128, g=1, r=1, head=128))
    (found,) = tx.plan(source, tmp_path / "x", to="hf", encode="mxfp8", only=LINEAR).refusals
    assert "already encoded in float8_block: decode it first" in found.message
    with pytest.raises(UsageError, match="7 tensors are already encoded"):
        tx.plan(source, tmp_path / "x", to="hf", encode="mxfp8")


KILLED = """
    import os, signal, sys
    import transaxle as tx

    left = int(sys.argv[4])

    def progress(size):
        global left
        left -= size
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    said = {"jobs": 1, "memory": 393216, "resume": True, "progress": progress}
    tx.convert(sys.argv[1], sys.argv[2], to="hf", encode=sys.argv[3], **said)
"""


@pytest.mark.oracle
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_killed_run_is_continued_to_the_same_bytes_and_numbers(source: Path, encoding: str) -> None:
    whole = tx.convert(source, source.parent / "whole", to="hf", encode=encoding, sync=False)
    out = source.parent / "out"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(source), str(out), encoding, "150000"]
    died = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": ""})
    assert died.returncode == -signal.SIGKILL
    assert not out.exists()
    report = tx.convert(source, out, to="hf", encode=encoding, resume=True, sync=False)
    assert 0 < report.resumed < report.tensors
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (source.parent / "whole").iterdir()}
    exact = [(m.what, m.error.max, m.error.count, m.error.unequal) for m in whole.recoded]
    assert [(m.what, m.error.max, m.error.count, m.error.unequal) for m in report.recoded] == exact
    again = tx.convert(source, out, to="hf", encode=encoding, resume=True, sync=False)
    assert again.resumed == again.tensors
    assert [(m.what, m.error.max, m.error.count, m.error.unequal) for m in again.recoded] == exact


def test_a_nan_takes_the_whole_of_an_nvfp4_tensor_with_it(tmp_path: Path) -> None:
    """Its scale is that of the amax, and there is none: better no number than a wrong one."""
    values = quantized.random(5).standard_normal((32, 64)).astype(np.float32)
    values[3, 4] = np.nan
    source = quantized.store(tmp_path / "source", ({"a": values, "b": values[4:]}, {}))
    report = tx.convert(source, tmp_path / "out", to="safetensors", encode="nvfp4", only=("a", "b"), sync=False)
    assert {measured.what.name: measured.error.max for measured in report.recoded}["a"] == np.inf
    with tx.open(tmp_path / "out", decode="fp32") as plain:
        assert np.isnan(plain["a"].read()).all()
        assert np.allclose(plain["b"].read(), values[4:], atol=0.5)
