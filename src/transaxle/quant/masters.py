"""Master weights: high-precision values that an optimizer updates, while the model contains only quantized codes.

For torch and `transaxle.save`, `MasterWeights` is an ordinary optimizer of the model's parameters, whose state contains
an entry `master` in addition to the moments. So all code that looks up optimizer state by parameter finds the masters
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from transaxle.arguments import DType
from transaxle.errors import Refusal, Where, gathered
from transaxle.quant.entries import group_of
from transaxle.quant.quantizers import ORIGIN
from transaxle.quant.tensor import QuantizedTensor
from transaxle.torch_tensors import place_like, raw_local, read_dtype

MASTER = "master"
"""Name of the entry in the optimizer state that contains a quantized parameter's master weights."""
_PARAMS = "params"
_GROUPS = "param_groups"
_STATE = "state"
_RATE = "lr"
Parameters = Iterable[torch.Tensor] | Iterable[Mapping[str, Any]]
"""Parameters or parameter groups, as torch's optimizers accept them."""


class MasterWeights(Optimizer):
    """A torch optimizer that updates high-precision masters of quantized parameters, and unquantized parameters
    directly.

    Create this optimizer after `fully_shard`. Also load the model before creating this optimizer, unless model and
    optimizer are loaded together (`transaxle.load(model, src, optimizer=masters)`). At the end of each step, the
    masters are quantized into the parameters. Amaxes (largest absolute values) are reduced over the ranks that share a
    matrix, so the codes do not depend on how the matrix is cut.

    Args:
        parameters: parameters or parameter groups of the model, as torch's optimizers accept them.
        optimizer: function that creates the inner optimizer of the parameters or groups, in which masters replace
            quantized parameters; for example `functools.partial(torch.optim.AdamW, lr=1e-3)`.
        dtype: dtype of the masters.
    """

    def __init__(
        self, parameters: Parameters, optimizer: Callable[[Any], Optimizer], dtype: DType = torch.float32
    ) -> None:
        parameter_groups: list[Any] = list(parameters)
        self._dtype = read_dtype("dtype", dtype)
        if parameter_groups and isinstance(parameter_groups[0], Mapping):
            parameters_of_groups = [list(group[_PARAMS]) for group in parameter_groups]
            self._updated = [self._masters_of(group) for group in parameters_of_groups]
            groups = [
                {**group, _PARAMS: updated} for group, updated in zip(parameter_groups, self._updated, strict=True)
            ]
            self.optimizer = optimizer(groups)
        else:
            parameters_of_groups, self._updated = [parameter_groups], [self._masters_of(parameter_groups)]
            self.optimizer = optimizer(list(self._updated[0]))
        groups_with_parameters = zip(self.optimizer.param_groups, parameters_of_groups, strict=True)
        super().__init__(
            [{**group, _PARAMS: updated} for group, updated in groups_with_parameters], self.optimizer.defaults
        )

    def _masters_of(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that the inner optimizer updates: the masters of quantized parameters, and the unquantized
        parameters.
        """
        return [_master(each, self._dtype) if _local_rows(each) is not None else each for each in parameters]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch's optimizers do."""
        super().add_param_group(param_group)
        if len(self.param_groups) > len(self.optimizer.param_groups):
            added = self.param_groups[-1]
            self._updated.append(self._masters_of(added[_PARAMS]))
            self.optimizer.add_param_group({**added, _PARAMS: list(self._updated[-1])})

    def _updated_pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each parameter together with the tensor that the inner optimizer updates for it."""
        parameters = chain.from_iterable(group[_PARAMS] for group in self.param_groups)
        return zip(parameters, chain.from_iterable(self._updated), strict=True)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each quantized parameter together with its master."""
        return [(parameter, updated) for parameter, updated in self._updated_pairs() if updated is not parameter]

    @property
    def masters(self) -> list[torch.Tensor]:
        """The masters as plain tensors, with the shapes and placements of the quantized parameters, in the same
        order.
        """
        return [master for _, master in self._pairs()]

    @property
    def states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Parameter -> optimizer state of the parameter, including its master, which the attribute `state` does not
        contain.
        """
        masters = {parameter: {MASTER: master} for parameter, master in self._pairs()}
        return {
            parameter: {**self.state.get(parameter, {}), **masters.get(parameter, {})}
            for parameter, _ in self._updated_pairs()
            if parameter in self.state or parameter in masters
        }

    @contextmanager
    def _lend(self) -> Iterator[Optimizer]:
        """Give the inner optimizer the settings and the state for a `with` block, with the tensors that it updates as
        keys; take the settings and the state back at the end.
        """
        inner = self.optimizer
        for outer_group, inner_group, updated in zip(self.param_groups, inner.param_groups, self._updated, strict=True):
            inner_group.update({**outer_group, _PARAMS: list(updated)})
        state_of_updated = {
            updated: self.state[parameter] for parameter, updated in self._updated_pairs() if parameter in self.state
        }
        inner.state.clear()
        inner.state.update(state_of_updated)
        yield inner
        for outer_group, inner_group in zip(self.param_groups, inner.param_groups, strict=True):
            outer_group.update({**inner_group, _PARAMS: outer_group[_PARAMS]})
        self.state.clear()
        self.state.update(
            {parameter: inner.state[updated] for parameter, updated in self._updated_pairs() if updated in inner.state}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters by the parameters' gradients, and quantize the masters into the parameters.

        A parameter without a gradient, such as a frozen parameter, keeps its codes, because quantizing its values again
        could change them. A group with learning rate 0 keeps its codes too: torch runs such a step only to create
        missing state.

        Args:
            closure: function that recomputes the gradients and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = self._pairs()
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        with self._lend() as inner:
            inner.step()
        for _, master in pairs:
            master.grad = None
        for group, updated in zip(self.param_groups, self._updated, strict=True):
            if _moves(group):
                parameter_pairs = zip(group[_PARAMS], updated, strict=True)
                _requantize((each, master) for each, master in parameter_pairs if each.grad is not None)
        return loss

    @torch.no_grad()
    def requantize(self) -> None:
        """Quantize the masters into the parameters, which changes the parameters' codes and scales."""
        _requantize(self._pairs())

    @torch.no_grad()
    def restart(self, values: Mapping[torch.Tensor, torch.Tensor | None] | None = None) -> None:
        """Reset the masters after new codes were written into the parameters.

        Args:
            values: parameter -> the values, on this rank, from which the parameter's codes were computed, or None to
                restart from the dequantized codes. Masters of parameters without an entry are kept. If `values` is
                None, all masters restart from codes.
        """
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group[_PARAMS]):
                inner = _local_rows(parameter)
                if inner is None or not (values is None or parameter in values):
                    continue
                original = None if values is None else values[parameter]
                local = inner.dequantize(torch.float32) if original is None else original
                self._set_master(number, place, place_like(parameter, local.detach().to(self._dtype)))

    def state_dict(self) -> dict[str, Any]:
        """Return settings and state as torch's optimizers do; the state of a quantized parameter includes its
        `master`.
        """
        state_dict: dict[str, Any] = super().state_dict()
        states = self.states
        state_dict[_STATE] = {number: states.get(each, {}) for number, (each, _) in enumerate(self._updated_pairs())}
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`. The parameters' codes do not change, because codes are loaded with the model.

        Raises:
            Refused: with the code MISSING_TENSOR, UNEXPECTED_TENSOR or SHAPE_MISMATCH if the masters do not fit the
                parameters.
        """
        keys = [key for group in state_dict[_GROUPS] for key in group[_PARAMS]]
        states = {key: dict(state) for key, state in state_dict[_STATE].items()}
        masters = [states.get(key, {}).pop(MASTER, None) for key in keys]
        pairs = list(self._updated_pairs())
        problems = [
            fault
            for key, values, (parameter, master) in zip(keys, masters, pairs, strict=False)
            for fault in _faults(key, values, None if master is parameter else master)
        ]
        if problems:
            raise gathered(problems)
        nonempty_states = {key: state for key, state in states.items() if state}
        with self._lend() as inner:
            inner.load_state_dict({**state_dict, _STATE: nonempty_states})
        for values, (parameter, master) in zip(masters, pairs, strict=True):
            if values is not None and master is not parameter:
                master.copy_(values)

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: vars(self)[name] for name in ("_dtype", "_updated", "optimizer")}
        return {**super().__getstate__(), **attributes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pickled state of the optimizer, which includes masters."""
        super().__setstate__(state)
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group[_PARAMS]):
                values = self.state[parameter].pop(MASTER, None) if parameter in self.state else None
                if values is not None:
                    self._set_master(number, place, values)
        with self._lend() as inner:
            inner.__setstate__({_STATE: inner.state, _GROUPS: inner.param_groups})

    @torch.no_grad()
    def _set_master(self, group: int, index: int, values: torch.Tensor) -> None:
        """Set the values of a master in place; a master on the meta device is replaced instead."""
        old = self._updated[group][index]
        if old is values:
            return
        if old.is_meta:
            self._updated[group][index] = values.detach().requires_grad_(old.requires_grad)
        else:
            old.copy_(values)


def _local_rows(parameter: torch.Tensor) -> QuantizedTensor | None:
    """Return this rank's rows of a quantized parameter; None if the parameter is not quantized."""
    local = raw_local(parameter)
    return local if isinstance(local, QuantizedTensor) else None


def _master(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    inner = _local_rows(parameter)
    assert inner is not None
    origin = inner.frame.cut.pop(ORIGIN, None)
    rows = None if origin is None else origin[inner.skip : inner.skip + inner.height]
    values = (inner.dequantize(torch.float32) if rows is None else rows).detach().to(dtype, copy=True)
    return place_like(parameter, values).requires_grad_(parameter.requires_grad)


def _moves(group: Mapping[str, Any]) -> bool:
    """Return whether a step can change parameters of the group: the learning rate is not 0, or is on the GPU, from
    which reading it would be slow.
    """
    rate = group.get(_RATE, 1.0)
    return bool(rate != 0) if not isinstance(rate, torch.Tensor) or rate.device.type == "cpu" else True


def _requantize(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for parameter, master in pairs:
        inner = _local_rows(parameter)
        if inner is not None:
            values = raw_local(master)
            # The values are first rounded to the weights' dtype, as if they were stored in it. With this rounding, the
            # codes determine the weights completely.
            inner.quantize_(values.to(inner.dtype), group=group_of(parameter))


def _faults(key: Any, values: torch.Tensor | None, master: torch.Tensor | None) -> list[Refusal]:
    """Return an error for each reason why values do not fit a parameter's master."""
    where = Where(tensor=f"{key}.{MASTER}")
    if master is None:
        return (
            []
            if values is None
            else [Refusal("UNEXPECTED_TENSOR", "the parameter is not quantized, so it has no master", where)]
        )
    if values is None:
        hint = "In the state of an optimizer without masters, add the values of the parameter under this name."
        return [Refusal("MISSING_TENSOR", "the parameter is quantized, so the state must have its master", where, hint)]
    if tuple(values.shape) != tuple(master.shape):
        message = f"expected {list(master.shape)}, got {list(values.shape)}"
        return [Refusal("SHAPE_MISMATCH", message, where)]
    return []
