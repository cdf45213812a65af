"""`explain`: every refusal code has its texts."""

from __future__ import annotations

import pytest

from tests.cli.running import USAGE, Transaxle
from transaxle.engine.explanations import EXPLANATIONS
from transaxle.errors import CODES, Code, refuse


def test_every_code_is_explained() -> None:
    assert tuple(EXPLANATIONS) == CODES


@pytest.mark.parametrize("code", CODES)
def test_an_explanation_is_complete(code: Code, transaxle: Transaxle) -> None:
    text = EXPLANATIONS[code]
    assert text.summary.endswith(".")
    assert "\n" not in text.summary
    assert min(map(len, (text.meaning, text.remedy))) > 60
    outcome = transaxle("explain", code)
    assert outcome.code == 0
    assert outcome.out.startswith(f"{code}  {text.summary}  (exits with {refuse(code, '').exit_code})")
    assert " ".join(text.remedy.split()) in " ".join(outcome.out.split())
    assert max(map(len, outcome.out.splitlines())) <= 140


def test_explain_without_a_code_lists_all_codes(transaxle: Transaxle) -> None:
    assert [line.split()[0] for line in transaxle("explain").out.splitlines()] == list(CODES)
    assert tuple(transaxle("explain", "--json").json) == CODES


def test_codes_may_be_typed_loosely(transaxle: Transaxle) -> None:
    assert list(transaxle("explain", "unknown-axis", "Lossy", "--json").json) == ["UNKNOWN_AXIS", "LOSSY"]
    transaxle("explain", "MISALIGNED").expect(USAGE, err="BLOCK_MISALIGNED")
