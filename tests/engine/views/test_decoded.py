"""Decoding as a view: every range of every dialect is that range of the full decode, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import transaxle as tx
from tests.engine import quantized
from tests.engine.counting import CountingStorage
from tests.engine.quantized import BF16, BLOCKS, FP8, SCALE, SCALES, Array, Tensors
from tests.oracles.quiet import quiet
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.settings import settings as said
from transaxle.errors import UsageError
from transaxle.formats.catalog import Container, Entry, Extent

NAMES = {"block": "b.weight", "stack": "s.weight", "four": "m.down_proj", "nv": "n.weight", "tensor": "t.weight"}


def nvfp4(shape: tuple[int, int], seed: int = 5) -> tuple[Array, Array, Array]:
    """Codes, scales and the global scale of ModelOpt: `code x scale x global`."""
    rng = quantized.random(seed)
    rows, columns = shape
    codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    return (
        codes,
        rng.integers(1, 120, (rows, columns // 16), np.uint8).view(quantized.E4M3),
        np.array(0.0123, np.float32),
    )


def of_nvfp4(codes: Array, scale: Array, factor: Array) -> Array:
    return quantized.nibbles(codes).astype(np.float64) * scale.astype(np.float64).repeat(16, 1) * np.float64(factor)


def store(folder: Path, held: Tensors, section: dict[str, Any]) -> Path:
    return quantized.store(folder, (held, {"quantization_config": section}))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Array]]:
    """One tensor of each kind, and what it stands for in double precision."""
    folder = tmp_path_factory.mktemp("decoded")
    found: dict[str, tuple[Path, Array]] = {}
    for kind, shape in {"block": (300, 260), "stack": (3, 150, 140)}.items():
        held: Tensors = {}
        if len(shape) == 2:
            quantized.put(held, NAMES[kind], shape)
        else:
            parts = [quantized.blocks(shape[1:], seed) for seed in range(shape[0])]
            held = {NAMES[kind]: np.stack([c for c, _ in parts]), NAMES[kind] + SCALE: np.stack([s for _, s in parts])}
        found[kind] = (
            store(folder / kind, held, FP8),
            quantized.dequantized(held[NAMES[kind]], held[NAMES[kind] + SCALE]),
        )
    codes, scale = quantized.fours((3, 10, 96))
    found["four"] = (
        store(folder / "four", {NAMES["four"] + BLOCKS: codes, NAMES["four"] + SCALES: scale}, quantized.MXFP4),
        quantized.of_fours(codes, scale),
    )
    codes, scale, factor = nvfp4((37, 96))
    held = {"n.weight": codes, "n.weight_scale": scale, "n.weight_scale_2": factor, "n.input_scale": np.array(2, "f4")}
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    found["nv"] = store(folder / "nv", held, section), of_nvfp4(codes, scale, factor)
    single = {"t.weight": quantized.blocks((50, 70))[0], "t.weight" + SCALE: np.array(0.37, np.float32)}
    section = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "dynamic"}
    wanted = single["t.weight"].astype(np.float64) * np.float64(np.float32(0.37))
    found["tensor"] = store(folder / "tensor", single, section), wanted
    return found


def rounded(wanted: Array, dtype: str) -> Array:
    """The nearest float32, and from that the nearest value of the type."""
    single = wanted.astype(np.float32)
    return single if dtype == "fp32" else single.astype(BF16)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", NAMES)
def test_a_tensor_is_its_codes_times_its_scales(sources: dict[str, tuple[Path, Array]], kind: str, dtype: str) -> None:
    source, wanted = sources[kind]
    with tx.open(source, decode=dtype) as checkpoint:
        tensor = checkpoint[NAMES[kind]]
        assert (tensor.dtype, tensor.shape) == ({"fp32": "F32", "bf16": "BF16"}[dtype], wanted.shape)
        found = tensor.read()
        if kind == "nv":  # scale and global scale are multiplied first, and rounded
            assert np.allclose(found.astype(np.float64), wanted, rtol=2**-22 if dtype == "fp32" else 2**-8, atol=0)
        else:
            assert found.tobytes() == rounded(wanted, dtype).tobytes()
        assert list(checkpoint) == [NAMES[kind]]


@pytest.mark.oracle
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("kind", NAMES)
def test_a_range_is_that_range_of_all(sources: dict[str, tuple[Path, Array]], kind: str, data: st.DataObject) -> None:
    source, _ = sources[kind]
    with tx.open(source, decode="bf16") as checkpoint:
        whole = checkpoint[NAMES[kind]].tobytes()
        (extent,) = checkpoint.container.entries[NAMES[kind]].extents
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, min(len(whole), start + 4000)))
        assert checkpoint.container.storage.read(extent.file, start, stop - start) == whole[start:stop]
        assert checkpoint.container.storage.size(extent.file) == len(whole)


@pytest.mark.oracle
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("kind", NAMES)
def test_a_box_is_that_box_of_the_whole(sources: dict[str, tuple[Path, Array]], kind: str, data: st.DataObject) -> None:
    source, _ = sources[kind]
    with tx.open(source, decode="bf16") as checkpoint:
        tensor = checkpoint[NAMES[kind]]
        ends = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in tensor.shape]
        box = tuple(slice(*pair) for pair in ends)
        assert tensor.read(box).tobytes() == tensor.read()[box].tobytes()


def test_a_box_reads_its_own_codes_only(sources: dict[str, tuple[Path, Array]]) -> None:
    source, _ = sources["block"]
    with tx.open(source) as checkpoint:
        storage = CountingStorage(checkpoint.container.storage)
        counted = Checkpoint(replace(checkpoint.container, storage=storage), checkpoint.settings, None, None)
        tensor = counted.decode("bf16")["b.weight"]
        storage.bytes = 0
        tensor.read((slice(130, 140), slice(None)))
        assert storage.bytes <= 10 * 260 + 4 * 9


def test_codes_and_scales_in_chunks_decode_alike(sources: dict[str, tuple[Path, Array]]) -> None:
    """As DCP stores them: each buffer in several boxes, cut where the writer's ranks were cut."""
    source, wanted = sources["four"]
    with tx.open(source) as checkpoint:
        held = checkpoint.container
        chunked = {}
        for name, entry in held.entries.items():
            whole = checkpoint[name].read()
            cuts = [(0, 1), (1, 3)], [(0, 4), (4, 10)], [(0, 2), (2, 3)]
            extents, data = [], b""
            for e0, e1 in cuts[0]:
                for r0, r1 in cuts[1]:
                    for b0, b1 in cuts[2]:
                        part = whole[e0:e1, r0:r1, b0:b1]
                        start = (e0, r0, b0) + (0,) * (whole.ndim - 3)
                        extents.append(Extent(start, part.shape, name, len(data)))
                        data += part.tobytes()
            chunked[name] = (Entry(name, entry.dtype, entry.shape, tuple(extents)), data)

        class Memory(CountingStorage):
            def read_into(self, name: str, offset: int, view: memoryview) -> None:
                view[:] = chunked[name][1][offset : offset + len(view)]

        container = Container(
            "memory", "memory", Memory(held.storage), {n: entry for n, (entry, _) in chunked.items()},
            {n: len(data) for n, (_, data) in chunked.items()},
        )  # fmt: skip
        config = {"quantization_config": quantized.MXFP4}
        decoded = Checkpoint(container, said(config=config), None, None).decode("fp32")
        assert decoded["m.down_proj"].tobytes() == wanted.astype(np.float32).tobytes()
        box = (slice(0, 2), slice(3, 7), slice(31, 66))
        assert decoded["m.down_proj"].read(box).tobytes() == wanted[box].astype(np.float32).tobytes()


@pytest.mark.parametrize(("form", "dialect"), [("safetensors", "megatron"), ("dcp", "torchtitan")])
def test_a_conversion_decodes_into_any_dialect_and_container(tmp_path: Path, form: str, dialect: str) -> None:
    """Equal to decoding by hand first, and then converting what is plain."""
    held, config = quantized.llama(d=256, f=384, g=2, r=1, head=128)
    source = quantized.store(tmp_path / "source", (held, config), shards=3)
    by_hand = {n: quantized.dequantized(a, held[n + SCALE]).astype(np.float32).astype(BF16) if n + SCALE in held else a
               for n, a in held.items() if not n.endswith(SCALE)}  # fmt: skip
    plain = quantized.store(
        tmp_path / "plain", (by_hand, {k: v for k, v in config.items() if k != "quantization_config"})
    )
    report = tx.convert(source, tmp_path / "out", to=f"{form}:{dialect}", decode="bf16", sync=False)
    assert tx.diff(plain, tmp_path / "out").equal
    assert tx.verify(tmp_path / "out").ok
    assert {measured.what.name for measured in report.recoded} == {
        n.removesuffix(SCALE) for n in held if n.endswith(SCALE)
    }
    written = quantized.config_of(tmp_path / "out")
    assert "quantization_config" not in written
    assert written["torch_dtype"] == "bfloat16"
    assert tx.diff(source, tmp_path / "out", numeric=True).differences  # bf16 has not all bits of the products


def test_the_report_says_how_far_values_moved(tmp_path: Path) -> None:
    held, config = quantized.llama(d=128, f=256, g=1, r=1, head=128)
    exact = "model.layers.0.mlp.up_proj.weight"
    held[exact + SCALE] = np.exp2(np.round(np.log2(held[exact + SCALE]))).astype(np.float32)
    source = quantized.store(tmp_path / "source", (held, config))
    report = tx.convert(source, tmp_path / "out", to="hf", decode="bf16", sync=False)
    for measured in report.recoded:
        name = measured.what.name
        product = quantized.dequantized(held[name], held[name + SCALE])
        apart = np.abs(product.astype(np.float32).astype(BF16).astype(np.float64) - product)
        assert measured.error.max == apart.max()
        assert measured.error.rms == pytest.approx(np.sqrt((apart**2).mean()), rel=1e-9)
        assert measured.error.exact == (name == exact) == (not apart.any())
        assert measured.as_json() == {
            "name": name, "action": "decoded", "encoding": "float8_block", "convention": "deepseek", "dtype": "BF16",
            "shape": list(product.shape), "max_abs": apart.max(), "rms": measured.error.rms, "exact": name == exact,
        }  # fmt: skip
    again = tx.convert(source, tmp_path / "out", to="hf", decode="bf16", resume=True, sync=False)
    assert again.resumed == report.tensors
    assert [m.as_json() for m in again.recoded] == [m.as_json() for m in report.recoded]
    plan = tx.plan(source, tmp_path / "x", to="hf", decode="bf16")
    assert [what.name for what in plan.recoded] == [m.what.name for m in report.recoded]


def test_patterns_choose_what_is_decoded(tmp_path: Path) -> None:
    held, config = quantized.llama(d=128, f=128, g=1, r=1, head=128, layers=2)
    source = quantized.store(tmp_path / "source", (held, config))
    out = tmp_path / "out"
    tx.convert(source, out, to="hf", decode="fp32", only="*.mlp.*", skip=["*layers.1*"], sync=False)
    got = quantized.read(out)
    mine = {name for name, array in got.items() if array.dtype == np.float32 and not name.endswith(SCALE)}
    assert mine == {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    rest = {name for name in held if not any(name.startswith(one) for one in mine)}
    assert {n: got[n].tobytes() for n in rest} == {n: held[n].tobytes() for n in rest}
    assert got.keys() == rest | mine
    with tx.open(out) as checkpoint:  # the config tells what is left
        assert {n.removesuffix(SCALE) for n in rest if n.endswith(SCALE)} == checkpoint.encoded.keys()
        assert not checkpoint.catalog.refusals
    assert tx.diff(source, out, numeric=True).equal
    for only, skip in (("*.mpl.*", ()), ((), ["nothing*"])):
        with pytest.raises(UsageError, match="no encoded tensor has a name like"):
            tx.convert(source, tmp_path / "x", to="hf", decode="bf16", only=only, skip=skip)
    with pytest.raises(TypeError, match="only and skip"):
        tx.convert(source, tmp_path / "x", to="hf", only="*")
    with pytest.raises(UsageError, match="cannot decode to"):
        tx.open(source, decode="fp64")


def test_both_files_in_which_modelopt_speaks_stay_true(tmp_path: Path) -> None:
    """Its newer exports say the same in config.json and in hf_quant_config.json."""
    said = {"quant_algo": "FP8"}
    config = {"quantization_config": {"quant_method": "modelopt", "ignore": ["lm_head"], **said}}
    held = {"lm_head.weight": quantized.plain((8, 8))}
    for name in ("a", "b"):
        held |= {f"{name}.weight": quantized.blocks((8, 8))[0], f"{name}.weight_scale": np.array(0.5, np.float32)}
    source = quantized.store(tmp_path / "source", (held, config))
    file = "hf_quant_config.json"
    own = {"producer": {"name": "modelopt"}, "quantization": {"exclude_modules": ["lm_head"], **said}}
    (source / file).write_text(json.dumps(own))
    tx.convert(source, tmp_path / "same", to="safetensors", sync=False)
    assert json.loads((tmp_path / "same" / file).read_text()) == own
    tx.convert(source, tmp_path / "part", to="safetensors", decode="bf16", only="a.*", sync=False)
    assert quantized.config_of(tmp_path / "part")["quantization_config"]["ignore"] == ["lm_head", "a"]
    assert json.loads((tmp_path / "part" / file).read_text())["quantization"]["exclude_modules"] == ["lm_head", "a"]
    report = tx.convert(source, tmp_path / "all", to="safetensors", decode="bf16", sync=False)
    assert "quantization_config" not in quantized.config_of(tmp_path / "all")
    assert file in report.ignored
    assert not (tmp_path / "all" / file).exists()


def compressed(section: dict[str, Any], **more: Array) -> tuple[Tensors, dict[str, Any]]:
    """A Llama in FP8 blocks as compressed-tensors stores it, with more of its section and more tensors of its layer."""
    held, config = quantized.llama(d=128, f=128, g=1, r=1, head=128)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "dynamic": False}
    own = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    renamed = {name.replace(SCALE, "_scale"): array for name, array in held.items()}
    layer = {f"model.layers.0.self_attn.{name.replace('__', '.')}": array for name, array in more.items()}
    return renamed | layer, {**config, "quantization_config": {**own, **section}}


HALF = np.full(128, 0.5, np.float32)
ROTATED = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
MORE: dict[str, tuple[dict[str, Any], dict[str, Array], str]] = {
    "rotated": ({"transform_config": ROTATED}, {}, "transform_config rotates"),
    "inputs scaled": ({}, {"q_proj__pre_quant_scale": HALF}, "more than code times scale"),
    "a matrix of its own": ({}, {"q_proj__R1_input__weight": HALF.reshape(8, 16)}, "more than code times scale"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparsity_config.format"),
    "a key of tomorrow": ({"exponent_bias": 3}, {}, "exponent_bias is not known"),
}


@pytest.mark.parametrize("kind", MORE)
def test_values_that_are_more_than_codes_and_scales_are_never_decoded(kind: str, tmp_path: Path) -> None:
    """Nor moved to other names, by any way; under their own names they stay as they are, and so does the config."""
    section, tensors, words = MORE[kind]
    source = quantized.store(tmp_path / "source", compressed(section, **tensors))
    out = tmp_path / "out"
    ways: list[dict[str, Any]] = [{"decode": "bf16"}, {"decode": "fp32", "only": "*mlp*"}, {}]
    for to in ("hf", "megatron", "safetensors"):
        for options in ways:
            if options or to != "safetensors":
                with pytest.raises(tx.TransaxleError, match=f"(?s)UNSUPPORTED.*{words}"):
                    tx.convert(source, out, to=to, sync=False, **options)
                assert not out.exists()
    plain = {name: np.zeros((128, 128), np.float32) for name in ("model.layers.0.self_attn.q_proj.weight",)}
    for attempt in (
        lambda: tx.open(source, decode="bf16"),
        lambda: tx.open(source).as_dialect("megatron"),
        lambda: tx.load({name: torch.from_numpy(array) for name, array in plain.items()}, source, decode="fp32"),
    ):
        with pytest.raises(tx.TransaxleError, match=f"(?s)UNSUPPORTED.*{words}"):
            attempt()
    tx.convert(source, out, to="safetensors", sync=False)
    assert quantized.same(source, out)
    assert quantized.config_of(out) == quantized.config_of(source)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_scales_of_a_cache_and_what_the_config_says_of_it_stay(tmp_path: Path) -> None:
    """compressed-tensors reads the section, and transformers loads the decoded weights.

    It leaves the scales: compressed-tensors 0.20.1 does not take the attention of transformers 5.24 for one with a
    cache, as its argument has another name than before.
    """
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    scales = {"k_scale": np.array([0.25], np.float32), "v_scale": np.array([0.125], np.float32)}
    source = quantized.store(tmp_path / "source", compressed({"kv_cache_scheme": cache}, **scales))
    tx.convert(source, tmp_path / "out", to="hf", decode="bf16", sync=False)
    section = quantized.config_of(tmp_path / "out")["quantization_config"]
    assert (section["kv_cache_scheme"], section["config_groups"], section["format"]) == (cache, {}, "dense")
    with quiet():
        from compressed_tensors.quantization import QuantizationConfig
        from transformers import AutoModelForCausalLM

        read = QuantizationConfig.model_validate(section)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.kv_cache_scheme is not None
    assert (read.kv_cache_scheme.num_bits, read.config_groups) == (8, {})
    stored, held = quantized.read(tmp_path / "out"), dict(model.named_parameters())
    assert all(stored[f"model.layers.0.self_attn.{name}"] == scale for name, scale in scales.items())
    name = "model.layers.0.self_attn.q_proj.weight"
    before = quantized.read(source)
    values = quantized.dequantized(before[name], before[f"{name}_scale"])
    assert np.array_equal(held[name].detach().float().numpy(), values.astype(BF16).astype(np.float32))


def test_a_layout_that_depends_on_the_encoding_needs_its_dialect(tmp_path: Path) -> None:
    """gpt-oss keeps plain experts transposed: under their own names and in the order of the codes nobody reads them."""
    source = quantized.store(tmp_path / "source", quantized.gpt_oss(d=64, f=96, e=2))
    found = tx.plan(source, tmp_path / "x", to="safetensors", decode="bf16").refusals
    assert [(refusal.code, "FORMAT:hf" in refusal.hint) for refusal in found] == [("UNSUPPORTED", True)] * 2
    tx.convert(source, tmp_path / "out", to="hf", decode="bf16", sync=False)
    held = quantized.read(source)
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    wanted = quantized.of_fours(held[stem + BLOCKS], held[stem + SCALES]).swapaxes(1, 2)
    assert np.array_equal(quantized.read(tmp_path / "out")[stem].astype(np.float64), wanted)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_decoded_values_that_would_become_infinite_are_refused(tmp_path: Path, dtype: str) -> None:
    """A finite code times a finite scale above the range of the type; an infinite scale stands for infinity."""
    held: Tensors = {}
    for name, scale in {"over.weight": 3e38, "infinite.weight": np.inf, "fine.weight": 7e35}.items():
        held[name] = np.full((128, 128), 448, quantized.E4M3)
        held[name + SCALE] = np.full((1, 1), scale, np.float32)
    source, out = store(tmp_path / "source", held, FP8), tmp_path / "out"
    with pytest.raises(tx.TransaxleError, match="LOSSY") as caught:
        tx.convert(source, out, to="safetensors:identity", decode=dtype, sync=False)
    assert [refusal.where.tensor for refusal in caught.value.refusals] == ["over.weight"]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    report = tx.convert(source, out, to="safetensors:identity", decode=dtype, allow_lossy=True, sync=False)
    errors = {told.what.name: told.error.max for told in report.recoded}
    assert [name for name, error in errors.items() if error == np.inf] == ["over.weight"]
