"""The copier: lists of transfers between files and memory, carried out together.

Reading gives the interpreter lock away and takes it back, and threads that do so for every block wait for one another
longer than Python computes. So what is done to a file is listed first: ranges are read, and runs of equal length, each
into its place; runs are copied or transposed; bytes are hashed, summed up, compared and written. `copier.c` carries a
whole list out while the lock is away. A step that it cannot do at once (an error, a short read, a full disk) is done
in the ordinary way, which says what is wrong; so are all steps where nothing was compiled, by numpy, xxhash and zlib.

A column cut of a matrix is a run of a few kB in each of its rows: they are one step. Runs of a single element, as those
of a transposed matrix, are read together with the bytes between them, and put into their places in memory tile by tile,
where numpy would fetch every line of memory again and again.
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
"""One-dimensional."""

SOURCE = Path(__file__).with_name("copier.c")
LIBRARY = Path(__file__).with_name("libcopier.so")
_NUMBERS = 10
"""Numbers that say what a step is; see `transaxle_steps`."""
_READ, _WRITE, _HASH, _SUM, _TRANSPOSE, _COPY, _COMPARE, _READ_AND_SUM, _READ_RUNS, _CALL = range(10)
_KINDS = "read", "write", "hash", "sum", "lay", "lay", "compare", "read and sum", "read"
"""What is done in each, as traces call it."""
_SIZES = 4, 4, 3, 2, None, None, 3, 4, 8
"""Which of their numbers is that of the bytes."""
_Again = Callable[[], object]

_ELEMENTS = frozenset({1, 2, 4, 8})
"""Bytes of elements that can be transposed."""
_FEWEST = 8
"""Rows and columns that a transpose has at least; numpy is as fast with fewer."""
_WIDE = 16
"""Bytes of a run that is copied as such; numpy is faster with shorter ones."""


class Steps:
    """Transfers of one thread, carried out in the order in which they were listed.

    Memory is named, not copied: what a step reads is what lies there when its turn comes. Files stay open until the
    list is carried out or forgotten, which is done where a `with` block is left.

    Args:
        most: bytes that are worth one call; 0: each block is carried out at once.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.size = 0
        """Bytes read and written by what is listed."""
        self._numbers = array("q")
        self._again: list[_Again] = []
        self._then: list[tuple[int, Callable[[], object]]] = []
        """What is called, and how many steps must be done for it."""
        self._kept: list[object] = []
        """What must not be freed before the steps are done."""
        self._files: dict[tuple[int, str], int] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def opened(self, name: str, handles: Handles) -> int:
        """Return the descriptor of a file, which stays open until the list is carried out."""
        key = id(handles), name
        descriptor = self._files.get(key)
        if descriptor is None:
            if len(self._files) >= handles.at_once:
                self.run()
            descriptor = self._files[key] = self._open.enter_context(handles.use(name))
        return descriptor

    def read(
        self, fd: int, offset: int, view: memoryview, again: _Again, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Read bytes of an open file.

        Args:
            fd: its descriptor.
            offset: the first byte.
            view: where they go: writable, contiguous and not empty. Of runs: it begins with the first run's place, and
                no run's place leaves it.
            again: reads them in the ordinary way.
            width: bytes of a run, where there are loops.
            loops: `(count, step in the file, step in the view)` in bytes, the outermost first.
        """
        if not loops:
            self._add(again, _READ, fd, offset, address(view), view.nbytes)
            self.size += view.nbytes
            return
        numbers, size = _in_line(loops), width * prod(count for count, _, _ in loops)
        self._kept.append(numbers)
        place = numbers.buffer_info()[0]
        self._add(again, _READ_RUNS, fd, offset, address(view), width, len(loops), place, 0, size)
        self.size += size

    def share(self, view: memoryview, powers: Sequence[int]) -> array[int] | None:
        """Sum up the runs which the latest step reads, each while it is in the cache.

        Args:
            view: where that step puts them.
            powers: x**(8 * step in the file) of each of their loops, modulo the polynomial.

        Returns:
            What will be in its two first numbers when the steps are done: their share in the CRC-32 of the bytes up to
            the last run's end (see `copier.c`), and 1 if it is known, else 0. None where that step does something else.
        """
        kind, _, _, place, _, depth = self._numbers[-_NUMBERS : 6 - _NUMBERS] or (None,) * 6
        if (kind, place, depth) != (_READ_RUNS, address(view), len(powers)):
            return None
        found = array("I", (0, 0, *powers))
        self._kept.append(found)
        self._numbers[7 - _NUMBERS] = found.buffer_info()[0]
        return found

    def write(self, fd: int, offset: int, view: memoryview, again: _Again) -> None:
        """Write bytes to an open file: contiguous and not empty; otherwise as `read`."""
        self._add(again, _WRITE, fd, offset, address_to_read(view), view.nbytes)
        self.size += view.nbytes

    def hash(self, running: Running, view: memoryview) -> None:
        """Hash bytes, contiguous and not empty, which come next."""
        again = partial(running.update, view)
        if isinstance(running, CompiledHash):
            self._add(again, _HASH, running.address, address_to_read(view), view.nbytes)
        else:
            self._add(again, _CALL + _HASH, view.nbytes)

    def sum(self, view: memoryview, crc: ctypes.c_uint32, crc32: Callable[[memoryview, int], int]) -> None:
        """Add bytes to a CRC-32: in the step before, if that reads them.

        Args:
            view: the bytes: writable, contiguous and not empty.
            crc: that of the bytes before them.
            crc32: does it in the ordinary way.
        """

        def again() -> None:
            crc.value = crc32(view, crc.value)

        self._kept.append(crc)
        place, size = address(view), view.nbytes
        kind, *_, read_to, read_size = self._numbers[-_NUMBERS : 5 - _NUMBERS] or (None,) * 5
        if (kind, read_to, read_size) == (_READ, place, size):
            read = self._again[-1]

            def both() -> None:
                read()
                again()

            self._numbers[-_NUMBERS], self._numbers[5 - _NUMBERS] = _READ_AND_SUM, ctypes.addressof(crc)
            self._again[-1] = both
        else:
            self._add(again, _SUM, place, size, ctypes.addressof(crc))

    def lay(self, held: Bytes, out: Bytes, at: int, width: int, loops: Sequence[Loop]) -> None:
        """Copy runs from one buffer to another.

        Args:
            held: the source, from the first run on.
            out: the target.
            at: byte of the target at which the first run goes.
            width: bytes of a run.
            loops: `(count, step in the source, step in the target)` in bytes, the outermost first.
        """
        kind, numbers, around = _how_to_lay(held, out, at, width, loops)
        if around:
            array_of_loops = _in_line(around)
            self._kept.append(array_of_loops)
            numbers = (*numbers, array_of_loops.buffer_info()[0])
        self._add(partial(_lay, held, out, at, width, loops), kind, *numbers)

    def compare(self, one: memoryview, other: memoryview, differ: Callable[[], object]) -> None:
        """Compare as many bytes.

        Args:
            one: contiguous and not empty.
            other: likewise.
            differ: called where they are not equal.
        """

        def again() -> None:
            if not same_bytes(one, other):
                differ()

        self._add(again, _COMPARE, address_to_read(one), address_to_read(other), one.nbytes)

    def call(self, function: _Again, kind: int = _COPY, size: int = 0) -> None:
        """Call a function of Python that does a step.

        Args:
            function: does it.
            kind: what step it is, for traces.
            size: bytes that it reads or writes.
        """
        self._add(function, _CALL + kind, size)
        self.size += size

    def then(self, call: Callable[[], object]) -> None:
        """Let something be called when the list is over, if all that is in it so far is done."""
        self._then.append((len(self._again), call))

    def breathe(self) -> None:
        """Carry out what is listed, if it is enough for one call."""
        if self.size >= self.most:
            self.run()

    def run(self) -> None:
        """Carry out what is listed, and forget it.

        Raises:
            TransaxleError: what a step raises that is done again. Those after it are not done; what waited only for
                those before it is called.
        """
        try:
            self._carry_out()
            self._call(len(self._again))
        finally:
            self.forget()

    def forget(self) -> None:
        """Forget what is listed."""
        self.size = 0
        self._numbers = array("q")
        for each in (self._again, self._then, self._kept, self._files):
            each.clear()
        self._open.close()

    def _add(self, again: _Again, *numbers: int) -> None:
        self._numbers.extend((*numbers, *(0,) * (_NUMBERS - len(numbers))))
        self._again.append(again)

    def _carry_out(self) -> None:
        compiled = load_steps()
        place, total, finished = self._numbers.buffer_info()[0], len(self._again), 0
        apart = is_recording()
        while finished < total:
            stop = finished + 1 if apart else total  # a trace says how long each step takes
            with self._span(finished):
                reached = finished if compiled is None else compiled(place, stop, finished)
                if reached < stop:
                    self._do_again(reached)
                    reached += 1
            finished = reached

    def _do_again(self, number: int) -> None:
        try:
            self._again[number]()
        except BaseException:
            with suppress(TransaxleError):  # the first error is the one that counts
                self._call(number)
            raise

    def _call(self, finished: int) -> None:
        """Call what waited for the first steps alone."""
        for number, call in self._then:
            if number <= finished:
                call()

    def _span(self, number: int) -> AbstractContextManager[None]:
        first = _NUMBERS * number
        kind = self._numbers[first]
        size = _SIZES[kind] if kind < _CALL else 1
        return span(_KINDS[kind % _CALL], None if size is None else self._numbers[first + size] or None)


READING, WRITING = _READ, _WRITE
"""Kinds of steps that Python does."""


@cache
def load_steps() -> Callable[..., int] | None:
    """Return the compiled function; None if it was not built, cannot be loaded, or was built from another source."""
    return compiled_function("transaxle_steps", (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), ctypes.c_int64)


class Running(Protocol):
    """A hash of the bytes so far: XXH3 of 128 bits."""

    def update(self, data: memoryview, /) -> None:
        """Take the bytes that come next."""

    def hexdigest(self) -> str:
        """Return the hash, in hex."""


_OF_STATE = ctypes.c_uint64 * 51
"""`hash` of copier.c: eight sums, how many bytes, stripes and bytes in the buffer, the last stripe, the buffer."""
_TOTAL, _BUFFER = 8, 11 * 8 + 64
_SHORT = 240
"""Bytes that xxhash hashes in another way."""


class CompiledHash:
    """A hash that the compiled steps can take bytes into."""

    def __init__(self, update: Callable[..., None], digest: Callable[..., None]) -> None:
        self._update, self._digest = update, digest
        self._state = _OF_STATE()
        self.address = ctypes.addressof(self._state)
        """Where the state is."""

    def update(self, data: memoryview) -> None:
        """Take the bytes that come next."""
        if data.nbytes:
            self._update(self.address, address_to_read(data), data.nbytes)

    def hexdigest(self) -> str:
        """Return the hash, in hex."""
        if self._state[_TOTAL] <= _SHORT:
            return xxhash.xxh3_128_hexdigest(bytes(self._state)[_BUFFER : _BUFFER + self._state[_TOTAL]])
        found = (ctypes.c_uint64 * 2)()
        self._digest(self.address, ctypes.addressof(found))
        return f"{found[0]:016x}{found[1]:016x}"


def new_hash() -> Running:
    """Return the hash of no bytes."""
    compiled = load_hash()
    return xxhash.xxh3_128() if compiled is None else CompiledHash(*compiled)


@cache
def load_hash() -> tuple[Callable[..., None], Callable[..., None]] | None:
    """Return the compiled functions that take bytes and say what their hash is; otherwise as `load_steps`."""
    update = compiled_function("transaxle_hash", (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None)
    digest = compiled_function("transaxle_hash_of", (ctypes.c_void_p, ctypes.c_void_p), None)
    return None if update is None or digest is None or sys.byteorder != "little" else (update, digest)


def read_each(
    read_one: Callable[[int, memoryview], object], offset: int, view: memoryview, width: int, loops: Sequence[Loop]
) -> None:
    """Read runs one by one; without loops, one range.

    Args:
        read_one: reads a range from a byte of the file into a view.
        offset: see `Steps.read`, and so the others.
        view: see there.
        width: see there.
        loops: see there.
    """
    if not loops:
        read_one(offset, view)
        return
    (count, step, into), *inner = loops
    for number in range(count):
        room = view[number * into :]
        read_each(read_one, offset + number * step, room if inner else room[:width], width, inner)


def runs_in(view: memoryview, width: int, loops: Sequence[Loop]) -> int:
    """Return how many runs are read into a view, as `Steps.read` is told; 0 where they are empty.

    Raises:
        ValueError: where a run's place leaves the view.
    """
    total = prod(count for count, _, _ in loops) if width else 0
    end = sum((count - 1) * max(step, 0) for count, _, step in loops) + width
    if total and (end > view.nbytes or any(step < 0 for _, _, step in loops)):
        raise ValueError(f"runs of {width} bytes that end at {end} do not fit into {view.nbytes}")
    return total


def scatter(held: Bytes, out: Bytes, at: int, width: int, loops: Sequence[Loop]) -> None:
    """Copy runs from one buffer to another at once; see `Steps.lay`."""
    steps = Steps()
    steps.lay(held, out, at, width, loops)
    steps.run()


def _lay(held: Bytes, out: Bytes, at: int, width: int, loops: Sequence[Loop]) -> None:
    """Copy runs by numpy: one at once, several as the widest words that fit."""
    if not loops:
        out[at : at + width] = held[:width]
        return
    shape, sources, targets = ([loop[part] for loop in loops] for part in range(3))
    # Every offset, width and step is a multiple of the word; then numpy moves 8 bytes at a time instead of one.
    word = gcd(8, at, width, *sources, *targets)
    if width > word:
        shape.append(width // word)
        sources.append(word)
        targets.append(word)
    kind = np.dtype(f"u{word}")
    view: npt.NDArray[Any] = np.ndarray(shape, kind, held.data, 0, sources)
    into: npt.NDArray[Any] = np.ndarray(shape, kind, out.data, at, targets)
    into[...] = view


def _how_to_lay(
    held: Bytes, out: Bytes, at: int, width: int, loops: Sequence[Loop]
) -> tuple[int, tuple[int, ...], Sequence[Loop]]:
    """Return the kind of a step that copies runs, its numbers, and the loops that the last one of them points to."""
    by_numpy = _CALL + _COPY, (), ()
    ends = [width + sum((loop[0] - 1) * loop[side] for loop in loops) for side in (1, 2)]
    is_plain = held.flags.c_contiguous and out.flags.c_contiguous and held.ndim == out.ndim == 1
    if not is_plain or at < 0 or ends[0] > len(held) or at + ends[1] > len(out):
        return by_numpy
    if any(count < 1 or step < 0 or into < 0 for count, step, into in loops):
        return by_numpy
    source, target = held.ctypes.data, out.ctypes.data + at
    across = next((number for number, loop in enumerate(loops) if loop[1] == width), None)
    along = next((number for number, loop in enumerate(loops) if loop[2] == width), None)
    can_turn = width in _ELEMENTS and across is not None and along is not None and across != along
    if can_turn and min(loops[across or 0][0], loops[along or 0][0]) >= _FEWEST:
        (columns, _, into), (rows, step, _) = loops[across or 0], loops[along or 0]
        around = [loop for number, loop in enumerate(loops) if number not in (across, along)]
        return _TRANSPOSE, (source, target, width, rows, columns, step, into, len(around)), around
    if width < _WIDE:
        return by_numpy
    return _COPY, (source, target, width, len(loops)), loops


def same_bytes(one: bytes | memoryview, other: bytes | memoryview) -> bool:
    """Tell whether two buffers hold the same bytes; `==` takes fifty times as long where one is a view."""
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def address(view: memoryview) -> int:
    """Return where the bytes of a view are in memory. It must be writable, contiguous and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def address_to_read(view: memoryview) -> int:
    """Return the same of a view that need not be writable: nobody may write there."""
    if not view.readonly:
        return address(view)

    return np.frombuffer(view, np.uint8).ctypes.data


def _in_line(loops: Iterable[Loop]) -> array[int]:
    """Return the numbers of loops as `copier.c` takes them."""
    return array("q", chain.from_iterable(loops))


def compiled_function(name: str, arguments: Sequence[type], result: type | None) -> Callable[..., Any] | None:
    """Return a function of `copier.c` with its C types; None if it was not built, or cannot be loaded here.

    Args:
        name: its name there.
        arguments: types of its arguments.
        result: type of its result; None: it has none.
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
