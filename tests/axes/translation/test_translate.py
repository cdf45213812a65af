"""Translation of whole models: each target is filled from its sources, and refusals name their tensor."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.axes import walking
from tests.axes.apply import Store, arange, bound_to, carried, fill, law, only, same, translated
from tests.axes.toy import CONFIG, TOY, model, only_refusal, packed
from transaxle.axes.geometry import MeshCut, place
from transaxle.axes.notation.family import NumberFormat, Sizes
from transaxle.errors import UsageError


@law
@given(walking.dialects(), walking.dialects(), walking.sizes(), st.integers(1, 3), st.integers(1, 3))
def test_any_table_into_any_other(
    source: list[walking.Line], target: list[walking.Line], sizes: dict[str, int], rows: int, columns: int
) -> None:
    """Weights, moments and steps, from sources in chunks: element by element what a walk writes."""
    family = walking.family(source, target)
    store = Store()
    for name, array in walking.stored(source, sizes).items():
        cuts = [
            place(
                array.shape, [MeshCut(dim, parts, rank) for dim, (parts, rank) in enumerate(zip(grid, at, strict=True))]
            )
            for grid in [[rows, columns, 1, 1, 1][: array.ndim]]
            for at in product(*map(range, grid))
        ]
        boxes = [[spans[0] for spans in held] for held in cuts if all(held)]
        store.put(name, array, boxes)
    for name, array in walking.stored(source, sizes, 1).items():
        store.put(f"optim/{name}/exp_avg", array)
        store.put(f"optim/{name}/step", np.array(7.0))
    config = {axis: sizes[axis] for axis in "abce"}
    if not any(expression.padding for _, _, expression in source):
        sizes = {**sizes, "z": 0}
    wanted = walking.stored(target, sizes)
    moments = {f"optim/{name}/exp_avg": array for name, array in walking.stored(target, sizes, 1).items()}
    steps = {f"optim/{name}/step": np.array(7.0) for name in wanted}
    same(carried(family, "one", "two", store, config), wanted | moments | steps)


def test_padding_is_added_when_given_and_taken_off_with_the_true_size() -> None:
    hf = model()
    same(carried(TOY, "hf", "hf", Store(hf), CONFIG), hf)
    for rows in (0, 3):
        same(carried(TOY, "hf", "packed", Store(hf), CONFIG, {"p": rows} if rows else {}), packed(hf, rows))
        same(carried(TOY, "packed", "hf", Store(packed(hf, rows)), CONFIG), hf)
        same(carried(TOY, "packed", "packed", Store(packed(hf, rows)), CONFIG), packed(hf, rows))
    unknown = {key: value for key, value in CONFIG.items() if key != "words"}
    found = translated(TOY, "packed", "hf", Store(packed(hf, 3)), unknown)
    assert {r.code for r in found.refusals} == {"UNKNOWN_AXIS"}
    assert "--axis n=N" in found.refusals[0].hint


def test_targets_of_one_line_may_be_written_in_different_formats() -> None:
    """All but the first target of a line are copies of the first, except those that get another format."""
    store = Store(model())
    for coded in ("layers.1.", "layers.0.", "layers.1.experts.2."):

        def recode(name: str, form: NumberFormat, coded: str = coded) -> NumberFormat:
            return NumberFormat("F8_E4M3", "mxfp8") if name.startswith(coded) else form

        view = translated(TOY, "hf", "hf", store, CONFIG, recode=recode)
        assert view.refusals == ()
        found = {
            name for name, target in view.targets.items() if (target.dtype, target.encoding) == ("F8_E4M3", "mxfp8")
        }
        assert found == {name for name in store.entries if name.startswith(coded)}


def test_unknown_names_are_kept_and_known_nothing_is_left_out() -> None:
    store = Store(model(vision=arange(3), layers__0__inv_freq=arange(2)))
    view = translated(TOY, "hf", "packed", store, CONFIG)
    assert view.refusals == ()
    assert view.kept_names == ("vision",)
    assert view.ignored == ("layers.0.inv_freq",)
    assert fill(store, view.targets["vision"]).tolist() == [0, 1, 2]
    assert "layers.0.inv_freq" not in view.targets


@pytest.mark.parametrize(("config", "axes", "axis", "first", "count"), [
    ({"layers": 1}, {}, "number 1 of axis l is beyond its size, 1 (layers in the config)", "layers.1.norm", 3),
    ({}, {"e": 2}, "number 2 of axis e is beyond its size, 2 (as given)", "layers.0.experts.2.gate", 2),
])  # fmt: skip
def test_more_layers_or_experts_than_there_are(
    config: dict[str, int], axes: dict[str, int], axis: str, first: str, count: int
) -> None:
    """A config of a smaller model would leave the others under names that nothing reads in the target."""
    store = Store(model())
    view = translated(TOY, "hf", "packed", store, CONFIG | config, axes)
    assert [refusal.code for refusal in view.refusals] == ["UNEXPECTED_TENSOR"] * count
    assert axis in view.refusals[0].message
    assert view.refusals[0].where.tensor == first
    assert translated(TOY, "hf", "both", store, CONFIG | config, axes).refusals != ()
    assert set(translated(TOY, "hf", "hf", store, CONFIG | config, axes).targets) == set(store.entries)


def test_layers_that_predict_ahead_may_follow_the_last_one() -> None:
    store = Store(model(layers__2__norm=arange(4), layers__3__norm=arange(4)))
    view = translated(TOY, "hf", "packed", store, CONFIG | {"num_nextn_predict_layers": 2})
    assert (view.refusals, view.kept_names) == ((), ("layers.2.norm", "layers.3.norm"))
    view = translated(TOY, "hf", "packed", store, CONFIG | {"num_nextn_predict_layers": 1})
    assert only_refusal(view, "UNEXPECTED_TENSOR").where.tensor == "layers.3.norm"


def test_known_tensors_without_a_line_are_kept() -> None:
    extras = {f"layers__{layer}__extra": arange(4) for layer in range(2)}
    store = Store(model(**extras))
    store.put("optim/layers.1.extra/exp_avg", arange(4))
    view = translated(TOY, "hf", "packed", store, CONFIG)
    assert view.refusals == ()
    assert set(view.kept_names) == {"layers.0.extra", "layers.1.extra", "optim/layers.1.extra/exp_avg"}


def test_known_tensors_that_a_condition_leaves_out_are_kept() -> None:
    family = only(
        "family cond\n  axes l=n d=d\n  x : l d\ndialect a\n  a.{l} = x[d]\ndialect b\n  b.{l} = x[d] when l > 0\n"
    )
    store = Store({"a.0": arange(4), "a.1": arange(4, start=4)})
    view = translated(family, "a", "b", store, {"n": 2, "d": 4})
    assert view.refusals == ()
    assert list(view.targets) == ["b.1", "a.0"]
    assert view.kept_names == ("a.0",)


def test_a_tensor_of_which_only_a_part_has_a_place_is_refused() -> None:
    family = only(
        "family part\n  axes f d\n  x : f d\n  y : f d\ndialect a\n  w = [[x:f | y:f] d]\ndialect b\n  x = x[f d]\n"
    )
    refusal = only_refusal(translated(family, "a", "b", Store({"w": arange(6, 4)})), "UNSUPPORTED")
    assert refusal.where.tensor == "w"
    assert "y does not fit into dialect b" in refusal.message


def test_a_kept_name_may_not_collide() -> None:
    store = Store(model(tokens=arange(3)))
    refusal = only_refusal(translated(TOY, "hf", "packed", store, CONFIG), "NAME_COLLISION")
    assert refusal.where.tensor == "tokens"


_HEADED = only(
    "family headed\n  axes d k\n  body : d\n  head : k d optional\n  bias : k when head\n"
    "dialect hf\n  place base = model when head\n  place base = base when not head\n"
    "  {base}.body = body[d]\n  head = head[k d]\n  bias = bias[k]\n"
    "dialect engine\n  body = body[d]\n"
)


_MAKES_TOKENS = only(
    "family tokens\n  axes n d\n  embed : n d\n  head : n d\n  tie head = embed when tied\n"
    "dialect hf\n  embed.weight = embed[n d]\n  lm_head.weight = head[n d] when not tied\n"
    "dialect memory\n  embed.weight = embed[n d]\n  lm_head.weight = head[n d]\n"
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_model_that_classifies_has_no_head_that_makes_tokens(prefix: str, tied: bool) -> None:
    score = f"{prefix}score.weight"
    store = Store({f"{prefix}embed.weight": arange(5, 4), score: arange(2, 4, start=50)})
    found = translated(_MAKES_TOKENS, "hf", "memory", store, {"tied": tied})
    assert not found.refusals
    assert set(found.targets) == {"embed.weight", score}
    assert set(found.kept_names) == {score}


def test_without_another_head_one_that_makes_tokens_is_missing() -> None:
    store = Store({"embed.weight": arange(5, 4), "other.weight": arange(2, 4)})
    refusal = only_refusal(translated(_MAKES_TOKENS, "hf", "memory", store, {"tied": False}), "MISSING_TENSOR")
    assert "head" in refusal.message


@pytest.mark.parametrize("prefix", ["", "module."])
def test_what_kept_its_name_comes_back_as_what_the_target_says_it_is(prefix: str) -> None:
    tensors = {"model.body": arange(4), "head": arange(3, 4, start=10), "bias": arange(3, start=30)}
    there = translated(_HEADED, "hf", "engine", Store(tensors))
    assert set(there.targets) == {"body", "head", "bias"}
    assert set(there.kept_names) == {"head", "bias"}
    store = Store({
        prefix * (name not in there.kept_names) + name: fill(Store(tensors), target)
        for name, target in there.targets.items()
    })  # fmt: skip
    back = translated(_HEADED, "engine", "hf", store)
    assert (back.refusals, back.kept_names) == ((), ())
    same({name: fill(store, target) for name, target in back.targets.items()}, tensors)
    view = translated(_HEADED, "engine", "hf", Store({"body": arange(4), "head": arange(3, 4)}))
    assert "bias" in only_refusal(view, "MISSING_TENSOR").message


@pytest.mark.parametrize("to", ["hf", "engine"])
def test_names_that_a_head_gives_are_refused_where_no_line_reads_the_head(to: str) -> None:
    view = translated(_HEADED, "hf", to, Store({"model.body": arange(4), "other_head": arange(3, 4)}))
    refusal = only_refusal(view, "UNEXPECTED_TENSOR")
    assert refusal.where.tensor == "model.body"
    assert "model.body = body[d] when head" in refusal.message
    assert "other_head" in refusal.message
    assert "identity" in refusal.hint
    assert not translated(_HEADED, "hf", to, Store({"model.body": arange(4)})).refusals
    assert not translated(_HEADED, "hf", to, Store({"base.body": arange(4), "other_head": arange(3, 4)})).refusals


def test_what_two_dialects_have_no_line_for_is_part_of_the_model_between_them() -> None:
    family = only(
        "family headed\n  axes d k\n  body : d\n  head : k d when not score\n  score : k d optional\n"
        "dialect hf\n  body = body[d]\n  head = head[k d]\n  score = score[k d]\n"
        "dialect engine\n  inner.body = body[d]\n  head = head[k d]\n"
        "dialect trainer\n  outer.body = body[d]\n  head = head[k d]\n"
    )
    view = translated(family, "engine", "trainer", Store({"inner.body": arange(4), "score": arange(2, 4)}))
    assert (view.refusals, set(view.targets), set(view.kept_names)) == ((), {"outer.body", "score"}, {"score"})
    lacking = translated(family, "engine", "trainer", Store({"inner.body": arange(4)}))
    assert "head" in only_refusal(lacking, "MISSING_TENSOR").message


_TWICE = only(
    "family twice\n  axes d\n  body : d\n  bias : d optional\n  copy : d when bias\n  tie copy = bias when True\n"
    "dialect hf\n  body = body[d]\n  bias = bias[d]\n  copy = copy[d]\n"
    "dialect engine\n  body = body[d]\n"
    "dialect other\n  body = body[d]\n  copy = copy[d]\n"
)


@pytest.mark.parametrize(("to", "names"), [("engine", {"body", "bias"}), ("other", {"body", "copy"})])
def test_of_equal_copies_one_is_written_also_where_none_has_a_line(to: str, names: set[str]) -> None:
    tensors = {"body": arange(4), "bias": arange(4, start=9), "copy": arange(4, start=9)}
    view = translated(_TWICE, "hf", to, Store(tensors))
    assert (view.refusals, set(view.targets)) == ((), names)
    assert len(view.checks) == 1


def test_two_lines_may_not_write_one_name() -> None:
    family = only(
        "family twin\n  axes l=n m=m L=n d=d\n  x : l d\n  y : m d\n"
        "dialect a\n  x.{l} = x[d]\n  y.{m} = y[d]\ndialect b\n  z.{l} = x[d]\n  z.{m+L} = y[d]\n"
    )
    store = Store({f"{name}.{i}": arange(4) for name in "xy" for i in range(2)})
    refusal = only_refusal(translated(family, "a", "b", store, {"n": 2, "m": 2, "d": 4}, {"L": 1}), "NAME_COLLISION")
    assert refusal.where.tensor == "z.1"


def test_a_shape_that_its_rule_does_not_explain() -> None:
    store = Store(model(layers__1__norm=arange(5), end=arange(2, 2)))
    view = translated(TOY, "hf", "packed", store, CONFIG)
    assert [r.where.tensor for r in view.refusals] == ["layers.1.norm", "end"]
    assert {r.code for r in view.refusals} == {"SHAPE_MISMATCH"}
    assert "norm[d]" in view.refusals[0].message
    assert "expected [4] (d=4), got [5]" in view.refusals[0].message
    assert "expected 1 dims, got [2, 2]" in view.refusals[1].message


def test_sources_of_one_target_must_agree() -> None:
    store = Store(model(layers__1__experts__2__up=arange(6, 4)))
    view = translated(TOY, "hf", "packed", store, CONFIG)
    refusal = next(r for r in view.refusals if r.where.tensor == "layers.1.experts.2.up")
    assert refusal.code == "SHAPE_MISMATCH"
    assert "expected [5, 4] as in layers.1.experts.0.up, got [6, 4]" in refusal.message


def test_components_of_one_target_must_agree() -> None:
    wider = {f"layers__1__experts__{e}__up": arange(6, 4) for e in range(3)}
    view = translated(TOY, "hf", "packed", Store(model(**wider)), CONFIG)
    refusal = only_refusal(view, "SHAPE_MISMATCH")
    assert refusal.where.tensor == "blocks.1.w"
    assert "axis f is 5 in gate and 6 in up" in refusal.message
    assert refusal.message.startswith("blocks.{l}.w = ")


def test_a_part_that_is_missing_in_many_tensors_is_one_refusal() -> None:
    table = """
family many
  axes l=layers d=width
  a : l d
  b : l d
dialect apart
  {l}.a = a[d]
  {l}.b = b[d]
dialect joined
  both.{l} = [[a:d | b:d]]
"""
    store = Store({f"{i}.a": arange(3) for i in range(200)})
    view = translated(only(table), "apart", "joined", store, {"layers": 200})
    parts, lacks = view.refusals
    assert (parts.code, parts.where.tensor) == ("MISSING_TENSOR", "both.0")
    assert parts.message.splitlines()[1:] == [
        "needs b, which the source does not have here",
        "nor for both.1, both.2, both.3, both.4, … and 195 more",
    ]
    assert lacks.message.splitlines()[1:] == ["{l}.b (in no layer)"]


def test_a_part_that_is_wrong_is_not_called_missing() -> None:
    view = translated(TOY, "hf", "packed", Store(model(**dict.fromkeys(UPS, arange(7)))), CONFIG)
    assert {(r.code, r.where.tensor) for r in view.refusals} == {
        ("SHAPE_MISMATCH", name.replace("__", ".")) for name in UPS
    }


UPS = [f"layers__1__experts__{e}__up" for e in range(3)]


def test_mixed_dtypes_are_refused() -> None:
    store = Store(model())
    store.put("layers.1.experts.1.up", arange(5, 4), dtype="F64")
    refusal = only_refusal(translated(TOY, "hf", "packed", store, CONFIG), "DTYPE_MIXED")
    assert refusal.where.tensor == "blocks.1.w"
    assert "F64 and I64" in refusal.message
    assert translated(TOY, "hf", "hf", store, CONFIG).targets["layers.1.experts.1.up"].dtype == "F64"


def test_an_unknown_axis_is_told_once() -> None:
    for name in ("heads", "layers"):
        store = Store(model(**{f"layers__{layer}__k": arange(6, 4) for layer in range(2)}))
        family = only(TOY_GROUPED)
        view = translated(family, "hf", "grouped", store, CONFIG)
        unknown = [r for r in view.refusals if r.code == "UNKNOWN_AXIS"]
        assert len(unknown) == 1, name
        assert unknown[0].where.tensor == "layers.0.k"
        assert "the size of axis g is needed, and the shape [6, 4] does not determine it" in unknown[0].message


TOY_GROUPED = """
family toy
  axes l=layers d=width g=groups c=head
  k : l g c d
dialect hf
  layers.{l}.k = k[(g c) d]
dialect grouped
  k.{l} = k[(c g) d]
"""


def test_an_axis_that_goes_into_names_must_be_known() -> None:
    family = only(
        "family apart\n  axes l=layers r=ranks d=width\n  x : l d\n"
        "dialect a\n  x.{l} = x[d]\ndialect b\n  x.{l}.{r} = x[d]\n"
    )
    view = translated(family, "a", "b", Store({"x.0": arange(4)}), {"layers": 1})
    assert [r.code for r in view.refusals] == ["UNKNOWN_AXIS"]
    assert "--axis r=N" in view.refusals[0].hint


def test_an_axis_that_only_the_target_has_must_be_known() -> None:
    family = only("family apart\n  axes r=ranks d=width\n  x : d\ndialect a\n  x = x[d]\ndialect b\n  y = x[(r d)]\n")
    refusal = only_refusal(translated(family, "a", "b", Store({"x": arange(4)})), "UNKNOWN_AXIS")
    assert "--axis r=N" in refusal.hint
    same(carried(family, "a", "b", Store({"x": arange(2)}), {"ranks": 2}), {"y": torch.tensor([0, 1, 0, 1])})


def test_a_shift_that_is_unknown_is_told_with_all_else() -> None:
    family = only(
        "family later\n  axes m=extra L=layers d=width\n  x : m d\n"
        "dialect a\n  x.{m} = x[d]\ndialect b\n  x.{m+L} = x[d]\n"
    )
    store = Store({"x.0": arange(4), "x.1": arange(5)})
    view = translated(family, "a", "b", store, {"width": 4})
    assert {r.code for r in view.refusals} == {"SHAPE_MISMATCH", "UNKNOWN_AXIS"}
    same(carried(family, "a", "b", Store({"x.0": arange(4)}), {"layers": 61}), {"x.61": arange(4)})


AHEAD = only(
    "family ahead\n  axes l=depth+extra L=depth d=width\n  x : l d\n  mark : l d when l >= L and x\n"
    "dialect a\n  x.{l} = x[d]\n  mark.{l} = mark[d]\n"
    "dialect b\n  x.{l} = x[d] when not mark\n  later.{l-L}.x = x[d] when mark\n  later.{l-L}.mark = mark[d]\n"
)
"""The last layers are numbered from 0 in `b`; a mark tells which they are."""


def test_the_last_layers_may_be_numbered_anew() -> None:
    tensors = {f"x.{layer}": arange(4, start=10 * layer) for layer in range(5)}
    tensors |= {f"mark.{layer}": arange(4, start=100 * layer) for layer in (3, 4)}
    config = {"depth": 3, "extra": 2, "width": 4}
    found = carried(AHEAD, "a", "b", Store(tensors), config)
    wanted = {f"x.{layer}": tensors[f"x.{layer}"] for layer in range(3)}
    wanted |= {f"later.{i}.{name}": tensors[f"{name}.{i + 3}"] for i in range(2) for name in ("x", "mark")}
    same(found, wanted)
    same(carried(AHEAD, "b", "a", Store(found), config), tensors)


def test_how_many_come_before_is_asked_only_where_it_matters() -> None:
    plain = {f"x.{layer}": arange(4, start=10 * layer) for layer in range(3)}
    same(carried(AHEAD, "a", "b", Store(plain)), plain)
    refusal = only_refusal(translated(AHEAD, "a", "b", Store({**plain, "mark.2": arange(4)})), "UNKNOWN_AXIS")
    assert "{l-L}" in refusal.message
    with pytest.raises(UsageError, match="--axis L=N"):
        translated(AHEAD, "b", "a", Store({"later.0.x": arange(4)}))


def test_a_number_below_zero_is_refused() -> None:
    store = Store({f"{name}.{layer}": arange(4) for layer in range(3) for name in ("x", "mark")})
    view = translated(AHEAD, "a", "b", store, {"depth": 2, "extra": 1, "width": 4})
    assert {refusal.code for refusal in view.refusals} == {"SHAPE_MISMATCH"}
    assert "the name would get the number -2 for l=0" in view.refusals[0].message


def test_a_size_by_layer_has_no_other_value_without_one() -> None:
    """What it falls back to is that of no layer: written into a manifest, it would be believed of all."""
    family = only(
        "family uneven\n  axes l=layers d=width c=head g=2\n  axis r = (heads[l] | heads) // 2\n  q : l g r c d\n"
        "dialect a\n  q.{l} = q[(g r c) d]\ndialect b\n  w.{l} = q[(r g c) d]\ndialect c\n  all = q[l (g r) c d]\n"
    )
    config = {"layers": 2, "width": 3, "head": 2, "heads": 4}
    sizes = Sizes(family, config)
    assert "r" not in sizes.at({})
    assert sizes.at({"l": 1})["r"] == 2
    by_layer = {**config, "heads": [4, 8]}
    source = {"q.0": arange(8, 3), "q.1": arange(16, 3, start=100)}
    view = translated(family, "a", "b", Store(source), by_layer)
    assert view.refusals == ()
    assert "r" not in view.axes
    found = {name: fill(Store(source), target) for name, target in view.targets.items()}
    same(carried(family, "b", "a", Store(found), by_layer, view.axes), source)
    assert {each.code for each in translated(family, "a", "c", Store(source), by_layer).refusals} == {"SHAPE_MISMATCH"}
    even = {"q.0": arange(8, 3), "q.1": arange(8, 3, start=100)}
    stacked = carried(family, "a", "c", Store(even), config)
    assert stacked["all"].shape == (2, 4, 2, 3)


def test_arithmetic_is_passed_on() -> None:
    family = only("family plus\n  axes d=d\n  x : d\ndialect a\n  x = x[d]\ndialect b\n  y = x[d] lossy: 2 * x + 1\n")
    view = translated(family, "a", "b", Store({"x": arange(4)}))
    before, after = view.targets["y"].parts[0].arithmetic
    assert before is None
    assert after is not None
    assert after.steps == (("affine", 2.0, 1.0),)
    back = translated(family, "b", "a", Store({"y": arange(4)})).targets["x"].parts[0].arithmetic
    assert back == (after, None)


# Numbers that count several axes through, `{(l e)}`: there and back, and refused where no size tells them apart.

FAMILY = only("""
family merged
  axes l=layers e=experts i=2 d=width f=inner m=extra L=layers
  up     : l e f d
  norm   : l i d     optional
  router : l e d     optional
  ahead  : m e d     optional
dialect apart
  layers.{l}.experts.{e}.up = up[f d]
  layers.{l}.norm.{i}       = norm[d]
  layers.{l}.router         = router[e d]
  ahead.{m}.{e}             = ahead[d]
dialect counted
  experts.{(l e)}.up        = up[f d]
  norm.{2*(l i)+1}          = norm[d]
  router.{l}                = router[e d]
  ahead.{(m e)+L}           = ahead[d]
dialect turned
  experts.{(e l)}.up        = up[d f]
  norm.{(i l)}              = norm[d]
  {place}.router            = router[e d]
  place place               = r.{l}
dialect packed
  up                        = up[l e f d]
  norm                      = norm[l i d]
  router                    = router[l e d]
""")


def mixture(layers: int, experts: int, *, router: bool = False, norm: bool = True) -> dict[str, torch.Tensor]:
    """In `apart`, every element with a number of its own."""
    tensors = {
        f"layers.{at}.experts.{e}.up": arange(2, 3, start=1000 * at + 10 * e)
        for at, e in product(range(layers), range(experts))
    }
    if norm:
        tensors |= {
            f"layers.{at}.norm.{i}": arange(3, start=7000 + 10 * at + 3 * i) for at in range(layers) for i in (0, 1)
        }
    if router:
        tensors |= {f"layers.{at}.router": arange(experts, 3, start=9000 + 100 * at) for at in range(layers)}
    return tensors


@law
@given(st.integers(1, 5), st.integers(1, 5))
def test_there_and_back(layers: int, experts: int) -> None:
    tensors = mixture(layers, experts, router=True)
    config = {"layers": layers, "experts": experts}
    wanted = {f"experts.{at * experts + e}.up": tensors[f"layers.{at}.experts.{e}.up"]
              for at in range(layers) for e in range(experts)}  # fmt: skip
    wanted |= {f"norm.{2 * (2 * at + i) + 1}": tensors[f"layers.{at}.norm.{i}"] for at in range(layers) for i in (0, 1)}
    wanted |= {f"router.{at}": tensors[f"layers.{at}.router"] for at in range(layers)}
    found = carried(FAMILY, "apart", "counted", Store(tensors), config)
    same(found, wanted)
    same(carried(FAMILY, "counted", "apart", Store(found), config), tensors)
    turned = carried(FAMILY, "counted", "turned", Store(found), config)
    same({name: array for name, array in turned.items() if "experts" in name}, {
        f"experts.{e * layers + at}.up": tensors[f"layers.{at}.experts.{e}.up"].T
        for at in range(layers) for e in range(experts)
    })  # fmt: skip
    same(carried(FAMILY, "turned", "counted", Store(turned), config), wanted)
    packed = carried(FAMILY, "counted", "packed", Store(found), config)
    same(carried(FAMILY, "packed", "counted", Store(packed), config), wanted)


def test_states_follow_and_shifts_are_added() -> None:
    config = {"layers": 3, "experts": 2, "extra": 2}
    ahead = {f"ahead.{m}.{e}": arange(3, start=10 * m + e) for m, e in product(range(2), range(2))}
    tensors = mixture(3, 2, norm=False) | ahead
    states = {f"optim/{name}/exp_avg": tensor + 1 for name, tensor in tensors.items()}
    found = carried(FAMILY, "apart", "counted", Store({**tensors, **states}), config)
    assert {name for name in found if name.startswith("ahead")} == {f"ahead.{n}" for n in (3, 4, 5, 6)}
    assert found["optim/ahead.5/exp_avg"].tolist() == (ahead["ahead.1.0"] + 1).tolist()
    same(carried(FAMILY, "counted", "apart", Store(found), config), {**tensors, **states})


def test_a_size_that_shapes_show_tells_numbers_apart() -> None:
    tensors = mixture(3, 4, router=True, norm=False)
    found = carried(FAMILY, "apart", "counted", Store(tensors), {"layers": 3, "experts": 4})
    same(carried(FAMILY, "counted", "apart", Store(found)), tensors)


@pytest.mark.parametrize(
    ("config", "hint"),
    [({}, ""), ({"layers": 3}, "If all 12 are here, then with l=3, e=4."), ({"layers": 5}, ""), ({"layers": 0}, "")],
)
def test_numbers_alone_tell_nothing(config: dict[str, int], hint: str) -> None:
    """12 numbers may be 3 layers of 4 experts, or 4 of 3."""
    found = carried(FAMILY, "apart", "counted", Store(mixture(3, 4, norm=False)), {"layers": 3, "experts": 4})
    with pytest.raises(UsageError) as caught:
        translated(FAMILY, "counted", "apart", Store(found), config)
    (refusal,) = caught.value.refusals
    assert refusal.code == "UNKNOWN_AXIS"
    assert refusal.message.splitlines() == [
        "experts.{(l e)}.up = up[f d]",
        "the size of axis e is needed to tell what the 12 numbers of {(l e)} mean, and no shape shows it",
    ]
    assert "--axis e=N" in refusal.hint
    assert refusal.hint.endswith(hint or '--config FILE (config="FILE").')
    known = config if config.get("layers") == 3 else {}
    same(carried(FAMILY, "counted", "apart", Store(found), known, {"e": 4}), mixture(3, 4, norm=False))


def test_names_that_need_no_size_are_read_without_one() -> None:
    store = Store({f"layers.{i}.norm.{j}": arange(3) for i in range(2) for j in range(2)})
    view = translated(FAMILY, "apart", "counted", store, {"layers": 2})
    assert {r.code for r in view.refusals} == {"MISSING_TENSOR"}
    counted = FAMILY.dialect("counted")
    norms = Store({f"norm.{number}": arange(3) for number in (1, 3, 2)})
    bound = bound_to(FAMILY, "counted", norms, Sizes(FAMILY, {}))
    assert bound.dialect is counted
    assert [dict(names) for names in bound.names.values()] == [{(0, 0): "norm.1", (0, 1): "norm.3"}]
    assert bound.unknown == ("norm.2",)


def test_the_target_needs_the_size_too() -> None:
    packed = {"up": arange(3, 4, 2, 3)}
    wanted = {f"experts.{n}.up": packed["up"].reshape(12, 2, 3)[n] for n in range(12)}
    same(carried(FAMILY, "packed", "counted", Store(packed)), wanted)
    view = translated(only(FAMILY_OF_ONE), "whole", "counted", Store({"x": arange(6)}))
    assert "the size of axis" in only_refusal(view, "UNKNOWN_AXIS").message


FAMILY_OF_ONE = """
family one
  axes l=layers e=experts
  x : l e
dialect whole
  x = x[(l e)]
dialect counted
  x.{(l e)} = x[]
"""


def test_a_number_that_is_missing_or_too_large() -> None:
    config = {"layers": 2, "experts": 3}
    found = carried(FAMILY, "apart", "counted", Store(mixture(2, 3, norm=False)), config)
    lacking = {name: array for name, array in found.items() if name != "experts.4.up"}
    refusal = only_refusal(translated(FAMILY, "counted", "apart", Store(lacking), config), "MISSING_TENSOR")
    assert refusal.message.splitlines()[1:] == ["experts.4.up"]
    more = Store({**found, "experts.6.up": arange(2, 3)})
    assert translated(FAMILY, "counted", "apart", more, config).kept_names == ("experts.6.up",)
    last = {name: array for name, array in found.items() if name not in {f"experts.{n}.up" for n in (3, 4, 5)}}
    assert translated(FAMILY, "counted", "apart", Store(last), config).refusals != ()
