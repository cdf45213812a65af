"""Readers that are run in full on small checkpoints: their own loading, and what the loaded model computes.

transformers and peft run in this process. transformers 4, for config keys and tensor names that moved in 5, is in a
folder of its own (`make` installs it there, `TRANSFORMERS_4` names another). vLLM runs in its own environment, and of
its models the parameters are compared, since its kernels need other processors.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.oracles.quiet import quiet
from tests.oracles.vllm_peer.load import DRAFTING
from tests.readers import older_transformers
from tests.readers.older_transformers import TOKENS

ROOT = Path(__file__).parents[2]
OLDER = Path(os.environ.get("TRANSFORMERS_4", f"{sys.prefix}/transformers4"))
"""Folder with transformers 4."""
VLLM = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
_NEEDED = "CI" in os.environ or "NEEDS_TRANSFORMERS_4" in os.environ
needs_transformers_4 = (
    pytest.mark.skipif(not OLDER.is_dir() and not _NEEDED, reason=f"transformers 4 is not in {OLDER}"),
)
needs_vllm = (
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM.exists(), reason=f"vLLM has no environment at {VLLM}"),
)
SECONDS = 900
_TOLERANCE = 1e-5
"""Largest difference of two models that compute the same in another order, relative to the largest value."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    """What a reader makes of one folder."""

    error: str = ""
    """The error that it raises; empty if it loads the folder."""
    values: Tensors = field(default_factory=dict)
    """The logits, or the parameters of the loaded model by name."""

    def equals(self, other: Loaded) -> bool:
        """Return whether both are loaded, and compute the same; numbers that are not finite equal nothing."""
        if self.error or other.error or self.values.keys() != other.values.keys():
            return False
        return all(_close(value, other.values[name]) for name, value in self.values.items())


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    slack = _TOLERANCE * first.abs().max().item() if first.is_floating_point() and first.numel() else 0
    return torch.allclose(first, second, rtol=0, atol=slack)


def run_transformers(folders: Sequence[Path]) -> list[Loaded]:
    """Load folders with `from_pretrained` of this environment."""
    return [_in_process(folder, None) for folder in folders]


def run_peft(base: Path, adapters: Sequence[Path]) -> list[Loaded]:
    """Load adapters onto a model with `PeftModel.from_pretrained`."""
    return [_in_process(base, adapter) for adapter in adapters]


def _in_process(folder: Path, adapter: Path | None) -> Loaded:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with quiet(), torch.no_grad():
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
            if adapter is not None:
                model = PeftModel.from_pretrained(model, adapter)
            return Loaded(values={"logits": model.eval()(TOKENS).logits.float()})
        except Exception as error:  # noqa: BLE001 - whatever the reader raises is its answer
            return Loaded(error=f"{type(error).__name__}: {error}")


def run_transformers_4(folders: Sequence[Path]) -> list[Loaded]:
    """Load folders with `from_pretrained` of transformers 4."""
    environment = {**os.environ, "PYTHONPATH": str(OLDER), "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, older_transformers.__file__]
    return _run(program, folders, environment, lambda path: {"logits": torch.load(path, weights_only=True)}, "pt")


def run_vllm(folders: Sequence[Path], *, drafting: bool = False) -> list[Loaded]:
    """Load folders with vLLM's loader; with `drafting` into the model that predicts further tokens."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))}
    program = [str(VLLM), "-m", "tests.oracles.vllm_peer.load"]
    return _run(program, folders, environment, load_file, "safetensors", [DRAFTING] * drafting)


def _run(
    program: list[str],
    folders: Sequence[Path],
    environment: dict[str, str],
    read: Any,
    suffix: str,
    options: Sequence[str] = (),
) -> list[Loaded]:
    """Run a program that leaves, for each folder, values or the text of an error."""
    with tempfile.TemporaryDirectory() as target:
        command = [*program, target, *options, *map(str, folders)]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        results = []
        for number in range(len(folders)):
            error = Path(target, f"{number}.txt")
            if error.exists():
                results.append(Loaded(error=error.read_text("utf-8")))
            else:
                results.append(Loaded(values=read(Path(target, f"{number}.{suffix}"))))
        return results
