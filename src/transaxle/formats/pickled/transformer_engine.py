"""Reads pickles of TransformerEngine's quantized tensors. This module contains a table of the names in these pickles,
and the order of arguments in each TransformerEngine release.

A tensor of TransformerEngine's classes is pickled as a call that recreates the tensor. Since release 2.16 (pull request
2974) the pickle calls a function of the module. Earlier releases called the class method `_make_in_reduce_ex`, which a
pickle obtains by `getattr`. Calls of the function and of the method have the buffers and a few settings as positional
arguments, and later releases added arguments at the end. This module turns a call that creates a tensor into a
`Quantized`; the call is not carried out, and no other attribute of these classes is allowed.

The orders of arguments and the dtype numbers were taken from the public sources of TransformerEngine 1.2 to 2.18 and of
August 2026; see docs/reference/transformer-engine.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from transaxle.formats.pickled.builders import Args, Caller, check_length, counts, tensor_of
from transaxle.formats.pickled.descriptors import NOTHING, DType, Global, Object, Quantized, TensorRef, malformed

FLOAT8, MXFP8, BLOCKWISE, NVFP4 = "Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor"

DATA, SCALE_INV, TRANSPOSE = "data", "fp8_scale_inv", "data_transpose"
ROWS, ROW_SCALES = "rowwise_data", "rowwise_scale_inv"
COLUMNS, COLUMN_SCALES = "columnwise_data", "columnwise_scale_inv"
ROW_AMAX, COLUMN_AMAX = "amax_rowwise", "amax_columnwise"
IS_2D, FORMAT, SWIZZLED = "is_2D_scaled", "data_format", "with_gemm_swizzled_scales"
ROW_SCALED, E4M3_MAX = "row_scaled_nvfp4", "nvfp4_e4m3_max"
FOUR_OVER_SIX = "nvfp4_use_4over6"
_CODES, _DTYPE, _SHAPE, _QUANTIZER = "codes", "dtype", "shape", "quantizer"

_BOTH = (ROWS, ROW_SCALES, COLUMNS, COLUMN_SCALES)
ORDERS: Mapping[str, tuple[str, ...]] = {
    FLOAT8: (DATA, _CODES, SCALE_INV, _DTYPE, _SHAPE, TRANSPOSE),
    MXFP8: (*_BOTH, _CODES, _DTYPE, _SHAPE, _QUANTIZER, SWIZZLED),
    BLOCKWISE: (_SHAPE, *_BOTH, _CODES, _DTYPE, _QUANTIZER, IS_2D, FORMAT),
    NVFP4: (
        *(_SHAPE, *_BOTH, ROW_AMAX, COLUMN_AMAX, _CODES, _DTYPE, _QUANTIZER),
        *(SWIZZLED, ROW_SCALED, FOUR_OVER_SIX, E4M3_MAX),
    ),
}  # fmt: skip
"""Class -> names of its constructor arguments in the order of the newest TransformerEngine; older releases have only
the first of these arguments."""

OLD, NEW, UNKNOWN = "old", "new", ""
CODES: Mapping[str, Mapping[int, str]] = {
    OLD: {6: "F8_E4M3", 7: "F8_E5M2"},
    NEW: {7: "F8_E4M3", 8: "F8_E5M2", 10: "F4"},
}
"""For each numbering of dtypes (`OLD` before release 2.4, `NEW` since then): `DType` number -> safetensors code, for
the dtypes that codes can have."""
COMPACT = 1
"""Member of `Float8BlockScaleTensorFormat` that means that scales are in the same order as the codes; the member 0 is
`GEMM_READY`."""
_MAX_DTYPE = 10
"""Largest number of a member of the enum `DType`."""

_PACKAGE = "transformer_engine.pytorch"
_MODULES = {
    FLOAT8: "float8_tensor", MXFP8: "mxfp8_tensor", BLOCKWISE: "float8_blockwise_tensor", NVFP4: "nvfp4_tensor",
}  # fmt: skip
_METHOD = "_make_in_reduce_ex"
_QUANTIZERS = {
    "Float8Quantizer": FLOAT8, "Float8CurrentScalingQuantizer": FLOAT8, "MXFP8Quantizer": MXFP8,
    "Float8BlockQuantizer": BLOCKWISE, "NVFP4Quantizer": NVFP4,
}  # fmt: skip
"""Quantizer class -> tensor class that is defined in the same module."""
_NATIVE, _OLDEST_NATIVE = "transformer_engine_torch", "transformer_engine_extensions"
"""Name of TransformerEngine's compiled module, and its former name (until release 1.7)."""
_ENUM = "DType"
_DTYPES = {(_OLDEST_NATIVE, _ENUM): OLD, (_NATIVE, _ENUM): UNKNOWN, (f"{_PACKAGE}.constants", _ENUM): NEW}
"""`(module, name)` of the dtype enum -> numbering of the enum's members."""
_FORMATS = frozenset({(_NATIVE, "Float8BlockScaleTensorFormat")})


class _TensorMaker(msgspec.Struct, frozen=True):
    """A function or method that creates tensors of one class."""

    kind: str
    """Name of the tensor class."""
    lengths: Mapping[int, str]
    """Number of arguments -> dtype numbering of the releases that pass this number of arguments."""


def _module(kind: str) -> str:
    return f"{_PACKAGE}.tensor.{_MODULES[kind]}"


_TENSOR_MAKERS: Mapping[tuple[str, str], _TensorMaker] = {
    (f"{_PACKAGE}.{_MODULES[FLOAT8]}", f"{FLOAT8}.{_METHOD}"): _TensorMaker(FLOAT8, {4: OLD}),
    (_module(FLOAT8), f"{FLOAT8}.{_METHOD}"): _TensorMaker(FLOAT8, {4: OLD, 5: UNKNOWN}),
    (_module(MXFP8), f"{MXFP8}.{_METHOD}"): _TensorMaker(MXFP8, {6: OLD, 7: UNKNOWN, 8: NEW, 9: NEW}),
    (_module(BLOCKWISE), f"{BLOCKWISE}.{_METHOD}"): _TensorMaker(BLOCKWISE, {9: UNKNOWN, 10: NEW}),
    (_module(NVFP4), f"{NVFP4}.{_METHOD}"): _TensorMaker(NVFP4, {10: NEW, 11: NEW}),
    (_module(FLOAT8), "_make_float8_tensor_in_reduce_ex"): _TensorMaker(FLOAT8, {5: NEW, 6: NEW}),
    (_module(MXFP8), "_make_mxfp8_tensor_in_reduce_ex"): _TensorMaker(MXFP8, {9: NEW}),
    (_module(BLOCKWISE), "_make_float8_blockwise_tensor_in_reduce_ex"): _TensorMaker(BLOCKWISE, {10: NEW}),
    (_module(NVFP4), "_make_nvfp4_tensor_in_reduce_ex"): _TensorMaker(NVFP4, {11: NEW, 14: NEW}),
}
"""`(module, qualified name)` of a function or method -> description of how it creates a tensor."""
_KNOWN_QUANTIZERS = frozenset((_module(kind), name) for name, kind in _QUANTIZERS.items())
_IDENTITY = f"{_PACKAGE}.tensor.identity_tensor"

INERT: Mapping[str, frozenset[str]] = {
    f"{_PACKAGE}.{_MODULES[FLOAT8]}": frozenset({FLOAT8}),
    **{
        _module(kind): frozenset({kind, *(name for name, of in _QUANTIZERS.items() if of == kind)}) for kind in _MODULES
    },
    _NATIVE: frozenset(name for module, name in {*_DTYPES, *_FORMATS} if module == _NATIVE),
    _OLDEST_NATIVE: frozenset({_ENUM}),
    f"{_PACKAGE}.constants": frozenset({_ENUM}),
    _IDENTITY: frozenset({"IdentityQuantizer"}),
}
"""Module -> classes of the module whose calls are only described."""


TENSORS = frozenset((module, FLOAT8) for module in INERT if FLOAT8 in INERT[module]) | {
    (_module(kind), kind) for kind in _MODULES
}
"""TransformerEngine's tensor classes; a tensor of these classes that is created by a call not listed in this module
cannot be read."""


def quantized_tensor(function: Global, args: Args, _: Caller) -> Quantized:
    """Build the description of a quantized tensor from the call that creates it."""
    maker = _TENSOR_MAKERS[function.module, function.name]
    check_length(function, args, *maker.lengths)
    arguments: dict[str, Any] = dict(zip(ORDERS[maker.kind], args, strict=False))
    number, numbering = _type_of_codes(function, arguments[_CODES])
    if type(arguments[_DTYPE]) is not DType:
        raise malformed(f"{function} needs a dtype")
    if not _is_quantizer(arguments.get(_QUANTIZER)):
        raise malformed(f"{function} needs a quantizer, not a {type(arguments[_QUANTIZER]).__name__}")
    buffers = {name: tensor for name in _BUFFERS if (tensor := arguments.get(name)) is not None}
    if any(type(tensor) is not TensorRef for tensor in buffers.values()):
        raise malformed(f"{function} needs a tensor for each buffer")
    return Quantized(
        maker.kind,
        arguments[_DTYPE],
        number,
        maker.lengths[len(args)] or numbering,
        counts(function, "sizes", arguments[_SHAPE]) if _SHAPE in arguments else None,
        buffers,
        {name: _setting(function, name, arguments[name]) for name in _SETTINGS if arguments.get(name) is not None},
    )


_BUFFERS = (DATA, SCALE_INV, TRANSPOSE, *_BOTH, ROW_AMAX, COLUMN_AMAX)
_SETTINGS = (IS_2D, FORMAT, SWIZZLED, ROW_SCALED, FOUR_OVER_SIX, E4M3_MAX)


def identity(function: Global, args: Args, _: Caller) -> TensorRef:
    """Return the first argument of a call with `(values, quantizer, dtype, shape)`, which is a tensor that is not
    quantized.
    """
    check_length(function, args, 4)
    tensor = tensor_of(function, args[0])
    if type(tensor) is not TensorRef or counts(function, "sizes", args[3]) != tensor.shape:
        raise malformed(f"{function} needs a tensor of the shape that it gives")
    return tensor


BUILDS = {
    **dict.fromkeys(_TENSOR_MAKERS, quantized_tensor),
    (_IDENTITY, "_make_identity_tensor_in_reduce_ex"): identity,
}
"""`(module, name)` of a function or method -> function that builds the result of a call."""


def _type_of_codes(function: Global, type_object: object) -> tuple[int, str]:
    """Return the number of the codes' dtype, and the numbering to which this number belongs (empty if unknown).

    Until release 2.15 the number is the state of a pybind11 enum; since then it is an argument of the call.
    """
    numbering = _DTYPES.get((type_object.cls.module, type_object.cls.name)) if type(type_object) is Object else None
    if numbering is None:
        raise malformed(f"{function} needs a type of codes")
    number, by_value = _number(function, type_object)
    if number > _MAX_DTYPE:
        raise malformed(f"{function}: unknown type {number}")
    return number, NEW if by_value else numbering


def _number(function: Global, member: Any) -> tuple[int, bool]:
    """Return the number of an enum member, and whether the pickle creates the member by its value."""
    by_value = len(member.args) == 1 and member.state is NOTHING
    number = member.args[0] if by_value else member.state
    if type(number) is not int or number < 0 or (member.args and not by_value):
        raise malformed(f"{function} was given a malformed {member.cls.name}")
    return number, by_value


def _is_quantizer(quantizer: object) -> bool:
    return quantizer is None or (
        type(quantizer) is Object and (quantizer.cls.module, quantizer.cls.name) in _KNOWN_QUANTIZERS
    )


def _setting(function: Global, name: str, value: object) -> int:
    if name == FORMAT and type(value) is Object and (value.cls.module, value.cls.name) in _FORMATS:
        return _number(function, value)[0]
    if type(value) is not (int if name == E4M3_MAX else bool):
        raise malformed(f"{function}: {name} is a {type(value).__name__}")
    return int(value)
