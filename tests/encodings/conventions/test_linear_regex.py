"""Expressions match as in `re`, in time that is linear in the name."""

from __future__ import annotations

import fnmatch
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.quiet import quiet
from transaxle.encodings.conventions.linear_regex import Expressions, PatternError
from transaxle.encodings.conventions.scheme import compressed_modules, transformers_modules, wildcard_modules

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


def ends(expressions: Expressions, name: str) -> list[int]:
    return [at for at in range(len(name) + 1) if expressions.ends_at(name, at)]


@given(expressions, names)
def test_expressions_match_as_in_re(text: str, name: str) -> None:
    compiled = Expressions([text])
    assert compiled.match(name) == (re.match(text, name) is not None)
    assert compiled.ends_at(name, len(name)) == (re.fullmatch(text, name) is not None)
    wanted = [end for end in range(len(name) + 1) if re.match(f"(?:{text})(?<=^.{{{end}}})", name, re.DOTALL)]
    assert ends(compiled, name) == wanted


@given(st.lists(expressions, min_size=1, max_size=3), names)
def test_of_several_each_matches_as_alone(texts: list[str], name: str) -> None:
    together = Expressions(texts)
    assert ends(together, name) == sorted({end for text in texts for end in ends(Expressions([text]), name)})
    assert together.find_matches(name) == [number for number, text in enumerate(texts) if re.match(text, name)]


@pytest.mark.parametrize("text", ["(a*)*b", "(a|a)*b", "(.*)*(.*)*x", "a?" * 60 + "a" * 60, "(a+)+$", "(?:$$)*b"])
def test_no_expression_backtracks(text: str) -> None:
    began = time.process_time()
    assert ends(Expressions([text]), "a" * 50 + "!") == []
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "text",
    [
        *["(", ")", "[a", "a)b", "*a", "a**", "(?=a)", "(?!a)", r"(a)\1", r"\b", "\\", "a{3,2}", "a{2000}", "[b-a]"],
        *[r"[\b]", r"\pL", r"\C", "(?i)a", "(?", "a*+", "a++", "a{1,2}+", "\ud800"],
        *["(" * 200 + ")" * 200, "(a|" * 500_000 + "a" + ")" * 500_000, "a?" * 100_000, "((a{1000}){1000}){1000}"],
    ],
)
def test_what_has_no_automaton_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        Expressions([text])


@pytest.mark.parametrize(("text", "name"), [
    ("a^", "a"), ("^a|^b", "b"), (r"\_\-\é", "_-é"), (r"[\]\[^-]", "["), ("[[:a]", ":"), ("[[:a]", "["), ("[]a]", "]"),
    ("[^]a]", "a"), ("[^[a]", "["), ("[^^a]", "^"), ("a{,}", "aaa"), (r"a\Z", "ab"), ("é+", "éé"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_what_re_writes_in_another_way(text: str, name: str) -> None:
    assert Expressions([text]).match(name) == (re.match(text, name) is not None)
    assert ends(Expressions(["a{b}"]), "a{b}") == [4], "braces that are no count are letters"


def test_classes_of_characters_are_those_of_ascii() -> None:
    """RE2 has no others, and would silently not match."""
    assert Expressions([r"model\.\d+"]).match("model.5")
    with pytest.raises(PatternError, match="ASCII"):
        Expressions([r"model\.\w+"]).match("model.größe")
    assert Expressions(["model.*"]).match("model.größe")


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name needs new sets of states: a search that would take hours is refused after a set time."""
    monkeypatch.setattr("transaxle.encodings.conventions.linear_regex._MOST_SECONDS", 0.1)
    heavy = Expressions(["(" + "|".join(f".{{{n}}}x" for n in range(80)) + ")*y"])
    with pytest.raises(PatternError, match="too long"):
        [heavy.match(f"{number * 7919:020b}".replace("1", "x") * 40) for number in range(100_000)]


def test_many_are_told_apart_in_one_search() -> None:
    """Asked one by one, 400 patterns of DeepSpeed took so long for 3,300 names that the limit of time was reached."""
    many = Expressions([rf"^layers\.{number}\.experts\.\d+\.weight$" for number in range(3000)])
    began = time.process_time()
    for number in range(0, 3000, 10):
        assert many.find_matches(f"layers.{number}.experts.7.weight") == [number]
    assert time.process_time() - began < 2


def test_the_time_of_ordinary_searches_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of a large checkpoint is asked a million times, and a process may open many."""
    clock = iter(range(0, 10**9, 2))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * 1e-6)
    listed = Expressions(["lm_head", r"model\.layers\.\d+\.gate$"])
    monkeypatch.setattr("transaxle.encodings.conventions.linear_regex._MOST_SECONDS", 1e-3)
    assert all(listed.match("lm_head") for _ in range(1000))


def test_of_too_many_none_is_told_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    many = Expressions([f"a{number}.*b" for number in range(1000)])
    assert many.match("a17b")
    monkeypatch.setattr("transaxle.encodings.conventions.linear_regex._MOST_BYTES", 1 << 14)
    with pytest.raises(PatternError, match="too many"):
        many.find_matches("a17b")


# Lists of modules match as their own readers have it.


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
