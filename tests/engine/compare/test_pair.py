"""Two checkpoints opened together: what is wrong with one of them is said with its path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import transaxle as tx
from tests.checkpoints import write
from tests.corpus.deepspeed import MODEL, run
from transaxle.engine.verification import open_pair
from transaxle.errors import TransaxleError

FILE = "model.safetensors"


@pytest.mark.parametrize("inside", ["", FILE])
@pytest.mark.parametrize("damaged", ["one", "other"])
def test_a_damaged_file_is_told_from_its_namesake(inside: str, damaged: str, tmp_path: Path) -> None:
    for name in ("one", "other"):
        write(tmp_path / name, {"a": np.zeros(3, np.float32)})
    content = (tmp_path / damaged / FILE).read_bytes()
    (tmp_path / damaged / FILE).write_bytes(content[:20])
    with pytest.raises(TransaxleError) as caught:
        open_pair(tmp_path / "one" / inside, tmp_path / "other" / inside, {}).__enter__()
    assert [refusal.where.file for refusal in caught.value.refusals] == [str(tmp_path / damaged / FILE)]


def test_other_files_keep_their_names(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write(tmp_path / name, {"a": np.zeros(3, np.float32)})
    with pytest.raises(TransaxleError) as caught, open_pair(tmp_path / "one", tmp_path / "absent", {}):
        pass
    assert caught.value.refusals[0].where.file == str(tmp_path / "absent")
    (tmp_path / "mine.rules").write_text("famly x\n")
    with (
        pytest.raises(TransaxleError) as caught,
        open_pair(tmp_path / "one", tmp_path / "other", {"rules": tmp_path / "mine.rules"}),
    ):
        pass
    assert caught.value.refusals[0].where.file == f"{tmp_path / 'mine.rules'}, line 1"


def test_one_of_the_two_may_store_its_weights_once(tmp_path: Path) -> None:
    """What DeepSpeed trained in low precision, beside a file of it, in either order."""
    step = run(tmp_path / "run")
    low = torch.load(step / MODEL, weights_only=False)["module"]
    file = tmp_path / FILE
    save_file(dict(low), file)
    for pair in ((step, file), (file, step)):
        assert tx.diff(*pair, weights="lp", optimizer=False)
        assert not tx.diff(*pair, weights="fp32", optimizer=False)
        assert not tx.diff(*pair, average=True, optimizer=False)
    for chosen in ({"weights": "lp"}, {"average": True}):
        with pytest.raises(TransaxleError, match="both store their weights once"):
            tx.diff(file, file, **chosen)
        with pytest.raises(TransaxleError, match="stores its weights once"):
            tx.open(file, **chosen)
