"""Strided reads: equally long runs of one file, read in one call where possible.

A column cut of a matrix is a run of a few kB in each of its rows. Read one by one from Python, each costs several times
its copy. `runs.c`, built like the kernel of the encodings when the package is installed, reads them in a loop without
the interpreter lock. A storage that offers this is `Strided`; any other reads run by run, as does every storage if the
loop was not built.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import numpy as np

from transaxle.axes.geometry.strided import Loop

SOURCE = Path(__file__).with_name("runs.c")
LIBRARY = Path(__file__).with_name("libruns.so")
_ARGUMENTS = (
    ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
)  # fmt: skip


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
    if isinstance(reader, Strided):
        reader.read_strided(name, offset, view, width, loops)
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
    counts = [count for count, _, _ in loops]
    total = prod(counts)
    if not total * width:
        return
    view_end = sum((count - 1) * max(step, 0) for count, _, step in loops) + width
    if view_end > view.nbytes or any(step < 0 for _, _, step in loops):
        raise ValueError(f"runs of {width} bytes that end at {view_end} do not fit into {view.nbytes}")
    compiled = load()
    out = np.frombuffer(view, np.uint8)
    numbers = np.array(loops, np.int64)
    finished = 0
    while finished < total:
        if compiled is not None:
            finished = compiled(fd, offset, out.ctypes.data, width, len(counts), numbers.ctypes.data, finished)
        # The loop stopped at a run that needs attention (an error, a short read): Python reads that one.
        if finished < total:
            source, target = _place(loops, finished)
            read_one(offset + source, view[target : target + width])
            finished += 1


def _place(loops: Sequence[Loop], number: int) -> tuple[int, int]:
    """Return the offsets of one run from the first one, in the file and in the view."""
    source = target = 0
    for count, step, into in reversed(loops):
        number, index = divmod(number, count)
        source += index * step
        target += index * into
    return source, target


@cache
def load() -> Callable[..., int] | None:
    """Return the compiled loop; None if it was not built, cannot be loaded here, or was built from another source."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        stamp = library.transaxle_stamp
        stamp.restype = ctypes.c_uint32
        if stamp() != zlib.crc32(SOURCE.read_bytes()):
            return None
        call = library.transaxle_runs
    except (OSError, AttributeError):
        return None
    call.argtypes, call.restype = _ARGUMENTS, ctypes.c_int64
    return cast("Callable[..., int]", call)
