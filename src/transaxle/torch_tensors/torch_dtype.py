"""Element types of live tensors, by the safetensors codes that checkpoints name them with."""

from __future__ import annotations

import torch

from transaxle.errors import refuse

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "COMPLEX32": "complex32", "COMPLEX128": "complex128",
}  # fmt: skip
_TORCH = {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _TORCH.items()}


def code_of(dtype: torch.dtype) -> str:
    """Return the safetensors code of a torch type; one without a code is named as torch names it, in capitals."""
    return _CODES.get(dtype) or str(dtype).removeprefix("torch.").upper()


def torch_dtype(code: str, *, tensor: str | None = None) -> torch.dtype:
    """Return the torch type of a code.

    Raises:
        Refused: UNSUPPORTED where torch has no such type; `tensor` is named.
    """
    if code not in _TORCH:
        raise refuse("UNSUPPORTED", f"torch has no dtype for {code}", tensor=tensor)
    dtype: torch.dtype = _TORCH[code]
    return dtype
