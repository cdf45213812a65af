"""The checkpoints that golden cases start from: small, and the same bytes at every making."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import transaxle as tx
from tests import checkpoints
from tests.engine import quantized
from tests.formats.deepspeed import made
from tests.formats.megatron.legacy import run as ranks
from tests.formats.ranks import made as rank_files
from transaxle.formats.registry import MANIFEST

_LLAMA = {"d": 64, "f": 128, "g": 2, "r": 2, "head": 32, "layers": 2}
_QUANTIZED = {"d": 128, "f": 256, "g": 2, "r": 2, "head": 32}
_MIXED = {"a.weight": np.float32, "b.weight": np.float16, "c.ids": np.int64, "d.mask": np.bool_}
_RULES = """
family pair
  axes n d=hidden_size
  a : n d
  b : d

  dialect one
    a.weight = a[n d]
    b.weight = b[d]

  dialect two
    all.a = a[d n]
    all.b = b[d]
"""


def _store(held: Mapping[str, Any], config: Mapping[str, Any], shards: int = 1) -> Callable[[Path], object]:
    return lambda folder: checkpoints.write(folder, dict(held), shards=shards, config=config)


def _torch(held: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Arrays as tensors of the same types; numpy and torch do not share bfloat16."""
    return {
        name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(array)
        for name, array in held.items()
    }


def _qwen3(folder: Path) -> None:
    """Tied, as the small ones are, with norms of queries and keys."""
    held, config = quantized.plain_llama(**_LLAMA)
    del held["lm_head.weight"]
    for layer in range(_LLAMA["layers"]):
        for seed, norm in enumerate(("q_norm", "k_norm")):
            held[f"model.layers.{layer}.self_attn.{norm}.weight"] = quantized.plain((_LLAMA["head"],), 50 + seed)
    named = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    checkpoints.write(folder, held, config={**config, **named})


def _zero(folder: Path, drift: float = 0.0) -> None:
    """A ZeRO-1 run of a Llama on one rank, or of its norms on two tensor-parallel ranks that have drifted apart."""
    held, config = quantized.plain_llama(**_LLAMA)
    whole = {name: tensor.float() for name, tensor in _torch(held).items()}
    shards: dict[str, list[torch.Tensor]] = {name: [tensor] for name, tensor in whole.items()}
    info = None
    if drift:
        norms = {name: tensor for name, tensor in whole.items() if name.endswith("norm.weight")}
        shards = {name: [tensor, tensor * (1 + drift)] for name, tensor in norms.items()}
        info = {"tp_replicated_parameter_patterns": [".*norm.weight"], "universal_checkpoint_version": 0.2}
    made.save(folder, shards, info)
    (folder / "config.json").write_text(json.dumps(config))


def _titan(folder: Path) -> None:
    """A step of torchtitan with its optimizer, saved by torch."""
    whole, names = folder.parent / f"{folder.name}-hf", folder.parent / f"{folder.name}-names"
    checkpoints.tiny(whole)
    tx.convert(whole, names, to="safetensors:torchtitan", sync=False)
    held: dict[str, Any] = load_file(names / checkpoints.WHOLE)
    for name, tensor in list(held.items()):
        stem = f"optimizer.state.{name}"
        held |= {f"{stem}.exp_avg": tensor.float() / 8, f"{stem}.exp_avg_sq": tensor.float().square()}
        held |= {f"{stem}.step": torch.tensor(3.0), f"optimizer.param_groups.{name}.lr": 0.25}
    with warnings.catch_warnings(action="ignore"), chdir(folder.parent):
        dcp_save(held, checkpoint_id=folder.name, no_dist=True)  # which notes the path
    (folder / "config.json").write_text(json.dumps(checkpoints.CONFIG))


def _torch_dist(folder: Path) -> None:
    """Megatron's distributed form, without anything that says who wrote it."""
    tx.convert(checkpoints.tiny(folder.parent / f"{folder.name}-hf"), folder, to="torch_dist:megatron", sync=False)
    (folder / MANIFEST).unlink()


def _ranks(**of_run: Any) -> Callable[[Path], object]:
    """Megatron's folders of one rank each."""

    def make(folder: Path) -> None:
        run = ranks.Run(**of_run)
        ranks.write(run, folder)
        (folder / "config.json").write_text(json.dumps(run.config()))

    return make


def _rank_files(folder: Path) -> None:
    """A Llama on a mesh of two by two ranks, each of which has saved its own files, as verl names them."""
    held, config = quantized.plain_llama(**_LLAMA)
    whole = _torch(held)
    states: list[dict[str, Any]] = []
    optimizers: list[dict[str, Any]] = []
    for rank in range(4):
        mesh = rank_files.mesh(rank, {"ddp": 2, "fsdp": 2})
        states.append({name: rank_files.dtensor(tensor, mesh, ["R", "S0"]) for name, tensor in whole.items()})
        moments = {name: rank_files.dtensor(tensor.float(), mesh, ["R", "S0"]) for name, tensor in whole.items()}
        of_names = {name: {"exp_avg": value, "step": torch.tensor(3.0)} for name, value in moments.items()}
        optimizers.append({"state": of_names, "param_groups": [{"lr": 0.5, "params": list(whole)}]})
    rank_files.write_all(folder, states)
    rank_files.write_all(folder, optimizers, "optim")
    (folder / "config.json").write_text(json.dumps(config))


def _missing_rank(folder: Path) -> None:
    _rank_files(folder)
    (folder / "model_world_size_4_rank_2.pt").unlink()


def lora(folder: Path, config: Mapping[str, Any], rank: int = 4, **changes: Any) -> None:
    """A LoRA of all projections of attention of a Llama, as peft stores it, with changes of its config."""
    folder.mkdir()
    random = np.random.default_rng(7)
    linear, _ = quantized.llama_shapes(config)
    held: dict[str, np.ndarray] = {}
    for name, (rows, columns) in linear.items():
        if "self_attn" in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            held[f"{stem}.lora_A.weight"] = random.standard_normal((rank, columns)).astype(np.float32)
            held[f"{stem}.lora_B.weight"] = random.standard_normal((rows, rank)).astype(np.float32)
    save_file(held, folder / "adapter_model.safetensors")
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": modules, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(said))


def _pt(folder: Path) -> None:
    folder.mkdir()
    held, config = quantized.plain_llama(**_LLAMA)
    torch.save(_torch(held), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))


def _file(folder: Path) -> None:
    torch.save(_torch(quantized.plain_llama(**_LLAMA)[0]), folder)


def _unknown(folder: Path) -> None:
    """Tensors of several types that no family has, and no config."""
    random = np.random.default_rng(3)
    held: checkpoints.Tensors = {name: random.integers(0, 2, (6, 4)).astype(kind) for name, kind in _MIXED.items()}
    checkpoints.write(folder, held)


def _pair(folder: Path) -> None:
    """What `rules` is a table for."""
    held = {"a.weight": np.arange(24, dtype=np.float32).reshape(6, 4), "b.weight": np.ones(4, np.float32)}
    checkpoints.write(folder, held, config={"model_type": "pair", "hidden_size": 4})


def _damaged(folder: Path) -> None:
    """One shard is missing, and the other has fewer tensors than the index lists."""
    checkpoints.tiny(folder, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


SOURCES: Mapping[str, Callable[[Path], object]] = MappingProxyType(
    {
        "llama": _store(*quantized.plain_llama(**_LLAMA)),
        "qwen3": _qwen3,
        "qwen3_moe": lambda folder: checkpoints.tiny(folder, shards=2),
        "llama_fp8": _store(*quantized.llama(**_QUANTIZED)),
        "deepseek_v3": lambda folder: quantized.store(folder, quantized.deepseek(), shards=2),
        "gpt_oss": _store(*quantized.gpt_oss(d=64, f=32, e=2)),
        "zero": _zero,
        "drifted": lambda folder: _zero(folder, 2.0**-12),  # so little that weights in bf16 stay alike
        "drifted_far": lambda folder: _zero(folder, 2.0**-4),
        "titan": _titan,
        "torch_dist": _torch_dist,
        "ranks": _ranks(tp=2, pp=2),
        "ranks_moe": _ranks(ep=2, optimizer="flat", sparse=(1, 3)),
        "rank_files": _rank_files,
        "missing_rank": _missing_rank,
        "bin": _pt,
        "llama.pt": _file,
        "unknown": _unknown,
        "pair": _pair,
        "damaged": _damaged,
        "adapter": lambda folder: lora(folder, quantized.llama_config(**_LLAMA)),
        "pair.rules": lambda file: file.write_text(_RULES),
        "llama.json": lambda file: file.write_text(json.dumps(quantized.llama_config(**_LLAMA))),
    }
)
"""Name in the working directory of a case -> what makes it."""
