"""Universal checkpoints: those of DeepSpeed are read, and from ours DeepSpeed resumes as if it had never stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import transaxle as tx
from tests.formats.deepspeed.universal import scheduled_run
from tests.formats.deepspeed.zero.test_truth import differing
from tests.live.ranks import run, stop_all
from tests.oracles.deepspeed_peer.case import BY_NAME, FP32, SAVED, STATES, STEP
from tests.oracles.deepspeed_peer.farm import Farm, facts, raw
from tests.oracles.deepspeed_peer.resumes import CARRIED, PLAIN, TWICE, Resume, to_universal
from tests.oracles.deepspeed_peer.uncompiled import gloo_alone
from tests.oracles.quiet import quiet
from transaxle.formats.deepspeed.keys import UNIVERSAL
from transaxle.formats.training_state import OPTIMIZER

READ = ("z1-bf16-w2", "tp2-z3")
READ_BY_TURNS = ("z3-fp32-w2", "odd-z3-w4", "tp2-fused", "frozen-z3-w2", "pp2")


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("name", [*READ, *(pytest.param(name, marks=pytest.mark.oracle) for name in READ_BY_TURNS)])
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


@pytest.mark.peers
@pytest.mark.slow
def test_a_frozen_parameter_that_was_lost_is_named(farm: Farm, tmp_path: Path) -> None:
    """ds_to_universal keeps the first rank's part of it and ends well; we say so instead of loading half a weight."""
    to_universal(farm.checkpoint("tp2-frozen-q"), tmp_path)
    with pytest.raises(tx.TransaxleError, match=r"q_proj.*first rank's part|first rank's part") as caught:
        tx.open(tmp_path)
    assert caught.value.code == "INCOMPLETE"


@pytest.mark.peers
@pytest.mark.slow
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


# Settings that another framework's optimizer has otherwise than DeepSpeed: they are written as DeepSpeed has them.


def trained(folder: Path, updates: dict[str, int], groups: list[list[str]]) -> Path:
    """Save weights after so many updates of each, as those have that get no gradients at times."""
    weights = torch.nn.ParameterDict({name: torch.randn(4, 4) for name in updates})
    optimizer = torch.optim.AdamW([{"params": [weights[name] for name in group]} for group in groups], lr=0.001)
    for round_number in range(max(updates.values())):
        for name, count in updates.items():
            weights[name].grad = torch.randn(4, 4) if round_number < count else None
        optimizer.step()
    tx.save(weights, folder, to="dcp", optimizer=optimizer)
    return folder


def test_parameters_of_a_group_that_were_updated_less_often_are_refused(tmp_path: Path) -> None:
    """DeepSpeed has one step for a group: ZeRO-3 would count all of them as the first one."""
    source = trained(tmp_path / "run", {"seldom": 2, "w": 3}, [["seldom", "w"]])
    with pytest.raises(tx.TransaxleError) as told:
        tx.convert(source, tmp_path / "out", to="deepspeed-universal")
    (refusal,) = told.value.refusals
    assert (refusal.code, refusal.where.tensor) == ("UNSUPPORTED", "optim/w/step")
    assert refusal.message.startswith("it was updated 3 times, seldom 2 times")
    assert not (tmp_path / "out").exists()
    tx.convert(source, tmp_path / "out", to="deepspeed-universal", optimizer=False)


@pytest.mark.parametrize(("seldom", "common"), [(3, {"step"}), (2, set[str]())])
def test_steps_of_groups_are_kept_where_deepspeed_has_places(tmp_path: Path, seldom: int, common: set[str]) -> None:
    """ZeRO-1 and 2 take each from the files of its parameters, ZeRO-3 one for all from the settings."""
    source = trained(tmp_path / "run", {"seldom": seldom, "w": 3}, [["seldom"], ["w"]])
    tx.convert(source, tmp_path / "out", to="deepspeed-universal")
    steps = {path.parent.name: torch.load(path).item() for path in (tmp_path / "out").rglob("step.pt")}
    (file,) = (tmp_path / "out").rglob("optimizer_state.pt")
    settings = torch.load(file, weights_only=False)["optimizer_state_dict"]["state"][0]
    assert steps == {"seldom": seldom, "w": 3}
    assert settings.keys() == common


def _from_weights_alone(rank: int, world: int, folder: str) -> list[list[Any] | str]:
    """Load a universal checkpoint at each stage; return what DeepSpeed's optimizer then holds, or what it raises."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    found: list[list[Any] | str] = []
    with quiet():
        import deepspeed

        gloo_alone()
        deepspeed.init_distributed(dist_backend="gloo", rank=rank, world_size=world)
        for stage in (1, 2, 3):
            model = torch.nn.Linear(4, 4)
            config = {
                "train_batch_size": 1, "zero_optimization": {"stage": stage}, "checkpoint": {"load_universal": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
                "zero_force_ds_cpu_optimizer": False,
            }  # fmt: skip
            engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
            try:
                assert engine.load_checkpoint(folder)[0] is not None
            except KeyError as error:
                found.append(repr(error))
                continue
            assert all(bool((weight == 1).all()) for weight in engine.module.parameters())
            found.append([state for state in engine.optimizer.optimizer.state.values() if state])
    return found


@pytest.mark.oracle
@pytest.mark.peers
def test_from_weights_alone_deepspeed_begins_anew_or_fails_as_the_note_says(tmp_path: Path) -> None:
    tx.save({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, tmp_path / "weights", to="safetensors")
    report = tx.convert(tmp_path / "weights", tmp_path / "out", to="deepspeed-universal")
    (note,) = (note for note in report.notes if "optimizer" in note)
    assert "new optimizer at ZeRO-1 and 2, and fails at ZeRO-3" in note
    assert run(1, _from_weights_alone, str(tmp_path / "out")) == [[[], [], "KeyError('step')"]]
    stop_all()  # DeepSpeed keeps groups of processes


# DeepSpeed goes on from our universal checkpoints, on other ranks and at other stages, as if it had never stopped.

STOPS, ENDS = 3, 5


class How(NamedTuple):
    """A run's stage, ranks and type."""

    stage: int
    world: int
    low: bool = True


WAYS = [
    (How(1, 2), How(1, 1)),
    (How(1, 1), How(2, 2)),
    (How(2, 2), How(3, 1)),
    (How(2, 1), How(1, 2)),
    (How(3, 2), How(3, 1)),
    (How(3, 1), How(3, 2)),
    (How(3, 1, low=False), How(1, 2, low=False)),
    (How(1, 2, low=False), How(2, 1, low=False)),
]
Train = Callable[[How, str], tuple[Path, list[Any]]]
"""Runs a job from scratch, or from a universal checkpoint; returns its folder, and what each rank told."""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Run each job once."""
    done: dict[tuple[How, str], tuple[Path, list[Any]]] = {}

    def make(how: How, source: str = "") -> tuple[Path, list[Any]]:
        if (how, source) not in done:
            folder = tmp_path_factory.mktemp("run")
            saves = (ENDS,) if source else (STOPS, ENDS)
            job = scheduled_run.Job(how.stage, how.low, str(folder), saves, source)
            done[how, source] = folder, [told for (told,) in run(how.world, scheduled_run.train, [job])]
            stop_all()  # DeepSpeed keeps groups of processes
        return done[how, source]

    yield make
    stop_all()


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize(("source", "target"), WAYS, ids=str)
def test_next_steps_are_those_of_a_run_without_a_stop(source: How, target: How, train: Train, tmp_path: Path) -> None:
    folder, told = train(source, "")
    report = tx.convert(folder / str(STOPS), tmp_path / "universal", to=UNIVERSAL, sync=False)
    assert ["differ in lr, which ZeRO-3 does not load" in note for note in report.notes] == [True]
    on, found = train(target, str(tmp_path / "universal"))
    assert found == [told[0][STOPS:]] * target.world
    assert len({tuple(rates) for rates, *_ in told[0]}) == ENDS
    with tx.open(folder / str(ENDS)) as wanted, tx.open(on / str(ENDS)) as ended, tx.open(folder / str(STOPS)) as begin:
        assert ended.keys() == wanted.keys()
        assert {name for name in wanted if name.endswith("/exp_avg")} == {
            f"{OPTIMIZER}{name}/exp_avg" for name in scheduled_run.TRAINED
        }
        assert [name for name in wanted if ended[name].tobytes() != wanted[name].tobytes()] == []
        moved = {name for name in wanted if begin[name].tobytes() != wanted[name].tobytes()}
        assert moved >= set(scheduled_run.TRAINED)
        assert _groups(ended) == _groups(wanted)
        weight = scheduled_run.made().state_dict()[scheduled_run.FROZEN]
        kept = weight.to(torch.bfloat16 if source.low else torch.float32)
        assert wanted[scheduled_run.FROZEN].tobytes() == kept.view(torch.uint8).numpy().tobytes()


def _groups(checkpoint: tx.Checkpoint) -> list[dict[str, Any]]:
    return [{**group, "params": sorted(group["params"])} for group in checkpoint.metadata["param_groups"]]


# Universal checkpoints that we write, resumed by DeepSpeed itself at another degree and stage.


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


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("resume", PLAIN, ids=str)
def test_deepspeed_resumes_bit_for_bit(farm: Farm, resume: Resume) -> None:
    check(farm, resume)
    case = BY_NAME[resume.target]
    several = case.groups > 1 or case.sub_group > 0
    shared = facts(farm.resumed(resume) / "loaded")["one_step"]
    assert shared == (case.zero == 3 and several)  # DeepSpeed's own doing, undone before the next update


@pytest.mark.peers
@pytest.mark.slow
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


@pytest.mark.peers
@pytest.mark.slow
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
