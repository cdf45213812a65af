"""A run of DeepSpeed with everything that a resumed one must find again: what it keeps for each group, and schedules.

Its embedding is also its head, some of it is not trained, its groups differ in learning rate and weight decay, a
schedule changes their rates, and a step is made of several backward passes. The gradients are parts of the weights, and
so the same on every rank: steps have the same bits on any number of ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import transaxle as tx
from tests.oracles.deepspeed_peer.uncompiled import gloo_alone

GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": 2e-3, "weight_decay": 0.1},
    {"lr": 5e-4, "weight_decay": 0.0, "betas": (0.8, 0.99)},
    {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-6},
)
"""Settings of matrices, of vectors, and of the embedding."""
ACCUMULATED = 2
"""Backward passes of a step."""
GRADIENT = 1e-2
FROZEN = "frozen.weight"
TRAINED = ("embed.weight", "inner.weight", "inner.bias", "norm.weight", "outer.weight")


class Layer(torch.nn.Module):
    """Weights, of which the squares are added up: ZeRO-3 gathers a module's own when it is called."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape))
        self.bias = torch.nn.Parameter(torch.randn(shape[0])) if bias else None

    def forward(self) -> torch.Tensor:
        return torch.stack([(each.float() * each.float()).sum() for each in self.parameters()]).sum()


class Model(torch.nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Layer(13, 7), Layer(13, 7)
        self.head.weight = self.embed.weight
        self.frozen, self.inner, self.norm = Layer(5, 7, bias=True), Layer(11, 5, bias=True), Layer(11)
        self.outer = Layer(7, 11)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self) -> torch.Tensor:
        trained = self.embed, self.inner, self.norm, self.outer
        return torch.stack([layer() for layer in trained]).sum() * (GRADIENT / 2)


def made() -> Model:
    """The model as it is before a run."""
    torch.manual_seed(3)
    model = Model()
    for weight in model.frozen.parameters():
        weight.requires_grad_(False)
    return model


def _rate(step: int) -> float:
    return 1.0 / (1 + step)


@dataclass(frozen=True)
class Job:
    stage: int
    """Of ZeRO."""
    low: bool
    """Weights are in bfloat16, with full-precision copies."""
    folder: str
    """For what is saved."""
    saves: tuple[int, ...]
    """After how many steps; the last one ends the run."""
    source: str = ""
    """A universal checkpoint to go on from; empty: begin."""


def train(rank: int, world: int, jobs: list[Job]) -> list[list[Any]]:
    """Run some jobs; return for each what `_train` does."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    import deepspeed

    gloo_alone()
    deepspeed.init_distributed(dist_backend="gloo", rank=rank, world_size=world)
    return [_train(job) for job in jobs]


def _train(job: Job) -> list[Any]:
    """Train; return the rates of all groups, and what the schedule and the engine count, after each step."""
    import deepspeed

    model = made()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    members = [
        [weight for name, weight in trained.items() if weight.dim() > 1 and "embed" not in name],
        [weight for weight in trained.values() if weight.dim() == 1],
        [weight for name, weight in trained.items() if "embed" in name],
    ]
    optimizer = torch.optim.AdamW([{"params": own, **told} for own, told in zip(members, GROUPS, strict=True)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATED,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": job.stage, "stage3_param_persistence_threshold": 10},
        **({"bf16": {"enabled": True}} if job.low else {}),
        **({"checkpoint": {"load_universal": True}} if job.source else {}),
    }
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    if job.source:
        path, _ = engine.load_checkpoint(job.source)
        assert path is not None
    if job.source and job.stage == 3:  # which has one step and one set of settings for all groups
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
        with tx.open(job.source) as checkpoint:
            saved = checkpoint.metadata["param_groups"]
        for group, settings in zip(engine.optimizer.param_groups, saved, strict=True):
            group |= {key: value for key, value in settings.items() if key != "params"}
    told = []
    while engine.global_steps < job.saves[-1]:
        for _ in range(ACCUMULATED):
            engine.backward(engine())
            engine.step()
        told.append([engine.get_lr(), engine.lr_scheduler.state_dict()["last_epoch"], engine.global_steps])
        if engine.global_steps in job.saves:
            engine.save_checkpoint(str(Path(job.folder, str(engine.global_steps))), tag="saved")
    engine.destroy()
    return told
