from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.axes.apply import law
from transaxle.axes.notation.name import Counter, Hole, Name, skeleton
from transaxle.errors import Refused, UsageError

literal = st.text(st.sampled_from("ab.1µ層_"), max_size=4)


@st.composite
def names(draw: st.DrawFn) -> Name:
    axes = draw(st.permutations("lem"))[: draw(st.integers(0, 3))]
    texts = [draw(literal), *(draw(literal.filter(bool)) for _ in axes[1:]), draw(literal)][: len(axes) + 1]
    return Name(texts[0] + "".join(f"{{{axis}}}{text}" for axis, text in zip(axes, texts[1:], strict=True)))


@law
@given(names(), st.data())
def test_match_is_the_inverse_of_format(name: Name, data: st.DataObject) -> None:
    numbers = tuple(data.draw(st.integers(0, 120)) for _ in name.axes)
    written = name.format(numbers)
    found = name.match(written)
    assert found is not None
    assert name.format(found) == written
    if "1" not in "".join(name.literals):
        assert found == numbers
    assert skeleton(written) == name.skeleton


def test_parts() -> None:
    name = Name("decoder.{m+L}.experts.weight{e@ep}")
    assert name.axes == ("m", "e")
    assert name.holes == (Hole("m", "+L", None), Hole("e", None, "ep"))
    assert name.literals == ("decoder.", ".experts.weight", "")
    assert name.match("decoder.12.experts.weight0") == (12, 0)
    assert Name("mtp_layers.{l-L}.w").holes == (Hole("l", "-L", None),)
    assert Name("x.{l-3}").holes[0].shift_value({}) == -3
    assert [Hole("l", shift, None).shift_axis for shift in ("-L", "+L", "+3", None)] == ["L", "L", None, None]


@pytest.mark.parametrize(
    "other",
    [
        "a.01.w",
        "a.+1.w",
        "a.-1.w",
        "a. 1.w",
        "a.1 .w",
        "a.1_0.w",
        "a.1.0.w",
        "a..w",
        "a.x.w",
        "a.١.w",
        "a.²..w",
        "b.a.1.w",
        "a.1.w.b",
        "a.1.weight",
        "a.1.w\n",
        "A.1.w",
        "a.12345678901.w",
        "a." + "9" * 5000 + ".w",
    ],
)
def test_a_hole_is_a_canonical_decimal_and_the_rest_is_literal(other: str) -> None:
    name = Name("a.{l}.w")
    assert name.match("a.10.w") == (10,)
    assert name.match("a.0.w") == (0,)
    assert name.match(other) is None


def test_literals_are_no_patterns() -> None:
    assert Name("a.{l}").match("ax1") is None
    assert Name("a.*").match("a.*") == ()
    assert Name("a.*").match("a.b") is None


def test_digits_beside_a_hole() -> None:
    name = Name("w1{e}")
    assert name.match("w110") == (10,)
    assert name.match("w10") == (0,)
    assert name.match("w1") is None
    assert name.skeleton == skeleton("w110") == skeleton("w1")


@law
@given(st.text(st.characters(exclude_categories=())))
def test_a_skeleton_has_one_zero_for_each_run_of_digits(name: str) -> None:
    assert skeleton(name) == re.sub("[0-9]+", "0", name)


def test_skeletons_tell_names_apart_that_differ_in_more_than_digits() -> None:
    assert skeleton("layers.10.w1") == skeleton("layers.2.w31") == "layers.0.w0"
    assert skeleton("layers.1.w") != skeleton("layers.1.b")


def test_what_is_added_to_an_index() -> None:
    assert Hole("m", None, None).shift_value({}) == 0
    assert Hole("m", "+3", None).shift_value({}) == 3
    assert Hole("m", "+L", None).shift_value({"L": 61}) == 61
    assert Hole("l", "-L", None).shift_value({"L": 61}) == -61
    with pytest.raises(UsageError, match="--axis L=N") as caught:
        Hole("m", "+L", None).shift_value({"l": 61})
    assert caught.value.code == "UNKNOWN_AXIS"


def test_several_axes_in_one_number() -> None:
    name = Name("a.{m}.{2*( l  e )+L}.{e2}")
    assert name.axes == ("m", "l", "e", "e2")
    assert name.inner == ("e",)
    assert [hole.text for hole in name.holes] == ["{m}", "{2*(l e)+L}", "{e2}"]
    numbering = name.numbering({"e": 4, "L": 10})
    assert numbering.numbers((7, 2, 3, 0)) == (7, 32, 0)
    assert numbering.position("a.7.32.0") == (7, 2, 3, 0)
    assert numbering.position("a.7.31.0") is None
    assert numbering.position("a.7.8.0") is None
    assert numbering.numbers((7, 2, 4, 0)) == (7, None, 0)
    for axis, sizes in (("e", {"L": 10}), ("L", {"e": 4})):
        with pytest.raises(UsageError, match=f"--axis {axis}=N"):
            name.numbering(sizes)
    assert Name("a.{(l e)}").numbering({"e": 0}).position("a.3") is None


@law
@given(st.lists(st.integers(1, 5), min_size=0, max_size=3), st.integers(1, 4), st.integers(-3, 9), st.integers(0, 300))
def test_a_number_has_one_index_and_an_index_one_number(spans: list[int], factor: int, shift: int, number: int) -> None:
    counter = Counter(factor, shift, tuple(spans))
    indices = counter.indices(number)
    if indices is None:
        assert number < shift or (number - shift) % factor
    else:
        assert counter.number(indices) == number
        assert all(0 <= index < span for index, span in zip(indices[1:], spans, strict=True))


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("a.{l", 3, "a hole such as {l}, {m+L}, {l-L}, {2*l+1}, {(l e)} or {e@ep}"),
        ("a.l}", 4, "a hole such as"),
        ("a.{1}", 3, "a hole such as"),
        ("a.{l+}.{e}", 3, "a hole such as"),
        ("a.{l-}", 3, "a hole such as"),
        ("a.{l*L}", 3, "a hole such as"),
        ("a.{l}.{}", 7, "a hole such as"),
        ("a.{l}.{l}", 7, "each axis once"),
        ("a.{l}{e}", 6, "text between two holes"),
        ("a.{(l)}", 3, "a hole such as"),
        ("a.{(l e}", 3, "a hole such as"),
        ("a.{(l (e m))}", 3, "a hole such as"),
        ("a.{(l e)}.{(m l)}", 11, "each axis once; 'l' occurs twice"),
        ("a.{(l l)}", 3, "each axis once; 'l' occurs twice"),
        ("a.{(l e)@ep}", 3, "one axis before '@'"),
    ],
)
def test_errors_show_the_column(text: str, column: int, expected: str) -> None:
    with pytest.raises(Refused, match="CORRUPT") as caught:
        _ = Name(text, 4).holes
    lines = caught.value.refusals[0].message.splitlines()
    assert lines[0] == text
    assert lines[1] == " " * (column - 1) + "^"
    assert lines[2].startswith(f"column {column + 4}: expected {expected}")
