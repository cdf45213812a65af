"""Tests of the engine: plans, their execution, and what is said about two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import settings

from transaxle.errors import Code, TransaxleError

law = settings(derandomize=True, max_examples=100, database=None)
"""How properties are tested: the same examples in every run, however slow the machine is."""


@contextmanager
def demand_refusal(code: Code, *said: str) -> Iterator[pytest.ExceptionInfo[TransaxleError]]:
    """Demand that what follows is refused with a code and in words."""
    with pytest.raises(TransaxleError) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    for words in said:
        assert words in str(caught.value)
