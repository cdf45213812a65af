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
from safetensors.torch import save_file

import transaxle as tx
from tests import checkpoints
from tests.engine import packed, quantized
from tests.engine.checkpoint.test_grafting import COPIES, GLM, glm
from tests.formats.deepspeed import made as deepspeed
from tests.formats.megatron.legacy import run as ranks

_SIZES = {"d": 64, "f": 128, "g": 2, "r": 2, "head": 32, "layers": 2}
_QUANTIZED = {"d": 128, "f": 256, "g": 2, "r": 2, "head": 32}
_LLAMA, _CONFIG = quantized.plain_llama(**_SIZES)
_FP8, _FP8_CONFIG = quantized.llama(**_QUANTIZED)
_QUERY = "model.layers.0.self_attn.q_proj.weight"
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


ADVISED: Mapping[str, Make] = MappingProxyType(
    {
        "narrow.json": _text({**_CONFIG, "hidden_size": 32}),
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
    }
)  # fmt: skip
"""Name in the working directory -> what makes it, after the sources of golden cases."""
