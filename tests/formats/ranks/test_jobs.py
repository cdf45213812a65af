"""What the ranks of real jobs save: every tensor is bit for bit that of torch's own `full_tensor()`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import transaxle as tx
from tests.formats.ranks import jobs
from tests.formats.refusals import refuses
from tests.live import ranks

CASES = [(kind, world) for kind, worlds in jobs.KINDS.items() for world in worlds]
LARGE = [(kind, world) for kind, worlds in jobs.LARGE.items() for world in worlds]
MODEL_TYPE = "qwen2"


def check(checkpoint: tx.Checkpoint, truth: dict[str, torch.Tensor]) -> None:
    """Compare names, dtypes and bits."""
    assert set(checkpoint) == set(truth)
    for name, tensor in truth.items():
        value = checkpoint[name].torch()
        assert value.dtype == tensor.dtype, name
        assert torch.equal(value, tensor), name


@pytest.mark.parametrize(
    ("kind", "world"), [*CASES, *(pytest.param(*case, marks=pytest.mark.oracle) for case in LARGE)]
)
def test_whole_tensors(tmp_path: Path, kind: str, world: int) -> None:
    """The whole tensors come out of the files of any job, and so does every dtype."""
    folder = tmp_path / "step"
    folder.mkdir()
    ranks.run(world, jobs.save, folder, kind)
    truth = torch.load(folder.with_suffix(jobs.TRUTH))
    with tx.open(folder) as checkpoint:
        assert checkpoint.container.format == "ranks"
        check(checkpoint, truth)
    tx.convert(folder, tmp_path / "out", to="safetensors", sync=False)
    with tx.open(tmp_path / "out") as converted:
        check(converted, truth)
    assert {value.dtype for value in truth.values()} == {torch.bfloat16, torch.float32, torch.int64}


def test_partial_sums_are_refused(tmp_path: Path) -> None:
    """A sum over ranks is no tensor that files contain in parts."""
    ranks.run(2, jobs.save_partial, tmp_path)
    with refuses("UNSUPPORTED", "partial sums", hint="redistribute", tensor="w"):
        tx.open(tmp_path)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 flat"])
def test_flat_parameters_are_refused(tmp_path: Path, kind: str) -> None:
    """Neither flat parameters nor an optimizer that numbers them say what they consist of."""
    ranks.run(2, jobs.save_local, tmp_path, kind)
    with refuses("UNSUPPORTED", "flat parameter of FSDP1", hint="SHARDED_STATE_DICT"):
        tx.open(tmp_path)
    for rank in range(2):
        (tmp_path / jobs.file_name(jobs.MODEL, rank, 2)).unlink()
        path = tmp_path / jobs.file_name(jobs.OPTIMIZER, rank, 2)
        path.rename(tmp_path / f"state_{rank}.pt")
    with refuses("UNSUPPORTED", "FSDP1's optimizer numbers flat parameters", hint="optim_state_dict"):
        tx.open(tmp_path, ranks="state_{}.pt")


@pytest.fixture(scope="module", params=[("fsdp2", 3), ("tp", 4), ("hsdp", 4)], ids=lambda case: f"{case[0]}-{case[1]}")
def training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of a job that trains a model of transformers."""
    kind, world = request.param
    folder = tmp_path_factory.mktemp("training") / "step"
    folder.mkdir()
    ranks.run(world, jobs.save_training, folder, kind, MODEL_TYPE)
    yield folder
    shutil.rmtree(folder.parent)


@pytest.mark.parametrize("target", ["dcp", "deepspeed-universal", "torch_dist", "safetensors:hf"])
def test_optimizer_goes_along(training: Path, tmp_path: Path, target: str) -> None:
    """Moments, step numbers, parameter groups and the schedule are in every target that has a place for them."""
    truth = torch.load(training.with_suffix(jobs.TRUTH))
    tx.convert(training, tmp_path / "out", to=target, optimizer=True, sync=False)
    assert tx.verify(training, tmp_path / "out", optimizer=True).ok
    with tx.open(training, optimizer=True) as source:
        check(source, truth)
        groups = source.metadata["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    assert all("norm" in name for name in groups[1]["params"])
    assert sum(len(group["params"]) for group in groups) == sum(name.endswith("/exp_avg") for name in truth)
    with tx.open(tmp_path / "out", optimizer=True) as converted:
        saved = converted.metadata["param_groups"]
    assert sorted(group["weight_decay"] for group in saved) == [0.0, 0.01]


def test_a_live_model_loads_it(training: Path) -> None:
    """A model on another number of ranks gets its parts out of the rank files."""
    ranks.run(2, jobs.load_live, training, MODEL_TYPE)
