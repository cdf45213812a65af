"""Chooses how a grouped linear layer multiplies: by one grouped product (of values or float8 codes), or one per expert.

This module makes the whole choice, and the choice can be printed with its reasons.

**Grouped products of float8 codes** use `torch.nn.functional.scaled_grouped_mm`. The codes of weights are multiplied as
they are stored:

- E4M3 codes with one scale per expert: the same codes are used in forward and backward. This module quantizes the rows
  of inputs and of gradients, each row by its own amax (current scaling; torch supports no other scaling).
- MXFP8 codes: 32 elements along the summed dim share one scale, so forward and backward need different codes. Rowwise
  codes are multiplied for the output, columnwise codes for the gradient of the input. This module quantizes inputs and
  gradients to MXFP8.

Sums are float32, the result is bfloat16. The kernels accept any number of rows. If scales must be padded to blocks, the
device pads them for each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch.nn import functional

from transaxle.encodings.encoding import FLOAT8, MXFP8
from transaxle.errors import refuse
from transaxle.quant import QuantizedTensor, Quantizer, kernels
from transaxle.quant.kernels.components import swizzle
from transaxle.quant.quantizers import COLUMN_DATA, COLUMN_SCALE, DATA, SCALE


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of float8 codes for which torch has grouped products."""

    description: str
    """Description of the codes and their scales."""
    step: int
    """Number of which the numbers of input and output features must be multiples."""
    capabilities: tuple[tuple[int, int], ...]
    """Compute capabilities of the devices for which torch has a kernel."""
    builds: tuple[str, ...] = ()
    """Words in `torch.__config__.show()`; if it contains any of them, torch has the kernel. Empty if every build of
    torch has the kernel.
    """
    chosen: bool = False
    """Whether codes are multiplied by default wherever possible; if False, they are multiplied only if the user forces
    it.
    """


ROWS = Kind("E4M3 codes with one scale for each expert", 16, ((9, 0),))
BLOCKS = Kind("MXFP8 codes (E4M3)", MXFP8.tile[1], ((10, 0),), ("USE_MSLK", "USE_FBGEMM_GENAI"), chosen=True)


def kind_of(quantizer: Quantizer | None) -> Kind | None:
    """Return the kind of codes that a quantizer produces; None if torch has no grouped product of such codes."""
    if quantizer is None:
        return None
    encoding = quantizer.encoding
    kinds = {(each.name, each.code, each.tile): kind for each, kind in ((FLOAT8, ROWS), (MXFP8, BLOCKS))}
    return kinds.get((encoding.name, encoding.code, encoding.tile))


def stack_codes(parameters: Sequence[torch.Tensor]) -> QuantizedTensor:
    """Return the experts' weights as one stack of codes, [experts, out, in]; an existing stack is not copied.

    Raises:
        Refused: with the code UNSUPPORTED if the experts are not all quantized in the same way.
    """
    first = parameters[0].detach()
    stack = first if first.dim() == 3 else torch.stack([parameter.detach() for parameter in parameters])
    if not isinstance(stack, QuantizedTensor):
        hint = "Call force_path(None) to multiply values."
        raise refuse(
            "UNSUPPORTED",
            "a scaled product is not possible: the experts are not all quantized in the same way",
            hint=hint,
        )
    return stack


def multiply(x: torch.Tensor, weight: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return rows [rows, in] times their experts' weights, as [rows, out]; rows after the last offset are not
    written.
    """
    buffers = weight.components
    return _multiply_codes(x, buffers[DATA], buffers[SCALE], kind_of(weight.quantizer), offsets)


def has_backward_codes(weight: QuantizedTensor) -> bool:
    """Return whether the weight has codes for the gradient of the input."""
    return kind_of(weight.quantizer) is ROWS or weight.frame.columnwise


def multiply_transposed(grad: torch.Tensor, weight: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return rows [rows, out] times the transposed weights, as [rows, in]; rows after the last offset are not
    written.
    """
    buffers, kind = weight.components, kind_of(weight.quantizer)
    if kind is ROWS:
        return _multiply_codes(grad, kernels.transposed(buffers[DATA]), buffers[SCALE], kind, offsets)
    codes = kernels.transposed(buffers[COLUMN_DATA])
    return _multiply_codes(grad, codes, buffers[COLUMN_SCALE].transpose(1, 2), kind, offsets)


def _multiply_codes(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: Kind | None, offsets: torch.Tensor
) -> torch.Tensor:
    """Return rows [rows, k] times the transposed codes [experts, n, k] of their experts."""
    codes = codes.contiguous()  # the kernels require contiguous codes along the summed dim
    recipe, order = functional.ScalingType.RowWise, None
    rows: torch.Tensor | None
    of_rows: torch.Tensor | None
    if kind is ROWS:
        rows, of_rows = kernels.quantize_rows(x, offsets, FLOAT8)
        of_codes = scales.view(-1, 1).expand(codes.shape[:2]).contiguous()
    else:
        quantized = kernels.quantize_groups(x, offsets, MXFP8, swizzled=True)
        rows, of_rows, of_codes = quantized.data, quantized.scale_inv, swizzle(scales)
        recipe, order = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    products: torch.Tensor = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        rows,
        codes.transpose(1, 2),
        of_rows,
        recipe,
        of_codes,
        recipe,
        order,
        order,
        offs=offsets,
        output_dtype=torch.bfloat16,
    )
    return products


Way = Literal["grouped", "per_expert", "scaled"]
GROUPED: Way = "grouped"
PER_EXPERT: Way = "per_expert"
SCALED: Way = "scaled"
WAYS: tuple[Way, ...] = (GROUPED, PER_EXPERT, SCALED)

ON_CPU = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes for which torch has grouped products on a CPU."""
ON_CUDA = (torch.bfloat16,)
"""Dtypes for which a grouped product on CUDA needs no copy of the offsets on the host."""
CAPABLE = (9, 10)
"""Major compute capabilities with the grouped products of `ON_CUDA`; on other devices torch copies the offsets to the
host.
"""
MOST = 1023
"""Maximum number of experts on a CUDA device, because torch sets up a grouped product in one thread block."""
SCALES = ("cuda",)
"""Device types with grouped products of float8 codes."""
_BACK = "the gradient of the input multiplies values, since the weights have no columnwise codes"
_ASKED = "values are multiplied; force_path('scaled') would multiply codes and round the inputs"


@dataclass(frozen=True, slots=True)
class Path:
    """The way in which a layer multiplies, with the reasons against other ways."""

    way: Way
    """The way of multiplying: `grouped`, `per_expert` or `scaled`."""
    against: tuple[str, ...] = ()
    """Reasons why one grouped product is not possible."""
    forced: bool = False
    """Whether the user forced this way."""
    values: tuple[str, ...] = ()
    """Reasons why dequantized values are multiplied in some or all products, although weights are stored as codes."""

    def __str__(self) -> str:
        chosen_by = "forced" if self.forced else "chosen"
        no_obstacle = "no obstacle" if self.way == SCALED else "no obstacle to a grouped product"
        return f"{self.way} ({chosen_by}): {'; '.join((*(self.against or (no_obstacle,)), *self.values))}"


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
    """Choose how a layer multiplies, and return the choice with its reasons.

    Args:
        dtype: dtype of the values to multiply.
        device: device of the input.
        features: number of output and of input features.
        capability: compute capability of the device; None means that torch is asked for it.
        forced: the way that the user forces; None means that this function chooses. MXFP8 codes are multiplied wherever
            possible. Float8 codes with one scale are multiplied only if `scaled` is forced. If codes are multiplied,
            inputs and gradients are rounded too.
        quantizer: quantizer of the weights; None if the weights are not quantized.
        columnwise: whether the weights have columnwise codes.
        experts: number of experts.

    Raises:
        Refused: with the code UNSUPPORTED if the forced way is not possible.
    """
    capability = capability_of(device.index) if capability is None and device.type == "cuda" else capability
    kind = kind_of(quantizer)
    against = tuple(_grouped_obstacles(dtype, device, features, capability, experts))
    if quantizer is not None and quantizer.multiplies_codes and experts:
        against += (f"{quantizer} quantizes the rows of each expert by themselves",)
    of_codes: tuple[str, ...] = ()
    if experts and (quantizer is not None or forced == SCALED):
        of_codes = tuple(_scaled_obstacles(dtype, device, features, capability, kind, quantizer))
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


def _grouped_obstacles(
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
    dtypes = ON_CUDA if device.type == "cuda" else ON_CPU
    if dtype not in dtypes:
        yield f"{device.type} multiplies only {', '.join(map(str, dtypes))} in groups, not {dtype}"
    if capability is not None and capability[0] not in CAPABLE:
        yield f"at compute capability {capability} torch copies the offsets to the host"
    if device.type == "cuda" and experts > MOST:
        yield f"{experts} experts are more than the {MOST} that torch multiplies at once"


def _scaled_obstacles(
    dtype: torch.dtype,
    device: torch.device,
    features: tuple[int, int],
    capability: tuple[int, int] | None,
    kind: Kind | None,
    quantizer: Quantizer | None,
) -> Iterator[str]:
    """Yield the reasons against a grouped product of codes, in addition to the reasons against any grouped product."""
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
        yield f"torch has no kernel for {kind.description} at compute capability {capability}"
    if device.type in SCALES and kind.builds and not any(word in _build() for word in kind.builds):
        yield f"torch was built without {kind.builds[0]}, which has the kernels for {kind.description}"
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
