"""Writes pickles of plain data and descriptors, in protocol 2; no class or function that such a pickle names is
imported.

Only opcodes that `torch.load(weights_only=True)` accepts are used. `interpreter.read_pickle` can read the pickles, and
equal values result in equal bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from transaxle.formats.pickled.allowed import STORAGES
from transaxle.formats.pickled.descriptors import (
    NOTHING,
    DType,
    Global,
    Object,
    OrderedMap,
    Persistent,
    Shared,
    StorageType,
    TensorRef,
)

_BATCH = 1000
_DEEPEST = 100
_ORDERED = Global("collections", "OrderedDict")
_ENCODE = Global("_codecs", "encode")
_COMPLEX = Global("builtins", "complex")
_GETATTR = Global("builtins", "getattr")
_UNTYPED = Global("torch.storage", "UntypedStorage")
_SETS = frozenset({"set", "frozenset"})
_INTEGERS = frozenset({int})
_VIEW = {False: Global("torch._utils", "_rebuild_tensor_v2"), True: Global("torch._utils", "_rebuild_tensor_v3")}
_STORAGES = {dtype: Global("torch", name) for name, dtype in STORAGES.items()}


class Streamed(NamedTuple):
    """A list or dict whose elements are created only while they are written, so that they are never in memory all at
    once.
    """

    parts: Iterable[Any]
    """Elements of the list, or `(key, value)` pairs of the dict."""
    is_dict: bool = False


def write_pickle(value: object) -> bytes:
    """Return the pickle of a value as bytes.

    Args:
        value: plain values and descriptors, nested at most a hundred levels deep. An object that occurs in several
            places is written anew at each place, unless it is in a `Shared`.

    Raises:
        ValueError: if the value cannot be pickled with these opcodes, or is nested too deeply.
    """
    assembler = _Assembler()
    assembler.put(value, 0)
    return bytes(assembler.out + b".")


def is_writable(value: object) -> bool:
    """Return whether `write_pickle` can write a value."""
    try:
        write_pickle(value)
    except ValueError:
        return False
    return True


class _Assembler:
    """The opcodes written so far, and the memo (the positions of strings and globals that were written before)."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self._memo: dict[str | Global | Shared, bytes] = {}
        """String, global or shared value -> opcodes that refer to it."""
        self._calls_with_counts: dict[tuple[Global, tuple[int, ...]], bytes] = {}
        self._records: dict[tuple[Any, ...], tuple[bytes, list[bytes]]] = {}
        """`(class, *field names)` -> opcodes that repeat for objects of this class: the beginning, and each field's
        name."""

    def put(self, value: Any, depth: int) -> None:
        if depth > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} levels deep")
        write = _WRITERS.get(type(value))
        if write is None:
            raise ValueError(f"a {type(value).__name__} cannot be stored in a pickle")
        write(self, value, depth + 1)

    def refer(self, value: str | Global | Shared) -> bool:
        """Write a reference to a string, global or shared value that was written before; return False if it was not
        written before.
        """
        reference = self._memo.get(value)
        if reference is None:
            return False
        self.out += reference
        return True

    def memoize(self, value: str | Global | Shared) -> None:
        index = len(self._memo)
        number = b"%c" % index if index < 256 else struct.pack("<I", index)
        self._memo[value] = (b"h" if index < 256 else b"j") + number
        self.out += (b"q" if index < 256 else b"r") + number

    def call(self, function: Global, args: tuple[Any, ...], depth: int, *, new: bool = False) -> None:
        self.put(function, depth)
        self.put(args, depth)
        self.out += b"\x81" if new else b"R"

    def call_with_counts(self, function: Global, counts: tuple[int, ...], depth: int) -> None:
        """Write a call of a function with a tuple of integers as argument; the opcodes of an equal earlier call are
        reused.
        """
        opcodes = self._calls_with_counts.get((function, counts))
        if opcodes is None:
            is_new = function not in self._memo
            begin = len(self.out)
            self.call(function, (counts,), depth)
            if not is_new:
                self._calls_with_counts[function, counts] = bytes(self.out[begin:])
        else:
            self.out += opcodes

    def record(self, cls: Global, fields: dict[Any, Any], depth: int) -> None:
        """Write an object with the given fields; the opcodes between the values are assembled only once per class."""
        form = (cls, *fields)
        template = self._records.get(form)
        if template is None or depth >= _DEEPEST:
            self.call(cls, (), depth, new=True)
            _state(self, fields, depth)
            if len(fields) <= _BATCH // 2 and all(type(field) is str for field in fields):
                self._records[form] = self._memo[cls] + b")\x81}(", [self._memo[field] for field in fields]
            return
        head, references = template
        self.out += head
        for reference, value in zip(references, fields.values(), strict=True):
            self.out += reference
            self.put(value, depth + 1)
        self.out += b"ub"

    def items(self, items: Iterable[Any], opcode: bytes, depth: int) -> None:
        """Write the elements of a list or dict in batches, each batch between a MARK and `opcode`."""
        room = 0
        for item in items:
            if not room:
                self.out += b"("
                room = _BATCH
            self.put(item, depth)
            room -= 1
            if not room:
                self.out += opcode
        if room:
            self.out += opcode

    def pairs(self, pairs: Mapping[Any, Any], depth: int) -> None:
        if not 0 < len(pairs) <= _BATCH // 2:
            self.items(chain.from_iterable(pairs.items()), b"u", depth)
            return
        self.out += b"("
        for key, value in pairs.items():
            self.put(key, depth)
            self.put(value, depth)
        self.out += b"u"


def _none(a: _Assembler, _value: None, _depth: int) -> None:
    a.out += b"N"


def _bool(a: _Assembler, value: bool, _depth: int) -> None:
    a.out += b"\x88" if value else b"\x89"


def _int(a: _Assembler, value: int, _depth: int) -> None:
    if 0 <= value < 1 << 8:
        a.out += b"K%c" % value
    elif 0 <= value < 1 << 16:
        a.out += b"M" + struct.pack("<H", value)
    elif -(1 << 31) <= value < 1 << 31:
        a.out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > 255:
            raise ValueError(f"an integer of {len(data)} bytes")
        a.out += b"\x8a%c" % len(data) + data


def _float(a: _Assembler, value: float, _depth: int) -> None:
    a.out += b"G" + struct.pack(">d", value)


def _complex(a: _Assembler, value: complex, depth: int) -> None:
    a.call(_COMPLEX, (value.real, value.imag), depth)


def _str(a: _Assembler, value: str, _depth: int) -> None:
    if a.refer(value):
        return
    data = value.encode("utf-8", "surrogatepass")
    a.out += b"X" + struct.pack("<I", len(data)) + data
    a.memoize(value)


def _bytes(a: _Assembler, value: bytes, depth: int) -> None:
    a.call(_ENCODE, (value.decode("latin-1"), "latin1"), depth)


def _tuple(a: _Assembler, value: tuple[Any, ...], depth: int) -> None:
    if len(value) > 3:
        a.out += b"("
    for item in value:
        a.put(item, depth)
    a.out += (b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t"


def _list(a: _Assembler, value: list[Any], depth: int) -> None:
    a.out += b"]"
    a.items(value, b"e", depth)


def _dict(a: _Assembler, value: dict[Any, Any], depth: int) -> None:
    a.out += b"}"
    a.pairs(value, depth)


def _streamed(a: _Assembler, value: Streamed, depth: int) -> None:
    a.out += b"}" if value.is_dict else b"]"
    if value.is_dict:
        a.items(chain.from_iterable(value.parts), b"u", depth)
    else:
        a.items(value.parts, b"e", depth)


def _ordered_map(a: _Assembler, value: OrderedMap, depth: int) -> None:
    a.call(_ORDERED, (), depth)
    a.pairs(value, depth)
    _state(a, value.state, depth)


def _state(a: _Assembler, state: object, depth: int) -> None:
    if state is not NOTHING:
        a.put(state, depth)
        a.out += b"b"


def _global(a: _Assembler, value: Global, depth: int) -> None:
    if a.refer(value):
        return
    owner, dot, member = value.name.rpartition(".")
    if dot:
        a.call(_GETATTR, (Global(value.module, owner), member), depth)
    else:
        if "\n" in value.module or "\n" in value.name:
            raise ValueError("a line break in the name of a global")
        a.out += f"c{value.module}\n{value.name}\n".encode()
    a.memoize(value)


def _dtype(a: _Assembler, value: DType, depth: int) -> None:
    _global(a, Global("torch", value.name), depth)


def _storage_type(a: _Assembler, value: StorageType, depth: int) -> None:
    _global(a, _UNTYPED if value.dtype is None else _STORAGES[value.dtype.name], depth)


def _persistent(a: _Assembler, value: Persistent, depth: int) -> None:
    a.put(value.pid, depth)
    a.out += b"Q"


def _object(a: _Assembler, value: Object, depth: int) -> None:
    if value.kwargs:
        raise ValueError("protocol 2 has no named arguments")
    if value.cls.module == _GETATTR.module and value.cls.name in _SETS:
        a.call(value.cls, (value.items,), depth)
        return
    args, state = value.args, value.state
    if value.new and type(state) is dict and state and not (args or value.items or value.pairs):
        a.record(value.cls, state, depth)
        return
    if len(args) == 1 and type(args[0]) is tuple and not value.new and set(map(type, args[0])) <= _INTEGERS:
        a.call_with_counts(value.cls, args[0], depth)
    else:
        a.call(value.cls, args, depth, new=value.new)
    if value.items:
        a.items(value.items, b"e", depth)
    if value.pairs:
        a.pairs(value.pairs, depth)
    _state(a, state, depth)


def _once(a: _Assembler, value: Shared, depth: int) -> None:
    if not a.refer(value):
        a.put(value.value, depth)
        a.memoize(value)


def _tensor(a: _Assembler, value: TensorRef, depth: int) -> None:
    args = [value.storage, value.offset, value.shape, value.strides, False, OrderedMap()]
    if value.dtype is not None:
        args.append(value.dtype)
    if value.flags:
        args.append(dict.fromkeys(value.flags, True))
    a.call(_VIEW[value.dtype is not None], tuple(args), depth)


_WRITERS: dict[type, Callable[[_Assembler, Any, int], None]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    tuple: _tuple,
    list: _list,
    dict: _dict,
    Streamed: _streamed,
    OrderedMap: _ordered_map,
    Global: _global,
    DType: _dtype,
    StorageType: _storage_type,
    Persistent: _persistent,
    Object: _object,
    Shared: _once,
    TensorRef: _tensor,
}
