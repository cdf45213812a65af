"""Restating: codes and scales of one tensor under a convention that hubs know, with the same bytes and the same values.

Codes and block scales are what they are under any name. The scale of a whole nvfp4 tensor is not: training keeps an
amax, compressed-tensors a float32 divisor, and few amaxes have one that is exact. A value is rounded to the type of the
model, though, and there the two nearly always meet; whether they do for every value that codes can stand for is
decided here, from the amax alone. Where they do not, nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.arithmetic.minifloat import MINIFLOATS
from transaxle.encodings.arithmetic.wide import narrowed
from transaxle.encodings.conventions.convention import (
    COMPRESSED_TENSORS,
    CONVENTIONS,
    DEEPSEEK,
    PREFERRED,
    TE,
    TE_HALVED,
    Convention,
)
from transaxle.encodings.encoding import FLOAT8, MXFP8, Encoded, Encoding
from transaxle.errors import Refusal, Where

TRAINED = frozenset({DEEPSEEK, TE, TE_HALVED})
"""Conventions whose names the entries of quantized weights have in training."""
ASIDE = ("columnwise_data", "columnwise_scale_inv", "amax_history", "scaled_for")
"""Ends of the names of what only training needs, after that of the codes and `_`."""
_OUT = 'to="dcp" keeps it as it is; transaxle convert --decode bf16 --to hf writes the values of that'
_AT_ONCE = 256
"""Matrices that are looked at together."""


def hub_convention(encodings: Iterable[Encoding]) -> Convention:
    """Return the convention in which weights of these encodings are written for a hub; one config speaks of one.

    It is the preferred one of each, but for mxfp8 beside nothing that needs compressed-tensors: DeepSeek's `fp8` method
    has blocks of 1 x 32 with exponents, and transformers 5.23 loads experts stored so, of which compressed-tensors'
    scales make it raise.
    """
    names = {PREFERRED[encoding.name] for encoding in encodings if encoding.name != MXFP8.name}
    return CONVENTIONS[COMPRESSED_TENSORS if names - {DEEPSEEK} else DEEPSEEK]


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
    numbers = amax.reshape(-1)
    made = np.array([to.global_from_amax(float(size), encoding) for size in numbers], np.float32)
    same = np.ones(len(numbers), np.bool_)
    for start in range(0, len(numbers), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        ours, theirs = (
            _values([convention.factor(number, encoding) for number in held[part].tolist()], encoding, dtype)
            for convention, held in ((CONVENTIONS[TE], numbers), (to, made))
        )
        same[part] = (ours.view(np.uint8) == theirs.view(np.uint8)).all(axis=(1, 2))
    same |= numbers == 0  # all codes are 0 then
    return made.reshape(amax.shape), same.reshape(amax.shape)


def _values(factors: list[float], encoding: Encoding, dtype: str) -> NDArray[Any]:
    """Return every value that a code of no sign and a block scale can stand for, as decoding has it, by factor."""
    blocks, codes = (MINIFLOATS[code] for code in (encoding.scale, encoding.code))
    sizes = blocks.values[: blocks.largest + 1]
    sizes = sizes[sizes <= encoding.scale_max].astype(np.float64)
    with np.errstate(all="ignore"):
        scales = (np.array(factors)[:, None] * sizes).astype(np.float32)
        return narrowed(scales[..., None] * codes.values[: codes.largest + 1], dtype)


def unsaid(one: Encoded) -> Refusal | None:
    """Return why no config of a hub can speak of a tensor; None where one can."""
    encoding = one.encoding
    if encoding.code_bits < 8 or encoding.code == FLOAT8.code:
        return None
    message = f"codes of {encoding.code}: no config of a hub can say so, and readers take them for {FLOAT8.code}"
    return Refusal("UNSUPPORTED", message, Where(None, one.name), _OUT)


def inexact(one: Encoded, amax: float, to: Convention, dtype: str) -> Refusal:
    """Return the refusal of a tensor whose amax cannot be restated; arguments as of `restated`."""
    factor = f"amax / {one.encoding.scale_max * one.encoding.code_max:g}"
    message = f"its amax is {amax!r}: values of {dtype} would change, as no float32 says {factor} in {to.name}"
    hint = _OUT if dtype != "F32" else f"model.bfloat16() keeps the codes, and has fewer values; {_OUT}"
    return Refusal("UNSUPPORTED", message, Where(None, one.name), hint)
