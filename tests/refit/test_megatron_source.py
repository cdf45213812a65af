"""A Megatron job of several ranks as the source: its sharded state dict goes into an engine's tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.formats.megatron import gpt_job
from tests.formats.megatron.gpt_job import Degrees
from tests.live.load.test_megatron import MODELS, _states
from tests.live.ranks import run
from tests.oracles import hub

pytestmark = pytest.mark.peers
RANKS = 4


def _pushed(rank: int, world: int, config: dict[str, Any], degrees: Degrees, folder: str) -> list[str]:
    """Push twice, with a step in between; return what came otherwise than the hub has it."""
    wrong = []
    truth = load_file(Path(folder, hub.WEIGHTS))
    said = json.loads(Path(folder, "config.json").read_text("utf-8"))
    engine = {name: torch.full_like(value, -1) for name, value in truth.items()} if rank == world - 1 else {}
    with gpt_job.models(config, degrees) as models:
        state = _states(models)
        tx.load(state, folder)
        with tx.Refit(state, engine, config=said, dialect="hf") as refit:
            for times in (1, 2):
                report = refit.push()
                assert report.bytes_received == report.bytes_needed
                wrong += [name for name, value in engine.items() if not torch.equal(value, truth[name] * times)]
                for parameter in (each for model in models for each in model.parameters()):
                    parameter.data.mul_(2)
    return wrong


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "degrees"),
    [("dense", Degrees(tp=2, pp=2)), ("tied", Degrees(tp=2, pp=2)), ("mixture", Degrees(pp=2, ep=2))],
    ids=str,
)
def test_an_engine_gets_the_weights_of_the_job(name: str, degrees: Degrees, tmp_path: Path) -> None:
    config, tensors = hub.make(MODELS[name], 0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({key: value.float() for key, value in tensors.items()}, tmp_path / hub.WEIGHTS)
    assert run(RANKS, _pushed, MODELS[name], degrees, str(tmp_path)) == [[]] * RANKS
