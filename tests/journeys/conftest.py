"""The fixture of journeys, and their marks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys import OPTION
from tests.journeys.record import MARK, SAMPLED, Journey, name_of

_FAILED = pytest.StashKey[bool]()
_FIXTURE = "journey"


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is a journey and not of the sample."""
    for item in items:
        journeys = _FIXTURE in getattr(item, "fixturenames", ()) and item.path.is_relative_to(Path(__file__).parent)
        if journeys and not item.get_closest_marker(SAMPLED):
            item.add_marker(getattr(pytest.mark, MARK))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep whether a journey failed, for its fixture."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed or hasattr(report, "wasxfail")
    return report  # type: ignore[return-value]


@pytest.fixture
def journey(request: pytest.FixtureRequest) -> Iterator[Journey]:
    """Note the steps of a journey; with `--journeys` they are written when it ends, also where it fails."""
    noted = Journey(name_of(request.node.nodeid), request.module.PEER)
    yield noted
    if folder := request.config.getoption(OPTION):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        noted.write(Path(folder), worker, failed=request.node.stash[_FAILED])
