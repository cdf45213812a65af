"""A save to the place of another one that goes on in the background: the later one is what stays."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import transaxle as tx
from transaxle.live import asynchronous
from transaxle.live.asynchronous import SaveJob

SLOW = 1.0
"""Seconds for which the background process stands still."""


def stopped() -> int:
    """Stop the background process, and return its number."""
    saver, _ = asynchronous._SAVERS[os.getpid(), (0,)]
    pid = saver._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_an_earlier_save_never_takes_the_place_of_a_later_one(tmp_path: Path) -> None:
    """The first is committed last if nobody waits for it."""
    state = {"w": torch.ones(3)}
    job = tx.async_save(state, tmp_path / "latest", to="safetensors", overwrite=True)
    pid = stopped()
    threading.Timer(SLOW, os.kill, (pid, signal.SIGCONT)).start()
    state["w"].fill_(2)
    tx.save(state, f"{tmp_path}/latest/", to="safetensors", overwrite=True)
    assert job.done()
    assert job.result().tensors == 1
    state["w"].zero_()
    tx.load(state, tmp_path / "latest")
    assert state["w"].tolist() == [2, 2, 2]


def test_a_save_that_was_waited_for_in_vain_is_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends a save to the same place, and it is made again."""
    state = {"w": torch.ones(3)}
    job = tx.async_save(state, tmp_path / "latest", to="safetensors", overwrite=True)
    pid = stopped()
    state["w"].fill_(2)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(SaveJob, "_wait", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                tx.save(state, tmp_path / "latest", to="safetensors", overwrite=True)
    finally:
        threading.Timer(SLOW, os.kill, (pid, signal.SIGCONT)).start()
    tx.save(state, tmp_path / "latest", to="safetensors", overwrite=True)
    assert job.done()
    tx.load(state, tmp_path / "latest")
    assert state["w"].tolist() == [2, 2, 2]


def _interrupted(*_: object) -> bool:
    raise KeyboardInterrupt
