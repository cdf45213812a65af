"""Strided reads: runs of one file, equally long, read in one call where that can be done.

A column cut of a matrix is a run of a few kB in each of its rows. Read one by one from Python, each costs several times
its copy. `runs.c`, built like the kernel of the encodings when the package is installed, reads them in a loop, and
threads beside it go on. A storage that offers this is `Strided`; any other is asked for each run, and so is every one
where the loop was not built.
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
    """What reads one run."""

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""


@runtime_checkable
class Strided(Protocol):
    """A storage that reads many runs at once."""

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
    fd: int, offset: int, view: memoryview, width: int, loops: Sequence[Loop], one: Callable[[int, memoryview], None]
) -> None:
    """Read runs of an open file, as `read_strided`.

    Args:
        fd: its descriptor.
        offset: see `read_strided`, and so `view`, `width` and `loops`.
        view: of bytes.
        width: see there.
        loops: see there.
        one: reads one run from a byte of the file; asked for each that could not be read whole at once.

    Raises:
        ValueError: where a run's place leaves the view.
    """
    counts = [count for count, _, _ in loops]
    total = prod(counts)
    if not total * width:
        return
    last = sum((count - 1) * max(step, 0) for count, _, step in loops) + width
    if last > view.nbytes or any(step < 0 for _, _, step in loops):
        raise ValueError(f"runs of {width} bytes that end at {last} do not fit into {view.nbytes}")
    call = load()
    out = np.frombuffer(view, np.uint8)
    numbers = np.array(loops, np.int64)
    done = 0
    while done < total:
        if call is not None:
            done = call(fd, offset, out.ctypes.data, width, len(counts), numbers.ctypes.data, done)
        if done < total:
            source, target = _place(loops, done)
            one(offset + source, view[target : target + width])
            done += 1


def _place(loops: Sequence[Loop], number: int) -> tuple[int, int]:
    """Return where one run begins on both sides, from where the first one does."""
    source = target = 0
    for count, step, into in reversed(loops):
        number, index = divmod(number, count)
        source += index * step
        target += index * into
    return source, target


@cache
def load() -> Callable[..., int] | None:
    """Return the compiled loop, or None where it was not built, cannot be loaded here, or is not of this source."""
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
