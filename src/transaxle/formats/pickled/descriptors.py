"""The values that the pickle interpreter builds: plain data, and descriptions of all classes, functions and objects.

Numbers, strings, bytes, lists, tuples and dicts represent themselves. A class or function that a pickle names is
represented by a `Global`, and the result of a call of it by an `Object`, which contains the name, the arguments and the
state. If a pickle uses one object in several places, the interpreter's values share it as well, and a value may contain
itself. Code that walks through the values must therefore limit its number of steps. This module also defines the
exceptions for pickles that are malformed or cannot be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from transaxle.errors import Code

CODES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
"""Name of a torch dtype -> safetensors code; the code of a dtype that is not listed is torch's name in capitals."""


class Global(msgspec.Struct, frozen=True):
    """A class or function that a pickle names, and that was not imported."""

    module: str
    name: str
    """Qualified name of the global in its module; the name of a bound class method is `Class.method`."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class DType(msgspec.Struct, frozen=True):
    """A torch dtype, such as `float32`."""

    name: str

    @property
    def code(self) -> str:
        """Return the safetensors code of the dtype; if it has no code, torch's name in capitals."""
        return CODES.get(self.name, self.name.upper())


class StorageType(msgspec.Struct, frozen=True):
    """A torch storage class, such as `torch.FloatStorage`."""

    dtype: DType | None
    """Dtype of the storage's elements; None for untyped bytes."""


class Nothing:
    """The type of `NOTHING`, which marks an object without state; None would be a state."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()


class OrderedMap(dict[Any, Any]):
    """A dict that the pickle creates by calling `OrderedDict` or a similar class; such a dict may have attributes."""

    __slots__ = ("state",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state: object = NOTHING
        """Attributes of the dict, such as `_metadata` of a torch state dict; NOTHING if the dict has no attributes."""


class Object(msgspec.Struct, eq=False):
    """Description of the result of calling a global (a class or function). An `Object` equals only itself, so it can be
    the key of a dict.
    """

    cls: Global
    """The class or function that is called."""
    args: tuple[Any, ...] = ()
    """Positional arguments of the call."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of the call."""
    state: object = NOTHING
    """State that the pickle sets with the opcode BUILD; for most classes it is a dict of attributes."""
    items: list[Any] = msgspec.field(default_factory=list)
    """Items that the pickle appends or adds to the object."""
    pairs: dict[Any, Any] = msgspec.field(default_factory=dict)
    """Key-value pairs that the pickle sets in the object."""
    new: bool = False
    """Whether the object is created by the `__new__` of its class, instead of a call of the class."""


class Persistent(msgspec.Struct, eq=False):
    """A persistent id that the interpreter did not resolve; such an id refers to an object outside the pickle."""

    pid: object


class Key(msgspec.Struct, eq=False):
    """A dict key that is not a plain scalar, such as a tuple; a `Key` is never hashed by its value."""

    value: object


class TensorRef(msgspec.Struct, eq=False):
    """A tensor in a pickle: a strided view of a storage. Offset, shape and strides are counted in elements as torch
    counts them.
    """

    storage: object
    """The value to which the persistent id of the storage was resolved."""
    dtype: DType | None
    """Dtype of the elements; None means that the tensor has the dtype of its storage."""
    offset: int
    """Index of the view's first element in the storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flags: tuple[str, ...] = ()
    """Operations (`conj`, `neg`) that torch has not yet applied to the stored values."""


class Shared(msgspec.Struct, eq=False):
    """A value that a new pickle contains only once, wherever this `Shared` occurs; a `Shared` equals only itself."""

    value: object


class Quantized(msgspec.Struct, eq=False):
    """A quantized tensor of TransformerEngine, with codes and scales as tensors (see `transformer_engine`)."""

    kind: str
    """Name of the tensor class, such as `MXFP8Tensor`."""
    dtype: DType
    """The dtype that the tensor reports to torch; its codes have a different dtype."""
    number: int
    """Number by which TransformerEngine denotes the dtype of the tensor's codes."""
    numbering: str
    """Numbering of dtypes to which `number` belongs: `old`, `new`, or empty if unknown."""
    shape: tuple[int, ...] | None
    """Shape of the tensor in elements; None if the pickle does not contain the shape."""
    buffers: Mapping[str, TensorRef]
    """Name of a constructor argument -> buffer, for all buffers that are not None."""
    settings: Mapping[str, int]
    """Name of a constructor argument -> flag of the tensor."""


class Scalar(msgspec.Struct, frozen=True):
    """A number with a dtype, such as a numpy scalar."""

    code: str
    """Safetensors code of the number's dtype."""
    data: bytes
    """Bytes of the number, little-endian."""


class PickleFault(Exception):
    """Raised if a pickle is malformed, or cannot be read by Transaxle."""

    def __init__(self, message: str, code: Code = "CORRUPT") -> None:
        super().__init__(message)
        self.message = message
        self.code: Code = code


class PickleEnds(PickleFault):
    """Raised if the data ends before the end of the pickle."""


def malformed(message: str) -> PickleFault:
    """Return a `PickleFault` with the code CORRUPT, for a malformed pickle."""
    return PickleFault(message)


_PLAIN = frozenset(
    {str, bytes, bool, float, type(None), Global, DType, StorageType, Object, Persistent, TensorRef, Key}
)
_WRAPPED = frozenset({tuple, int, complex})
_SMALL = 2**64


def put(target: dict[Any, Any], flat: Sequence[Any]) -> None:
    """Add keys and values to a dict; `flat` contains them alternately.

    The keys are untrusted, so only plain scalars are hashed. Any other key becomes a `Key`, which equals only itself.

    Raises:
        PickleFault: with the code CORRUPT for a key without a value, an unhashable key, or a repeated key.
    """
    if len(flat) % 2:
        raise malformed("a key without a value")
    expected = len(target) + len(flat) // 2
    keys, values = flat[::2], flat[1::2]
    if _PLAIN.issuperset(map(type, keys)):  # in the common case all keys are plain scalars
        target.update(zip(keys, values, strict=True))
    else:
        for key, value in zip(keys, values, strict=True):
            kind = type(key)
            if kind in _PLAIN or (kind is int and -_SMALL < key < _SMALL):
                target[key] = value
            elif kind in _WRAPPED:
                target[Key(key)] = value
            else:
                raise malformed(f"a {kind.__name__} as a key of a dict")
    if len(target) != expected:
        raise malformed("a dict has the same key twice")
