"""Traces of functions: a converter in Python, given numbered state dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from transaxle.derivation.fitting.trace import Numbers, Underivable, combined, digits, passes

_EXACT = {
    "float64": 1 << 52, "float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8,
    "int64": 1 << 62, "int32": 1 << 30, "int16": 1 << 14, "int8": 1 << 7, "uint8": 1 << 8,
}  # fmt: skip
"""dtype -> how many numbers one pass through it can carry."""


def trace_function(
    convert: Callable[[dict[str, Any]], Mapping[str, Any]], sample: Mapping[str, Any]
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Send a numbered state dict through a function, in as many passes as its dtypes need.

    Args:
        convert: state dict -> state dict.
        sample: names and tensors; values do not matter.

    Returns:
        The numbers on both sides.

    Raises:
        Underivable: values are changed, or a dtype holds no numbers.
    """
    numbers: dict[str, Numbers] = {}
    start = 1
    for name, tensor in sample.items():
        shape = tuple(tensor.shape)
        count = int(np.prod(shape, dtype=np.int64))
        numbers[name] = np.arange(start, start + count, dtype=np.int64).reshape(shape)
        start += count
    base = min(_base(name, tensor) for name, tensor in sample.items())
    carried = []
    for position in range(passes(start, base)):
        given = {name: _filled(tensor, digits(numbers[name], base, position)) for name, tensor in sample.items()}
        carried.append({name: _read(name, tensor) for name, tensor in convert(given).items()})
    if any(each.keys() != carried[0].keys() for each in carried):
        raise Underivable("the function gives other names for other values")
    return numbers, {name: combined([each[name] for each in carried], base) for name in carried[0]}


def _base(name: str, tensor: Any) -> int:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _EXACT:
        raise Underivable(f"{name} is {dtype}, which holds no numbers; give it as another type")
    return _EXACT[dtype]


def _filled(tensor: Any, values: Numbers) -> Any:
    """Return a tensor of the same kind and type with these values."""
    if isinstance(tensor, np.ndarray):
        return values.astype(tensor.dtype)
    return tensor.new_tensor(values.tolist()).reshape(tuple(tensor.shape)).to(tensor.dtype)


def _read(name: str, tensor: Any) -> Numbers:
    values = tensor if isinstance(tensor, np.ndarray) else tensor.detach().cpu().double().numpy()
    numbers: Numbers = values.astype(np.int64)
    if not bool((numbers == values).all()) or (numbers.size and int(numbers.min()) < 0):
        raise Underivable(f"{name}: its values are changed, not only moved")
    return numbers
