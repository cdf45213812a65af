"""What a pickle describes, as plain values: the interpreter makes these, and nothing else.

Numbers, texts, bytes, lists, tuples and dicts are themselves. A class or function that a pickle names is a `Global`,
and what would come of calling it is an `Object`: the name, the arguments and the state, side by side. Objects that a
pickle shares are shared here too, and may hold themselves: whoever walks them keeps count. Faults of a pickle, before
the file that holds it is known, are here too.
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
"""torch's dtype name -> safetensors code, where there is one; any other type is called by torch's name in capitals."""


class Global(msgspec.Struct, frozen=True):
    """A class or function that a pickle names; it was not imported."""

    module: str
    name: str
    """Qualified name in the module; a bound class method is `Class.method`."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class DType(msgspec.Struct, frozen=True):
    """A torch dtype, e.g. `float32`."""

    name: str

    @property
    def code(self) -> str:
        """Safetensors code; torch's name in capitals where there is none."""
        return CODES.get(self.name, self.name.upper())


class StorageType(msgspec.Struct, frozen=True):
    """A torch storage class, e.g. `torch.FloatStorage`."""

    dtype: DType | None
    """Type of its elements; None for untyped bytes."""


class Nothing:
    """The type of `NOTHING`: an object to which BUILD gave no state (None is a state)."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()


class OrderedMap(dict[Any, Any]):
    """A dict that a pickle made by calling `OrderedDict` or its like; it may carry attributes."""

    __slots__ = ("state",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state: object = NOTHING
        """Attributes, such as `_metadata` of a torch state dict."""


class Object(msgspec.Struct, eq=False):
    """What would come of calling a global. Equal only to itself, so it may be the key of a dict."""

    cls: Global
    """Class or function."""
    args: tuple[Any, ...] = ()
    """Its positional arguments."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Its keyword arguments."""
    state: object = NOTHING
    """What BUILD gave it: for most classes, a dict of attributes."""
    items: list[Any] = msgspec.field(default_factory=list)
    """What was appended or added to it."""
    pairs: dict[Any, Any] = msgspec.field(default_factory=dict)
    """What was set in it by key."""
    new: bool = False
    """Made by the class's `__new__`, not by a call."""


class Persistent(msgspec.Struct, eq=False):
    """A reference to something outside the pickle, which no reader has resolved."""

    pid: object


class Key(msgspec.Struct, eq=False):
    """A key of a dict that is no plain scalar, a tuple for example: kept as it is, never hashed."""

    value: object


class TensorRef(msgspec.Struct, eq=False):
    """A strided view of a storage. Counts are in elements, as torch gives them."""

    storage: object
    """What the persistent id of the storage was resolved to."""
    dtype: DType | None
    """Type of the elements; None: that of the storage."""
    offset: int
    """Elements of the storage before the first one."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flags: tuple[str, ...] = ()
    """Bits by which the values differ from the stored ones: `conj`, `neg`."""


class Quantized(msgspec.Struct, eq=False):
    """A tensor of TransformerEngine's: codes and scales, each a tensor of its own (see `transformer_engine`)."""

    kind: str
    """Its class, e.g. `MXFP8Tensor`."""
    dtype: DType
    """Type that it shows to torch; its bytes are not of this type."""
    number: int
    """TransformerEngine's number for the type of its codes."""
    numbering: str
    """Which list of types the number is from: `old`, `new`, or empty where the pickle does not tell."""
    shape: tuple[int, ...] | None
    """Its elements along each dim; None in pickles that left this to the codes."""
    buffers: Mapping[str, TensorRef]
    """Those of its buffers that are there, by the names of the arguments."""
    settings: Mapping[str, int]
    """Its flags, by the names of the arguments."""


class Scalar(msgspec.Struct, frozen=True):
    """A number with a type of its own, such as a numpy scalar."""

    code: str
    """Safetensors code."""
    data: bytes
    """Its bytes, little-endian."""


class PickleFault(Exception):
    """A malformed pickle, or one that this package does not read."""

    def __init__(self, message: str, code: Code = "CORRUPT") -> None:
        super().__init__(message)
        self.message = message
        self.code: Code = code


class PickleEnds(PickleFault):
    """The bytes end before the pickle does."""


def malformed(message: str) -> PickleFault:
    """Build (not raise) the fault of a pickle that is CORRUPT."""
    return PickleFault(message)


_PLAIN = frozenset(
    {str, bytes, bool, float, type(None), Global, DType, StorageType, Object, Persistent, TensorRef, Key}
)
_KEPT = frozenset({tuple, int, complex})
_SMALL = 2**64


def put(target: dict[Any, Any], flat: Sequence[Any]) -> None:
    """Add key, value, key, value, … to a dict whose keys a stranger chose.

    Hashing nested tuples takes time that doubles with each level, and integers can be chosen so that all hashes are
    equal. So only plain scalars are hashed; any other key is kept as a `Key`, which is equal only to itself.

    Raises:
        PickleFault: CORRUPT for a key without a value, a key that no dict can have, and one that is there already.
    """
    if len(flat) % 2:
        raise malformed("a key without a value")
    expected = len(target) + len(flat) // 2
    keys, values = flat[::2], flat[1::2]
    if _PLAIN.issuperset(map(type, keys)):  # the usual case
        target.update(zip(keys, values, strict=True))
    else:
        for key, value in zip(keys, values, strict=True):
            kind = type(key)
            if kind in _PLAIN or (kind is int and -_SMALL < key < _SMALL):
                target[key] = value
            elif kind in _KEPT:
                target[Key(key)] = value
            else:
                raise malformed(f"a {kind.__name__} as a key of a dict")
    if len(target) != expected:
        raise malformed("a dict has the same key twice")
