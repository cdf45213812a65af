"""Models on a GPU: read through pinned buffers, saved from there, and snapshots that later changes do not reach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transaxle as tx
from tests import checkpoints
from transaxle.torch_tensors import torch_dtype

pytestmark = pytest.mark.gpu
DIALECT = "transformers"


def empty(source: str | Path, dialect: str = DIALECT) -> dict[str, torch.Tensor]:
    """Tensors on the GPU for everything that the source holds, under a dialect's names."""
    with tx.open(source) as checkpoint:
        return {
            name: torch.full(tensor.shape, 7, dtype=torch_dtype(tensor.dtype), device="cuda")
            for name, tensor in checkpoint.as_dialect(dialect).items()
        }


def _octets(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def test_loaded_values_are_the_files_own(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    state = empty(source)
    turned = {name: t.t().contiguous().t() if t.ndim == 2 else t for name, t in state.items()}
    for each in (state, turned):
        report = tx.load(each, source, dialect=DIALECT)
        assert report.bytes_written == report.bytes_needed
        with tx.open(source) as checkpoint:
            view = checkpoint.as_dialect(DIALECT)
            assert all(_octets(tensor) == view[name].tobytes() for name, tensor in each.items())


def test_saved_files_hold_what_was_on_the_gpu(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    state = empty(source)
    tx.load(state, source, dialect=DIALECT)
    tx.save(state, tmp_path / "out", to="hf", config=checkpoints.CONFIG, dialect=DIALECT)
    assert tx.diff(source, tmp_path / "out").equal
    job = tx.async_save(state, tmp_path / "later", to="hf", config=checkpoints.CONFIG, dialect=DIALECT)
    for tensor in state.values():
        tensor.zero_()
    job.result(timeout=120)
    assert tx.diff(source, tmp_path / "later").equal


def test_the_adapter_stays_on_the_gpu(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    state = empty(source)
    tx.load(state, source, dialect=DIALECT)
    with tx.open(source) as checkpoint:
        found = tx.state_dict_as(state, "hf", config=checkpoints.CONFIG, source=DIALECT)
        assert all(tensor.is_cuda for tensor in found.values())
        assert all(_octets(tensor) == checkpoint[name].tobytes() for name, tensor in found.items())
