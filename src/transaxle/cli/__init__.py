"""The command line. Each command parses options, calls a public function and prints the result."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from transaxle.spans import start_clock

NAME = "transaxle"
"""Name of the program."""
_NEW_OBJECTS = 1_000_000
"""New objects after which the garbage collector runs: imports and plans create many objects, but little garbage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; None: `sys.argv`.

    Returns:
        The exit code: 0 done, 1 different, 2 wrong usage, 3 refused, 4 I/O error, 70 a bug, 130 Ctrl-C, 143 or 129
        stopped by SIGTERM or SIGHUP.
    """
    start_clock()
    if arguments is None:
        # OpenBLAS starts a thread per core when numpy is imported: a quarter of the import time. No command multiplies
        # matrices with OpenBLAS.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # A buffer has the size of the largest possible block, but most blocks are smaller: with huge pages one byte
        # would take 2 MB.
        os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    thresholds = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    try:
        from transaxle.cli.command import run

        return run(arguments)
    except (KeyboardInterrupt, RuntimeError) as stop:  # Ctrl-C during imports; `run` handles any later one
        if not isinstance(stop, KeyboardInterrupt) and not isinstance(stop.__cause__, KeyboardInterrupt):
            raise
        sys.stderr.write("interrupted\n")
        return 130
    finally:
        gc.set_threshold(*thresholds)
        if arguments is None:
            # The process ends here. This skips two garbage collections at the interpreter's shutdown, which take
            # 0.05 s even after the imports alone.
            gc.freeze()


__all__ = ["NAME", "main"]
