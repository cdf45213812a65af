"""Ranks live as long as the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.ranks import stop_all


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    stop_all()
