"""The machine that runs a pickle: a stack, marks, a memo, and a budget.

It offers the steps what they need and nothing else: bytes of the pickle, names by table, calls that only describe.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from transaxle.formats.pickled.allowed_globals.allowed import MEMBER, Names
from transaxle.formats.pickled.allowed_globals.builders import Build
from transaxle.formats.pickled.columns import Remembered, Run
from transaxle.formats.pickled.descriptors import NOTHING, Global, Key, Object
from transaxle.formats.pickled.fault import PickleEnds, TakenApart, malformed

_MIB = 1 << 20
TOO_MUCH = "it builds more objects than any real checkpoint"
_MEMO = 2**32
_NESTED_CALLS = 8
_SHOWN = 200
_MOST = 100
_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Names that modules had in Python 2, which protocol 2 still writes."""

PersistentId = Callable[[object], object]
"""Resolves a persistent id to the value in its place; raises PickleFault."""


class Bounds(msgspec.Struct, frozen=True):
    """Caps on what a pickle may cost."""

    size: int = 256 * _MIB
    """Bytes of the pickle."""
    memory: int = 768 * _MIB
    """Bytes, estimated, of everything it builds."""


class Memo(dict[int, Any]):
    """What a pickle remembers, by number; what runs remember is made when it is asked for.

    Attributes:
        absent: how many things are remembered that are not in the dict.
        is_numbered: the pickle itself gives the numbers, so that they may have gaps, and may be given again.
    """

    def __init__(self, absent: int = 0) -> None:
        super().__init__()
        self.absent = absent
        self.is_numbered = False
        self._tangled: int | None = None
        self._begins: list[int] = []
        self._parts: list[Remembered] = []

    @property
    def end(self) -> int:
        """The next number, where the pickle gives none."""
        return len(self) + self.absent

    @property
    def plain_end(self) -> int:
        """What is remembered below this number is there, or is made without anything else that is remembered."""
        return self.end if self._tangled is None else self._tangled

    def extend(self, part: Remembered) -> None:
        """Remember what a run does, under the next numbers."""
        if self._tangled is None and part.refers:
            self._tangled = self.end
        self._begins.append(self.end)
        self._parts.append(part)
        self.absent += len(part)

    def is_changed(self) -> bool:
        """Tell whether something that a run remembered has been changed since."""
        return any(part.is_changed() for part in self._parts)

    def gives_text(self, number: int) -> bool:
        """Tell whether a run remembered a text here."""
        at = bisect_right(self._begins, number) - 1
        part = self._parts[at] if at >= 0 else None
        return part is not None and number - self._begins[at] < len(part) and part.is_text(number - self._begins[at])

    def __missing__(self, number: int) -> Any:
        at = bisect_right(self._begins, number) - 1
        if at < 0 or number - self._begins[at] >= len(self._parts[at]):
            raise KeyError(number)
        return self._parts[at][number - self._begins[at]]


class Machine:
    """The state of one run.

    Attributes:
        begin: position of the step being done.
        at: position of the next byte.
        unsafe: names that are not allowed -> position of their first use.
        protocol: what the pickle says.
        left: estimated bytes that may still be built.
        limit: position that it must not reach.
        histories: what builders keep of earlier calls, by function; see `repeats`.
        finds_runs: those builders may read records as columns.
        has_runs: they have.
        loose_runs: how many of these are in no list or dict yet.
        shared: objects that stand for many that are alike.
    """

    def __init__(self, data: bytes, start: int, bounds: Bounds, allowed: Names, persistent: PersistentId) -> None:
        self.data = data
        self.begin = self.at = start
        self.protocol = 0
        self.unsafe: dict[str, int] = {}
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo = Memo()
        self.left = bounds.memory
        self.limit = start + bounds.size
        self.histories: dict[Global, Any] = {}
        self.finds_runs = True
        self.has_runs = False
        self.loose_runs = 0
        self.shared: list[Object] = []
        self._allowed = allowed
        self._persistent = persistent
        self._nested = 0

    def charge(self, amount: int) -> None:
        """Subtract estimated bytes from the budget.

        Raises:
            PickleFault: CORRUPT if it is used up.
        """
        self.left -= amount
        if self.left < 0:
            raise malformed(TOO_MUCH)

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
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
        """Return the next byte as a number."""
        value = self.data[self.at]
        self.at += 1
        return value

    def number(self, form: struct.Struct) -> Any:
        """Return the next number of fixed size."""
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def line(self) -> bytes:
        """Return the bytes up to the end of the line, without it."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            self.at = len(self.data)
            raise PickleEnds("it ends in the middle of a line")
        data = self.data[self.at : end]
        self.at = end + 1
        self.charge(len(data))
        return data

    def text(self, octets: bytes) -> str:
        """Decode a text; one that is not ASCII may take four times its bytes."""
        text = octets.decode("utf-8", "surrogatepass")
        if len(text) != len(octets):
            self.charge(4 * len(text))
        return text

    def since_mark(self) -> list[Any]:
        """Return the items pushed on the stack since the last mark."""
        if not self.outer:
            raise malformed("it refers to a mark that was not set")
        items = self.stack
        self.stack = self.outer.pop()
        self.charge(8 * len(items))
        return items

    def find(self, module: str, name: str) -> Any:
        """Return the representation of a global; a name that is not allowed is noted, and represented by itself."""
        module = _PYTHON2.get(module, module)
        rule = self._allowed.get((module, name))
        if rule is None:
            if len(self.unsafe) < _MOST:
                shown = f"{module[:_SHOWN]}.{name[:_SHOWN]}"
                self.unsafe.setdefault(shown.encode("unicode_escape").decode(), self.begin)
            return Global(module, name)
        return Global(module, name) if rule.value is NOTHING else rule.value

    def call(self, function: object, args: object, *, new: bool = False) -> Any:
        """Return a description of the result of calling a global.

        Raises:
            PickleFault: CORRUPT if it is no global, or cannot take these arguments.
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
        """Evaluate `getattr(Class, "method")`: the bound method must be in the table under its qualified name."""
        if len(args) != 2 or type(args[0]) is not Global or type(args[1]) is not str:
            raise malformed("it takes an attribute of something that is not a class")
        self.charge(len(args[0].name) + len(args[1]))
        return self.find(args[0].module, f"{args[0].name}.{args[1]}")

    def is_inert(self, function: Global, builders: Collection[Build]) -> bool:
        """Tell whether calling a global only describes the call, or is done by one of these builders."""
        rule = self._allowed.get((function.module, function.name))
        return rule is not None and rule is not MEMBER and (rule.build is None or rule.build in builders)

    def within(self, data: bytes, known: Mapping[int, Any]) -> Machine:
        """Return a machine for other bytes, with the same names, which remembers as many things, and knows a few."""
        inner = Machine(data, 0, Bounds(), self._allowed, self._persistent)
        inner.memo.update(known)
        inner.memo.absent = self.memo.end - len(known)
        inner.finds_runs = False
        return inner

    def settled(self, items: list[Any]) -> list[Any]:
        """Return what a step adds to the container on top of the stack, and note which runs are among it.

        Raises:
            TakenApart: one is in the wrong place.
        """
        if not self.loose_runs:
            return items
        kind = type(self.stack[-1])
        for at, each in enumerate(items):
            if type(each) is Run:
                before = items[at - 1] if at % 2 and kind is dict else None
                if kind is not list and (type(before) is not Key or before.value is not each):
                    raise TakenApart
                self.loose_runs -= 1
            elif type(each) is Key and kind is not dict:
                raise TakenApart
        return items

    def as_one(self) -> None:
        """Note that a step takes single records: it cannot be done after runs.

        Raises:
            TakenApart: there are some.
        """
        if self.has_runs:
            raise TakenApart

    def refer(self, pid: object) -> Any:
        """Resolve a persistent id."""
        return self._persistent(pid)

    def remember(self, index: int) -> None:
        """Store the top of the stack in the memo, under a number that the pickle gives."""
        if not 0 <= index < _MEMO:
            raise malformed("a reference is out of range")
        memo = self.memo
        if memo.absent:
            raise TakenApart
        memo.is_numbered = True
        memo[index] = self.stack[-1]
