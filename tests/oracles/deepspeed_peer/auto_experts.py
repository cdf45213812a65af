"""Trains models of transformers under DeepSpeed's AutoEP on CPU ranks, and makes DeepSpeed's own universal folder."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

STEPS, TAG = 3, "global_step3"
_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False, "attn_implementation": "eager",
    "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN = {"num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": []}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**_QWEN, "head_dim": 8},
    "qwen2_moe": {**_QWEN, "shared_expert_intermediate_size": 40},
    "deepseek_v3": {
        "n_routed_experts": 4, "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


@dataclass(frozen=True)
class AutoRun:
    """A run with experts over ranks."""

    model: str
    ranks: int = 2
    zero: int = 1
    ep: int = 2
    dtype: str = "bf16"
    data_first: bool = False

    def __str__(self) -> str:
        first = "-data-first" if self.data_first else ""
        return f"{self.model}-z{self.zero}-ep{self.ep}-w{self.ranks}-{self.dtype}{first}"

    @property
    def settings(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        adam = {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.1}
        settings = {
            "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.zero, "overlap_comm": False},
            "expert_parallel": {"enabled": True, "autoep_size": self.ep, "use_grouped_mm": False},
            "use_data_before_expert_parallelism": self.data_first,
            "optimizer": {"type": "AdamW", "params": adam},
        }  # fmt: skip
        return settings | ({"bf16": {"enabled": True}} if self.dtype == "bf16" else {})


def train(rank: int, world: int, run: AutoRun, folder: Path) -> None:
    """Be one rank of a run that trains for a few steps and saves."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    import deepspeed
    import torch
    from deepspeed.utils import groups
    from transformers import AutoConfig, AutoModelForCausalLM

    _start()
    for known in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP):
        known.clear()  # those of the run before
    config = AutoConfig.for_model(run.model, **(_SIZES | MODELS[run.model]))
    torch.manual_seed(0)
    kind = torch.bfloat16 if run.dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(config).to(kind)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=run.settings)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(0, config.vocab_size, (2, 12), generator=generator)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag=TAG)
    if not rank:
        config.save_pretrained(folder)
    engine.destroy()


@cache
def _start() -> None:
    """Start DeepSpeed once in this process, with what it needs of transformers 5.24."""
    import deepspeed
    from transformers.utils import output_capturing

    from tests.oracles.deepspeed_peer.uncompiled import gloo_alone

    gloo_alone()
    deepspeed.init_distributed(dist_backend="gloo")
    registry: Any = output_capturing._CanRecordRegistry
    get = registry.get
    # DeepSpeed 0.19.8 asks this dict with a default, which transformers 5.24 does not take.
    registry.get = lambda self, model, *_: get(self, model)


def make_universal(source: Path, target: Path) -> Path:
    """Let DeepSpeed's own converter write a universal folder, and return the folder of its tensors."""
    import subprocess

    from deepspeed.checkpoint import ds_to_universal

    words = ["--input_folder", str(source / TAG), "--output_folder", str(target), "--num_extract_workers", "1",
             "--num_merge_workers", "1"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, ds_to_universal.__file__, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return target / "zero"
