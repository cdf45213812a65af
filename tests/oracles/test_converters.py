"""Other converters of quantized checkpoints: equal results, and what they do with files that they cannot convert.

compressed-tensors 0.20 has `convert_checkpoint` with a dequantizer of its own files, one of FP8 blocks, and
converters of AutoAWQ's and ModelOpt's files; llm-dequant 0.1.0 dequantizes NVFP4. `docs/comparison.md` has a table of
what they refuse and what they write nevertheless, and the tests here are its rows. llm-dequant is in a folder of its
own (`make` installs it, `LLM_DEQUANT_PACKAGES` names another); without it, its part is skipped.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert import convert_checkpoint, convert_file
from compressed_tensors.entrypoints.convert.converters import (
    AutoAWQConverter,
    CompressedTensorsDequantizer,
    Converter,
    FP8BlockDequantizer,
    ModelOptNvfp4Converter,
)
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import save_file

import transaxle as tx
from tests.engine.packed import awq
from tests.oracles.peer_bytes import Tensors, differing, loaded
from tests.oracles.quantized_peers import CONFIG, compressed
from tests.oracles.quiet import quiet
from transaxle.errors import Refused

PACKAGES = Path(os.environ.get("LLM_DEQUANT_PACKAGES", f"{sys.prefix}/llm-dequant"))
SECTION = "quantization_config"
SHAPES = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128), "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}  # fmt: skip
LAYER = "model.layers.0."
DOWN = f"{LAYER}mlp.down_proj."
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
Linear = Callable[[int, int, torch.Generator], Tensors]


def with_llm_dequant() -> Any:
    """The function that converts; skips without the package."""
    if not PACKAGES.is_dir():
        pytest.skip(f"llm-dequant is not in {PACKAGES}")
    sys.path.append(str(PACKAGES))
    try:
        return importlib.import_module("llm_dequant.model")
    finally:
        sys.path.remove(str(PACKAGES))


def int4(rows: int, columns: int, draw: torch.Generator) -> Tensors:
    return {
        "weight_packed": torch.randint(-(1 << 31), 1 << 31, (rows, columns // 8), generator=draw).int(),
        "weight_scale": (torch.rand(rows, columns // 32, generator=draw) / 100 + 0.001).bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }


def nvfp4(rows: int, columns: int, draw: torch.Generator) -> Tensors:
    scales = torch.randint(1, 0x7F, (rows, columns // 16), dtype=torch.uint8, generator=draw)
    return {
        "weight_packed": torch.randint(256, (rows, columns // 2), dtype=torch.uint8, generator=draw),
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([300.0]),
    }


def modelopt(rows: int, columns: int, draw: torch.Generator) -> Tensors:
    made = nvfp4(rows, columns, draw)
    return {
        "weight": made["weight_packed"], "weight_scale": made["weight_scale"],
        "weight_scale_2": torch.tensor(1 / 300), "input_scale": torch.tensor(0.013),
    }  # fmt: skip


def fp8(rows: int, columns: int, draw: torch.Generator, tile: int = 128) -> Tensors:
    return {
        "weight": torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.rand(-(-rows // tile), -(-columns // tile), generator=draw) + 0.5,
    }


def model(linear: Linear, shapes: Mapping[str, tuple[int, int]] = SHAPES, *, head: bool = True) -> Tensors:
    """The tensors of a Llama of one layer."""
    draw = torch.Generator().manual_seed(3)
    plain = {"model.embed_tokens.weight": (48, 128), "model.norm.weight": (128,)}
    plain |= {f"{LAYER}{name}_layernorm.weight": (128,) for name in ("input", "post_attention")}
    plain |= {"lm_head.weight": (48, 128)} if head else {}
    tensors = {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in plain.items()}
    for module, shape in shapes.items():
        tensors |= {f"{LAYER}{module}.{name}": value for name, value in linear(*shape, draw).items()}
    return tensors


def section(form: str, **weights: Any) -> dict[str, Any]:
    described = {"num_bits": 4, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": described, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip


INT4 = section("pack-quantized", type="int", strategy="group", group_size=32)
NVFP4 = section("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16)


def write(folder: Path, config: Mapping[str, Any], *shards: Tensors) -> Path:
    """A checkpoint of one file, or of several with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: value.contiguous() for name, value in shard.items()}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index, "utf-8")
    return folder


def theirs(source: Path, target: Path, converter: Callable[[Path], Converter]) -> Tensors:
    with quiet():
        os.environ["TQDM_DISABLE"] = "1"
        convert_checkpoint(source, target, converter(source))
    return loaded(target)


def ours(source: Path, target: Path, **options: Any) -> Tensors:
    tx.convert(source, target, to="safetensors:identity", sync=False, **options)
    return loaded(target)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return config


def group(bits: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return {"targets": ["Linear"], "weights": weights | more}


DEQUANTIZED: dict[str, Any] = {
    "int4, groups of 32": group(4),
    "int4, groups of 64": group(4, group_size=64),
    "int8, groups of 32": group(8),
    "int8, rows": group(8, strategy="channel", group_size=None),
    "nvfp4": preset_name_to_scheme("NVFP4A16", ["Linear"]),
    "mxfp4": preset_name_to_scheme("MXFP4", ["Linear"]),
}


@pytest.mark.parametrize("kind", DEQUANTIZED)
def test_dequantized_as_compressed_tensors_dequantizes_its_files(kind: str, tmp_path: Path) -> None:
    made = compressed({"group_0": DEQUANTIZED[kind]}, ["lm_head"], 0, tmp_path)
    made.save(tmp_path / "a")
    expected = theirs(tmp_path / "a", tmp_path / "theirs", CompressedTensorsDequantizer)
    assert made.values.keys() <= expected.keys()
    assert differing(ours(tmp_path / "a", tmp_path / "ours", decode="bf16"), expected) == []
    assert config_of(tmp_path / "ours") == config_of(tmp_path / "theirs")


@pytest.mark.parametrize("preset", ["NVFP4A16", "NVFP4"])
def test_dequantized_as_llm_dequant_does(preset: str, tmp_path: Path) -> None:
    made = compressed({"group_0": preset_name_to_scheme(preset, ["Linear"])}, ["lm_head"], 0, tmp_path)
    made.save(tmp_path / "a")
    with_llm_dequant().convert(tmp_path / "a", tmp_path / "theirs")
    assert differing(ours(tmp_path / "a", tmp_path / "ours", decode="bf16"), loaded(tmp_path / "theirs")) == []


OWN: dict[str, tuple[str, ...]] = {
    "NVFP4": ("residual quantization param", "input_global_scale"),
    "FP8": ("model.embed_tokens.weight_scale not found",),
    "FP8_DYNAMIC": ("model.embed_tokens.weight_scale not found",),
    "FP8_BLOCK": ("model.embed_tokens.weight_scale not found",),
    "MXFP8": ("model.embed_tokens.weight_scale not found",),
    "W8A8": ("model.embed_tokens.weight_scale not found",),
}
"""Files that compressed-tensors itself writes and its dequantizer refuses, with words of the error."""


@pytest.mark.parametrize("preset", OWN)
def test_files_of_compressed_tensors_that_its_dequantizer_refuses(preset: str, tmp_path: Path) -> None:
    made = compressed({"group_0": preset_name_to_scheme(preset, ["Linear"])}, ["lm_head"], 0, tmp_path)
    made.save(tmp_path / "a")
    with pytest.raises(ValueError, match=".*".join(OWN[preset])):
        theirs(tmp_path / "a", tmp_path / "theirs", CompressedTensorsDequantizer)
    decoded = ours(tmp_path / "a", tmp_path / "ours", decode="bf16")
    assert [name for name, value in made.values.items() if not torch.equal(decoded[name], value.bfloat16())] == []


def test_awq_restated_as_compressed_tensors_converts_it(tmp_path: Path) -> None:
    made = {module: awq(*shape, 32, seed=seed) for seed, (module, shape) in enumerate(SHAPES.items())}
    tensors = model(lambda *_: {})
    tensors |= {f"{LAYER}{module}.{name}": t for module, one in made.items() for name, t in one.tensors.items()}
    source = write(tmp_path / "a", {**CONFIG, SECTION: made["mlp.up_proj"].section}, tensors)
    expected = theirs(source, tmp_path / "theirs", lambda folder: AutoAWQConverter.from_pretrained(str(folder)))
    restated = ours(source, tmp_path / "ours", restate="compressed_tensors")
    assert differing(restated, expected) == []
    decoded = ours(source, tmp_path / "decoded", decode="fp16")
    assert [m for m, one in made.items() if not torch.equal(decoded[f"{LAYER}{m}.weight"], one.values)] == []
    once = ours(source, tmp_path / "once", decode="bf16")
    for name, rounds in (("theirs", 2), ("ours", 2), ("float32", 1)):  # it multiplies in the type of the scales
        if name == "float32":
            scales = {key: value.float() for key, value in restated.items() if key.endswith("weight_scale")}
            write(tmp_path / name, config_of(tmp_path / "ours"), restated | scales)
        as_bf16 = theirs(tmp_path / name, tmp_path / f"{name} as bf16", CompressedTensorsDequantizer)
        assert (differing(once, as_bf16) == []) == (rounds == 1)
        half = {f"{LAYER}{module}.weight": one.values.bfloat16() for module, one in made.items()}
        assert rounds == 1 or differing({key: as_bf16[key] for key in half}, half) == []


def test_modelopt_restated_as_compressed_tensors_converts_it(tmp_path: Path) -> None:
    """Its converter leaves numbers without a dim, where compressed-tensors' own modules have one."""
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    described = {"targets": ["Linear"], "weights": weights, "input_activations": weights}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    source = write(
        tmp_path / "a", {**CONFIG, SECTION: {**config, "config_groups": {"group_0": described}}}, model(modelopt)
    )
    targets = ["re:.*self_attn.*_proj$", "re:.*mlp.*_proj$"]
    expected = theirs(source, tmp_path / "theirs", lambda _: ModelOptNvfp4Converter(["lm_head"], targets))
    restated = ours(source, tmp_path / "ours", restate="compressed_tensors")
    scalars = {name for name, value in expected.items() if value.ndim == 0}
    assert {name.rpartition(".")[2] for name in scalars} == {"weight_global_scale", "input_global_scale"}
    assert {restated[name].shape for name in scalars} == {(1,)}
    assert differing(restated, {n: v.reshape(restated[n].shape) for n, v in expected.items()}) == []
    (mine,), (other,) = (config_of(tmp_path / side)[SECTION]["config_groups"].values() for side in ("ours", "theirs"))
    for key in ("weights", "input_activations"):
        assert mine[key].items() <= other[key].items()


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [64, 128])
def test_fp8_blocks_dequantized_as_compressed_tensors_does(tile: int, scale: torch.dtype, tmp_path: Path) -> None:
    shapes = {**SHAPES, "mlp.gate_proj": (200, 128)}
    tensors = model(lambda rows, columns, draw: fp8(rows, columns, draw, tile), shapes)
    tensors |= {name: value.to(scale) for name, value in tensors.items() if name.endswith("_inv")}
    source = write(tmp_path / "a", {"dtype": "bfloat16", SECTION: {**FP8, "weight_block_size": [tile, tile]}}, tensors)

    def dequantizer(folder: Path) -> Converter:
        return FP8BlockDequantizer.from_pretrained(folder, weight_block_size=(tile, tile))

    expected = theirs(source, tmp_path / "theirs", dequantizer)
    assert differing(ours(source, tmp_path / "ours", decode="bf16"), expected) == []
    assert config_of(tmp_path / "ours") == config_of(tmp_path / "theirs") == {"dtype": "bfloat16"}


REFUSES, WRITES = "refuses", "writes"


@dataclass(frozen=True)
class Defect:
    """A file with a defect, or in a form that not all programs know, and what they do with it."""

    config: dict[str, Any]
    """Section of the config."""
    tensors: Tensors
    """As stored."""
    refusal: str | None
    """Our refusal code; None: converted."""
    theirs: str
    """What compressed-tensors does."""
    left: tuple[str, ...] = ()
    """Ends of names that compressed-tensors leaves as they were, without a config that describes them."""
    llm_dequant: str | None = None
    """What llm-dequant does; None: it refuses the format."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other keys of the config."""


def changed(linear: Linear, **values: torch.Tensor | None) -> Tensors:
    """A model in which tensors of the last linear have other values, or are missing."""
    tensors = model(linear)
    for name, value in values.items():
        if value is None:
            del tensors[DOWN + name]
        else:
            tensors[DOWN + name] = value
    return tensors


def stacked(linear: Linear, join: str) -> Tensors:
    """Four experts in one tensor, whose buffers are named by a prefix or by modules."""
    draw = torch.Generator().manual_seed(5)
    experts = [linear(64, 128, draw) for _ in range(4)]
    stacks = {name: torch.stack([expert[name] for expert in experts]) for name in experts[0]}
    if "weight_shape" in stacks:
        stacks["weight_shape"] = torch.tensor([4, 64, 128])
    base = f"{LAYER}mlp.experts.gate_up_proj"
    names = {name: f"{base}{name.removeprefix('weight')}" if join == "_" else f"{base}.{name}" for name in stacks}
    return model(lambda *_: {}) | {names[name]: value for name, value in stacks.items()}


def ordered(rows: int, columns: int, draw: torch.Generator) -> Tensors:
    order = torch.randperm(columns, generator=draw)
    return int4(rows, columns, draw) | {"weight_g_idx": (torch.arange(columns) // 32)[order].int()}


PLAIN = torch.zeros(128, 256, dtype=torch.bfloat16)
ACTORDER = {**INT4, "config_groups": {"group_0": group(4, actorder="group")}}
IGNORED = {**INT4, "ignore": ["lm_head", DOWN.removesuffix(".")]}
RAGGED = {"mlp.down_proj": (128, 248)}
DEFECTS = {
    "int4, columns that are no whole groups": Defect(INT4, model(int4, RAGGED), "SHAPE_MISMATCH", REFUSES),
    "int4, no scales": Defect(INT4, changed(int4, weight_scale=None), "MISSING_TENSOR", REFUSES),
    "int4, no codes": Defect(INT4, changed(int4, weight_packed=None), "UNEXPECTED_TENSOR", REFUSES),
    "int4, too few columns in weight_shape": Defect(
        INT4, changed(int4, weight_shape=torch.tensor([128, 224])), "SHAPE_MISMATCH", REFUSES
    ),
    "int4, too many columns in weight_shape": Defect(
        INT4, changed(int4, weight_shape=torch.tensor([128, 512])), "SHAPE_MISMATCH", WRITES
    ),
    "int4, no weight_shape": Defect(INT4, changed(int4, weight_shape=None), None, REFUSES),
    "int4, a plain weight of the same name": Defect(INT4, changed(int4, weight=PLAIN), "NAME_COLLISION", WRITES),
    "int4, actorder": Defect(ACTORDER, model(ordered), "UNSUPPORTED", REFUSES),
    "int4, g_idx that the config does not mention": Defect(
        INT4, model(ordered), "UNSUPPORTED", WRITES, ("weight_g_idx",)
    ),
    "int4, codes of an ignored module": Defect(
        IGNORED, model(int4), "UNSUPPORTED", WRITES, ("weight_packed", "weight_scale", "weight_shape")
    ),
    "int4, a stack named by a prefix": Defect(
        INT4, stacked(int4, "_"), None, WRITES, ("gate_up_proj_packed", "gate_up_proj_scale", "gate_up_proj_shape")
    ),
    "nvfp4, columns that are no whole groups": Defect(
        NVFP4, model(nvfp4, RAGGED), "SHAPE_MISMATCH", REFUSES, llm_dequant=REFUSES
    ),
    "nvfp4, no scales": Defect(
        NVFP4, changed(nvfp4, weight_scale=None), "MISSING_TENSOR", REFUSES, llm_dequant=REFUSES
    ),
    "nvfp4, no codes": Defect(
        NVFP4, changed(nvfp4, weight_packed=None), "UNEXPECTED_TENSOR", REFUSES, llm_dequant=REFUSES
    ),
    "nvfp4, no global scale": Defect(
        NVFP4, changed(nvfp4, weight_global_scale=None), "MISSING_TENSOR", REFUSES, llm_dequant=WRITES
    ),
    "nvfp4, a plain weight of the same name": Defect(
        NVFP4, changed(nvfp4, weight=PLAIN), "NAME_COLLISION", WRITES, llm_dequant=REFUSES
    ),
    "nvfp4, a stack named by a prefix": Defect(
        NVFP4, stacked(nvfp4, "_"), None, WRITES,
        ("gate_up_proj_packed", "gate_up_proj_scale", "gate_up_proj_global_scale"), llm_dequant=REFUSES,
    ),
    "nvfp4, a stack with a global scale for each": Defect(
        NVFP4, stacked(nvfp4, "."), None, REFUSES, llm_dequant=REFUSES
    ),
    "nvfp4, a tied head that is not stored": Defect(
        NVFP4, model(nvfp4, head=False), None, WRITES, llm_dequant=WRITES, extra={"tie_word_embeddings": True}
    ),
    "fp8, no scales": Defect(FP8, changed(fp8, weight_scale_inv=None), "MISSING_TENSOR", WRITES, ("down_proj.weight",)),
    "fp8, too few scales": Defect(FP8, changed(fp8, weight_scale_inv=torch.ones(1, 1)), "SHAPE_MISMATCH", WRITES),
    "fp8, columns that are no whole blocks": Defect(FP8, model(fp8, {"mlp.down_proj": (128, 200)}), None, REFUSES),
    "fp8, exponents as scales": Defect(
        {**FP8, "scale_fmt": "ue8m0"},
        changed(fp8, weight_scale_inv=torch.tensor([[120, 121]], dtype=torch.uint8).view(torch.float8_e8m0fnu)),
        None,
        REFUSES,
    ),
    "fp8, a stack beside linears": Defect(
        FP8,
        {
            **model(fp8),
            f"{LAYER}mlp.experts.gate_up_proj": torch.ones(4, 128, 128).to(torch.float8_e4m3fn),
            f"{LAYER}mlp.experts.gate_up_proj_scale_inv": torch.ones(4, 1, 1),
        },
        None, WRITES, ("gate_up_proj", "gate_up_proj_scale_inv"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_what_compressed_tensors_does_and_what_we_do(name: str, tmp_path: Path) -> None:
    defect = DEFECTS[name]
    # of no known model, so that its tensors need not be complete
    source = write(tmp_path / "a", {"dtype": "bfloat16", **defect.extra, SECTION: defect.config}, defect.tensors)
    converter = FP8BlockDequantizer.from_pretrained if defect.config.get("fmt") else CompressedTensorsDequantizer
    if defect.theirs == REFUSES:
        with pytest.raises((ValueError, KeyError, RuntimeError)):
            theirs(source, tmp_path / "theirs", converter)
    else:
        written = theirs(source, tmp_path / "theirs", converter)
        assert SECTION not in config_of(tmp_path / "theirs")
        for end in defect.left:
            names = [key for key in defect.tensors if key.endswith(end)]
            assert names
            assert any(
                key in written and differing({key: written[key]}, {key: defect.tensors[key]}) == [] for key in names
            )
    if defect.refusal is None:
        decoded = ours(source, tmp_path / "ours", decode="bf16")
        assert {value.dtype for value in decoded.values()} == {torch.bfloat16}
        assert SECTION not in config_of(tmp_path / "ours")
        if defect.theirs == WRITES and not defect.left:
            assert differing(decoded, loaded(tmp_path / "theirs")) == []
    else:
        with pytest.raises(Refused) as refused:
            ours(source, tmp_path / "ours", decode="bf16")
        assert defect.refusal in {refusal.code for refusal in refused.value.refusals}
        assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", [name for name, defect in DEFECTS.items() if defect.llm_dequant])
def test_what_llm_dequant_does(name: str, tmp_path: Path) -> None:
    convert, defect = with_llm_dequant().convert, DEFECTS[name]
    source = write(tmp_path / "a", {"dtype": "bfloat16", **defect.extra, SECTION: defect.config}, defect.tensors)
    if defect.llm_dequant == REFUSES:
        with pytest.raises((ValueError, KeyError)):
            convert(source, tmp_path / "theirs")
    else:
        convert(source, tmp_path / "theirs")
        assert SECTION not in config_of(tmp_path / "theirs")


def test_a_plain_weight_replaces_the_codes_of_its_name(tmp_path: Path) -> None:
    source = write(tmp_path / "a", {SECTION: NVFP4}, changed(nvfp4, weight=PLAIN))
    assert not theirs(source, tmp_path / "theirs", CompressedTensorsDequantizer)[f"{DOWN}weight"].any()


def test_of_codes_without_a_global_scale_llm_dequant_makes_other_values(tmp_path: Path) -> None:
    one = write(tmp_path / "a", {SECTION: NVFP4}, changed(nvfp4, weight_global_scale=torch.ones(1)))
    none = write(tmp_path / "b", {SECTION: NVFP4}, changed(nvfp4, weight_global_scale=None))
    for folder in (one, none):
        with_llm_dequant().convert(folder, folder / "out")
    assert differing(loaded(one / "out"), loaded(none / "out")) == []


def test_stacks_beside_linears_are_left_by_llm_dequant(tmp_path: Path) -> None:
    stack = stacked(nvfp4, "_")
    source = write(tmp_path / "a", {SECTION: NVFP4}, {**model(nvfp4), **stack})
    with_llm_dequant().convert(source, tmp_path / "theirs")
    written = loaded(tmp_path / "theirs")
    left = [name for name in stack if ".experts." in name]
    assert len(left) == 3
    assert (
        differing({n: written[n].view(torch.uint8) for n in left}, {n: stack[n].view(torch.uint8) for n in left}) == []
    )
    assert SECTION not in config_of(tmp_path / "theirs")


def test_a_section_within_the_text_config(tmp_path: Path) -> None:
    """As in Kimi-K2.5: compressed-tensors dequantizes, and leaves a config that says that the values are packed."""
    source = write(tmp_path / "a", {"text_config": {SECTION: INT4}}, model(int4))
    expected = theirs(source, tmp_path / "theirs", CompressedTensorsDequantizer)
    assert config_of(tmp_path / "theirs") == {"text_config": {SECTION: INT4}}
    assert differing(ours(source, tmp_path / "ours", decode="bf16"), expected) == []
    assert config_of(tmp_path / "ours") == {"text_config": {}}


def test_of_values_that_the_index_leaves_out_nothing_is_written(tmp_path: Path) -> None:
    tensors = model(int4)
    names = [*tensors]
    source = write(tmp_path / "a", {SECTION: INT4}, *({n: tensors[n] for n in part} for part in (names[:9], names[9:])))
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text("utf-8"))
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index), "utf-8")
    assert "model.norm.weight" not in theirs(source, tmp_path / "theirs", CompressedTensorsDequantizer)
    with pytest.raises(Refused, match="not in the index"):
        ours(source, tmp_path / "ours", decode="bf16")


def halves(folder: Path) -> Path:
    tensors = model(nvfp4)
    names = [*tensors]
    shards = ({name: tensors[name] for name in part} for part in (names[:14], names[14:]))
    return write(folder, {"dtype": "bfloat16", SECTION: NVFP4}, *shards)


def test_a_missing_shard(tmp_path: Path) -> None:
    source = halves(tmp_path / "a")
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(KeyError):
        theirs(source, tmp_path / "theirs", CompressedTensorsDequantizer)
    with pytest.raises(Refused, match="the shard is missing"):
        ours(source, tmp_path / "ours", decode="bf16")
    with pytest.raises(FileNotFoundError):
        with_llm_dequant().convert(source, tmp_path / "llm")
    assert [file.name for file in (tmp_path / "llm").iterdir()] == ["config.json"]


def interrupted(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program be interrupted when it writes its second file."""
    save, calls = module.save_file, list[str]()

    def save_once(tensors: Tensors, path: Any, *rest: Any, **more: Any) -> None:
        calls.append(str(path))
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(tensors, path, *rest, **more)

    monkeypatch.setattr(module, "save_file", save_once)


def test_an_interrupted_run_of_compressed_tensors_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has the source's config and index: codes are expected where values are."""
    source, target = halves(tmp_path / "a"), tmp_path / "theirs"
    interrupted(convert_file, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        theirs(source, target, CompressedTensorsDequantizer)
    assert {file.name for file in source.iterdir()} - {file.name for file in target.iterdir()} == {
        "model-00002-of-00002.safetensors"
    }
    assert config_of(target) == config_of(source)
    index = "model.safetensors.index.json"
    assert (target / index).read_bytes() == (source / index).read_bytes()
    with pytest.raises(Refused), tx.open(target):
        pass


def test_an_interrupted_run_of_llm_dequant_leaves_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, target = with_llm_dequant(), tmp_path / "theirs"
    interrupted(program, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        program.convert(halves(tmp_path / "a"), target, shard_bytes=1 << 16)
    assert {file.name for file in target.iterdir()} == {"config.json", "model-00001.safetensors"}
    assert SECTION not in config_of(target)


def test_a_target_that_exists(tmp_path: Path) -> None:
    """Ours is refused; the others write among its files."""
    source = halves(tmp_path / "a")
    for target in (tmp_path / "theirs", tmp_path / "ours", tmp_path / "llm"):
        write(target, {"other": True}, {"other": torch.ones(1)})
    with pytest.raises(tx.TransaxleError, match="exists"):
        ours(source, tmp_path / "ours", decode="bf16")
    assert config_of(tmp_path / "ours") == {"other": True}
    assert "other" in theirs(source, tmp_path / "theirs", CompressedTensorsDequantizer)
    assert config_of(tmp_path / "theirs") == {"dtype": "bfloat16"}
    with_llm_dequant().convert(source, tmp_path / "llm")
    assert "other" in loaded(tmp_path / "llm")
