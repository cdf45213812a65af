from __future__ import annotations

import pytest

from tests.axes.apply import Store, arange, only, translated
from tests.axes.toy import CONFIG, TOY, model


def test_missing_tensors_are_listed() -> None:
    lost = {f"layers__{layer}__experts__{e}__up": None for layer, e in ((0, 2), (1, 0))}
    view = translated(TOY, "hf", "packed", Store(model(**lost, end=None)), CONFIG)
    assert {r.code for r in view.refusals} == {"MISSING_TENSOR"}
    (listed,) = [r for r in view.refusals if "lacks" in r.message]
    assert listed.message.splitlines()[1:] == [
        "layers.0.experts.2.up",
        "layers.1.experts.0.up",
        "end",
    ]
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


def test_a_config_that_claims_a_billion_layers_is_refused_in_no_time() -> None:
    view = translated(TOY, "hf", "hf", Store(model()), {**CONFIG, "layers": 10**12})
    (listed,) = [r for r in view.refusals if "lacks" in r.message]
    assert listed.message.endswith("or more")


def test_a_name_that_claims_a_billion_layers_is_refused_in_no_time() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "layers"}
    view = translated(TOY, "hf", "hf", Store(model(layers__999999999__norm=arange(4))), config)
    assert any("lacks" in r.message for r in view.refusals)


@pytest.mark.parametrize(
    ("config", "there", "missing"),
    [
        ({"biased": False}, [], []),
        ({"biased": True}, [0, 1], []),
        ({"biased": True}, [1], ["layers.0.bias"]),
        ({"biased": True}, [], ["layers.{l}.bias (in no layer)"]),
        ({"biased": None}, [], []),
        ({"biased": None}, [0], ["layers.1.bias"]),
        ({"first": 1}, [], ["layers.{l}.fine (in no layer)"]),
    ],
)
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


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (["x.2", "mark.2", "y.2"], []),
        (["y.2"], ["y.2"]),
        (["x.2"], ["x.2"]),
        (["mark.2"], ["mark.{l} (in no layer)"]),
        (["y.0"], ["y.0"]),
    ],
)
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
