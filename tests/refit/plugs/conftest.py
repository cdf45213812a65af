"""Ranks live as long as the session, see `tests.live.conftest`."""

from __future__ import annotations

from tests.live.conftest import _ranks

__all__ = ["_ranks"]
