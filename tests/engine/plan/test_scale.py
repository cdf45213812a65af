"""Planning grows with the size of the model and with nothing else: counted in calls, not in seconds.

`benchmarks/planning.py` gives the seconds and the bytes for the largest models there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine import synthetic
from transaxle.axes.geometry import PieceOverlap, Shard, whole
from transaxle.axes.layout import relayout
from transaxle.axes.notation.family import Formula
from transaxle.axes.notation.name import Name
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.plan.conversion import make_plan

MEETS, FORMULAS, FORMATS, MATCHES, PIECES = "meets", "formulas", "names formatted", "names matched", "pieces"
RANKS = 256


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what planning does most."""
    counted: Counter[str] = Counter()

    def count(owner: Any, attribute: str, what: str) -> None:
        real: Callable[..., Any] = getattr(owner, attribute)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[what] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, counting)

    count(PieceOverlap, "at", MEETS)
    count(relayout, "pieces", PIECES)
    count(Formula, "__call__", FORMULAS)
    count(Name, "format", FORMATS)
    count(Name, "match", MATCHES)
    return counted


@pytest.mark.parametrize("to", ["transformers", "automodel", "megatron"])
def test_each_tensor_of_one_layer_is_met_once(calls: Counter[str], to: str) -> None:
    """A copy is one meeting of two pieces; nobody looks for partners, and layers that are alike are met once."""
    met = {}
    for layers, experts in [(2, 8), (4, 8), (2, 64)]:
        source = synthetic.model(layers, experts)
        calls.clear()
        plan = make_plan(source, to).plan
        assert not plan.refusals
        met[layers, experts] = calls[MEETS]
        assert len(source) <= plan.copies <= 1.2 * len(source)
        assert calls[MATCHES] <= 1.2 * len(source) + 200
        assert calls[FORMATS] <= 1.1 * len(plan.tensors) + 50
    assert met[2, 8] == met[4, 8]
    assert met[2, 64] - met[2, 8] in (0, 3 * (64 - 8)), "experts that a target each takes are alike too"


@pytest.mark.parametrize("to", ["megatron"])
def test_formulas_and_pieces_do_not_grow_with_the_experts(calls: Counter[str], to: str) -> None:
    found = []
    for experts in (8, 128):
        source = synthetic.model(3, experts)
        calls.clear()
        make_plan(source, to)
        found.append((calls[FORMULAS], calls[PIECES]))
    assert found[0] == found[1]


def _rank(source: Checkpoint, to: str, rank: int) -> int:
    """Plan one rank's rows of every tensor; return the number of copies."""
    copies = 0
    for target in source.translation(to).targets.values():
        held = [whole(size) for size in target.shape]
        if held:
            held[0] = Shard()(held[0], RANKS, rank)
        copies += len(source.source.transfers(target, held))
    return copies


@pytest.mark.parametrize("to", ["transformers"])
def test_a_rank_meets_only_what_it_holds(calls: Counter[str], to: str) -> None:
    source = synthetic.model(3, RANKS)
    source.translation(to)
    met = 0
    for rank in (0, 1, 100, RANKS - 1):
        calls.clear()
        copies = _rank(source, to, rank)
        assert calls[MEETS] == copies
        assert copies < 3 * 40, "one expert a layer, and a few rows of the rest"
        met += copies
    assert met > 0
