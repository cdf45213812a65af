"""Which way a grouped linear layer goes: one grouped product, or one product per expert; or, where the user says so,
one grouped product of float8 codes. This is the only place that decides, and it can be printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from transaxle.errors import refuse
from transaxle.nn.scaled import STEP, multiplies
from transaxle.quant import Quantizer

Way = Literal["grouped", "per_expert", "scaled"]
GROUPED: Way = "grouped"
PER_EXPERT: Way = "per_expert"
SCALED: Way = "scaled"
WAYS: tuple[Way, ...] = (GROUPED, PER_EXPERT, SCALED)

ON_CPU = (torch.bfloat16, torch.float16, torch.float32)
"""What a CPU multiplies in groups."""
ON_CUDA = (torch.bfloat16,)
"""What a CUDA device multiplies in groups without a copy of the offsets to the host."""
CAPABLE = (9, 0)
"""Compute capability from which that is so."""
SCALES = ("cuda",)
"""Devices that multiply float8 codes in groups."""
SCALING = (9, 10)
"""Major compute capabilities of those that do."""


@dataclass(frozen=True, slots=True)
class Path:
    """A way, and why not the other."""

    way: Way
    """`grouped`, `per_expert` or `scaled`."""
    against: tuple[str, ...] = ()
    """What stands against one grouped product."""
    forced: bool = False
    """Whether the user said so."""

    def __str__(self) -> str:
        said = "forced" if self.forced else "chosen"
        nothing = "nothing stands against it" if self.way == SCALED else "nothing stands against a grouped product"
        return f"{self.way} ({said}): {'; '.join(self.against) or nothing}"


def path(
    dtype: torch.dtype,
    device: torch.device,
    features: tuple[int, int],
    *,
    capability: tuple[int, int] | None = None,
    forced: Way | None = None,
    quantizer: Quantizer | None = None,
) -> Path:
    """Choose a way.

    Args:
        dtype: of the values that are multiplied.
        device: where they are.
        features: output and input features.
        capability: compute capability of the device; asked for if not given.
        forced: what the user wants; `scaled` is never chosen otherwise, as it rounds inputs and gradients.
        quantizer: of the weights; None: they are not quantized.

    Raises:
        Refused: UNSUPPORTED for a grouped product that is wanted, and cannot be.
    """
    capability = capability_of(device.index) if capability is None and device.type == "cuda" else capability
    against = tuple(_against(dtype, device, features, capability))
    if forced == SCALED:
        against += tuple(_against_scales(dtype, device, features, capability, quantizer))
    if forced in (GROUPED, SCALED) and against:
        hint = "force_path(None) lets it choose"
        raise refuse("UNSUPPORTED", f"no {forced} product: {'; '.join(against)}", hint=hint)
    way = forced or (PER_EXPERT if against else GROUPED)
    return Path(way, against, forced is not None)


def _against(
    dtype: torch.dtype, device: torch.device, features: tuple[int, int], capability: tuple[int, int] | None
) -> list[str]:
    found = []
    if not all(features):
        found.append(f"weights of {features[0]} x {features[1]} have no elements")
    if device.type not in ("cpu", "cuda"):
        found.append(f"no grouped product on {device.type}")
    known = ON_CUDA if device.type == "cuda" else ON_CPU
    if dtype not in known:
        found.append(f"{dtype} on {device.type}, which multiplies {', '.join(map(str, known))} in groups")
    if capability is not None and capability < CAPABLE:
        found.append(f"compute capability {capability}, below {CAPABLE}")
    return found


def _against_scales(
    dtype: torch.dtype,
    device: torch.device,
    features: tuple[int, int],
    capability: tuple[int, int] | None,
    quantizer: Quantizer | None,
) -> Iterator[str]:
    """Yield what stands against a product of codes, beside what stands against any grouped product."""
    if device.type not in SCALES:
        yield f"no product of float8 codes on {device.type}"
    if capability is not None and capability[0] not in SCALING:
        yield f"compute capability {capability}, where float8 codes are not multiplied in groups"
    if not multiplies(quantizer):
        kind = "plain" if quantizer is None else str(quantizer)
        yield f"weights are {kind}, not E4M3 codes with one scale for each expert"
    if dtype != torch.bfloat16:
        yield f"the result is {dtype}, and would be {torch.bfloat16}"
    if any(size % STEP for size in features):
        yield f"weights of {features[0]} x {features[1]}, no multiples of {STEP}"


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def capability_of(index: int | None) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    return _capability(index)
