"""Files of two saves in one folder: refused, also where only the weights are wanted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.corpus.deepspeed import MODEL, OPTIM, run
from tests.formats.deepspeed.made import TAG, save
from tests.oracles.deepspeed_peer.farm import Farm
from transaxle.formats.deepspeed import keys

LATER = 9


def _step(file: Path) -> None:
    held: dict[str, Any] = torch.load(file, weights_only=False)
    held[keys.STATE][keys.BASE_STATE][keys.STATES][0][keys.STEP] = torch.tensor(float(LATER))
    torch.save(held, file)


@pytest.mark.parametrize("optimizer", [True, False])
def test_ranks_of_two_saves_are_refused(tmp_path: Path, optimizer: bool) -> None:
    _step(run(tmp_path / "source") / OPTIM.format(1))
    with pytest.raises(tx.TransaxleError, match="step of the group of up is one number on all ranks"):
        tx.convert(tmp_path / "source", tmp_path / "out", to="safetensors:identity", optimizer=optimizer, sync=False)


def test_model_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "source", {"norm": [torch.rand(4)] * 2}, None)
    file = tmp_path / "source" / TAG / MODEL.replace("rank_00", "rank_01")
    torch.save(torch.load(file, weights_only=False) | {keys.GLOBAL_STEPS: LATER}, file)
    with pytest.raises(tx.TransaxleError, match=f"saved after {LATER} steps, but .* after 3"):
        tx.open(tmp_path / "source")


@pytest.mark.peers
@pytest.mark.slow
def test_a_rank_s_file_that_was_copied_over_another_s_is_refused(farm: Farm, tmp_path: Path) -> None:
    """Those of ZeRO-1 and 2 say what they hold; those of ZeRO-3 do not."""
    for name, said in (("z3-fp32-w2", "it is a copy of .*rank_0"), ("z1-bf16-w2", "param_slice_mappings says")):
        folder = Path(shutil.copytree(farm.checkpoint(name), tmp_path / name))
        first, second = sorted(folder.rglob(f"*{keys.OPTIM_END}"))
        shutil.copy(first, second)
        with pytest.raises(tx.TransaxleError, match=rf"CORRUPT .*{second.name}[\s\S]*{said}"):
            tx.open(folder)
