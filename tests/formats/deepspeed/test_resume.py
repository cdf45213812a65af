"""Universal checkpoints that we write, resumed by DeepSpeed itself at another degree and stage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import transaxle as tx
from tests.formats.deepspeed.test_truth import differing
from tests.oracles.deepspeed_peer.case import BY_NAME, FP32, SAVED, STATES, TAG
from tests.oracles.deepspeed_peer.farm import Farm, facts, raw
from transaxle.formats.deepspeed.keys import LATEST_UNIVERSAL, UNIVERSAL
from transaxle.formats.state import OPTIMIZER

pytestmark = [pytest.mark.peers, pytest.mark.slow]

PAIRS = (
    # Stages and data-parallel degrees; from one form to the other DeepSpeed's own converter cannot do it.
    ("z1-bf16-w2", "z3-bf16-w4"),
    ("z3-bf16-w4", "z1-bf16-w2"),
    ("z2-fp32-w2", "z3-fp32-w4"),
    ("z3-fp32-w2", "z2-fp32-w4"),
    ("z1-bf16-w2", "z1-bf16-w4"),
    ("sub-groups-w2", "z1-bf16-w4"),
    ("one-group-sub-groups-w2", "one-group-sub-groups-w2"),
    ("mixtral-z1-w2", "mixtral-z3-w2"),
    ("tied-z1-w2", "tied-z3-w2"),
    ("tied-z3-w2", "tied-z1-w2"),
    ("odd-z1-w2", "odd-z3-w4"),
    ("odd-z3-w2", "odd-z2-w4"),
    ("odd-z3-w4", "odd-aligned-w2"),
    # Tensor-parallel degrees.
    ("tp2-vocab251", "tp2-dp2"),
    ("z1-bf16-w2", "tp2-z3"),
    ("tp2-z3", "z1-bf16-w2"),
    ("tp2-z2-fp32", "tp2-dp2-z3"),
    ("tp2-fused", "tp2-dp2-fused"),
    ("tp2-head-rows", "tp2-head-rows"),
    ("tp2-dp2-fused", "tp2-fused"),
    # From every degree to every other, each of them resumed from the file of the one before.
    ("tp4", "tp4"),
    ("tp4", "tp2-wide"),
    ("tp4", "tp1-wide"),
    ("tp2-wide", "tp4"),
    ("tp2-wide", "tp2-wide"),
    ("tp2-wide", "tp1-wide-z3"),
    ("tp1-wide", "tp4"),
    ("tp1-wide-z3", "tp2-wide"),
    ("tp1-wide", "tp1-wide"),
    ("tp4-fused", "tp2-wide-fused"),
    ("tp4-fused", "tp1-wide-fused"),
    ("tp2-wide-fused", "tp4-fused"),
    ("tp1-wide-fused", "tp4-fused"),
    ("tp4-uneven", "tp2-uneven"),
    ("tp4-uneven", "tp1-uneven"),
    ("tp1-uneven", "tp2-uneven"),
    # Pipelines; tensor-parallel ones carry no records, and are cut by what is written beside the tensors.
    ("pp2-tp2", "pp2-tp2"),
    ("pp2", "pp2-dp2"),
    ("pp2-tp2", "pp2-dp2"),
    ("pp2-tied", "pp2-tied"),
)


def _write(source: Path, target: Path) -> None:
    tx.convert(source, target, to=UNIVERSAL, sync=False)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=["--".join(pair) for pair in PAIRS])
def test_deepspeed_resumes_bit_for_bit(farm: Farm, source: str, target: str) -> None:
    out = farm.resumed(source, target, PAIRS, _write)
    for state in (FP32, *STATES):
        assert raw(out / "loaded" / f"{state}.safetensors") == farm.truth(source, state), state
    with tx.open(out / SAVED) as again:  # what the resumed run saves, at its own degree and stage, is read as the same
        wanted = dict(farm.truth(source, FP32))
        for state in STATES:
            wanted |= {f"{OPTIMIZER}{name}/{state}": held for name, held in farm.truth(source, state).items()}
        assert differing(again, wanted) == []
    loaded, saved = facts(out / "loaded"), farm.facts(source)
    assert loaded["steps"] == saved["steps"]
    assert loaded["global_steps"] == saved["steps"][0]
    assert loaded["settings"][: len(saved["settings"])] == saved["settings"]
    case = BY_NAME[target]
    several = case.groups > 1 or case.sub_group > 0
    assert loaded["one_step"] == (case.zero == 3 and several)  # DeepSpeed's own doing, undone before the next update
    if case.launch.pp == 1:
        begun = facts(out / "started" / "next")
        assert loaded["loss"] == begun["loss"]
        for state in (FP32, *STATES):
            ours, begun_there = (
                raw(folder / f"{state}.safetensors") for folder in (out / "next", out / "started" / "next")
            )
            assert ours == begun_there, state


def _theirs(source: Path, target: Path) -> None:
    """DeepSpeed's own converter."""
    folders = ["--input_folder", str(source / TAG), "--output_folder", str(target / TAG)]
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders, "--inject_missing_state"]
    subprocess.run(tool, env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, check=True)
    (target / LATEST_UNIVERSAL).write_text(TAG, "utf-8")


def test_deepspeed_itself_counts_steps_twice(farm: Farm) -> None:
    """Nothing of ours: DeepSpeed 0.19.8 converts its own ZeRO-3 checkpoint, and loads it with one step for all parts.

    `load_hp_checkpoint_state_from_checkpoint_dir_stage3` gives every sub-group the same tensor, and each sub-group's
    update adds to it. So all but the first take their next update with a step that is too high: just as where a run is
    started with such a tensor, and not as where each has its own.
    """
    name = "one-group-sub-groups-w2"
    out = farm.resumed(name, name, [(name, name)], _theirs, together=True)
    assert facts(out / "loaded")["one_step"]
    apart = farm.resumed(name, name, PAIRS, _write)
    for state in (FP32, *STATES):
        file = f"{state}.safetensors"
        assert raw(out / "loaded" / file) == raw(apart / "loaded" / file) == farm.truth(name, state), state
        assert raw(out / "next" / file) == raw(out / "started" / "next" / file), state
        assert raw(apart / "next" / file) == raw(apart / "started" / "next" / file), state
    one, other = (raw(folder / "next" / f"{FP32}.safetensors") for folder in (out, apart))
    differing = {tensor for tensor in one if one[tensor] != other[tensor]}
    assert 0 < len(differing) < len(one)


WIDE = ("tp4", "tp2-wide", "tp1-wide", "tp4-fused", "tp2-wide-fused", "tp1-wide-fused", "tp4-uneven", "tp2-uneven")


@pytest.mark.parametrize("name", WIDE)
def test_by_way_of_one_file_is_the_same(farm: Farm, name: str, tmp_path: Path) -> None:
    """From ranks to ranks directly, and through a checkpoint that knows no ranks."""
    one, two = tmp_path / "direct", tmp_path / "by-way"
    _write(farm.checkpoint(name), one)
    tx.convert(farm.checkpoint(name), tmp_path / "full", to="safetensors", sync=False)
    _write(tmp_path / "full", two)
    wanted = dict(farm.truth(name, FP32))
    with tx.open(one) as direct, tx.open(two) as around:
        assert set(direct) == set(around)
        assert all(direct[n].tobytes() == around[n].tobytes() and direct[n].shape == around[n].shape for n in direct)
        assert differing(around, wanted) == []
