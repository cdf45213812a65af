"""Translation where the two sides differ: tensors added, missing, undecided or empty."""

from __future__ import annotations

import pytest
import torch

from tests.axes.apply import Store, arange, carried, fill, only, same, translated
from tests.axes.toy import CONFIG, TOY, model, only_refusal
from transaxle.errors import TransaxleError, UsageError


def test_missing_tensors_are_listed() -> None:
    lost = {f"layers__{layer}__experts__{e}__up": None for layer, e in ((0, 2), (1, 0))}
    view = translated(TOY, "hf", "packed", Store(model(**lost, end=None)), CONFIG)
    assert {r.code for r in view.refusals} == {"MISSING_TENSOR"}
    (listed,) = [r for r in view.refusals if "lacks" in r.message]
    assert listed.message.splitlines()[1:] == ["layers.0.experts.2.up", "layers.1.experts.0.up", "end"]
    assert "identity" in listed.hint
    assert "the table lacks a line" not in listed.hint


def test_a_stored_tensor_of_several_logical_ones_is_missing_once() -> None:
    whole = translated(TOY, "hf", "packed", Store(model()), CONFIG)
    held = Store({name: arange(*target.shape) for name, target in whole.targets.items() if name != "blocks.1.w"})
    (listed,) = translated(TOY, "packed", "hf", held, CONFIG).refusals
    assert listed.message.splitlines()[1:] == ["blocks.1.w"]


def test_names_that_no_line_reads_may_be_what_is_missing() -> None:
    store = Store(model(end=None))
    store.put("final_norm", arange(4))
    view = translated(TOY, "hf", "packed", store, CONFIG)
    (listed,) = [r for r in view.refusals if "lacks" in r.message]
    assert listed.message.splitlines()[1:] == ["end"]
    assert "whether a shard is missing, or the table lacks a line for it" in listed.hint


def test_missing_tensors_are_named_with_their_prefix_and_counted() -> None:
    config = {**CONFIG, "layers": 300, "first": 300}
    store = Store({f"module.{name}": tensor for name, tensor in model().items()})
    view = translated(TOY, "hf", "hf", store, config)
    (listed,) = [r for r in view.refusals if "lacks" in r.message]
    lines = listed.message.splitlines()
    assert lines[1:3] == ["module.layers.2.norm", "module.layers.3.norm"]
    assert lines[-1] == f"… and {298 * 7 - 20} more"
    assert len(lines) == 22


def test_as_many_as_are_listed_need_no_count() -> None:
    view = translated(TOY, "hf", "hf", Store(model()), {**CONFIG, "experts": 8})
    (listed,) = [r for r in view.refusals if "lacks" in r.message]
    assert listed.message.splitlines()[1:] == [
        f"layers.{layer}.experts.{e}.{name}" for name in ("gate", "up") for layer in range(2) for e in range(3, 8)
    ]


def test_a_missing_tensor_is_called_by_the_line_that_would_hold_it() -> None:
    family = only(
        "family two\n  axes l=layers d\n  norm : l d\n  up : l d optional\n"
        "dialect a\n  {l}.attention.norm = norm[d] when up\n  {l}.mlp.norm = norm[d] when not up\n  {l}.up = up[d]\n"
    )
    for layer, name in ((0, "attention"), (3, "mlp")):
        norms = {0: "attention", 1: "attention", 2: "mlp", 3: "mlp"}
        store = Store({f"{at}.{place}.norm": arange(4) for at, place in norms.items() if at != layer})
        store.put("0.up", arange(4))
        store.put("1.up", arange(4))
        view = translated(family, "a", "a", store, {"layers": 4})
        assert f"{layer}.{name}.norm" in [line for r in view.refusals for line in r.message.splitlines()]


def test_what_claims_a_billion_layers_is_refused_in_no_time() -> None:
    """A config, or a name."""
    view = translated(TOY, "hf", "hf", Store(model()), {**CONFIG, "layers": 10**12})
    (listed,) = [r for r in view.refusals if "lacks" in r.message]
    assert listed.message.endswith("or more")
    config = {key: value for key, value in CONFIG.items() if key != "layers"}
    view = translated(TOY, "hf", "hf", Store(model(layers__999999999__norm=arange(4))), config)
    assert any("lacks" in r.message for r in view.refusals)


@pytest.mark.parametrize(("config", "there", "missing"), [
    ({"biased": False}, [], []),
    ({"biased": True}, [0, 1], []),
    ({"biased": True}, [1], ["layers.0.bias"]),
    ({"biased": True}, [], ["layers.{l}.bias (in no layer)"]),
    ({"biased": None}, [], []),
    ({"biased": None}, [0], ["layers.1.bias"]),
    ({"first": 1}, [], ["layers.{l}.fine (in no layer)"]),
])  # fmt: skip
def test_conditional_tensors(config: dict[str, object], there: list[int], missing: list[str]) -> None:
    """They must exist where the condition holds, and be whole where it is not known."""
    store = Store(model(**{f"layers__{layer}__bias": arange(5) for layer in there}))
    view = translated(TOY, "hf", "packed", store, {**CONFIG, **config})
    lines = [line for r in view.refusals if "lacks" in r.message for line in r.message.splitlines()[1:]]
    assert lines == missing


@pytest.mark.parametrize(("layers", "missing"), [([], []), ([0, 1], []), ([1], ["layers.0.extra"])])
def test_optional_tensors_are_whole_or_absent(layers: list[int], missing: list[str]) -> None:
    store = Store(model(**{f"layers__{layer}__extra": arange(4) for layer in layers}))
    view = translated(TOY, "hf", "both", store, CONFIG)
    assert [line for r in view.refusals for line in r.message.splitlines()[1:]] == missing


def test_a_condition_on_the_layer_holds_where_it_holds() -> None:
    store = Store(model(layers__1__fine=arange(5, 4)))
    assert translated(TOY, "hf", "packed", store, {**CONFIG, "first": 1}).refusals == ()
    view = translated(TOY, "hf", "packed", store, {**CONFIG, "first": 0})
    assert [r.message.splitlines()[1:] for r in view.refusals] == [["layers.0.fine"]]


AHEAD = only(
    "family ahead\n  axes l=depth+extra L=depth d=width\n  x : l d when l < L or mark\n"
    "  mark : l d when l >= L and x\n  y : l d when l < L or mark\ndialect a\n"
    "  x.{l} = x[d]\n  mark.{l} = mark[d]\n  y.{l} = y[d]\n"
)
"""The last layers are there or not; where one is, all of it must be."""


@pytest.mark.parametrize(("lost", "named"), [
    (["x.2", "mark.2", "y.2"], []),
    (["y.2"], ["y.2"]),
    (["x.2"], ["x.2"]),
    (["mark.2"], ["mark.{l} (in no layer)"]),
    (["y.0"], ["y.0"]),
])  # fmt: skip
def test_a_condition_may_name_another_tensor(lost: list[str], named: list[str]) -> None:
    names = ["x.0", "y.0", "x.1", "y.1", "x.2", "mark.2", "y.2"]
    store = Store({name: arange(4) for name in names if name not in lost})
    view = translated(AHEAD, "a", "a", store, {"depth": 2, "extra": 1, "width": 4})
    assert [line for r in view.refusals for line in r.message.splitlines()[1:]] == named


@pytest.mark.parametrize("claim", [{"extra": 10**12}, {"depth": 10**12, "extra": 0}])
def test_a_config_that_claims_layers_which_need_not_exist_is_refused_too(claim: dict[str, int]) -> None:
    store = Store({name: arange(4) for name in ("x.0", "y.0")})
    view = translated(AHEAD, "a", "a", store, {"depth": 1, "width": 4, **claim})
    assert [r.code for r in view.refusals] == ["MISSING_TENSOR"]
    assert "claims more" in view.refusals[0].message or "or more" in view.refusals[0].message


# What programs add on their own account: zeros are the same as none, and all else is carried or refused.

ROUTED = only("""
family toy
  axes l=layers d=width e=experts
  router : l e d         when l >= first
  shift  : l e           when balanced and router
  own    : l e           when False
  bias   : l d           when biased
  seldom : l d           when False
  added shift when router
  added own when router
dialect hub
  layers.{l}.router = router[e d]
  layers.{l}.shift  = shift[e]
  layers.{l}.bias   = bias[d]
  layers.{l}.seldom = seldom[d]
dialect always
  blocks.{l}.gate  = router[e d]
  blocks.{l}.shift = shift[e] else zeros
  blocks.{l}.own   = own[e] else zeros
  blocks.{l}.bias  = bias[d]
  blocks.{l}.rare  = seldom[d]
dialect sometimes
  stages.{l}.gate  = router[e d]
  stages.{l}.shift = shift[e]
  also stages.{l}.own = own[e]
""")
ROUTED_CONFIG = {"layers": 3, "width": 4, "experts": 5, "first": 1, "balanced": False, "biased": False}
ROUTERS = {f"layers.{layer}.router": arange(5, 4, start=100 * layer) for layer in (1, 2)}
GATES = {f"blocks.{layer}.gate": ROUTERS[f"layers.{layer}.router"] for layer in (1, 2)}


def _of(name: str, *layers: int) -> dict[str, torch.Tensor]:
    return {name.format(layer): arange(5, start=10 * layer) for layer in layers}


def test_zeros_are_written_where_a_program_always_has_a_tensor() -> None:
    view = translated(ROUTED, "hub", "always", Store(ROUTERS), ROUTED_CONFIG)
    zeros = {f"blocks.{layer}.{name}" for layer in (1, 2) for name in ("shift", "own")}
    assert view.refusals == ()
    assert set(view.targets) == zeros | set(GATES)
    written = {(view.targets[name].shape, view.targets[name].dtype, view.targets[name].parts) for name in zeros}
    assert written == {((5,), "F32", ())}
    lines = [note.partition(": ")[2] for note in view.notes]
    assert lines == ["blocks.{l}.shift = shift[e]", "blocks.{l}.own = own[e]"]
    # Where a program may have the tensor, or not, none are written.
    view = translated(ROUTED, "hub", "sometimes", Store(ROUTERS), ROUTED_CONFIG)
    assert (set(view.targets), view.notes) == ({"stages.1.gate", "stages.2.gate"}, ())


def test_values_are_carried_where_there_is_a_place() -> None:
    store = Store({f"stages.{layer}.gate": GATES[f"blocks.{layer}.gate"] for layer in (1, 2)})
    for name, values in _of("stages.{}.own", 1, 2).items():
        store.put(name, values)
    view = translated(ROUTED, "sometimes", "always", store, ROUTED_CONFIG)
    assert (view.refusals, view.checks, view.kept_names) == ((), (), ())
    assert fill(store, view.targets["blocks.2.own"]).tolist() == [20, 21, 22, 23, 24]
    both = Store(GATES | _of("blocks.{}.own", 1, 2) | _of("blocks.{}.shift", 1, 2))
    for target in ("hub", "sometimes"):
        view = translated(ROUTED, "always", target, both, {**ROUTED_CONFIG, "balanced": True})
        (name,) = (name for name in view.targets if name.endswith("2.shift"))
        assert fill(both, view.targets[name]).tolist() == [20, 21, 22, 23, 24]
        assert {check.first.name for check in view.checks} == {"blocks.1.own", "blocks.2.own"}


def test_without_a_place_they_must_be_zero() -> None:
    store = Store(GATES | _of("blocks.{}.own", 1, 2) | _of("blocks.{}.shift", 1, 2))
    view = translated(ROUTED, "always", "hub", store, ROUTED_CONFIG)
    names = [f"blocks.{layer}.{name}" for name in ("shift", "own") for layer in (1, 2)]
    assert (view.refusals, view.kept_names, view.ignored) == ((), (), tuple(view.ignored))
    assert sorted(view.ignored) == sorted(names)
    assert sorted((check.first.name, check.zero) for check in view.checks) == sorted((name, True) for name in names)
    assert all(check.refusal.code == "UNEXPECTED_TENSOR" for check in view.checks)
    assert len(view.notes) == 2


def test_they_are_whole_or_absent() -> None:
    """A program has one in every layer with a router, or in none."""
    view = translated(ROUTED, "always", "hub", Store(GATES | _of("blocks.{}.own", 1)), ROUTED_CONFIG)
    (refusal,) = view.refusals
    assert (refusal.code, "blocks.2.own" in refusal.message) == ("MISSING_TENSOR", True)
    # In its own dialect nothing changes.
    store = Store(GATES | _of("blocks.{}.own", 1, 2))
    view = translated(ROUTED, "always", "always", store, ROUTED_CONFIG)
    assert (view.refusals, view.checks, view.kept_names, view.ignored) == ((), (), (), ())


@pytest.mark.parametrize("name", ["shift", "bias"])
def test_what_the_config_rules_out_is_refused(name: str) -> None:
    values = {"shift": _of("layers.{}.shift", 1, 2), "bias": {f"layers.{layer}.bias": arange(4) for layer in range(3)}}
    (refusal,) = translated(ROUTED, "hub", "always", Store(ROUTERS | values[name]), ROUTED_CONFIG).refusals
    said = {"shift": "balanced: false", "bias": "biased: false"}
    assert (refusal.code, said[name] in refusal.message) == ("UNEXPECTED_TENSOR", True)
    assert refusal.where.tensor in values[name]
    there = {**ROUTED_CONFIG, "balanced": name == "shift", "biased": name == "bias"}
    assert translated(ROUTED, "hub", "always", Store(ROUTERS | values[name]), there).refusals == ()
    assert translated(ROUTED, "hub", "hub", Store(ROUTERS | values[name]), ROUTED_CONFIG).refusals == ()


def test_a_condition_with_a_default_for_layers_is_evaluated_for_the_layers_that_are_stored() -> None:
    family = only(
        'family two\n  axes l=layers d\n  let attends = (kinds[l] | "mamba") == "attention"\n  norm : l d\n'
        "  bias : l d when attends and biased\n"
        "dialect a\n  {l}.norm = norm[d]\n  {l}.bias = bias[d]\ndialect b\n  {l}.n = norm[d]\n  {l}.b = bias[d]\n"
    )
    store = Store({"0.norm": arange(4), "1.norm": arange(4), "1.bias": arange(4)})
    config = {"layers": 2, "kinds": ["mamba", "attention"]}
    assert not translated(family, "a", "b", store, {**config, "biased": True}).refusals
    (ruled_out,) = translated(family, "a", "b", store, {**config, "biased": False}).refusals
    assert "is there, but a two of this config has none (biased: false)" in ruled_out.message


def test_what_no_key_of_the_config_decides_is_not_ruled_out() -> None:
    """`when False` means that only the names tell which models have a tensor."""
    store = Store(ROUTERS | {"layers.1.seldom": arange(4)})
    view = translated(ROUTED, "hub", "always", store, ROUTED_CONFIG)
    assert view.refusals == ()
    assert fill(store, view.targets["blocks.1.rare"]).tolist() == [0, 1, 2, 3]


def test_else_zeros_is_only_for_what_is_added() -> None:
    with pytest.raises(TransaxleError, match="'else zeros' only of tensors that are 'added'"):
        only("family toy\n  axes d=width\n  bias : d\ndialect hub\n  bias = bias[d] else zeros\n")
    with pytest.raises(TransaxleError, match="'added TENSOR'"):
        only("family toy\n  axes d=width\n  bias : d\n  added shift\ndialect hub\n  bias = bias[d]\n")


# Lines whose conditions the config does not decide: the source's names do, or the translation is refused.

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
    read = carried(READ, "hf", "out", Store(stored), {"folded": False})["blocks.0.up"]
    assert read.tolist() == stored["layers.0.w"].T.tolist()


def test_tensors_that_are_there_tell_how_a_name_is_read() -> None:
    stored = {f"layers.{i}.w": arange(3, 3, start=9 * i) for i in range(2)}
    stored |= {f"layers.{i}.n": arange(3, start=50) for i in range(2)}
    found = carried(READ, "routed", "out", Store(stored))
    assert found["blocks.1.up"].tolist() == stored["layers.1.w"].tolist()
    routed = {**stored, **{f"layers.{i}.r": arange(3, start=70) for i in range(2)}}
    found = carried(READ, "routed", "out", Store(routed))
    assert found["blocks.1.up"].tolist() == stored["layers.1.w"].T.tolist()


# Axes of size 0 in names: no dense layers, zero experts. What they number is nowhere, and nothing lacks.

ZERO = only("""
family zero
  axes l=layers m=dense e=experts d=width f=inner
  norm : l d
  mlp  : m f d
  up   : l e f d
  gate : l e f d
dialect hf
  layers.{l}.norm             = norm[d]
  dense.{m}.mlp               = mlp[f d]
  layers.{l}.experts.{e}.up   = up[f d]
  layers.{l}.experts.{e}.gate = gate[f d]
dialect packed
  norm.{l}     = norm[d]
  mlp          = mlp[m f d]
  layers.{l}.w = [e [gate:f | up:f] d]
dialect stacked
  norm = norm[l d]
  m.{m} = mlp[f d]
  e.{e} = [l [gate:f | up:f] d]
""")
WITHOUT_EXPERTS = {"layers": 2, "dense": 0, "experts": 0, "width": 3, "inner": 2}
NORMS = {f"layers.{i}.norm": arange(3, start=3 * i) for i in range(2)}
PACKED = {f"norm.{i}": NORMS[f"layers.{i}.norm"] for i in range(2)}
EMPTY = {"mlp": arange(0, 2, 3), "layers.0.w": arange(0, 4, 3), "layers.1.w": arange(0, 4, 3)}
EXPERTS = {f"layers.{i}.experts.0.{n}": arange(2, 3, start=50 + 9 * i) for i in range(2) for n in ("up", "gate")}


def test_what_an_empty_axis_numbers_does_not_lack() -> None:
    same(carried(ZERO, "hf", "packed", Store(NORMS), WITHOUT_EXPERTS), PACKED)
    same(carried(ZERO, "packed", "hf", Store(PACKED), WITHOUT_EXPERTS), NORMS)
    same(carried(ZERO, "hf", "stacked", Store(NORMS), WITHOUT_EXPERTS), {"norm": torch.stack(list(NORMS.values()))})
    one = carried(ZERO, "hf", "packed", Store({**NORMS, **EXPERTS}), {**WITHOUT_EXPERTS, "experts": 1})
    assert set(one) == {*PACKED, "layers.0.w", "layers.1.w"}


@pytest.mark.parametrize("config", [WITHOUT_EXPERTS, {}])
@pytest.mark.parametrize("target", ["hf", "stacked"])
def test_an_empty_stack_is_left_out_where_its_axis_is_in_names(config: dict[str, int], target: str) -> None:
    states = {f"optim/{name}/exp_avg": tensor for name, tensor in EMPTY.items()}
    steps = {f"optim/{name}/step": arange(1).reshape(()) for name in EMPTY}
    view = translated(ZERO, "packed", target, Store({**PACKED, **EMPTY, **states, **steps}), config)
    assert view.refusals == ()
    assert view.kept_names == ()
    assert set(view.ignored) == {*EMPTY, *states, *steps}
    assert set(view.targets) == ({"norm"} if target == "stacked" else set(NORMS))


def test_an_axis_of_another_size_than_zero_still_lacks() -> None:
    unknown = {"layers": 2, "experts": 0}
    for config in ({**WITHOUT_EXPERTS, "dense": 1}, unknown):
        refusal = only_refusal(translated(ZERO, "hf", "packed", Store(NORMS), config), "MISSING_TENSOR")
        assert "mlp (in no layer)" in refusal.message
    assert translated(ZERO, "hf", "packed", Store(NORMS), unknown, {"m": 0}).refusals == ()


def test_a_stack_stays_one_and_is_never_left_out_if_it_is_not_empty() -> None:
    same(carried(ZERO, "packed", "packed", Store({**PACKED, **EMPTY}), WITHOUT_EXPERTS), {**PACKED, **EMPTY})
    full = {**PACKED, "layers.0.w": arange(1, 4, 3), "layers.1.w": arange(1, 4, 3)}
    refused = translated(ZERO, "packed", "hf", Store(full), WITHOUT_EXPERTS).refusals
    assert {each.code for each in refused} == {"SHAPE_MISMATCH"}
