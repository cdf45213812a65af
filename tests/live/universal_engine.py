"""DeepSpeed's engine with a model of transformers, as it is when it has loaded a universal checkpoint."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.oracles.quiet import quiet

MOMENTS = ("exp_avg", "exp_avg_sq")


def moments_resumed(folder: Path, config: dict[str, Any], stage: int, out: Path) -> None:
    """Write what the optimizer of such an engine holds, by name; in a process of its own."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{out}.meeting", rank=0, world_size=1)
    with quiet():
        import deepspeed
        from deepspeed.utils import safe_get_full_optimizer_state
        from transformers import Qwen3Config, Qwen3ForCausalLM

        model = Qwen3ForCausalLM(Qwen3Config(**config)).float()
        said = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "checkpoint": {"load_universal": True},
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=said)
        engine.load_checkpoint(str(folder))
        held = {
            f"optim/{name}/{moment}": safe_get_full_optimizer_state(parameter, moment).clone()
            for name, parameter in model.named_parameters()
            for moment in MOMENTS
        }
    torch.save(held, out)
