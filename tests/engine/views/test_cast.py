"""`--dtype` casts plain numbers as torch does, and `--decode` concerns codes alone."""

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
from transaxle.encodings.arithmetic.scaling import cast
from transaxle.encodings.encoding import CASTS
from transaxle.errors import UsageError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SOURCES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
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


@pytest.mark.oracle
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


def test_refusals_follow_the_source_in_whatever_order_threads_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"w{number}" for number in range(5)]
    save_file({name: torch.full((4,), 1e30) for name in names}, tmp_path / "source.safetensors")

    def backwards(numbers: Any, _jobs: int, _worker: Any, work: Any) -> None:
        for number in reversed(numbers):
            work(None, number)

    monkeypatch.setattr("transaxle.engine.plan.recoding.run_workers", backwards)
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(tmp_path / "source.safetensors", tmp_path / "out", to="safetensors", dtype="fp16")
    assert [refusal.where.tensor for refusal in caught.value.refusals] == names


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


@pytest.mark.parametrize(("path", "encoded"), [("", True), ("k_proj.", False)])
def test_scales_of_a_quantized_model_s_cache_stay(path: str, encoded: bool, tmp_path: Path) -> None:
    """Also where all weights have been decoded, and the config still says how keys and values are cached."""
    held, config = quantized.llama(d=128, f=128, g=1, r=1, head=128)
    scale = f"model.layers.0.self_attn.{path}k_scale"
    held[scale] = np.array([1 + 2**-20], np.float32)
    if not encoded:
        held = {name: array for name, array in held.items() if array.dtype in (np.float32, quantized.BF16)}
        held = {name: array for name, array in held.items() if not name.endswith(quantized.SCALE)}
        dense = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
        config = {**config, "quantization_config": {**dense, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    source = quantized.store(tmp_path / "source", (held, config))
    report = tx.convert(source, tmp_path / "out", to="safetensors", dtype="fp16", sync=False)
    assert scale in report.stayed
    assert np.array_equal(quantized.read(tmp_path / "out")[scale], held[scale])
    report = tx.convert(source, tmp_path / "asked", to="safetensors", dtype="fp16", only=scale, sync=False)
    assert [each.what.name for each in report.recoded] == [scale]


def test_decode_where_nothing_is_encoded_is_refused_with_the_way(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    with pytest.raises(UsageError, match=r"(?s)AMBIGUOUS.*no encoded tensors.*--dtype fp32"):
        tx.convert(source, tmp_path / "out", to="hf", decode="fp32")
    assert not (tmp_path / "out").exists()


LAYER = "model.layers.0.self_attn.q_proj"
ROWS, COLUMNS = 32, 64
Tensors = dict[str, torch.Tensor]


def whole(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random integers of a type."""
    return torch.randint(0, 127, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def real(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.01).to(dtype)


def quantized_elsewhere() -> dict[str, tuple[str, Tensors]]:
    """One layer as each program stores it whose codes are not known here -> the method of its config, and tensors."""
    f16, bf16, f32, i32, u8, i8 = (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.uint8, torch.int8)
    packed = {"qweight": whole(i32, 8, ROWS), "qzeros": whole(i32, 4, 4), "scales": real(f16, 4, ROWS)}
    of_nested = {
        f"weight.{name}": real(f32, 8) for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    }
    state = {"weight.quant_state.bitsandbytes__nf4": whole(u8, 90)}
    layers: dict[str, tuple[str, Tensors]] = {
        "gptq": ("gptq", packed | {"g_idx": whole(i32, COLUMNS)}),
        "pack-quantized": (
            "compressed-tensors",
            {
                "weight_packed": whole(i32, ROWS, 8),
                "weight_scale": real(bf16, ROWS, 4),
                "weight_shape": whole(torch.int64, 2),
            },
        ),
        "w8a8": ("compressed-tensors", {"weight": whole(i8, ROWS, COLUMNS), "weight_scale": real(f32, ROWS, 1)}),
        "int8": ("bitsandbytes", {"weight": whole(i8, ROWS, COLUMNS), "SCB": real(f32, ROWS)}),
        "nf4": ("bitsandbytes", {"weight": whole(u8, ROWS * COLUMNS // 2, 1), **of_nested, **state}),
        "hqq": ("hqq", {"W_q": whole(u8, ROWS, COLUMNS // 2), "scale": real(f16, 64, 1), "zero": real(f16, 64, 1)}),
        "eetq": ("eetq", {"weight": whole(i8, COLUMNS, ROWS), "weight_scales": real(f16, ROWS)}),
        "quanto": ("quanto", {"weight._data": whole(i8, ROWS, COLUMNS), "weight._scale": real(bf16, ROWS, 1)}),
        "aqlm": (
            "aqlm",
            {"codes": whole(i8, ROWS, 8, 1), "codebooks": real(f16, 1, 256, 1, 8), "scales": real(f16, ROWS, 1, 1, 1)},
        ),
        "higgs": (
            "higgs",
            {"weight": whole(torch.int16, ROWS, 8), "scales": real(f16, ROWS), "tables": real(f16, 16, 2)},
        ),
        "mlx": (
            "affine",
            {
                "weight": whole(i32, ROWS, 8).view(torch.uint32),
                "scales": real(f16, ROWS, 1),
                "biases": real(f16, ROWS, 1),
            },
        ),
        "marlin": ("marlin", {"B": whole(i32, 4, 64), "s": real(f16, 4, ROWS)}),
        "scaled fp8": ("", {"weight": real(f32, ROWS, COLUMNS).to(torch.float8_e4m3fn), "scale_weight": real(f32, 1)}),
        "modelopt": ("", {"weight": whole(u8, ROWS, COLUMNS), "weight_quantizer._scale": real(f32, ROWS, 4)}),
        "8 bits of nobody": ("", {"levels": whole(u8, ROWS, COLUMNS), "steps": real(f32, ROWS)}),
        "a maximum in a module": ("", {"weight": whole(i8, ROWS, COLUMNS), "weight_quantizer._amax": real(f32, 1)}),
        "a scale in a module": ("", {"w": whole(u8, ROWS, COLUMNS), "observer.scale": real(f32, ROWS)}),
    }
    rest = {"lm_head.weight": real(bf16, ROWS, COLUMNS), f"{LAYER}.bias": real(bf16, ROWS)}
    return {
        kind: (method, rest | {f"{LAYER}.{end}": tensor for end, tensor in tensors.items()})
        for kind, (method, tensors) in layers.items()
    }


STRANGE = quantized_elsewhere()
NOBODY = ("scaled fp8", "8 bits of nobody", "a maximum in a module", "a scale in a module")
KNOWN = [kind for kind in STRANGE if kind not in NOBODY]
"""Those whose names say that they are codes; of the others only the casts of float32 scales are refused."""


@pytest.mark.oracle
@pytest.mark.parametrize("kind", STRANGE)
def test_neither_scales_nor_codes_are_cast_alone(kind: str, tmp_path: Path) -> None:
    """As a folder with its config and without, as one named file, and from two formats."""
    method, held = STRANGE[kind]
    sections: list[dict[str, Any]] = [{"model_type": "llama"}]
    if method:
        section = {"quant_method": method, "format": kind, "config_groups": {}, "bits": 4}
        sections.append({"model_type": "llama", "quantization_config": section})
    for number, config in enumerate(sections):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(held, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        torch.save(held, tmp_path / f"{number}.pt")
        for source in (folder, folder / "model.safetensors", tmp_path / f"{number}.pt"):
            for dtype in ("fp16", *(["fp32"] if kind in KNOWN else ())):
                with pytest.raises(tx.TransaxleError) as caught:
                    tx.convert(source, tmp_path / "out", to="safetensors", dtype=dtype, sync=False)
                assert {each.code for each in caught.value.refusals} == {"UNSUPPORTED"}
                assert not (tmp_path / "out").exists()
        tx.convert(folder, tmp_path / "moved", to="safetensors", overwrite=True, sync=False)
        moved = load_file(tmp_path / "moved/model.safetensors")
        assert {n: (t.dtype, t.shape) for n, t in moved.items()} == {n: (t.dtype, t.shape) for n, t in held.items()}
        for name, tensor in held.items():
            assert torch.equal(moved[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("kind", KNOWN[::5])
@pytest.mark.parametrize(
    "said", [{"encode": "mxfp8", "only": "lm_head.weight"}, {"decode": "bf16"}, {"to": "megatron"}]
)
def test_other_changes_refuse_codes_that_are_not_known(kind: str, said: dict[str, Any], tmp_path: Path) -> None:
    save_file(STRANGE[kind][1], tmp_path / "model.safetensors")
    with tx.open(tmp_path / "model.safetensors") as checkpoint:
        refusals = checkpoint.catalog.refusals
    assert {each.code for each in refusals} == {"UNSUPPORTED"}
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(tmp_path / "model.safetensors", tmp_path / "out", **{"to": "safetensors", **said}, sync=False)
    assert "to" in said or caught.value.refusals == refusals
    assert not (tmp_path / "out").exists()


def test_a_number_beside_codes_is_cast_where_its_name_is_given(tmp_path: Path) -> None:
    """The hint of the refusal, followed both ways; running statistics, masks and positions are no codes."""
    held = {
        f"{LAYER}.levels": whole(torch.uint8, ROWS, COLUMNS),
        f"{LAYER}.steps": real(torch.float32, ROWS),
        "bn.num_batches_tracked": torch.tensor(7),
        "bn.running_mean": real(torch.float32, ROWS),
        "embeddings.position_ids": torch.arange(8),
        "embeddings.class_embedding": real(torch.float32, ROWS),
        "attn.mask": torch.ones(4, 4, dtype=torch.bool),
        "attn.relative_position_bias_table": real(torch.float32, ROWS),
    }
    save_file(held, tmp_path / "s.safetensors")
    source, out = tmp_path / "s.safetensors", tmp_path / "out.safetensors"
    with pytest.raises(tx.TransaxleError, match=r"(?s)UNSUPPORTED.*steps.*U8 \[32, 64\].*--skip.*--only"):
        tx.convert(source, out, to="safetensors", dtype="bf16", sync=False)
    tx.convert(source, out, to="safetensors", dtype="bf16", skip=f"{LAYER}.steps", sync=False)
    floats = {name for name, tensor in held.items() if tensor.is_floating_point()}
    assert {n for n, t in load_file(out).items() if t.dtype == torch.bfloat16} == floats - {f"{LAYER}.steps"}
    tx.convert(source, out, to="safetensors", dtype="bf16", only=f"{LAYER}.steps", overwrite=True, sync=False)
    assert torch.equal(load_file(out)[f"{LAYER}.steps"], held[f"{LAYER}.steps"].bfloat16())


i16, i32, u8 = torch.int16, torch.int32, torch.uint8
NUMBERS: dict[str, tuple[Tensors, Tensors]] = {
    "positions": ({"e.position_ids": whole(i32, 1, 50)}, {"e.class_embedding": real(torch.float32, 16)}),
    "relative positions": (
        {"a.relative_position_index": whole(i32, 49, 49)},
        {"a.relative_position_bias_table": real(torch.float32, 169, 3), "a.logit_scale": real(torch.float32, 3, 1, 1)},
    ),
    "masks": (
        {"a.bias": whole(u8, 1, 1, 8, 8), "b.causal_mask": whole(u8, 8, 8), "c.attn_mask": whole(i32, 4, 8, 8)},
        {"a.masked_bias": real(torch.float32), "b.scale_attn": real(torch.float32), "c.gamma": real(torch.float32, 8)},
    ),
    "levels of a quantizer": (
        {"q._levels": whole(i32, 4), "q._basis": whole(i32, 4), "v.usage": whole(i32, 64)},
        {"q.implicit_codebook": real(torch.float32, 100, 4), "v.embed": real(torch.float32, 64, 8)},
    ),
    "tables": (
        {"t.vocab_map": whole(i32, 30), "p.coords": whole(i16, 64, 2), "g.grid": whole(i32, 8, 8)},
        {"t.scores": real(torch.float32, 30), "p.table": real(torch.float32, 64), "g.gauss": real(torch.float32, 2, 8)},
    ),
    "parameters that are called as parts of codes": (
        {"x.position_ids": whole(i32, 9)},
        {"x.a._scale": real(torch.float32, 4), "x._shift": real(torch.float32, 4), "x.b._data": real(torch.float32, 4)},
    ),
}
"""Integers that number things, and what lies beside them and is a plain parameter."""


@pytest.mark.parametrize("kind", NUMBERS)
def test_integers_that_number_things_have_no_scales(kind: str, tmp_path: Path) -> None:
    integers, reals = NUMBERS[kind]
    save_file({**integers, **reals, "x.weight": real(torch.float32, 4, 32)}, tmp_path / "s.safetensors")
    tx.convert(tmp_path / "s.safetensors", tmp_path / "o.safetensors", to="safetensors", dtype="bf16", sync=False)
    found = load_file(tmp_path / "o.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in integers.items())
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in reals.items())
    plan = tx.plan(tmp_path / "s.safetensors", tmp_path / "e", to="safetensors", encode="mxfp8", only="x.weight")
    assert not plan.refusals


STALE = (
    {"quant_method": "hqq", "nbits": 4},
    {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {"targets": ["Linear"]}}},
)


@pytest.mark.parametrize("section", STALE, ids=[str(each["quant_method"]) for each in STALE])
@pytest.mark.parametrize("said", [{"to": "megatron"}, {"to": "safetensors", "dtype": "fp32"}])
def test_a_section_left_of_codes_is_removed(section: dict[str, Any], said: dict[str, Any], tmp_path: Path) -> None:
    """The hint of the refusal, followed."""
    held, config = quantized.plain_llama(d=16, f=32, g=1, r=1, head=16)
    source = quantized.store(tmp_path / "source", (held, {**config, "quantization_config": section}))
    hint = r"(?s)UNSUPPORTED  config\.json.*No tensor has codes: .*remove it from config\.json"
    with pytest.raises(tx.TransaxleError, match=hint) as caught:
        tx.convert(source, tmp_path / "out", **said, sync=False)
    assert len(caught.value.refusals) == 1
    (source / "config.json").write_text(json.dumps(config))
    tx.convert(source, tmp_path / "out", **said, sync=False)
    assert tx.verify(source, tmp_path / "out") or "dtype" in said
