"""A small ZeRO-1 folder of any tensor-parallel cut, saved by torch: what a framework's run leaves, without the run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.universal_record import Record
from transaxle.parallel.universal_metadata import collected

STEPS = 3
TAG = f"global_step{STEPS}"
STATES = ("exp_avg", "exp_avg_sq")
Shards = Mapping[str, Sequence[Tensor]]
"""Parameter -> its shard on every rank, in fp32."""


def state_of(shard: Tensor, state: str) -> Tensor:
    """The values of a parameter's states: all different from each other."""
    return shard + {keys.FP32: 0.0, STATES[0]: 1000.0, STATES[1]: 2000.0}[state]


def save(folder: Path, shards: Shards, info: Mapping[str, Any] | None) -> Path:
    step = folder / TAG
    step.mkdir(parents=True)
    (folder / keys.LATEST).write_text(TAG, "utf-8")
    ranks = len(next(iter(shards.values())))
    for rank in range(ranks):
        mine = {name: parts[rank] for name, parts in shards.items()}
        torch.save(_model(mine, ranks, info), step / f"mp_rank_{rank:02d}{keys.MODEL_END}")
        torch.save({keys.STATE: _state(mine)}, step / f"zero_pp_rank_0_mp_rank_{rank:02d}{keys.OPTIM_END}")
    return folder


NAME, NORM = "layers.0.qkv.weight", "layers.0.norm.weight"
RECORD = Record.cut("column", (16, 4), 0, [[4, 4], [2, 2], [2, 2]], view=((8, 4, 4), -1))


def folder(path: Path, first: float = 1.0) -> Path:
    """A tensor-parallel checkpoint of a fused weight and a norm."""
    q, k, v = torch.arange(first, first + 64).reshape(16, 4).split([8, 4, 4])
    shards = {
        NAME: [torch.cat([part.chunk(2)[rank] for part in (q, k, v)]) for rank in range(2)],
        NORM: [torch.arange(first, first + 4)] * 2,
    }
    return save(path, shards, collected({NAME: RECORD, NORM: (4,)}, 2))


def _model(mine: Mapping[str, Tensor], ranks: int, info: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        keys.MODULE: OrderedDict((name, shard.bfloat16()) for name, shard in mine.items()),
        keys.BUFFER_NAMES: [],
        keys.OPTIMIZER: None,
        keys.PARAM_SHAPES: [OrderedDict((name, shard.shape) for name, shard in mine.items())],
        keys.FROZEN_SHAPES: None,
        keys.SHARED: {},
        keys.FROZEN_FRAGMENTS: None,
        keys.DP_WORLD: 1,
        keys.MP_WORLD: ranks,
        keys.GLOBAL_STEPS: STEPS,
        keys.DIMENSIONS: {keys.PP_DEGREE: 1, keys.TP_DEGREE: ranks},
        keys.VERSION: "0.19.8",
        **({} if info is None else {keys.INFO: dict(info)}),
    }


def _state(mine: Mapping[str, Tensor]) -> dict[str, Any]:
    flat = {
        state: torch.cat([state_of(shard, state).flatten() for shard in mine.values()])
        for state in (keys.FP32, *STATES)
    }
    return {
        keys.ZERO_STAGE: 1,
        keys.BASE_STATE: {
            keys.STATES: {0: {keys.STEP: torch.tensor(float(STEPS)), **{state: flat[state] for state in STATES}}},
            keys.GROUPS: [{"lr": 1e-3, "weight_decay": 0.1, keys.PARAMS: [0]}],
        },
        keys.MASTER: [flat[keys.FP32]],
        keys.GROUP_PADDINGS: [0],
        keys.PARTITION_COUNT: [1],
    }
