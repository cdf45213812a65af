"""Dropout of activations that are the same on all ranks: every rank must drop the same elements.

Each rank draws from its own generator, and attention dropout on uneven heads makes these diverge even after equal
seeds. Ranks that drop different elements of a residual stream would each compute another model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.dropout import _DropoutNd

from transaxle.errors import Refusal, Where
from transaxle.parallel.plans.tp_plan import Plan, Role

_RANKS = "_transaxle_ranks"
_NOISE = ("jitter_noise", "router_jitter_noise")


@dataclass(frozen=True, slots=True, eq=False)
class _Ranks:
    """The ranks that drop alike."""

    mesh: DeviceMesh
    """Of one dim."""

    def __deepcopy__(self, _: Any) -> _Ranks:
        """A copy of the model is on the same mesh."""
        return self


class CutDropout(nn.Dropout):
    """Dropout by the first rank's draw."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch names it
        """Return what is left of activations that all ranks have alike, scaled; the same on all of them."""
        if not self.training or not self.p:
            return input
        left = nn.functional.dropout(torch.ones_like(input), self.p)
        dist.broadcast(left, group=self.__dict__[_RANKS].mesh.get_group(), group_src=0)
        return input * left


def drop_alike(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Make dropout of activations that all ranks share drop the same elements on each."""
    for module in model.modules():
        for child in module.children():
            if type(child) is nn.Dropout and not _is_between(module, model, plan):
                child.__class__ = CutDropout
                child.__dict__[_RANKS] = _Ranks(mesh)


def random_refusals(model: nn.Module, plan: Plan) -> Iterator[Refusal]:
    """Yield a refusal for each source of noise that would differ between ranks computing the same values."""
    for path, module in model.named_modules():
        for name in _NOISE:
            if getattr(module, name, None):
                message = (
                    f"{name}={getattr(module, name)}: each rank would draw other noise for values that all ranks share"
                )
                yield Refusal("UNSUPPORTED", message, Where(None, path), f"Set {name} to 0.")
        for name, child in module.named_children():
            if not isinstance(child, _DropoutNd) or not child.p:
                continue
            if type(child) is not nn.Dropout or _is_between(module, model, plan):
                message = f"{child}: it is not known whether its input is the same on all ranks or a part on each"
                where = Where(None, f"{path}.{name}" if path else name)
                yield Refusal("UNSUPPORTED", message, where, "Set its p to 0.")


def _is_between(module: nn.Module, model: nn.Module, plan: Plan) -> bool:
    """Tell whether a module has layers that are cut, between which what it drops may be each rank's own."""
    names = {child: path for path, child in model.named_modules()}
    return any(plan.roles.get(names[child], Role.LOCAL) is not Role.LOCAL for child in module.children())
