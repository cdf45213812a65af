"""Weights that change while they are saved: whatever is stored of them has the hashes that are stored of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.formats.s3_server import Bucket
from transaxle.formats.store.staging import Writer
from transaxle.formats.store.upload import Upload
from transaxle.move import journal


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {f"w{number}": torch.randn(300, 1000, generator=generator) for number in range(3)}
    return state | {"turned": torch.randn(40, 50, generator=generator).T, "small": torch.arange(3.0)}


def _changing(state: dict[str, torch.Tensor], kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let all values change whenever bytes have been written, and before they are hashed."""
    written: list[int] = []
    pwrite = kind.pwrite

    def after(files: Any, file: str, offset: int, view: memoryview) -> None:
        pwrite(files, file, offset, view)
        written.append(view.nbytes)
        for tensor in state.values():
            tensor.add_(1)

    monkeypatch.setattr(kind, "pwrite", after)
    return written


@pytest.mark.parametrize("laid_out", ["as it is", "anew"])
@pytest.mark.parametrize(
    "to", ["safetensors:identity", "dcp:identity", "torch:identity", "deepspeed-universal:identity", "one.safetensors"]
)
def test_what_is_saved_has_its_hashes(to: str, laid_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = _state()
    if laid_out == "anew":
        state = {name: tensor.T if tensor.dim() == 2 else tensor for name, tensor in state.items()}
    written = _changing(state, Writer, monkeypatch)
    target = tmp_path / ("out" if ":" in to else to)
    tx.save(state, target, to=to if ":" in to else "safetensors:identity")
    assert len(written) >= len(state)
    found = tx.verify(target)
    assert found, found
    with tx.open(target) as checkpoint:
        names = ("w0", "w1", "w2")
        moved = [
            checkpoint[name].torch() - (_state()[name].T if laid_out == "anew" else _state()[name]) for name in names
        ]
    assert max(each.max() for each in moved) >= 1, "nothing changed while it was saved"
    assert all(torch.allclose(each, each.round(), atol=1e-3) for each in moved)


def test_what_is_sent_has_its_hashes(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's hashes come last; the digests of one file come first, so it is read twice, and refused."""
    state = _state()
    _changing(state, Upload, monkeypatch)
    tx.save(state, f"{bucket.url}/out", to="safetensors:identity")
    assert tx.verify(f"{bucket.url}/out")
    before = bucket.names()
    with pytest.raises(tx.TransaxleError, match="changed between two reads") as caught:
        tx.save(state, f"{bucket.url}/one.safetensors", to="safetensors:identity")
    assert {each.code for each in caught.value.refusals} == {"CORRUPT"}
    assert bucket.names() == before


def test_a_source_that_changes_while_it_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are written and hashed as they were read; that the file changed is refused."""
    state = _state()
    tx.save(state, tmp_path / "ck", to="safetensors:identity")
    (tmp_path / "ck" / "transaxle.json").unlink()
    (file,) = (tmp_path / "ck").glob("*.safetensors")
    note = journal.HashingFiles.add_take

    def touching(*given: Any) -> None:
        with file.open("r+b") as held:
            held.seek(-8, 2)
            held.write(b"changed!")
        note(*given)

    monkeypatch.setattr(journal.HashingFiles, "add_take", touching)
    with pytest.raises(tx.TransaxleError) as caught:
        tx.convert(tmp_path / "ck", tmp_path / "out", to="dcp:identity")
    assert caught.value.code == "CORRUPT"
    assert not (tmp_path / "out").exists()
