"""Megatron's own environment, and small models of transformers to load in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.formats.megatron.legacy.run import LAYERS, Run, Tensors
from tests.formats.megatron.training.peer import Case, launch
from tests.oracles import hub

ROOT = Path(__file__).parents[4]
PYTHON = Path(os.environ.get("MEGATRON_PYTHON", ROOT / ".venv-megatron/bin/python"))
SIZES = {"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "num_experts_per_tok": 2}

Megatron = Callable[[list[Case]], None]
"""Runs cases, all in one process."""


@pytest.fixture(scope="session")
def megatron() -> Megatron:
    """Run cases in Megatron's environment; a test that needs it is skipped where there is none."""

    def run(cases: list[Case]) -> None:
        if not PYTHON.exists():
            pytest.skip(f"Megatron has no environment at {PYTHON}: make megatron")
        failed, said = launch(PYTHON, ROOT, cases)
        assert failed == 0, said[-12_000:]

    return run


def model(run: Run, folder: Path, seed: int = 0) -> Tensors:
    """Store what transformers makes of a random model, in single precision."""
    normed = {"norm_topk_prob": len(run.sparse) == LAYERS}  # one way or the other: of the shares of experts
    config, tensors = hub.make({**SIZES, **run.config(), **normed}, seed)
    folder.mkdir(parents=True)
    Path(folder, "config.json").write_text(json.dumps(config))
    stored = {name: value.float() for name, value in tensors.items()}
    save_file(stored, folder / hub.WEIGHTS)
    return stored
