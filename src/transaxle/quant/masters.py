"""Master weights: the values that an optimizer updates while the model holds codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from transaxle.errors import refuse
from transaxle.quant.frame import ORIGIN
from transaxle.quant.tensor import QuantizedTensor

_OPTIMIZER = "optimizer"
_MASTERS = "masters"


@dataclass(frozen=True, slots=True)
class _Pair:
    """A quantized parameter and its master."""

    parameter: torch.Tensor
    """The model's: a QuantizedTensor, or a DTensor of one."""
    master: torch.Tensor
    """The optimizer's: of the same shape and placements, plain."""

    @property
    def local(self) -> QuantizedTensor:
        """The rows that this rank has."""
        found = self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter
        assert isinstance(found, QuantizedTensor)
        return found


class MasterWeights:
    """Any torch optimizer, on masters of the quantized parameters; other parameters it updates as they are.

    Make it after `fully_shard`. After each step the masters are quantized into the parameters, with amaxes reduced over
    the ranks that share a matrix, so that codes do not depend on how it is cut.

    Args:
        parameters: of the model.
        optimizer: makes the optimizer, given parameters: `functools.partial(torch.optim.AdamW, lr=1e-3)`.
        dtype: of the masters.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._pairs: list[_Pair] = []
        updated = []
        for parameter in parameters:
            inner = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if isinstance(inner, QuantizedTensor):
                self._pairs.append(_Pair(parameter, _master(parameter, inner, dtype)))
                updated.append(self._pairs[-1].master)
            else:
                updated.append(parameter)
        self.optimizer = optimizer(updated)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer, which schedulers change."""
        return self.optimizer.param_groups

    @property
    def masters(self) -> list[torch.Tensor]:
        """The masters, in the order of the quantized parameters."""
        return [pair.master for pair in self._pairs]

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters with the parameters' gradients, and quantize them into the parameters."""
        for pair in self._pairs:
            grad = pair.parameter.grad
            pair.master.grad = None if grad is None else grad.to(pair.master.dtype)
        self.optimizer.step()
        for pair in self._pairs:
            pair.master.grad = None
        self.requantize()

    @torch.no_grad()
    def requantize(self) -> None:
        """Quantize the masters into the parameters."""
        for pair in self._pairs:
            values = pair.master.to_local() if isinstance(pair.master, DTensor) else pair.master
            # From the dtype of the weights, as if they had been stored so: the codes then say all there is to know.
            pair.local.quantize_(values.to(pair.local.dtype), group=group_of(pair.parameter))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters and masters."""
        self.optimizer.zero_grad(set_to_none)
        for pair in self._pairs:
            pair.parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the masters, which are tensors or DTensors and reshard as such."""
        return {_OPTIMIZER: self.optimizer.state_dict(), _MASTERS: self.masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over state of `state_dict`. The parameters' codes stay as they are: they have a checkpoint of their own.

        Raises:
            Refused: `SHAPE_MISMATCH` for masters of other parameters.
        """
        shapes = [tuple(master.shape) for master in self.masters]
        given = [tuple(master.shape) for master in state[_MASTERS]]
        if shapes != given:
            raise refuse("SHAPE_MISMATCH", f"masters of shapes {given}, expected {shapes}")
        for master, values in zip(self.masters, state[_MASTERS], strict=True):
            master.copy_(values)
        self.optimizer.load_state_dict(state[_OPTIMIZER])


def _master(parameter: torch.Tensor, inner: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    origin = inner.frame.cut.pop(ORIGIN, None)
    kept = None if origin is None else origin[inner.skip : inner.skip + inner.height]
    values = (inner.dequantize(torch.float32) if kept is None else kept).detach().to(dtype, copy=True)
    if isinstance(parameter, DTensor):
        values = DTensor.from_local(
            values,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return values.requires_grad_(parameter.requires_grad)


def group_of(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the rows of a parameter's copy that this rank has a part of."""
    if not isinstance(parameter, DTensor):
        return None
    cut = [dim for dim, placement in enumerate(parameter.placements) if isinstance(placement, Shard)]
    if not cut:
        return None
    if len(cut) > 1 or parameter.placements[cut[0]] != Shard(0):
        raise refuse(
            "UNSUPPORTED",
            f"a quantized parameter with placements {parameter.placements}",
            hint="cut it along dim 0, over one mesh dim",
        )
    return parameter.device_mesh.get_group(cut[0])
