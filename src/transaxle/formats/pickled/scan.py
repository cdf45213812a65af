"""A pickle of very many alike records as arrays: what its steps build, as nodes of a graph, without any object.

The interpreter takes half a microsecond a step, and a large checkpoint is described in millions of steps. `scan.c` does
the steps on numbers, in memory that is granted beforehand. It knows only those by which checkpoints are described; at
any other, at whatever is wrong, and where it was not compiled, there is no graph, and the interpreter reads the pickle.
Calls, classes and names are checked here by the interpreter's own rules before anybody sees the graph.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transaxle.formats.pickled.allowed import MEMBER, Names
from transaxle.formats.pickled.builders import MAX_DIMS, size
from transaxle.formats.pickled.descriptors import NOTHING, Global, Object, Persistent, PickleFault
from transaxle.formats.pickled.interpreter import Bounds, Machine

SOURCE = Path(__file__).with_name("scan.c")
LIBRARY = Path(__file__).with_name("libscan.so")
_CONSTANT, _TEXT, _INTEGER, _FLOAT, _TUPLE, _LIST, _DICT, _GLOBAL, _CALL, _OBJECT = range(10)
_CONSTANTS = None, False, True
NONE = 0
"""The node of None."""
_SMALL, _NO_STATE = 1 << 31, (1 << 31) - 1
_FLOAT_FORM = np.dtype(">f8")
_DEEPEST = 50
_MOST_CALLS = 4096
"""Cap on the names, and on the calls other than those of `torch.Size`."""

_BLOCK = 1 << 15
"""Tuples that are looked at together: the memory of very many would be more than that of the graph."""

References: TypeAlias = NDArray[np.uint32]
"""Small integers, with the highest bit set, and numbers of nodes."""


class Unread(Exception):
    """The graph is not what somebody looks for: the interpreter is to read the pickle."""


class _Arrays(ctypes.Structure):
    _fields_ = (
        ("tag", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("nodes", ctypes.c_int64),
        ("part_count", ctypes.c_int64),
        ("root", ctypes.c_uint32),
    )


@cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled scan; None if it was not built, cannot be loaded, or was built from another source."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.transaxle_stamp.restype = ctypes.c_uint32
        if library.transaxle_stamp() != zlib.crc32(SOURCE.read_bytes()):
            return None
        scan, free = library.transaxle_scan, library.transaxle_scan_free
    except (OSError, AttributeError):
        return None
    scan.argtypes = ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(_Arrays)
    free.argtypes, free.restype = (ctypes.POINTER(_Arrays),), None
    return library


class Sizes(NamedTuple):
    """Tuples of counts."""

    dims: References
    """How many each has."""
    counts: NDArray[np.int64]
    """All of them in a row."""

    def rows(self) -> list[tuple[int, ...]]:
        """Make the tuples."""
        found: list[tuple[int, ...]] = [()] * len(self.dims)
        begins = self.dims.cumsum(dtype=np.int64) - self.dims
        for dims in np.flatnonzero(np.bincount(self.dims)).tolist():
            which = np.flatnonzero(self.dims == dims)
            rows = self.counts[begins[which][:, None] + np.arange(dims)]
            are_one = (rows == rows[0]).all()  # as the shapes of chunks usually are
            made = repeat(tuple(rows[0].tolist())) if are_one else zip(*rows.T.tolist(), strict=True)
            if len(which) == len(found):
                return list(islice(made, len(found)))
            for at, row in zip(which.tolist(), made, strict=False):
                found[at] = row
        return found


@contextmanager
def scanned(data: bytes, allowed: Names, memory: int) -> Iterator[Graph]:
    """Scan a pickle, and lend its graph.

    Args:
        data: the pickle; what follows it is not looked at.
        allowed: names that it may use.
        memory: bytes that the scan may allocate.

    Raises:
        Unread: the scan does not read this pickle, or the interpreter would refuse it.
    """
    library = _library()
    arrays = _Arrays()
    if library is None or not library.transaxle_scan(data, len(data), memory, arrays):
        raise Unread
    try:
        yield Graph(data, arrays, allowed)
    finally:
        library.transaxle_scan_free(arrays)


def _view(place: int | None, count: int, kind: type[np.generic]) -> NDArray[Any]:
    if not place or not count:
        return np.empty(0, kind)
    octets = (ctypes.c_uint8 * (count * np.dtype(kind).itemsize)).from_address(place)
    return np.frombuffer(memoryview(octets), kind)


class Graph:
    """What the steps of a pickle build. Arrays are those of `scan.c`, and gone when the graph is given back."""

    def __init__(self, data: bytes, arrays: _Arrays, allowed: Names) -> None:
        self.root = arrays.root
        self._data = data
        self._allowed = allowed
        self._tag = _view(arrays.tag, arrays.nodes, np.uint8)
        self._first = _view(arrays.first, arrays.nodes, np.uint32)
        self._count = _view(arrays.count, arrays.nodes, np.uint32)
        self._parts = _view(arrays.parts, arrays.part_count, np.uint32)
        self._machine = Machine(b"", 0, Bounds(), allowed, Persistent)
        self._values: dict[int, Any] = {}
        """Globals and results of calls."""
        self._texts: dict[int, str] = {}
        self._check()

    # What the interpreter checks step by step.

    def _check(self) -> None:
        names = self._nodes(_GLOBAL)
        if len(names) > _MOST_CALLS:
            raise Unread
        for name, module, attribute in zip(names.tolist(), self._first[names], self._count[names], strict=True):
            self._values[name] = self._machine.find(self.text(int(module)), self.text(int(attribute)))
        for cls in self._distinct(self._first[self._nodes(_OBJECT)]).tolist():
            rule = self._rule(cls)
            if rule is None or rule is MEMBER or rule.build is not None:
                raise Unread
        calls = self._nodes(_CALL)
        functions = self._first[calls]
        of_size = [function for function in self._distinct(functions).tolist() if self._is_size(function)]
        are_sizes = self._marked(of_size)[functions]
        self._check_sizes(calls[are_sizes])
        others = calls[~are_sizes].tolist()
        if len(others) > _MOST_CALLS:
            raise Unread
        for call in others:
            self.value(call)
        if self._machine.unsafe:
            raise Unread

    def _nodes(self, tag: int) -> NDArray[np.intp]:
        return np.flatnonzero(self._tag == tag)

    def _distinct(self, nodes: References) -> NDArray[np.intp]:
        """Return the nodes without repetitions, which `np.unique` does in ten times the time."""
        return np.flatnonzero(self._marked(nodes))

    def _marked(self, nodes: References | list[int]) -> NDArray[np.bool_]:
        """Tell of every node whether it is one of these."""
        marks = np.zeros(len(self._tag), bool)
        marks[nodes] = True
        return marks

    def _rule(self, name: int) -> Any:
        value = self._values[name]
        return self._allowed.get((value.module, value.name)) if type(value) is Global else None

    def _is_size(self, function: int) -> bool:
        rule = self._rule(function)
        return rule is not None and rule.build is size

    def _check_sizes(self, calls: NDArray[np.intp]) -> None:
        args = self._count[calls]
        if not (self._count[args] == 1).all():
            raise Unread
        given = self._parts[self._first[args]]
        if not self._are(given, _TUPLE):
            raise Unread
        tuples = self._distinct(given).astype(np.uint32)
        if (self._count[tuples] > MAX_DIMS).any():
            raise Unread
        for at in range(0, len(tuples), _BLOCK):
            self.integers(self.parts(tuples[at : at + _BLOCK]))

    # Reading.

    def _are(self, references: References, tag: int) -> bool:
        return bool((references < _SMALL).all() and (self._tag[references] == tag).all())

    def text(self, reference: int) -> str:
        """Return a text."""
        found = self._texts.get(reference)
        if found is None:
            if reference >= _SMALL or self._tag[reference] != _TEXT:
                raise Unread
            begin = int(self._first[reference])
            found = self._data[begin : begin + int(self._count[reference])].decode("utf-8", "surrogatepass")
            self._texts[reference] = found
        return found

    def texts(self, references: References) -> list[str]:
        """Return texts; equal ones are one object."""
        if not self._are(references, _TEXT):
            raise Unread
        nodes = self._distinct(references)
        first, counts = self._first[nodes].tolist(), self._count[nodes].tolist()
        data, known = self._data, self._texts
        for node, begin, count in zip(nodes.tolist(), first, counts, strict=True):
            if node not in known:
                known[node] = data[begin : begin + count].decode("utf-8", "surrogatepass")
        return list(map(known.__getitem__, references.tolist()))

    def integers(self, references: References) -> NDArray[np.int64]:
        """Return counts; anything else, truths and negative numbers among it, is not read."""
        values = (references & np.uint32(_SMALL - 1)).astype(np.int64)
        are_large = references < _SMALL
        if are_large.any():
            nodes = references[are_large]
            if not self._are(nodes, _INTEGER):
                raise Unread
            values[are_large] = (self._first[nodes] | self._count[nodes].astype(np.uint64) << np.uint64(32)).view(
                np.int64
            )
        if (values < 0).any():
            raise Unread
        return values

    def parts(self, nodes: References) -> References:
        """Return the elements of tuples, or of lists, or the keys and values of dicts, one after the other."""
        counts = self._count[nodes]
        ends = counts.cumsum(dtype=np.uint32)
        total = int(ends[-1]) if len(ends) else 0
        which = np.arange(total, dtype=np.uint32) + np.repeat(self._first[nodes] + counts - ends, counts)
        parts: References = self._parts[which]
        return parts

    def sizes(self, references: References) -> Sizes:
        """Return the tuples of counts that are there by themselves, or given to `torch.Size`."""
        if (references >= _SMALL).any():
            raise Unread
        tuples = references.copy()
        are_calls = self._tag[tuples] == _CALL
        calls = tuples[are_calls]
        if not all(map(self._is_size, self._distinct(self._first[calls]).tolist())):
            raise Unread
        tuples[are_calls] = self._parts[self._first[self._count[calls]]]
        if not self._are(tuples, _TUPLE):
            raise Unread
        dims = self._count[tuples]
        if (dims > MAX_DIMS).any():
            raise Unread
        return Sizes(dims, self.integers(self.parts(tuples)))

    def lists(self, references: References) -> list[References]:
        """Return the elements of lists; ones that are shared by very many are not read."""
        if not self._are(references, _LIST) or self._count[references].sum(dtype=np.int64) > len(self._parts):
            raise Unread
        first, counts = self._first[references].tolist(), self._count[references].tolist()
        return [self._parts[begin : begin + count] for begin, count in zip(first, counts, strict=True)]

    def items(self, reference: int) -> tuple[References, References]:
        """Return the keys and values of a dict; keys are texts, or objects."""
        if reference >= _SMALL or self._tag[reference] != _DICT:
            raise Unread
        begin = int(self._first[reference])
        pairs = self._parts[begin : begin + int(self._count[reference])]
        return pairs[::2], pairs[1::2]

    def are_of(self, references: References, classes: Sequence[Global]) -> NDArray[np.bool_]:
        """Tell which are objects of one of these classes, made without arguments."""
        names = [name for name, value in self._values.items() if type(value) is Global and value in classes]
        are_objects = references < _SMALL
        nodes = references[are_objects]
        is_name = self._marked(names)
        are_of_these = self._tag[nodes] == _OBJECT
        are_of_these[are_of_these] = is_name[self._first[nodes[are_of_these]]]
        are_objects[are_objects] = are_of_these
        return are_objects

    def fields(self, references: References, classes: Sequence[Global], *names: str) -> list[References]:
        """Return columns of fields: of objects of these classes whose state is a dict; what is absent is None."""
        if not self.are_of(references, classes).all():
            raise Unread
        states = self._count[references]
        if not self._are(states, _DICT):
            raise Unread
        first, counts = self._first[states], self._count[states]
        columns = [np.zeros(len(references), np.uint32) for _ in names]
        for at in range(0, int(counts.max(initial=0)), 2):
            there = (counts > at).nonzero()[0]
            begin = first[there] + np.uint32(at)
            keys, values = self._parts[begin], self._parts[begin + np.uint32(1)]
            for key in self._distinct(keys).tolist():
                if self._tag[key] == _TEXT and self.text(key) in names:
                    which = keys == key
                    columns[names.index(self.text(key))][there[which]] = values[which]
        return columns

    def values_alike(self, references: References) -> list[Any]:
        """Return what the interpreter makes of each; objects of one class whose states have the same parts are one."""
        known: dict[tuple[Any, ...], Any] = {}
        found = []
        for reference in references.tolist():
            content = self._content(reference)
            if content not in known:
                known[content] = self.value(reference)
            found.append(known[content])
        return found

    def _content(self, reference: int) -> tuple[Any, ...]:
        if reference >= _SMALL or self._tag[reference] != _OBJECT:
            return (reference,)
        state = int(self._count[reference])
        if state >= _NO_STATE or self._tag[state] not in (_TUPLE, _DICT):
            return (reference,)
        begin, tag = int(self._first[state]), int(self._tag[state])
        return int(self._first[reference]), tag, self._parts[begin : begin + int(self._count[state])].tobytes()

    def value(self, reference: int, depth: int = 0, *, is_fixed: bool = False) -> Any:
        """Return what the interpreter makes of a node; what holds itself, or is nested deeply, is not read.

        Args:
            reference: the node.
            depth: of what it is a part of.
            is_fixed: only what no later step can change is read, as for the arguments of a call.
        """
        if reference >= _SMALL:
            return reference - _SMALL
        if reference in self._values:
            return self._values[reference]
        tag, first, count = int(self._tag[reference]), int(self._first[reference]), int(self._count[reference])
        if depth > _DEEPEST or (is_fixed and tag in (_LIST, _DICT, _OBJECT)):
            raise Unread
        if tag == _CONSTANT:
            return _CONSTANTS[reference]
        if tag == _TEXT:
            return self.text(reference)
        if tag == _INTEGER:
            return int(np.uint64(first | count << 32).astype(np.int64))
        if tag == _FLOAT:
            return float(np.frombuffer(self._data, _FLOAT_FORM, 1, first)[0])
        if tag == _CALL:
            return self._called(reference, first, count, depth)
        if tag == _OBJECT:
            state = NOTHING if count == _NO_STATE else self.value(count, depth + 1)
            return Object(self._values[first], state=state, new=True)
        inner = [self.value(part, depth + 1, is_fixed=is_fixed) for part in self._parts[first : first + count].tolist()]
        if tag == _TUPLE:
            return tuple(inner)
        return inner if tag == _LIST else dict(zip(inner[::2], inner[1::2], strict=True))

    def _called(self, reference: int, function: int, args: int, depth: int) -> Any:
        given = self.value(args, depth + 1, is_fixed=True)
        try:
            self._values[reference] = self._machine.call(self._values[function], given)
        except (PickleFault, ValueError, OverflowError):
            raise Unread from None
        return self._values[reference]
