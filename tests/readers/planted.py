"""Fifteen faults that checkpoints have in practice, each planted in a small one that its reader loads right.

A fault is planted in the files or in the config alone. Each is mended as its finding advises: by Transaxle where it has
an option for it, or by the config key, or by the tensors that were lost.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.engine.packed import Made
from tests.oracles.quantized_peers import compressed
from tests.oracles.quiet import quiet

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TRANSFORMERS, TRANSFORMERS_4, VLLM, VLLM_DRAFTS, PEFT = "transformers", "transformers 4", "vllm", "vllm drafts", "peft"

DEPTH, WIDTH, WORDS, EXPERTS = 2, 64, 40, 4
SIZES: Config = {
    "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": DEPTH, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": WORDS, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SIZES}
QWEN3 = {"model_type": "qwen3", **SIZES}
PHI3 = {"model_type": "phi3", **SIZES}
QWEN3_MOE: Config = {
    "model_type": "qwen3_moe", **SIZES, "moe_intermediate_size": 32, "num_experts": EXPERTS, "num_experts_per_tok": 2,
}  # fmt: skip
GLM4_MOE: Config = {
    "model_type": "glm4_moe", **SIZES, "moe_intermediate_size": 32, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LINEAR = {"group_0": {"targets": ["Linear"]}}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_NVFP4 = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
}  # fmt: skip


# -- checkpoints


def make(config: Mapping[str, Any], folder: Path, **saving: Any) -> None:
    """Let transformers save a model of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {key: value for key, value in config.items() if key != "model_type"}
    with quiet():
        configuration = AutoConfig.for_model(config["model_type"], **keys)
        model = AutoModelForCausalLM.from_config(configuration).float().eval()
        draw(model)
        model.save_pretrained(folder, **saving)


def draw(model: Any) -> None:
    """Give a model random weights."""
    generator = torch.Generator().manual_seed(3)
    for _, value in sorted(model.state_dict(keep_vars=True).items()):
        if value.is_floating_point():
            value.data.copy_(0.3 * torch.randn(value.shape, generator=generator))
    model.tie_weights()


def tensors(folder: Path) -> Tensors:
    """Read the tensors of all files of a folder."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def store(folder: Path, values: Tensors, file: str = WEIGHTS) -> None:
    save_file({name: value.contiguous() for name, value in values.items()}, folder / file, metadata={"format": "pt"})


def config_of(folder: Path) -> Config:
    config: Config = json.loads((folder / CONFIG).read_text("utf-8"))
    return config


def reconfigure(folder: Path, change: Callable[[Config], object]) -> None:
    config = config_of(folder)
    change(config)
    (folder / CONFIG).write_text(json.dumps(config), "utf-8")


def retensor(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a folder with a single file."""
    values = load_file(folder / WEIGHTS)
    change(values)
    store(folder, values)


def for_transformers_4(config: Config) -> None:
    """Add the keys under which transformers 4 reads what transformers 5 writes elsewhere."""
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["torch_dtype"] = config["dtype"]
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]


def _older(config: Mapping[str, Any], **keys: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        make({**config, **keys}, folder)
        reconfigure(folder, for_transformers_4)

    return build


def _made(config: Mapping[str, Any], **keys: Any) -> Callable[[Path], None]:
    return lambda folder: make({**config, **keys}, folder)


def _compressed(weights: Mapping[str, Any], scale: str) -> Callable[[Path], None]:
    """A Llama as compressed-tensors stores it."""

    def build(folder: Path) -> None:
        folder.mkdir()
        groups = {"group_0": {**_LINEAR["group_0"], "weights": dict(weights)}}
        compressed(groups, ["lm_head"], 1, folder, scale).save(folder)

    return build


def _with_drafts(folder: Path) -> None:
    """A GLM-4.5 with a layer that predicts a further token, as in its published files."""
    make({**GLM4_MOE, "num_hidden_layers": DEPTH + 1}, folder)
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "enorm": [WIDTH], "hnorm": [WIDTH], "eh_proj": [WIDTH, 2 * WIDTH], "shared_head.norm": [WIDTH],
        "shared_head.head": [WORDS, WIDTH], "embed_tokens": [WORDS, WIDTH],
    }  # fmt: skip
    draft = f"model.layers.{DEPTH}"
    more = {f"{draft}.{name}.weight": 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    retensor(folder, lambda values: values.update(more))
    depth = {"num_hidden_layers": DEPTH, "num_nextn_predict_layers": 1}
    reconfigure(folder, lambda config: config.update(depth))


def make_packed(form: Callable[..., Made], folder: Path, **options: Any) -> None:
    """A Llama whose projections are packed as GPTQ or AWQ packs them."""
    make({**LLAMA, "hidden_size": 2 * WIDTH, "intermediate_size": 4 * WIDTH, "head_dim": 32}, folder)
    values = {name: value.half() for name, value in load_file(folder / WEIGHTS).items()}
    for seed, name in enumerate([name for name in values if name.endswith("_proj.weight")]):
        packed = form(*values.pop(name).shape, 32, seed=seed, **options)
        values |= {f"{name.removesuffix('weight')}{part}": value for part, value in packed.tensors.items()}
    store(folder, values)
    reconfigure(folder, lambda config: config.update(quantization_config=packed.section, dtype="float16"))


def two_files(folder: Path) -> None:
    """A Llama in two files with an index."""
    make(LLAMA, folder)
    values = tensors(folder)
    (folder / WEIGHTS).unlink()
    names = sorted(values)
    half = len(names) // 2
    where = {name: f"model-{1 + (place >= half):05d}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(where.values()):
        store(folder, {name: values[name] for name in names if where[name] == file}, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}), "utf-8")


def indexed(folder: Path) -> dict[str, str]:
    where: dict[str, str] = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
    return where


def reindex(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    where = indexed(folder)
    change(where)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}), "utf-8")


# -- faults

EXPERT = "model.layers.1.mlp.experts.2"
UP = "model.layers.1.mlp.up_proj.weight"
SECOND, LOST = "model-00002-of-00002.safetensors", "model-00003-of-00003.safetensors"


def lose(part: str) -> Callable[[Path], None]:
    """Remove the tensors whose names contain a text."""

    def spoil(folder: Path) -> None:
        retensor(folder, lambda values: [values.pop(name) for name in list(values) if part in name])

    return spoil


def with_key(key: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: reconfigure(folder, lambda config: config.update({key: value}))


def _drop_key(key: str) -> Callable[[Path], None]:
    return lambda folder: reconfigure(folder, lambda config: config.pop(key))


def _stack(folder: Path) -> None:
    """Stack the experts as transformers 5 does in memory, under the same config."""
    values = load_file(folder / WEIGHTS)
    for layer in range(DEPTH):
        stem = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([values.pop(f"{stem}.{expert}.{part}_proj.weight") for expert in range(EXPERTS)])
            for part in ("gate", "up", "down")
        }
        values[f"{stem}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        values[f"{stem}.down_proj"] = parts["down"]
    store(folder, values)


def _invert(values: Tensors) -> None:
    """Write the scale of each whole matrix as ModelOpt does: the factor instead of the divisor."""
    for name in values:
        if name.endswith("weight_global_scale"):
            values[name] = 1 / values[name]


def _swap(folder: Path) -> None:
    """Put the rows of up before those of gate."""
    for name, value in (values := load_file(folder / WEIGHTS)).items():
        if name.endswith("gate_up_proj.weight"):
            gate, up = value.chunk(2)
            values[name] = torch.cat([up, gate])
    store(folder, values)


RULES = "up_first.rules"
UP_FIRST = """
family phi3_up_first like phi3
  dialects hf transformers

dialect up_first like hf
  model.layers.{l}.mlp.gate_up_proj.weight = [[up:f | gate:f] d]
"""
_UP_FIRST = {"family": "phi3_up_first", "dialect": "up_first"}
"""Says in which order the rows of the swapped checkpoint are."""


def _make_fp8(folder: Path) -> None:
    """A Llama with FP8 blocks, as DeepSeek's and Qwen's files have them."""
    make(LLAMA, folder)
    values = load_file(folder / WEIGHTS)
    for name in [name for name in values if name.endswith("_proj.weight")]:
        scale = values[name].abs().max() / torch.finfo(torch.float8_e4m3fn).max
        values[name] = (values[name] / scale).to(torch.float8_e4m3fn)
        values[f"{name}_scale_inv"] = scale.reshape(1, 1)
    store(folder, values)
    with_key("quantization_config", _FP8)(folder)


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _make_partly_int4(folder: Path) -> None:
    """A Llama in INT4 whose down projection stays plain, and is in the list of those."""
    _compressed(_INT4, "bfloat16")(folder)
    down = "model.layers.0.mlp.down_proj"
    values = load_file(folder / WEIGHTS)
    shape = values[f"{down}.weight_shape"].tolist()
    for part in ("packed", "scale", "shape"):
        del values[f"{down}.weight_{part}"]
    plain = 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(6))
    values[f"{down}.weight"] = plain.to(torch.bfloat16)
    store(folder, values)
    _ignoring(down)(folder)


def _ignoring(module: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        reconfigure(folder, lambda config: config["quantization_config"].update(ignore=["lm_head", module]))

    return spoil


def _twice(folder: Path) -> None:
    """Leave an older copy of a tensor in the file that is read last."""
    file = next(file for name, file in indexed(folder).items() if name == FIRST_TENSOR)
    other = next(each for each in indexed(folder).values() if each != file)
    values = load_file(folder / other)
    store(folder, {**values, FIRST_TENSOR: load_file(folder / file)[FIRST_TENSOR] + 0.5}, other)


BASE = "base"
"""Folder of the model beside its adapters."""
_ADAPTER, _OLDER_PEFT = "adapter_model.safetensors", "0.18.1"


def _adapter(folder: Path) -> None:
    lora_of_stacks(folder, "gate_up_proj", "down_proj")


def lora_of_stacks(folder: Path, *parts: str) -> None:
    """LoRA of stacked experts, as peft saves it since 0.19."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = folder.parent / BASE
    if not base.exists():
        make(QWEN3_MOE, base)
    stacks = [f"mlp.experts.{part}" for part in parts]
    settings = LoraConfig(
        r=2, lora_alpha=4, target_modules=[], target_parameters=stacks, init_lora_weights=False,
        base_model_name_or_path=str(base),
    )  # fmt: skip
    with quiet():
        torch.manual_seed(4)
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(folder)


def older_peft(folder: Path) -> None:
    """Write the two matrices of each stack as peft did before 0.19, or back: it took their axes for each other.

    A has the ranks of one expert after those of another; B has the experts of one rank side by side.
    """
    from peft import __version__ as present

    path, values = folder / "adapter_config.json", load_file(folder / _ADAPTER)
    settings = json.loads(path.read_text("utf-8"))
    settings["peft_version"] = _OLDER_PEFT if settings["peft_version"] == present else present
    path.write_text(json.dumps(settings), "utf-8")
    turned: Tensors = {}
    for name, first in values.items():
        if ".lora_A." in name:
            second = name.replace(".lora_A.", ".lora_B.")
            by_expert = values[second].unflatten(1, (-1, EXPERTS)).permute(2, 1, 0)
            turned[name] = by_expert.flatten(0, 1)
            turned[second] = first.unflatten(0, (EXPERTS, -1)).permute(2, 1, 0).flatten(1)
    store(folder, turned, _ADAPTER)


FIRST_TENSOR = "model.embed_tokens.weight"


def _forget_twice(spoilt: Path, _good: Path, target: Path) -> None:
    """Keep of each file what the index has there."""
    shutil.copytree(spoilt, target)
    where = indexed(target)
    for file in set(where.values()):
        store(target, {name: value for name, value in load_file(target / file).items() if where[name] == file}, file)


# -- mending


def set_key(key: str, value: Any) -> Callable[[Path, Path, Path], None]:
    return rewritten(with_key(key, value))


def rewritten(change: Callable[[Path], None]) -> Callable[[Path, Path, Path], None]:
    def mend(spoilt: Path, _good: Path, target: Path) -> None:
        shutil.copytree(spoilt, target)
        change(target)

    return mend


def converted(**options: Any) -> Callable[[Path, Path, Path], None]:
    def mend(spoilt: Path, _good: Path, target: Path) -> None:
        tx.convert(spoilt, target, to="hf", sync=False, **options)

    return mend


def _up_first_to_hf(spoilt: Path, good: Path, target: Path) -> None:
    converted(rules=spoilt.parent / RULES, **_UP_FIRST)(spoilt, good, target)


def put_back(spoilt: Path, good: Path, target: Path) -> None:
    """Take the tensors that the checkpoint lost from the one that has them."""
    shutil.copytree(spoilt, target)
    store(target, {**tensors(good), **tensors(spoilt)})


@dataclass(frozen=True)
class Fault:
    """A checkpoint, what goes wrong with it, the reader that does not notice or fails, and what mends it."""

    reader: str
    """Which reader is wrong then."""
    build: Callable[[Path], None]
    """Writes the checkpoint that is right into a folder that does not exist."""
    spoil: Callable[[Path], None]
    """Plants the fault in a copy."""
    mend: Callable[[Path, Path, Path], None]
    """Makes a new folder from the spoilt one; it also gets the right one."""
    mentions: str
    """A tensor, parameter or config key that a finding names."""
    opening: Mapping[str, Any] = field(default_factory=dict)
    """Options with which the spoilt checkpoint is opened."""


FAULTS = {
    "a missing expert": Fault(VLLM, _made(QWEN3_MOE), lose(f"{EXPERT}."), put_back, f"{EXPERT}.up_proj.weight"),
    "a missing half of an expert": Fault(
        TRANSFORMERS, _made(QWEN3_MOE), lose(f"{EXPERT}.up_proj."), put_back, f"{EXPERT}.up_proj.weight",
    ),
    "a stacked name that a reader ignores": Fault(
        TRANSFORMERS_4, _older(QWEN3_MOE), _stack, converted(), "model.layers.0.mlp.experts.gate_up_proj"
    ),
    "an inverted scale of the whole matrix": Fault(
        TRANSFORMERS, _compressed(_NVFP4, "float32"), lambda folder: retensor(folder, _invert),
        rewritten(lambda folder: retensor(folder, _invert)), "model.layers.0.mlp.down_proj.weight_global_scale",
    ),
    "a bias that the model lacks": Fault(
        TRANSFORMERS, _made(LLAMA, attention_bias=True), with_key("attention_bias", False),
        set_key("attention_bias", True), "model.layers.0.self_attn.q_proj.bias",
    ),
    "a tied head that is absent": Fault(
        TRANSFORMERS, _made(LLAMA, tie_word_embeddings=True), with_key("tie_word_embeddings", False),
        set_key("tie_word_embeddings", True), "lm_head.weight",
    ),
    "an absent head": Fault(VLLM, _made(LLAMA), lose("lm_head."), put_back, "lm_head.weight"),
    "no layer that predicts further tokens": Fault(
        VLLM_DRAFTS, _with_drafts, lose(".layers.2."), put_back, "model.layers.2.eh_proj.weight"
    ),
    "a base of the rotary embedding that is spelled otherwise": Fault(
        TRANSFORMERS_4, _older(LLAMA, rope_theta=50.0), _drop_key("rope_theta"), set_key("rope_theta", 50.0),
        "rope_theta",
    ),
    "swapped halves of gate and up": Fault(
        TRANSFORMERS, _made(PHI3), _swap, _up_first_to_hf,
        "model.layers.0.mlp.gate_up_proj.weight", _UP_FIRST,
    ),
    "int4 without the shapes of the matrices": Fault(
        TRANSFORMERS, _compressed(_INT4, "float32"), lose(".weight_shape"), put_back,
        "model.layers.0.mlp.down_proj.weight_shape",
    ),
    "LoRA of an older peft": Fault(
        PEFT, _adapter, older_peft, rewritten(older_peft),
        "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight",
    ),
    "another size of a head": Fault(
        TRANSFORMERS, _made(QWEN3), with_key("head_dim", 32), set_key("head_dim", 16),
        "model.layers.0.self_attn.q_norm.weight",
    ),
    "FP8 without a quantization config": Fault(
        TRANSFORMERS, _make_fp8, _drop_key("quantization_config"), set_key("quantization_config", _FP8),
        "model.layers.0.mlp.up_proj.weight_scale_inv",
    ),
    "a list of plain modules in the names of another dialect": Fault(
        TRANSFORMERS, _make_partly_int4, _ignoring("model.language_model.layers.0.mlp.down_proj"),
        rewritten(_ignoring("model.layers.0.mlp.down_proj")), "model.layers.0.mlp.down_proj.weight",
    ),
    "an index entry without a file": Fault(
        TRANSFORMERS, two_files,
        lambda folder: reindex(folder, lambda where: where.update({UP: LOST})),
        rewritten(lambda folder: reindex(folder, lambda where: where.update({UP: SECOND}))), LOST,
    ),
    "a tensor in two files": Fault(TRANSFORMERS, two_files, _twice, _forget_twice, FIRST_TENSOR),
    "the number of experts under another key": Fault(
        TRANSFORMERS_4, _older(QWEN3_MOE), _drop_key("num_experts"), set_key("num_experts", EXPERTS), "num_experts",
    ),
}  # fmt: skip
"""What is wrong -> the fault."""
