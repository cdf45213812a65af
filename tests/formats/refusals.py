"""Errors that a format must raise: their code, words that they must say, and the place that they must name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from transaxle.errors import TransaxleError, gathered


@contextmanager
def refuses(
    code: str, *words: str, hint: str = "", exit_code: int | None = None, **where: str | None
) -> Iterator[pytest.ExceptionInfo[TransaxleError]]:
    """Whatever is done inside is refused; `where` is the file or the tensor that is named."""
    with pytest.raises(TransaxleError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, str(error)
    assert type(error) is type(gathered(error.refusals))
    assert exit_code in (None, error.exit_code)
    assert hint in error.hint
    assert all(word in str(error) for word in words), str(error)
    assert {key: getattr(error.where, key) for key in where} == where, str(error)
