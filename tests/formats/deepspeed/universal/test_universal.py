"""Universal checkpoints that DeepSpeed's own converter makes, both variants, against the same truth."""

from __future__ import annotations

from pathlib import Path

import pytest

import transaxle as tx
from tests.formats.deepspeed.zero.test_truth import differing
from tests.oracles.deepspeed_peer.case import BY_NAME, FP32, STATES, STEP
from tests.oracles.deepspeed_peer.farm import Farm
from tests.oracles.deepspeed_peer.resumes import to_universal
from transaxle.formats.deepspeed.keys import UNIVERSAL
from transaxle.formats.training_state import OPTIMIZER

pytestmark = [pytest.mark.peers, pytest.mark.slow]


READ = ("z1-bf16-w2", "z3-fp32-w2", "odd-z3-w4", "tp2-fused", "tp2-z3", "frozen-z3-w2", "pp2")


@pytest.mark.parametrize("name", READ)
def test_deepspeeds_own_are_read(farm: Farm, tmp_path: Path, name: str) -> None:
    to_universal(farm.checkpoint(name), tmp_path)
    wanted = dict(farm.truth(name, FP32))
    for state in STATES:
        wanted |= {f"{OPTIMIZER}{n}/{state}": held for n, held in farm.truth(name, state).items()}
    with tx.open(tmp_path) as ck:
        assert ck.format == UNIVERSAL
        assert differing(ck, wanted) == []
        steps = {f"{OPTIMIZER}{n}/{STEP}" for n in farm.truth(name, FP32)}
        assert {float(ck[n].read()) for n in steps} == set(farm.facts(name)["steps"])


def test_a_frozen_parameter_that_was_lost_is_named(farm: Farm, tmp_path: Path) -> None:
    """ds_to_universal keeps the first rank's part of it and ends well; we say so instead of loading half a weight."""
    to_universal(farm.checkpoint("tp2-frozen-q"), tmp_path)
    with pytest.raises(tx.TransaxleError, match=r"q_proj.*first rank's part|first rank's part") as caught:
        tx.open(tmp_path)
    assert caught.value.code == "INCOMPLETE"


@pytest.mark.parametrize("name", ["z1-bf16-w2", "tp2-frozen-q", "tied-z3-w2", "odd-z2-w4", "pp2-tied"])
def test_ours_say_what_their_sources_say(farm: Farm, tmp_path: Path, name: str) -> None:
    source, target = farm.checkpoint(name), tmp_path / "universal"
    tx.convert(source, target, to=UNIVERSAL, sync=False)
    with tx.open(source) as one, tx.open(target) as other:
        assert set(one) == set(other)
        assert all(one[n].tobytes() == other[n].tobytes() for n in one)
        told, kept = (ck.metadata["param_groups"] for ck in (one, other))
        assert [group["weight_decay"] for group in told] == [group["weight_decay"] for group in kept]
        if BY_NAME[name].launch.pp == 1:
            assert [sorted(group["params"]) for group in told] == [sorted(group["params"]) for group in kept]
        assert other.metadata["deepspeed"]["client_state"]["note"] == name
