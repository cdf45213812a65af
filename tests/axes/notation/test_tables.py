from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.axes.apply import only
from tests.some import some
from tests.work import assert_linear, calls
from transaxle.axes.notation import tables
from transaxle.axes.notation.family import Sizes
from transaxle.errors import Refused, TransaxleError

TOY = """
family toy                            # a comment
  model_type toy toy_text
  axes  l=layers d=hidden f=inner
  axis  r = heads[l] // kv if uneven else heads / kv
  axes  k=kv n p
  let even = l % 2 == 0
  up    : l f d
  down  : l d f           when even
  q     : l k r d
  norm  : d
  bias  : l f             when biased
  extra : l f             optional
  embed : n d
  head  : n d
  tie head = embed        when tied

dialect hf
  layers.{l}.up = up[f d]
  layers.{l}.down = down[d f] when even
  layers.{l}.q = q[(k r) d]
  layers.{l}.bias = bias[f] when biased
  layers.{l}.extra = extra[f]
  norm = norm[d] lossy: norm - 1
  embed = embed[n d]
  head = head[n d] when not tied
  ignore layers.{l}.inv_freq

dialect packed 0.10
  up_down.{l} = [d [up:f | down:f]]
  q.{l} = q[k r d]
  embed = [[embed:n | 0:p] d]

dialect packed 0.9 like packed
  q_.{l} = q[k r d]

dialect other like hf
  n = norm[d] lossy: 2 * norm + 0.5
"""


def test_a_table() -> None:
    toy = only(TOY)
    assert toy.name == "toy"
    assert toy.model_types == ("toy", "toy_text")
    assert list(toy.axes) == ["l", "d", "f", "r", "k", "n", "p"]
    assert toy.axes["p"] is None
    assert toy.tensors["q"].axes == ("l", "k", "r", "d")
    assert toy.tensors["up"].when is None
    assert [(tie.alias, tie.original, tie.when.text) for tie in toy.ties] == [("head", "embed", "tied")]
    assert toy.labels == ("hf", "packed@0.10", "packed@0.9", "other")
    assert toy.name_axes == {"l"}
    hf = some(toy.dialect("hf"))
    assert [line.text for line in hf.lines][:2] == ["layers.{l}.up = up[f d]", "layers.{l}.down = down[d f]"]
    assert [name.text for name in hf.ignored] == ["layers.{l}.inv_freq"]
    arithmetic = some(hf.lines[5].lossy)
    assert (arithmetic.text, arithmetic.steps) == ("norm - 1", (("affine", 1.0, -1.0),))
    assert hf.lines[6].lossy is None


def test_like_takes_over_the_lines_of_other_tensors() -> None:
    toy = only(TOY)
    hf, other, newest, older = (toy.dialect(label) for label in ("hf", "other", "packed", "packed@0.9"))
    assert hf is not None
    assert other is not None
    assert [line.name.text for line in other.lines] == [
        "n" if line.name.text == "norm" else line.name.text for line in hf.lines
    ]
    assert other.ignored == hf.ignored
    arithmetic = some(other.lines[5].lossy)
    assert arithmetic.steps == (("affine", 2.0, 0.5),)
    assert some(newest).version == "0.10"
    assert [line.name.text for line in some(older).lines] == ["up_down.{l}", "q_.{l}", "embed"]


def test_the_newest_version_is_a_matter_of_numbers_not_of_order() -> None:
    text = (
        "family toy\n axes d\n x : d\ndialect a 0.9\n x = x[d]\ndialect a 0.10\n y = x[d]\ndialect a 0.2\n z = x[d]\n"
    )
    toy = only(text)
    newest, older = toy.dialect("a"), toy.dialect("a@0.2")
    assert newest is not None
    assert newest.label == "a@0.10"
    assert some(older).lines[0].name.text == "z"
    assert toy.dialect("b") is None
    (extended,) = tables.read("dialect a 0.11 of toy\n  w = x[d]\n", known_families={"toy": toy})
    newest = some(extended.dialect("a"))
    assert newest.label == "a@0.11"
    assert toy.labels == ("a@0.9", "a@0.10", "a@0.2")


def test_sizes_of_a_table() -> None:
    toy = only(TOY)
    config = {"layers": 3, "hidden": 8, "kv": 2, "heads": [4, 6, 8], "uneven": True, "inner": -3}
    sizes = Sizes(toy, config, {"n": 7})
    assert sizes.layer_axes == {"l"}
    assert sizes.at({"l": 1}) == {"l": 3, "d": 8, "r": 3, "k": 2, "n": 7}
    assert sizes.at({"l": 2})["r"] == 4
    assert "r" not in sizes.at({})  # the number of layers is no index
    assert sizes.holds(toy.tensors["down"].when, {}) is None
    assert sizes.holds(toy.tensors["down"].when, {"l": 2}) is True
    assert sizes.holds(toy.tensors["bias"].when, {"l": 2}) is None
    assert sizes.holds(None, {}) is True
    assert sizes.with_solved({"n": 9, "f": 5}).overrides == {"n": 7, "f": 5}


def test_sizes_that_are_computed() -> None:
    """From a fraction where it is whole, from a key of the axis' own name, and from another axis."""
    ratio = only("family toy\naxes d=width f=ratio*width\nup : f d\ndialect hf\nup = up[f d]")
    assert Sizes(ratio, {"width": 1536, "ratio": 8960 / 1536}).at({}) == {"d": 1536, "f": 8960}
    assert Sizes(ratio, {"width": 10, "ratio": 0.25}).at({}) == {"d": 10}
    assert type(Sizes(ratio, {"width": 64, "ratio": 1.5}).at({})["f"]) is int
    own = only("family toy\n axes l=l d=l+1\n x : l d\ndialect hf\n x.{l} = x[d]\n")
    assert Sizes(own, {"l": 4}).at({}) == {"l": 4}
    assert Sizes(own, {"l": 4}).at({"l": 2}) == {"l": 4, "d": 3}
    halved = only("family toy\n axes l=n c=head_dim h=c/2\n x : l c h\ndialect hf\n x.{l} = x[c h]\n")
    assert Sizes(halved, {"head_dim": 8}).at({})["h"] == 4
    assert Sizes(halved, {}, {"c": 6}).at({})["h"] == 3
    assert "h" not in Sizes(halved, {"n": 8}).at({})


def test_sizes_that_are_none() -> None:
    toy = only(TOY)
    assert Sizes(toy, {"hidden": 0}).at({})["d"] == 0
    for nothing in (-1, 4.0, "4", True, None, [4]):
        assert "d" not in Sizes(toy, {"hidden": nothing}).at({})


def test_nested_configs() -> None:
    toy = only(TOY)
    inner = {"model_type": "toy_text", "hidden": 5}
    assert Sizes(toy, {"model_type": "wrapper", "text_config": inner, "hidden": 3}).at({})["d"] == 5
    assert Sizes(toy, {"model_type": "toy", "text_config": inner, "hidden": 3}).at({})["d"] == 3


def problems(text: str) -> list[tuple[int, str]]:
    """Line and message of every problem of a table."""
    with pytest.raises(Refused) as caught:
        tables.read(text, file="my.rules")
    found = []
    for refusal in caught.value.refusals:
        assert refusal.code == "CORRUPT"
        file, _, line = some(refusal.where.file).partition(", line ")
        assert file == "my.rules"
        found.append((int(line), refusal.message))
    return found


HEAD = "family toy\n  axes l=n d=h f\n  x : l f d\n  y : l d\n"

PROBLEMS = [
    ("x : d", 1, 1, "'family NAME' or 'dialect NAME of FAMILY'"),
    ("family", 1, 1, "'family NAME'"),
    ("family a b", 1, 1, "'family NAME'"),
    (f"{HEAD}family toy", 5, 8, "each family once"),
    (f"{HEAD}  axes 9q", 5, 8, "axes as NAME or NAME=FORMULA"),
    (f"{HEAD}  axes q=a+", 5, 10, "a formula; formula 'a+'"),
    (f"{HEAD}  axes d=b", 5, 8, "each axis once"),
    (f"{HEAD}  axis q", 5, 3, "'axis NAME = FORMULA'"),
    (f"{HEAD}  axis 9q = 3", 5, 3, "'axis NAME = FORMULA'"),
    (f"{HEAD}  let = 3", 5, 3, "'let NAME = FORMULA'"),
    (f"{HEAD}  let h = 3", 5, 7, "each 'let' once, and before 'h' is used"),
    (f"{HEAD}  let a = 3\n  let a = 4", 6, 7, "each 'let' once"),
    (f"{HEAD}  let a = f(3)", 5, 11, "a formula; formula 'f(3)': only the call len(X) is allowed in formulas"),
    (f"{HEAD}  tie x y", 5, 3, "'tie TENSOR = TENSOR' or 'tie TENSOR = TENSOR when CONDITION'"),
    (f"{HEAD}  tie x = x", 5, 11, "no circle of ties; 'x' is 'x' already"),
    (f"{HEAD}  tie x = y when a\n  tie y = x when a and b", 6, 7, "no circle of ties; 'x' is 'y' already"),
    (f"{HEAD}  z : d\n  tie x = y when a\n  tie x = z when b", 7, 7, "one tie of 'x' at a time; above, it is 'y'"),
    (f"{HEAD}  tie x = z when t", 5, 11, "a tensor of the family, declared above; 'z'"),
    (f"{HEAD}  z : l q", 5, 9, "declared axes only; 'q'"),
    (f"{HEAD}  z : l l", 5, 9, "each axis of 'z' once"),
    (f"{HEAD}  x : l", 5, 3, "each tensor once; 'x'"),
    (f"{HEAD}  what", 5, 3, "'model_type', 'wrapper', 'alike', 'axes', 'axis', 'let',"),
    (f"{HEAD}  z : l when a b", 5, 14, "a formula; formula 'a b'"),
    (f"{HEAD}dialect", 5, 1, "'dialect NAME [VERSION] [of FAMILY] [like DIALECT] [, PREFIX. = PREFIX.]'"),
    (f"{HEAD}dialect a of nope", 5, 14, "a known family after 'of'; 'nope' is none"),
    (f"{HEAD}dialect a like b", 5, 16, "a dialect after 'like'"),
    (f"{HEAD}dialect a\ndialect a", 6, 9, "a new dialect, or another version; 'a' is declared already"),
    (f"{HEAD}dialect a\ndialect a 0.2", 6, 9, "a new dialect, or another version"),
    (f"{HEAD}dialect a 0.2\ndialect a 0.2", 6, 9, "a new dialect, or another version"),
    (f"{HEAD}dialect a 0.2\ndialect a", 6, 9, "a new dialect, or another version"),
    ("dialect a", 1, 1, "'of FAMILY'"),
    (f"{HEAD}dialect a\n  x.{{l}}", 6, 3, "'stored.name = expression'"),
    (f"{HEAD}dialect a\n  x.{{l}} = x[f 3]", 6, 15, "'1' or an axis"),
    (f"{HEAD}dialect a\n  x.{{l}} = x[f d] lossy: 2 *", 6, 3, "arithmetic such as 'norm - 1'"),
    (f"{HEAD}dialect a\n  x.{{l}} = x[f d] lossy: 1.2.3 * x", 6, 3, "arithmetic such as 'norm - 1'"),
    (f"{HEAD}dialect a\n  x.{{l}}{{d}} = x[f]", 6, 8, "text between two holes"),
    (f"{HEAD}dialect a\n  x.{{l}} = x[f q d]", 6, 15, "declared axes only; 'q'"),
    (f"{HEAD}dialect a\n  x.{{l}} = x[f]", 6, 11, "every axis of 'x' in the name or its dims; d is left out"),
    (f"{HEAD}dialect a\n  x.{{l}} = [f [x:d | y:]]", 6, 21, "every axis of 'y' in the name or its dims; d is left out"),
    (f"{HEAD}dialect a\n  x.{{l}} = x[l f d]", 6, 13, "each axis in the name or in the dims; 'l' is in both"),
    (f"{HEAD}dialect a\n  x.{{l+Q}} = x[f d]", 6, 8, "a number or a declared axis after '+' or '-'; 'Q'"),
    (f"{HEAD}dialect a\n  x.{{l}} = z[f d]", 6, 11, "a tensor of family toy; 'z' is none"),
    (f"{HEAD}dialect a\n  x.{{l}} = x[f d]\n  x.{{l}} = x[d f]", 7, 3, "each stored name once"),
    (f"{HEAD}dialect a\n  ignore x.{{}}", 6, 12, "a hole such as"),
    (f"{HEAD}  alike one two", 5, 3, "'alike FAMILY'"),
    (f"{HEAD}  axes mxfp4=3", 5, 8, "another name: 'mxfp4' is reserved for an encoding"),
    (f"{HEAD}  axis nvfp4 = 3", 5, 8, "another name: 'nvfp4' is reserved for an encoding"),
    (f"{HEAD}  float8 : l", 5, 3, "another name: 'float8' is reserved for an encoding"),
    (f"{HEAD}  let mxfp8 = 3", 5, 7, "another name: 'mxfp8' is reserved for an encoding"),
    (f"{HEAD}  z : l when not mxfp4", 5, 18, "no encoding here: only a line of a dialect may depend on 'mxfp4'"),
    (f"{HEAD}  let a = not float8_block", 5, 15, "no encoding here"),
]


@pytest.mark.parametrize(("text", "line", "column", "expected"), PROBLEMS, ids=[str(i) for i in range(len(PROBLEMS))])
def test_errors_show_line_and_column_and_what_was_expected(text: str, line: int, column: int, expected: str) -> None:
    ((found, message),) = problems(text)
    assert found == line
    assert f"column {column}: expected {expected}" in message


def test_every_problem_of_a_file_is_shown_at_once() -> None:
    text = f"""{HEAD}
  axes 9q m=a+ d=b good=k
  z : q r good
  junk
dialect a
  x.{{l = x[d]
  x.{{l}} = x[(f d]
  y.{{l}} = w[d r]
  fine.{{l}} = y[d]
dialect b like nothing
  junk, but of a dialect that is refused already
family
  this is skipped too
dialect c
  and this
dialect d of toy
  y.{{l}} = y[q]
"""
    assert [line for line, _ in problems(text)] == [6, 6, 6, 7, 7, 8, 10, 11, 12, 12, 14, 16, 21, 21]


def test_what_ranks_share_out_within_an_axis() -> None:
    text = "family toy\n  axes g=groups r=heads/groups\n  q : g r\n  cut tp = g\n  cut tp = r within g\n"
    (family,) = tables.read(text)
    assert family.within == {"g": "r"}
    assert [cut.text for cut in family.cuts] == ["g"]
    with pytest.raises(TransaxleError, match="declared axes only; 's' is not in 'axes'"):
        tables.read(text.replace("r within", "s within"))


def test_what_ranks_share_out_in_one_dialect() -> None:
    text = "family toy\n  axes e f g\n  up : e f g\n  cut tp = f\n  cut ep = e of up\n  cut tp@mine = none of up\n"
    (family,) = tables.read(text)
    assert [cut.text for cut in family.cuts] == ["f"]
    assert [(cut.mesh, cut.axes) for cut in family.cuts_of("tp", "mine")] == [("tp@mine", ()), ("tp", ("f",))]
    assert [(cut.mesh, cut.axes) for cut in family.cuts_of("ep", "mine")] == [("ep", ("e",))]
    with pytest.raises(TransaxleError, match="'ep' and 'tp@DIALECT' are meshes too"):
        tables.read(text.replace("cut ep", "cut pp"))
    with pytest.raises(TransaxleError, match="declared axes only; 'none' is not in 'axes'"):
        tables.read(text.replace("none of up", "none"))


def test_cuts_of_a_dialect_are_beside_those_of_all() -> None:
    text = (
        "family toy\n  axes e f\n  up : e f\n  down : e f\n  cut tp = f\n  cut tp@mine = none of up\n"
        "family more like toy\n  cut tp@mine = none of down\n  cut tp@mine = f\n  cut ep = e\n"
    )
    _, family = tables.read(text)
    assert [(cut.mesh, cut.text, cut.tensors) for cut in (*family.cuts, *family.other_cuts)] == [
        ("tp", "f", None),
        ("tp@mine", "()", frozenset({"up"})),
        ("tp@mine", "()", frozenset({"down"})),
        ("tp@mine", "f", None),
        ("ep", "e", None),
    ]


AXES = "family toy\naxes l=num_layers d=hidden_size f=intermediate_size\n"
GROWING = {
    "axes": (AXES, "axis a{0} = x{0} // 2"),
    "tensors": (AXES, "t{0} : l f d when x{0}"),
    "formulas with a name": (AXES, "let x{0} = y + {0}"),
    "ties": (f"{AXES}t : f d\nu : f d\n", "tie t = u when x{0}"),
    "cuts": (f"{AXES}t : f d\n", "cut tp = d of t"),
    "lines": (f"{AXES}t : l f d\ndialect hf\n", "x{0}.{{l}} = t[f d]"),
    "ignored names": (f"{AXES}t : l f d\ndialect hf\n", "ignore x{0}.{{l}}"),
    "families": ("", "family f{0}"),
    "problems": (AXES, "bad"),
}


@pytest.mark.parametrize("kind", GROWING)
def test_reading_a_table_is_linear_in_its_lines(kind: str) -> None:
    head, line = GROWING[kind]

    def read(count: int) -> Callable[[], None]:
        text = head + "\n".join(line.format(at) for at in range(count))

        def work() -> None:
            with suppress(TransaxleError):
                tables.read(text)

        return work

    assert_linear([calls(read(count)) for count in (50, 100, 200)])


def test_a_table_that_is_no_table_is_refused_at_its_first_line() -> None:
    for text in ("x" * 1_000_000, "\n" * 1_000_000 + "family toy", AXES + "t : l" + " f" * 10_000):
        with pytest.raises(TransaxleError, match="at most 10,000 lines, of at most 1,000 characters") as caught:
            tables.read(text)
        assert caught.value.code == "CORRUPT"
        assert len(str(caught.value)) < 200


def test_a_hundred_problems_of_a_table_are_kept() -> None:
    with pytest.raises(TransaxleError) as caught:
        tables.read(AXES + "bad!\n" * 9_000)
    assert len(caught.value.refusals) == 101
    assert caught.value.refusals[-1].message == "there is more: these are the first 100 problems"
    with pytest.raises(TransaxleError) as caught:
        tables.read(AXES + "t : " + " ".join(f"z{at}" for at in range(150)))
    assert len(caught.value.refusals) == 101


def test_a_table_has_at_most_a_hundred_dialects() -> None:
    made = f"{AXES}t : f d\n" + "\n".join(f"dialect x{at}" for at in range(100))
    assert len(tables.read(made)[0].dialects) == 100
    with pytest.raises(TransaxleError, match="at most 100 dialects"):
        tables.read(f"{made}\ndialect more")


def test_formulas_that_double_are_refused_before_they_are_a_billion() -> None:
    doubling = "\n".join(f"let b{at + 1} = b{at} + b{at}" for at in range(64))
    with pytest.raises(TransaxleError, match=r"with the formulas that it names it has [\d,]+ parts, more than 1,000"):
        tables.read(f"{AXES}let b0 = x\n{doubling}")
