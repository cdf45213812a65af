"""Reads and writes the descriptions of torchao's quantized tensors in the header of a safetensors file.

Torchao stores each quantized tensor as several plain tensors, such as `X._weight_qdata` and `X._weight_scale`. Under
the name `X.weight`, the header's metadata has a JSON text with the tensor's class, its attributes and the names of the
plain tensors (`torchao.prototype.safetensors`, 0.18). This module parses the JSON text, and never executes code from
the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from transaxle.encodings.conventions.scheme import Positive, variant
from transaxle.encodings.encoding import MXFP4, MXFP8, NVFP4, WHOLE, Encoding, Wide
from transaxle.errors import Code, Refusal, Where

NAMES = "tensor_names"
"""Metadata key under which torchao lists the names of all tensors in the file."""

_PLAIN = "Tensor"
_DTYPE = "torch.dtype"
_CODES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float4_e2m1fn_x2": "F4"}
_SCALE = "F32"


class _TaggedValue(msgspec.Struct, rename={"type": "_type", "data": "_data"}):
    """A value in torchao's JSON, together with the name of the value's class."""

    type: str
    data: Any = None


class _Float8(msgspec.Struct):
    """Attributes of a torchao `Float8Tensor` in its metadata."""

    block_size: list[Positive] = []


class _Mx(msgspec.Struct):
    """Attributes of a torchao `MXTensor` in its metadata."""

    elem_dtype: _TaggedValue
    block_size: Positive
    is_swizzled_scales: bool = False


class _Nvfp4(msgspec.Struct):
    """Attributes of a torchao `NVFP4Tensor` in its metadata."""

    block_size: Positive
    is_swizzled_scales: bool = False


class _TensorNote(msgspec.Struct, rename={"type": "_type", "data": "_data", "parts": "_tensor_data_names"}):
    """The JSON text by which the metadata describes one tensor."""

    type: str
    data: dict[str, Any] = {}
    parts: list[str] = []


_names = msgspec.json.Decoder(list[str])


class TensorDescription(msgspec.Struct, frozen=True):
    """A quantized tensor, as the file's metadata describes it."""

    encoding: Encoding | None
    """Encoding of the tensor (with e4m3 codes if its class allows several); None if the description cannot be
    parsed.
    """
    parts: tuple[str, ...] = ()
    """Stored names of the plain tensors (codes, scales, …) that form the quantized tensor."""
    refusals: tuple[Refusal, ...] = ()
    """Errors that state why the description cannot be parsed; empty if it can be parsed."""


def read_descriptions(metadata: Mapping[str, object]) -> Mapping[str, TensorDescription]:
    """Return tensor name -> description, for each quantized tensor that the metadata of torchao's files describes.

    Args:
        metadata: metadata of one file, or of all files together; in the latter, keys whose values differ between files
            begin with `file:`.
    """
    tensors: dict[str, TensorDescription] = {}
    for key, listed in metadata.items():
        if key != NAMES and not key.endswith(f":{NAMES}"):
            continue
        try:
            names = _names.decode(str(listed))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            tensors[key] = _unread(key, (), "CORRUPT", f"the list in the header's metadata is malformed: {error}")
            continue
        for name in names:
            description = _read_note(name, metadata.get(name))
            if description is not None:
                tensors[name] = description
    return tensors


class SwizzledTensor(msgspec.Struct, frozen=True):
    """A quantized tensor whose scales are stored swizzled: in the order in which a matrix-multiply kernel reads
    them.
    """

    codes: str
    """Stored name of the tensor's codes."""
    scale: str
    """Stored name of the tensor's scales."""
    per_byte: int
    """Number of codes in one stored byte."""
    block: int
    """Number of codes along a row that share one scale."""
    compact: Mapping[str, Any]
    """The tensor's JSON description, changed so that it describes scales in row-major order."""


def find_swizzled(metadata: Mapping[str, object]) -> Mapping[str, SwizzledTensor]:
    """Return tensor name -> tensor, for torchao's tensors with swizzled scales; malformed descriptions are skipped.

    Args:
        metadata: metadata of one file, or of all files together (see `read_descriptions`).
    """
    tensors: dict[str, SwizzledTensor] = {}
    for name, description in read_descriptions(metadata).items():
        text = str(metadata.get(name))
        if description.encoding is not None or _SWIZZLED not in text:
            continue
        try:
            compact_note = _parse_json(text)
            tensor = msgspec.convert(compact_note, _TensorNote)
            if tensor.type not in _BLOCKED or tensor.data.get(_SWIZZLED) is not True:
                continue
            compact_note[_DATA] = {**compact_note[_DATA], _SWIZZLED: False}
            encoding = _encoding(msgspec.convert(compact_note, _TensorNote))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        head, dot, segment = name.rpartition(".")
        codes, scale = (f"{head}{dot}_{segment}_{buffer}" for buffer in _BUFFERS)
        if {codes, scale} <= set(description.parts):
            tensors[name] = SwizzledTensor(codes, scale, 8 // encoding.code_bits, encoding.tile[-1], compact_note)
    return tensors


def describe_tensor(
    encoding: Encoding, shape: tuple[int, ...], parts: Iterable[str], name: str, dtype: Wide
) -> dict[str, Any]:
    """Return the description of a quantized tensor, as torchao 0.18 writes it into the header as a JSON text.

    Args:
        encoding: encoding of the tensor: float8 or nvfp4.
        shape: shape of the tensor, in elements.
        parts: stored names of the tensor's buffers.
        name: name of the tensor.
        dtype: safetensors code of the dtype of decoded values.
    """
    head, dot, segment = name.rpartition(".")
    prefix, values = f"{head}{dot}_{segment}_", {"_type": _DTYPE, "_data": _DTYPE_NAMES[dtype]}
    data: dict[str, Any]
    if encoding.has_global:
        data = {_SWIZZLED: False, "use_triton_kernel": False, "act_quant_kwargs": None}
        data |= {"block_size": encoding.tile[-1], "orig_dtype": values}
    else:
        preference = {"_type": "KernelPreference", "_data": "AUTO"}
        data = {"block_size": list(encoding.tiles(shape)), "mm_config": None, "act_quant_kwargs": None}
        data |= {"kernel_preference": preference, "dtype": values}
    names = sorted((part.removeprefix(prefix) for part in parts), key=_PART_ORDER.index)
    return {"_type": "NVFP4Tensor" if encoding.has_global else "Float8Tensor", _DATA: data, "_tensor_data_names": names}


PLAIN_TENSOR: Mapping[str, str] = MappingProxyType({"_type": _PLAIN})
"""Description of a tensor that is not quantized."""


def describe_weights(encoding: Encoding) -> dict[str, Any]:
    """Return the configuration object of torchao 0.18 for weights of an encoding, as it is in a model's config."""
    if encoding.has_global:
        return {"_type": "NVFP4WeightOnlyConfig", "_version": 1, _DATA: {"use_dynamic_per_tensor_scale": True}}
    row = encoding.tile == (1, WHOLE)
    granularity = {"_type": "PerRow", "_version": 1, _DATA: {"dim": -1}}
    whole = {"_type": "PerTensor", "_version": 1, _DATA: {}}
    data = {"weight_dtype": {"_type": _DTYPE, _DATA: "float8_e4m3fn"}, "set_inductor_config": True}
    return {
        "_type": "Float8WeightOnlyConfig",
        "_version": 2,
        _DATA: {**data, "granularity": granularity if row else whole},
    }


def _read_note(name: str, text: object) -> TensorDescription | None:
    """Read the description of one tensor; the result is None if the tensor is not quantized."""
    if text is None:
        message = f"the header's metadata lists it under {NAMES}, but describes it not at all, or more than once"
        return _unread(name, (), "CORRUPT", message)
    try:
        tensor = msgspec.convert(_parse_json(str(text)), _TensorNote)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return _unread(name, (), "CORRUPT", f"the header's metadata describes it in a malformed way: {error}")
    if tensor.type == _PLAIN:
        return None
    head, dot, segment = name.rpartition(".")
    parts = tuple(f"{head}{dot}_{segment}_{suffix}" for suffix in tensor.parts)
    try:
        return TensorDescription(_encoding(tensor), parts)
    except msgspec.ValidationError as error:
        return _unread(name, parts, "CORRUPT", f"an attribute of its {tensor.type} is malformed: {error}")
    except _UnknownError as error:
        return _unread(name, parts, "UNSUPPORTED", str(error))


def _parse_json(text: str) -> Any:
    """Parse the JSON description of a tensor; raise ValueError if it is not JSON, or contains a key twice."""
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    note = dict(pairs)
    if len(note) < len(pairs):
        raise ValueError(f"a key is there twice, of {', '.join(sorted(note))[:100]}")
    return note


def _unread(name: str, parts: tuple[str, ...], code: Code, message: str) -> TensorDescription:
    hint = "Save it dequantized with torchao, or move the file as it is." if code == "UNSUPPORTED" else ""
    return TensorDescription(None, parts, (Refusal(code, message, Where(None, name), hint),))


class _UnknownError(ValueError):
    """Raised for a tensor of an unknown class, or with an unknown attribute."""


def _encoding(tensor: _TensorNote) -> Encoding:
    unread = [*(set(tensor.parts) - _PARTS), *(tensor.data.keys() - _ATTRIBUTES)]
    if tensor.type in _KNOWN and unread:
        raise _UnknownError(f"its values may be more than code times scale, by its {', '.join(sorted(unread))}")
    if tensor.type == "Float8Tensor":
        return variant("F8_E4M3", _SCALE, tuple(msgspec.convert(tensor.data, _Float8).block_size) or (WHOLE, WHOLE))
    if tensor.type == "MXTensor":
        mx = msgspec.convert(tensor.data, _Mx)
        code = _CODES.get(str(mx.elem_dtype.data))
        _compact(mx.is_swizzled_scales)
        if mx.elem_dtype.type != _DTYPE or code is None:
            raise _UnknownError(f"elements of {mx.elem_dtype.data!r}; known: {', '.join(_CODES)}")
        base = MXFP4 if code == MXFP4.code else MXFP8
        return replace(base, code=code, tile=(1, mx.block_size))
    if tensor.type == "NVFP4Tensor":
        nv = msgspec.convert(tensor.data, _Nvfp4)
        _compact(nv.is_swizzled_scales)
        return replace(NVFP4, tile=(1, nv.block_size), has_global=_GLOBAL in tensor.parts)
    raise _UnknownError(f"torchao's class {tensor.type!r} is not supported; known: {', '.join(_KNOWN)}")


def _compact(find_swizzled: bool) -> None:
    if find_swizzled:
        raise _UnknownError("its scales are in the order of a matrix-multiply kernel (`is_swizzled_scales`)")


_GLOBAL = "per_tensor_scale"
_DTYPE_NAMES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_SWIZZLED = "is_swizzled_scales"
_DATA = "_data"
_BUFFERS = ("qdata", "scale")
_PART_ORDER = (_GLOBAL, "act_per_tensor_scale", *_BUFFERS)
_PARTS = frozenset(_PART_ORDER)
"""Buffers that this module reads, or may skip because they affect only the quantization of a layer's inputs."""
_ATTRIBUTES = frozenset({
    "act_quant_kwargs", "block_size", "dtype", "elem_dtype", _SWIZZLED, "kernel_preference", "mm_config", "orig_dtype",
    "use_triton_kernel",
})  # fmt: skip
"""Attributes that this module reads, or may skip because they affect how a layer multiplies but not its weights."""
_BLOCKED = ("MXTensor", "NVFP4Tensor")
_KNOWN = ("Float8Tensor", "MXTensor", "NVFP4Tensor")
