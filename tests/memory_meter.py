"""How much memory a test session takes at most: all its processes together, pages that they share counted once.

Files that they have mapped count as far as they are in memory, files that they only read do not. Shared memory that
outlives them all is told as well.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

OPTION = "--memory"
_EVERY = 2.0
"""Seconds between looks: long enough to cost nothing, short enough to see what a test does that takes a minute."""
_PATIENCE = 10.0
"""Seconds in which shared memory must go when the session has ended: who removes it may be another process."""
_PROC = Path("/proc")
_SHARED = b"/dev/shm/"
_SHOWN = 8
"""Processes that are named."""
_WIDTH = 100
"""Characters of a command."""
_GB = 1e9


class MemoryMeter:
    """Looks every two seconds at this process and those that inherited a variable, until the session ends."""

    def __init__(self, variable: str, value: str, cap: float) -> None:
        """Begin to look.

        Args:
            variable: of the environment, by which programs that this process starts are known.
            value: of the variable, nobody else's.
            cap: gigabytes; a session that takes more fails.
        """
        self.cap = cap
        self.peak = 0
        """Bytes, when they were most."""
        self.largest: list[tuple[int, str]] = []
        """The processes that had most of them: bytes and command."""
        self.during: set[str] = set()
        """Tests that ran then, on whichever worker."""
        self.left: list[str] = []
        """Shared memory that these processes had, and that is still there when they have ended."""
        self._shared: set[str] = set()
        self._running: set[str] = set()
        self._mark = f"\0{variable}={value}\0".encode()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-meter", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Add up what the processes have now."""
        running = set(self._running)
        processes = self._processes()
        found = {pid: _bytes(pid) for pid in processes}
        self._shared.update(*(_shared(pid) for pid in processes))
        if (total := sum(found.values())) > self.peak:
            self.peak, self.during = total, running
            most = sorted(found, key=lambda pid: -found[pid])[:_SHOWN]
            self.largest = [(found[pid], _command(pid)) for pid in most]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test begins."""
        self._running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note that a test has ended."""
        self._running.discard(nodeid)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Look a last time, and let the session fail if it took too much or left shared memory when all have ended."""
        self._ended.set()
        self._thread.join()
        self.look()
        yield
        end = time.monotonic() + _PATIENCE
        while (left := sorted(name for name in self._shared if Path(name).exists())) and time.monotonic() < end:
            time.sleep(0.1)
        self.left = left
        if (left or self.peak > self.cap * _GB) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what it took, when, and which processes had most."""
        terminalreporter.section("memory")
        tests = ", ".join(sorted(self.during)) or "no test"
        terminalreporter.line(f"{self.peak / _GB:.2f} GB at most, of all processes, during {tests}")
        for size, command in self.largest:
            terminalreporter.line(f"  {size / _GB:5.2f} GB  {command}")
        if self.peak > self.cap * _GB:
            terminalreporter.line(f"FAILED: {OPTION} allows {self.cap:g} GB", red=True)
        if self.left:
            terminalreporter.line(f"FAILED: shared memory is left: {', '.join(self.left)}", red=True)

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY):
            self.look()

    def _processes(self) -> list[int]:
        """Return this process, and those whose environment has the mark: forked ones have that of their parent."""
        own = os.getpid()
        others = [int(each.name) for each in _PROC.iterdir() if each.name.isdigit() and each.name != str(own)]
        return [own, *(pid for pid in others if self._mark in b"\0" + _read(pid, "environ"))]


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process; nothing, if it has ended or is somebody else's."""
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def _bytes(pid: int) -> int:
    """Return what a process has alone, and its share of what it has together with others."""
    rows = (line.split() for line in _read(pid, "smaps_rollup").splitlines())
    return next((int(row[1]) * 1024 for row in rows if row[0] == b"Pss:"), 0)


def _shared(pid: int) -> set[str]:
    """Return the files of shared memory that a process has mapped."""
    if _SHARED not in (maps := _read(pid, "maps")):
        return set()
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    return {os.fsdecode(line[5]) for line in lines if len(line) > 5 and line[5].startswith(_SHARED)}


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:_WIDTH].strip()
