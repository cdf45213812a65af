"""The command line of Transaxle. Each command parses options, calls a public function and prints the result."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from transaxle.spans import start_clock

NAME = "transaxle"
"""Name of the command-line program."""
_NEW_OBJECTS = 1_000_000
"""Number of new objects after which Python's garbage collector runs. The number is high, because imports and plans
create many objects but little garbage.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after the program's name on the command line; None means those in `sys.argv`.

    Returns:
        The exit code: 0 for success, 1 if compared checkpoints differ, 2 for wrong usage, 3 for a refusal, 4 for an I/O
        error, 70 for a bug, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
    """
    start_clock()
    if arguments is None:
        # OpenBLAS starts one thread per CPU core when numpy is imported, which takes a quarter of the import time. No
        # command multiplies matrices with OpenBLAS.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # A buffer has the size of the largest possible block, but most blocks are smaller. If numpy asked for huge
        # pages, a buffer in which only one byte is used would occupy 2 MB.
        os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    thresholds = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    try:
        from transaxle.cli.command import run

        return run(arguments)
    except (KeyboardInterrupt, RuntimeError) as stop:  # catches Ctrl-C during imports; `run` handles any later Ctrl-C
        if not isinstance(stop, KeyboardInterrupt) and not isinstance(stop.__cause__, KeyboardInterrupt):
            raise
        sys.stderr.write("interrupted\n")
        return 130
    finally:
        gc.set_threshold(*thresholds)
        if arguments is None:
            # The process ends here, without the usual shutdown of the interpreter. That shutdown would run two
            # garbage collections, which take 0.05 s even after the imports alone.
            gc.freeze()


__all__ = ["NAME", "main"]
