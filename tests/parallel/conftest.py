"""DeepSpeed's checkpoints are those of its own tests."""

from __future__ import annotations

from tests.formats.deepspeed.conftest import farm

__all__ = ["farm"]
