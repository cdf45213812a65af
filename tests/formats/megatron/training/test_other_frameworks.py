"""Training moves from DeepSpeed and FSDP2 to Megatron, and back: the next step has the same bits there as here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.formats.megatron.legacy.run import MULTIPLE, VOCABULARY, Run
from tests.formats.megatron.training import other_frameworks as others
from tests.formats.megatron.training import peer
from tests.formats.megatron.training.conftest import Megatron, model
from tests.live.ranks import run, stop_all

WAYS = {
    "zero": ("--tensor-model-parallel-size 2", 3 * 2 * others.BATCH),
    "fsdp": ("--pipeline-model-parallel-size 2", 2 * others.BATCH),
}
"""Source -> how Megatron goes on, and what it counts: FSDP2 counts no samples."""
LR = f"--lr {others.LR} --min-lr 0.0 --weight-decay {others.DECAY}"

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What DeepSpeed and FSDP2 saved after two steps and more; the hub's model beside it."""
    folder = tmp_path_factory.mktemp("trained")
    model(Run(), folder / "hub")
    run(2, others.zero, str(folder / "hub"), 1, "", str(folder / "zero"), [2, 3, 4])
    run(2, others.fsdp, str(folder / "hub"), str(folder / "fsdp"), [2, 3])
    stop_all()  # DeepSpeed keeps groups of processes
    yield folder
    stop_all()


@pytest.fixture(scope="module")
def resumed(trained: Path, megatron: Megatron, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What Megatron saved after one more step."""
    folder = tmp_path_factory.mktemp("resumed")
    cases = []
    for name, (degrees, _) in WAYS.items():
        there = folder / f"{name}-there"
        config = trained / "hub" / "config.json"
        report = tx.convert(trained / name / "2", there, to="torch_dist", config=config, sync=False)
        assert f"by {LR} (the source does not say its schedule: " in report.notes[0]
        assert ["begin anew" in note for note in report.notes[1:]] == [True] * (name == "fsdp")
        words = f"""--load {there} --save {folder / name} --use-checkpoint-args --vocab-size {VOCABULARY - 1}
            --norm-epsilon 1e-6 --make-vocab-size-divisible-by {MULTIPLE} --transformer-impl local
            --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable {LR} --lr-decay-style constant
            --override-opt_param-scheduler {degrees}"""
        cases.append(peer.Case(str(folder / f"{name}-out"), words, 2, steps=1))
    megatron(cases)
    return {name: folder / name for name in WAYS}


def _same(wanted: Path, found: Path, hub: Path, place: Path) -> None:
    """Check that weights, moments and steps are equal; full-precision copies of such weights are these."""
    config = hub / "config.json"
    for side, folder in (("wanted", wanted), ("found", found)):
        tx.convert(folder, place / side, to="hf", config=config, optimizer=True)
    weights, others_weights = (load_file(place / side / "model.safetensors") for side in ("wanted", "found"))
    state, others_state = (load_file(place / side / "optimizer/optimizer.safetensors") for side in ("wanted", "found"))
    copies = {f"optim/{name}/fp32": value for name, value in weights.items()}
    assert others_weights.keys() == weights.keys()
    assert others_state.keys() | copies.keys() == state.keys() | copies.keys()
    assert len(state.keys() - copies.keys()) == 3 * len(weights)
    wanted_values, found_values = copies | state | weights, others_state | others_weights
    assert [name for name, value in found_values.items() if not torch.equal(wanted_values[name], value)] == []


@pytest.mark.parametrize("name", WAYS)
def test_a_step_in_megatron_is_the_next_one(name: str, trained: Path, resumed: dict[str, Path], tmp_path: Path) -> None:
    _same(trained / name / "3", resumed[name], trained / "hub", tmp_path)
    with tx.open(resumed[name], config=trained / "hub" / "config.json") as checkpoint:
        run_of = checkpoint.metadata["megatron"]
        assert (run_of["iteration"], run_of["counters"]["consumed_train_samples"]) == (3, WAYS[name][1])
        assert run_of["opt_param_scheduler"]["num_steps"] == WAYS[name][1]
        settings = {(group["weight_decay"], group["lr"]) for group in checkpoint.metadata["param_groups"]}
        assert settings == {(others.DECAY, others.LR), (0.0, others.LR)}
        assert {(group["betas"], group["eps"]) for group in checkpoint.metadata["param_groups"]} == {
            (others.BETAS, others.EPS)
        }


def test_deepspeed_goes_on_where_megatron_stopped(trained: Path, resumed: dict[str, Path], tmp_path: Path) -> None:
    config = trained / "hub" / "config.json"
    tx.convert(resumed["zero"], tmp_path / "universal", to="deepspeed-universal:hf", config=config)
    given = str(trained / "hub"), 2, str(tmp_path / "universal"), str(tmp_path / "zero"), [4]
    run(2, others.zero, *given)
    _same(trained / "zero" / "4", tmp_path / "zero" / "4", trained / "hub", tmp_path)
