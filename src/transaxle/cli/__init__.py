"""The command line: one file a command. Each parses options, calls the engine and prints what it says."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; None: `sys.argv`.

    Returns:
        The exit code: 0 done, 1 different, 2 usage, 3 refused, 4 I/O, 70 a bug, 130 interrupted, 143 and 129
        stopped by SIGTERM and SIGHUP.
    """
    from transaxle.cli.run import run

    return run(arguments)


__all__ = ["main"]
