"""A small AutoTP checkpoint as DeepSpeed wrote them before it recorded how ranks are cut, built without DeepSpeed.

The layout is that of `DeepSpeedEngine._save_checkpoint`, `_save_zero_checkpoint` and ZeRO-1's `state_dict` in versions
before 0.18: one model file and one optimizer file per tensor-parallel rank, flat buffers without alignment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TAG = "global_step5"
STATES = ("exp_avg", "exp_avg_sq")
STEP = 5


def write_old(folder: Path, ranks: Sequence[Mapping[str, np.ndarray]]) -> Path:
    """Write one checkpoint.

    Args:
        folder: where to.
        ranks: name -> fp32 weight, as each tensor-parallel rank holds it. The moments are 2 and 3 times the weights.
    """
    import torch

    (folder / TAG).mkdir(parents=True)
    (folder / "latest").write_text(TAG, "utf-8")
    for rank, held in enumerate(ranks):
        weights = {name: torch.from_numpy(value) for name, value in held.items()}
        flat = torch.cat([value.reshape(-1) for value in weights.values()])
        model: dict[str, Any] = {
            "module": OrderedDict((name, value.bfloat16()) for name, value in weights.items()),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [OrderedDict((name, value.shape) for name, value in weights.items())],
            "lr_scheduler": None,
            "global_steps": STEP,
            "dp_world_size": 1,
            "mp_world_size": len(ranks),
        }
        moments = {state: flat * (number + 2) for number, state in enumerate(STATES)}
        group = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "params": [0]}
        state: dict[str, Any] = {
            "base_optimizer_state": {
                "state": {0: {"step": torch.tensor(float(STEP)), **moments}},
                "param_groups": [group],
            },
            "single_partition_of_fp32_groups": [flat],
            "zero_stage": 1,
            "group_paddings": [0],
            "partition_count": [1],
        }
        torch.save(model, folder / TAG / f"mp_rank_{rank:02d}_model_states.pt")
        name = f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_config": {}}, folder / TAG / name)
    return folder
