"""What a refusal has to say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from transaxle.errors import Code, TransaxleError


@contextmanager
def refused(code: Code, *texts: str, tensors: Sequence[str | None] | None = None, hint: str = "") -> Iterator[None]:
    """Demand that what is inside is refused, with this code alone, these texts and, if given, for these tensors."""
    with pytest.raises(TransaxleError) as caught:
        yield
    assert {each.code for each in caught.value.refusals} == {code}
    assert tensors is None or [each.where.tensor for each in caught.value.refusals] == list(tensors)
    assert hint in caught.value.hint
    said = str(caught.value)
    assert not [text for text in texts if text not in said], said
