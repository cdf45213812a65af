"""A training step of a stack of linear layers, in bfloat16 and with float8 weights, on a GPU; and by the NVFP4 recipe.

Promises, on an H100 or H200: a step of about a billion parameters in float8 takes no longer than in bfloat16. NVFP4's
products are a reference in float64: nothing is promised of them. Where there is no GPU nothing is promised, and a small
stack is run once to show that it runs.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial

import torch
from torch import nn

from transaxle.quant import Float8CurrentScaling, MasterWeights, NVFP4BlockScaling, quantize_

WIDTH, HIDDEN, LAYERS, TOKENS = 4096, 14336, 9, 16384
"""About 1.06 billion parameters."""
SMALL = 256, 512, 2, 64
"""Sizes on a CPU."""


def stack(width: int, hidden: int, layers: int, device: str) -> nn.Sequential:
    """Return a stack of feed-forward blocks."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    with torch.device(device):
        for _ in range(layers):
            blocks += [nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False)]
    return nn.Sequential(*blocks).bfloat16()


def seconds(model: nn.Module, x: torch.Tensor, optimizer: MasterWeights | None, rounds: int) -> float:
    """Return the median seconds of forward and backward, and of an optimizer step if there is an optimizer."""
    times = []
    for _ in range(rounds + 2):
        if x.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        model(x).sum().backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def main() -> int:
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    width, hidden, layers, tokens = (WIDTH, HIDDEN, LAYERS, TOKENS) if gpu else SMALL
    x = torch.randn(tokens, width, device=device).bfloat16().requires_grad_()
    times = {}
    recipes = {"bfloat16": None, "float8": Float8CurrentScaling(), "nvfp4": NVFP4BlockScaling()}
    for name, recipe in recipes.items():
        model = stack(width, hidden, layers, device)
        if recipe is not None:
            quantize_(model, recipe)
        optimizer = MasterWeights(model.parameters(), partial(torch.optim.SGD, lr=1e-4))
        rounds = (2 if name == "nvfp4" else 10) if gpu else 1
        times[name] = seconds(model, x, None, rounds), seconds(model, x, optimizer, rounds)
        print(f"{name:10} forward, backward {times[name][0] * 1e3:8.1f} ms   with SGD {times[name][1] * 1e3:8.1f} ms")
    faster = times["bfloat16"][1] / times["float8"][1]
    print(f"float8 is {faster:.2f} times as fast on {torch.cuda.get_device_name() if gpu else 'a CPU'}")
    return 0 if not gpu or faster >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
