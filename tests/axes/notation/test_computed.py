"""Issue 17, arithmetic: steps with an inverse, computed in float64 and rounded once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.axes.notation.computed import apply_steps, inverse, parse, round_to, simplify

FORMS = {
    "norm - 1": lambda x: x - 1,
    "2 * norm + 0.5": lambda x: 2 * x + 0.5,
    "-exp(A_log)": lambda x: -np.exp(x),
    "1 - x / 4": lambda x: 1 - x / 4,
    "3 + log(exp(x) * 2 + 1)": lambda x: 3 + np.log(np.exp(x) * 2 + 1),
    "-(2 - x) * (1 + 1)": lambda x: -(2 - x) * 2,
    "x": lambda x: x,
}


@pytest.mark.parametrize("text", FORMS)
def test_steps_give_the_formula_and_their_inverse_gives_it_back(text: str) -> None:
    steps = parse(text)
    assert steps is not None
    x = np.linspace(-3, 3, 41)
    stored = apply_steps(x, steps)
    assert np.allclose(stored, FORMS[text](x), rtol=1e-14)
    assert np.allclose(apply_steps(stored, inverse(steps)), x, rtol=1e-12, atol=1e-12)
    assert simplify((*inverse(steps), *steps)) == () or np.allclose(
        apply_steps(stored, simplify((*inverse(steps), *steps))), stored
    )


@pytest.mark.parametrize(
    "text",
    ["", "x + y", "x * x", "0 * x", "x +", "1 / x", "sin(x)", "exp(x, x)", "exp(2)", "x / 0", "x ** 2", "7",
     "1e999 * x", "exp(base=x)", "'x' * 2", "True * x", "x - 1j", "(" * 500 + "x" + ")" * 500, "-" * 3000 + "x"],
)  # fmt: skip
def test_what_has_no_inverse_or_is_no_arithmetic_is_refused(text: str) -> None:
    assert parse(text) is None


def test_values_without_a_result_are_refused_but_not_those_that_are_not_finite_before() -> None:
    steps = parse("-exp(x)")
    assert steps is not None
    with pytest.raises(ValueError, match=r"^0\.5$"):
        apply_steps(np.array([-1.0, 0.5]), inverse(steps))
    with pytest.raises(ValueError, match=r"^100\.0$"):
        apply_steps(np.array([100.0], np.float16), steps)
    assert np.isnan(apply_steps(np.array([np.nan], np.float32), steps)).all()
    assert apply_steps(np.array([-np.inf]), steps).tolist() == [0.0]


def test_a_value_beside_the_middle_of_two_is_not_rounded_to_the_middle_first() -> None:
    middle = 1 + 2.0**-8
    values = np.array([middle, middle + 2.0**-40, middle - 2.0**-40, -middle - 2.0**-40, 3.3e38, 1e39, -1e-45, 0.0])
    found = round_to(values, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    assert found[:4].tolist() == [1.0, 1 + 2.0**-7, 1.0, -1 - 2.0**-7]
    assert found[5] == np.inf


@given(st.floats(width=64, allow_nan=False, min_value=-1e38, max_value=1e38))
def test_bfloat16_is_the_nearest(value: float) -> None:
    with np.errstate(all="ignore"):
        found = round_to(np.array([value]), np.dtype(ml_dtypes.bfloat16))
        bits = int(found.view(np.uint16)[0])
        neighbours = np.array([bits - 1, bits, bits + 1], np.int64).clip(0, 0xFFFF).astype(np.uint16)
        others = neighbours.view(ml_dtypes.bfloat16).astype(np.float64)
        distances = np.abs(others[np.isfinite(others)] - value)
    assert abs(float(found[0]) - value) == distances.min()
