"""Processes of our own in somebody else's program.

A spawned process runs the program's main script again, up to `if __name__ == "__main__"`; a training script without
that line would begin to train once more. Our processes need nothing of the script.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TOLD = ("__spec__", "__file__")
"""What multiprocessing looks at to tell a new process where the main script is."""


@contextmanager
def apart() -> Iterator[None]:
    """Start processes that do not run the main script; for the time of the start, it has no place."""
    main = vars(sys.modules["__main__"])
    kept = {name: main[name] for name in _TOLD if name in main}
    try:
        for name in kept:
            main[name] = None
        yield
    finally:
        main.update(kept)
