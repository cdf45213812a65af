"""Server processes that tests talk to: each on a free port of the loopback, until the block ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_HOST = "127.0.0.1"
_PATIENCE = 60.0
"""Seconds until the server must answer."""
_ATTEMPTS = 3
"""Somebody else may take the port in between."""
_GRACE = 10
"""Seconds in which it must end when it is asked to."""


@contextmanager
def serving(program: str, environment: Mapping[str, str], path: str = "/") -> Iterator[str]:
    """Start a server, and end it with the block.

    Args:
        program: its text in Python, which finds host and port in `sys.argv`.
        environment: its environment.
        path: what it answers with success as soon as it serves.

    Yields:
        its address.

    Raises:
        RuntimeError: it does not start.
    """
    for _ in range(_ATTEMPTS):
        port = _free_port()
        command = [sys.executable, "-W", "ignore", "-c", program, _HOST, str(port)]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            if _comes_up(process, f"http://{_HOST}:{port}{path}"):
                yield f"http://{_HOST}:{port}"
                return
        finally:
            _end(process)
    raise RuntimeError("the server does not start")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((_HOST, 0))
        return int(found.getsockname()[1])


def _comes_up(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until a server answers; False where it ends before, or takes too long."""
    end = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < end:
        if _answers(url):
            return True
        time.sleep(0.1)
    return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
