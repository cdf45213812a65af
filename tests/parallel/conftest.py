"""Ranks live as long as the session, see `tests.live.conftest`; DeepSpeed's checkpoints are those of its own tests."""

from __future__ import annotations

from tests.formats.deepspeed.conftest import farm
from tests.live.conftest import _ranks

__all__ = ["_ranks", "farm"]
