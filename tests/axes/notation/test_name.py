"""Names: templates are matched and filled, and two of them are compared for names in common."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.axes.apply import law
from tests.some import some
from transaxle.axes.notation import tables
from transaxle.axes.notation.name import Counter, Hole, Name, natural, skeleton
from transaxle.errors import Refused, TransaxleError, UsageError

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
    found = some(name.match(written))
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
    shifts = [Hole("m", shift, None).shift_value({"L": 61}) for shift in (None, "+3", "+L", "-L")]
    assert shifts == [0, 3, 61, -61]
    with pytest.raises(UsageError, match="--axis L=N") as caught:
        Hole("m", "+L", None).shift_value({"l": 61})
    assert caught.value.code == "UNKNOWN_AXIS"


@law
@given(
    st.lists(st.lists(st.sampled_from(["w", "W1", "10", "9", "102", "\0", "\1", ".", "ä"]), max_size=5).map("".join))
)
def test_natural_order_compares_numbers_as_numbers_and_all_else_as_characters(texts: list[str]) -> None:
    def order(text: str) -> list[tuple[int, int]]:
        pieces = re.split("([0-9]+)", text)
        return [
            key
            for number, piece in enumerate(pieces)
            for key in ([(0, int(piece))] if number % 2 else [(1, ord(character)) for character in piece])
        ]

    assert sorted(texts, key=natural) == sorted(texts, key=order)


@pytest.mark.parametrize("other", [
    "a.01.w", "ax1.w", "a.+1.w", "a.-1.w", "a. 1.w", "a.1 .w", "a.1_0.w", "a.1.0.w", "a..w", "a.x.w", "a.١.w", "a.²..w",
    "b.a.1.w", "a.1.w.b", "a.1.weight", "a.1.w\n", "A.1.w", "a.12345678901.w", "a." + "9" * 5000 + ".w",
])  # fmt: skip
def test_a_hole_is_a_canonical_decimal_and_the_rest_is_literal(other: str) -> None:
    name = Name("a.{l}.w")
    assert name.match("a.10.w") == (10,)
    assert name.match("a.0.w") == (0,)
    assert name.match(other) is None
    assert (Name("a.*").match("a.*"), Name("a.*").match("a.b")) == ((), None), "literals are no patterns"


@law
@given(st.text(st.characters(exclude_categories=())))
def test_a_skeleton_has_one_zero_for_each_run_of_digits(name: str) -> None:
    assert skeleton(name) == re.sub("[0-9]+", "0", name)


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


@pytest.mark.parametrize(("text", "column", "expected"), [
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
])  # fmt: skip
def test_errors_show_the_column(text: str, column: int, expected: str) -> None:
    with pytest.raises(Refused, match="CORRUPT") as caught:
        _ = Name(text, 4).holes
    lines = caught.value.refusals[0].message.splitlines()
    assert lines[0] == text
    assert lines[1] == " " * (column - 1) + "^"
    assert lines[2].startswith(f"column {column + 4}: expected {expected}")


# Issue 15, tables: no two lines of a dialect hold one name, or the first would swallow what is the other's.

HEAD = """family toy
  axes l=num_layers L=num_layers m=ahead e=experts f=4 d=hidden
  let sparse = l in moe_layers
  x : l d
  y : d
  z : m d
  w : l e d
  v : f d
dialect hf
"""


def refused(*lines: str) -> str | None:
    """Return the name that two of the lines share; None where the table is read."""
    try:
        tables.read(HEAD + "\n".join(f"  {line}" for line in lines) + "\n")
    except TransaxleError as error:
        (refusal,) = error.refusals
        assert refusal.code == "CORRUPT"
        text = [line.partition(" when ")[0].partition(" optional")[0] for line in lines]
        assert refusal.message.splitlines()[:2] == text
        assert "when" in refusal.hint
        return refusal.message.split("both lines match '")[1].split("'")[0]
    return None


@pytest.mark.parametrize(("one", "two", "name"), [
    ("layers.{l}.x = x[d]", "layers.2.x = y[d]", "layers.2.x"),
    ("layers.2.x = y[d]", "layers.{l}.x = x[d]", "layers.2.x"),
    ("layers.{l}.x = x[d]", "layers.{m}.x = z[d]", "layers.0.x"),
    ("layers.{l}.x = x[d]", "layers.{m+5}.x = z[d]", "layers.5.x"),
    ("part{f}.x = v[d]", "part3.x = y[d]", "part3.x"),
    ("fc1{f}.x = v[d]", "fc{l}.x = x[d]", "fc10.x"),
    ("a.{l}.b.{e}.c = w[d]", "a.3.b.{f}.c = v[d]", "a.3.b.0.c"),
    ("a.{(l e)} = w[d]", "a.5 = y[d]", "a.5"),
    ("a.{(l e)} = w[d]", "a.{m+L} = z[d]", "a.0"),
    ("a.{2*(l e)} = w[d]", "a.{m} = z[d]", "a.0"),
    ("layers.{l}.x = x[d] when sparse", "layers.{m}.x = z[d]", "layers.0.x"),
    ("layers.{l}.x = x[d] when l > 2", "layers.5.x = y[d]", "layers.5.x"),
    ("layers.{l}.x = x[d] optional", "layers.5.x = y[d] when old", "layers.5.x"),
    ("layers.{l}.x = x[d] when mxfp4", "layers.5.x = y[d] when not nvfp4", "layers.5.x"),
])  # fmt: skip
def test_lines_that_share_a_name_are_refused(one: str, two: str, name: str) -> None:
    assert refused(one, two) == name


@pytest.mark.parametrize("lines", [
    ("layers.{l}.x = x[d]", "layers.{m+L}.x = z[d]"),
    ("a.{2*(l e)} = w[d]", "a.{2*m+1} = z[d]"),
    ("layers.{m+L}.x = z[d]", "layers.{l}.x = x[d]"),
    ("part{f}.x = v[d]", "part4.x = y[d]"),
    ("part{f}.x = v[d]", "part03.x = y[d]"),
    ("layers.{l}.x = x[d]", "layers.{l}.y = x[d]", "layers.2.z = y[d]"),
    ("layers.{l}.x = x[d] when l != 2", "layers.2.x = y[d]"),
    ("layers.{l}.x = x[d] when l > 2", "layers.2.x = y[d]"),
    ("layers.{l}.x = x[d] when sparse", "layers.{m}.x = z[d] when not m in moe_layers"),
    ("layers.{l}.x = x[d] when l < 2", "layers.{m}.x = z[d] when m >= 2"),
    ('layers.{l}.x = x[d] when kind[l] == "a"', 'layers.{l}.x = y[d] when kind[l] == "b"'),
    ("layers.{l}.x = x[d] when mxfp4", "layers.{l}.x = y[d] when nvfp4"),
    ("layers.{l}.x = x[d] when old", "layers.{l}.x = y[d] when not old"),
])  # fmt: skip
def test_lines_that_exclude_each_other_are_sound(lines: tuple[str, ...]) -> None:
    table = HEAD.replace("  y : d\n", "  y : l d\n") if "{l}.x = y" in lines[1] else HEAD
    assert tables.read(table + "\n".join(f"  {line}" for line in lines) + "\n")


def test_lines_taken_over_from_another_dialect_count() -> None:
    text = HEAD + "  layers.{l}.x = x[d]\ndialect more like hf\n  layers.2.x = y[d]\n"
    with pytest.raises(TransaxleError, match=r"(?s)layers\.2\.x.*dialect more"):
        tables.read(text)


def test_many_fixed_names_take_no_time() -> None:
    lines = "".join(f"  layers.{number}.x = y[d] when never\n" for number in range(3_000))
    assert tables.read(HEAD + lines)


@pytest.mark.parametrize(("one", "two", "name"), [
    ("n.{2*l} = x[d]", "n.{2*l+1} = x[d]", None),
    ("n.{2*l} = x[d]", "n.{3*l+1} = x[d]", "n.4"),
    ("n.{2*l} = x[d]", "n.{l} = x[d]", "n.0"),
    ("n.{2*l+1} = x[d]", "n.4 = y[d]", None),
    ("n.{2*l+1} = x[d]", "n.5 = y[d]", "n.5"),
    ("n.{50*l+1} = x[d]", "n.{60*l+11} = x[d]", "n.251"),
    ("n.{4*l+900} = x[d]", "n.{6*l+1} = x[d]", None),
    ("n.{4*l+900} = x[d]", "n.{6*l+2} = x[d]", "n.908"),
    ("n.{2*l-1} = x[d]", "n.{2*m} = z[d]", None),
    ("n.{2*l} = x[d]", "n.{2*m+L} = z[d]", "n.0"),
    ("n.{l} = x[d]", "n.{2*m+L} = z[d]", None),
    ("n.{2*f} = v[d]", "n.{l+7} = x[d]", None),
    ("n.{2*f} = v[d]", "n.{l+6} = x[d]", "n.6"),
])  # fmt: skip
def test_names_whose_numbers_are_multiplied(one: str, two: str, name: str | None) -> None:
    assert refused(one, two) == name
    assert (refused(two, one) is None) == (name is None)
