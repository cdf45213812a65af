"""Runs of the program, in this process or in a new one, and their results."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

DIFFERENT, USAGE, REFUSED, MACHINE, BUG, INTERRUPTED = 1, 2, 3, 4, 70, 130
HUNG_UP, TERMINATED = 129, 143


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of one run."""

    code: int
    out: str
    err: str

    def __post_init__(self) -> None:
        assert "Traceback" not in self.out + self.err, self.err

    def expect(self, code: int, *, out: str | tuple[str, ...] = (), err: str | tuple[str, ...] = ()) -> Outcome:
        """Demand an exit code, and what each stream says among other things."""
        assert self.code == code, self
        for words, text in ((out, self.out), (err, self.err)):
            for each in (words,) if isinstance(words, str) else words:
                assert each in text, text
        return self

    @property
    def json(self) -> Any:
        """Standard output, which must be exactly one JSON document, with nothing beside it on standard error."""
        assert self.err == ""
        return json.loads(self.out)

    @property
    def codes(self) -> list[str]:
        """Refusal codes of a JSON document."""
        return [refusal["code"] for refusal in self.json["error"]["refusals"]]


class Transaxle(Protocol):
    """Runs a command in this process."""

    def __call__(self, *arguments: str | Path) -> Outcome: ...


def command(*arguments: str | Path, before: str = "") -> list[str]:
    """Return the command line of a process that runs the program, after some Python of ours."""
    script = f"{before}\nimport sys\nfrom transaxle.cli import main\nsys.exit(main())"
    return [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]


def on_terminal(*arguments: str | Path, environment: dict[str, str] | None = None, errors_only: bool = False) -> str:
    """Return what a terminal gets from a process that runs a command and succeeds.

    Args:
        arguments: of the command.
        environment: variables to add.
        errors_only: only standard error is the terminal.
    """
    outer, inner = pty.openpty()
    with subprocess.Popen(
        command(*arguments),
        stdout=subprocess.DEVNULL if errors_only else inner,
        stderr=inner,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"} | (environment or {}),
    ) as running:
        os.close(inner)
        shown = b""
        while chunk := _read(outer):
            shown += chunk
        os.close(outer)
    assert running.returncode == 0
    return shown.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other side is closed
        return b""


def process(
    *arguments: str | Path, before: str = "", environment: dict[str, str] | None = None, cwd: Path | None = None
) -> Outcome:
    """Run a command in a process of its own.

    Args:
        arguments: of the command.
        before: Python that runs first in that process.
        environment: variables to add.
        cwd: working directory.
    """
    done = subprocess.run(
        command(*arguments, before=before),
        env=os.environ | (environment or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def lines(text: str) -> list[list[str]]:
    """Return the words of every line: tables compare without their spaces."""
    return [line.split() for line in text.splitlines()]


def flip(file: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, hidden ones too, with its bytes."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def only(items: Sequence[Any]) -> Any:
    """Return the one item."""
    (item,) = items
    return item
