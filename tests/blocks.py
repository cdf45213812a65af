"""Python as a page shows it, run as a program of its own: in a process that has imported torch before."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from tests.forks import context

_SECONDS = 300.0


def execute(code: str, folder: Path) -> tuple[int, str]:
    """Run a program in a folder; return its exit code, and what it printed."""
    output = folder.with_name(f"{folder.name}.printed")
    process = context().Process(target=_program, args=(code, str(folder), str(output)))
    process.start()
    process.join(_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    printed = output.read_text("utf-8")
    output.unlink()
    return process.exitcode or 0, printed


def _program(code: str, folder: str, output: str) -> None:
    os.chdir(folder)
    with Path(output).open("wb") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    sys.argv, sys.path[:0] = ["-c"], [""]
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(code, "<page>", "exec"), main.__dict__)  # noqa: S102 - the project's own pages
    except Exception:  # noqa: BLE001 - the reader would see it
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
