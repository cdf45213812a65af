"""How TransformerEngine pickles its quantized tensors: which names it uses, and what the arguments are.

A tensor of its own classes is pickled as a call that makes it again. From release 2.16 on (pull request 2974) that is a
function of the module; before, it was the class method `_make_in_reduce_ex`, which a pickle reaches by `getattr`. Both
take the buffers and a few settings by position, and each release added some at the end. Here such a call gives a
`Quantized`: nothing is called, and no other attribute of these classes can be named.

The orders of arguments, and the numbers below, are those of the public sources from 1.2 to 2.18 and of August 2026; see
docs/reference/transformer-engine.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transaxle.formats.pickled.allowed_globals.builders import Args, Caller, counts, fits, tensor_of
from transaxle.formats.pickled.descriptors import NOTHING, DType, Global, Object, Quantized, TensorRef
from transaxle.formats.pickled.fault import malformed

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
"""Class -> its arguments in order, as of the newest release; older ones have the first of them."""

OLD, NEW, UNTOLD = "old", "new", ""
CODES: Mapping[str, Mapping[int, str]] = {
    OLD: {6: "F8_E4M3", 7: "F8_E5M2"},
    NEW: {7: "F8_E4M3", 8: "F8_E5M2", 10: "F4"},
}
"""Numbers of TransformerEngine's `DType` that codes may have: before release 2.4, and since."""
COMPACT = 1
"""The number of `Float8BlockScaleTensorFormat` for scales that lie as their codes do; 0 is `GEMM_READY`."""
_MOST = 10
"""The highest number of a `DType`."""

_PACKAGE = "transformer_engine.pytorch"
_MODULES = {
    FLOAT8: "float8_tensor", MXFP8: "mxfp8_tensor", BLOCKWISE: "float8_blockwise_tensor", NVFP4: "nvfp4_tensor",
}  # fmt: skip
_METHOD = "_make_in_reduce_ex"
_QUANTIZERS = {
    "Float8Quantizer": FLOAT8, "Float8CurrentScalingQuantizer": FLOAT8, "MXFP8Quantizer": MXFP8,
    "Float8BlockQuantizer": BLOCKWISE, "NVFP4Quantizer": NVFP4,
}  # fmt: skip
"""Class of a quantizer -> the class of tensors beside which it is defined."""
_NATIVE, _OLDEST_NATIVE = "transformer_engine_torch", "transformer_engine_extensions"
"""The compiled module; until release 1.7 it had the other name."""
_ENUM = "DType"
_DTYPES = {(_OLDEST_NATIVE, _ENUM): OLD, (_NATIVE, _ENUM): UNTOLD, (f"{_PACKAGE}.constants", _ENUM): NEW}
"""Names of the type of codes -> the list that its numbers are from."""
_FORMATS = frozenset({(_NATIVE, "Float8BlockScaleTensorFormat")})


@dataclass(frozen=True, slots=True)
class _Form:
    """One way to make a tensor of one class."""

    kind: str
    """The class."""
    lengths: Mapping[int, str]
    """Number of arguments -> which list of types the releases with so many had."""


def _module(kind: str) -> str:
    return f"{_PACKAGE}.tensor.{_MODULES[kind]}"


_FORMS: Mapping[tuple[str, str], _Form] = {
    (f"{_PACKAGE}.{_MODULES[FLOAT8]}", f"{FLOAT8}.{_METHOD}"): _Form(FLOAT8, {4: OLD}),
    (_module(FLOAT8), f"{FLOAT8}.{_METHOD}"): _Form(FLOAT8, {4: OLD, 5: UNTOLD}),
    (_module(MXFP8), f"{MXFP8}.{_METHOD}"): _Form(MXFP8, {6: OLD, 7: UNTOLD, 8: NEW, 9: NEW}),
    (_module(BLOCKWISE), f"{BLOCKWISE}.{_METHOD}"): _Form(BLOCKWISE, {9: UNTOLD, 10: NEW}),
    (_module(NVFP4), f"{NVFP4}.{_METHOD}"): _Form(NVFP4, {10: NEW, 11: NEW}),
    (_module(FLOAT8), "_make_float8_tensor_in_reduce_ex"): _Form(FLOAT8, {5: NEW, 6: NEW}),
    (_module(MXFP8), "_make_mxfp8_tensor_in_reduce_ex"): _Form(MXFP8, {9: NEW}),
    (_module(BLOCKWISE), "_make_float8_blockwise_tensor_in_reduce_ex"): _Form(BLOCKWISE, {10: NEW}),
    (_module(NVFP4), "_make_nvfp4_tensor_in_reduce_ex"): _Form(NVFP4, {11: NEW, 14: NEW}),
}
"""Function, or method under its qualified name -> what it makes."""
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
"""Module -> classes of which only the description is kept."""


TENSORS = frozenset((module, FLOAT8) for module in INERT if FLOAT8 in INERT[module]) | {
    (_module(kind), kind) for kind in _MODULES
}
"""Classes of tensors; one that is made in another way than those above is not read."""


def quantized(function: Global, args: Args, _: Caller) -> Quantized:
    """Describe the call that makes a tensor of one of the four classes."""
    form = _FORMS[function.module, function.name]
    fits(function, args, *form.lengths)
    given: dict[str, Any] = dict(zip(ORDERS[form.kind], args, strict=False))
    number, numbering = _type_of_codes(function, given[_CODES])
    if type(given[_DTYPE]) is not DType:
        raise malformed(f"{function} is given no dtype")
    if not _is_quantizer(given.get(_QUANTIZER)):
        raise malformed(f"{function} is given a {type(given[_QUANTIZER]).__name__} for a quantizer")
    buffers = {name: tensor for name in _BUFFERS if (tensor := given.get(name)) is not None}
    if any(type(tensor) is not TensorRef for tensor in buffers.values()):
        raise malformed(f"{function} is given no tensor for a buffer")
    return Quantized(
        form.kind,
        given[_DTYPE],
        number,
        form.lengths[len(args)] or numbering,
        counts(function, "sizes", given[_SHAPE]) if _SHAPE in given else None,
        buffers,
        {name: _setting(function, name, given[name]) for name in _SETTINGS if given.get(name) is not None},
    )


_BUFFERS = (DATA, SCALE_INV, TRANSPOSE, *_BOTH, ROW_AMAX, COLUMN_AMAX)
_SETTINGS = (IS_2D, FORMAT, SWIZZLED, ROW_SCALED, FOUR_OVER_SIX, E4M3_MAX)


def identity(function: Global, args: Args, _: Caller) -> TensorRef:
    """Describe a tensor that a recipe leaves as it is: the first of `(values, quantizer, dtype, shape)`."""
    fits(function, args, 4)
    found = tensor_of(function, args[0])
    if type(found) is not TensorRef or counts(function, "sizes", args[3]) != found.shape:
        raise malformed(f"{function} is given no tensor of the shape that it says")
    return found


BUILDS = {**dict.fromkeys(_FORMS, quantized), (_IDENTITY, "_make_identity_tensor_in_reduce_ex"): identity}
"""Function or method -> what describes its call."""


def _type_of_codes(function: Global, given: object) -> tuple[int, str]:
    """Return the number of the type of codes, and which list it is from as far as the number's own form tells.

    Until release 2.15 the number is the state of an enum of pybind11; since then it is an argument.
    """
    numbering = _DTYPES.get((given.cls.module, given.cls.name)) if type(given) is Object else None
    if numbering is None:
        raise malformed(f"{function} is given no type of codes")
    number, by_value = _number(function, given)
    if number > _MOST:
        raise malformed(f"{function}: there is no type {number}")
    return number, NEW if by_value else numbering


def _number(function: Global, given: Any) -> tuple[int, bool]:
    """Return the number of a member of an enum, and whether it was made by its value."""
    by_value = len(given.args) == 1 and given.state is NOTHING
    number = given.args[0] if by_value else given.state
    if type(number) is not int or number < 0 or (given.args and not by_value):
        raise malformed(f"{function} is given a malformed {given.cls.name}")
    return number, by_value


def _is_quantizer(given: object) -> bool:
    return given is None or (type(given) is Object and (given.cls.module, given.cls.name) in _KNOWN_QUANTIZERS)


def _setting(function: Global, name: str, given: object) -> int:
    if name == FORMAT and type(given) is Object and (given.cls.module, given.cls.name) in _FORMATS:
        return _number(function, given)[0]
    if type(given) is not (int if name == E4M3_MAX else bool):
        raise malformed(f"{function}: {name} is a {type(given).__name__}")
    return int(given)
