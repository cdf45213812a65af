"""numpy's arrays in a state dict are tensors: saved as such, and filled in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import transaxle as tx

FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
TYPES = (*FLOATS, np.int64, np.uint8, np.bool_, np.complex64)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_item_5_arrays_are_saved_and_filled_in_place(tmp_path: Path, dtype: Any) -> None:
    held: dict[str, Any] = {"a": {"w": np.arange(12).reshape(3, 4).astype(dtype)}, "t": torch.ones(2)}
    report = tx.save({**held, "column": held["a"]["w"][:, 1]}, tmp_path / "out", to="safetensors")
    assert report.tensors == 3
    room = np.zeros((4, 3), dtype)
    filled: dict[str, Any] = {"a": {"w": room.T}, "t": torch.zeros(2), "column": np.zeros((3, 2), dtype)[:, 0]}
    tx.load(filled, tmp_path / "out")
    assert room.T.tobytes() == held["a"]["w"].tobytes()
    assert filled["column"].tobytes() == held["a"]["w"][:, 1].tobytes()
    with tx.open(tmp_path / "out") as checkpoint:
        assert checkpoint["a.w"].tobytes() == held["a"]["w"].tobytes()
    tx.async_save(held, tmp_path / "later", to="safetensors").result()
    with tx.open(tmp_path / "later") as checkpoint:
        assert checkpoint["a.w"].tobytes() == held["a"]["w"].tobytes()


def test_item_5_arrays_that_cannot_be_filled_are_refused(tmp_path: Path) -> None:
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    tx.save({"w": frozen}, tmp_path / "out", to="safetensors")
    with pytest.raises(tx.TransaxleError, match="the array is read-only"):
        tx.load({"w": frozen}, tmp_path / "out")
    assert frozen.tolist() == [0, 1, 2, 3]
    for wrong in (np.arange(4.0)[::-1], np.arange(4, dtype=">f4"), np.arange(4, dtype=np.longdouble)):
        with pytest.raises(tx.TransaxleError, match="torch"):
            tx.load({"w": wrong}, tmp_path / "out")
        with pytest.raises(tx.TransaxleError, match="torch"):
            tx.save({"w": wrong}, tmp_path / "other", to="safetensors")
    with pytest.raises(tx.TransaxleError):
        tx.load({"w": np.zeros(5)}, tmp_path / "out")
    assert not (tmp_path / "other").exists()
