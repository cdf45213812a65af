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
"""What a GPU runs: the first product of Qwen3-30B-A3B's experts."""
SMALL = {"tokens": 1024, "in_features": 128, "out_features": 96}
"""What a CPU runs."""
WARM = 3
"""Rounds that are not counted."""


class Counted(TorchDispatchMode):
    """Counts operators, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def divided(tokens: int, experts: int, kind: str) -> list[int]:
    """Rows of each expert: equally many, or one half to the first, half of the rest to the second, and so on."""
    if kind == BALANCED:
        return [tokens // experts + (place < tokens % experts) for place in range(experts)]
    found, left = [], tokens
    for _ in range(experts - 1):
        found.append(left - left // 2)
        left //= 2
    return [*found, left]


@dataclass(frozen=True, slots=True)
class Timed:
    """The best of rounds."""

    whole: float = math.inf
    """Milliseconds of forward and backward, until the device is done."""
    forward: float = math.inf
    """Microseconds until forward returns."""
    host: float = math.inf
    """Microseconds until forward and backward return."""


Way = Callable[[], torch.Tensor]
"""A forward pass."""


def ways(
    experts: int, counts: Sequence[int], said: argparse.Namespace, device: str
) -> tuple[dict[str, Way], torch.Tensor, Callable[[], None]]:
    """Return the forward pass of each way, a gradient of what it returns, and what clears all other gradients."""
    dtype, sizes = DTYPES[said.dtype], (said.in_features, said.out_features)
    torch.manual_seed(0)
    with torch.device(device):
        x = torch.randn(said.tokens, said.in_features, dtype=dtype).requires_grad_()
        grad = torch.randn(said.tokens, said.out_features, dtype=dtype)
        weight = torch.randn(experts, *sizes[::-1], dtype=dtype).requires_grad_()
        m_splits = torch.tensor(counts)
        linears = nn.ModuleList([nn.Linear(*sizes, bias=said.bias, dtype=dtype) for _ in range(experts)])
        both = {"single_grouped_weight": True, "single_grouped_bias": said.bias}
        layers = {
            OURS: GroupedLinear(experts, *sizes, bias=said.bias, params_dtype=dtype),
            SINGLE: GroupedLinear(experts, *sizes, bias=said.bias, params_dtype=dtype, **both),
        }
        for name in said.recipe:
            made = GroupedLinear(experts, *sizes, bias=said.bias, params_dtype=dtype, recipe=RECIPES[name], **both)
            layers[f"{SINGLE}, {name}, {_codes(made, x)}"] = made

    def loop() -> torch.Tensor:
        parts = x.split(list(counts))
        return torch.cat([linear(part) for linear, part in zip(linears, parts, strict=True)])

    def bare() -> torch.Tensor:
        offsets = m_splits.cumsum(0).to(torch.int32)
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    trained = [x, weight, *linears.parameters(), *(one for made in layers.values() for one in made.parameters())]

    def clear() -> None:
        for one in trained:
            one.grad = None

    calls: dict[str, Way] = {name: partial(made, x, m_splits) for name, made in layers.items()}
    return {**calls, LOOP: loop, BARE: bare}, grad, clear


def _codes(made: GroupedLinear, x: torch.Tensor) -> str:
    """Let a layer multiply codes, where the device does; return the way it goes."""
    try:
        return made.force_path("scaled").path(x).way
    except TransaxleError:
        return made.force_path(None).path(x).way


def measured(
    calls: Mapping[str, Way], grad: torch.Tensor, clear: Callable[[], None], rounds: int, device: str
) -> dict[str, Timed]:
    """Return what each way takes: the best of rounds taken in turn."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    found = dict.fromkeys(calls, Timed())
    for number in range(WARM + rounds):
        for name, call in calls.items():
            clear()
            wait()
            start = time.perf_counter()
            made = call()
            forward = time.perf_counter() - start
            made.backward(grad)
            host = time.perf_counter() - start
            wait()
            whole = time.perf_counter() - start
            if number >= WARM:
                best = found[name]
                found[name] = Timed(
                    min(best.whole, whole * 1e3), min(best.forward, forward * 1e6), min(best.host, host * 1e6)
                )
    return found


def launched(call: Way, grad: torch.Tensor, device: str) -> int:
    """Return how many kernels forward and backward launch; on a CPU, how many operators they run."""
    if device == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call().backward(grad)
            torch.cuda.synchronize()
        names = [event.name for event in found.events() if event.device_type == DeviceType.CUDA]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)
    with Counted() as counted:
        call().backward(grad)
    return counted.count


def table(said: argparse.Namespace, device: str) -> list[str]:
    """Return the lines of a table of all that is measured."""
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU, one thread"
    what = "kernels" if device == "cuda" else "operators"
    biases = "with biases" if said.bias else "no biases"
    sizes = f"{said.tokens} tokens, {said.in_features} to {said.out_features} features, {said.dtype}, {biases}"
    lines = [
        f"On {name}, torch {torch.__version__}: {sizes}; forward and backward, best of {said.rounds}.",
        "",
        f"| experts | splits | way | ms | forward, host µs | both, host µs | {what} |",
        "|---|---|---|---|---|---|---|",
    ]
    for experts in said.experts:
        for kind in said.splits:
            calls, grad, clear = ways(experts, divided(said.tokens, experts, kind), said, device)
            for way, took in measured(calls, grad, clear, said.rounds, device).items():
                clear()
                count = launched(calls[way], grad, device)
                times = f"{took.whole:.2f} | {took.forward:.0f} | {took.host:.0f}"
                lines.append(f"| {experts} | {kind} | {way} | {times} | {count} |")
                print(lines[-1], file=sys.stderr)
    return lines


def main(given: Sequence[str] | None = None) -> int:
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
    said = parser.parse_args(given)
    lines = "\n".join(table(said, device)) + "\n"
    if said.out is None:
        print(lines, end="")
    else:
        said.out.write_text(lines, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
