"""The page of journeys lists each of them, and each verdict on it is one that a journey may end with."""

from __future__ import annotations

import pytest
import torch

from tests.journeys.matrix import collected, recorded
from tests.journeys.record import STEPS, Journey, is_verdict
from transaxle.errors import TransaxleError, refuse


def test_the_page_lists_all_journeys() -> None:
    """A flavour that is new in a peer's registry is a line that is missing: `make journeys` writes it."""
    names = collected()
    assert len(names) == len(set(names))
    assert sorted(row["journey"] for row in recorded()["journeys"]) == sorted(names)


def test_each_verdict_is_right() -> None:
    record = recorded()
    assert record["steps"] == STEPS
    for row in record["journeys"]:
        wrong = [(step, verdict) for step, verdict in row["steps"] if step not in STEPS or not is_verdict(verdict)]
        assert wrong == [], row["journey"]


def test_other_logits_fail() -> None:
    journey = Journey("a", "torch")
    logits = torch.arange(6.0)
    for ours, trainers in ((logits + 1e-3, logits), (torch.zeros(3), torch.zeros(3)), (logits[:3], logits)):
        with pytest.raises(AssertionError):
            journey.equal("logits", ours, trainers)
    assert journey.steps == []


def test_another_refusal_fails() -> None:
    journey = Journey("a", "torch")
    for other in (refuse("UNSUPPORTED", "a bias", hint="leave it out"), refuse("LOSSY", "a bias")):
        with pytest.raises(AssertionError), journey.refused("back", "LOSSY", "a bias"):
            _raise(other)
    with journey.refused("back", "LOSSY", "a bias"):
        _raise(refuse("LOSSY", "a bias", hint="leave it out"))
    assert journey.steps == [("back", "refused: LOSSY")]


def _raise(error: TransaxleError) -> None:
    raise error
