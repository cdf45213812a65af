"""Quantized tensors move raw: codes and scales, through relayouts, fusions, stacks and cuts, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import transaxle as tx
from tests.engine import quantized
from tests.engine.quantized import BLOCKS, FP8, SCALE, SCALES, Array, Tensors
from transaxle.errors import Refusal

RULES = """
family probe
  model_type probe
  axes l=layers e=experts d=hidden f=inner g=groups r=repeat t=2 h=half
  gate : l e f d
  up   : l e f d
  q    : l g r t h d
  k    : l g t h d
  v    : l g t h d

dialect parts
  layers.{l}.experts.{e}.gate.weight = gate[f d]
  layers.{l}.experts.{e}.up.weight   = up[f d]
  layers.{l}.q.weight = q[(g r t h) d]
  layers.{l}.k.weight = k[(g t h) d]
  layers.{l}.v.weight = v[(g t h) d]

dialect fused like parts
  layers.{l}.experts.{e}.gate_up.weight = [[gate:f | up:f] d]

dialect stacked like parts
  layers.{l}.experts.gate = gate[e f d]
  layers.{l}.experts.up   = up[e f d]

dialect packed like parts
  layers.{l}.experts.gate_up = [e [gate:f | up:f] d]

dialect turned like parts
  layers.{l}.experts.gate_up = [e d [gate:f | up:f]]

dialect interleaved like parts
  layers.{l}.experts.{e}.gate_up.weight = [(f [gate: | up:]) d]

dialect rope like parts
  layers.{l}.q.weight = q[(g r h t) d]
  layers.{l}.k.weight = k[(g h t) d]

dialect grouped like parts
  layers.{l}.qkv.weight = [(g [q:(r t h) | k:(t h) | v:(t h)]) d]
"""
E, D = 2, 128


def probe(folder: Path, *, f: int = 128, head: int = 128, g: int = 2, r: int = 2) -> Path:
    """One layer of experts and of attention in FP8 blocks, with a table of many dialects beside it."""
    config = {"model_type": "probe", "layers": 1, "experts": E, "hidden": D, "inner": f, "groups": g, "repeat": r}
    held: Tensors = {}
    for expert in range(E):
        for half in ("gate", "up"):
            quantized.put(held, f"layers.0.experts.{expert}.{half}.weight", (f, D), len(held))
    for part, rows in {"q": g * r * head, "k": g * head, "v": g * head}.items():
        quantized.put(held, f"layers.0.{part}.weight", (rows, D), len(held))
    source = quantized.store(folder / "source", (held, {**config, "half": head // 2, "quantization_config": FP8}))
    (folder / "my.rules").write_text(RULES)
    return source


def refusals(source: Path, to: str, **said: Any) -> list[Refusal]:
    return list(tx.plan(source, source.parent / "x", to=f"safetensors:{to}", **_said(source), **said).refusals)


def _said(source: Path) -> dict[str, Any]:
    return {"rules": source.parent / "my.rules", "dialect": "parts"}


def converted(source: Path, to: str, **said: Any) -> tuple[Tensors, tx.Report]:
    """Convert, and compare with the source once more, both ways."""
    out = source.parent / f"{to} out"
    given = {**_said(source), **said}
    report = tx.convert(source, out, to=f"safetensors:{to}", sync=False, **given)
    assert tx.diff(source, out, **given).equal
    assert not report.recoded
    return quantized.read(out), report


def values(held: Tensors, name: str) -> Array:
    return quantized.dequantized(held[name], held[name + SCALE])


def torch_of(codes: Array) -> torch.Tensor:
    return torch.from_numpy(codes.view(np.uint8))


def same_codes(found: Array, wanted: torch.Tensor) -> bool:
    return bool(np.array_equal(found.view(np.uint8), wanted.numpy()))


def half(held: Tensors, expert: int, part: str) -> Array:
    return held[f"layers.0.experts.{expert}.{part}.weight"]


def lay_out(to: str, parts: Mapping[tuple[int, str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch makes in a dialect of the two halves of each expert."""
    whole = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(E)]
    if to == "fused":
        return {f"layers.0.experts.{e}.gate_up.weight": each for e, each in enumerate(whole)}
    if to == "stacked":
        return {f"layers.0.experts.{half}": torch.stack([parts[e, half] for e in range(E)]) for half in ("gate", "up")}
    stack = torch.stack(whole)
    return {"layers.0.experts.gate_up": stack.mT.contiguous() if to == "turned" else stack}


@pytest.mark.oracle
@pytest.mark.parametrize("f", [128, 1408])
@pytest.mark.parametrize("to", ["fused", "stacked", "packed", "turned"])
def test_experts_are_fused_and_stacked_with_their_scales(tmp_path: Path, f: int, to: str) -> None:
    """The codes are what torch makes of them, and every value is what it was."""
    source = probe(tmp_path, f=f)
    before = quantized.read(source)
    got, _ = converted(source, to)
    names = {(e, part): f"layers.0.experts.{e}.{part}.weight" for e in range(E) for part in ("gate", "up")}
    codes = lay_out(to, {key: torch_of(before[name]) for key, name in names.items()})
    wanted = lay_out(to, {key: torch.from_numpy(values(before, name)) for key, name in names.items()})
    for name in codes:
        assert same_codes(got[name], codes[name])
        assert np.array_equal(values(got, name), wanted[name].numpy())
        assert to != "fused" or got[name + SCALE].shape == (2 * f // 128, D // 128)


@pytest.mark.parametrize("f", [576, 1344])
def test_fusing_halves_that_share_a_tile_is_refused_with_the_numbers(tmp_path: Path, f: int) -> None:
    source = probe(tmp_path, f=f)
    found = refusals(source, "fused")
    assert {refusal.code for refusal in found} == {"BLOCK_MISALIGNED"}
    message = str(found[0])
    last = f // 128
    for number in (f"layers.0.experts.0.gate.weight, tile ({last}, 0)", "layers.0.experts.0.up.weight, tile (0, 0)",
                   f"from position {f} = {last} x 128 + {f % 128} on", "--decode bf16"):  # fmt: skip
        assert number in message
    with pytest.raises(tx.TransaxleError, match="BLOCK_MISALIGNED"):
        tx.convert(source, tmp_path / "x", to="safetensors:packed", **_said(source))
    assert not (tmp_path / "x").exists()
    assert not refusals(source, "stacked")  # each expert keeps its own last tile
    converted(source, "stacked")


@pytest.mark.parametrize(
    ("to", "sizes"),
    [("interleaved", {}), ("rope", {"head": 80, "g": 4}), ("rope", {"head": 192, "g": 4}), ("grouped", {"head": 80})],
)
def test_what_would_take_tiles_apart_is_refused(tmp_path: Path, to: str, sizes: dict[str, int]) -> None:
    assert {refusal.code for refusal in refusals(probe(tmp_path, **sizes), to)} == {"BLOCK_MISALIGNED"}


def test_heads_are_permuted_for_rope_with_their_scales(tmp_path: Path) -> None:
    head = 64
    source = probe(tmp_path, head=head)
    before = quantized.read(source)
    got, _ = converted(source, "rope")
    for part in ("q", "k"):
        name = f"layers.0.{part}.weight"
        codes = torch_of(before[name])
        heads = codes.shape[0] // head
        permuted = codes.view(heads, 2, head // 2, D).transpose(1, 2).reshape(codes.shape)
        assert same_codes(got[name], permuted)
        wanted = values(before, name).reshape(heads, 2, head // 2, D).swapaxes(1, 2).reshape(codes.shape)
        assert np.array_equal(values(got, name), wanted)


@pytest.mark.parametrize("to", ["transformers", "automodel", "te"])
def test_deepseek_goes_through_every_dialect_and_back(tmp_path: Path, to: str) -> None:
    """Experts stacked and fused, latent attention with its RoPE parts, shared experts, dense and predicting layers."""
    made = quantized.deepseek()
    source = quantized.store(tmp_path / "source", made, shards=2)
    tx.convert(source, tmp_path / "out", to=to, sync=False)
    assert tx.verify(source, tmp_path / "out").equal
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", sync=False)
    back, held = quantized.read(tmp_path / "back"), made[0]
    assert {n: (a.shape, a.tobytes()) for n, a in back.items()} == {n: (a.shape, a.tobytes()) for n, a in held.items()}
    assert quantized.config_of(tmp_path / "out")["quantization_config"]["weight_block_size"] == [128, 128]
    got = quantized.read(tmp_path / "out")
    stems = {
        "transformers": ("model.layers.1.mlp.experts.gate_up_proj", False),
        "automodel": ("model.layers.1.mlp.experts.gate_and_up_projs", True),
        "te": ("decoder.layers.1.mlp.experts.linear_fc1.weight", False),
    }
    name, turned = stems[to]
    parts = [[values(held, f"model.layers.1.mlp.experts.{e}.{half}_proj.weight") for half in ("gate", "up")]
             for e in range(4)]  # fmt: skip
    wanted = np.stack([np.concatenate(halves) for halves in parts])
    assert np.array_equal(values(got, name), wanted.swapaxes(1, 2) if turned else wanted)


@pytest.mark.parametrize(("rows", "ranks", "wrong"), [(576, 8, 160), (7168, 64, 2688)])
def test_a_cut_may_fall_inside_a_tile(tmp_path: Path, rows: int, ranks: int, wrong: int) -> None:
    """Automodel dequantizes a shard as if it began a tile: 37 % of 7168 rows over 64 ranks are wrong there."""
    held: Tensors = {}
    quantized.put(held, "w.weight", (rows, 128))
    source = quantized.store(tmp_path / "source", (held, {"quantization_config": FP8}))
    whole = values(held, "w.weight")
    size = rows // ranks
    naively_wrong = 0
    with tx.open(source) as checkpoint, tx.open(source, decode="fp32") as decoded:
        codes, scales, plain = checkpoint["w.weight"], checkpoint["w.weight" + SCALE], decoded["w.weight"]
        for rank in range(ranks):
            start, stop = rank * size, (rank + 1) * size
            first, last, phase = start // 128, -(-stop // 128), start % 128
            mine = codes.read((slice(start, stop), slice(None)))
            own = scales.read((slice(first, last), slice(None)))
            assert np.array_equal(mine.view(np.uint8), held["w.weight"][start:stop].view(np.uint8))
            assert np.array_equal(own, held["w.weight" + SCALE][first:last])
            padded = np.concatenate([np.zeros((phase, 128), mine.dtype), mine])
            assert np.array_equal(quantized.dequantized(padded, own)[phase:], whole[start:stop])
            shard = plain.read((slice(start, stop), slice(None)))
            assert np.array_equal(shard, whole[start:stop].astype(np.float32))
            naive = quantized.dequantized(mine, np.concatenate([own, own])[: -(-size // 128)])
            naively_wrong += int((naive != whole[start:stop]).any(1).sum())
    assert naively_wrong == wrong


def test_packed_codes_are_deinterleaved_as_their_values_are(tmp_path: Path) -> None:
    """Megatron keeps gate and up of each expert apart: torch does it with the values, we with the codes."""
    e, f, d = 3, 64, 96
    made = quantized.gpt_oss(d=d, f=f, e=e)
    source = quantized.store(tmp_path / "source", made)
    tx.convert(source, tmp_path / "out", to="megatron", sync=False)
    got, held = quantized.read(tmp_path / "out"), made[0]
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    whole = torch.from_numpy(quantized.of_fours(held[stem + BLOCKS], held[stem + SCALES]))
    gate, up = whole[:, 0::2], whole[:, 1::2]
    for expert in range(e):
        name = f"decoder.layers.0.mlp.experts.linear_fc1.weight{expert}"
        assert got[name + BLOCKS].shape == (2 * f, d // 32, 16)
        found = quantized.of_fours(got[name + BLOCKS], got[name + SCALES])
        assert np.array_equal(found, torch.cat([gate[expert], up[expert]]).numpy())
        blocks = torch.from_numpy(held[stem + BLOCKS][expert])
        assert np.array_equal(got[name + BLOCKS], torch.cat([blocks[0::2], blocks[1::2]]).numpy())
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", sync=False)
    assert quantized.same(source, tmp_path / "back")
    assert quantized.config_of(tmp_path / "back")["quantization_config"]["quant_method"] == "mxfp4"


def test_raw_and_then_decoded_is_decoded_and_then_raw(tmp_path: Path) -> None:
    source = quantized.store(tmp_path / "source", quantized.gpt_oss(d=64, f=96, e=4))
    tx.convert(source, tmp_path / "raw", to="megatron", sync=False)
    tx.convert(tmp_path / "raw", tmp_path / "one", to="megatron", decode="bf16", sync=False)
    tx.convert(source, tmp_path / "two", to="megatron", decode="bf16", sync=False)
    assert quantized.same(tmp_path / "one", tmp_path / "two")
    with tx.open(source) as raw, tx.open(source, decode="fp32") as decoded:
        stem = "decoder.layers.0.mlp.experts.linear_fc1.weight2"
        view, plain = raw.as_dialect("megatron"), decoded.as_dialect("megatron")
        for box in [(slice(5, 130), slice(32, 64)), (slice(0, 7), slice(0, 64))]:
            rows, columns = box
            blocks = view[stem + BLOCKS].read((rows, slice(columns.start // 32, columns.stop // 32), slice(None)))
            scales = view[stem + SCALES].read((rows, slice(columns.start // 32, columns.stop // 32)))
            assert np.array_equal(plain[stem].read(box), quantized.of_fours(blocks, scales).astype(np.float32))


def test_a_transposed_target_would_take_bytes_apart(tmp_path: Path) -> None:
    source = quantized.store(tmp_path / "source", quantized.gpt_oss(d=64, f=96, e=2))
    found = tx.plan(source, tmp_path / "x", to="automodel").refusals
    assert {refusal.code for refusal in found} == {"BLOCK_MISALIGNED"}
    assert all("--decode bf16" in refusal.hint for refusal in found)
    tx.convert(source, tmp_path / "out", to="automodel", decode="bf16", sync=False)
    assert tx.diff(source, tmp_path / "out", numeric=True).equal


def test_parts_in_two_encodings_are_refused(tmp_path: Path) -> None:
    held, config = quantized.llama(d=128, f=128, g=1, r=1, head=128)
    name = "model.layers.0.mlp.up_proj.weight"
    del held[name + SCALE]
    held[name] = quantized.plain((128, 128))
    source = quantized.store(tmp_path / "source", (held, config))
    (found,) = tx.plan(source, tmp_path / "x", to="megatron").refusals
    assert found.code == "DTYPE_MIXED"
    assert "BF16" in found.message
    assert "float8_block" in found.message
    tx.convert(source, tmp_path / "out", to="torchtitan", sync=False)  # nothing is fused there
    written = quantized.read(tmp_path / "out")
    assert written["layers.0.feed_forward.w3.weight"].tobytes() == held[name].tobytes()


def per_tensor(folder: Path, equal: bool) -> Path:
    """A Llama in FP8 with one scale for each tensor."""
    held, config = quantized.llama(d=128, f=128, g=1, r=1, head=128)
    for at, name in enumerate([name for name in held if name.endswith(SCALE)]):
        held[name] = np.array(0.5 if equal else 0.5 + at, np.float32)
    section = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "dynamic"}
    return quantized.store(folder, (held, {**config, "quantization_config": section}))


def test_one_scale_for_a_fused_tensor_needs_equal_ones(tmp_path: Path) -> None:
    source = per_tensor(tmp_path / "equal", True)
    report = tx.convert(source, tmp_path / "out", to="megatron", sync=False)
    assert report.checks == 3  # k and v with q, up with gate
    assert quantized.read(tmp_path / "out")["decoder.layers.0.mlp.linear_fc1.weight" + SCALE] == np.float32(0.5)
    other = per_tensor(tmp_path / "other", False)
    with pytest.raises(tx.TransaxleError, match="UNEQUAL_COPIES") as caught:
        tx.convert(other, tmp_path / "x", to="megatron")
    assert "linear_fc1.weight_scale_inv" in str(caught.value)
    assert all(
        refusal.hint.startswith("Choose a dialect that stores these tensors separately")
        for refusal in caught.value.refusals
    )
    pairs = [refusal.message.split("for the tensors of ")[1].split(",")[0] for refusal in caught.value.refusals]
    assert pairs == ["q_proj and k_proj", "q_proj and v_proj", "gate_proj and up_proj"]
    assert not (tmp_path / "x").exists()
    assert not tx.diff(source, other).equal


@pytest.mark.parametrize("equal", [True, False])
def test_one_scale_for_each_fused_expert_of_a_stack(tmp_path: Path, equal: bool) -> None:
    """Experts keep a scale each; the two halves of one must have the same."""
    source = probe(tmp_path, f=96)
    held = quantized.read(source)
    for name in [name for name in held if name.endswith(SCALE)]:
        expert = int(name.split(".")[3]) if "experts" in name else 9
        held[name] = np.array(expert + (1 if equal or "gate" in name else 2), np.float32)
    section = {**FP8, "weight_block_size": None}
    config = {**quantized.config_of(source), "quantization_config": section}
    other = quantized.store(tmp_path / "per tensor" / "source", (held, config))
    (other.parent / "my.rules").write_text(RULES)
    if not equal:
        with pytest.raises(tx.TransaxleError, match="UNEQUAL_COPIES"):
            converted(other, "packed")
        assert not (other.parent / "packed out").exists()
        return
    got, report = converted(other, "packed")
    name = "layers.0.experts.gate_up"
    assert report.checks == 1  # of both experts at once
    assert got[name + SCALE].reshape(-1).tolist() == [1, 2]
    wanted = torch.stack([torch.cat([torch_of(half(held, e, part)) for part in ("gate", "up")]) for e in range(E)])
    assert same_codes(got[name], wanted)
    with tx.open(other.parent / "packed out", decode="fp32", **_said(other) | {"dialect": "packed"}) as checkpoint:
        scaled = got[name].astype(np.float32) * np.array([1, 2], np.float32)[:, None, None]
        assert np.array_equal(checkpoint[name].read(), scaled)


def test_malformed_buffers_are_listed_and_identity_still_moves_them(tmp_path: Path) -> None:
    held, config = quantized.llama(d=128, f=256, g=1, r=1, head=128)
    name = "model.layers.0.mlp.up_proj.weight" + SCALE
    held[name] = held[name][:1]
    source = quantized.store(tmp_path / "source", (held, config))
    (found,) = tx.plan(source, tmp_path / "x", to="torchtitan").refusals
    assert found.code == "SHAPE_MISMATCH"
    assert "--to safetensors:identity" in found.hint
    with pytest.raises(tx.TransaxleError, match="SHAPE_MISMATCH"):
        tx.open(source, decode="bf16")
    tx.convert(source, tmp_path / "same", to="safetensors", sync=False)
    assert quantized.same(source, tmp_path / "same")


def test_optimizer_state_of_a_quantized_weight_follows_it(tmp_path: Path) -> None:
    held, config = quantized.llama(d=128, f=128, g=1, r=1, head=128)
    halves = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    moments = {}
    for name in [name for name in held if not name.endswith(SCALE)]:
        moments[f"optim/{name}/exp_avg"] = quantized.random(len(name)).standard_normal(held[name].shape).astype("f4")
    source = quantized.store(tmp_path / "source", ({**held, **moments}, config))
    tx.convert(source, tmp_path / "out", to="megatron", sync=False)
    got = quantized.read(tmp_path / "out")
    wanted = np.concatenate([moments[f"optim/{name}/exp_avg"] for name in halves])
    assert np.array_equal(got["optim/decoder.layers.0.mlp.linear_fc1.weight/exp_avg"], wanted)


def test_real_types_survive(tmp_path: Path) -> None:
    """Scales that are exponents keep the type in which they are stored, U8 or F8_E8M0."""
    held: Tensors = {"x.weight": quantized.blocks((64, 64))[0]}
    scale = quantized.random(3).integers(100, 140, (64, 2), np.uint8)
    section = {**FP8, "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    for kind in ("u1", ml_dtypes.float8_e8m0fnu):
        held["x.weight" + SCALE] = scale.view(kind)
        folder = tmp_path / str(np.dtype(kind))
        source = quantized.store(folder, (held, {"quantization_config": section}))
        with tx.open(source, decode="fp32") as checkpoint:
            wanted = held["x.weight"].astype(np.float32) * np.exp2(scale.astype(np.float32) - 127).repeat(32, 1)
            assert np.array_equal(checkpoint["x.weight"].read(), wanted)


def test_a_list_of_modules_does_not_grow_from_dialect_to_dialect(tmp_path: Path) -> None:
    """There and back, each list has the names of its own dialect alone."""
    held, config = quantized.deepseek()
    plain = ["model.layers.1.mlp.gate", "model.embed_tokens"]
    config["quantization_config"] = {**config["quantization_config"], "modules_to_not_convert": plain}
    source = quantized.store(tmp_path / "source", (held, config))
    listed = []
    for number, dialect in enumerate(["torchtitan", "hf", "torchtitan", "hf"]):
        target = tmp_path / str(number)
        tx.convert(source, target, to=f"safetensors:{dialect}", sync=False)
        listed.append(set(quantized.config_of(target)["quantization_config"]["modules_to_not_convert"]))
        source = target
    assert listed[:2] == listed[2:]
    modules = [{name.rpartition(".")[0] for name in quantized.read(tmp_path / str(n))} for n in (0, 1)]
    assert listed[0] <= modules[0]
    assert listed[1] <= modules[1]
