"""Main function of every fuzz target."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def run(read_one: Callable[[bytes], None], seeds: Callable[[Path], None]) -> None:
    """Write the seeds (`--seeds FOLDER`), or run atheris with the command line.

    Args:
        read_one: tries one input.
        seeds: writes inputs to begin with into a folder.
    """
    if sys.argv[1:2] == ["--seeds"]:
        seeds(Path(sys.argv[2]))
        return
    import atheris

    atheris.instrument_all()
    atheris.Setup(sys.argv, read_one)
    atheris.Fuzz()
