"""Chooses how a grouped linear layer multiplies: one grouped product, of values or of float8 codes, or one per expert.

The whole decision is made here, and it can be printed with its reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from transaxle.errors import refuse
from transaxle.nn.gemm.scaled_gemm import BLOCKS, Kind, kind_of
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
CAPABLE = (9, 10)
"""Major compute capabilities of those devices; on others torch reads the offsets back."""
MOST = 1023
"""Experts that a CUDA device takes at once: torch prepares a product in one block of threads."""
SCALES = ("cuda",)
"""Devices that multiply float8 codes in groups."""
_BACK = "the gradient of the input multiplies values, since the weights have no columnwise codes"
_ASKED = "values are multiplied; force_path('scaled') would multiply codes and round the inputs"


@dataclass(frozen=True, slots=True)
class Path:
    """The way a layer multiplies, with the reasons against the other ways."""

    way: Way
    """`grouped`, `per_expert` or `scaled`."""
    against: tuple[str, ...] = ()
    """Reasons against one grouped product."""
    forced: bool = False
    """Whether the user said so."""
    values: tuple[str, ...] = ()
    """Why values are multiplied although weights are codes, in all products or in one of them."""

    def __str__(self) -> str:
        chosen_by = "forced" if self.forced else "chosen"
        nothing = "no obstacle" if self.way == SCALED else "no obstacle to a grouped product"
        return f"{self.way} ({chosen_by}): {'; '.join((*(self.against or (nothing,)), *self.values))}"


def path(
    dtype: torch.dtype,
    device: torch.device,
    features: tuple[int, int],
    *,
    capability: tuple[int, int] | None = None,
    forced: Way | None = None,
    quantizer: Quantizer | None = None,
    columnwise: bool = False,
    experts: int = 1,
) -> Path:
    """Choose how a layer multiplies.

    Args:
        dtype: dtype of the values that are multiplied.
        device: device of the input.
        features: output and input features.
        capability: compute capability of the device; None: torch is asked.
        forced: the way that the user wants; None: choose. MXFP8 codes are multiplied wherever possible, float8 codes
            with one scale only with `scaled`; both round inputs and gradients.
        quantizer: quantizer of the weights; None for plain weights.
        columnwise: whether the weights have columnwise codes.
        experts: number of weights.

    Raises:
        Refused: UNSUPPORTED if the forced way is not possible.
    """
    capability = capability_of(device.index) if capability is None and device.type == "cuda" else capability
    kind = kind_of(quantizer)
    against = tuple(_against(dtype, device, features, capability, experts))
    if quantizer is not None and quantizer.multiplies_codes and experts:
        against += (f"{quantizer} quantizes the rows of each expert by themselves",)
    of_codes: tuple[str, ...] = ()
    if experts and (quantizer is not None or forced == SCALED):
        of_codes = tuple(_against_codes(dtype, device, features, capability, kind, quantizer))
    if forced == SCALED:
        against += of_codes
    if forced in (GROUPED, SCALED) and against:
        hint = "Call force_path(None) to let the layer choose."
        raise refuse("UNSUPPORTED", f"a {forced} product is not possible: {'; '.join(against)}", hint=hint)
    codes = kind is not None and kind.chosen and not against and not of_codes
    way = forced or (SCALED if codes else PER_EXPERT if against else GROUPED)
    if way == SCALED:
        of_codes = (_BACK,) if kind is BLOCKS and not columnwise else ()
    elif quantizer is not None and quantizer.multiplies_codes:
        of_codes = ()
    elif kind is not None and not of_codes:
        of_codes = (_ASKED,)
    return Path(way, against, forced is not None, of_codes)


def _against(
    dtype: torch.dtype,
    device: torch.device,
    features: tuple[int, int],
    capability: tuple[int, int] | None,
    experts: int,
) -> Iterator[str]:
    if not all(features):
        yield f"weights of {features[0]} x {features[1]} have no elements"
    if device.type not in ("cpu", "cuda"):
        yield f"no grouped product on {device.type}"
    known = ON_CUDA if device.type == "cuda" else ON_CPU
    if dtype not in known:
        yield f"{device.type} multiplies only {', '.join(map(str, known))} in groups, not {dtype}"
    if capability is not None and capability[0] not in CAPABLE:
        yield f"at compute capability {capability} torch copies the offsets to the host"
    if device.type == "cuda" and experts > MOST:
        yield f"{experts} experts are more than the {MOST} that torch multiplies at once"


def _against_codes(
    dtype: torch.dtype,
    device: torch.device,
    features: tuple[int, int],
    capability: tuple[int, int] | None,
    kind: Kind | None,
    quantizer: Quantizer | None,
) -> Iterator[str]:
    """Yield the reasons against a product of codes, without those against any grouped product."""
    if kind is None:
        kind_of_weights = "plain" if quantizer is None else str(quantizer)
        yield f"weights are {kind_of_weights}, and no device multiplies these in groups of codes"
    if device.type not in SCALES:
        yield f"no product of float8 codes on {device.type}"
    if dtype != torch.bfloat16:
        yield f"the result must be {torch.bfloat16}, not {dtype}"
    if kind is None:
        return
    if capability is not None and capability not in kind.capabilities:
        yield f"torch has no kernel for {kind.what} at compute capability {capability}"
    if device.type in SCALES and kind.builds and not any(word in _build() for word in kind.builds):
        yield f"torch was built without {kind.builds[0]}, which has the kernels for {kind.what}"
    if any(size % kind.step for size in features):
        yield f"weights of {features[0]} x {features[1]} are not multiples of {kind.step}"


@cache
def _build() -> str:
    return torch.__config__.show()


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def capability_of(index: int | None) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    return _capability(index)
