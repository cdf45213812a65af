"""Lists of modules match as their own readers have it."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.encodings.conventions.test_linear_regex import expressions, names
from tests.oracles.quiet import quiet
from transaxle.encodings.conventions.scheme import compressed_modules, transformers_modules, wildcard_modules


@pytest.fixture(scope="module")
def should_convert() -> Any:
    with quiet():
        from transformers.quantizers.quantizers_utils import should_convert_module
    return should_convert_module


@pytest.fixture(scope="module")
def match_name() -> Any:
    with quiet():
        from compressed_tensors.utils.match import match_name
    return match_name


@pytest.mark.peers
@given(texts=st.lists(st.one_of(expressions, names.filter(bool)), min_size=1, max_size=3), name=names)
def test_lists_of_transformers(should_convert: Any, texts: list[str], name: str) -> None:
    """As transformers has it, with a dot in a plain name taken for a dot."""
    plain = [re.escape(text) if re.fullmatch(r"[\w.-]+", text) else text for text in texts]
    suffix = any(name.endswith(text) for text in texts)
    assert (name in transformers_modules(texts)) == (suffix or not should_convert(name, plain))


@pytest.mark.peers
@given(texts=st.lists(st.one_of(expressions.map("re:{}".format), names), max_size=3), name=names)
def test_lists_of_compressed_tensors(match_name: Any, texts: list[str], name: str) -> None:
    assert (name in compressed_modules(texts)) == any(match_name(name, text) for text in texts)


@given(st.lists(st.text("ab.*?", max_size=6), max_size=3), names)
def test_lists_of_modelopt(texts: list[str], name: str) -> None:
    assert (name in wildcard_modules(texts)) == any(fnmatch.fnmatchcase(name, text) for text in texts)
