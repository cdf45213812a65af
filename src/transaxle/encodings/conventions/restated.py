"""Restating: codes and scales of one tensor under a convention that hubs know, with the same bytes and values.

Codes and block scales are the same under any name. The scale of a whole nvfp4 tensor is not: training keeps an amax,
compressed-tensors a float32 divisor, and few amaxes have an exact divisor. But a value is rounded to the dtype of the
model, and there the two nearly always agree. Whether they agree for every value that codes can stand for is decided
here, from the amax alone. Where they do not, nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from transaxle.encodings.conventions.convention import (
    COMPRESSED_TENSORS,
    CONVENTIONS,
    DEEPSEEK,
    PREFERRED,
    TE,
    TE_HALVED,
    Convention,
)
from transaxle.encodings.encoding import FLOAT8, MXFP8, Encoded, Encoding, Role
from transaxle.errors import Refusal, Where

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TRAINED = frozenset({DEEPSEEK, TE, TE_HALVED})
"""Conventions under which training saves the entries of quantized weights."""
_OUT = 'Keep it as it is with to="dcp", or write the decoded values:  transaxle convert --decode bf16 --to hf.'
_AT_ONCE = 256
"""Matrices that are compared at a time."""


def hub_convention(encodings: Iterable[Encoding]) -> Convention:
    """Return the convention in which weights of these encodings are written for a hub; one config speaks of one.

    It is the preferred one of each, but for mxfp8 beside nothing that needs compressed-tensors: DeepSeek's `fp8` method
    has blocks of 1 x 32 with exponents, and transformers 5.23 loads experts stored so, of which compressed-tensors'
    scales make it raise.
    """
    names = {PREFERRED[encoding.name] for encoding in encodings if encoding.name != MXFP8.name}
    return CONVENTIONS[COMPRESSED_TENSORS if names - {DEEPSEEK} else DEEPSEEK]


class HubBuffer(msgspec.Struct, frozen=True):
    """What a hub has in the place of one buffer of a trained weight."""

    stored: str
    """Name of the buffer in training."""
    name: str
    """Name in the hub's convention."""
    role: Role
    """What the buffer holds."""
    dtype: str | None
    """Safetensors code in the hub's convention; None for codes, whose type stays."""


def hub_buffers(tensor: Encoded, to: Convention) -> list[HubBuffer]:
    """Return what the buffers of a trained weight become in a convention of hubs."""
    return [
        HubBuffer(
            stored,
            to.stored(tensor.name, role, tensor.encoding),
            role,
            None if role is Role.CODES else to.presented(tensor.encoding, tensor.shape, role)[0],
        )
        for role, stored in tensor.parts.items()
    ]


def restated(
    amax: NDArray[np.float32], encoding: Encoding, to: Convention, dtype: str
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the scales of whole matrices under a convention, and which of them change no value.

    Args:
        amax: of each matrix, in any shape.
        encoding: of the matrices: one with a scale for the whole.
        to: the convention.
        dtype: safetensors code of the type in which values are compared.

    Post-condition: where the second says so, every product of a code, a block scale and the first decodes to the value
    that it has with the amax.
    """
    import numpy as np

    numbers = amax.reshape(-1)
    global_scales = np.array([to.global_from_amax(float(size), encoding) for size in numbers], np.float32)
    unchanged = np.ones(len(numbers), np.bool_)
    for start in range(0, len(numbers), _AT_ONCE):
        batch = slice(start, start + _AT_ONCE)
        values_under_amax, values_under_target = (
            _values([convention.factor(number, encoding) for number in global_numbers[batch].tolist()], encoding, dtype)
            for convention, global_numbers in ((CONVENTIONS[TE], numbers), (to, global_scales))
        )
        unchanged[batch] = (values_under_amax.view(np.uint8) == values_under_target.view(np.uint8)).all(axis=(1, 2))
    unchanged |= numbers == 0  # such a matrix has only codes of 0
    return global_scales.reshape(amax.shape), unchanged.reshape(amax.shape)


def hub_global_scales(
    tensor: Encoded, amax: NDArray[np.float32], to: Convention, dtype: str
) -> tuple[NDArray[np.float32], Refusal | None]:
    """Return the scales of a weight's matrices under a hub's convention, and why they must not be written, if so.

    Args:
        tensor: the weight, or a stack of them.
        amax: of each matrix, in any shape.
        to: the convention.
        dtype: safetensors code of the type in which values are compared.
    """
    scales, unchanged = restated(amax, tensor.encoding, to, dtype)
    return scales, None if unchanged.all() else _inexact(tensor, float(amax[~unchanged][0]), to, dtype)


def _values(factors: list[float], encoding: Encoding, dtype: str) -> NDArray[Any]:
    """Return every value that an unsigned code and a block scale can stand for, decoded with each factor."""
    import numpy as np

    from transaxle.encodings.arithmetic.minifloat import MINIFLOATS
    from transaxle.encodings.arithmetic.wide import narrowed

    blocks, codes = (MINIFLOATS[code] for code in (encoding.scale, encoding.code))
    sizes = blocks.values[: blocks.largest + 1]
    sizes = sizes[sizes <= encoding.scale_max].astype(np.float64)
    with np.errstate(all="ignore"):
        scales = (np.array(factors)[:, None] * sizes).astype(np.float32)
        return narrowed(scales[..., None] * codes.values[: codes.largest + 1], dtype)


def unsaid(tensor: Encoded) -> Refusal | None:
    """Return why no hub config can describe a tensor; None if one can."""
    encoding = tensor.encoding
    if encoding.code_bits < 8 or encoding.code == FLOAT8.code:
        return None
    message = f"codes of {encoding.code}: no hub config can express this, and readers would take them for {FLOAT8.code}"
    return Refusal("UNSUPPORTED", message, Where(None, tensor.name), _OUT)


def _inexact(tensor: Encoded, amax: float, to: Convention, dtype: str) -> Refusal:
    """Return the refusal of a tensor whose amax no scale of the convention stands for."""
    factor = f"amax / {tensor.encoding.scale_max * tensor.encoding.code_max:g}"
    message = (
        f"its amax is {amax!r}: values of {dtype} would change, because no float32 scale gives {factor} in {to.name}"
    )
    hint = _OUT if dtype != "F32" else f"To keep the codes and lose precision, use model.bfloat16(). {_OUT}"
    return Refusal("UNSUPPORTED", message, Where(None, tensor.name), hint)
