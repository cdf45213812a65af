"""Modules around modules: what data parallelism, compilation and activation checkpoints put around a model."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from transaxle.axes.notation.name import CHECKPOINTED, COMPILED, FSDP1


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without DDP and `torch.compile` around it.

    FSDP1 stays: its parameters are flat, and only its own state dict shows those of the model.
    """
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get(COMPILED)
        if inner is None:
            return model
        model = inner


def innermost(model: nn.Module) -> nn.Module:
    """Return the module that the user wrote, without any wrapper: for its class and its attributes."""
    while True:
        model = unwrapped(model)
        inner = [module for name in (FSDP1, CHECKPOINTED) if (module := model._modules.get(name)) is not None]
        if not inner:
            return model
        model = inner[0]
