"""The digests that are kept, how they are written, and how what differs from them is named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REWRITE = "--rewrite-golden"
PROPERTY = "golden"
"""Property of a test's report: the digests of its case."""
FILE = Path(__file__).with_name("digests.json")
Case = dict[str, Any]
"""Step, or `files` -> what -> digest."""


@cache
def kept() -> dict[str, Case]:
    """Return the digests of all cases."""
    found: dict[str, Case] = json.loads(FILE.read_text("utf-8"))
    return found


def write(cases: Mapping[str, Case]) -> None:
    """Write digests: a line for each step, so that a change shows which one it is."""
    lines = []
    for name, case in sorted(cases.items()):
        steps = ",\n".join(
            f"  {json.dumps(step)}: {json.dumps(each, ensure_ascii=False, sort_keys=True)}"
            for step, each in case.items()
            if each
        )
        lines.append(f" {json.dumps(name)}: {{\n{steps}\n }}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def differences(before: Case, after: Case) -> Iterator[str]:
    """Name what differs: the step or the files, which of them, what was kept, and what is there now."""
    for step in dict.fromkeys((*before, *after)):
        old, new = before.get(step, {}), after.get(step, {})
        for what in sorted(old.keys() | new.keys()):
            if old.get(what) != new.get(what):
                yield f"{step}: {what}: was {old.get(what, 'absent')}, is {new.get(what, 'absent')}"


class Rewriting:
    """Takes the digests of all cases that ran, from workers too, and writes them when the session ends."""

    def __init__(self) -> None:
        self._found: dict[str, Case] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take those of one case."""
        properties: dict[str, Any] = dict(report.user_properties)
        if report.when == "call" and report.passed and PROPERTY in properties:
            self._found |= properties[PROPERTY]

    def pytest_sessionfinish(self) -> None:
        """Write them with those of cases that did not run, if there still are such cases."""
        if not self._found:
            return
        from tests.golden.cases import CASES

        before = kept() if FILE.exists() else {}
        write({name: case for name, case in {**before, **self._found}.items() if name in CASES})
