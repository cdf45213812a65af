"""Reads a pickle of very many similar records into arrays: the result is a graph of numbered nodes, without Python
objects.

The Python interpreter of pickles takes half a microsecond per opcode, and the metadata of a large checkpoint has
millions of opcodes. `scan.c` runs the opcodes on numbers, in a limited amount of memory. `scan.c` supports only the
opcodes of checkpoint metadata. If a pickle has further opcodes or a fault, or the compiled library is missing, the
Python interpreter reads the pickle instead. Before the graph is returned, its calls, classes and names are checked as
the interpreter checks them.
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
"""Number of the node that represents None."""
_SMALL, _NO_STATE = 1 << 31, (1 << 31) - 1
_FLOAT_FORM = np.dtype(">f8")
_DEEPEST = 50
_MAX_CALLS = 4096
"""Maximum number of globals in a pickle, and maximum number of calls other than of `torch.Size`."""

_BLOCK = 1 << 15
"""Number of tuples that are checked together, so that the check needs less memory than the graph."""

References: TypeAlias = NDArray[np.uint32]
"""Array of references: each is the number of a node, or a small integer, marked by the highest bit."""


class Unread(Exception):
    """Raised if neither the scan nor its caller can use a pickle; the Python interpreter must read the pickle
    instead.
    """


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
    """Return the compiled library; None if it was not built, or does not match its source `scan.c`."""
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
    """Many tuples of non-negative integers, stored in two arrays."""

    dims: References
    """Length of each tuple."""
    counts: NDArray[np.int64]
    """The integers of all tuples, in one array."""

    def rows(self) -> list[tuple[int, ...]]:
        """Return the tuples as Python tuples."""
        tuples: list[tuple[int, ...]] = [()] * len(self.dims)
        begins = self.dims.cumsum(dtype=np.int64) - self.dims
        for dims in np.flatnonzero(np.bincount(self.dims)).tolist():
            positions = np.flatnonzero(self.dims == dims)
            rows = self.counts[begins[positions][:, None] + np.arange(dims)]
            are_one = (rows == rows[0]).all()  # most chunks have the same shape
            rows_of_length = repeat(tuple(rows[0].tolist())) if are_one else zip(*rows.T.tolist(), strict=True)
            if len(positions) == len(tuples):
                return list(islice(rows_of_length, len(tuples)))
            for at, row in zip(positions.tolist(), rows_of_length, strict=False):
                tuples[at] = row
        return tuples


@contextmanager
def scan_pickle(data: bytes, allowed: Names, memory: int) -> Iterator[Graph]:
    """Scan a pickle; return a context manager whose value is the pickle's graph.

    Args:
        data: bytes that begin with a pickle.
        allowed: table of the globals (classes and functions) that the pickle may name.
        memory: maximum number of bytes that the scan may allocate.

    Raises:
        Unread: if the scan cannot read this pickle, or the interpreter would refuse it.
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
    """The values of a pickle as numbered nodes, stored in arrays. The arrays belong to `scan.c`, which frees them at
    the end of the context.
    """

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
        """Node -> Python value, for globals and for results of calls."""
        self._texts: dict[int, str] = {}
        self._check()

    # These are the checks that the interpreter makes when it runs each opcode.

    def _check(self) -> None:
        names = self._nodes(_GLOBAL)
        if len(names) > _MAX_CALLS:
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
        are_sizes = self._mask(of_size)[functions]
        self._check_sizes(calls[are_sizes])
        other_calls = calls[~are_sizes].tolist()
        if len(other_calls) > _MAX_CALLS:
            raise Unread
        for call in other_calls:
            self.value(call)
        if self._machine.unsafe:
            raise Unread

    def _nodes(self, tag: int) -> NDArray[np.intp]:
        return np.flatnonzero(self._tag == tag)

    def _distinct(self, nodes: References) -> NDArray[np.intp]:
        """Return the distinct node numbers in ascending order, ten times faster than `np.unique`."""
        return np.flatnonzero(self._mask(nodes))

    def _mask(self, nodes: References | list[int]) -> NDArray[np.bool_]:
        """Return a boolean mask over all nodes of the graph, which is true for the given nodes."""
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
        arguments = self._parts[self._first[args]]
        if not self._are(arguments, _TUPLE):
            raise Unread
        tuples = self._distinct(arguments).astype(np.uint32)
        if (self._count[tuples] > MAX_DIMS).any():
            raise Unread
        for at in range(0, len(tuples), _BLOCK):
            self.integers(self.parts(tuples[at : at + _BLOCK]))

    # Methods of the graph that read values.

    def _are(self, references: References, tag: int) -> bool:
        return bool((references < _SMALL).all() and (self._tag[references] == tag).all())

    def text(self, reference: int) -> str:
        """Return the string of a node."""
        text = self._texts.get(reference)
        if text is None:
            if reference >= _SMALL or self._tag[reference] != _TEXT:
                raise Unread
            begin = int(self._first[reference])
            text = self._data[begin : begin + int(self._count[reference])].decode("utf-8", "surrogatepass")
            self._texts[reference] = text
        return text

    def texts(self, references: References) -> list[str]:
        """Return the strings of the given nodes; equal nodes get the same Python object."""
        if not self._are(references, _TEXT):
            raise Unread
        nodes = self._distinct(references)
        first, counts = self._first[nodes].tolist(), self._count[nodes].tolist()
        data, texts_by_node = self._data, self._texts
        for node, begin, count in zip(nodes.tolist(), first, counts, strict=True):
            if node not in texts_by_node:
                texts_by_node[node] = data[begin : begin + count].decode("utf-8", "surrogatepass")
        return list(map(texts_by_node.__getitem__, references.tolist()))

    def integers(self, references: References) -> NDArray[np.int64]:
        """Return the non-negative integers of the given nodes; raise Unread for any other value, also for a bool."""
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
        """Return, concatenated, the elements of tuples or lists, or the keys and values of dicts."""
        counts = self._count[nodes]
        ends = counts.cumsum(dtype=np.uint32)
        total = int(ends[-1]) if len(ends) else 0
        which = np.arange(total, dtype=np.uint32) + np.repeat(self._first[nodes] + counts - ends, counts)
        parts: References = self._parts[which]
        return parts

    def sizes(self, references: References) -> Sizes:
        """Return tuples of non-negative integers; the pickle contains each as a tuple or as a call of `torch.Size`."""
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
        """Return the elements of each list; raise Unread if lists that occur several times have too many elements in
        total.
        """
        if not self._are(references, _LIST) or self._count[references].sum(dtype=np.int64) > len(self._parts):
            raise Unread
        first, counts = self._first[references].tolist(), self._count[references].tolist()
        return [self._parts[begin : begin + count] for begin, count in zip(first, counts, strict=True)]

    def items(self, reference: int) -> tuple[References, References]:
        """Return the keys and values of a dict node."""
        if reference >= _SMALL or self._tag[reference] != _DICT:
            raise Unread
        begin = int(self._first[reference])
        pairs = self._parts[begin : begin + int(self._count[reference])]
        return pairs[::2], pairs[1::2]

    def are_of(self, references: References, classes: Sequence[Global]) -> NDArray[np.bool_]:
        """Return a mask of those nodes that are objects of one of the given classes, created without arguments."""
        names = [name for name, value in self._values.items() if type(value) is Global and value in classes]
        are_objects = references < _SMALL
        nodes = references[are_objects]
        is_name = self._mask(names)
        are_of_these = self._tag[nodes] == _OBJECT
        are_of_these[are_of_these] = is_name[self._first[nodes[are_of_these]]]
        are_objects[are_objects] = are_of_these
        return are_objects

    def fields(self, references: References, classes: Sequence[Global], *names: str) -> list[References]:
        """Return one column for each field name, from objects whose states are dicts; the value of a missing field is
        None.
        """
        if not self.are_of(references, classes).all():
            raise Unread
        states = self._count[references]
        if not self._are(states, _DICT):
            raise Unread
        first, counts = self._first[states], self._count[states]
        columns = [np.zeros(len(references), np.uint32) for _ in names]
        for at in range(0, int(counts.max(initial=0)), 2):
            present = (counts > at).nonzero()[0]
            begin = first[present] + np.uint32(at)
            keys, values = self._parts[begin], self._parts[begin + np.uint32(1)]
            for key in self._distinct(keys).tolist():
                if self._tag[key] == _TEXT and self.text(key) in names:
                    which = keys == key
                    columns[names.index(self.text(key))][present[which]] = values[which]
        return columns

    def values_alike(self, references: References) -> list[Any]:
        """Return the Python value of each node; equal objects of one class become a single Python object."""
        values_by_content: dict[tuple[Any, ...], Any] = {}
        values = []
        for reference in references.tolist():
            content = self._content(reference)
            if content not in values_by_content:
                values_by_content[content] = self.value(reference)
            values.append(values_by_content[content])
        return values

    def _content(self, reference: int) -> tuple[Any, ...]:
        if reference >= _SMALL or self._tag[reference] != _OBJECT:
            return (reference,)
        state = int(self._count[reference])
        if state >= _NO_STATE or self._tag[state] not in (_TUPLE, _DICT):
            return (reference,)
        begin, tag = int(self._first[state]), int(self._tag[state])
        return int(self._first[reference]), tag, self._parts[begin : begin + int(self._count[state])].tobytes()

    def value(self, reference: int, depth: int = 0, *, is_fixed: bool = False) -> Any:
        """Return the Python value of a node; raise Unread for a value that contains itself or is deeply nested.

        Args:
            reference: number of the node, or a small integer with the highest bit set.
            depth: nesting depth of the node in the value that is being built.
            is_fixed: whether to raise Unread for mutable values; set for arguments of calls, since later opcodes could
                change them.
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
            return self._call(reference, first, count, depth)
        if tag == _OBJECT:
            state = NOTHING if count == _NO_STATE else self.value(count, depth + 1)
            return Object(self._values[first], state=state, new=True)
        inner = [self.value(part, depth + 1, is_fixed=is_fixed) for part in self._parts[first : first + count].tolist()]
        if tag == _TUPLE:
            return tuple(inner)
        return inner if tag == _LIST else dict(zip(inner[::2], inner[1::2], strict=True))

    def _call(self, reference: int, function: int, args: int, depth: int) -> Any:
        arguments = self.value(args, depth + 1, is_fixed=True)
        try:
            self._values[reference] = self._machine.call(self._values[function], arguments)
        except (PickleFault, ValueError, OverflowError):
            raise Unread from None
        return self._values[reference]
