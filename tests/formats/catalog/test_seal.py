"""One file that is a checkpoint by itself holds digests of all its bytes: no flip in it stays unseen."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import transaxle as tx
from tests import checkpoints

SMALL: dict[str, np.ndarray[Any, Any]] = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.bias": np.arange(4, dtype=np.float16),
    "empty": np.zeros((0, 3), np.float32),
    "z": np.array(3, np.int64),
}
TARGETS = {"out.safetensors": "safetensors", "out.pt": "torch"}
of_each_format = pytest.mark.parametrize("name", TARGETS)


def _sealed(folder: Path, name: str = "out.safetensors") -> Path:
    """Convert the small checkpoint beside it into one file."""
    source, file = checkpoints.write(folder / "small", SMALL, config=None), folder / name
    tx.convert(source, file, to=TARGETS[name], sync=False)
    return file


def _is_verified(place: Path | str) -> bool:
    found = tx.verify(place)
    return found.ok and found.against == "digests"


def _seen(file: Path) -> bool:
    """Tell whether damage is found: refused on opening, or told by `verify` and its exit code's verdict."""
    try:
        found = tx.verify(file, jobs=1)
    except tx.TransaxleError:
        return True
    return not found


def _flipped(file: Path, data: bytes, at: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(bytes([data[at] ^ 1 << bit]))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("out.safetensors", 5),
        pytest.param("out.safetensors", 1, marks=pytest.mark.oracle),
        ("out.pt", 23),
        pytest.param("out.pt", 1, marks=pytest.mark.oracle),
    ],
)
def test_a_flip_of_any_byte_is_found(name: str, step: int, tmp_path: Path) -> None:
    file = _sealed(tmp_path, name)
    assert _is_verified(file)
    data = file.read_bytes()
    unseen = []
    for at in range(0, len(data), step):
        _flipped(file, data, at, at % 8)
        if not _seen(file):
            unseen.append(at)
        file.write_bytes(data)
    assert unseen == []
    assert tx.verify(file)


@of_each_format
def test_others_read_it_as_ever(name: str, tmp_path: Path) -> None:
    file = _sealed(tmp_path, name)
    if name == "out.pt":
        found = torch.load(file, weights_only=True)
        mapped = torch.load(file, weights_only=True, mmap=True)
        assert found.keys() == mapped.keys()
    else:
        found = load_file(file)
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    assert found.keys() == SMALL.keys()
    assert all(np.array_equal(found[key].numpy(), value) for key, value in SMALL.items())
    with tx.open(file) as checkpoint:
        assert not [key for key in checkpoint.metadata if "digest" in key]
    tx.convert(file, tmp_path / "back", to="safetensors", sync=False)
    assert (tmp_path / "back" / checkpoints.WHOLE).read_bytes() == (tmp_path / "small" / checkpoints.WHOLE).read_bytes()


def test_a_digest_that_was_taken_out_is_said_to_be_absent(tmp_path: Path) -> None:
    """Such a file is like any other's: nothing but its structure is known, and nothing else is claimed."""
    file = _sealed(tmp_path)
    save_file(load_file(file), tmp_path / "other.safetensors")
    assert tx.verify(tmp_path / "other.safetensors").against == "structure"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    for key in ("transaxle.digest", "transaxle.digests"):
        save_file(load_file(file), tmp_path / "half.safetensors", {k: v for k, v in metadata.items() if k != key})
        with pytest.raises(tx.TransaxleError, match="incomplete"):
            tx.verify(tmp_path / "half.safetensors")


def test_digests_of_other_tensors_are_found(tmp_path: Path) -> None:
    """A file whose tensors another program has changed, and that kept the notes."""
    file = _sealed(tmp_path)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file({key: tensor + 1 for key, tensor in load_file(file).items()}, file, metadata)
    found = tx.verify(file)
    assert not found
    assert {problem.where.tensor for problem in found.problems} >= {"a.weight", "b.bias", "z"}


@of_each_format
def test_a_saved_model_in_one_file_too(name: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    file = tmp_path / name
    for held in (None, optimizer):
        tx.save(model, file, to=TARGETS[name], overwrite=True, optimizer=held)
        assert _is_verified(file)
        data = file.read_bytes()
        for at in random.Random(1).sample(range(len(data)), 10):
            _flipped(file, data, at, 3)
            assert _seen(file), at
            file.write_bytes(data)


@of_each_format
def test_at_a_url_too(name: str, tmp_path: Path) -> None:
    local, url = _sealed(tmp_path, name), f"memory://sealed/{tmp_path.name}/{name}"
    tx.convert(tmp_path / "small", url, to=TARGETS[name])
    assert _is_verified(url)
    assert tx.verify(url, local)
    tx.save(nn.Linear(3, 4), url, to=TARGETS[name], overwrite=True)
    assert _is_verified(url)


@of_each_format
def test_the_same_bytes_are_finished(name: str, tmp_path: Path) -> None:
    """`--resume` finds a file that is just what it would write, and one that is not."""
    source, file, form = tmp_path / "small", _sealed(tmp_path, name), TARGETS[name]
    data = file.read_bytes()
    assert tx.convert(source, file, to=form, resume=True, sync=False).resumed == len(SMALL)
    for at in (len(data) // 2, len(data) - 30, 40):
        _flipped(file, data, at, 0)
        with pytest.raises(tx.TransaxleError):
            tx.convert(source, file, to=form, resume=True, sync=False)
        file.write_bytes(data)
    shutil.rmtree(source)
    assert tx.verify(file)
