"""What `runs.c` does: reads of equally long runs, and batches of reads, writes, hashes and copies.

Reading gives the interpreter lock away and takes it back, and threads that do so for every block wait for one another
longer than Python computes. `runs.c` carries a whole batch out meanwhile: its steps are noted first, and done together.
A step that it cannot do at once (an error, a short read, a full disk) is done again in the ordinary way, which says
what is wrong.

A column cut of a matrix is a run of a few kB in each of its rows. Read one by one from Python, each costs several times
its copy; a loop of `runs.c` reads them. A storage that offers this is `Strided`; any other reads run by run, as does
every storage if `runs.c` was not built when the package was installed. What a block is made of may also be many ranges
of several files, as rows that several ranks have saved: one loop reads all of them. Runs of a single element, as those
of a transposed matrix, are read together with the bytes between them, and put into their places in memory tile by tile,
where numpy would fetch every line of memory again and again.
"""

from __future__ import annotations

import ctypes
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, cast, runtime_checkable

from transaxle.axes.geometry.strided import Loop
from transaxle.errors import TransaxleError
from transaxle.spans import is_recorded, span

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from transaxle.formats.storage.storage import Handles


SOURCE = Path(__file__).with_name("runs.c")
LIBRARY = Path(__file__).with_name("libruns.so")
_WORDS = 10
"""Numbers that say what a step is; see `transaxle_steps`."""
_READ, _WRITE, _HASH, _SUM, _TRANSPOSE, _COPY, _COMPARE, _READ_AND_SUM, _READ_RUNS = range(9)
_KINDS = "read", "write", "hash", "sum", "lay", "lay", "compare", "read and sum", "read"
"""What is done in each, as traces call it."""
_SIZES = 4, 4, 3, 2, None, None, 3, 4, 8
"""Which of their numbers is that of the bytes."""
_Again = Callable[[], object]


class StepBatch:
    """Steps of one thread, carried out in the order in which they were noted.

    Memory is named, not copied: what a step reads is what lies there when its turn comes. Files stay open until the
    batch is carried out or forgotten, which is done where a `with` block is left.

    Args:
        compiled: from `load_steps`.
    """

    def __init__(self, compiled: Callable[..., int]) -> None:
        self._compiled = compiled
        self.size = 0
        """Bytes read and written by what is noted."""
        self._steps = array("q")
        self._again: list[_Again] = []
        self._then: list[tuple[int, Callable[[], object]]] = []
        """What is called, and how many steps must be done for it."""
        self._held: list[object] = []
        self._files: dict[tuple[int, str], int] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def opened(self, name: str, handles: Handles) -> int:
        """Return the descriptor of a file, which stays open until the batch is carried out."""
        key = id(handles), name
        found = self._files.get(key)
        if found is None:
            if len(self._files) >= handles.at_once:
                self.run()
            found = self._files[key] = self._open.enter_context(handles.use(name))
        return found

    def read(self, fd: int, offset: int, view: memoryview, again: _Again) -> None:
        """Note that bytes of an open file are read.

        Args:
            fd: its descriptor.
            offset: the first byte.
            view: where they go: writable, contiguous and not empty.
            again: reads them in the ordinary way.
        """
        self._add(again, _READ, fd, offset, address(view), view.nbytes)
        self.size += view.nbytes

    def read_runs(
        self, fd: int, offset: int, view: memoryview, width: int, loops: Sequence[Loop], again: _Again
    ) -> None:
        """Note that runs of an open file are read into their places.

        Args:
            fd: its descriptor.
            offset: byte in the file of the first run.
            view: writable and contiguous; it begins with the first run's place, and no run's place leaves it.
            width: bytes of a run.
            loops: `(count, step in the file, step in the view)` in bytes, the outermost first; at least one run.
            again: reads them in the ordinary way.
        """
        numbers, size = in_line(loops), width * prod(count for count, _, _ in loops)
        self._held.append(numbers)
        place = numbers.buffer_info()[0]
        self._add(again, _READ_RUNS, fd, offset, address(view), width, len(loops), place, 0, size)
        self.size += size

    def share(self, view: memoryview, powers: Sequence[int]) -> array[int] | None:
        """Note that the runs which the latest step reads are summed up, each while it is in the cache.

        Args:
            view: where that step puts them.
            powers: x**(8 * step in the file) of each of their loops, modulo the polynomial.

        Returns:
            What will be in its two first numbers when the batch is over: their share in the CRC-32 of the bytes up to
            the last run's end (see `runs.c`), and 1 if it is known, else 0. None where that step does something else.
        """
        kind, _, _, place, _, depth = self._steps[-_WORDS : 6 - _WORDS] or (None,) * 6
        if (kind, place, depth) != (_READ_RUNS, address(view), len(powers)):
            return None
        found = array("I", (0, 0, *powers))
        self._held.append(found)
        self._steps[7 - _WORDS] = found.buffer_info()[0]
        return found

    def write(self, fd: int, offset: int, view: memoryview, again: _Again) -> None:
        """Note that bytes are written to an open file; see `read`."""
        self._add(again, _WRITE, fd, offset, address(view), view.nbytes)
        self.size += view.nbytes

    def hash(self, state: int, update: int, view: memoryview, again: _Again) -> None:
        """Note that bytes are hashed.

        Args:
            state: address of what the function changes.
            update: address of a C function of the state, an address and a size, that returns 0.
            view: the bytes: writable, contiguous and not empty.
            again: does the same.
        """
        self._add(again, _HASH, state, address(view), view.nbytes, update)

    def sum(self, view: memoryview, crc: ctypes.c_uint32, crc32: Callable[[memoryview, int], int]) -> None:
        """Note that bytes are added to a CRC-32: with the step before, if that reads them.

        Args:
            view: the bytes: writable, contiguous and not empty.
            crc: that of the bytes before them.
            crc32: does it in the ordinary way.
        """

        def again() -> None:
            crc.value = crc32(view, crc.value)

        self._held.append(crc)
        place, size = address(view), view.nbytes
        kind, *_, read_to, read_size = self._steps[-_WORDS : 5 - _WORDS] or (None,) * 5
        if (kind, read_to, read_size) == (_READ, place, size):
            read = self._again[-1]

            def both() -> None:
                read()
                again()

            self._steps[-_WORDS], self._steps[5 - _WORDS] = _READ_AND_SUM, ctypes.addressof(crc)
            self._again[-1] = both
        else:
            self._add(again, _SUM, place, size, ctypes.addressof(crc))

    def transpose(self, numbers: tuple[int, ...], around: array[int], again: _Again) -> None:
        """Note that a matrix is transposed.

        Args:
            numbers: what the compiled transpose is told; see `of_transpose`.
            around: the loops around it.
            again: does the same.
        """
        self._held.append(around)
        self._add(again, _TRANSPOSE, *numbers, around.buffer_info()[0])

    def copy(self, held: int, place: int, width: int, loops: Sequence[Loop], again: _Again) -> None:
        """Note that runs of bytes are copied.

        Args:
            held: address of the first one.
            place: address of the place where that goes.
            width: bytes of a run.
            loops: `(count, step from where they lie, step to where they go)` in bytes, the outermost first.
            again: does the same.
        """
        numbers = in_line(loops)
        self._held.append(numbers)
        self._add(again, _COPY, held, place, width, len(loops), numbers.buffer_info()[0])

    def compare(self, one: memoryview, other: memoryview, differ: Callable[[], object]) -> None:
        """Note that as many bytes are compared.

        Args:
            one: writable, contiguous and not empty.
            other: likewise.
            differ: called where they are not equal.
        """

        def again() -> None:
            if not same_bytes(one, other):
                differ()

        self._add(again, _COMPARE, address(one), address(other), one.nbytes)

    def then(self, call: Callable[[], object]) -> None:
        """Let something be called when the batch is over, if all that is noted so far is done."""
        self._then.append((len(self._again), call))

    def run(self) -> None:
        """Carry out what is noted, and forget it.

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
        """Forget what is noted."""
        self.size = 0
        self._steps = array("q")
        for each in (self._again, self._then, self._held, self._files):
            each.clear()
        self._open.close()

    def _add(self, again: _Again, *numbers: int) -> None:
        self._steps.extend((*numbers, *(0,) * (_WORDS - len(numbers))))
        self._again.append(again)

    def _carry_out(self) -> None:
        place, total, finished = self._steps.buffer_info()[0], len(self._again), 0
        apart = is_recorded()
        while finished < total:
            stop = finished + 1 if apart else total  # a trace says how long each step takes
            with self._span(finished):
                reached = self._compiled(place, stop, finished)
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
        first = _WORDS * number
        kind = self._steps[first]
        size = _SIZES[kind]
        return span(_KINDS[kind], None if size is None else self._steps[first + size])


def new_batch() -> StepBatch | None:
    """Return an empty batch; None where `load_steps` finds nothing."""
    compiled = load_steps()
    return None if compiled is None else StepBatch(compiled)


@cache
def load_steps() -> Callable[..., int] | None:
    """Return the compiled function; None if it was not built, cannot be loaded, or was built from another source."""
    return compiled_function("transaxle_steps", (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), ctypes.c_int64)


def same_bytes(one: bytes | memoryview, other: bytes | memoryview) -> bool:
    """Tell whether two buffers hold the same bytes; `==` takes fifty times as long where one is a view."""
    import numpy as np

    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def address(view: memoryview) -> int:
    """Return where the bytes of a view are in memory. It must be writable, contiguous and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def address_to_read(view: memoryview) -> int:
    """Return the same of a view that need not be writable: nobody may write there."""
    if not view.readonly:
        return address(view)
    import numpy as np

    return np.frombuffer(view, np.uint8).ctypes.data


def in_line(loops: Iterable[Loop]) -> array[int]:
    """Return the numbers of loops as `runs.c` takes them."""
    return array("q", chain.from_iterable(loops))


def compiled_function(name: str, arguments: Sequence[type], result: type | None) -> Callable[..., Any] | None:
    """Return a function of `runs.c` with its C types; None if it was not built, cannot be loaded here, or is another's.

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


_Bytes: TypeAlias = "npt.NDArray[np.uint8]"
_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p
_ARGUMENTS = (ctypes.c_int, _INT64, _POINTER, _INT64, ctypes.c_int, _POINTER, _INT64)
_OF_TRANSPOSE = (_POINTER, _POINTER, _INT64, _INT64, _INT64, _INT64, _INT64, ctypes.c_int, _POINTER)
_ELEMENTS = frozenset({1, 2, 4, 8})
"""Bytes of elements that can be transposed."""
FileRange = tuple[str, int, memoryview]
"""A file, the first byte of a range in it, and where its bytes go: writable, contiguous, and of bytes."""
_FEWEST = 8
"""Rows and columns that a transpose has at least; numpy is as fast with fewer."""


class _Plain(Protocol):
    """A storage that reads one run at a time."""

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""


@runtime_checkable
class Strided(Protocol):
    """A storage that reads many runs in one call."""

    def read_strided(self, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
        """Read runs of a file; see `read_strided`."""


def read_strided(reader: _Plain, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
    """Read runs of a file into their places, at once where the reader can.

    Args:
        reader: the files.
        name: the file.
        offset: byte in the file of the first run.
        view: writable and contiguous; it begins with the first run's place, and no run's place leaves it.
        width: bytes of a run.
        loops: `(count, step in the file, step in the view)` in bytes, the outermost first.

    Raises:
        TransaxleError: what `read_into` raises; some runs may be in place then.
    """
    strided = getattr(reader, "read_strided", None)  # `Strided`, but a check of a protocol takes as long as a read
    if strided is not None:
        strided(name, offset, view, width, loops)
    else:
        read_each(reader, name, offset, view, width, loops)


def read_each(reader: _Plain, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
    """Read runs of a file one by one; otherwise as `read_strided`."""
    for number in range(prod(count for count, _, _ in loops)):
        source, target = _place(loops, number)
        reader.read_into(name, offset + source, view[target : target + width])


def read_runs(
    fd: int,
    offset: int,
    view: memoryview,
    width: int,
    loops: Sequence[Loop],
    read_one: Callable[[int, memoryview], None],
) -> None:
    """Read runs of an open file, as `read_strided`.

    Args:
        fd: its descriptor.
        offset: see `read_strided`, and so `view`, `width` and `loops`.
        view: of bytes.
        width: see there.
        loops: see there.
        read_one: reads one run from a byte of the file; called for each run that the compiled loop could not read.

    Raises:
        ValueError: where a run's place leaves the view.
    """
    total = runs_in(view, width, loops)
    if not total:
        return
    compiled = load_runs()
    place, numbers = address(view), in_line(loops)
    finished = 0
    while finished < total:
        if compiled is not None:
            finished = compiled(fd, offset, place, width, len(loops), numbers.buffer_info()[0], finished)
        # The loop stopped at a run that needs attention (an error, a short read): Python reads that one.
        if finished < total:
            source, target = _place(loops, finished)
            read_one(offset + source, view[target : target + width])
            finished += 1


def runs_in(view: memoryview, width: int, loops: Sequence[Loop]) -> int:
    """Return how many runs are read into a view, as `read_strided` is told; 0 where they are empty.

    Raises:
        ValueError: where a run's place leaves the view.
    """
    total = prod(count for count, _, _ in loops) if width else 0
    end = sum((count - 1) * max(step, 0) for count, _, step in loops) + width
    if total and (end > view.nbytes or any(step < 0 for _, _, step in loops)):
        raise ValueError(f"runs of {width} bytes that end at {end} do not fit into {view.nbytes}")
    return total


def read_ranges(reader: _Plain, ranges: Sequence[FileRange]) -> None:
    """Read ranges into their places: at once if the reader has a `read_ranges` of its own, which takes these.

    Raises:
        TransaxleError: what `read_into` raises; some ranges may be in place then.
    """
    together = getattr(reader, "read_ranges", None)
    if together is None or len(ranges) < 2:
        read_one_by_one(reader, ranges)
    else:
        together(ranges)


def read_one_by_one(reader: _Plain, ranges: Sequence[FileRange]) -> None:
    """Read ranges one after the other; otherwise as `read_ranges`."""
    for name, offset, view in ranges:
        reader.read_into(name, offset, view)


def read_open(
    descriptors: Mapping[str, int], ranges: Sequence[FileRange], read_one: Callable[[str, int, memoryview], None]
) -> None:
    """Read ranges of open files, as `read_ranges`.

    Args:
        descriptors: that of each file.
        ranges: what is read.
        read_one: reads one range; called for each that the compiled loop could not read.
    """
    compiled = load_ranges()
    wanted = [each for each in ranges if each[2].nbytes]
    numbers = array("q")
    for name, offset, view in wanted:
        numbers.extend((descriptors[name], offset, address(view), view.nbytes))
    finished = 0
    while finished < len(wanted):
        if compiled is not None:
            finished = compiled(numbers.buffer_info()[0], len(wanted), finished)
        # The loop stopped at a range that needs attention (an error, a short read): Python reads that one.
        if finished < len(wanted):
            read_one(*wanted[finished])
            finished += 1


def _place(loops: Sequence[Loop], number: int) -> tuple[int, int]:
    """Return the offsets of one run from the first one, in the file and in the view."""
    source = target = 0
    for count, step, into in reversed(loops):
        number, index = divmod(number, count)
        source += index * step
        target += index * into
    return source, target


def transposed(held: _Bytes, out: _Bytes, at: int, width: int, loops: Sequence[Loop]) -> bool:
    """Copy single elements from one buffer to another, if that is a transpose and the compiled loop is there.

    Args:
        held: the source, from its first element on.
        out: the target.
        at: byte of the target at which the first element goes.
        width: bytes of an element.
        loops: `(count, step in the source, step in the target)` in bytes.

    Returns:
        Whether it was done; if not, nothing was.
    """
    found, compiled = of_transpose(held, out, at, width, loops), load_transpose()
    if found is None or compiled is None:
        return False
    numbers, around = found
    compiled(*numbers, around.buffer_info()[0])
    return True


def of_transpose(
    held: _Bytes, out: _Bytes, at: int, width: int, loops: Sequence[Loop]
) -> tuple[tuple[int, ...], array[int]] | None:
    """Return what the compiled transpose is told, and the loops around it; None if it is not there, or this is none.

    Args:
        held: see `transposed`, and so the others.
        out: see there.
        at: see there.
        width: see there.
        loops: see there.
    """
    if width not in _ELEMENTS or len(loops) < 2:
        return None
    across = next((number for number, loop in enumerate(loops) if loop[1] == width), None)
    along = next((number for number, loop in enumerate(loops) if loop[2] == width), None)
    if across is None or along is None or across == along or min(loops[across][0], loops[along][0]) < _FEWEST:
        return None
    if load_transpose() is None or any(count < 1 or step < 0 or into < 0 for count, step, into in loops):
        return None
    ends = [width + sum((loop[0] - 1) * loop[side] for loop in loops) for side in (1, 2)]
    are_plain = held.flags.c_contiguous and out.flags.c_contiguous and held.ndim == out.ndim == 1
    if not are_plain or at < 0 or ends[0] > len(held) or at + ends[1] > len(out):
        return None
    (columns, _, into), (rows, step, _) = loops[across], loops[along]
    around = [loop for number, loop in enumerate(loops) if number not in (across, along)]
    place = out.ctypes.data + at
    return (held.ctypes.data, place, width, rows, columns, step, into, len(around)), in_line(around)


@cache
def load_runs() -> Callable[..., int] | None:
    """Return the compiled loop; None if it was not built, cannot be loaded here, or was built from another source."""
    return compiled_function("transaxle_runs", _ARGUMENTS, _INT64)


@cache
def load_ranges() -> Callable[..., int] | None:
    """Return the compiled loop over ranges; otherwise as `load`."""
    arguments = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return compiled_function("transaxle_ranges", arguments, ctypes.c_int64)


@cache
def load_transpose() -> Callable[..., None] | None:
    """Return the compiled transpose; otherwise as `load`."""
    return compiled_function("transaxle_transpose", _OF_TRANSPOSE, None)
