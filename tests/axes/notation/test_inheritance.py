"""Issue 17, tables that inherit: what is read is the spelled-out table, and nothing is lost on the way to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.axes.apply import Store, arange, carried, only, same, translated
from tests.some import some
from transaxle import families
from transaxle.axes.notation import tables
from transaxle.axes.notation.family import Family
from transaxle.errors import Refused
from transaxle.families import builtin

BASE = """
block norms
  axes l=layers d=hidden
  n : l d
dialect hf
  layers.{l}.norm = n[d]
dialect other
  {block}.n = n[d]

family base like norms
  model_type base_model
  wrapper base_vl
  axes f=inner c=2*f
  let sparse = l % 2 == 0
  up    : l f d when sparse
  gate  : l f d
  bias  : l f when biased
  extra : l f
  tie extra = bias when tied
  precise bias extra
  cut tp = f (l d)
  cut tp = d of up bias
dialect hf
  layers.{l}.up    = up[f d]
  layers.{l}.gate  = gate[f d]
  layers.{l}.bias  = bias[f]
  layers.{l}.extra = extra[f]
  ignore layers.{l}.buffer
dialect other
  place block = blocks.{l} when not extra
  place block = tail.{l}   when extra or biased
  {block}.up_gate   = [[up:f | gate:f] d] when up
  {block}.gate      = gate[f d] when not up
  {block}.bias      = bias[f]
  {block}.extra     = extra[f]
  ignore {block}.buffer
dialect short like hf, layers. = h.
"""


def lines(family: Family, label: str) -> list[str]:
    """The lines of a dialect, with their conditions."""
    dialect = some(family.dialect(label))
    return [line.text + (f" when {line.when.text}" if line.when else "") for line in dialect.lines]


def child(text: str) -> Family:
    """The last family of the base's file with this text below it."""
    return tables.read(BASE + text, file="my.rules")[-1]


def faults(text: str) -> list[tuple[int, str]]:
    """Line in `text`, and message, of every problem of the base's file with this text below it."""
    with pytest.raises(Refused) as caught:
        child(text)
    above = BASE.count("\n")
    found = []
    for refusal in caught.value.refusals:
        assert refusal.code == "CORRUPT"
        match = some(re.fullmatch(r"my\.rules, line (\d+)", refusal.where.file or ""))
        found.append((int(match[1]) - above, refusal.message))
    return found


def test_a_family_takes_over_a_block_and_places_give_a_line_each() -> None:
    base_family = child("")
    assert base_family.tensors.keys() == {"n", "up", "gate", "bias", "extra"}
    assert lines(base_family, "hf")[0] == "layers.{l}.norm = n[d]"
    assert lines(base_family, "other") == [
        "blocks.{l}.n = n[d] when not extra",
        "tail.{l}.n = n[d] when extra or biased",
        "blocks.{l}.up_gate = [[up:f | gate:f] d] when not extra and up",
        "tail.{l}.up_gate = [[up:f | gate:f] d] when (extra or biased) and up",
        "blocks.{l}.gate = gate[f d] when not extra and not up",
        "tail.{l}.gate = gate[f d] when (extra or biased) and not up",
        "blocks.{l}.bias = bias[f] when not extra",
        "tail.{l}.bias = bias[f] when extra or biased",
        "blocks.{l}.extra = extra[f] when not extra",
        "tail.{l}.extra = extra[f] when extra or biased",
    ]
    other = some(base_family.dialect("other"))
    assert [name.text for name in other.ignored] == ["blocks.{l}.buffer", "tail.{l}.buffer"]
    assert lines(base_family, "short")[1] == "h.{l}.up = up[f d]"


def test_what_identifies_a_family_is_not_taken_over() -> None:
    family = child("family heir like base\n")
    assert (family.name, family.model_types, family.wrappers) == ("heir", ("heir",), ())
    assert child("family heir like base\n model_type own\n").model_types == ("own",)


def test_everything_else_is_taken_over_and_replaced_by_what_it_speaks_of() -> None:
    family = child(
        "family heir like base\n  axes f=wide w=f\n  let sparse = even\n  let even = l in listed\n  bias : l f\n"
        "  new : l w c\n  tie extra = bias\n  cut tp = d of gate\n"
        "dialect hf\n  layers.{l}.g = gate[d f]\n  new.{l} = new[w c]\n"
    )
    assert {axis: size.text for axis, size in family.axes.items() if size is not None} == {
        "l": "layers", "d": "hidden", "f": "wide", "c": "2*f", "w": "f",
    }  # fmt: skip
    assert some(family.tensors["up"].when)({"l": 3, "listed": [3]}) is True
    assert family.tensors["bias"].when is None
    assert [(tie.alias, tie.when.text) for tie in family.ties] == [("extra", "True")]
    assert family.precise == {"bias", "extra"}
    assert [(cut.text, cut.tensors) for cut in family.cuts] == [
        ("f", None), ("(l d)", None), ("d", frozenset({"gate"})),
    ]  # fmt: skip
    assert lines(family, "hf") == [
        "layers.{l}.norm = n[d]",
        "layers.{l}.up = up[f d]",
        "layers.{l}.g = gate[d f]",
        "layers.{l}.bias = bias[f]",
        "layers.{l}.extra = extra[f]",
        "new.{l} = new[w c]",
    ]
    # A dialect that is like hf is like the hf of this family.
    assert lines(family, "short")[2] == "h.{l}.g = gate[d f]"


def test_a_family_leaves_tensors_out_with_all_that_speaks_of_them() -> None:
    family = child("family heir like base\n  without bias up\n dialects hf\n")
    assert family.tensors.keys() == {"n", "gate", "extra"}
    assert family.ties == ()
    assert family.precise == {"extra"}
    assert [cut.text for cut in family.cuts] == ["f", "(l d)"]
    assert family.labels == ("hf",)
    kept = ["layers.{l}.norm = n[d]", "layers.{l}.gate = gate[f d]", "layers.{l}.extra = extra[f]"]
    assert lines(family, "hf") == kept
    # A dialect that is kept stays whole without the one that it is like.
    family = child("family heir like base\n  dialects short\n")
    assert family.labels == ("short",)
    assert lines(family, "short")[:2] == ["h.{l}.norm = n[d]", "h.{l}.up = up[f d]"]
    family = child(
        "family heir like base\n  without axis c\n  without tie extra\n  without cut f d\n  without let sparse\n"
        "  up : l f d\n"
    )
    assert "c" not in family.axes
    assert family.ties == ()
    nested = "family heir like base\n  cut tp = d within f\nfamily other like heir\n  without cut {}\n"
    assert child(nested.format("d")).within == {}
    assert child(nested.format("f")).within == {"f": "d"}
    assert [cut.text for cut in family.cuts] == ["(l d)"]
    assert family.let_formulas == {}


PADDED = """
block padded
  axes n=words d=width p r=q/2 q=heads
  axis s = r + 1
  embed : n d
  wide  : n s
dialect hf
  embed = embed[n d]
  wide  = wide[n s]
dialect megatron
  words = [[embed:n | 0:p] d]
  wide  = wide[s n]
dialect late like megatron
family all like padded
family some like padded
  dialects hf
  without wide
family padding like padded
  dialects late
  without wide
family own like padded
  dialects hf
  axes p=3 r=4
family inside
  mount padded as one
dialect hf
  mount one under one.
family shifted like padded
  dialects hf
  tail : n
dialect hf
  tail.{n+p} = tail[]
"""


def test_axes_that_are_taken_over_and_used_by_nothing_are_left_out() -> None:
    """What a formula of an axis in use names is used, too."""
    assert {family.name: sorted(family.axes) for family in tables.read(PADDED)} == {
        "all": ["d", "n", "p", "q", "r", "s"],
        "some": ["d", "n"],
        "padding": ["d", "n", "p"],
        "own": ["d", "n", "p", "r", "s"],
        "inside": ["one_d", "one_n", "one_q", "one_r", "one_s"],
        "shifted": ["d", "n", "p", "q", "r", "s"],
    }


def test_a_dialect_may_begin_anew_or_go_on_under_other_prefixes() -> None:
    family = child(
        "family heir like base\n  dialects hf other\ndialect other like hf\n  x.{l} = up[f d]\n"
        "dialect hf, layers. = text.layers.\ndialect last like other\n  without extra\n"
    )
    assert lines(family, "other")[1] == "x.{l} = up[f d]"
    assert lines(family, "hf")[0] == "text.layers.{l}.norm = n[d]"
    assert "text.layers.{l}.extra = extra[f]" not in lines(family, "last")
    hf = some(family.dialect("hf"))
    assert [name.text for name in hf.ignored] == ["text.layers.{l}.buffer"]
    with pytest.raises(Refused, match=r"no name there begins with 'layers\."):  # short was like hf, layers. = h.
        child("family heir like base\ndialect hf, layers. = text.\n  without n\n")


def test_an_axis_that_a_new_prefix_lacks_is_the_first_dim() -> None:
    text = """family stack
  axes l=layers e=experts d=hidden
  n     : l d
  up    : l e d
  extra : l d when l >= 2
dialect hf
  place block = layers.{l} when not extra
  place block = tail.{l}   when extra
  {block}.norm         = n[d]
  up.{l}.{e}           = [[up:d]]
  tail.{l}.extra       = extra[d]
  also layers.{l}.norm_before = n[d]
  ignore layers.{l}.buffer
dialect stacked like hf, layers.{l}. = layers.
dialect whole like hf, up.{l}.{e} = up
"""
    family = only(text)
    assert lines(family, "stacked") == [
        "layers.norm = n[l d] when not extra",
        "tail.{l}.norm = n[d] when extra",
        "up.{l}.{e} = [[up:d]]",
        "tail.{l}.extra = extra[d]",
        "layers.norm_before = n[l d]",
    ]
    assert "up = [l e [up:d]]" in lines(family, "whole")


def test_a_stack_of_layers_that_differ_is_refused() -> None:
    text = """family stack
  axes l=layers d=hidden
  n     : l d
  extra : l d when l in marked
dialect hf
  layers.{l}.norm  = n[d]
  layers.{l}.extra = extra[d]
dialect other like hf
  layers.{l}.norm       = n[d] when not extra
  layers.{l}.extra.norm = n[d] when extra
dialect stacked like other, layers.{l}. = layers.
"""
    family = only(text)
    norms = {f"layers.{number}.norm": arange(4, start=4 * number) for number in range(3)}
    config: dict[str, object] = {"layers": 3, "hidden": 4, "marked": [1]}
    uneven = translated(family, "hf", "stacked", Store(norms | {"layers.1.extra": arange(4)}), config)
    assert any("holds for some of them only" in refusal.message for refusal in uneven.refusals)
    for marked, name in (([], "layers.norm"), ([0, 1, 2], "layers.extra.norm")):
        store = Store(norms | {f"layers.{number}.extra": arange(4) for number in marked})
        stack = carried(family, "hf", "stacked", store, config | {"marked": marked})[name]
        assert stack.tolist() == arange(3, 4).tolist()


def test_a_place_can_have_alternatives() -> None:
    place = "  place block = (model|old).{l} when extra\n"
    other = some(child(f"family heir like base\ndialect other\n{place}  {{block}}.(n|norm) = n[d]\n").dialect("other"))
    read = [(line.name.text, line.read_only) for line in other.lines[:4]]
    assert read[0] == ("model.{l}.n", False)
    assert set(read[1:]) == {("model.{l}.norm", True), ("old.{l}.n", True), ("old.{l}.norm", True)}
    assert all(line.when is not None and line.when.text == "extra" for line in other.lines[:4])


def test_alternatives_of_a_place_and_of_a_name_count_together() -> None:
    eight, nine = ("|".join(f"{letter}{number}" for number in range(count)) for letter, count in (("a", 8), ("b", 9)))
    text = f"family heir like base\ndialect other\n  place block = ({eight}).{{l}}\n  {{block}}.({nine}) = n[d]\n"
    ((line, message),) = faults(text)
    assert line == 4
    assert "at most 64 names for one line; these are more" in message


PROBLEMS = [
    ("family heir like nothing", 1, "a family or a block after 'like', declared above or known; 'nothing' is none"),
    ("family heir like base,", 1, "'family NAME' or 'family NAME like NAME, NAME'"),
    ("family heir like later\nfamily later", 1, "declared above or known; 'later' is none"),
    ("family heir\n without up", 2, "a family that is like another: this one takes nothing over"),
    ("family heir like base\n without nothing", 2, "a tensor that it takes over; 'nothing' is none"),
    ("family heir like base\n without axis q", 2, "an axis that it takes over; 'q' is none"),
    ("family heir like base\n dialects hf nope", 2, "dialects that it takes over, of hf, other, short; 'nope' is none"),
    ("family heir like base\n gate : l d", 2, "a line for gate in dialect hf too: with other axes than before"),
    ("family heir like base\ndialect other\n g.{l} = gate[f d]", 3, "a line for up too: without one, up would go"),
    ("family heir like base\n without gate\n", 2, "a line for up too: without one, up would go with the line"),
    ("family heir like base\ndialect x like hf, h. = g.", 2, "no name there begins with 'h.'"),
    ("family heir like base\ndialect x like hf, layers. = g", 2, "prefixes as 'OLD. = NEW.', or whole names"),
    ("family heir like base\ndialect x, layers. = g.", 2, "'like DIALECT' before new prefixes"),
    ("family heir like base\ndialect x like last\ndialect last", 2, "a dialect after 'like'; this family has: hf"),
    ("family heir like base\ndialect hf 2.0", 2, "a new dialect, or another version; 'hf' is declared already"),
    ("family heir like base\ndialect x like hf\n without norm", 3, "a tensor that this dialect takes over; 'norm'"),
    ("family heir like base\ndialect hf\n place x\n", 3, "'place NAME = BEGINNING when CONDITION'"),
    ("family heir like base\ndialect hf\n layers.{l}.norm = gate[f d]\n", 3, "each stored name once"),
    ("dialect x of base like hf\n  layers.{l}.norm = up[f d]", 2, "each stored name once"),
    ("family heir like base\ndialect hf\n (a|b = gate[f d]\n", 3, "alternatives as (one|other)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "expected"), PROBLEMS, ids=[str(i) for i in range(len(PROBLEMS))])
def test_what_would_go_wrong_silently_is_refused_where_it_is_written(text: str, line: int, expected: str) -> None:
    found = faults(text + "\n")
    assert found[0][0] == line
    assert expected in found[0][1]
    assert "column" in found[0][1]


def test_a_statement_that_does_not_fit_the_heir_is_shown_where_it_is_taken_from() -> None:
    with pytest.raises(Refused) as caught:
        child("family heir like base\n  without axis f\n")
    refusal = caught.value.refusals[0]
    assert "axes f=inner" not in refusal.message
    assert refusal.where.file == "my.rules, line 15"
    assert refusal.hint == "Family heir takes this over from base: say it anew, or leave it out."


def test_a_name_with_alternatives_is_read_in_all_and_written_in_the_first() -> None:
    family = only(
        "family toy\n axes l=n d\n w : l d\n v : d\ndialect hf\n (model|backbone|).layers.{l}.w = w[d]\n v = v[d]\n"
        " also old_v = v[d]\ndialect b\n b.{l} = w[d]\n v = v[d]\n".replace("|)", ")")
    )
    w, v = arange(2, 3), arange(3, start=50)
    want = {"model.layers.0.w": w[0], "model.layers.1.w": w[1], "v": v}
    older = {"backbone.layers.0.w": w[0], "backbone.layers.1.w": w[1], "old_v": v}
    mixed = {"model.layers.0.w": w[0], "backbone.layers.1.w": w[1], "v": v}
    middle = {"b.0": w[0], "b.1": w[1], "v": v}
    for stored in (want, older, mixed):
        same(carried(family, "hf", "b", Store(stored), {"n": 2}), middle)
        same(carried(family, "hf", "hf", Store(stored), {"n": 2}), want)
    same(carried(family, "b", "hf", Store(middle), {"n": 2}), want)


PLACES = """
family places
  axes l=layers d=width
  w : l d
  u : l d
  v : d
dialect hf
  place tower = vision.{l}          when tall
  place tower = tower.{l}           when not tall
  place old   = (a|b).{l}
"""


def whole_lines(family: Family, label: str) -> list[str]:
    dialect = some(family.dialect(label))
    return [("also " if line.read_only else "") + line.whole for line in dialect.lines]


def test_places_stand_inside_alternatives_and_hold_some() -> None:
    family = only(PLACES + "  ({tower}|{tower}.x|{old}).w = w[d]\n  {old}.u = u[d] when deep or d == 2\n  v = v[d]\n")
    assert whole_lines(family, "hf") == [
        "vision.{l}.w = w[d] when tall",
        "tower.{l}.w = w[d] when not tall",
        "also vision.{l}.x.w = w[d] when tall",
        "also tower.{l}.x.w = w[d] when not tall",
        "also a.{l}.w = w[d]",
        "also b.{l}.w = w[d]",
        "a.{l}.u = u[d] when deep or d == 2",
        "also b.{l}.u = u[d] when deep or d == 2",
        "v = v[d]",
    ]
    tall = {"layers": 2, "width": 3, "tall": True}
    store = Store({f"vision.{i}.x.w": arange(3, start=i) for i in range(2)} | {"v": arange(3)})
    store.put("b.0.u", arange(3))
    store.put("a.1.u", arange(3, start=9))
    found = carried(family, "hf", "hf", store, tall)
    assert set(found) == {"vision.0.w", "vision.1.w", "a.0.u", "a.1.u", "v"}


def test_new_prefixes_reach_into_alternatives() -> None:
    family = only(
        PLACES + "  (m|n|).x.{l}.w = w[d]\n  {tower}.u = u[d]\n  (q|r).v = v[d]\n"
        "dialect renamed like hf, m. = text.m., r. = s., vision. = pictures.\n"
    )
    assert whole_lines(family, "renamed") == [
        "text.m.x.{l}.w = w[d]",
        "also n.x.{l}.w = w[d]",
        "also .x.{l}.w = w[d]",
        "pictures.{l}.u = u[d] when tall",
        "tower.{l}.u = u[d] when not tall",
        "q.v = v[d]",
        "also s.v = v[d]",
    ]


def test_a_dim_that_is_in_other_names_says_nothing_of_the_layer() -> None:
    """Experts have numbers in some names: whether a layer is ahead does not depend on theirs."""
    family = only(
        "family toy\n axes l=n L=m e=k d\n router : l e d\n up : l e d\n extra : l d when l >= L\n"
        "dialect hf\n l.{l}.router = router[e d]\n l.{l}.up.{e} = up[d]\n l.{l}.extra = extra[d]\n"
        "dialect b\n place block = main.{l} when not extra\n place block = ahead.{l-L} when extra\n"
        " {block}.router = router[e d]\n {block}.up.{e} = up[d]\n {block}.extra = extra[d]\n"
    )
    routers, ups, extra = arange(3, 2, 4), arange(3, 2, 4, start=100), arange(4, start=200)
    layers = {f"l.{layer}.router": routers[layer] for layer in range(3)}
    layers |= {f"l.{layer}.up.{e}": ups[layer, e] for layer in range(3) for e in range(2)}
    layers["l.2.extra"] = extra
    apart = {name.replace("l.2.", "ahead.0.").replace("l.", "main."): value for name, value in layers.items()}
    config = {"n": 3, "m": 2, "k": 2}
    same(carried(family, "hf", "b", Store(layers), config), apart)
    same(carried(family, "b", "hf", Store(apart), config), layers)


MOUNTED = (
    """
family tower
  axes l=layers L=layers d=width f=inner
  axis h = len(kinds) // 2 if kinds else heads.count
  let wide = kinds[l] == "l" and 'd' in names
  q : l d h when wide and not biased
  n : d optional
  tie n = q when tied
  precise n
  cut tp = (l d) of q
  cut tp = h within f
dialect hf
  (model|m).{l}.q_{l}.{h} = q[d] lossy: 2 * q
""".replace(".q_{l}.{h} = q[d]", ".q = q[(h d)]")
    + """  t.{l+L}.x = n[d] when wide or mxfp4
  ignore {x}.l
dialect other like hf

family whole
  axes l=depth
  w : l
  mount tower as eye from vision.config
  mount tower as ear
dialect hf
  w.{l} = w[]
  mount eye under eye.
dialect other
  mount ear under a.ear. like hf
""".replace("  ignore {x}.l\n", "  ignore l.{l}\n")
)


def test_a_family_is_mounted_in_another() -> None:
    family = tables.read(MOUNTED)[1]
    said = [" ".join(statement.text.split()) for statement in some(family.written).statements]
    assert said[2:13] == [
        "axes eye_l=vision.config.layers",
        "axes eye_L=vision.config.layers",
        "axes eye_d=vision.config.width",
        "axes eye_f=vision.config.inner",
        "axis eye_h = len(vision.config.kinds) // 2 if vision.config.kinds else vision.config.heads.count",
        "let eye_wide = vision.config.kinds[eye_l] == \"l\" and 'd' in vision.config.names",
        "eye_q : eye_l eye_d eye_h when eye_wide and not vision.config.biased",
        "eye_n : eye_d when None",
        "tie eye_n = eye_q when vision.config.tied",
        "precise eye_n",
        "cut tp = (eye_l eye_d) of eye_q",
    ]
    assert said[13] == "cut tp = eye_h within eye_f"
    assert "axes ear_d=width" in said
    assert lines(family, "hf") == [
        "w.{l} = w[]",
        "eye.model.{eye_l}.q = eye_q[(eye_h eye_d)]",
        "eye.m.{eye_l}.q = eye_q[(eye_h eye_d)]",
        "eye.t.{eye_l+eye_L}.x = eye_n[eye_d] when eye_wide or mxfp4",
    ]
    hf, other = family.dialect("hf"), family.dialect("other")
    assert hf is not None
    assert hf.lines[1].lossy is not None
    assert [line.read_only for line in hf.lines] == [False, False, True, False]
    assert [name.text for name in hf.ignored] == ["eye.l.{eye_l}"]
    assert some(other).lines[0].text == "a.ear.model.{ear_l}.q = ear_q[(ear_h ear_d)]"
    eye = some(family.tensors["eye_q"].when)
    nested = {"vision": {"config": {"kinds": ["l"], "names": "d", "biased": False}}}
    assert eye({**nested, "eye_l": 0, "kinds": [], "biased": True}) is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("family x\n mount base of y", "'mount FAMILY [as NAME] [from CONFIG_KEY]'"),
        ("family x\n mount nothing", "a known family after 'mount'; 'nothing' is none"),
        ("family x\n mount base\n mount base", "each mounted family once"),
        ("family x\n mount base\ndialect hf\n mount base under a", "'mount NAME under PREFIX. [like DIALECT]'"),
        ("family x\n mount base\ndialect hf\n mount other under a.", "a family that is mounted above: base"),
        ("family x\n mount base\ndialect new\n mount base under a.", "a dialect of base after 'like': hf, other"),
        ("family x\n axes f=3\n mount base\n", "no axis 'f' above a mount that has one too"),
        ("family x\n mount base\n mount norms\n", "each axis once; 'l' is declared above"),
        ("family x\n mount base\n without axis q", "an axis that it takes over; 'q' is none"),
        ("family x\n mount base\n gate : f l d\n l2 : l\n up : l d\ndialect hf\n mount base under a.",
         "a line for up in dialect hf too: with other axes than before"),
        ("family x\n mount base\ndialect other\n mount base under a.\n g.{l} = gate[f d]",
         "a line for up too, which would go with the line of the mount"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_mount_is_shown_at_it(text: str, expected: str) -> None:
    assert expected in faults(text + "\n")[0][1] or expected in str(faults(text + "\n"))


def test_what_a_family_says_below_a_mount_replaces_what_the_mount_says() -> None:
    family = child(
        "family whole\n  mount base as b from part\n  axes b_f=wide\n  let b_sparse = odd\n"
        "  let odd = b_l % 2 == 1\n  b_gate : b_l b_f\n  b_bias : b_l b_f\n  tie b_extra = b_bias\n  without cut b_f\n"
        "  without axis b_c\n  cut tp = b_d of b_up\n"
        "dialect hf\n  mount b under m.\n  m.{b_l}.g = b_gate[b_f]\n"
        "dialect short\n  mount b under m.\n  m.{b_l}.g = b_gate[b_f]\n  without b_extra\n"
    )
    assert {axis: size.text for axis, size in family.axes.items() if size is not None} == {
        "b_l": "part.layers", "b_d": "part.hidden", "b_f": "wide",
    }  # fmt: skip
    assert family.let_formulas["b_sparse"]({"b_l": 3}) is True
    assert family.tensors["b_gate"].axes == ("b_l", "b_f")
    assert family.tensors["b_bias"].when is None
    assert [(tie.alias, tie.when.text) for tie in family.ties] == [("b_extra", "True")]
    assert [(cut.text, cut.tensors) for cut in family.cuts] == [
        ("(b_l b_d)", None), ("b_d", frozenset({"b_up"})),
    ]  # fmt: skip
    assert lines(family, "hf") == [
        "m.layers.{b_l}.norm = b_n[b_d]",
        "m.layers.{b_l}.up = b_up[b_f b_d]",
        "m.layers.{b_l}.bias = b_bias[b_f]",
        "m.layers.{b_l}.extra = b_extra[b_f]",
        "m.{b_l}.g = b_gate[b_f]",
    ]
    assert "m.h.{b_l}.extra = b_extra[b_f]" not in lines(family, "short")
    assert "m.h.{b_l}.bias = b_bias[b_f]" in lines(family, "short")


def test_what_is_replaced_is_known() -> None:
    family = child(
        "family heir like base\n  mount norms as own\n  axes f=wide c=2*f\n  axes own_l=2\n  tie extra = bias\n"
        "  let sparse = True\n  bias : l f\n"
        "dialect hf\n  mount own under own.\n"
    )
    assert family.written is not None
    assert [
        (e.kind, e.name, e.inherited.owner, " ".join(e.inherited.text.split()), e.replacement.text)
        for e in family.written.replaced
    ] == [
        ("let", "sparse", "base", "let sparse = l % 2 == 0", "let sparse = True"),
        ("axis", "f", "base", "axes f=inner", "axes f=wide"),
        ("tensor", "bias", "base", "bias : l f when biased", "bias : l f"),
        ("tie", "extra", "base", "tie extra = bias when tied", "tie extra = bias"),
        ("axis", "own_l", "norms", "axes own_l=layers", "axes own_l=2"),
    ]


@pytest.mark.oracle
@pytest.mark.parametrize("name", sorted(builtin().entries))
def test_the_printed_table_is_the_whole_one(name: str) -> None:
    """Read by itself, without anything to take over from, it gives the same family."""
    family, whole = builtin()[name], families.base(name)
    text = some(whole).spell_out()
    again = only(text)
    assert " like " not in text
    assert again.axes == family.axes
    assert again.tensors == family.tensors
    assert (again.model_types, again.wrappers, again.ties) == (family.model_types, family.wrappers, family.ties)
    assert again.alike == family.alike
    assert (again.cuts, again.within, again.precise) == (family.cuts, family.within, family.precise)
    assert again.labels == family.labels
    for one, other in zip(again.dialects, family.dialects, strict=True):
        first, second = ([(e.text, e.when, e.lossy, e.read_only) for e in each.lines] for each in (one, other))
        assert first == second
        assert [name.text for name in one.ignored] == [name.text for name in other.ignored]


@pytest.mark.parametrize("text", ["dialect mine of brt", "family mine like brt", "family mine\n mount brt"])
def test_names_that_are_close_to_one_that_is_not_known(text: str) -> None:
    with pytest.raises(Refused) as caught:
        tables.read(f"{text}\n", known_families=builtin(), bases=families.base)
    assert "Did you mean bert" in caught.value.hint
    assert len(str(caught.value)) < 400


def test_every_block_is_declared_once_and_taken_over_by_a_family() -> None:
    """A block that no family takes over is checked by nobody; of two of one name, only one would be found."""
    names = families.blocks()
    blocks = [block for block in map(families.base, names) if block is not None]
    users = [*blocks, *(user for user in map(families.base, builtin().entries) if user is not None)]
    taken = {name for user in users for name in user.like}
    assert len(blocks) == len(names)
    assert all(block.block for block in blocks)
    top = Path(families.__file__).parent
    files = (path.relative_to(top).as_posix() for path in (*top.rglob("*.rules"), *top.rglob("*.rules.gz")))
    text = "\n".join(map(families.table_text, files))
    assert names.keys() <= taken | set(re.findall(r"^ +mount (\w+)", text, re.MULTILINE))
    declared = re.findall(r"^(?:family|block) +(\w+)", text, re.MULTILINE)
    assert sorted(declared) == sorted([*names, *builtin().entries])
    # One in the file of a family is found too.
    (heir,) = tables.read("family heir like t5_encoder\n", bases=families.base)
    assert heir.tensors
