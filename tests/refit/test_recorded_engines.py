"""Engines that cannot be installed here, by the interfaces that they are recorded to have: each gets a whole model.

SGLang's `Engine`, verl's `BaseRollout`, TRL's `VLLMClient`, checkpoint-engine's `ParameterServer`: names and arguments
of what takes weights, as read in their sources in November 2026.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.live.topologies import MOE, source
from tests.oracles import hub

Named = tuple[str, torch.Tensor]
BUCKET = "20KB"


class Recorded:
    """What takes weights, each as its program declares it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def update_weights_from_tensor(
        self, named_tensors: list[Named], load_format: str | None = None, flush_cache: bool = True
    ) -> None:
        """SGLang."""
        assert load_format is None
        self.tensors |= dict(named_tensors)

    async def update_weights(self, weights: Generator[Named, None, None], **_: Any) -> None:
        """verl."""
        self.tensors |= dict(weights)

    def update_named_param(self, name: str, weights: torch.Tensor) -> None:
        """TRL."""
        self.tensors[name] = weights

    def register_checkpoint(
        self, checkpoint_name: str, *, files: list[str], named_tensors: dict[str, torch.Tensor]
    ) -> None:
        """checkpoint-engine."""
        assert (checkpoint_name, files) == ("step", [])
        self.tensors |= named_tensors


@pytest.fixture
def model(tmp_path: Path) -> Any:
    folder = Path(source(tmp_path / "hub", MOE))
    assert json.loads((folder / "config.json").read_text())
    found = hub.model(MOE, torch.float32)
    tx.load(found, folder)
    return found


def _sglang(engine: Recorded, model: Any) -> None:
    for tensors in tx.refit.named_tensors(model, bucket=BUCKET):
        engine.update_weights_from_tensor(tensors, flush_cache=False)


def _verl(engine: Recorded, model: Any) -> None:
    each = (tensor for tensors in tx.refit.named_tensors(model, bucket=BUCKET) for tensor in tensors)
    asyncio.run(engine.update_weights(each))


def _trl(engine: Recorded, model: Any) -> None:
    for tensors in tx.refit.named_tensors(model, bucket=BUCKET):
        for name, tensor in tensors:
            engine.update_named_param(name, tensor)


def _checkpoint_engine(engine: Recorded, model: Any) -> None:
    everything = {name: tensor for tensors in tx.refit.named_tensors(model) for name, tensor in tensors}
    engine.register_checkpoint("step", files=[], named_tensors=everything)


@pytest.mark.parametrize("push", [_sglang, _verl, _trl, _checkpoint_engine])
def test_each_gets_what_the_hub_has(push: Any, model: Any, tmp_path: Path) -> None:
    engine = Recorded()
    push(engine, model)
    with tx.open(tmp_path / "hub") as stored:
        assert set(engine.tensors) == set(stored)
        for name, tensor in engine.tensors.items():
            assert torch.equal(tensor, torch.from_numpy(stored[name].read()))
