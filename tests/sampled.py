"""The part of each sweep that `make test` runs.

A sweep asks one question of many cases: all models that a peer ships, all degrees, all points at which a job can be
killed. Its cases have the mark `oracle`, and `make oracle` runs all of them. Every other run takes a tenth, which
rotates with the number of commits: ten commits in a row cover everything but the longest sweeps, which say with
`oracle(turns=30)` that they take a thirtieth.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import pytest
from _pytest.scope import Scope

OPTION = "--turn"
DEFERRED = "deferred"
"""The mark of cases that run at another turn."""
TURNS = 10
"""Number of commits in a row that cover a sweep that does not say another number."""


def current_turn() -> int:
    """Return the number of commits, or 0 outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "HEAD"]
    try:
        counted = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return int(counted.stdout) if counted.returncode == 0 else 0


def defer_cases(items: Iterable[pytest.Item], turn: int) -> None:
    """Mark the cases of sweeps that run at another turn.

    A test whose cases all belong to a sweep, and are fewer than its turns, runs one of them at each turn.
    """
    items = list(items)
    swept: dict[str, list[pytest.Item]] = {}
    always = set()
    for item in items:
        if item.get_closest_marker("oracle"):
            swept.setdefault(_test(item), []).append(item)
        else:
            always.add(_test(item))
    for test, cases in swept.items():
        marker = cases[0].get_closest_marker("oracle")
        turns = marker.kwargs.get("turns", TURNS) if marker else TURNS
        period = len(cases) if 1 < len(cases) < turns and test not in always else turns
        for number, item in enumerate(cases, crc32(_origin(cases[0]).encode())):
            if number % period != turn % period:
                item.add_marker(DEFERRED)


def _origin(item: pytest.Item) -> str:
    """Return what the place of a sweep in the rotation depends on: its test, or a fixture of the module with the cases.

    Tests that share such a fixture run the same case at each turn, so that it is set up once.
    """
    call = getattr(item, "callspec", None)
    scopes = {} if call is None else call._arg2scope  # pytest has no public way to ask
    file = item.nodeid.partition("::")[0]
    shared = [name for name, scope in scopes.items() if scope is not Scope.Function]
    return f"{file}::{shared[0]}" if shared and len(scopes) == 1 else _test(item)


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
