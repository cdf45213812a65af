"""Run Python blocks and `transaxle` commands of documentation pages, each in a process of its own.

The process is forked from one that has already imported torch and transformers.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.forks import context

_SECONDS = 300.0


def execute(code: str, folder: Path) -> tuple[int, str]:
    """Run a program in a folder; return its exit code, and what it printed, errors last."""
    end, printed, errors = _run(_program, code, folder)
    return end, printed + errors


def typed(words: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run a `transaxle` command in a folder, as its script would.

    Args:
        words: of the command line, the program's name first.
        folder: where it is typed.

    Returns:
        The exit code, standard output, and standard error.
    """
    return _run(_command, list(words), folder)


def _run(target: Callable[[Any], None], argument: Any, folder: Path) -> tuple[int, str, str]:
    places = [folder.with_name(f"{folder.name}.{kind}") for kind in ("printed", "errors")]
    process = context().Process(target=_redirected, args=(target, argument, str(folder), *map(str, places)))
    process.start()
    process.join(_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    printed, errors = (place.read_text("utf-8") for place in places)
    for place in places:
        place.unlink()
    return process.exitcode or 0, printed, errors


def _redirected(target: Callable[[Any], None], argument: Any, folder: str, output: str, errors: str) -> None:
    os.chdir(folder)
    for descriptor, name in ((1, output), (2, errors)):
        with Path(name).open("wb") as printed:
            os.dup2(printed.fileno(), descriptor)
    try:
        target(argument)
    except Exception:  # noqa: BLE001 - the reader would see it
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def _program(code: str) -> None:
    sys.argv, sys.path[:0] = ["-c"], [""]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<page>", "exec"), main.__dict__)  # noqa: S102 - the project's own pages


def _command(words: list[str]) -> None:
    from transaxle.cli import main

    sys.argv = words
    raise SystemExit(main())
