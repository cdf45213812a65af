"""Lists of modules match as their own readers have it, in time that is linear in the name."""

from __future__ import annotations

import fnmatch
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.quiet import quiet
from transaxle.encodings.conventions.pattern import (
    Expression,
    PatternError,
    compressed_modules,
    transformers_modules,
    wildcard_modules,
)

LETTERS = "ab.0-"
names = st.text(LETTERS, max_size=9)
_atoms = st.sampled_from(["a", "b", r"\.", ".", "0", r"\d", r"\w", r"\S", "[ab]", "[^a]", "[a-b0]", "[.-]", r"[\d-]"])


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counts = st.sampled_from(["*", "+", "?", "*?", "+?", "{2}", "{1,2}", "{0,1}", "{2,}", "{,2}", "{0}"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, counts).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        inner.map(lambda text: f"{text}$"),
        inner.map(lambda text: f"(|{text})"),
    )


expressions = st.recursive(_atoms, _larger, max_leaves=8)


@given(expressions, names)
def test_expressions_match_as_in_re(text: str, name: str) -> None:
    ends = list(Expression([text]).ends(name))
    assert (re.match(text, name) is not None) == bool(ends)
    assert (re.fullmatch(text, name) is not None) == (len(name) in ends)
    if "$" not in text:
        assert ends == [end for end in range(len(name) + 1) if re.fullmatch(text, name[:end])]


@given(st.lists(expressions, min_size=1, max_size=3), names)
def test_several_are_one_or_the_other(texts: list[str], name: str) -> None:
    together = set(Expression(texts).ends(name))
    assert together == {end for text in texts for end in Expression([text]).ends(name)}


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
@settings(deadline=None)
@given(texts=st.lists(st.one_of(expressions, names.filter(bool)), min_size=1, max_size=3), name=names)
def test_lists_of_transformers(should_convert: Any, texts: list[str], name: str) -> None:
    """As transformers has it, with a dot in a plain name taken for a dot."""
    plain = [re.escape(text) if re.fullmatch(r"[\w.-]+", text) else text for text in texts]
    suffix = any(name.endswith(text) for text in texts)
    assert (name in transformers_modules(texts)) == (suffix or not should_convert(name, plain))


@pytest.mark.peers
@settings(deadline=None)
@given(texts=st.lists(st.one_of(expressions.map("re:{}".format), names), max_size=3), name=names)
def test_lists_of_compressed_tensors(match_name: Any, texts: list[str], name: str) -> None:
    assert (name in compressed_modules(texts)) == any(match_name(name, text) for text in texts)


@given(st.lists(st.text("ab.*?", max_size=6), max_size=3), names)
def test_lists_of_modelopt(texts: list[str], name: str) -> None:
    assert (name in wildcard_modules(texts)) == any(fnmatch.fnmatchcase(name, text) for text in texts)


def test_a_name_stands_for_what_is_inside_it_and_for_its_ends() -> None:
    listed = transformers_modules(["lm_head", "model.layers.1", "model.layers.*.mlp.gate", "fc1"])
    inside = ["lm_head", "model.layers.1", "model.layers.1.q", "model.layers.3.mlp.gate", "model.layers.23.fc1"]
    outside = ["lm_head2", "model.layers.11", "model.layers.11.q", "model.layers.3.mlp.gate_proj", "fc12"]
    assert [name for name in inside + outside if name in listed] == inside


@pytest.mark.parametrize("text", ["(a*)*b", "(a|a)*b", "(.*)*(.*)*x", "a?" * 60 + "a" * 60, "(a+)+$", "(?:$$)*b"])
def test_no_expression_backtracks(text: str) -> None:
    began = time.process_time()
    assert list(Expression([text]).ends("a" * 50 + "!")) == []
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "text",
    [
        *["(", ")", "[a", "a)b", "*a", "a**", "(?=a)", "(?!a)", r"(a)\1", r"\b", "\\", "a{3,2}", "a{2000}", "[b-a]"],
        *["a^", "(" * 200 + ")" * 200, "((a{1000}){1000}){1000}"],
    ],
)
def test_what_has_no_automaton_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        Expression([text])


def test_work_is_bounded() -> None:
    """Names of which each needs new sets of states: what would take hours is refused after seconds."""
    heavy = Expression(["(" + "|".join(f".{{{n}}}x" for n in range(80)) + ")*y"])
    with pytest.raises(PatternError, match="too long"):
        [list(heavy.ends(f"{number * 7919:020b}".replace("1", "x") * 40)) for number in range(100_000)]


def test_braces_that_are_no_count_are_letters() -> None:
    assert list(Expression(["a{b}"]).ends("a{b}")) == [4]
