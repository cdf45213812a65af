"""The steps of a pickle, one function an opcode, for all protocols from 0 to 5.

Steps that would reach outside of the pickle (extension codes, buffers out of band) refuse it. Numbers as text come from
`torch.save(pickle_protocol=1)`; objects as text (protocol 0) are read so that an unsafe one is refused by its name.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any

from transaxle.formats.pickled.descriptors import NOTHING, Object, OrderedMap
from transaxle.formats.pickled.fault import PickleEnds, PickleFault, malformed
from transaxle.formats.pickled.machine import TOO_MUCH, Machine
from transaxle.formats.pickled.mapping import put

Step = Callable[[Machine], None]
_STEPS: list[Step | None] = [None] * 256
_COSTS = [16] * 256
"""Bytes, estimated, that a step adds to what is kept; those that follow from lengths are charged by the step."""
_STOP = ord(".")
_PROTOCOL = 5
_LONGEST_INT = 512
"""Bytes of an integer; the largest in use are the 128 bits of numpy's random generators."""
_LONGEST_NUMBER = 1300
"""Characters of a number in text."""
_U16, _U32, _I32, _U64, _F64 = (struct.Struct(form) for form in ("<H", "<I", "<i", "<Q", ">d"))


def perform(machine: Machine) -> None:
    """Do all steps of a pickle; what it built is on the stack.

    Raises:
        PickleFault: whatever is wrong; names that are not allowed are only noted in `machine.unsafe`.
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
        if step is None:
            raise malformed(f"unknown opcode {bytes([code])!r}")
        machine.left -= costs[code]
        if machine.left < 0 or at > limit:
            raise malformed(TOO_MUCH)
        step(machine)


def _step(opcode: bytes, cost: int = 16) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        _STEPS[opcode[0]] = step
        _COSTS[opcode[0]] = cost
        return step

    return register


def _constant(opcode: bytes, value: object) -> None:
    _step(opcode)(lambda m: m.stack.append(value))


# Frames and marks.


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
    m.as_one()
    if m.stack:
        m.stack.pop()
    else:
        m.since_mark()


@_step(b"1")
def _pop_mark(m: Machine) -> None:
    m.as_one()
    m.since_mark()


@_step(b"2")
def _dup(m: Machine) -> None:
    m.as_one()
    m.stack.append(m.stack[-1])


# Numbers and constants.

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


@_step(b"F", 32)
def _float(m: Machine) -> None:
    line = m.line()
    if len(line) > _LONGEST_NUMBER or b"_" in line:
        raise malformed("a number is malformed")
    m.stack.append(float(line))


@_step(b"G", 32)
def _binfloat(m: Machine) -> None:
    m.stack.append(m.number(_F64))


# Texts and bytes.


@_step(b"S", 60)
def _string(m: Machine) -> None:
    line = m.line()
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise malformed("a text lacks its quotes")
    m.stack.append(_python2(codecs.escape_decode(line[1:-1])[0]))


@_step(b"T", 60)
def _binstring(m: Machine) -> None:
    m.stack.append(_python2(m.take(m.number(_I32))))


@_step(b"U", 60)
def _short_binstring(m: Machine) -> None:
    m.stack.append(_python2(m.take(m.octet())))


def _python2(octets: bytes) -> str | bytes:
    """Decode a text of Python 2, which may have been mere bytes."""
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return octets


@_step(b"V", 60)
def _unicode(m: Machine) -> None:
    line = m.line()
    m.charge(4 * len(line))
    m.stack.append(str(line, "raw-unicode-escape"))


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


# Containers.


@_step(b"]", 72)
def _empty_list(m: Machine) -> None:
    m.stack.append([])


@_step(b"}", 80)
def _empty_dict(m: Machine) -> None:
    m.stack.append({})


@_step(b"\x8f", 300)
def _empty_set(m: Machine) -> None:
    m.stack.append(m.call(m.find("builtins", "set"), ()))


@_step(b"l", 72)
def _list(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(items)


@_step(b"d", 80)
def _dict(m: Machine) -> None:
    items = m.since_mark()
    m.charge(100 * len(items))
    made: dict[Any, Any] = {}
    put(made, items)
    m.stack.append(made)


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
    _items_of(m.stack[-1]).extend(m.settled(items))


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
    put(_pairs_of(m.stack[-1]), m.settled(items))


def _pairs_of(target: object) -> dict[Any, Any]:
    if type(target) is dict or type(target) is OrderedMap:
        return target
    if type(target) is Object:
        return target.pairs
    raise malformed(f"it sets a key of a {type(target).__name__}")


# The memo.


@_step(b"p", 100)
def _put(m: Machine) -> None:
    m.remember(_integer(m.line()))


@_step(b"q", 80)
def _binput(m: Machine) -> None:
    m.remember(m.octet())


@_step(b"r", 100)
def _long_binput(m: Machine) -> None:
    m.remember(m.number(_U32))


@_step(b"\x94", 80)
def _memoize(m: Machine) -> None:
    m.memo[len(m.memo) + m.memo.absent] = m.stack[-1]


@_step(b"g")
def _get(m: Machine) -> None:
    m.stack.append(m.memo[_integer(m.line())])


@_step(b"h")
def _binget(m: Machine) -> None:
    m.stack.append(m.memo[m.octet()])


@_step(b"j")
def _long_binget(m: Machine) -> None:
    m.stack.append(m.memo[m.number(_U32)])


# Globals, calls and state.


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
    made = m.call(m.stack[-1], args, new=True)
    if kwargs:
        if type(made) is not Object:
            raise malformed("a call has named arguments that are not allowed")
        made.kwargs = kwargs
    m.stack[-1] = made


@_step(b"i", 300)
def _inst(m: Machine) -> None:
    module, name = m.line(), m.line()
    args = m.since_mark()
    m.stack.append(m.call(m.find(module.decode(), name.decode()), tuple(args)))


@_step(b"o", 300)
def _obj(m: Machine) -> None:
    items = m.since_mark()
    m.stack.append(m.call(items[0], tuple(items[1:])))


@_step(b"b")
def _build(m: Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is not Object and type(target) is not OrderedMap:
        raise malformed(f"it gives attributes to a {type(target).__name__}")
    if target.state is not NOTHING:
        raise malformed("it gives attributes to an object twice")
    target.state = state


@_step(b"P")
def _persid(m: Machine) -> None:
    m.stack.append(m.refer(m.line().decode()))


@_step(b"Q", 100)
def _binpersid(m: Machine) -> None:
    m.stack[-1] = m.refer(m.stack[-1])


# What reaches outside.


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
"""Every opcode that is understood, STOP excepted."""
