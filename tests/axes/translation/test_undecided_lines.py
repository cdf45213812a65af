"""Lines whose conditions the config does not decide: the source's names do, or the translation is refused."""

from __future__ import annotations

import pytest

from tests.axes.apply import Store, arange, carried, only, same, translated
from tests.axes.toy import only_refusal
from transaxle.errors import UsageError

TWO = only("""
family two
  axes l=layers e=experts d=width f=inner
  up    : l f d
  gate  : l f d
  bias  : l f       optional
  end   : d
dialect plain
  layers.{l}.up   = up[f d]
  layers.{l}.gate = gate[f d]
  layers.{l}.bias = bias[f]
  end             = end[d]
dialect either
  blocks.{l}.in   = up[d f]                  when folded
  blocks.{l}.up   = up[f d]                  when not folded
  blocks.{l}.gate = gate[f d]
  blocks.{l}.bias = bias[f]                  when biased
  end             = end[d]                   when not headless
dialect fused
  w.{l}           = [[gate:f | up:f] d]      when folded
  u.{l}           = up[f d]                  when not folded
  g.{l}           = gate[f d]                when not folded
  b.{l}           = bias[f]
  end             = end[d]
dialect stacked
  w               = [l [gate:f | up:f] d]    when folded
  u.{l}           = up[f d]                  when not (folded and True)
  g.{l}           = gate[f d]                when not folded
  end             = end[d]
dialect other
  blocks.{l}.in   = up[d f]                  when kind == "folded"
  blocks.{l}.up   = up[f d]                  when kind == "plain"
  blocks.{l}.gate = gate[f d]                when l < first or not folded
  blocks.{l}.door = gate[f d]                when l >= first and folded
  end             = end[d]
""")

PLAIN = {
    "end": arange(3, start=900),
    **{f"layers.{i}.up": arange(2, 3, start=10 * i) for i in range(2)},
    **{f"layers.{i}.gate": arange(2, 3, start=100 + 10 * i) for i in range(2)},
}


def test_lines_that_exclude_each_other_are_never_both_written() -> None:
    refusal = only_refusal(translated(TWO, "plain", "either", Store(PLAIN)), "AMBIGUOUS")
    assert refusal.message.splitlines() == [
        "blocks.{l}.in = up[d f] when folded",
        "blocks.{l}.up = up[f d] when not folded",
        "only one of these lines can hold up, and the config does not say which: folded is unknown",
    ]
    assert "--config FILE" in refusal.hint
    for folded in (True, False):
        found = carried(TWO, "plain", "either", Store(PLAIN), {"folded": folded})
        names = {"blocks.0.in", "blocks.1.in"} if folded else {"blocks.0.up", "blocks.1.up"}
        assert set(found) == names | {"blocks.0.gate", "blocks.1.gate", "end"}


def test_a_part_of_a_fused_line_is_not_written_twice() -> None:
    refused = translated(TWO, "plain", "fused", Store(PLAIN)).refusals
    assert [(each.code, "folded is unknown" in each.message) for each in refused] == [("AMBIGUOUS", True)] * 2
    stacked = translated(TWO, "plain", "stacked", Store(PLAIN)).refusals
    assert {each.code for each in stacked} == {"AMBIGUOUS"}


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("target", ["fused", "stacked"])
def test_names_of_the_source_decide(folded: bool, target: str) -> None:
    """What the source calls a tensor says which of its own lines holds, and with it the target's."""
    source = carried(TWO, "plain", "either", Store(PLAIN), {"folded": folded})
    wanted = carried(TWO, "plain", target, Store(PLAIN), {"folded": folded})
    same(carried(TWO, "either", target, Store(source)), wanted)
    same(carried(TWO, target, "either", Store(wanted)), source)
    same(carried(TWO, target, "plain", Store(wanted)), PLAIN)


def test_names_that_say_both_decide_nothing() -> None:
    both = carried(TWO, "plain", "either", Store(PLAIN), {"folded": True})
    both |= carried(TWO, "plain", "either", Store(PLAIN), {"folded": False})
    view = translated(TWO, "either", "fused", Store(both))
    assert {each.code for each in view.refusals} == {"AMBIGUOUS"}


def test_each_layer_is_decided_by_itself() -> None:
    config = {"kind": "plain", "first": 1}
    refusal = only_refusal(translated(TWO, "plain", "other", Store(PLAIN), config), "AMBIGUOUS")
    assert "blocks.{l}.door" in refusal.message
    assert "folded is unknown" in refusal.message
    found = carried(TWO, "plain", "other", Store(PLAIN), {**config, "folded": True})
    assert set(found) == {"blocks.0.up", "blocks.1.up", "blocks.0.gate", "blocks.1.door", "end"}
    decided = carried(TWO, "plain", "other", Store(PLAIN), {**config, "first": 2})
    assert set(decided) == {"blocks.0.up", "blocks.1.up", "blocks.0.gate", "blocks.1.gate", "end"}


def test_conditions_that_exclude_each_other_by_a_value() -> None:
    view = translated(TWO, "plain", "other", Store(PLAIN), {"first": 2, "folded": False})
    assert "kind is unknown" in only_refusal(view, "AMBIGUOUS").message


def test_a_line_alone_holds_what_the_source_has() -> None:
    """No other line could: the bias and the end are stored, so they have their names."""
    store = Store({**PLAIN, **{f"layers.{i}.bias": arange(2) for i in range(2)}})
    found = carried(TWO, "plain", "either", store, {"folded": False})
    assert {"blocks.0.bias", "blocks.1.bias", "end"} <= set(found)


READ = only("""
family reading
  axes l=layers d=width f=inner
  up     : l f d
  norm   : l d
  router : l d    optional
dialect hf
  layers.{l}.w = up[f d]     when folded
  layers.{l}.w = up[d f]     when not folded
  layers.{l}.n = norm[d]
dialect routed
  layers.{l}.w = up[d f]     when router
  layers.{l}.w = up[f d]     when not router
  layers.{l}.r = router[d]
  layers.{l}.n = norm[d]
dialect out
  {place}.up = up[f d]
  {place}.norm = norm[d]
  place place = blocks.{l}
  {place}.router = router[d]
""")


def test_a_name_of_two_lines_is_never_read_by_the_first_of_them() -> None:
    stored = {"layers.0.w": arange(3, 3), "layers.0.n": arange(3, start=50)}
    with pytest.raises(UsageError) as caught:
        translated(READ, "hf", "out", Store(stored))
    (refusal,) = caught.value.refusals
    assert (refusal.code, refusal.where.tensor) == ("AMBIGUOUS", "layers.0.w")
    assert refusal.message.splitlines() == [
        "layers.{l}.w = up[f d] when folded",
        "layers.{l}.w = up[d f] when not folded",
        "only one of these lines can have this name, and the config does not say which: folded is unknown",
    ]
    assert "--config FILE" in refusal.hint
    assert carried(READ, "hf", "out", Store(stored), {"folded": False})["blocks.0.up"].tolist() == (
        stored["layers.0.w"].T.tolist()
    )


def test_tensors_that_are_there_tell_how_a_name_is_read() -> None:
    stored = {f"layers.{i}.w": arange(3, 3, start=9 * i) for i in range(2)}
    stored |= {f"layers.{i}.n": arange(3, start=50) for i in range(2)}
    found = carried(READ, "routed", "out", Store(stored))
    assert found["blocks.1.up"].tolist() == stored["layers.1.w"].tolist()
    routed = {**stored, **{f"layers.{i}.r": arange(3, start=70) for i in range(2)}}
    found = carried(READ, "routed", "out", Store(routed))
    assert found["blocks.1.up"].tolist() == stored["layers.1.w"].T.tolist()
