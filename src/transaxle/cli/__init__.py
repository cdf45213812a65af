"""The command line: one file a command. Each parses options, calls the engine and prints what it says."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from transaxle.spans import start_clock

NAME = "transaxle"
"""The program's name."""
_NEW_OBJECTS = 1_000_000
"""Objects made before the collector looks for garbage: imports and plans make many, and hardly any garbage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; None: `sys.argv`.

    Returns:
        The exit code: 0 done, 1 different, 2 usage, 3 refused, 4 I/O, 70 a bug, 130 interrupted, 143 and 129
        stopped by SIGTERM and SIGHUP.
    """
    start_clock()
    if arguments is None:
        # numpy's algebra has a thread for each core from its import on, which spins before it sleeps: a quarter of what
        # the import takes. Nothing here multiplies matrices with it.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # Buffers are as large as the largest block may be, and few blocks are: a huge page would take 2 MB for a byte.
        os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
    thresholds = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    try:
        from transaxle.cli.command import run

        return run(arguments)
    except (KeyboardInterrupt, RuntimeError) as stop:  # during imports; `run` itself answers for what comes later
        if not isinstance(stop, KeyboardInterrupt) and not isinstance(stop.__cause__, KeyboardInterrupt):
            raise
        sys.stderr.write("interrupted\n")
        return 130
    finally:
        gc.set_threshold(*thresholds)
        if arguments is None:
            # The process ends here. The interpreter would look twice for garbage among all that was imported and made,
            # and the system takes it all at once: 0.05 s after imports alone.
            gc.freeze()


__all__ = ["NAME", "main"]
