from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.axes.apply import law, only
from tests.some import some
from tests.work import assert_linear, calls
from transaxle.axes.layout.bind import WEIGHT, BoundNames, bind, group, join_slot, score, split_slot, with_counts
from transaxle.axes.notation.family import Dialect, Family, Sizes
from transaxle.errors import UsageError

TOY = only("""
family toy
  axes l=layers m=extra L=layers d=width e=experts f
  up    : l e f d
  norm  : l d
  end   : d
  head  : m d
  w1    : l d
  w2    : l d
dialect hf
  layers.{l}.experts.{e}.up = up[f d]
  layers.{l}.norm = norm[d]
  layers.{m+L}.norm = head[d]
  layers.{l}.w1 = w1[d]
  layers.{l}.w2 = w2[d]
  norm = end[d]
  ignore layers.{l}.inv_freq
dialect apart
  layers.{l}.norm = norm[d]
  ahead.{l-L}.norm = norm[d]
dialect greek
  слой.{l}.норма = norm[d]
""")


def bound(
    names: Sequence[str],
    prefix: str = "",
    dialect: str = "hf",
    family: Family = TOY,
    config: Mapping[str, int] | None = None,
) -> BoundNames:
    read = some(family.dialect(dialect))
    return bind(names, family, read, Sizes(family, config or {}), prefix)


def read(
    names: Sequence[str], prefix: str = "", dialect: str = "hf", config: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Stored name -> logical tensor, slot and indices that it was read as."""
    found = bound(names, prefix, dialect, config=config)
    return {
        name: f"{line.expression.components[0]}{slot and ':' + slot}{list(index)}"
        for (line, slot), same in found.names.items()
        for index, name in same.items()
    }


SIZES = {"layers": 3, "extra": 2, "experts": 12}


def test_names_are_read_whole() -> None:
    names = ["layers.2.experts.10.up", "layers.0.norm", "norm", "layers.1.w1", "layers.1.w2"]
    tensors = ["up[2, 10]", "norm[0]", "end[]", "w1[1]", "w2[1]"]
    assert read(names, config=SIZES) == dict(zip(names, tensors, strict=True))


@pytest.mark.parametrize("name", [
    "layers.0.norm.norm", "norm.layers.0.norm", "xlayers.0.norm", "layers.0.normal", "layers.00.norm", "layers.0.w3",
    "layers.5.norm", "layers.0.experts.12.up", "layers.0.experts.-1.up", "layers.99999999999999999999.norm", "",
    "layers..norm",
])  # fmt: skip
def test_names_that_only_look_alike_are_unknown(name: str) -> None:
    found = bound([name], config=SIZES)
    assert found.unknown == (name,)
    assert not found.names


def test_layers_that_are_numbered_after_others() -> None:
    names = [f"layers.{number}.norm" for number in range(5)]
    tensors = ["norm[0]", "norm[1]", "norm[2]", "head[0]", "head[1]"]
    assert read(names, config=SIZES) == dict(zip(names, tensors, strict=True))


def test_numbers_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(UsageError, match="--axis L=N") as caught:
        bound(["layers.0.norm"])
    assert caught.value.code == "UNKNOWN_AXIS"
    assert read(["layers.7.w1", "norm"]) == {"layers.7.w1": "w1[7]", "norm": "end[]"}


@pytest.mark.parametrize("config", [{}, {"layers": 7}])
def test_layers_are_counted_where_others_are_numbered_after_them(config: dict[str, int]) -> None:
    dialect = some(TOY.dialect("apart"))
    names = [f"optim/mod.layers.{number}.norm/step" for number in (0, 3, 2)]
    known = Sizes(TOY, config)
    assert with_counts(known, dialect, "mod.", names) is known
    sizes = with_counts(known, dialect, "mod.", [*names, "mod.ahead.1.norm"])
    assert sizes.at({})["L"] == config.get("layers", 4)
    found = bind(["mod.ahead.1.norm"], TOY, dialect, sizes, "mod.")
    indices = [list(of_line) for of_line in found.names.values()]
    assert indices == ([] if config else [[(5,)]]), "there are no more layers than the config says"


def test_ignored_names_hold_nothing() -> None:
    found = bound(["layers.0.inv_freq", "layers.x.inv_freq", "inv_freq", "optim/layers.0.inv_freq/step"], config=SIZES)
    assert found.ignored == ("layers.0.inv_freq", "optim/layers.0.inv_freq/step")
    assert found.unknown == ("layers.x.inv_freq", "inv_freq")


def test_names_need_not_be_ascii() -> None:
    assert read(["слой.1.норма"], dialect="greek") == {"слой.1.норма": "norm[1]"}
    assert read(["модель.слой.1.норма"], "модель.", "greek") == {"модель.слой.1.норма": "norm[1]"}
    assert bound(["слой.١.норма"], dialect="greek").unknown == ("слой.١.норма",)


def test_a_prefix_is_bound_once_for_all_names() -> None:
    names = ["module.norm", "norm", "module.module.norm", "module.layers.0.w1", "module.layers.0.inv_freq"]
    found = bound(names, "module.", config=SIZES)
    assert read(names, "module.", config=SIZES) == {"module.norm": "end[]", "module.layers.0.w1": "w1[0]"}
    assert found.ignored == ("module.layers.0.inv_freq",)
    assert found.unknown == ("norm", "module.module.norm")
    # One with digits is not another one with other digits.
    names = ["model1.norm", "model2.norm"]
    assert read(names, "model1.") == {"model1.norm": "end[]"}
    assert read(names, "model2.") == {"model2.norm": "end[]"}


def best(names: Sequence[str], dialect: Dialect | None = None) -> tuple[int, str]:
    hf = some(dialect or TOY.dialect("hf"))
    return score(group(split_slot(name)[0] for name in names), hf)


def test_the_prefix_is_the_one_that_reads_most_names() -> None:
    plain = ["layers.0.w1", "layers.1.w1", "layers.0.w2", "norm"]
    assert best(plain) == (4, "")
    assert best([f"module._orig_mod.{name}" for name in plain]) == (4, "module._orig_mod.")
    assert best([*(f"language_model.{name}" for name in plain), "vision.norm"]) == (4, "language_model.")
    assert best([f"optim/module.{name}/exp_avg" for name in plain]) == (4, "module.")
    assert best(["what", "ever.it.is"]) == (0, "")


@pytest.mark.parametrize(("name", "parts"), [
    ("a.b", ("a.b", WEIGHT)),
    ("optim/a.b/exp_avg", ("a.b", "exp_avg")),
    ("optim/a/b/step", ("a/b", "step")),
    ("optim/#3/exp_avg", ("#3", "exp_avg")),
    ("optim/a", ("optim/a", WEIGHT)),
    ("optim/a/", ("optim/a/", WEIGHT)),
    ("optim//step", ("optim//step", WEIGHT)),
    ("optimizer/a/step", ("optimizer/a/step", WEIGHT)),
])  # fmt: skip
def test_slots(name: str, parts: tuple[str, str]) -> None:
    assert split_slot(name) == parts


@law
@given(st.text(st.sampled_from("optim/a.#0"), max_size=16))
def test_join_is_the_inverse_of_split(name: str) -> None:
    assert join_slot(*split_slot(name)) == name


def test_states_follow_the_line_of_their_parameter() -> None:
    names = ["optim/module.layers.1.w2/exp_avg", "optim/module.layers.1.w2/step", "optim/layers.1.w2/step"]
    assert read(names, "module.", config=SIZES) == {names[0]: "w2:exp_avg[1]", names[1]: "w2:step[1]"}
    assert bound(names, "module.", config=SIZES).unknown == (names[2],)


def test_looking_for_a_prefix_is_linear_in_the_dots_of_a_name() -> None:
    dialect = TOY.dialects[0]
    names = ["a." * count + "layers.0.norm" for count in (2_000, 4_000, 8_000)]
    assert [score(group([name]), dialect) for name in names] == [(1, name[: -len("layers.0.norm")]) for name in names]
    assert_linear([calls(lambda name=name: score(group([name]), dialect)) for name in names])  # type: ignore[misc]
    assert calls(lambda: score(group(names[:1]), dialect)) < 1_000, "only what a dialect's longest name may be"
