"""A real vLLM starts from `tx.serve`, and says what it says when it starts from the folder that `convert` writes. It
runs in an environment of its own, on a CPU (`make vllm`).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import transaxle as tx
from tests.formats.vllm_sharded.engines import OPENED
from tests.live.topologies import source
from tests.refit.plugs.servers import PROMPTS, PYTHON, ROOT, environment
from tests.refit.plugs.test_vllm_refit import MODELS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM has no environment at {PYTHON}: make vllm"),
]


def test_vllm_loads_a_trainers_checkpoint(tmp_path: Path) -> None:
    tx.convert(source(tmp_path / "hub", MODELS["moe"]), tmp_path / "step-100", to="dcp:torchtitan", sync=False)
    tx.convert(tmp_path / "step-100", tmp_path / "out", to="hf", sync=False)
    log: list[str] = []
    with tx.serve(tmp_path / "step-100", name="my-org/step-100", log=log.append) as hub:
        variables = {**environment(tmp_path / "site", range(1)), **hub.environment, OPENED: str(tmp_path / "opened")}
        variables = {name: value for name, value in variables.items() if not name.endswith("_OFFLINE")}
        done = subprocess.run(
            [PYTHON, "-m", "tests.formats.vllm_sharded.engines", "1"],
            input="".join(json.dumps([model, "auto"]) + "\n" for model in (hub.name, str(tmp_path / "out"))),
            env=variables | {"HF_HOME": str(tmp_path / "cache")}, cwd=ROOT,
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    (served, _), (local, _) = map(json.loads, done.stdout.splitlines())
    assert served == local
    assert [len(answer) for answer in served] == [len(served[0])] * len(PROMPTS)
    assert any(line.startswith("200  GET") and ".safetensors" in line for line in log)
