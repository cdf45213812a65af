"""The restricted pickle interpreter: it runs a pickle's opcodes, but never imports or calls anything.

Python's own unpickler imports and calls the classes and functions that a pickle names. This interpreter has a table of
allowed names (`allowed`): a name in the table becomes a `Global`, and a call of a `Global` becomes a description of the
call (see `descriptors`). A pickle that names a class or function outside the table is refused. The number of opcodes,
the memory and the size of numbers are limited, and the interpreter does not recurse. Reading a pickle therefore takes
at most the memory that the caller allows.

The interpreter supports the opcodes of protocols 1 to 5, and those opcodes of protocol 0 that name globals. Opcodes
that refer to objects outside the pickle (extension codes, out-of-band buffers) are refused. The interpreter also reads
numbers in text form, which occur in pickles of `torch.save(pickle_protocol=1)` and of Python 2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BytesIO
from pickletools import genops
from typing import Any

import msgspec

from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.pickled.allowed import ALLOWED, MEMBER, Names
from transaxle.formats.pickled.descriptors import (
    NOTHING,
    Global,
    Object,
    OrderedMap,
    Persistent,
    PickleEnds,
    PickleFault,
    malformed,
    put,
)

_UNSAFE = "the pickle asks for {}, which is not on the list of harmless names; nothing was imported or run"
_HINT = "Only if you trust the author of the file: load it with the program that wrote it, and save plain tensors."
_MIB = 1 << 20
_TOO_MUCH = "it builds more objects than any real checkpoint"
_NESTED_CALLS = 8
_SHOWN = 200
_MAX_NAMES = 100
_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Name of a module in Python 2, which protocol 2 still writes -> name of the module in Python 3."""

PersistentId = Callable[[object], object]
"""A function `persistent(pid)`, which returns the value for a persistent id of the pickle; it may raise PickleFault."""


class Bounds(msgspec.Struct, frozen=True):
    """Limits on the size and memory of a pickle."""

    size: int = 256 * _MIB
    """Maximum size of the pickle in bytes."""
    memory: int = 768 * _MIB
    """Maximum memory, as an estimate in bytes, for the objects that the pickle builds."""


class UnpickledValue(msgspec.Struct, frozen=True):
    """The result of reading a pickle: a value, and where the pickle ends."""

    value: Any
    """The unpickled value, made of plain data and descriptors; an object may occur in several places, and may contain
    itself."""
    end: int
    """Position in the data after the last byte of the pickle."""
    protocol: int
    """Pickle protocol, 0 to 5; it is 0 if the pickle does not state a protocol."""


def read_pickle(
    data: bytes,
    *,
    file: str,
    record: str = "",
    start: int = 0,
    complete: bool = True,
    bounds: Bounds | None = None,
    allowed: Names = ALLOWED,
    persistent: PersistentId = Persistent,
) -> UnpickledValue:
    """Read one pickle with the restricted interpreter.

    Args:
        data: bytes that contain the pickle, possibly with other bytes around it.
        file: name of the file with the pickle, for error messages.
        record: name of the pickle's record in a zip file, for error messages.
        start: position in `data` at which the pickle begins.
        complete: whether `data` extends to the end of the file; if it does not, a pickle that continues beyond `data`
            raises PickleEnds.
        bounds: limits on size and memory; None means the default limits.
        allowed: table of the globals (classes and functions) that the pickle may name.
        persistent: function that returns the value for a persistent id.

    Raises:
        Refused: with the code UNSAFE_PICKLE and each forbidden global; with the code CORRUPT for a malformed pickle;
            with the code UNSUPPORTED for buffers outside the pickle.
        PickleEnds: if the pickle continues beyond `data`, see `complete`.
    """
    record_prefix = f"record {record}: " if record else ""
    machine = Machine(data, start, bounds or Bounds(), allowed, persistent)
    value = None
    try:
        _perform(machine)
        if machine.outer or len(machine.stack) != 1:
            raise malformed("it does not end with exactly one value")
        value = machine.stack[0]
    except PickleFault as fault:
        if not complete and isinstance(fault, PickleEnds):
            raise
        if not machine.unsafe:
            message = f"{record_prefix}the pickle is not valid at byte {machine.begin}: {fault.message}"
            raise refuse(fault.code, message, file=file) from None
    if machine.unsafe:
        raise _unsafe(machine.unsafe, file, record_prefix)
    return UnpickledValue(value, machine.at, machine.protocol)


def _unsafe(names: Mapping[str, int], file: str, record_prefix: str) -> TransaxleError:
    return gathered(
        Refusal("UNSAFE_PICKLE", f"{record_prefix}{_UNSAFE.format(name)} (byte {at})", Where(file), _HINT)
        for name, at in names.items()
    )


class Machine:
    """The state of the interpreter for one pickle.

    Attributes:
        begin: position of the current opcode in the data.
        at: position in the data of the next byte to read.
        unsafe: maps each forbidden name to the position at which the pickle first uses it.
        protocol: pickle protocol that the pickle states.
        budget: estimated bytes of memory that the pickle may still use.
        limit: position at which the readable data ends.
    """

    def __init__(self, data: bytes, start: int, bounds: Bounds, allowed: Names, persistent: PersistentId) -> None:
        self.data = data
        self.begin = self.at = start
        self.protocol = 0
        self.unsafe: dict[str, int] = {}
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.budget = bounds.memory
        self.limit = start + bounds.size
        self._allowed = allowed
        self._persistent = persistent
        self._nested = 0

    def charge(self, amount: int) -> None:
        """Subtract an estimated number of bytes from the memory budget.

        Raises:
            PickleFault: with the code CORRUPT if the budget is exceeded.
        """
        self.budget -= amount
        if self.budget < 0:
            raise malformed(_TOO_MUCH)

    def take(self, count: int) -> bytes:
        """Return the next bytes of the pickle."""
        if count < 0:
            raise malformed("a length is negative")
        end = self.at + count
        if end > len(self.data):
            raise PickleEnds(f"it announces {count} bytes, but only {len(self.data) - self.at} follow")
        data = self.data[self.at : end]
        self.at = end
        self.charge(count)
        return data

    def octet(self) -> int:
        """Return the next byte of the pickle as a number."""
        value = self.data[self.at]
        self.at += 1
        return value

    def number(self, form: struct.Struct) -> Any:
        """Return the next number in a fixed-size binary form."""
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def line(self) -> bytes:
        """Return the bytes up to the next line break, and skip the line break."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            self.at = len(self.data)
            raise PickleEnds("it ends in the middle of a line")
        data = self.data[self.at : end]
        self.at = end + 1
        self.charge(len(data))
        return data

    def text(self, octets: bytes) -> str:
        """Decode UTF-8; text that is not ASCII costs more of the memory budget, because it may need four times its
        bytes.
        """
        text = octets.decode("utf-8", "surrogatepass")
        if len(text) != len(octets):
            self.charge(4 * len(text))
        return text

    def since_mark(self) -> list[Any]:
        """Return the values pushed on the stack since the last mark."""
        if not self.outer:
            raise malformed("it refers to a mark that was not set")
        items = self.stack
        self.stack = self.outer.pop()
        self.charge(8 * len(items))
        return items

    def find(self, module: str, name: str) -> Any:
        """Return the value that represents a global (class or function); record a forbidden name in `unsafe`, and
        return a `Global` for it.
        """
        module = _PYTHON2.get(module, module)
        rule = self._allowed.get((module, name))
        if rule is None:
            if len(self.unsafe) < _MAX_NAMES:
                shown = f"{module[:_SHOWN]}.{name[:_SHOWN]}"
                self.unsafe.setdefault(shown.encode("unicode_escape").decode(), self.begin)
            return Global(module, name)
        return Global(module, name) if rule.value is NOTHING else rule.value

    def call(self, function: object, args: object, *, new: bool = False) -> Any:
        """Return the result of a call of a global, or a description of the call.

        Raises:
            PickleFault: with the code CORRUPT if `function` is not a global, or cannot be called with these arguments.
        """
        if type(args) is not tuple:
            raise malformed(f"the arguments of a call are a {type(args).__name__}")
        if type(function) is not Global:
            raise malformed(f"it calls a {type(function).__name__}")
        rule = self._allowed.get((function.module, function.name))
        if rule is MEMBER:
            return self._member(args)
        if rule is None or rule.build is None:
            return Object(function, args, new=new)
        if self._nested >= _NESTED_CALLS:
            raise malformed("calls are nested too deeply")
        self._nested += 1
        try:
            return rule.build(function, args, self)
        finally:
            self._nested -= 1

    def _member(self, args: tuple[Any, ...]) -> Any:
        """Evaluate `getattr(Class, "method")`; the table of allowed names must contain the method under its qualified
        name.
        """
        if len(args) != 2 or type(args[0]) is not Global or type(args[1]) is not str:
            raise malformed("it takes an attribute of something that is not a class")
        self.charge(len(args[0].name) + len(args[1]))
        return self.find(args[0].module, f"{args[0].name}.{args[1]}")

    def refer(self, pid: object) -> Any:
        """Return the value for a persistent id."""
        return self._persistent(pid)


Step = Callable[[Machine], None]
_STEPS: list[Step | None] = [None] * 256
_COSTS = [16] * 256
"""Opcode -> estimated bytes of memory that it costs, without bytes that depend on lengths; the opcode's function
subtracts these itself."""
_STOP = ord(".")
_PROTOCOL = 5
_OLDEST = "it uses the step {!r} of protocol 0, which no framework writes"
_OBSOLETE = frozenset(b"FSVPpgldo")
_MEMOIZED = frozenset({"BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME"})
_LONGEST_INT = 512
"""Maximum number of bytes of an integer; the largest integers in real files are the 128 bits of numpy's random
generators."""
_LONGEST_NUMBER = 1300
"""Maximum number of characters of a number in text form."""
_U16, _U32, _I32, _U64, _F64 = (struct.Struct(form) for form in ("<H", "<I", "<i", "<Q", ">d"))


def _perform(machine: Machine) -> None:
    """Run all opcodes of a pickle; afterwards the stack contains only the result.

    Raises:
        PickleFault: if the pickle has any fault; forbidden names are only recorded in `machine.unsafe`.
    """
    try:
        _run(machine)
    except struct.error:
        raise PickleEnds("it ends in the middle of a number") from None
    except IndexError:
        if machine.at >= len(machine.data):
            raise PickleEnds("it ends before its last step") from None
        raise malformed("it takes more from the stack than there is") from None
    except KeyError:
        raise malformed("it refers to an object that it has not built") from None
    except UnicodeError:
        raise malformed("a text is not valid Unicode") from None
    except (ValueError, OverflowError):
        raise malformed("a number is malformed") from None


def _run(machine: Machine) -> None:
    data, steps, costs, limit = machine.data, _STEPS, _COSTS, machine.limit
    while True:
        machine.begin = at = machine.at
        code = data[at]
        machine.at = at + 1
        if code == _STOP:
            return
        step = steps[code]
        if step is None and code in _OBSOLETE:
            _record_names(machine)
            raise malformed(_OLDEST.format(bytes([code])))
        if step is None:
            raise malformed(f"unknown opcode {bytes([code])!r}")
        machine.budget -= costs[code]
        if machine.budget < 0 or at > limit:
            raise malformed(_TOO_MUCH)
        step(machine)


def _record_names(machine: Machine) -> None:
    """Record the globals in the rest of a refused pickle, because a forbidden name is a more important reason to refuse
    it.
    """
    stream = BytesIO(machine.data)  # the stream uses the bytes of the pickle without copying them
    stream.seek(machine.begin)
    texts: list[str] = []
    with suppress(ValueError, IndexError):
        for opcode, argument, _ in genops(stream):
            if opcode.name in {"GLOBAL", "INST"}:
                machine.find(*str(argument).split(" ", 1))
            elif opcode.name == "STACK_GLOBAL" and len(texts) > 1:
                machine.find(*texts[-2:])
            if isinstance(argument, str):
                texts.append(argument)
            elif opcode.name not in _MEMOIZED:
                # the opcode may push strings whose text is unknown here, such as strings in the memo (the table of
                # stored objects)
                texts = []


def _step(opcode: bytes, cost: int = 16) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        _STEPS[opcode[0]] = step
        _COSTS[opcode[0]] = cost
        return step

    return register


def _constant(opcode: bytes, value: object) -> None:
    _step(opcode)(lambda m: m.stack.append(value))


# Opcodes for frames and marks.


@_step(b"\x80")
def _proto(m: Machine) -> None:
    m.protocol = m.octet()
    if m.protocol > _PROTOCOL:
        raise malformed(f"its protocol is {m.protocol}; the highest known is {_PROTOCOL}")


@_step(b"\x95")
def _frame(m: Machine) -> None:
    size = m.number(_U64)
    if size > len(m.data) - m.at:
        raise PickleEnds(f"a frame announces {size} bytes, but only {len(m.data) - m.at} follow")


@_step(b"(", 80)
def _mark(m: Machine) -> None:
    m.outer.append(m.stack)
    m.stack = []


@_step(b"0")
def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.since_mark()


@_step(b"1")
def _pop_mark(m: Machine) -> None:
    m.since_mark()


@_step(b"2")
def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


# Opcodes for numbers and constants.

_constant(b"N", None)
_constant(b"\x88", True)
_constant(b"\x89", False)
_constant(b")", ())


@_step(b"I", 40)
def _int(m: Machine) -> None:
    line = m.line()
    m.stack.append(line == b"01" if line in (b"00", b"01") else _integer(line))


@_step(b"L", 40)
def _long(m: Machine) -> None:
    m.stack.append(_integer(m.line().removesuffix(b"L")))


def _integer(line: bytes) -> int:
    if len(line) > _LONGEST_NUMBER or b"_" in line:
        raise malformed("a number is malformed")
    return int(line)


@_step(b"J", 40)
def _binint(m: Machine) -> None:
    m.stack.append(m.number(_I32))


@_step(b"K")
def _binint1(m: Machine) -> None:
    m.stack.append(m.octet())


@_step(b"M", 40)
def _binint2(m: Machine) -> None:
    m.stack.append(m.number(_U16))


@_step(b"\x8a", 40)
def _long1(m: Machine) -> None:
    _bytes_of_int(m, m.octet())


@_step(b"\x8b", 40)
def _long4(m: Machine) -> None:
    _bytes_of_int(m, m.number(_I32))


def _bytes_of_int(m: Machine, size: int) -> None:
    if size > _LONGEST_INT:
        raise malformed(f"an integer of {size} bytes")
    m.stack.append(int.from_bytes(m.take(size), "little", signed=True))


@_step(b"G", 32)
def _binfloat(m: Machine) -> None:
    m.stack.append(m.number(_F64))


# Opcodes for texts and bytes.


@_step(b"T", 60)
def _binstring(m: Machine) -> None:
    m.stack.append(_python2(m.take(m.number(_I32))))


@_step(b"U", 60)
def _short_binstring(m: Machine) -> None:
    m.stack.append(_python2(m.take(m.octet())))


def _python2(octets: bytes) -> str | bytes:
    """Decode a string of Python 2; return its bytes if they are not UTF-8."""
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return octets


@_step(b"X", 60)
def _binunicode(m: Machine) -> None:
    m.stack.append(m.text(m.take(m.number(_U32))))


@_step(b"\x8c", 60)
def _short_binunicode(m: Machine) -> None:
    m.stack.append(m.text(m.take(m.octet())))


@_step(b"\x8d", 60)
def _binunicode8(m: Machine) -> None:
    m.stack.append(m.text(m.take(m.number(_U64))))


@_step(b"B", 40)
def _binbytes(m: Machine) -> None:
    m.stack.append(m.take(m.number(_U32)))


@_step(b"C", 40)
def _short_binbytes(m: Machine) -> None:
    m.stack.append(m.take(m.octet()))


@_step(b"\x8e", 40)
@_step(b"\x96", 40)
def _binbytes8(m: Machine) -> None:
    m.stack.append(m.take(m.number(_U64)))


# Opcodes for lists, dicts, sets and tuples.


@_step(b"]", 72)
def _empty_list(m: Machine) -> None:
    m.stack.append([])


@_step(b"}", 80)
def _empty_dict(m: Machine) -> None:
    m.stack.append({})


@_step(b"\x8f", 300)
def _empty_set(m: Machine) -> None:
    m.stack.append(m.call(m.find("builtins", "set"), ()))


@_step(b"\x91", 300)
def _frozenset(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(m.call(m.find("builtins", "frozenset"), (items,)))


@_step(b"t", 64)
def _tuple(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(tuple(items))


@_step(b"\x85", 64)
def _tuple1(m: Machine) -> None:
    m.stack[-1] = (m.stack[-1],)


@_step(b"\x86", 72)
def _tuple2(m: Machine) -> None:
    second = m.stack.pop()
    m.stack[-1] = (m.stack[-1], second)


@_step(b"\x87", 80)
def _tuple3(m: Machine) -> None:
    third, second = m.stack.pop(), m.stack.pop()
    m.stack[-1] = (m.stack[-1], second, third)


@_step(b"a", 16)
def _append(m: Machine) -> None:
    item = m.stack.pop()
    _items_of(m.stack[-1]).append(item)


@_step(b"e")
@_step(b"\x90")
def _appends(m: Machine) -> None:
    items = m.since_mark()
    m.charge(8 * len(items))
    _items_of(m.stack[-1]).extend(items)


def _items_of(target: object) -> list[Any]:
    if type(target) is list:
        return target
    if type(target) is Object:
        return target.items
    raise malformed(f"it appends to a {type(target).__name__}")


@_step(b"s", 100)
def _setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    put(_pairs_of(m.stack[-1]), (key, value))


@_step(b"u")
def _setitems(m: Machine) -> None:
    items = m.since_mark()
    m.charge(50 * len(items))
    put(_pairs_of(m.stack[-1]), items)


def _pairs_of(target: object) -> dict[Any, Any]:
    if type(target) is dict or type(target) is OrderedMap:
        return target
    if type(target) is Object:
        return target.pairs
    raise malformed(f"it sets a key of a {type(target).__name__}")


# Opcodes for the memo, the table in which a pickle stores objects to refer to them again.


@_step(b"q", 80)
def _binput(m: Machine) -> None:
    m.memo[m.octet()] = m.stack[-1]


@_step(b"r", 100)
def _long_binput(m: Machine) -> None:
    m.memo[m.number(_U32)] = m.stack[-1]


@_step(b"\x94", 80)
def _memoize(m: Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


@_step(b"h")
def _binget(m: Machine) -> None:
    m.stack.append(m.memo[m.octet()])


@_step(b"j")
def _long_binget(m: Machine) -> None:
    m.stack.append(m.memo[m.number(_U32)])


# Opcodes for globals, calls and state.


@_step(b"c", 64)
def _global(m: Machine) -> None:
    module, name = m.line(), m.line()
    m.stack.append(m.find(module.decode(), name.decode()))


@_step(b"\x93", 64)
def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise malformed("the name of a global is not text")
    m.stack.append(m.find(module, name))


@_step(b"R", 300)
def _reduce(m: Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args)


@_step(b"\x81", 300)
def _newobj(m: Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args, new=True)


@_step(b"\x92", 300)
def _newobj_ex(m: Machine) -> None:
    kwargs, args = m.stack.pop(), m.stack.pop()
    if type(kwargs) is not dict:
        raise malformed(f"the named arguments of a call are a {type(kwargs).__name__}")
    result = m.call(m.stack[-1], args, new=True)
    if kwargs:
        if type(result) is not Object:
            raise malformed("a call has named arguments that are not allowed")
        result.kwargs = kwargs
    m.stack[-1] = result


@_step(b"i")
def _inst(m: Machine) -> None:
    module, name = m.line(), m.line()
    m.find(module.decode(), name.decode())
    raise malformed(_OLDEST.format(b"i"))


@_step(b"b")
def _build(m: Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is not Object and type(target) is not OrderedMap:
        raise malformed(f"it gives attributes to a {type(target).__name__}")
    if target.state is not NOTHING:
        raise malformed("it gives attributes to an object twice")
    target.state = state


@_step(b"Q", 100)
def _binpersid(m: Machine) -> None:
    m.stack[-1] = m.refer(m.stack[-1])


# Opcodes that refer to objects outside the pickle.


@_step(b"\x82")
@_step(b"\x83")
@_step(b"\x84")
def _extension(_: Machine) -> None:
    raise PickleFault("it uses an extension code that only the writing process knows", "UNSAFE_PICKLE")


@_step(b"\x97")
@_step(b"\x98")
def _buffer(_: Machine) -> None:
    raise PickleFault("it refers to a buffer outside the pickle", "UNSUPPORTED")


OPCODES = frozenset(bytes([code]) for code, step in enumerate(_STEPS) if step is not None)
"""All opcodes that the interpreter supports, except STOP."""


__all__ = ["OPCODES", "Bounds", "Machine", "PersistentId", "PickleEnds", "UnpickledValue", "read_pickle"]
