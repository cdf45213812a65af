"""Step folders of parts, as far as no trainer is needed: what belongs together, what does not, and the files beside."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import transaxle as tx
from tests import checkpoints
from tests.engine.peers.test_optimizer import trained
from tests.formats.refusals import refuses
from transaxle.errors import TransaxleError

STATE = "optim/"
TRAINED = trained()
WEIGHTS = {name: array for name, array in TRAINED.items() if not name.startswith(STATE)}
STATES = {name: array for name, array in TRAINED.items() if name.startswith(STATE)}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """Like one of Automodel's."""
    folder = tmp_path / "step"
    checkpoints.write(folder / "model", WEIGHTS, config=checkpoints.CONFIG)
    checkpoints.write(folder / "optim", STATES)
    metadata = folder / "model" / ".hf_metadata"
    metadata.mkdir()
    shutil.move(folder / "model" / "config.json", metadata)
    (metadata / "fqn_to_file_index_mapping.json").write_text("{}")
    for file in ("model/consolidate.sh", "losses.json"):
        (folder / file).write_text("")
    return folder


def test_the_folder_is_one_checkpoint_with_its_config(step: Path, tmp_path: Path) -> None:
    with tx.open(step) as whole:
        assert set(whole) == {*WEIGHTS, *STATES}
        assert whole.family == checkpoints.CONFIG["model_type"]
        assert whole.container.carried == ("config.json", "losses.json")
        assert whole.container.ignored == ("model/consolidate.sh",)
        assert set(whole.container.files) == {"model/model.safetensors", "optim/model.safetensors"}
    tx.convert(step, tmp_path / "out", to="hf", optimizer=True, sync=False)
    assert (tmp_path / "out" / "config.json").read_bytes() == (step / "model/.hf_metadata/config.json").read_bytes()
    assert tx.verify(step, tmp_path / "out").ok
    with tx.open(step / "model") as alone:
        assert (set(alone), alone.config) == (set(WEIGHTS), checkpoints.CONFIG)


def test_a_config_in_the_step_folder_counts_first(step: Path) -> None:
    (step / "config.json").write_text('{"model_type": "another"}')
    with tx.open(step) as whole:
        assert whole.config == {"model_type": "another"}


def test_a_folder_of_weights_is_no_state(step: Path) -> None:
    checkpoints.write(step / "optimizer_0", WEIGHTS)
    with tx.open(step) as whole:
        assert set(whole) == {*WEIGHTS, *STATES}
        assert "optimizer_0/" in whole.container.ignored


def test_state_that_is_there_twice_is_refused(step: Path) -> None:
    shutil.copytree(step / "optim", step / "optimizer_0")
    with refuses("NAME_COLLISION", "--no-optimizer"):
        tx.open(step)
    with tx.open(step, optimizer=False) as weights:
        assert set(weights) == set(WEIGHTS)


def test_a_model_alone_in_a_folder_is_not_taken_for_a_step(step: Path) -> None:
    shutil.rmtree(step / "optim")
    with pytest.raises(TransaxleError, match=f"There is one in {step}/model"):
        tx.open(step)


def test_what_is_refused_in_a_part_has_its_path(step: Path) -> None:
    (step / "model" / "model.safetensors").write_bytes(b"")
    with pytest.raises(TransaxleError) as refused:
        tx.open(step)
    assert [one.where.file for one in refused.value.refusals] == ["model/model.safetensors"]


def test_a_schedule_beside_other_formats_changes_nothing_else(tmp_path: Path) -> None:
    source = checkpoints.write(tmp_path / "source", TRAINED, config=checkpoints.CONFIG)
    folder = tmp_path / "universal"
    tx.convert(source, folder, to="deepspeed-universal", sync=False)
    (folder / "transaxle.json").unlink()
    with tx.open(folder) as before:
        files, carried, ignored = before.container.files, before.container.carried, before.container.ignored
    tx.convert(checkpoints.tiny(tmp_path / "tiny"), folder / "scheduler.pt", to="torch", sync=False)
    with tx.open(folder) as after:
        assert set(after.container.files) == {*files, "scheduler.pt"}
        assert (after.container.carried, after.container.ignored) == (carried, ignored)
        assert after.metadata["training_state"] == ["scheduler"]
    (folder / "scheduler.pt").write_bytes(b"no pickle")
    with tx.open(folder) as damaged:
        assert damaged.container.ignored == (*ignored, "scheduler.pt")
