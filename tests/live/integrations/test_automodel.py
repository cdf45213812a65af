"""The example of a reader for NeMo Automodel: its own checkpointer begins with any files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.journeys import automodel
from tests.live.integrations.test_torchtitan import _example
from tests.live.topologies import MOE, source

pytestmark = pytest.mark.peers


def test_automodels_own_checkpointer_begins_with_any_checkpoint(tmp_path: Path) -> None:
    hub = Path(source(tmp_path / "hub", MOE))
    tx.convert(hub, tmp_path / "titan", to="dcp:torchtitan")
    tx.convert(hub, tmp_path / "megatron", to="torch_dist")
    config = json.loads((hub / "config.json").read_text("utf-8"))
    own = automodel.Run(config, hub, tmp_path / "own")
    own.load()
    checkpointer: Any = _example("automodel_reader", "AnyCheckpoint")
    for name in ("hub", "titan", "megatron"):
        run = automodel.Run(config, tmp_path / name, tmp_path / "runs" / name)
        run.checkpoints.__class__ = checkpointer
        run.load()
        for key, value in own.state().items():
            if not any(part in key for part in automodel.FIXED):
                assert torch.equal(run.state()[key], value), (name, key)
