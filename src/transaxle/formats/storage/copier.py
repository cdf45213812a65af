"""The copier carries out lists of steps (reads, copies, hashes and writes) in one call of C code.

Each system call releases Python's interpreter lock and takes it again. If every block needed a system call, threads
would spend more time waiting for this lock than working. Therefore steps are collected first: reads of ranges, reads of
strided runs of equal length, strided copies and transposes, hashes, CRC-32, comparisons and writes. `copier.c` then
carries out a whole list without holding the lock. If a step fails in C (an error, a short read, a full disk), it is
repeated in Python, which raises the error. Without the compiled library all steps run in Python, with numpy, xxhash and
zlib.

A column slice of a matrix consists of a run of a few kB in each row: one step reads or copies the runs of all rows.
Runs of a single element, as in a transposed matrix, are read together with the bytes between them, and copied into
place in small square blocks. numpy would load each cache line many times for this.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cache, partial
from itertools import chain
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import xxhash

from transaxle.axes.geometry import Loop
from transaxle.errors import TransaxleError
from transaxle.spans import is_recording, span

if TYPE_CHECKING:
    from transaxle.formats.storage.storage import Handles

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
"""A one-dimensional numpy array of bytes."""

SOURCE = Path(__file__).with_name("copier.c")
LIBRARY = Path(__file__).with_name("libcopier.so")
_NUMBERS = 10
"""Number of integers that encode one step; see `transaxle_steps` in `copier.c`."""
_READ, _WRITE, _HASH, _SUM, _TRANSPOSE, _COPY, _COMPARE, _READ_AND_SUM, _READ_RUNS, _CALL = range(10)
_KINDS = "read", "write", "hash", "sum", "lay", "lay", "compare", "read and sum", "read"
"""Name of each kind of step in the timings of a run."""
_SIZES = 4, 4, 3, 2, None, None, 3, 4, 8
"""For each kind of step, the index of the integer that contains the step's number of bytes; None if no integer of the
step contains it.
"""
_Fallback = Callable[[], object]

_ELEMENTS = frozenset({1, 2, 4, 8})
"""Sizes in bytes of the elements that the transpose in C supports."""
_MIN_ROWS = 8
"""Minimum number of rows, and of columns, for a transpose in C; for fewer, numpy is as fast."""
_MIN_RUN = 16
"""Minimum number of bytes of a run that C copies; numpy copies shorter runs faster."""


class Steps:
    """A list of steps (reads, copies, hashes, writes …) of one thread, carried out in order.

    A step refers to memory without copying its content, and uses the content at the time when the step runs. Files stay
    open until the list has run or is cleared, or until the `with` block ends.

    Args:
        max_bytes: number of bytes after which `run_if_full` runs the list; 0 means that it runs the list at each call.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.size = 0
        """Number of bytes that the pending steps will read and write."""
        self._numbers = array("q")
        self._fallbacks: list[_Fallback] = []
        self._callbacks: list[tuple[int, Callable[[], object]]] = []
        """Callbacks as `(number of steps that must be done first, callback)`."""
        self._alive: list[object] = []
        """Objects that must stay alive until all pending steps are done."""
        self._files: dict[tuple[int, str], int] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def open_file(self, name: str, handles: Handles) -> int:
        """Open a file if it is not open, and return its descriptor; the file stays open until the list has run."""
        key = id(handles), name
        descriptor = self._files.get(key)
        if descriptor is None:
            if len(self._files) >= handles.at_once:
                self.run()
            descriptor = self._files[key] = self._open.enter_context(handles.use(name))
        return descriptor

    def read(
        self, fd: int, offset: int, view: memoryview, fallback: _Fallback, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Add a step that reads one range, or strided runs, of an open file.

        Args:
            fd: descriptor of the file to read.
            offset: file offset of the first byte to read.
            view: memory to read into: writable, contiguous and not empty. The first run is read into the beginning of
                the view, and all runs must fit.
            fallback: function that does the same read in Python.
            width: number of bytes of a run, if there are loops.
            loops: `(count, stride in the file, stride in the view)` in bytes, the outermost loop first.
        """
        if not loops:
            self._add(fallback, _READ, fd, offset, address(view), view.nbytes)
            self.size += view.nbytes
            return
        numbers, size = _in_line(loops), width * prod(count for count, _, _ in loops)
        self._alive.append(numbers)
        place = numbers.buffer_info()[0]
        self._add(fallback, _READ_RUNS, fd, offset, address(view), width, len(loops), place, 0, size)
        self.size += size

    def add_crc_share(self, view: memoryview, powers: Sequence[int]) -> array[int] | None:
        """Make the latest step, which is a strided read, also compute what its runs contribute to a CRC-32.

        Args:
            view: memory into which the latest step reads.
            powers: x**(8 * step in the file), modulo the CRC polynomial, for each loop of the read.

        Returns:
            An array of two numbers: the contribution, and a flag. After the steps have run, the first number is what
            the bytes of the runs contribute to the CRC-32 of all bytes up to the end of the last run (see `copier.c`).
            The second number is 1 if this contribution is known, otherwise 0. None if the latest step is not a strided
            read into this view.
        """
        kind, _, _, place, _, depth = self._numbers[-_NUMBERS : 6 - _NUMBERS] or (None,) * 6
        if (kind, place, depth) != (_READ_RUNS, address(view), len(powers)):
            return None
        result = array("I", (0, 0, *powers))
        self._alive.append(result)
        self._numbers[7 - _NUMBERS] = result.buffer_info()[0]
        return result

    def write(self, fd: int, offset: int, view: memoryview, fallback: _Fallback) -> None:
        """Add a step that writes a contiguous view, which is not empty, to an open file; the arguments are those of
        `read`.
        """
        self._add(fallback, _WRITE, fd, offset, read_address(view), view.nbytes)
        self.size += view.nbytes

    def hash(self, running: Running, view: memoryview) -> None:
        """Add a step that updates a running hash with the bytes of a contiguous view, which must not be empty."""
        fallback = partial(running.update, view)
        if isinstance(running, CompiledHash):
            self._add(fallback, _HASH, running.address, read_address(view), view.nbytes)
        else:
            self._add(fallback, _CALL + _HASH, view.nbytes)

    def sum(self, view: memoryview, crc: ctypes.c_uint32, crc32: Callable[[memoryview, int], int]) -> None:
        """Add a step that updates a CRC-32; if the previous step reads the same bytes, the two steps are merged.

        Args:
            view: the bytes to add: writable, contiguous and not empty.
            crc: CRC-32 of the preceding bytes; changed when the step runs.
            crc32: function that computes the CRC-32 in Python.
        """

        def fallback() -> None:
            crc.value = crc32(view, crc.value)

        self._alive.append(crc)
        place, size = address(view), view.nbytes
        kind, *_, read_to, read_size = self._numbers[-_NUMBERS : 5 - _NUMBERS] or (None,) * 5
        if (kind, read_to, read_size) == (_READ, place, size):
            read = self._fallbacks[-1]

            def both() -> None:
                read()
                fallback()

            self._numbers[-_NUMBERS], self._numbers[5 - _NUMBERS] = _READ_AND_SUM, ctypes.addressof(crc)
            self._fallbacks[-1] = both
        else:
            self._add(fallback, _SUM, place, size, ctypes.addressof(crc))

    def scatter(self, source: Bytes, out: Bytes, at: int, width: int, loops: Sequence[Loop]) -> None:
        """Add a step that copies strided runs from one buffer to another buffer.

        Args:
            source: the buffer to copy from; the first run is at its start.
            out: the buffer to copy to.
            at: offset in `out` of the first run.
            width: number of bytes of a run.
            loops: `(count, stride in the source, stride in the target)` in bytes, the outermost loop first.
        """
        kind, numbers, around = _encode_scatter(source, out, at, width, loops)
        if around:
            array_of_loops = _in_line(around)
            self._alive.append(array_of_loops)
            numbers = (*numbers, array_of_loops.buffer_info()[0])
        self._add(partial(_scatter_by_numpy, source, out, at, width, loops), kind, *numbers)

    def compare(self, first: memoryview, second: memoryview, differ: Callable[[], object]) -> None:
        """Add a step that compares two buffers of equal size.

        Args:
            first: the first buffer, contiguous and not empty.
            second: the second buffer, contiguous and not empty.
            differ: function that is called if the buffers are not equal.
        """

        def fallback() -> None:
            if not same_bytes(first, second):
                differ()

        self._add(fallback, _COMPARE, read_address(first), read_address(second), first.nbytes)

    def call(self, function: _Fallback, kind: int = _COPY, size: int = 0) -> None:
        """Add a step that calls a Python function.

        Args:
            function: the function that carries out the step.
            kind: kind of the step, for timings.
            size: number of bytes that the step reads or writes.
        """
        self._add(function, _CALL + kind, size)
        self.size += size

    def then(self, call: Callable[[], object]) -> None:
        """Add a callback, which is called after the run if all steps added before it have succeeded."""
        self._callbacks.append((len(self._fallbacks), call))

    def run_if_full(self) -> None:
        """Run the pending steps if they read and write at least `max_bytes` bytes in total."""
        if self.size >= self.max_bytes:
            self.run()

    def run(self) -> None:
        """Run the pending steps, and clear the list.

        Raises:
            TransaxleError: if a step fails. After a failed step no later step runs, and only callbacks that depend on
                earlier steps are called.
        """
        try:
            self._carry_out()
            self._call(len(self._fallbacks))
        finally:
            self.clear()

    def clear(self) -> None:
        """Drop the pending steps without running them, and close their files."""
        self.size = 0
        self._numbers = array("q")
        for pending in (self._fallbacks, self._callbacks, self._alive, self._files):
            pending.clear()
        self._open.close()

    def _add(self, fallback: _Fallback, *numbers: int) -> None:
        self._numbers.extend((*numbers, *(0,) * (_NUMBERS - len(numbers))))
        self._fallbacks.append(fallback)

    def _carry_out(self) -> None:
        compiled = load_steps()
        place, total, finished = self._numbers.buffer_info()[0], len(self._fallbacks), 0
        one_by_one = is_recording()
        while finished < total:
            # if timings are recorded, steps run one by one, so that each step is timed
            stop = finished + 1 if one_by_one else total
            with self._span(finished):
                done = finished if compiled is None else compiled(place, stop, finished)
                if done < stop:
                    self._fall_back(done)
                    done += 1
            finished = done

    def _fall_back(self, number: int) -> None:
        try:
            self._fallbacks[number]()
        except BaseException:
            with suppress(TransaxleError):  # if several steps fail, only the first error is raised
                self._call(number)
            raise

    def _call(self, finished: int) -> None:
        """Call the callbacks that depend only on the first `finished` steps."""
        for number, call in self._callbacks:
            if number <= finished:
                call()

    def _span(self, number: int) -> AbstractContextManager[None]:
        first = _NUMBERS * number
        kind = self._numbers[first]
        size = _SIZES[kind] if kind < _CALL else 1
        return span(_KINDS[kind % _CALL], None if size is None else self._numbers[first + size] or None)


READING, WRITING = _READ, _WRITE
"""Kinds of steps that call Python functions, for the timings."""


@cache
def load_steps() -> Callable[..., int] | None:
    """Return the compiled function that runs steps; None if it was not built, or does not match its source
    `copier.c`.
    """
    return compiled_function("transaxle_steps", (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), ctypes.c_int64)


class Running(Protocol):
    """A running xxh3-128 hash."""

    def update(self, data: memoryview, /) -> None:
        """Update the hash with a buffer of bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far, in hex."""


_HashState = ctypes.c_uint64 * 51
"""C struct `hash` of `copier.c`: eight sums; counts of bytes, stripes and buffered bytes; the last stripe; the
buffer."""
_TOTAL, _BUFFER = 8, 11 * 8 + 64
_SHORT = 240
"""Maximum number of bytes for which XXH3 uses a separate algorithm for short inputs."""


class CompiledHash:
    """A running hash that compiled steps can update."""

    def __init__(self, update: Callable[..., None], digest: Callable[..., None]) -> None:
        self._update, self._digest = update, digest
        self._state = _HashState()
        self.address = ctypes.addressof(self._state)
        """Memory address of the hash state."""

    def update(self, data: memoryview) -> None:
        """Update the hash with a buffer of bytes."""
        if data.nbytes:
            self._update(self.address, read_address(data), data.nbytes)

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far, in hex."""
        if self._state[_TOTAL] <= _SHORT:
            return xxhash.xxh3_128_hexdigest(bytes(self._state)[_BUFFER : _BUFFER + self._state[_TOTAL]])
        words = (ctypes.c_uint64 * 2)()
        self._digest(self.address, ctypes.addressof(words))
        return f"{words[0]:016x}{words[1]:016x}"


def new_hash() -> Running:
    """Return a new running hash, computed in C if possible."""
    compiled = load_hash()
    return xxhash.xxh3_128() if compiled is None else CompiledHash(*compiled)


@cache
def load_hash() -> tuple[Callable[..., None], Callable[..., None]] | None:
    """Return the compiled functions `(update, digest)` of XXH3; None if they were not built, or do not match their
    source.
    """
    update = compiled_function("transaxle_hash", (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None)
    digest = compiled_function("transaxle_hash_of", (ctypes.c_void_p, ctypes.c_void_p), None)
    return None if update is None or digest is None or sys.byteorder != "little" else (update, digest)


def read_strided(
    read_one: Callable[[int, memoryview], object], offset: int, view: memoryview, width: int, loops: Sequence[Loop]
) -> None:
    """Read strided runs one by one in Python; without loops, there is only one range to read.

    Args:
        read_one: function `read_one(offset, view)` that reads one range of the file.
        offset: file offset of the first run.
        view: memory to read into; see `Steps.read`.
        width: number of bytes of a run.
        loops: counts and strides of the runs; see `Steps.read`.
    """
    if not loops:
        read_one(offset, view)
        return
    (count, step, into), *inner = loops
    for number in range(count):
        target = view[number * into :]
        read_strided(read_one, offset + number * step, target if inner else target[:width], width, inner)


def runs_in(view: memoryview, width: int, loops: Sequence[Loop]) -> int:
    """Return the number of runs of a strided read (see `Steps.read`); 0 if the runs are empty.

    Raises:
        ValueError: if the runs do not fit into the view.
    """
    total = prod(count for count, _, _ in loops) if width else 0
    end = sum((count - 1) * max(step, 0) for count, _, step in loops) + width
    if total and (end > view.nbytes or any(step < 0 for _, _, step in loops)):
        raise ValueError(f"runs of {width} bytes that end at {end} do not fit into {view.nbytes}")
    return total


def scatter(source: Bytes, out: Bytes, at: int, width: int, loops: Sequence[Loop]) -> None:
    """Carry out a strided copy from one buffer to another; see `Steps.scatter`."""
    steps = Steps()
    steps.scatter(source, out, at, width, loops)
    steps.run()


def _scatter_by_numpy(source: Bytes, out: Bytes, at: int, width: int, loops: Sequence[Loop]) -> None:
    """Carry out a strided copy with numpy, in the widest words that divide all offsets and strides."""
    if not loops:
        out[at : at + width] = source[:width]
        return
    shape, sources, targets = ([loop[part] for loop in loops] for part in range(3))
    # Every offset, width and stride is a multiple of the word, so numpy can move up to 8 bytes at a time instead of
    # one.
    word = gcd(8, at, width, *sources, *targets)
    if width > word:
        shape.append(width // word)
        sources.append(word)
        targets.append(word)
    kind = np.dtype(f"u{word}")
    view: npt.NDArray[Any] = np.ndarray(shape, kind, source.data, 0, sources)
    into: npt.NDArray[Any] = np.ndarray(shape, kind, out.data, at, targets)
    into[...] = view


def _encode_scatter(
    buffer: Bytes, out: Bytes, at: int, width: int, loops: Sequence[Loop]
) -> tuple[int, tuple[int, ...], Sequence[Loop]]:
    """Return `(kind, integers, loops)` of the step for a strided copy; the last integer is replaced by the address of
    the loops.
    """
    by_numpy = _CALL + _COPY, (), ()
    ends = [width + sum((loop[0] - 1) * loop[side] for loop in loops) for side in (1, 2)]
    is_plain = buffer.flags.c_contiguous and out.flags.c_contiguous and buffer.ndim == out.ndim == 1
    if not is_plain or at < 0 or ends[0] > len(buffer) or at + ends[1] > len(out):
        return by_numpy
    if any(count < 1 or step < 0 or target_step < 0 for count, step, target_step in loops):
        return by_numpy
    source, target = buffer.ctypes.data, out.ctypes.data + at
    source_loop = next((number for number, loop in enumerate(loops) if loop[1] == width), None)
    target_loop = next((number for number, loop in enumerate(loops) if loop[2] == width), None)
    can_transpose = (
        width in _ELEMENTS and source_loop is not None and target_loop is not None and source_loop != target_loop
    )
    if can_transpose and min(loops[source_loop or 0][0], loops[target_loop or 0][0]) >= _MIN_ROWS:
        (columns, _, target_step), (rows, step, _) = loops[source_loop or 0], loops[target_loop or 0]
        outer_loops = [loop for number, loop in enumerate(loops) if number not in (source_loop, target_loop)]
        return _TRANSPOSE, (source, target, width, rows, columns, step, target_step, len(outer_loops)), outer_loops
    if width < _MIN_RUN:
        return by_numpy
    return _COPY, (source, target, width, len(loops)), loops


def same_bytes(first: bytes | memoryview, second: bytes | memoryview) -> bool:
    """Return whether two buffers have equal bytes; the operator `==` is fifty times slower for memoryviews."""
    return np.array_equal(np.frombuffer(first, np.uint8), np.frombuffer(second, np.uint8))


def address(view: memoryview) -> int:
    """Return the memory address of a view; the view must be writable, contiguous and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def read_address(view: memoryview) -> int:
    """Return the memory address of a view that may be read-only; nothing may be written to this address."""
    if not view.readonly:
        return address(view)

    return np.frombuffer(view, np.uint8).ctypes.data


def _in_line(loops: Iterable[Loop]) -> array[int]:
    """Return loops as one flat array of integers, as `copier.c` expects."""
    return array("q", chain.from_iterable(loops))


def compiled_function(name: str, arguments: Sequence[type], result: type | None) -> Callable[..., Any] | None:
    """Return a function of `copier.c` with its C types; None if the library is missing, not loadable, or out of date.

    Args:
        name: name of the C function.
        arguments: C types of the function's arguments.
        result: C type of the function's result; None for a void function.
    """
    try:
        library = ctypes.CDLL(str(LIBRARY))
        stamp = library.transaxle_stamp
        stamp.restype = ctypes.c_uint32
        if stamp() != zlib.crc32(SOURCE.read_bytes()):
            return None
        call = getattr(library, name)
    except (OSError, AttributeError):
        return None
    call.argtypes, call.restype = arguments, result
    return cast("Callable[..., Any]", call)
