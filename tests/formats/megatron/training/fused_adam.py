"""Apex without what is compiled: its Adam, which Megatron's distributed optimizer wants, in torch's own arithmetic.

With torch's Adam that optimizer cannot load at all: it asks for a step where no state is yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay; the step is one of its group, as in Apex."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **_: Any) -> None:
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step."""
        assert closure is None
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            steps = group.get("step", 0)
            for param in params:
                for state in ("exp_avg", "exp_avg_sq"):
                    if state not in self.state[param]:
                        self.state[param][state] = torch.zeros_like(param)
            adamw(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [torch.tensor(float(steps)) for _ in params],
                foreach=False,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            group["step"] = steps + 1


def install() -> None:
    """Let Megatron step with it, as where Apex is installed; norms stay torch's."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    vars(optimizer).update(Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False)
    vars(distrib_optimizer).update(Adam=FusedAdam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)
