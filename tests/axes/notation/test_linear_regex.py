"""Expressions match as in `re`, in time that is linear in the name."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.axes.notation.linear_regex import Expressions, PatternError

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
    ends = list(Expressions([text]).ends(name))
    assert (re.match(text, name) is not None) == bool(ends)
    assert (re.fullmatch(text, name) is not None) == (len(name) in ends)
    if "$" not in text:
        assert ends == [end for end in range(len(name) + 1) if re.fullmatch(text, name[:end])]


@given(st.lists(expressions, min_size=1, max_size=3), names)
def test_of_several_each_matches_as_alone(texts: list[str], name: str) -> None:
    together = Expressions(texts)
    assert set(together.ends(name)) == {end for text in texts for end in Expressions([text]).ends(name)}
    assert together.matching(name) == [number for number, text in enumerate(texts) if re.match(text, name)]


@pytest.mark.parametrize("text", ["(a*)*b", "(a|a)*b", "(.*)*(.*)*x", "a?" * 60 + "a" * 60, "(a+)+$", "(?:$$)*b"])
def test_no_expression_backtracks(text: str) -> None:
    began = time.process_time()
    assert list(Expressions([text]).ends("a" * 50 + "!")) == []
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
        Expressions([text])


def test_work_is_bounded() -> None:
    """Names of which each needs new sets of states: what would take hours is refused after seconds."""
    heavy = Expressions(["(" + "|".join(f".{{{n}}}x" for n in range(80)) + ")*y"])
    with pytest.raises(PatternError, match="too long"):
        [list(heavy.ends(f"{number * 7919:020b}".replace("1", "x") * 40)) for number in range(100_000)]


def test_braces_that_are_no_count_are_letters() -> None:
    assert list(Expressions(["a{b}"]).ends("a{b}")) == [4]
