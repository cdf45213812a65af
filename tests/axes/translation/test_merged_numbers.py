"""Numbers that count several axes through, `{(l e)}`: there and back, and refused where no size tells them apart."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.axes.apply import Store, arange, bound_to, carried, law, only, same, translated
from tests.axes.toy import only_refusal
from transaxle.axes.notation.family import Sizes
from transaxle.errors import UsageError

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


def model(layers: int, experts: int, *, router: bool = False, norm: bool = True) -> dict[str, torch.Tensor]:
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
    tensors = model(layers, experts, router=True)
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
    tensors = model(3, 2, norm=False) | ahead
    states = {f"optim/{name}/exp_avg": tensor + 1 for name, tensor in tensors.items()}
    found = carried(FAMILY, "apart", "counted", Store({**tensors, **states}), config)
    assert {name for name in found if name.startswith("ahead")} == {f"ahead.{n}" for n in (3, 4, 5, 6)}
    assert found["optim/ahead.5/exp_avg"].tolist() == (ahead["ahead.1.0"] + 1).tolist()
    same(carried(FAMILY, "counted", "apart", Store(found), config), {**tensors, **states})


def test_a_size_that_shapes_show_tells_numbers_apart() -> None:
    tensors = model(3, 4, router=True, norm=False)
    found = carried(FAMILY, "apart", "counted", Store(tensors), {"layers": 3, "experts": 4})
    same(carried(FAMILY, "counted", "apart", Store(found)), tensors)


@pytest.mark.parametrize(
    ("config", "hint"),
    [({}, ""), ({"layers": 3}, "If all 12 are here, then with l=3, e=4."), ({"layers": 5}, ""), ({"layers": 0}, "")],
)
def test_numbers_alone_tell_nothing(config: dict[str, int], hint: str) -> None:
    """12 numbers may be 3 layers of 4 experts, or 4 of 3."""
    found = carried(FAMILY, "apart", "counted", Store(model(3, 4, norm=False)), {"layers": 3, "experts": 4})
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
    same(
        carried(FAMILY, "counted", "apart", Store(found), config if config.get("layers") == 3 else {}, {"e": 4}),
        model(3, 4, norm=False),
    )


def test_names_that_need_no_size_are_read_without_one() -> None:
    store = Store({f"layers.{i}.norm.{j}": arange(3) for i in range(2) for j in range(2)})
    view = translated(FAMILY, "apart", "counted", store, {"layers": 2})
    assert {r.code for r in view.refusals} == {"MISSING_TENSOR"}
    counted = FAMILY.dialect("counted")
    bound = bound_to(
        FAMILY, "counted", Store({"norm.1": arange(3), "norm.3": arange(3), "norm.2": arange(3)}), Sizes(FAMILY, {})
    )
    assert bound.dialect is counted
    assert [dict(names) for names in bound.names.values()] == [{(0, 0): "norm.1", (0, 1): "norm.3"}]
    assert bound.unknown == ("norm.2",)


def test_the_target_needs_the_size_too() -> None:
    packed = {"up": arange(3, 4, 2, 3)}
    same(
        carried(FAMILY, "packed", "counted", Store(packed)),
        {f"experts.{n}.up": packed["up"].reshape(12, 2, 3)[n] for n in range(12)},
    )
    table = FAMILY_OF_ONE
    view = translated(only(table), "whole", "counted", Store({"x": arange(6)}))
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
    found = carried(FAMILY, "apart", "counted", Store(model(2, 3, norm=False)), config)
    lacking = {name: array for name, array in found.items() if name != "experts.4.up"}
    refusal = only_refusal(translated(FAMILY, "counted", "apart", Store(lacking), config), "MISSING_TENSOR")
    assert refusal.message.splitlines()[1:] == ["experts.4.up"]
    more = Store({**found, "experts.6.up": arange(2, 3)})
    assert translated(FAMILY, "counted", "apart", more, config).kept_names == ("experts.6.up",)
    last = {
        name: array for name, array in found.items() if name not in ("experts.3.up", "experts.4.up", "experts.5.up")
    }
    assert translated(FAMILY, "counted", "apart", Store(last), config).refusals != ()
