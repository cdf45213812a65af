"""Ranks live as long as the session; the S3 server is that of the formats' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.formats.s3_server import bucket, s3_server
from tests.live.ranks import stop_all

__all__ = ["bucket", "s3_server"]


@pytest.fixture(scope="session", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    stop_all()
