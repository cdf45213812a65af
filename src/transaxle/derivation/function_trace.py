"""Traces of functions: a converter in Python, given state dicts that are numbered in two ways.

What is the same in both runs comes from no element, and what comes from an element comes from it in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transaxle.arguments import wrong_type
from transaxle.derivation.traces import (
    EXACT,
    Numbers,
    Places,
    Underivable,
    combined,
    digits,
    dtype_of,
    laid_out,
    passes,
    shuffled,
)

Tensors = Mapping[str, Any]
Values = npt.NDArray[Any]


def trace_function(
    convert: Callable[[dict[str, Any]], Tensors], sample: Tensors
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Send a state dict through a function, numbered in two ways, in as many passes as its dtypes need.

    Args:
        convert: state dict -> state dict.
        sample: names and tensors; values do not matter.

    Returns:
        The numbers on both sides; of a tensor that the function makes of nothing, zeros.

    Raises:
        Underivable: values are changed, or a dtype holds no numbers.
        TypeError: the function returns no state dict.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in sample.items()}
    total = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
    base = min((_base(name, tensor) for name, tensor in sample.items()), default=1 << 24)
    numberings = shuffled(total)
    runs = []
    for numbers in numberings:
        tensors = laid_out(numbers, shapes)
        for position in range(passes(total + 1, base)):
            given = {name: _filled(tensor, digits(tensors[name], base, position)) for name, tensor in sample.items()}
            runs.append(_state_dict(convert(given)))
    if any(each.keys() != runs[0].keys() for each in runs):
        raise Underivable("the function gives other names for other values")
    places = [Places(numbers) for numbers in numberings]
    memory = {name: _came_from(name, [run[name] for run in runs], base, places) for name in runs[0]}
    return laid_out(np.arange(1, total + 1), shapes), memory


def _base(name: str, tensor: Any) -> int:
    dtype = dtype_of(tensor)
    if dtype not in EXACT:
        raise Underivable(f"{name} is {dtype}, which holds no numbers; give it as another type")
    return EXACT[dtype]


def _filled(tensor: Any, values: Numbers) -> Any:
    """Return a tensor of the same kind and type with these values."""
    if isinstance(tensor, np.ndarray):
        return values.astype(tensor.dtype)
    return tensor.new_tensor(values.tolist()).reshape(tuple(tensor.shape)).to(tensor.dtype)


def check_samples(samples: object) -> None:
    """Refuse samples that are no state dicts.

    Raises:
        TypeError: they are no sequence of mappings from names to arrays or tensors, or there is nothing in them.
    """
    if not isinstance(samples, Sequence) or isinstance(samples, str | bytes) or not samples:
        raise wrong_type("samples", "a list of state dicts, at least one", samples)
    for sample in samples:
        if not isinstance(sample, Mapping) or not sample:
            raise wrong_type("samples", "a list of state dicts, none of them empty", sample)
        for name, tensor in sample.items():
            if not _is_tensor(tensor):
                raise TypeError(f"samples must hold arrays or tensors; {name!r} is {_kind(tensor)}")


def _state_dict(returned: object) -> Tensors:
    """Return what a function returned, if it is a state dict."""
    if not isinstance(returned, Mapping) or not returned:
        kind = "an empty one" if isinstance(returned, Mapping) else _kind(returned)
        raise TypeError(f"the converter must return a mapping of names to tensors; it returned {kind}")
    for name, tensor in returned.items():
        if not _is_tensor(tensor):
            raise TypeError(f"the converter must return arrays or tensors; its {name!r} is {_kind(tensor)}")
    return returned


def _is_tensor(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _came_from(name: str, runs: Sequence[Any], base: int, places: Sequence[Places]) -> Numbers:
    """Return the element that each value of a tensor came from; 0 for zeros, and for all of a tensor made of nothing.

    Args:
        name: the tensor's name.
        runs: the tensor from each pass of the first numbering, and then of the second.
        base: how many numbers a pass carries.
        places: the elements of both numberings.
    """
    values = [_read(tensor) for tensor in runs]
    if any(each.shape != values[0].shape for each in values):
        raise Underivable(f"{name}: the function gives it another shape for other values")
    half = len(values) // 2
    first, second = values[:half], values[half:]
    constant = np.ones(values[0].shape, bool)
    for one, other in zip(first, second, strict=True):
        constant &= (one == other) | ((one != one) & (other != other))
    if bool(constant.all()):
        return np.zeros(values[0].shape, np.int64)
    moved = [where.of(_carried(each, base)) for where, each in zip(places, (first, second), strict=True)]
    if bool(((moved[0] != moved[1]) | (moved[0] == 0))[~constant].any()):
        raise Underivable(f"{name}: its values are changed, not only moved{_narrowed(runs[0], base)}")
    if any(bool(each[constant].any()) for each in first):
        raise Underivable(
            f"{name}: some of its values come from elements, others from nowhere{_narrowed(runs[0], base)}"
        )
    return np.where(constant, 0, moved[0])


def _read(tensor: Any) -> Values:
    values: Values = np.asarray(tensor if isinstance(tensor, np.ndarray) else _of_torch(tensor))
    return values


def _of_torch(tensor: Any) -> Values:
    values = tensor.detach().cpu()
    array: Values = values.double().numpy() if values.dtype.is_floating_point else values.numpy()
    return array


def _carried(values: Sequence[Values], base: int) -> Numbers:
    """Return the numbers that the passes carried; 0 for a value that no pass gave."""
    whole = np.ones(values[0].shape, bool)
    for each in values:
        whole &= (each >= 0) & (each < base) & (each == np.floor(each))
    return combined([np.where(whole, each, 0).astype(np.int64) for each in values], base)


def _narrowed(tensor: Any, base: int) -> str:
    """Return what became of values whose type holds fewer numbers than the samples'."""
    dtype = dtype_of(tensor)
    holds = EXACT.get(dtype, 0)
    if holds >= base:
        return ""
    return f"; it is {dtype}, which does not hold all numbers: leave the cast out, or give samples of {dtype}"
