"""Forward and backward of a grouped linear layer, against a loop of linear layers and torch's bare grouped product.

For each number of experts and each kind of splits: time, what is launched, and how long the host is busy, with the
forward pass alone and with both. The layer has its own defaults, or one parameter for all experts, and `m_splits` on
the device; so has the bare product, which therefore computes offsets too, and has no biases. The loop needs the numbers
on the host: there they are a list from the start. `--recipe` adds the layer with quantized weights, by products of
codes where the device has them.

Nothing is promised yet. On a CPU small sizes are the default, operators are counted in place of kernels, and the host's
time is the whole.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear
from transaxle.quant import MXFP8, Float8CurrentScaling

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BALANCED, SKEWED = "balanced", "skewed"
OURS, SINGLE, LOOP, BARE = "GroupedLinear", "GroupedLinear, one parameter", "loop of linears", "grouped_mm"
RECIPES = {"float8": Float8CurrentScaling(), "mxfp8": MXFP8(columnwise=True)}
LARGE = {"tokens": 16384, "in_features": 2048, "out_features": 1536}
"""Sizes on a GPU: the first product of Qwen3-30B-A3B's experts."""
SMALL = {"tokens": 1024, "in_features": 128, "out_features": 96}
"""Sizes on a CPU."""
WARM = 3
"""Number of warm-up rounds."""


class OperatorCount(TorchDispatchMode):
    """Counts dispatched operators, including those of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def split_tokens(tokens: int, experts: int, kind: str) -> list[int]:
    """Return the rows per expert: equal numbers, or half of all rows, then half of the remaining rows, and so on."""
    if kind == BALANCED:
        return [tokens // experts + (place < tokens % experts) for place in range(experts)]
    counts, remaining = [], tokens
    for _ in range(experts - 1):
        counts.append(remaining - remaining // 2)
        remaining //= 2
    return [*counts, remaining]


@dataclass(frozen=True, slots=True)
class BestTimes:
    """Least times of several rounds."""

    whole: float = math.inf
    """Milliseconds of forward and backward until the device has finished."""
    forward: float = math.inf
    """Microseconds until forward returns."""
    host: float = math.inf
    """Microseconds until forward and backward return."""


Forward = Callable[[], torch.Tensor]
"""A forward pass."""


def build_forwards(
    experts: int, counts: Sequence[int], options: argparse.Namespace, device: str
) -> tuple[dict[str, Forward], torch.Tensor, Callable[[], None]]:
    """Return (forward function by name, gradient of the output, function that clears all gradients)."""
    dtype, sizes = DTYPES[options.dtype], (options.in_features, options.out_features)
    torch.manual_seed(0)
    with torch.device(device):
        x = torch.randn(options.tokens, options.in_features, dtype=dtype).requires_grad_()
        grad = torch.randn(options.tokens, options.out_features, dtype=dtype)
        weight = torch.randn(experts, *sizes[::-1], dtype=dtype).requires_grad_()
        m_splits = torch.tensor(counts)
        linears = nn.ModuleList([nn.Linear(*sizes, bias=options.bias, dtype=dtype) for _ in range(experts)])
        single = {"single_grouped_weight": True, "single_grouped_bias": options.bias}
        layers = {
            OURS: GroupedLinear(experts, *sizes, bias=options.bias, params_dtype=dtype),
            SINGLE: GroupedLinear(experts, *sizes, bias=options.bias, params_dtype=dtype, **single),
        }
        for name in options.recipe:
            layer = GroupedLinear(
                experts, *sizes, bias=options.bias, params_dtype=dtype, recipe=RECIPES[name], **single
            )
            layers[f"{SINGLE}, {name}, {_use_codes(layer, x)}"] = layer

    def loop() -> torch.Tensor:
        parts = x.split(list(counts))
        return torch.cat([linear(part) for linear, part in zip(linears, parts, strict=True)])

    def bare() -> torch.Tensor:
        offsets = m_splits.cumsum(0).to(torch.int32)
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    trained = [
        x,
        weight,
        *linears.parameters(),
        *(parameter for layer in layers.values() for parameter in layer.parameters()),
    ]

    def clear() -> None:
        for parameter in trained:
            parameter.grad = None

    calls: dict[str, Forward] = {name: partial(layer, x, m_splits) for name, layer in layers.items()}
    return {**calls, LOOP: loop, BARE: bare}, grad, clear


def _use_codes(layer: GroupedLinear, x: torch.Tensor) -> str:
    """Make a layer multiply codes if the device can; return the name of the product that it uses."""
    try:
        return layer.force_path("scaled").path(x).way
    except TransaxleError:
        return layer.force_path(None).path(x).way


def measure(
    calls: Mapping[str, Forward], grad: torch.Tensor, clear: Callable[[], None], rounds: int, device: str
) -> dict[str, BestTimes]:
    """Return the least times of each function, with rounds in turns."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times = dict.fromkeys(calls, BestTimes())
    for number in range(WARM + rounds):
        for name, call in calls.items():
            clear()
            wait()
            start = time.perf_counter()
            output = call()
            forward = time.perf_counter() - start
            output.backward(grad)
            host = time.perf_counter() - start
            wait()
            whole = time.perf_counter() - start
            if number >= WARM:
                best = times[name]
                times[name] = BestTimes(
                    min(best.whole, whole * 1e3), min(best.forward, forward * 1e6), min(best.host, host * 1e6)
                )
    return times


def count_launches(call: Forward, grad: torch.Tensor, device: str) -> int:
    """Return the number of kernels that forward and backward launch; on a CPU, of operators."""
    if device == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call().backward(grad)
            torch.cuda.synchronize()
        names = [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)
    with OperatorCount() as counted:
        call().backward(grad)
    return counted.count


def table(options: argparse.Namespace, device: str) -> list[str]:
    """Measure everything; return the lines of a table."""
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU, one thread"
    unit = "kernels" if device == "cuda" else "operators"
    biases = "with biases" if options.bias else "no biases"
    sizes = (
        f"{options.tokens} tokens, {options.in_features} to {options.out_features} features, {options.dtype}, {biases}"
    )
    lines = [
        f"On {name}, torch {torch.__version__}: {sizes}; forward and backward, best of {options.rounds}.",
        "",
        f"| experts | splits | way | ms | forward, host µs | both, host µs | {unit} |",
        "|---|---|---|---|---|---|---|",
    ]
    for experts in options.experts:
        for kind in options.splits:
            calls, grad, clear = build_forwards(experts, split_tokens(options.tokens, experts, kind), options, device)
            for way, took in measure(calls, grad, clear, options.rounds, device).items():
                clear()
                count = count_launches(calls[way], grad, device)
                times = f"{took.whole:.2f} | {took.forward:.0f} | {took.host:.0f}"
                lines.append(f"| {experts} | {kind} | {way} | {times} | {count} |")
                print(lines[-1], file=sys.stderr)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = LARGE if device == "cuda" else SMALL
    if device == "cpu":
        torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--splits", nargs="+", choices=(BALANCED, SKEWED), default=[BALANCED, SKEWED])
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="bfloat16", help="a GPU multiplies bfloat16 in groups"
    )
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--recipe", nargs="*", choices=tuple(RECIPES), default=[], help="also with quantized weights")
    for name, size in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a file for the table; printed if not given")
    options = parser.parse_args(arguments)
    lines = "\n".join(table(options, device)) + "\n"
    if options.out is None:
        print(lines, end="")
    else:
        options.out.write_text(lines, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
