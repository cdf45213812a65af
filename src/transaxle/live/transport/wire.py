"""Encoding of the messages between ranks. The messages contain plain data and records of registered classes; nothing is
unpickled.

The encoding of messages is msgpack. A value of a type that msgpack lacks (a tuple, a dtype, …) is encoded as an array
that begins with the number of its kind. Bytes in any other form are refused; a class is looked up only among the
registered classes, and never imported.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch

from transaxle.arguments import Degrees
from transaxle.axes.geometry import PerComponent, Replicated, Shard, StridedShard, Widths
from transaxle.encodings.encoding import EncodedTensor, Encoding, Error, Role
from transaxle.encodings.value_steps import MeasuredTensor, RecodedTensor
from transaxle.engine.carry import Report
from transaxle.engine.checkpoint.source_hashes import BytesRead
from transaxle.engine.verification import Verification
from transaxle.errors import CODES, OF_SYSTEM, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import Checksum
from transaxle.formats.checksums import Tally
from transaxle.torch_tensors import Placement


class _Kind(IntEnum):
    """Python type of the value that is encoded as a msgpack array."""

    LIST = 0
    TUPLE = 1
    DICT = 2
    SET = 3
    FROZENSET = 4
    LONG = 5
    """An integer of more than 64 bits."""
    DTYPE = 6
    ARRAY = 7
    ERROR = 8
    RECORD = 9
    REFUSAL = 10
    TEXT = 11
    """A string with lone surrogates, such as a path that is not UTF-8."""


_PLAIN = frozenset({type(None), bool, float, str, bytes})
_LOSSLESS = "surrogatepass"
_SHORT = range(-(1 << 63), 1 << 64)
_BUFFERS = "biufc"
"""Codes (`dtype.kind`) of numpy's dtypes for booleans and numbers."""
_BUFFER = re.compile(rf"[<>|][{_BUFFERS}][1-9]\d?")
"""Pattern of accepted names of numpy dtypes, such as `<f4`. Numpy itself would interpret many other texts."""
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if type(each) is torch.dtype}
"""Name -> torch dtype; `getattr(torch, name)` with a received name could make torch import modules."""
_SYSTEM = {each.__name__: each for each in OF_SYSTEM}
"""Name in the field `system` of an encoded refusal -> built-in exception, such as FileNotFoundError."""
_KINDS: Mapping[type, _Kind] = {list: _Kind.LIST, set: _Kind.SET, frozenset: _Kind.FROZENSET}
RECORDS: dict[str, type] = {}
"""Full name of a class -> the class, for all classes whose objects may be sent."""


def tellable(*classes: type) -> None:
    """Register classes whose objects may be sent: dataclasses, msgspec Structs and Enums."""
    for record in classes:
        if not (dataclasses.is_dataclass(record) or issubclass(record, msgspec.Struct | Enum)):
            raise TypeError(f"{record.__qualname__} is no record")
        RECORDS[_name(record)] = record


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# Records from below `live` are registered here, whichever modules a process imports; others where they are defined.
tellable(Where, Checksum, Tally, EncodedTensor, Encoding, Role, Error)
tellable(Report, MeasuredTensor, RecodedTensor, Verification, BytesRead)
tellable(Degrees, Placement, PerComponent, Replicated, Shard, StridedShard, Widths)


def encode(value: object, otherwise: Callable[[object], object] | None = None) -> bytes:
    """Encode a value as the bytes of a message.

    Args:
        value: plain data, arrays of numbers, torch dtypes, Transaxle's errors, and records of registered classes.
        otherwise: function that converts an object that cannot be encoded to plain data; None means that such an object
            is refused.

    Raises:
        TypeError: if the value contains an object that cannot be encoded.
    """
    return msgspec.msgpack.encode(_pack(value, otherwise))


def _pack(value: Any, otherwise: Callable[[object], object] | None) -> Any:
    """Convert a Python value to types that msgpack supports."""
    kind = type(value)
    if kind is str and not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
        return [_Kind.TEXT, value.encode(errors=_LOSSLESS)]
    if kind in _PLAIN:
        return value
    if kind is int:
        if value in _SHORT:
            return value
        return [_Kind.LONG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
    if kind is torch.dtype:
        return [_Kind.DTYPE, str(value).removeprefix("torch.")]
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _BUFFERS:
        return [_Kind.ARRAY, value.dtype.str, *value.shape, np.ascontiguousarray(value).tobytes()]
    if kind is Refusal:  # the field `detail` is omitted, because a function cannot be sent
        system = None if value.system is None else value.system.__name__
        texts = (value.code, value.message, value.where, value.hint, system)
        return [_Kind.REFUSAL, *(_pack(each, None) for each in texts)]
    parts = _parts(value)
    if parts is not None:
        return [parts[0], *(_pack(each, otherwise) for each in parts[1])]
    if RECORDS.get(_name(kind)) is kind:
        fields = (value.value,) if isinstance(value, Enum) else (getattr(value, name) for name in _fields(kind))
        return [_Kind.RECORD, _name(kind), *(_pack(each, otherwise) for each in fields)]
    if otherwise is None:
        raise TypeError(f"ranks tell each other plain data, and no {_name(kind)}")
    return _pack(otherwise(value), None)


def _parts(value: Any) -> tuple[_Kind, Any] | None:
    """Return the kind and the elements of a container such as a tuple or set; return None for a value that is not a
    container.
    """
    if isinstance(value, Mapping):
        return _Kind.DICT, chain.from_iterable(value.items())
    if type(value) in (tuple, torch.Size):
        return _Kind.TUPLE, value
    if isinstance(value, TransaxleError):
        return _Kind.ERROR, value.refusals
    kind = _KINDS.get(type(value))
    return None if kind is None else (kind, value)


def _fields(kind: type) -> tuple[str, ...]:
    """Return the names of a record's fields."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return tuple(each.name for each in dataclasses.fields(kind))  # type: ignore[arg-type]  # `tellable` has checked it


def decode(octets: bytes | memoryview) -> Any:
    """Decode bytes that another rank has encoded with `encode`.

    Raises:
        Refused: with code CORRUPT, if `encode` cannot have produced the bytes.
    """
    try:
        return _unpack(msgspec.msgpack.decode(octets))
    except TransaxleError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        message = f"another rank sent what cannot be read: {error}"
        raise refuse("CORRUPT", message, hint="Run the same version of transaxle on all ranks.") from error


def _unpack(value: Any) -> Any:
    """Convert a value of the types that msgpack supports back to the Python value that was encoded."""
    if type(value) is not list:
        if type(value) not in _PLAIN and type(value) is not int:
            raise TypeError(f"a bare {type(value).__name__}")
        return value
    kind, *items = value
    return _READ[_Kind(kind)](items)


def _all(items: list[Any]) -> list[Any]:
    return [_unpack(each) for each in items]


def _dict(items: list[Any]) -> dict[Any, Any]:
    flat = _all(items)
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _text(items: list[Any]) -> str:
    (octets,) = items
    return str(octets, errors=_LOSSLESS)


def _long(items: list[Any]) -> int:
    (octets,) = items
    return int.from_bytes(octets, "little", signed=True)


def _dtype(items: list[Any]) -> torch.dtype:
    (name,) = items
    return _DTYPES[name]


def _array(items: list[Any]) -> Any:
    name, *shape, octets = items
    if not _BUFFER.fullmatch(name):
        raise ValueError(f"an array of {name}")
    array = np.frombuffer(octets, np.dtype(name)).reshape(shape).copy()
    return array if shape else array[()]


def _error(items: list[Any]) -> TransaxleError:
    refusals = _all(items)
    if not all(type(each) is Refusal for each in refusals):
        raise TypeError("an error without refusals")
    return gathered(refusals)


def _refusal(items: list[Any]) -> Refusal:
    code, message, where, hint, system = _all(items)
    if code not in CODES or type(where) is not Where or not (type(message) is type(hint) is str):
        raise TypeError("a refusal of other fields")
    if not all(type(each) in (str, type(None)) for each in (where.file, where.tensor)):
        raise TypeError("a place that is no text")
    return Refusal(code, message, where, hint, system=_SYSTEM.get(system))


def _record(items: list[Any]) -> Any:
    name, *packed_fields = items
    kind, values = RECORDS[name], _all(packed_fields)
    if issubclass(kind, Enum):
        return kind(*values)
    fields = dict(zip(_fields(kind), values, strict=True))
    if issubclass(kind, msgspec.Struct):
        return kind(**fields)
    record = object.__new__(kind)  # `__init__` is not called, because the sending rank has already run its checks
    for field, value in fields.items():
        object.__setattr__(record, field, value)
    return record


_READ: Mapping[_Kind, Callable[[list[Any]], Any]] = {
    _Kind.LIST: _all,
    _Kind.TUPLE: lambda items: tuple(_all(items)),
    _Kind.DICT: _dict,
    _Kind.SET: lambda items: set(_all(items)),
    _Kind.FROZENSET: lambda items: frozenset(_all(items)),
    _Kind.LONG: _long,
    _Kind.DTYPE: _dtype,
    _Kind.ARRAY: _array,
    _Kind.ERROR: _error,
    _Kind.RECORD: _record,
    _Kind.REFUSAL: _refusal,
    _Kind.TEXT: _text,
}
