"""Forward and backward of a grouped linear layer, against a loop of linear layers and torch's bare grouped product.

For each number of experts and each kind of splits: time, what is launched, and how long the host is busy. The layer has
its own defaults and `m_splits` on the device; so has the bare product, which therefore computes offsets too. The loop
needs them on the host: there they are a list from the start.

Nothing is promised yet. On a CPU small sizes are the default, operators are counted in place of kernels, and the host's
time is the whole.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from transaxle.nn import GroupedLinear

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BALANCED, SKEWED = "balanced", "skewed"
OURS, LOOP, BARE = "GroupedLinear", "loop of linears", "grouped_mm"
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


def ways(
    experts: int, counts: Sequence[int], sizes: argparse.Namespace, device: str
) -> dict[str, Callable[[], object]]:
    """One call of each way: forward, backward, and gradients of all weights."""
    dtype = DTYPES[sizes.dtype]
    torch.manual_seed(0)
    with torch.device(device):
        x = torch.randn(sizes.tokens, sizes.in_features, dtype=dtype).requires_grad_()
        grad = torch.randn(sizes.tokens, sizes.out_features, dtype=dtype)
        layer = GroupedLinear(experts, sizes.in_features, sizes.out_features, bias=False, params_dtype=dtype)
        linears = [nn.Linear(sizes.in_features, sizes.out_features, bias=False, dtype=dtype) for _ in range(experts)]
        weight = torch.randn(experts, sizes.out_features, sizes.in_features, dtype=dtype).requires_grad_()
        m_splits = torch.tensor(counts)

    def clear(parameters: Sequence[torch.Tensor]) -> None:
        for one in (x, *parameters):
            one.grad = None

    held = list(layer.parameters())
    loose = [linear.weight for linear in linears]

    def ours() -> None:
        clear(held)
        layer(x, m_splits).backward(grad)

    def loop() -> None:
        clear(loose)
        parts = x.split(list(counts))
        torch.cat([linear(part) for linear, part in zip(linears, parts, strict=True)]).backward(grad)

    def bare() -> None:
        clear([weight])
        offsets = m_splits.cumsum(0).to(torch.int32)
        functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets).backward(grad)

    return {OURS: ours, LOOP: loop, BARE: bare}


def measured(calls: Mapping[str, Callable[[], object]], rounds: int, device: str) -> dict[str, tuple[float, float]]:
    """Return milliseconds of each call, and microseconds until it returns: the best of rounds taken in turn."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    found = dict.fromkeys(calls, (math.inf, math.inf))
    for number in range(WARM + rounds):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            host = time.perf_counter() - start
            wait()
            whole = time.perf_counter() - start
            if number >= WARM:
                found[name] = min(found[name][0], whole * 1e3), min(found[name][1], host * 1e6)
    return found


def launched(call: Callable[[], object], device: str) -> int:
    """Return how many kernels a call launches; on a CPU, how many operators it runs."""
    if device == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        names = [event.name for event in found.events() if event.device_type == DeviceType.CUDA]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)
    with Counted() as counted:
        call()
    return counted.count


def table(said: argparse.Namespace, device: str) -> list[str]:
    """Return the lines of a table of all that is measured."""
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU, one thread"
    what = "kernels" if device == "cuda" else "operators"
    sizes = f"{said.tokens} tokens, {said.in_features} to {said.out_features} features, {said.dtype}"
    lines = [
        f"On {name}, torch {torch.__version__}: {sizes}; forward and backward, best of {said.rounds}.",
        "",
        f"| experts | splits | way | ms | host µs | {what} |",
        "|---|---|---|---|---|---|",
    ]
    for experts in said.experts:
        for kind in said.splits:
            calls = ways(experts, divided(said.tokens, experts, kind), said, device)
            for way, (whole, host) in measured(calls, said.rounds, device).items():
                count = launched(calls[way], device)
                lines.append(f"| {experts} | {kind} | {way} | {whole:.2f} | {host:.0f} | {count} |")
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
