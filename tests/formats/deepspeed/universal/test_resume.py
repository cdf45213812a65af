"""Universal checkpoints that we write, resumed by DeepSpeed itself at another degree and stage."""

from __future__ import annotations

from pathlib import Path

import pytest

import transaxle as tx
from tests.formats.deepspeed.zero.test_truth import differing
from tests.oracles.deepspeed_peer.case import BY_NAME, FP32, SAVED, STATES
from tests.oracles.deepspeed_peer.farm import Farm, facts, raw
from tests.oracles.deepspeed_peer.resumes import CARRIED, PLAIN, TWICE, Resume
from transaxle.formats.deepspeed.keys import UNIVERSAL
from transaxle.formats.training_state import OPTIMIZER

pytestmark = [pytest.mark.peers, pytest.mark.slow]


def check(farm: Farm, resume: Resume) -> None:
    """DeepSpeed has loaded what was saved, saves it again, and steps as a run that has the same state by hand."""
    source, out = resume.source, farm.resumed(resume)
    for state in (FP32, *STATES):
        assert raw(out / "loaded" / f"{state}.safetensors") == farm.truth(source, state), state
    with tx.open(out / SAVED) as again:  # what the resumed run saves, at its own degree and stage, is read as the same
        wanted = dict(farm.truth(source, FP32))
        for state in STATES:
            wanted |= {f"{OPTIMIZER}{name}/{state}": held for name, held in farm.truth(source, state).items()}
        assert differing(again, wanted) == []
    loaded, saved = facts(out / "loaded"), farm.facts(source)
    assert loaded["steps"] == saved["steps"]
    counted = 0 if resume.way == CARRIED else saved["steps"][0]  # an engine's count: model and optimizer have none
    assert loaded["global_steps"] == counted
    assert loaded["settings"][: len(saved["settings"])] == saved["settings"]
    case = BY_NAME[resume.target]
    if case.launch.pp == 1:
        begun = farm.started(resume) / "next"
        assert loaded["loss"] == facts(begun)["loss"]
        for state in (FP32, *STATES):
            assert raw(out / "next" / f"{state}.safetensors") == raw(begun / f"{state}.safetensors"), state


@pytest.mark.oracle
@pytest.mark.parametrize("resume", PLAIN, ids=str)
def test_deepspeed_resumes_bit_for_bit(farm: Farm, resume: Resume) -> None:
    check(farm, resume)
    case = BY_NAME[resume.target]
    several = case.groups > 1 or case.sub_group > 0
    shared = facts(farm.resumed(resume) / "loaded")["one_step"]
    assert shared == (case.zero == 3 and several)  # DeepSpeed's own doing, undone before the next update


def test_deepspeed_itself_counts_steps_twice(farm: Farm) -> None:
    """Nothing of ours: DeepSpeed 0.19.8 converts its own ZeRO-3 checkpoint, and loads it with one step for all parts.

    `load_hp_checkpoint_state_from_checkpoint_dir_stage3` gives every sub-group the same tensor, and each sub-group's
    update adds to it. So all but the first take their next update with a step that is too high: just as where a run is
    started with such a tensor, and not as where each has its own.
    """
    name, apart = TWICE.source, Resume(TWICE.source, TWICE.target)
    assert facts(farm.resumed(TWICE) / "loaded")["one_step"]
    for state in (FP32, *STATES):
        file = f"{state}.safetensors"
        for each in (TWICE, apart):
            out, begun = farm.resumed(each), farm.started(each)
            assert raw(out / "loaded" / file) == farm.truth(name, state), state
            assert raw(out / "next" / file) == raw(begun / "next" / file), state
    one, other = (raw(farm.resumed(each) / "next" / f"{FP32}.safetensors") for each in (TWICE, apart))
    differing = {tensor for tensor in one if one[tensor] != other[tensor]}
    assert 0 < len(differing) < len(one)


WIDE = ("tp4", "tp2-wide", "tp1-wide", "tp4-fused", "tp2-wide-fused", "tp1-wide-fused", "tp4-uneven", "tp2-uneven")


@pytest.mark.oracle
@pytest.mark.parametrize("name", WIDE)
def test_by_way_of_one_file_is_the_same(farm: Farm, name: str, tmp_path: Path) -> None:
    """From ranks to ranks directly, and through a checkpoint that knows no ranks."""
    one, two = tmp_path / "direct", tmp_path / "by-way"
    tx.convert(farm.checkpoint(name), one, to=UNIVERSAL, sync=False)
    tx.convert(farm.checkpoint(name), tmp_path / "full", to="safetensors", sync=False)
    tx.convert(tmp_path / "full", two, to=UNIVERSAL, sync=False)
    wanted = dict(farm.truth(name, FP32))
    with tx.open(one) as direct, tx.open(two) as around:
        assert set(direct) == set(around)
        assert all(direct[n].tobytes() == around[n].tobytes() and direct[n].shape == around[n].shape for n in direct)
        assert differing(around, wanted) == []
