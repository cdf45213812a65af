"""A real vLLM starts from the files of its ranks that we wrote, and says what it says when it starts from the hub's
folder. It runs in an environment of its own, on a CPU (`make vllm`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.formats.vllm_sharded.engines import OPENED, add_entry_point
from tests.live.topologies import source
from tests.refit.plugs.servers import PROMPTS, PYTHON, ROOT, environment
from tests.refit.plugs.test_vllm_refit import MODELS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM has no environment at {PYTHON}: make vllm"),
]

END = 60
"""Seconds in which a process without further orders ends."""


@dataclass
class Starter:
    """A process that starts engines on a number of ranks."""

    tp: int
    process: subprocess.Popen[str]
    log: Path

    def said(self, folder: Path, load_format: str) -> tuple[Any, list[list[str]]]:
        """Return what an engine says that is started from a folder, and the files that each worker opened."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(folder), load_format]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.log.read_text(errors="replace")[-4000:]
        answers, opened = json.loads(line)
        return answers, opened


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.oracle), 2])
def starter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    folder = tmp_path_factory.mktemp("engines")
    variables = environment(folder / "site", range(request.param)) | {OPENED: str(folder / "opened")}
    add_entry_point(folder / "site")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", "tests.formats.vllm_sharded.engines", str(request.param)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=variables,
            start_new_session=True,
        )  # fmt: skip
    yield Starter(request.param, process, folder / "log")
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=END)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# A sweep, but for experts on two ranks: each case starts two engines.
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.oracle] * (name != "moe")) for name in MODELS])
def test_an_engine_starts_from_the_files_of_its_ranks(name: str, starter: Starter, tmp_path: Path) -> None:
    hub, target = Path(source(tmp_path / "hub", MODELS[name])), tmp_path / "sharded"
    truth, read = starter.said(hub, "auto")
    assert [len(answer) for answer in truth] == [len(truth[0])] * len(PROMPTS)
    assert read == [["model.safetensors"]] * starter.tp
    tx.convert(hub, target, to="vllm_sharded", dtype="bf16", tp=starter.tp, sync=False)
    answers, opened = starter.said(target, "sharded_state")
    assert answers == truth
    assert opened == [[f"model-rank-{rank}-part-0.safetensors"] for rank in range(starter.tp)]
