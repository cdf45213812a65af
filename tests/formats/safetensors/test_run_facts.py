"""What a run counts, in the header of a file beside its optimizer's state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import transaxle as tx
from transaxle.formats.training_state import KEPT_RUN, MEGATRON, RUN, facts_as_text, facts_in

FACTS: dict[str, dict[str, object]] = {
    RUN: {"global_steps": 3, "global_samples": 48},
    MEGATRON: {"iteration": 3, "counters": {"consumed_train_samples": 48}, "opt_param_scheduler": {"max_lr": 1e-3}},
}


def _text(facts: object) -> str:
    return json.dumps([{**facts, "params": []}]) if isinstance(facts, dict) else json.dumps(facts)


def test_facts_are_kept_as_they_are() -> None:
    run = {**FACTS[RUN], MEGATRON: FACTS[MEGATRON], "param_groups": [], "zero_stage": 1}
    text = facts_as_text(run)
    assert text is not None
    assert facts_in(text) == FACTS
    assert facts_as_text({"global_steps": None, MEGATRON: {}}) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[[]]",
        _text({RUN: 3}),
        _text({MEGATRON: {"iteration": "../3"}}),
        _text({MEGATRON: {"iteration": -1}}),
        _text({MEGATRON: {"iteration": True}}),
        _text({MEGATRON: {"counters": [3]}}),
        _text({RUN: {"global_samples": 1.5}}),
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_such_text_is_left_as_it_is(text: str, tmp_path: Path) -> None:
    assert facts_in(text) == {}
    save_file({"optim/w/exp_avg": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={KEPT_RUN: text})
    with tx.open(tmp_path / "model.safetensors") as checkpoint:
        assert checkpoint.metadata == {KEPT_RUN: text}
