"""Strided reads: equally long runs of one file, read in one call where possible.

A column cut of a matrix is a run of a few kB in each of its rows. Read one by one from Python, each costs several times
its copy. `runs.c`, built like the kernel of the encodings when the package is installed, reads them in a loop without
the interpreter lock. A storage that offers this is `Strided`; any other reads run by run, as does every storage if the
loop was not built.

What a block is made of may also be many ranges of several files, as rows that several ranks have saved. Reading gives
the interpreter lock away each time, and two threads wait for it longer than for the reads: a loop in `runs.c` reads all
ranges meanwhile.

Runs of a single element, as those of a transposed matrix, are read together with what lies between them, and put into
their places in memory: `runs.c` does that tile by tile, where numpy would fetch every line of memory again and again.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from transaxle.axes.geometry.strided import Loop
from transaxle.formats.storage.compiled import address, compiled_function, in_line

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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
    compiled = load()
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
def load() -> Callable[..., int] | None:
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
