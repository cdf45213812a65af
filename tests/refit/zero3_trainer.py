"""A model of the hub under DeepSpeed ZeRO-3, of which each rank has ranges of elements."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from tests.oracles import hub
from tests.oracles.deepspeed_peer.uncompiled import gloo_alone

Tensors = dict[str, torch.Tensor]


def zero3_engine(config: dict[str, Any], dtype: str) -> Any:
    """Return DeepSpeed's engine around a model from the hub; the same weights on every rank and at every call."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    import deepspeed

    gloo_alone()
    torch.manual_seed(0)
    model = hub.model(config, torch.float32)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 40, "overlap_comm": False}
    said: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    if dtype == "bf16":
        said["bf16"] = {"enabled": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=said)[0]


def gathered(engine: Any) -> Tensors:
    """Return what DeepSpeed itself gathers."""
    from deepspeed.runtime.zero import GatheredParameters

    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    with GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}
