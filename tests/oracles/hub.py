"""transformers 5.24.0: what `save_pretrained` stores, and what `from_pretrained` holds in memory.

Step-3.5 has no class of its own there. Its text model is the trunk of `Step3p7ForConditionalGeneration`,
which stores that trunk under the names of Step-3.5's own files; the vision tower's tensors are left out here.

It holds the routers of DeepSeek-V3, GLM-4-MoE and others in float32, also those that files have in bfloat16: the same
numbers, which are compared in the dtype of the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.oracles.quiet import quiet

Config = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]

STEP = "step3p5"
WEIGHTS = "model.safetensors"
_TEXT = "text_config"
_VISION = ("vision_model.", "vit_large_projector.", "model.vision_model.", "model.multi_modal_projector.")
_CORRECTION = "e_score_correction_bias"
_DEPTH = "num_hidden_layers"
_END = "shared_head.norm"


def configuration(config: Config) -> Any:
    """The configuration object that transformers makes of a config.json."""
    from transformers import AutoConfig

    keys = {key: value for key, value in config.items() if key != "model_type"}
    text = AutoConfig.for_model(config["model_type"], **keys)
    if config["model_type"] != STEP:
        return text
    vision = {"width": 8, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14}
    return AutoConfig.for_model("step3p7", vision_config=vision, **{_TEXT: text.to_dict()})


def model(config: Config, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model of these sizes on the CPU, its weights still as transformers draws them."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    factory = AutoModelForImageTextToText if config["model_type"] == STEP else AutoModelForCausalLM
    with quiet():
        return factory.from_config(configuration(config)).to(dtype).eval()


def make(config: Config, seed: int, *, fp32_bias: bool = False, ahead: int = 0) -> tuple[dict[str, Any], Tensors]:
    """The config.json and the tensors that `save_pretrained` stores for a model of random weights.

    With `fp32_bias` the router's correction bias is single precision, as in Step-3.5's own files. The last `ahead`
    layers predict several tokens ahead: transformers, which leaves those out, stores them as ordinary layers here, and
    what stands in front of and behind them is added.
    """
    depth = config[_DEPTH]
    drawn = model({**config, _DEPTH: depth + ahead})
    generator = torch.Generator().manual_seed(seed)
    for name, value in sorted(drawn.state_dict(keep_vars=True).items()):
        if fp32_bias and name.endswith(_CORRECTION):
            value.data = value.data.float()
        value.data.copy_(0.3 * torch.randn(value.shape, generator=generator))
    written, stored = _save(drawn)
    width = config["hidden_size"]
    for layer in range(depth, depth + ahead):
        for name, shape in (("enorm", [width]), ("hnorm", [width]), ("eh_proj", [width, 2 * width]), (_END, [width])):
            value = 0.3 * torch.randn(shape, generator=generator)
            stored[f"model.layers.{layer}.{name}.weight"] = value.to(torch.bfloat16)
    return {**written, _DEPTH: depth}, stored


def from_hf(config: Config, stored: Tensors) -> Tensors:
    """What `from_pretrained` holds in memory for these files."""
    with quiet(), TemporaryDirectory() as folder:
        other = model(config)
        other.save_pretrained(folder)
        save_file(stored, Path(folder, WEIGHTS), metadata={"format": "pt"})
        loaded = type(other).from_pretrained(folder, dtype=torch.bfloat16)
    return {name: _narrowed(value, stored.get(name)) for name, value in _text(loaded.state_dict()).items()}


def _narrowed(value: torch.Tensor, file: torch.Tensor | None) -> torch.Tensor:
    """A tensor in the dtype of the file, which holds the same numbers."""
    if file is None or file.dtype == value.dtype:
        return value
    narrow = value.to(file.dtype)
    assert torch.equal(narrow.to(value.dtype), value)
    return narrow


def to_hf(config: Config, held: Tensors) -> Tensors:
    """What `save_pretrained` stores for a model that holds these tensors."""
    target = model(config)
    for name, value in target.state_dict(keep_vars=True).items():
        if name in held:
            assert value.shape == held[name].shape
            value.data = held[name].clone()  # its dtype too: a correction bias is single precision
    return _save(target)[1]


def _save(source: Any) -> tuple[dict[str, Any], Tensors]:
    with quiet(), TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        config = json.loads(Path(folder, "config.json").read_text("utf-8"))
        return config.get(_TEXT, config), _text(load_file(Path(folder, WEIGHTS)))


def _text(tensors: Tensors) -> Tensors:
    return {name: value.detach() for name, value in tensors.items() if not name.startswith(_VISION)}
