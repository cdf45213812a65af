"""The examples end with exit code 0, run after run: torch may abort a process whose meshes outlive its process groups.

Each rank is a process of its own that ends by itself, as under torchrun; forked ones would end without what aborts.
Here that is tried often. `make test` tries it once, under torchrun: the page on training (`tests/test_docs.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.live.jobs import free_port
from tests.oracles import hub
from tests.test_examples import HUB, TENSOR_PARALLEL, TRAIN

WORLD = 2
SECONDS = 600.0
"""Seconds after which a program hangs; nothing that works needs them."""
_TAIL = 2000
TIMES = 40
pytestmark = pytest.mark.oracle


def _ends(program: Path, words: list[str], folder: Path) -> list[tuple[int, str]]:
    """Run a program on all ranks to its end; return exit codes, and the end of what was printed."""
    shared = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    places = [folder / f"printed-{rank}" for rank in range(WORLD)]
    processes = []
    for rank, place in enumerate(places):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        with place.open("wb") as printed:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(program), *words],
                    env={**os.environ, **shared, **own},
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(code, place.read_text("utf-8")[-_TAIL:]) for code, place in zip(codes, places, strict=True)]


def _failed(program: Path, words: list[str], folder: Path) -> dict[int, list[tuple[int, str]]]:
    """Return the runs in which a rank did not end with 0."""
    ends = {run: _ends(program, [*words, "--out", str(folder / f"out-{run}")], folder) for run in range(TIMES)}
    return {run: each for run, each in ends.items() if any(code for code, _ in each)}


def test_training_exits_with_0(tmp_path: Path) -> None:
    """FSDP2, with saves in the background up to the end."""
    assert _failed(TRAIN, ["--steps", "2", "--every", "1"], tmp_path) == {}


def test_tensor_parallel_training_exits_with_0(tmp_path: Path) -> None:
    settings, tensors = hub.make(HUB, 0)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, tmp_path / hub.WEIGHTS)
    assert _failed(TENSOR_PARALLEL, ["--source", str(tmp_path)], tmp_path) == {}
