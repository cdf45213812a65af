"""Issue 15, tables: no two lines of a dialect hold one name, or the first would swallow what is the other's."""

from __future__ import annotations

import pytest

from transaxle.axes.notation import tables
from transaxle.errors import TransaxleError

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


@pytest.mark.parametrize(
    ("one", "two", "name"),
    [
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
    ],
)
def test_lines_that_share_a_name_are_refused(one: str, two: str, name: str) -> None:
    assert refused(one, two) == name


@pytest.mark.parametrize(
    "lines",
    [
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
    ],
)
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


@pytest.mark.parametrize(
    ("one", "two", "name"),
    [
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
    ],
)
def test_names_whose_numbers_are_multiplied(one: str, two: str, name: str | None) -> None:
    assert refused(one, two) == name
    assert (refused(two, one) is None) == (name is None)
