"""Checkpoints that users of readers reported as loaded without a word and wrong, rebuilt with small random weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.oracles.kimi_int4 import QUANTIZATION, pack
from tests.oracles.quiet import quiet
from tests.oracles.vllm_peer.models import model_named
from tests.readers.planted import (
    CONFIG,
    DEPTH,
    EXPERTS,
    PEFT,
    QWEN3_MOE,
    SIZES,
    TRANSFORMERS,
    UP,
    VLLM,
    VLLM_DRAFTS,
    WEIGHTS,
    WIDTH,
    Config,
    Fault,
    converted,
    draw,
    indexed,
    lora_of_stacks,
    lose,
    make,
    older_peft,
    put_back,
    reconfigure,
    rewritten,
    store,
    two_files,
    with_key,
)

QWEN3_NEXT: Config = {
    "model_type": "qwen3_next", **SIZES, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_LINEAR, _FULL = "linear_attention", "full_attention"


def _qwen3_next_with_drafts(folder: Path) -> None:
    """A Qwen3-Next with a layer that predicts a further token, as in its published files."""
    _with_drafts(QWEN3_NEXT, folder)


def _with_drafts(config: Config, folder: Path) -> None:
    make({**config, "num_hidden_layers": DEPTH + 1, "layer_types": [_LINEAR, _FULL, _FULL]}, folder)
    last, draft = f"model.layers.{DEPTH}.", "mtp.layers.0."
    values = {name.replace(last, draft): value for name, value in load_file(folder / WEIGHTS).items()}
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "fc": [WIDTH, 2 * WIDTH],
        "pre_fc_norm_embedding": [WIDTH],
        "pre_fc_norm_hidden": [WIDTH],
        "norm": [WIDTH],
    }
    values |= {f"mtp.{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    store(folder, values)
    with_key("num_hidden_layers", DEPTH)(folder)
    with_key("mtp_num_hidden_layers", 1)(folder)
    with_key("layer_types", [_LINEAR, _FULL])(folder)


_EXPERTS = re.compile(r"expert|moe")
QWEN3_5: Config = {key: value for key, value in QWEN3_NEXT.items() if not _EXPERTS.search(key)}
_DRAFTS = "mtp."


def qwen3_5_int4(folder: Path) -> None:
    """A Qwen3.5 in INT4 whose layer that predicts a further token is plain, and so is its head."""
    _with_drafts({**QWEN3_5, "model_type": "qwen3_5_text"}, folder)
    _pack(folder, lambda name: re.match(r"model\..*(self_attn|mlp)\..*_proj", name) is not None)
    with_key("quantization_config", _listing("re:.*mtp.*", "lm_head"))(folder)


def _listing(*plain: str) -> Config:
    """A quantization config with this list of plain modules."""
    return {**QUANTIZATION, "ignore": [*plain, "re:.*linear_attn.*"]}


def _list_parts_of_drafts(folder: Path) -> None:
    """List the plain modules of the layer that predicts a further token one by one."""
    modules = [name.removesuffix(".weight") for name in load_file(folder / WEIGHTS) if name.startswith(_DRAFTS)]
    with_key("quantization_config", _listing("lm_head", *modules))(folder)


def _pack_head(folder: Path) -> None:
    """Pack the head too, which the config names by its class alone."""
    _pack(folder, lambda name: name == "lm_head.weight")
    with_key("quantization_config", _listing("re:.*mtp.*"))(folder)


def _list_other_names(folder: Path) -> None:
    """List a plain module by the name that it has inside a larger model."""
    down = "layers.0.mlp.down_proj"
    values = load_file(folder / WEIGHTS)
    parts = {part: values.pop(f"model.{down}.weight_{part}") for part in ("packed", "scale", "shape")}
    values[f"model.{down}.weight"] = torch.ones(parts["shape"].tolist(), dtype=torch.bfloat16)
    store(folder, values)
    with_key("quantization_config", _listing("re:.*mtp.*", "lm_head", f"model.language_model.{down}"))(folder)


def _keep_drafts(folder: Path) -> None:
    """Keep the layer that predicts a further token alone, as a program that trains only this layer saves it."""
    values = load_file(folder / WEIGHTS)
    store(folder, {name: value for name, value in values.items() if name.startswith(_DRAFTS)})


def _grafted(spoilt: Path, good: Path, target: Path) -> None:
    """Take all other tensors from the model for which the layer was trained."""
    tx.convert(spoilt, target, to="hf", graft=good, sync=False)


GLM5_NEXT = model_named("glm5_next")


def _glm5_next(folder: Path) -> None:
    """A GLM-5.3 with its tower, under the names of the published files."""
    import transformers

    keys = {key: value for key, value in GLM5_NEXT.config.items() if key != "model_type"}
    with quiet():
        configuration = transformers.AutoConfig.for_model(GLM5_NEXT.config["model_type"], **keys)
        model = getattr(transformers, GLM5_NEXT.kind)(configuration).float()
        draw(model)
        model.save_pretrained(folder)
    reconfigure(folder, lambda config: config.update({"architectures": [GLM5_NEXT.architecture], **GLM5_NEXT.more}))


def _save_as_in_memory(folder: Path) -> None:
    """Let transformers save the model under the names that it has in memory, as it did before it knew the others."""
    import transformers

    config = (folder / CONFIG).read_bytes()
    with quiet():
        model = getattr(transformers, GLM5_NEXT.kind).from_pretrained(folder, dtype="auto")
        model.save_pretrained(folder, save_original_format=False)
    (folder / CONFIG).write_bytes(config)


def _int4_experts(folder: Path) -> None:
    """A Qwen3-MoE with packed experts, one by one, as compressed-tensors' tools write them."""
    make(QWEN3_MOE, folder)
    _pack(folder, lambda name: ".experts." in name)
    with_key("quantization_config", QUANTIZATION)(folder)


def _pack(folder: Path, has_codes: Callable[[str], bool]) -> None:
    """Pack some tensors as compressed-tensors does."""
    values = load_file(folder / WEIGHTS)
    for name in filter(has_codes, list(values)):
        stem = name.removesuffix("weight")
        values |= {f"{stem}{part}": value for part, value in pack(values.pop(name).bfloat16()).items()}
    store(folder, values)


def _stack_packed(folder: Path) -> None:
    """Stack the packed experts under the names that a tool gave them which quantizes the stacks of transformers 5."""
    values = load_file(folder / WEIGHTS)
    for layer in range(DEPTH):
        stem = f"model.layers.{layer}.mlp.experts"
        for part in ("packed", "scale", "shape"):
            gate, up, down = (
                torch.stack([values.pop(f"{stem}.{expert}.{name}_proj.weight_{part}") for expert in range(EXPERTS)])
                for name in ("gate", "up", "down")
            )
            both = gate + up * torch.tensor([1, 0]) if part == "shape" else torch.cat([gate, up], 1)
            values |= {f"{stem}.gate_up_proj_{part}": both, f"{stem}.down_proj_{part}": down}
    store(folder, values)


def _unstack_packed(folder: Path) -> None:
    """Write the packed experts one by one."""
    values = load_file(folder / WEIGHTS)
    for name in [name for name in values if ".experts." in name]:
        stem, _, last = name.rpartition(".")
        projection, _, part = last.rpartition("_")
        for expert, value in enumerate(values.pop(name)):
            if projection == "down_proj":
                values[f"{stem}.{expert}.down_proj.weight_{part}"] = value
                continue
            halves = (value // torch.tensor([2, 1]),) * 2 if part == "shape" else value.chunk(2)
            for half, each in zip(("gate", "up"), halves, strict=True):
                values[f"{stem}.{expert}.{half}_proj.weight_{part}"] = each.clone()
    store(folder, values)


def _lose_an_indexed_tensor(folder: Path) -> None:
    """Leave out a tensor that the index still has, as an export does whose training dropped it."""
    file = indexed(folder)[UP]
    store(folder, {name: value for name, value in load_file(folder / file).items() if name != UP}, file)


def _put_back_into_its_file(spoilt: Path, good: Path, target: Path) -> None:
    put_back(spoilt, good, target)
    file = indexed(spoilt)[UP]
    (target / WEIGHTS).unlink()
    store(target, load_file(good / file), file)


REPORTED = {
    "names that a model has in memory": Fault(
        VLLM, _glm5_next, _save_as_in_memory, converted(), "model.language_model.layers.0.attn_hc.base"
    ),
    "stacks of packed experts": Fault(
        TRANSFORMERS, _int4_experts, _stack_packed, rewritten(_unstack_packed),
        "model.layers.0.mlp.experts.gate_up_proj_packed",
    ),
    "LoRA of an older peft whose shapes are those of the present one": Fault(
        PEFT, lambda folder: lora_of_stacks(folder, "gate_up_proj"), older_peft, rewritten(older_peft),
        "base_model.model.model.layers.0.mlp.experts.lora_A.weight",
    ),
    "an index entry whose file lacks the tensor": Fault(
        TRANSFORMERS, two_files, _lose_an_indexed_tensor, _put_back_into_its_file, UP
    ),
    "a layer that predicts further tokens, dropped in training": Fault(
        VLLM_DRAFTS, _qwen3_next_with_drafts, lose(_DRAFTS), put_back, "mtp.fc.weight"
    ),
    "a layer that predicts further tokens, saved without its model": Fault(
        VLLM_DRAFTS, _qwen3_next_with_drafts, _keep_drafts, _grafted, "lm_head.weight"
    ),
}  # fmt: skip
"""What was reported -> the fault."""

UNRUN = {
    "plain parts of joined modules, listed one by one": (
        _list_parts_of_drafts,
        {f"mtp.layers.0.{part}_proj.weight" for part in
         ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")},
    ),
    "a head with codes that the config names by its class": (
        _pack_head, {"lm_head.weight_packed", "lm_head.weight_scale", "lm_head.weight_shape"},
    ),
    "a plain module that is listed under another name": (
        _list_other_names, {"model.layers.0.mlp.down_proj.weight"},
    ),
}  # fmt: skip
"""What was reported of SGLang, which does not run here -> what spoils `qwen3_5_int4`, and the tensors that SGLang then
drops: the first as in sgl-project/sglang 35797, the others by 35228, 36158 and its code that compares the names of
modules with the config's lists.
"""
