"""Conventions: how ecosystems name and shape the buffers of an encoded tensor.

The same codes and scales have many names: `X.weight_scale_inv` is DeepSeek's, `X.weight_scale` that of
compressed-tensors, `X_scales` that of gpt-oss. Mapping rules use a single name, that of the weight. A convention maps
the weight's name to the stored name of each buffer and back. A convention also defines the shape of each buffer on disk
and the meaning of the per-tensor scale.

The module `quantization` reads the convention from a config file; `buffer_group` determines whether a checkpoint
follows it. Names are split at dots, and a convention depends only on the last segment.

Pickled tensors of TransformerEngine may have scales with unusual tile sizes, which the names do not show. The readers
of pickles write these tile sizes into the container's metadata, under the key `TE_NOTE`.

Quantized weights that training saved are converted for a model hub: the buffers get the names and the per-tensor scale
that readers of hub models expect, and buffers that only the next training step needs are dropped.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.encoding import ENCODINGS, FLOAT8, MXFP8, WHOLE, EncodedTensor, Encoding, Role
from transaxle.errors import Refusal, Where, refuse

WEIGHT = "weight"
"""Last name segment of a linear layer's weight, from which the names of its buffers are formed."""

DEEPSEEK, COMPRESSED_TENSORS, GPT_OSS = "deepseek", "compressed_tensors", "gpt_oss"
DEEPSEEK_V4 = "deepseek_v4"
"""Name of the convention of DeepSeek-V4's files: exponents named `scale`, and experts in mxfp4."""
TORCHAO, MODELOPT, BITSANDBYTES = "torchao", "modelopt", "bitsandbytes"
TE, TE_HALVED = "te", "te_256"
"""Names of TransformerEngine's convention, and of its nvfp4 variant with block scales up to 256 (`nvfp4_e4m3_max`)."""

ASIDE = ("columnwise_data", "columnwise_scale_inv", "amax_history", "scaled_for", "rounding_state")
"""Name suffixes of buffers that only training needs; they follow the name of the codes after a `_`."""

_BYTES = "U8"
_E8M0 = "F8_E8M0"
_REAL = "F32"
_MATRIX = 2
"""Number of dims of a matrix."""
_PAIR = 2
"""Number of 4-bit codes in one byte."""
_WORD = "I32"
PACKED_BYTES = "U8"
"""Dtype of 8-bit integer codes that are packed in words."""
WORDS: Mapping[str, int] = MappingProxyType({"I4": 8, PACKED_BYTES: 4})
"""Dtype of integer codes -> number of codes that are packed in a stored word of 32 bits, the first in the lowest
bits.
"""
_FLT_MAX = (2 - 2.0**-23) * 2.0**127

Shape = tuple[int, ...]
Place = tuple[str, Role]
"""`(tensor name, role)`: which quantized tensor a buffer belongs to, and whether the buffer has codes or a scale."""
GlobalMeaning = Literal["factor", "divisor", "amax"]
"""How a value depends on the per-tensor scale; `Convention.meaning` documents the choices."""


class NameForm(msgspec.Struct, frozen=True):
    """How the last name segment of a buffer is formed from the last name segment of its tensor."""

    weight: str
    """Last name segment of the buffer, if the tensor's last segment is `weight`."""
    other: str
    """Template for tensors with a different last segment, which replaces `{}`, as in `{}_scale_inv`."""

    def __call__(self, segment: str) -> str:
        """Return the buffer's last name segment for a tensor with the last name segment `segment`."""
        return self.weight if segment == WEIGHT else self.other.replace("{}", segment)

    def back(self, segment: str) -> str | None:
        """Return the tensor's last name segment for a buffer with the last name segment `segment`; None if no tensor's
        buffer has it.
        """
        if segment == self.weight:
            return WEIGHT
        before, after = self.other.split("{}")
        if not (segment.startswith(before) and segment.endswith(after)):
            return None
        inner = segment[len(before) : len(segment) - len(after)]
        return inner if inner and self(inner) == segment else None


def training_only(weights: Iterable[str], names: Container[str]) -> list[str]:
    """Return the names of the buffers of quantized weights that only the next training step needs.

    Args:
        weights: names of the buffers with the weights' codes.
        names: names of all stored tensors.
    """
    return [buffer for name in weights for suffix in ASIDE if (buffer := f"{name}_{suffix}") in names]


def _suffix(end: str) -> NameForm:
    """Return the name form that appends `end` to the last segment of any tensor name."""
    return NameForm(WEIGHT + end, "{}" + end)


class Convention(msgspec.Struct, frozen=True, eq=False):
    """How one ecosystem (such as DeepSeek's) names and shapes the buffers of quantized tensors."""

    name: str
    """Name of the convention: its key in `CONVENTIONS`."""
    eight: Mapping[Role, NameForm] = msgspec.field(default_factory=dict)
    """Role -> name of the buffer with this role, for 8-bit codes; empty if the convention has no 8-bit encoding."""
    four: Mapping[Role, NameForm] = msgspec.field(default_factory=dict)
    """Role -> name of the buffer with this role, for 4-bit codes; empty if the convention has no 4-bit encoding."""
    words: Mapping[Role, NameForm] = msgspec.field(default_factory=dict)
    """Role -> name of the buffer with this role, for integer codes that are packed in words of 32 bits."""
    holds: frozenset[str] = frozenset()
    """Names of the encodings that can be read from files of this convention."""
    writes: frozenset[str] = frozenset()
    """Names of the encodings that can be written in this convention."""
    meaning: GlobalMeaning = "factor"
    """How a value depends on the per-tensor scale `global`. With `factor` the value is `code x scale x global`, with
    `divisor` `code x scale / global`, and with `amax` `code x scale x global / (scale_max x code_max)`.
    """
    scale_max: int = 448
    """Upper limit of the block scales of an nvfp4 tensor."""
    exponents_as_bytes: bool = False
    """Whether E8M0 scales are stored with the dtype U8."""
    one: Shape = ()
    """Shape with which a single number per matrix is stored: `[]` or `[1]`."""
    block: int = 0
    """Number of codes per block, if the stored tensor has an additional dim for blocks (`[…, K/32, 16]` after packing);
    otherwise 0.
    """
    whole_blocks: bool = True
    """Whether packed rows always consist of whole blocks; in training checkpoints the last block may be shorter."""
    pair: str = _BYTES
    """Dtype with which two 4-bit codes are stored, as a safetensors code."""
    flat_rows: bool = False
    """Whether the scales of rows are stored with the shape `[M]` instead of `[M, 1]`."""

    def forms(self, encoding: Encoding) -> Mapping[Role, NameForm]:
        """Return how the buffers of an encoding are named, by role.

        Raises:
            Refused: with the code UNSUPPORTED if this convention lacks the encoding.
        """
        if encoding.name not in self.holds:
            readable = ", ".join(sorted(self.holds))
            message = f"the convention `{self.name}` can only hold {readable}; found {encoding.name}"
            raise refuse("UNSUPPORTED", message, hint="Decode the tensors, or write them in their own convention.")
        if encoding.code in WORDS:
            return self.words
        return self.four if encoding.code_bits < 8 else self.eight

    def buffers(self, table_name: str, encoding: Encoding) -> dict[Role, str]:
        """Return role -> stored name, for all buffers that a tensor may have; a checkpoint may lack the input scale.

        Raises:
            Refused: with the code UNSUPPORTED if this convention lacks the encoding.
        """
        head, dot, segment = table_name.rpartition(".")
        forms = self.forms(encoding).items()
        return {
            role: f"{head}{dot}{form(segment)}"
            for role, form in forms
            if (role is not Role.GLOBAL or encoding.has_global) and (role is not Role.ZERO or encoding.zero_rows)
        }

    def stored(self, table_name: str, role: Role, encoding: Encoding) -> str:
        """Return the stored name of one buffer of a tensor. For the stored name of a buffer, `places` returns a list
        that contains `(table_name, role)`.

        Raises:
            Refused: with the code UNSUPPORTED if this convention has no such encoding, or no name for the buffer.
        """
        form = self.forms(encoding).get(role)
        if form is None:
            message = f"the convention `{self.name}` has no name for the {role} of {encoding.name}"
            raise refuse("UNSUPPORTED", message, tensor=table_name)
        head, dot, segment = table_name.rpartition(".")
        return f"{head}{dot}{form(segment)}"

    def places(self, stored: str) -> tuple[Place, ...]:
        """Return each `(tensor name, role)` for which a buffer may have this stored name; for most names, the role is
        codes.
        """
        head, dot, segment = stored.rpartition(".")
        places: dict[Place, None] = {}
        for forms in (self.eight, self.four, self.words):
            for role, form in forms.items():
                inner = form.back(segment)
                if inner is not None:
                    places[f"{head}{dot}{inner}", role] = None
        return tuple(places)

    def presented(self, encoding: Encoding, shape: Shape, role: Role, stored: str | None = None) -> tuple[str, Shape]:
        """Return the dtype (as a safetensors code) and the shape with which a buffer is written.

        Args:
            encoding: encoding of the tensor to which the buffer belongs.
            shape: shape of the tensor, in elements.
            role: role of the buffer (codes, scale, …).
            stored: dtype of the buffer in the source, which is kept if bytes are only copied; None means the
                convention's own dtype.

        Raises:
            Refused: with the code UNSUPPORTED if this convention lacks the encoding; with the code SHAPE_MISMATCH if a
                row of 4-bit codes does not fill whole bytes.
        """
        self.forms(encoding)
        if role is Role.CODES:
            return self._pack(encoding, shape)
        if role is Role.SHAPE:
            return stored or "I64", (len(shape),)
        if role is Role.ZERO:
            grid = self.one if encoding.tile == (WHOLE, WHOLE) and len(shape) == _MATRIX else encoding.zero_grid(shape)
            return _WORD if encoding.code in WORDS else encoding.code, grid
        if role is not Role.SCALE:
            return stored or _REAL, shape[:-2] or self.one
        grid = encoding.grid(shape)
        usual_code = _BYTES if encoding.scale == _E8M0 and self.exponents_as_bytes else encoding.scale
        if len(grid) == _MATRIX and encoding.tile[-1] == WHOLE:
            if encoding.tile == (WHOLE, WHOLE):
                grid = self.one
            elif self.flat_rows:
                grid = grid[:1]
        return stored or usual_code, grid

    def elements(self, encoding: Encoding, dtype: str, shape: Shape) -> Shape | None:
        """Return a tensor's shape in elements, from dtype and shape of the stored codes; None if these do not fit."""
        if encoding.code in WORDS:
            return (*shape[:-1], shape[-1] * WORDS[encoding.code]) if shape else None
        if encoding.code_bits == 8 or dtype == encoding.code:
            return shape
        if not self.block:
            return (*shape[:-1], shape[-1] * _PAIR) if shape else None
        if len(shape) < 2 or shape[-1] * _PAIR != self.block:
            return None
        return (*shape[:-2], shape[-2] * self.block)

    def _pack(self, encoding: Encoding, shape: Shape) -> tuple[str, Shape]:
        if encoding.code_bits == 8 and encoding.code not in WORDS:
            return encoding.code, shape
        unit = WORDS.get(encoding.code) or self.block or _PAIR
        if not shape or shape[-1] % unit:
            message = f"{encoding.name} needs rows of a multiple of {unit}; found {list(shape)}"
            raise refuse("SHAPE_MISMATCH", message, hint="Decode this tensor, or skip it.")
        if encoding.code in WORDS:
            return _WORD, (*shape[:-1], shape[-1] // unit)
        packed_dims = (shape[-1] // self.block, self.block // _PAIR) if self.block else (shape[-1] // _PAIR,)
        return self.pair, (*shape[:-1], *packed_dims)

    def factor(self, stored: float, encoding: Encoding) -> float:
        """Return the number by which `code x scale` is multiplied, in double precision, if `stored` is the per-tensor
        scale.
        """
        if not encoding.has_global:
            return 1.0
        if self.meaning == "factor":
            return float(stored)
        if self.meaning == "amax":
            return float(stored) / (encoding.scale_max * encoding.code_max)
        return 1.0 / float(stored) if stored else float("inf")

    def global_from_amax(self, amax: float, encoding: Encoding) -> np.float32:
        """Return the per-tensor scale to store for a tensor whose largest absolute value is `amax`.

        The scale is computed as in TransformerEngine (`core_nvfp4.cuh`): `min(scale_max x code_max / amax, FLT_MAX)`,
        or 1 if amax or the quotient is 0 or infinite. A convention with the meaning `factor` stores the reciprocal,
        `amax / (448 x 6)`. TransformerEngine stores `amax` itself. For an amax of NaN, the result is NaN, and the block
        scales become meaningless.
        """
        if self.meaning == "amax":
            return np.float32(amax)
        top = np.float32(encoding.scale_max * encoding.code_max)
        size = np.float32(amax)
        if np.isinf(size) or size <= 0:
            return np.float32(1)
        with np.errstate(over="ignore"):
            divisor = np.minimum(top / size, np.float32(_FLT_MAX))
        if self.meaning == "divisor" or divisor in (0, 1):
            return divisor or np.float32(1)
        return size / top


_INPUT = NameForm("input_scale", "{}_input_scale")

_SCALES_OF_FP8 = frozenset({"float8", "float8_block", "mxfp8"})

_ALL = (
    Convention(
        DEEPSEEK,
        eight={
            Role.CODES: _suffix(""),
            Role.SCALE: _suffix("_scale_inv"),
            Role.INPUT_SCALE: NameForm("activation_scale", "{}_activation_scale"),
        },
        holds=_SCALES_OF_FP8,
        writes=_SCALES_OF_FP8,
    ),
    Convention(
        DEEPSEEK_V4,
        eight={Role.CODES: _suffix(""), Role.SCALE: NameForm("scale", "{}_scale")},
        four={Role.CODES: _suffix(""), Role.SCALE: NameForm("scale", "{}_scale")},
        holds=frozenset({"float8_block", "mxfp4"}),
        writes=frozenset({"float8_block", "mxfp4"}),
        pair="I8",
    ),
    Convention(
        COMPRESSED_TENSORS,
        eight={
            Role.CODES: _suffix(""),
            Role.SCALE: _suffix("_scale"),
            Role.ZERO: _suffix("_zero_point"),
            Role.INPUT_SCALE: _INPUT,
        },
        four={
            Role.CODES: _suffix("_packed"),
            Role.SCALE: _suffix("_scale"),
            Role.GLOBAL: _suffix("_global_scale"),
            Role.INPUT_SCALE: NameForm("input_global_scale", "{}_input_global_scale"),
        },
        words={
            Role.CODES: _suffix("_packed"),
            Role.SCALE: _suffix("_scale"),
            Role.ZERO: _suffix("_zero_point"),
            Role.SHAPE: _suffix("_shape"),
        },
        holds=_SCALES_OF_FP8 | {"mxfp4", "nvfp4", "int4", "int8"},
        writes=_SCALES_OF_FP8 | {"mxfp4", "nvfp4", "int4", "int8"},
        meaning="divisor",
        exponents_as_bytes=True,
        one=(1,),
    ),
    Convention(
        GPT_OSS,
        four={Role.CODES: _suffix("_blocks"), Role.SCALE: _suffix("_scales")},
        holds=frozenset({"mxfp4"}),
        writes=frozenset({"mxfp4"}),
        exponents_as_bytes=True,
        block=32,
    ),
    Convention(
        TORCHAO,
        eight={Role.CODES: NameForm("_weight_qdata", "_{}_qdata"), Role.SCALE: NameForm("_weight_scale", "_{}_scale")},
        four={
            Role.CODES: NameForm("_weight_qdata", "_{}_qdata"),
            Role.SCALE: NameForm("_weight_scale", "_{}_scale"),
            Role.GLOBAL: NameForm("_weight_per_tensor_scale", "_{}_per_tensor_scale"),
            Role.INPUT_SCALE: NameForm("_weight_act_per_tensor_scale", "_{}_act_per_tensor_scale"),
        },
        holds=_SCALES_OF_FP8 | {"mxfp4", "nvfp4"},
    ),
    Convention(
        MODELOPT,
        eight={
            Role.CODES: _suffix(""),
            Role.SCALE: NameForm("weight_scale", "{}_weight_scale"),
            Role.INPUT_SCALE: _INPUT,
        },
        four={
            Role.CODES: _suffix(""),
            Role.SCALE: NameForm("weight_scale", "{}_weight_scale"),
            Role.GLOBAL: NameForm("weight_scale_2", "{}_weight_scale_2"),
            Role.INPUT_SCALE: _INPUT,
        },
        holds=_SCALES_OF_FP8 | {"nvfp4"},
        writes=_SCALES_OF_FP8 | {"nvfp4"},
        exponents_as_bytes=True,
        flat_rows=True,
    ),
    Convention(
        BITSANDBYTES,
        four={Role.CODES: _suffix(""), Role.SCALE: _suffix("_absmax")},
        holds=frozenset({"nf4", "fp4"}),
        whole_blocks=False,
    ),
    Convention(
        TE,
        eight={Role.CODES: _suffix(""), Role.SCALE: _suffix("_scale_inv")},
        four={Role.CODES: _suffix(""), Role.SCALE: _suffix("_scale_inv"), Role.GLOBAL: _suffix("_amax")},
        holds=_SCALES_OF_FP8 | {"nvfp4"},
        writes=frozenset({"nvfp4"}),
        meaning="amax",
        whole_blocks=False,
        one=(1,),
    ),
    Convention(
        TE_HALVED,
        four={Role.CODES: _suffix(""), Role.SCALE: _suffix("_scale_inv_256"), Role.GLOBAL: _suffix("_amax_256")},
        holds=frozenset({"nvfp4"}),
        writes=frozenset({"nvfp4"}),
        meaning="amax",
        whole_blocks=False,
        scale_max=256,
        one=(1,),
    ),
)

CONVENTIONS: Mapping[str, Convention] = MappingProxyType({convention.name: convention for convention in _ALL})
"""Name -> convention, for all known conventions."""

PREFERRED: Mapping[str, str] = MappingProxyType(
    {
        "float8": COMPRESSED_TENSORS,
        "float8_block": DEEPSEEK,
        "mxfp8": COMPRESSED_TENSORS,
        "mxfp4": GPT_OSS,
        "nvfp4": COMPRESSED_TENSORS,
        "int4": COMPRESSED_TENSORS,
        "int8": COMPRESSED_TENSORS,
        "nf4": BITSANDBYTES,
        "fp4": BITSANDBYTES,
    }
)
"""Name of an encoding -> name of the convention in which newly quantized tensors are written."""


TE_NOTE = "transformer_engine"
"""Metadata key under which readers of pickles describe TransformerEngine's tensors."""


class _TensorNote(msgspec.Struct):
    """The JSON text by which the metadata describes one tensor."""

    encoding: Literal["float8", "float8_block", "mxfp8", "nvfp4"]
    codes: str
    scale: str
    tile: tuple[int, int]
    scale_max: int


def te_descriptions(metadata: Mapping[str, object]) -> Mapping[str, tuple[str, Encoding]]:
    """Return tensor name -> convention and encoding, for each TransformerEngine tensor that the metadata describes.

    Raises:
        ValueError: if the metadata was not written by one of Transaxle's readers.
    """
    notes = msgspec.convert(metadata.get(TE_NOTE, {}), dict[str, _TensorNote])
    return {name: (_te_convention(note), _te_encoding(note)) for name, note in notes.items()}


def _te_convention(note: _TensorNote) -> str:
    return TE_HALVED if note.scale_max == CONVENTIONS[TE_HALVED].scale_max else TE


def _te_encoding(note: _TensorNote) -> Encoding:
    usual = ENCODINGS[note.encoding]
    return replace(usual, code=note.codes, scale=note.scale, tile=note.tile, scale_max=note.scale_max)


TRAINED = frozenset({DEEPSEEK, TE, TE_HALVED})
"""Names of the conventions in which training programs save quantized weights."""
_OUT = "Keep it as it is:  --to dcp. The result can then be decoded:  transaxle convert SRC DST --to hf --decode bf16."
_AT_ONCE = 256
"""Number of matrices that are compared at once, to limit the memory used."""


def hub_convention(encodings: Iterable[Encoding]) -> Convention:
    """Return the convention for these encodings on a model hub, where one config must describe all quantized weights.

    The result is the preferred convention of the encodings, with one exception. Tensors in mxfp8 become DeepSeek's
    `fp8` method with 1 x 32 blocks and E8M0 scales, if no other encoding needs compressed-tensors. transformers 5.24
    loads mxfp8 experts in DeepSeek's form, but not in the form of compressed-tensors.
    """
    names = {PREFERRED[encoding.name] for encoding in encodings if encoding.name != MXFP8.name}
    return CONVENTIONS[COMPRESSED_TENSORS if names - {DEEPSEEK} else DEEPSEEK]


class HubBuffer(msgspec.Struct, frozen=True):
    """How one buffer of a quantized weight, saved by training, is stored on a model hub."""

    stored: str
    """Name of the buffer in the training checkpoint."""
    name: str
    """Name of the buffer in the hub's convention."""
    role: Role
    """Role of the buffer: codes or a kind of scale."""
    dtype: str | None
    """Dtype of the buffer in the hub's convention, as a safetensors code; None for codes, which keep their dtype."""


def hub_buffers(tensor: EncodedTensor, to: Convention) -> list[HubBuffer]:
    """Return how the buffers of a quantized weight, saved by training, are named and stored in a hub's convention."""
    return [
        HubBuffer(
            stored,
            to.stored(tensor.name, role, tensor.encoding),
            role,
            None if role is Role.CODES else to.presented(tensor.encoding, tensor.shape, role)[0],
        )
        for role, stored in tensor.parts.items()
    ]


def rescale(
    amax: NDArray[np.float32], encoding: Encoding, to: Convention, dtype: str
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Convert largest absolute values (amaxes) to the per-tensor scales of a convention; also return which scales are
    exact.

    Args:
        amax: largest absolute value of each matrix, as an array of any shape.
        encoding: encoding of the matrices; it must have a per-tensor scale.
        to: the convention whose per-tensor scales are computed.
        dtype: safetensors code of the dtype in which values are compared.

    Returns:
        The scales, and an array that is True where a scale is exact (changes no value); both arrays have the shape of
        `amax`.

    Post-condition: with an exact scale, every combination of code and block scale decodes to the same value as with the
    amax itself.
    """
    numbers = amax.reshape(-1)
    global_scales = np.array([to.global_from_amax(float(size), encoding) for size in numbers], np.float32)
    unchanged = np.ones(len(numbers), np.bool_)
    for start in range(0, len(numbers), _AT_ONCE):
        batch = slice(start, start + _AT_ONCE)
        values_under_amax, values_under_target = (
            products_under(
                [convention.factor(number, encoding) for number in global_numbers[batch].tolist()], encoding, dtype
            )
            for convention, global_numbers in ((CONVENTIONS[TE], numbers), (to, global_scales))
        )
        unchanged[batch] = (values_under_amax.view(np.uint8) == values_under_target.view(np.uint8)).all(axis=(1, 2))
    unchanged |= numbers == 0  # if the amax is 0, all codes are 0
    return global_scales.reshape(amax.shape), unchanged.reshape(amax.shape)


def hub_global_scales(
    tensor: EncodedTensor, amax: NDArray[np.float32], to: Convention, dtype: str
) -> tuple[NDArray[np.float32], Refusal | None]:
    """Return the per-tensor scales of a weight's matrices in a hub's convention, and an error if these scales change
    values.

    Args:
        tensor: the quantized weight, or a stack of weights.
        amax: largest absolute value of each matrix, as an array of any shape.
        to: the hub's convention.
        dtype: safetensors code of the dtype in which values are compared.
    """
    scales, unchanged = rescale(amax, tensor.encoding, to, dtype)
    return scales, None if unchanged.all() else _inexact(tensor, float(amax[~unchanged][0]), to, dtype)


def products_under(factors: list[float], encoding: Encoding, dtype: str) -> NDArray[Any]:
    """Return all possible products of an unsigned code and a block scale, decoded with each of the factors."""
    from transaxle.encodings.arithmetic.minifloat import MINIFLOATS, narrow

    blocks, codes = (MINIFLOATS[code] for code in (encoding.scale, encoding.code))
    sizes = blocks.values[: blocks.largest + 1]
    sizes = sizes[sizes <= encoding.scale_max].astype(np.float64)
    with np.errstate(all="ignore"):
        scales = (np.array(factors)[:, None] * sizes).astype(np.float32)
        return narrow(scales[..., None] * codes.values[: codes.largest + 1], dtype)


def refusal_for_hub(tensor: EncodedTensor) -> Refusal | None:
    """Return the error for a tensor that no hub config can describe; None if a hub config can describe it."""
    encoding = tensor.encoding
    if encoding.code_bits < 8 or encoding.code == FLOAT8.code:
        return None
    message = f"codes of {encoding.code}: no hub config can express this, and readers would take them for {FLOAT8.code}"
    return Refusal("UNSUPPORTED", message, Where(None, tensor.name), _OUT)


def _inexact(tensor: EncodedTensor, amax: float, to: Convention, dtype: str) -> Refusal:
    """Build the error for a tensor whose amax no per-tensor scale of the convention represents exactly."""
    factor = f"amax / {tensor.encoding.scale_max * tensor.encoding.code_max:g}"
    message = (
        f"its amax is {amax!r}: values of {dtype} would change, because no float32 scale gives {factor} in {to.name}"
    )
    return Refusal("UNSUPPORTED", message, Where(None, tensor.name), _OUT)
