"""Checkpoints that provoke advice which no golden case does: small, made of those of the golden cases."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests import checkpoints
from tests.engine import packed, quantized
from tests.engine.checkpoint.test_grafting import COPIES, GLM, TEXT, WHOLE, glm, random_weights
from tests.formats.deepspeed import made as deepspeed
from tests.formats.megatron.legacy import run as ranks
from tests.golden.sources import lora
from transaxle.formats.registry import MANIFEST

_SIZES = {"d": 64, "f": 128, "g": 2, "r": 2, "head": 32, "layers": 2}
_QUANTIZED = {"d": 128, "f": 256, "g": 2, "r": 2, "head": 32}
_LLAMA, _CONFIG = quantized.plain_llama(**_SIZES)
_FP8, _FP8_CONFIG = quantized.llama(**_QUANTIZED)
_QUERY = "model.layers.0.self_attn.q_proj.weight"
_FP8_TWO, _FP8_TWO_CONFIG = quantized.llama(**_QUANTIZED, layers=2)
_SQUARE = np.ones((4, 4), ml_dtypes.bfloat16)
_BIASES = {
    name.replace("weight", "bias"): np.ones(value.shape[0], value.dtype)
    for name, value in _LLAMA.items()
    if "self_attn" in name
}
_VOCABULARY = ("lm_head.weight", "model.embed_tokens.weight")
_ROWS: int = _CONFIG["vocab_size"]
_SECTION = packed.gptq(32, 128, 128).section
_SIZELESS = {key: value for key, value in _CONFIG.items() if key != "intermediate_size"}
_FOLD = """
family fold
  axes l=n f=4 d=d
  up : l f d
  norm : d

  dialect hf
    layers.{l}.w = up[f d] when folded
    layers.{l}.w = up[d f] when not folded
    norm = norm[d]

  dialect other
    blocks.{l}.up = up[f d]
    norm = norm[d]
"""
_PART = """
family part
  axes f d=d
  x : f d
  y : f d

  dialect one
    w = [[x:f | y:f] d]

  dialect two
    x = x[f d]

  dialect three
    x = x[f d]
    y = y[f d]
"""
_SHIFTED = """
family shifted
  axes l d
  norm : l d

  dialect hf
    {l}.norm = norm[d]

  dialect minus
    {l}.minus = norm[d]  lossy: norm - 1
"""
Make = Callable[[Path], object]


def _llama(changed: Mapping[str, Any] = MappingProxyType({}), **config: Any) -> Make:
    """A Llama with other tensors (None: without them) and another config."""
    held = {name: value for name, value in {**_LLAMA, **changed}.items() if value is not None}
    return lambda folder: checkpoints.write(folder, held, config={**_CONFIG, **config})


def _renamed(rename: Callable[[str], str]) -> Make:
    held = {rename(name): value for name, value in _LLAMA.items()}
    return lambda folder: checkpoints.write(folder, held, config=_CONFIG)


def _as_torchtune(name: str) -> str:
    for part, theirs in {"model.": "", "self_attn.": "attn.", "embed_tokens": "tok_embeddings"}.items():
        name = name.replace(part, theirs, 1)
    return name


def _without(source: str, pattern: str) -> Make:
    """A copy of another source without some of its files."""

    def make(folder: Path) -> None:
        shutil.copytree(folder.parent / source, folder)
        for file in folder.rglob(pattern):
            file.unlink()

    return make


def _text(value: Any) -> Make:
    return lambda file: file.write_text(value if isinstance(value, str) else json.dumps(value))


def _gptq(folder: Path) -> None:
    """A Llama whose linear layers GPTQ has quantized in groups of 128."""
    config = quantized.llama_config(**_QUANTIZED)
    linear, others = quantized.llama_shapes(config)
    held = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in others.items()}
    for seed, (name, (rows, columns)) in enumerate(linear.items()):
        module = packed.gptq(rows, columns, 128, seed=seed).tensors
        held |= {name.removesuffix("weight") + part: value for part, value in module.items()}
    folder.mkdir()
    save_file(held, folder / checkpoints.WHOLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": _SECTION}))


def _two_gptq(folder: Path) -> None:
    """Two configs that contradict each other."""
    _gptq(folder)
    section = {**_SECTION, "bits": 8}
    (folder / "quantize_config.json").write_text(json.dumps(section))


def _gptq_alone(folder: Path) -> None:
    """A file of its own describes the codes, without the model's config."""
    _gptq(folder)
    (folder / "config.json").unlink()
    (folder / "quantize_config.json").write_text(json.dumps(_SECTION))


def _with_a_row(weight: np.ndarray) -> np.ndarray:
    return np.concatenate([weight, weight[:1]])


def _without_copies() -> dict[str, np.ndarray]:
    """A GLM whose layer ahead has no copies of the embedding and the head."""
    return {name: value for name, value in glm(0, ahead=True).items() if name not in COPIES}


def _query_codes() -> dict[str, np.ndarray]:
    return {name: value for name, value in _FP8.items() if "q_proj" in name}


def _uneven() -> dict[str, np.ndarray]:
    """Two layers of different widths."""
    name = "model.layers.1.mlp.up_proj.weight"
    return {**_LLAMA, name: _LLAMA[name][:32]}


def _without_head() -> dict[str, np.ndarray]:
    return {name: value for name, value in _LLAMA.items() if name != _VOCABULARY[0]}


def _meta(folder: Path) -> None:
    """Files of two ranks, as Meta's releases name them."""
    folder.mkdir()
    for rank in range(2):
        torch.save({"tok_embeddings.weight": torch.ones(4, 4)}, folder / f"consolidated.{rank:02}.pth")


def _numbered(folder: Path) -> None:
    """A torch file whose optimizer numbers parameters, without any names."""
    folder.mkdir()
    weights = {name: torch.ones(value.shape) for name, value in _LLAMA.items()}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    torch.save({"model": weights, "optimizer": optimizer}, folder / "checkpoint.pt")
    (folder / "config.json").write_text(json.dumps(_CONFIG))


def _odd_name(folder: Path) -> None:
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "weights.ckp")


def _trainer(folder: Path) -> None:
    """A Llama beside an optimizer whose state does not fit its parameters."""
    _llama()(folder)
    state = {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    torch.save(state, folder / "optimizer.pt")


def _trained(folder: Path) -> None:
    """A Llama beside an optimizer that numbers its parameters, as a trainer keeps them."""
    _llama()(folder)
    order = [_VOCABULARY[1]]
    for layer in range(_SIZES["layers"]):
        parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
        parts += ["input_layernorm", "post_attention_layernorm"]
        order += [f"model.layers.{layer}.{part}.weight" for part in parts]
    order += ["model.norm.weight", _VOCABULARY[0]]
    state = {number: dict(_moments(name, torch.ones(_LLAMA[name].shape))) for number, name in enumerate(order)}
    torch.save({"state": state, "param_groups": [{"lr": 0.5, "params": [*state]}]}, folder / "optimizer.pt")


def _bare_trainer(folder: Path) -> None:
    _trainer(folder)
    (folder / "config.json").unlink()


def _universal(folder: Path) -> None:
    tx.convert(folder.parent / "zero", folder, to="deepspeed-universal", sync=False)


def _cut_anyhow(folder: Path) -> None:
    """A run on two tensor-parallel ranks that does not say how its tensors are cut."""
    deepspeed.save(folder, {"a.weight": [torch.ones(2, 3)] * 2, "b.weight": [torch.ones(3)] * 2}, None)


def _of_no_config(folder: Path) -> None:
    run = ranks.Run(tp=2, pp=2)
    ranks.write(run, folder)


def _with_odd_key() -> dict[str, Any]:
    return {**_FP8_CONFIG, "quantization_config": {**_FP8_CONFIG["quantization_config"], "surprise": 1}}


def _folded(folder: Path) -> None:
    """A weight that one of two lines reads, as a key of the config says that it does not have."""
    checkpoints.write(folder, {"layers.0.w": _SQUARE, "norm": _SQUARE[0]}, config={"model_type": "fold", "d": 4})


def _joined(folder: Path) -> None:
    """Two weights in one tensor, of which another dialect has only the first."""
    checkpoints.write(folder, {"w": np.ones((8, 4), ml_dtypes.bfloat16)}, config={"model_type": "part", "d": 4})


def _zip_and_safetensors(folder: Path) -> None:
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "a.safetensors")
    torch.save({"a": torch.ones(3)}, folder / "b.pt")


def _of_another_package(folder: Path) -> None:
    tx.convert(folder.parent / "llama", folder, to="hf", sync=False)
    manifest = folder / MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": "safetensors"', '"format": "rawdir"'))


def _flipped_torch(file: Path) -> None:
    """A torch file in which a bit of a tensor is not what its zip archive records."""
    data = bytearray((file.parent / "llama.pt").read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _part_of_a_dtensor(file: Path) -> None:
    """The file of one rank, taken alone."""
    shutil.copy(file.parent / "rank_files" / "model_world_size_4_rank_0.pt", file)


def _with_state(changed: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]], groups: int = 1) -> Make:
    """A torch file of a Llama and its optimizer, whose state is keyed by the names of parameters."""

    def make(folder: Path) -> None:
        folder.mkdir()
        weights = {name: torch.ones(value.shape) for name, value in _LLAMA.items()}
        names = list(weights)
        state = {name: dict(changed(name, tensor)) for name, tensor in weights.items()}
        of_groups = [{"lr": 0.5 + number, "params": names[number::groups]} for number in range(groups)]
        torch.save({"model": weights, "optimizer": {"state": state, "param_groups": of_groups}}, folder / "step.pt")
        (folder / "config.json").write_text(json.dumps(_CONFIG))

    return make


def _moments(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"exp_avg": tensor / 2, "exp_avg_sq": tensor / 4, "step": torch.tensor(3.0)}


def _factored(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"exp_avg_sq_row": tensor.sum(-1), "step": torch.tensor(3.0)}


def _balanced(folder: Path) -> None:
    """A run of torchtitan that balances experts, of a model that has no tensor for it."""
    tx.convert(folder.parent / "qwen3_moe", folder, to="safetensors:torchtitan", sync=False)
    tensors = load_file(folder / checkpoints.WHOLE)
    save_file(
        {n: torch.ones_like(t) if "expert_bias" in n else t for n, t in tensors.items()}, folder / checkpoints.WHOLE
    )
    (folder / MANIFEST).unlink()


def _wide(folder: Path) -> None:
    tensors, config = quantized.plain_llama(**{**_SIZES, "f": 4096, "layers": 1})
    checkpoints.write(folder, tensors, config=config)


def _codes_of_four_bits(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of codes alone, without anything that gives them values."""
    return {
        name: torch.zeros((*value.shape[:-1], value.shape[-1] // 2), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        if ("self_attn" in name and "layers.0" in name) or len(tensors) == 1
        else torch.ones(value.shape, dtype=torch.bfloat16)
        for name, value in tensors.items()
    }


def _two_scales(folder: Path) -> None:
    """Weights of attention whose codes are alike, with scales of different types."""
    key = _QUERY.replace("q_proj", "k_proj") + quantized.SCALE
    checkpoints.write(folder, {**_FP8, key: _FP8[key].astype(ml_dtypes.bfloat16)}, config=_FP8_CONFIG)


def _text_fp8(folder: Path) -> None:
    tx.convert(folder.parent / "text", folder, to="hf", encode="float8_block", sync=False)


def _odd_scale(folder: Path) -> None:
    """Codes, and beside them a number that may be their scale, or not."""
    folder.mkdir()
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.scale": torch.ones(1), "b.weight": torch.ones(4, 4)}, folder / checkpoints.WHOLE)


def _four_bits(tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Make:
    def make(folder: Path) -> None:
        folder.mkdir()
        save_file(_codes_of_four_bits(tensors), folder / checkpoints.WHOLE, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))

    return make


def _partly(folder: Path, *, plain: bool) -> None:
    """An FP8 Llama in which one weight is not as its config says."""
    section, tensors = dict(_FP8_CONFIG["quantization_config"]), dict(_FP8_TWO)
    if plain:
        del tensors[_QUERY + quantized.SCALE]
        tensors[_QUERY] = np.ones(tensors[_QUERY].shape, ml_dtypes.bfloat16)
    else:
        section["modules_to_not_convert"] = ["lm_head", _QUERY.removesuffix(".weight")]
    checkpoints.write(folder, tensors, config={**_FP8_TWO_CONFIG, "quantization_config": section})


def _damaged_state(folder: Path) -> None:
    _llama()(folder)
    (folder / "optimizer.pt").write_bytes(b"no torch file")


def _with_cache() -> dict[str, Any]:
    cache = {"num_bits": 8, "type": "float"}
    return {**_FP8_CONFIG, "quantization_config": {**_FP8_CONFIG["quantization_config"], "kv_cache_scheme": cache}}


def _nvfp4_of_float32(folder: Path) -> None:
    """Codes of TransformerEngine, whose largest value no scale of the hub's form gives in float32."""
    tx.convert(folder.parent / "nvfp4", folder, to="safetensors:identity", restate="te", sync=False)
    (folder / MANIFEST).unlink()
    file = folder / checkpoints.WHOLE
    tensors = load_file(file)
    save_file({n: torch.full_like(t, 1.7) if "amax" in n else t for n, t in tensors.items()}, file)
    (folder / "config.json").write_text(json.dumps({**_CONFIG, "torch_dtype": "float32"}))


def _edited(folder: Path) -> None:
    """A Llama that Transaxle wrote, with a tokenizer."""
    source = folder.with_name("with_tokenizer")
    _llama()(source)
    (source / "tokenizer.json").write_text("{}")
    tx.convert(source, folder, to="hf", sync=False)
    (folder / "tokenizer.json").write_bytes(b"\xff\x00")


def _flat_ranks(folder: Path) -> None:
    """Files of ranks of FSDP1, whose optimizer numbers flat parameters."""
    shutil.copytree(folder.parent / "rank_files", folder)
    for rank, file in enumerate(sorted(folder.glob("optim*"))):
        state = {0: {"exp_avg": torch.ones(5 + rank), "step": torch.tensor(1.0)}}
        torch.save({"state": state, "param_groups": [{"lr": 0.5, "params": [0]}]}, file)


def _other_cuts(folder: Path) -> None:
    """A run on two tensor-parallel ranks that cuts matrices along the other axis than usual."""
    shards: dict[str, list[torch.Tensor]] = {}
    for name, value in _LLAMA.items():
        tensor, across = torch.ones(value.shape), name.endswith(("o_proj.weight", "up_proj.weight", "gate_proj.weight"))
        shards[name] = list(tensor.chunk(2, int(across))) if tensor.ndim > 1 else [tensor] * 2
    deepspeed.save(folder, shards, None)
    (folder / "config.json").write_text(json.dumps({**_CONFIG, "model_type": "my_llama"}))


ADVISED: Mapping[str, Make] = MappingProxyType(
    {
        "narrow.json": _text({**_CONFIG, "hidden_size": 32}),
        "unfused.json": _text({**_CONFIG, "fuse_qkv": False}),
        "short.json": _text({**_CONFIG, "num_hidden_layers": 1}),
        "untied.json": _text(_CONFIG),
        "tied.json": _text({**_CONFIG, "tie_word_embeddings": True}),
        "biased.json": _text({**_CONFIG, "attention_bias": True}),
        "odd.rules": _text("family new like nonsense\n"),
        "gptq.json": _text({**_FP8_CONFIG, "quantization_config": _SECTION}),
        "typeless.json": _text({key: value for key, value in _CONFIG.items() if key != "model_type"}),
        "my_llama.rules": _text("family my_llama like llama\n"),
        "my_type": _llama(model_type="my_llama"),
        "odd_type": lambda folder: checkpoints.write(folder, {"a.weight": _SQUARE}, config={"model_type": "my_bert"}),
        "wrapped": _llama({f"_orig_mod.{_QUERY}": _LLAMA[_QUERY]}),
        "torchtune": _renamed(_as_torchtune),
        "surplus": _llama({"more.weight": _SQUARE}),
        "biased": _llama(_BIASES, attention_bias=False),
        "uneven": lambda folder: checkpoints.write(folder, _uneven(), config=_SIZELESS),
        "wide": _llama({name: np.concatenate([_LLAMA[name]] * 2) for name in _VOCABULARY}, vocab_size=2 * _ROWS),
        "bare_headless": lambda folder: checkpoints.write(folder, _without_head()),
        "te_names": lambda folder: tx.convert(folder.parent / "llama", folder, to="safetensors:te", sync=False),
        "adapted": _renamed(lambda name: name.replace("_proj.weight", "_proj.base_layer.weight")),
        "short": _llama(num_hidden_layers=1),
        "untied": _llama(tie_word_embeddings=True),
        "mixed": _llama({_QUERY: _LLAMA[_QUERY].astype(np.float32)}),
        "odd_key": lambda folder: checkpoints.write(folder, _FP8, config=_with_odd_key()),
        "only_codes": lambda folder: checkpoints.write(folder, _query_codes(), config=_FP8_CONFIG),
        "bare": lambda folder: checkpoints.write(folder, _LLAMA),
        "gptq": _gptq,
        "headless": _llama({"lm_head.weight": None}),
        "two_gptq": _two_gptq,
        "meta": _meta,
        "numbered": _numbered,
        "odd_name": _odd_name,
        "nvfp4": lambda folder: tx.convert(folder.parent / "llama", folder, to="hf", encode="nvfp4", sync=False),
        "padded": _llama({name: _with_a_row(_LLAMA[name]) for name in _VOCABULARY}, vocab_size=_ROWS + 1),
        "ahead": lambda folder: checkpoints.write(folder, glm(0, ahead=False), config=GLM),
        "base": lambda folder: checkpoints.write(folder, glm(0, ahead=True), config=GLM),
        "copyless": lambda folder: checkpoints.write(folder, _without_copies(), config=GLM),
        "prefixed": _renamed(lambda name: f"wrapper.{name}"),
        "no_common": _without("torch_dist", "common.pt"),
        "infinite": _llama({_QUERY: np.full(_LLAMA[_QUERY].shape, 1e30, ml_dtypes.bfloat16)}),
        "zero_of_two": deepspeed.folder,
        "universal": _universal,
        "bare_trainer": _bare_trainer,
        "trainer": _trainer,
        "cut_anyhow": _cut_anyhow,
        "no_config": _of_no_config,
        "lost_state": _without("zero", "*optim_states.pt"),
        "lost_ranks": _without("ranks_moe", "distrib_optim.pt"),
        "gptq_alone": _gptq_alone,
        "gptq_plain.json": _text(quantized.llama_config(**_QUANTIZED)),
        "odd_scale": _odd_scale,
        "two_scales": _two_scales,
        "trained": _trained,
        "parted.rules": _text(_PART.replace("dialect two\n", "dialect two\n    y = y[f d]\n")),
        "gptq_full.json": lambda file: shutil.copy(file.parent / "gptq" / "config.json", file),
        "adapter_tenth": lambda folder: lora(folder, _CONFIG, rank=1, lora_alpha=0.1),
        "nvfp4_of_float32": _nvfp4_of_float32,
        "fp8_cache": lambda folder: checkpoints.write(folder, _FP8, config=_with_cache()),
        "edited": _edited,
        "flat_ranks": _flat_ranks,
        "other_cuts": _other_cuts,
        "down.rules": _text("family my_llama like llama\n  cut tp = d of gate up down\n"),
        "half": _llama({name: value.astype(np.float16) for name, value in _LLAMA.items()}, torch_dtype="float16"),
        "adapter_huge": lambda folder: lora(folder, _CONFIG, lora_alpha=1e6),
        "bare_surplus": lambda folder: checkpoints.write(folder, {**_LLAMA, "more.weight": _SQUARE}),
        "damaged_state": _damaged_state,
        "factored": _with_state(_factored),
        "two_groups": _with_state(_moments, groups=2),
        "with_state": _with_state(_moments),
        "balanced": _balanced,
        "shifted.rules": _text(_SHIFTED),
        "shifted": lambda folder: checkpoints.write(folder, {"0.norm": _SQUARE[0]}),
        "wide_mlp": _wide,
        "four_bits": _four_bits(_LLAMA, _CONFIG),
        "pair_of_four_bits": _four_bits({"a.weight": _SQUARE}, {"model_type": "pair", "hidden_size": 4}),
        "partly_plain": lambda folder: _partly(folder, plain=True),
        "partly_listed": lambda folder: _partly(folder, plain=False),
        "text": lambda folder: checkpoints.write(folder, random_weights(TEXT, 1), config=TEXT),
        "whole": lambda folder: checkpoints.write(folder, random_weights(WHOLE, 2), config=WHOLE),
        "text_fp8": _text_fp8,
        "gptq_bare": _without("gptq", "config.json"),
        "small_vocabulary.json": _text({**ranks.Run(tp=2, pp=2).config(), "vocab_size": 40}),
        "fold.rules": _text(_FOLD),
        "fold.json": _text({"model_type": "fold", "d": 4, "folded": True}),
        "folded": _folded,
        "part.rules": _text(_PART),
        "joined": _joined,
        "adapter_fp8": lambda folder: lora(folder, _FP8_CONFIG),
        "adapter_uneven": lambda folder: lora(folder, _CONFIG, alpha_pattern={"q_proj": 4}),
        "two_kinds": _zip_and_safetensors,
        "of_another_package": _of_another_package,
        "flipped.pt": _flipped_torch,
        "rank.pt": _part_of_a_dtensor,
    }
)  # fmt: skip
"""Name in the working directory -> what makes it, after the sources of golden cases."""
