"""The tensors that a config implies, without a checkpoint: names and shapes written out by hand."""

from __future__ import annotations

import pytest

from tests.axes.apply import only
from tests.some import some
from transaxle.axes.layout.model_tensors import Model
from transaxle.axes.notation.family import Sizes
from transaxle.errors import Refused, UsageError

CHAIN = only("""
family chain
  axes l=layers d=width f=hidden e=experts n=words p
  third  : l f             when second
  second : l d             when first
  first  : l f d           when l >= start
  gate   : l e f d         when experts > 0
  embed  : n d
  head   : n d
  extra  : l f d           when has_extra
  scale  : l d             when has_scale
  tie head = embed when tied
  cut ep = e of gate
dialect hf
  embed = [[embed:n | 0:p] d]
  head = head[n d]             when not tied
  layers.{l}.first = first[f d]
  layers.{l}.second = second[d]
  layers.{l}.third = third[f]
  layers.{l}.experts.{e} = gate[f d]
  layers.{l}.extra = extra[f d]
  layers.{l}.scale = scale[d]
dialect stacked
  embed = embed[n d]
  first = first[l f d]
  experts.{l} = gate[e f d]
""")

CONFIG = {
    "layers": 3, "width": 4, "hidden": 5, "experts": 2, "words": 7, "start": 1, "tied": False, "has_extra": False,
    "has_scale": False,
}  # fmt: skip


def shapes(dialect: str, tp: int = 0, **changed: object) -> dict[str, tuple[int, ...]]:
    config = {key: value for key, value in {**CONFIG, **changed}.items() if value is not None}
    return dict(Model(CHAIN, Sizes(CHAIN, config, {}), tp).stored_shapes(some(CHAIN.dialect(dialect))))


EXPERTS = {f"layers.{layer}.experts.{e}": (5, 4) for layer in range(3) for e in range(2)}
FROM_START = {
    name: shape
    for layer in (1, 2)
    for name, shape in {
        f"layers.{layer}.first": (5, 4), f"layers.{layer}.second": (4,), f"layers.{layer}.third": (5,),
    }.items()
}  # fmt: skip


def test_a_condition_may_depend_on_a_tensor_that_is_declared_later() -> None:
    """`third` exists if `second` does, which exists if `first` does: each is known a round after the next."""
    wanted = {"embed": (7, 4), "head": (7, 4), **EXPERTS, **FROM_START}
    assert shapes("hf") == wanted
    assert shapes("hf", start=3) == {"embed": (7, 4), "head": (7, 4), **EXPERTS}


def test_a_tied_head_and_zero_experts_are_absent() -> None:
    assert shapes("hf", tied=True) == {"embed": (7, 4), **EXPERTS, **FROM_START}
    assert shapes("hf", experts=0) == {"embed": (7, 4), "head": (7, 4), **FROM_START}


def test_the_vocabulary_is_padded_to_a_multiple_of_128_rows_for_each_rank() -> None:
    rows = [
        shapes("hf", tp, words=words)["embed"][0] for tp, words in ((0, 129), (1, 129), (2, 129), (2, 256), (2, 257))
    ]
    assert rows == [129, 256, 256, 256, 512]


def test_one_tensor_for_all_layers_needs_all_of_them() -> None:
    assert shapes("stacked", start=0) == {
        "embed": (7, 4), "first": (3, 5, 4), **{f"experts.{layer}": (2, 5, 4) for layer in range(3)},
    }  # fmt: skip
    with pytest.raises(Refused, match="first is in some of them only") as caught:
        shapes("stacked")
    assert caught.value.code == "UNSUPPORTED"


def test_a_matrix_that_the_config_leaves_open_is_refused_and_a_vector_is_not() -> None:
    dialect = some(CHAIN.dialect("hf"))
    matrix, vector = (
        Model(CHAIN, Sizes(CHAIN, {key: value for key, value in CONFIG.items() if key != missing}, {}))
        for missing in ("has_extra", "has_scale")
    )
    for model in (matrix, vector):
        assert dict(model.stored_shapes(dialect)) == shapes("hf", tp=1)
    vector.check_decided(dialect)
    with pytest.raises(UsageError, match="it lacks has_extra") as caught:
        matrix.check_decided(dialect)
    assert caught.value.code == "AMBIGUOUS"


def test_a_config_may_not_claim_a_billion_layers() -> None:
    with pytest.raises(Refused, match="l=1000000000 is more than"):
        shapes("hf", layers=10**9)
