"""Grouped layers for tests, what they are compared with, and tensors that cannot be read by the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_map, tree_map_only

from transaxle.nn import GroupedLinear
from transaxle.quant import QuantizedTensor

EXPERTS = 4
SPLITS = ([3, 0, 5, 2], [0, 0, 0, 0], [12, 0, 0, 0], [0, 0, 0, 12], [1, 2, 3, 4])
"""Rows of each expert of an input of `ROWS`."""
ROWS = 12
SINGLE: dict[str, Any] = {"single_grouped_weight": True, "single_grouped_bias": True}
FORMS: dict[str, dict[str, Any]] = {"experts": {}, "packed": SINGLE}
"""A layer with a parameter for each expert, and with one for all."""
forms = pytest.mark.parametrize("form", FORMS)


def layer(seed: int = 0, **said: Any) -> GroupedLinear:
    """A layer of `EXPERTS` experts whose parameters are all random numbers."""
    made = GroupedLinear(EXPERTS, said.pop("in_features", 16), said.pop("out_features", 24), **said)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return made


def rows(layer: GroupedLinear, seed: int = 1, count: int = ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random rows that a layer takes, and wants a gradient for."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, layer.in_features), generator=generator).to(dtype).requires_grad_()


def experts(layer: GroupedLinear, stem: str) -> list[torch.Tensor]:
    """One weight or bias for each expert, through which gradients flow."""
    if hasattr(layer, stem):
        return list(getattr(layer, stem).unbind(0))
    return [getattr(layer, f"{stem}{place}") for place in range(layer.num_gemms)]


def looped(layer: GroupedLinear, x: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
    """What the layer is to give: one `functional.linear` after the other, and zeros."""
    weights = experts(layer, "weight")
    biases: Sequence[Any] = experts(layer, "bias") if layer.use_bias else [None] * len(weights)
    parts, start = [], 0
    for count, weight, bias in zip(splits, weights, biases, strict=True):
        values = weight.dequantize(x.dtype) if isinstance(weight, QuantizedTensor) else weight
        parts.append(functional.linear(x[start : start + count], values, bias))
        start += count
    parts.append(x[start:].new_zeros((len(x) - start, layer.out_features)))
    return torch.cat(parts)


def run(
    layer: GroupedLinear, x: torch.Tensor, splits: Any, grad: torch.Tensor | None = None, **said: Any
) -> dict[str, torch.Tensor]:
    """Output and gradients of a layer."""
    layer.zero_grad()
    return _with_gradients(layer, x, layer(x, splits, **said), grad)


def expected(
    layer: GroupedLinear, x: torch.Tensor, splits: Sequence[int], grad: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """The same of the loop."""
    layer.zero_grad()
    return _with_gradients(layer, x, looped(layer, x, splits), grad)


def assert_close(results: dict[str, torch.Tensor], loops: dict[str, torch.Tensor], near: float = 0.0) -> None:
    """Output and gradients of a layer are those of the loop: to the bit, or as near as this, relative."""
    for name, result in results.items():
        torch.testing.assert_close(readable(result), loops[name], rtol=near, atol=10 * near)


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient that a tensor has."""
    assert tensor.grad is not None
    return tensor.grad


def of_output(shape: Sequence[int], dtype: torch.dtype, seed: int = 2) -> torch.Tensor:
    """A gradient of an output."""
    return torch.randn(list(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def _with_gradients(
    layer: GroupedLinear, x: torch.Tensor, made: torch.Tensor, grad: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    x.grad = None
    made.backward(of_output(made.shape, made.dtype) if grad is None else grad)
    gradients = {name: _gradient(parameter) for name, parameter in layer.named_parameters()}
    return {"output": made.detach(), "input": _gradient(x), **gradients}


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient; zeros where there is none."""
    if tensor.grad is None:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.grad.detach().clone()


def warm_up(step: Callable[[], object]) -> None:
    """Run a step as torch wants it before a CUDA graph is captured: three times, beside the current stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)


class Graphs(list[Any]):
    """A backend of torch's compiler that keeps the graphs it is given, and runs them as they are."""

    def __call__(self, graph: Any, _: Any) -> Any:
        """Return what runs."""
        self.append(graph)
        return graph.forward


class Unreadable(torch.Tensor):
    """Numbers that stay on their device: whatever is computed from them is unreadable too, and reading raises.

    Stands in for a CUDA tensor in tests that run on a CPU.
    """

    hidden: torch.Tensor
    """The numbers."""
    READS = frozenset({"item", "tolist", "cpu", "numpy", "__index__", "__int__", "__float__", "__bool__", "__array__"})
    """Methods that copy to the host."""

    @staticmethod
    def __new__(cls, hidden: torch.Tensor) -> Unreadable:
        return torch.Tensor._make_wrapper_subclass(
            cls, hidden.shape, strides=hidden.stride(), dtype=hidden.dtype, device=hidden.device
        )

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in cls.READS:
            raise AssertionError(f"the host reads it: {func.__name__}")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise AssertionError(f"the host reads it: {func}")
        plain = tree_map_only(cls, lambda one: one.hidden, (args, kwargs or {}))
        made = func(*plain[0], **plain[1])
        if func._schema.is_mutable:
            return args[0]
        return tree_map(lambda one: cls(one) if isinstance(one, torch.Tensor) else one, made)


def stacked(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict with the experts of each buffer in one tensor, whatever its form was."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, value in state.items():
        before, dot, last = name.rpartition(".")
        parts.setdefault(f"{before}{dot}{''.join(c for c in last if not c.isdigit())}", []).append(value)
    return {name: experts[0] if len(experts) == 1 else torch.stack(experts) for name, experts in parts.items()}


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor that may be unreadable."""
    return tensor.hidden if isinstance(tensor, Unreadable) else tensor
