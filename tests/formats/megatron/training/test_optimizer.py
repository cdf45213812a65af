"""An optimizer's state in Megatron: a run goes on at other degrees as the one that never stopped, bit by bit.

A run loads a hub's weights, makes two steps, saves, makes a third and saves again. What it saved first goes to Megatron
by way of another format; the third step from there must be the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.formats.megatron.legacy.run import LAYERS, MULTIPLE, VOCABULARY, Run
from tests.formats.megatron.training import peer
from tests.formats.megatron.training.conftest import Megatron, model

MODELS = {"llama": Run(), "experts": Run(sparse=tuple(range(LAYERS)))}
FIRST = {"llama": ("--tensor-model-parallel-size 2", 4), "experts": ("--expert-model-parallel-size 2", 2)}
"""Degrees of the run that is saved, and its ranks."""


class Way(NamedTuple):
    """How a run goes on."""

    model: str
    by: str
    """Format between both runs of Megatron."""
    words: str
    ranks: int


WAYS = [
    Way("llama", "hf", "--pipeline-model-parallel-size 2", 2),
    Way("llama", "hf", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4),
    Way("llama", "deepspeed-universal:hf", "--override-opt_param-scheduler", 1),
    Way("experts", "hf", "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2", 4),
    Way("experts", "deepspeed-universal:hf", "--override-opt_param-scheduler --expert-model-parallel-size 2", 2),
]

pytestmark = pytest.mark.megatron


def _words(name: str, folder: Path, out: Path) -> str:
    normed = "--qk-layernorm" if MODELS[name].sparse else ""
    return f"""--load {folder} --save {out} --use-checkpoint-args --vocab-size {VOCABULARY - 1} --bf16 {normed}
        --norm-epsilon 1e-6 --make-vocab-size-divisible-by {MULTIPLE} --transformer-impl local
        --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable """


@pytest.fixture(scope="module")
def runs(megatron: Megatron, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each model's run, with the iterations after two steps and after three; the hub's beside it."""
    found, cases = {}, []
    for number, (name, (degrees, ranks)) in enumerate(FIRST.items()):
        folder = tmp_path_factory.mktemp(name)
        model(MODELS[name], folder / "hub", number)
        tx.convert(folder / "hub", folder / "weights", to="torch_dist", dtype="bf16", sync=False)
        words = _words(name, folder / "weights", folder / "run") + degrees
        cases.append(peer.Case(str(folder / "out"), words, ranks, steps=2, more=1))
        found[name] = folder
    megatron(cases)
    return found


@pytest.fixture(scope="module")
def resumed(runs: dict[str, Path], megatron: Megatron, tmp_path_factory: pytest.TempPathFactory) -> dict[Way, Path]:
    """The folder of each run that went on."""
    found, cases = {}, []
    for way in WAYS:
        folder, begun = tmp_path_factory.mktemp("resumed"), runs[way.model]
        config = begun / "hub" / "config.json"
        stopped = begun / "run" / "iter_0000002"
        report = tx.convert(stopped, folder / "there", to=way.by, config=config, optimizer=True, sync=False)
        assert report.notes == (("config.json is written from the config that you gave",) if way.by == "hf" else ())
        report = tx.convert(folder / "there", folder / "back", to="torch_dist", config=config, sync=False)
        told = "by --lr 0.001 --min-lr 0.0001 --weight-decay 0.01;"
        assert [told in note for note in report.notes] == ([] if way.by == "hf" else [True])
        words = _words(way.model, folder / "back", folder / "run") + way.words
        cases.append(peer.Case(str(folder / "out"), words, way.ranks, steps=1))
        found[way] = folder / "run"
    megatron(cases)
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.model} by {way.by}, {way.ranks} ranks")
def test_the_next_step_is_that_of_a_run_that_never_stopped(
    way: Way, runs: dict[str, Path], resumed: dict[Way, Path], tmp_path: Path
) -> None:
    begun = runs[way.model]
    config = begun / "hub" / "config.json"
    tx.convert(begun / "run" / "iter_0000003", tmp_path / "wanted", to="hf", config=config, optimizer=True)
    tx.convert(resumed[way], tmp_path / "found", to="hf", config=config, optimizer=True)
    for file in ("model.safetensors", "optimizer/optimizer.safetensors"):
        wanted, found = (load_file(tmp_path / side / file) for side in ("wanted", "found"))
        assert found.keys() == wanted.keys()
        assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
    with tx.open(tmp_path / "wanted") as wanted_state, tx.open(tmp_path / "found") as found_state:
        wanted_groups, found_groups = (
            {name: {**group, "params": ()} for group in state.metadata["param_groups"] for name in group["params"]}
            for state in (wanted_state, found_state)
        )
        assert found_groups == wanted_groups
        wanted_run, found_run = (state.metadata["megatron"] for state in (wanted_state, found_state))
        assert found_run["opt_param_scheduler"] == wanted_run["opt_param_scheduler"]
        assert (found_run["iteration"], found_run["counters"]["consumed_train_samples"]) == (3, 24)


def test_the_first_step_of_the_source_is_not_the_last(runs: dict[str, Path], tmp_path: Path) -> None:
    """What is compared changes with every step."""
    folder = runs["llama"]
    for number in (2, 3):
        tx.convert(
            folder / "run" / f"iter_000000{number}", tmp_path / str(number), to="hf", config=folder / "hub/config.json"
        )
    assert not tx.diff(tmp_path / "2", tmp_path / "3")
