"""What belongs to a checkpoint: what we wrote, and what frameworks write, by their own hand; nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import transaxle as tx
from tests import checkpoints
from tests.formats.refusals import refuses
from transaxle.errors import UsageError
from transaxle.formats.store import place
from transaxle.formats.store.place import LocalFolder, foreign_files, irreplaceable

DEEPSPEED = (
    "latest", "zero_to_fp32.py", "global_step7/mp_rank_00_model_states.pt",
    "global_step7/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "global_step7/layer_03-model_00-model_states.pt",
    "latest_universal", "global_step7_universal/mp_rank_00_model_states.pt",
    "global_step7_universal/zero/optimizer_state.pt", "global_step7_universal/zero/model.norm.weight/fp32.pt",
)  # fmt: skip
"""Files of DeepSpeed 0.19.8, stage 1 and universal."""
PEERS = {
    "safetensors": ("model.safetensors", "config.json", "tokenizer.json"),
    "shards": ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"),
    "torch": ("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "generation_config.json"),
    "meta": ("consolidated.00.pth", "params.json", "tokenizer.model"),
    "automodel": ("shard-00001-model-00001-of-00001.safetensors", "model.safetensors.index.json"),
    "dcp": (".metadata", "__0_0.distcp", "__11_3.distcp", "common.pt", "metadata.json"),
    "deepspeed": DEEPSPEED,
    "a tag of its own": ("latest", "best/mp_rank_00_model_states.pt"),
    "inside a tag": ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
}
OWN = (
    ".git/HEAD", "notes.md", "adapter_model.safetensors", "adapter_config.json", "adapters/model.safetensors",
    "data.pt", "train.bin", "model.py", "embeddings.safetensors", "optimizer.pt", "tokenizer_notes.txt",
    "other/model.safetensors", "optimizer/notes.txt", "global_step7/notes.txt",
    "lora-00001-of-00001.safetensors.bak", ".metadata.bak",
)  # fmt: skip
"""What people keep beside weights."""


def put(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("best" if name == "latest" else "x")
    return folder


@pytest.mark.parametrize("peer", PEERS)
def test_what_peers_write_belongs_to_them(tmp_path: Path, peer: str) -> None:
    folder = put(tmp_path / "out", *PEERS[peer])
    assert foreign_files(LocalFolder(folder)) == []
    assert irreplaceable(LocalFolder(folder), True) == ("", "")


@pytest.mark.parametrize("name", OWN)
def test_what_is_somebodys_own_does_not(tmp_path: Path, name: str) -> None:
    folder = put(tmp_path / "out", "model.safetensors", "latest", "global_step7/mp_rank_00_model_states.pt", name)
    found = foreign_files(LocalFolder(folder))
    top = name.partition("/")[0]
    assert found == [name if top in (name, "optimizer", "global_step7") else f"{top}/"]
    reason, hint = irreplaceable(LocalFolder(folder), True)
    assert found[0] in reason
    assert "--overwrite=everything" in hint
    assert irreplaceable(LocalFolder(folder), "everything") == ("", "")


def test_many_are_not_all_listed(tmp_path: Path) -> None:
    folder = put(tmp_path / "out", "model.safetensors", *(f"notes-{i:04}.md" for i in range(1000)))
    reason, _ = irreplaceable(LocalFolder(folder), True)
    assert "notes-0007.md and 992 more belong" in reason


def test_links_empty_folders_and_pipes(tmp_path: Path) -> None:
    folder = put(tmp_path / "out", "elsewhere")
    (folder / "model.safetensors").symlink_to(folder / "elsewhere")
    (folder / "mine").mkdir()
    (folder / "global_step1").symlink_to(tmp_path)
    os.mkfifo(folder / "config.json")
    assert foreign_files(LocalFolder(folder)) == ["config.json", "elsewhere", "global_step1", "mine/"]


@pytest.mark.parametrize("to", ["hf", "dcp:hf", "torch:hf", "safetensors:identity", "deepspeed-universal:hf"])
def test_what_we_write_belongs_to_us(tmp_path: Path, to: str) -> None:
    """With the optimizer's state, and files that travelled along under names that nobody knows."""
    held = checkpoints.tensors(checkpoints.SIZES)
    state = {"optim/model.norm.weight/exp_avg": held["model.norm.weight"].astype(np.float32)}
    held = {name: array.astype(np.float32) for name, array in held.items()}
    source = checkpoints.write(tmp_path / "ck", {**held, **state}, config=checkpoints.CONFIG)
    put(source, "README.md", "modeling_mine.py")
    out = tmp_path / "out"
    tx.convert(source, out, to=to, optimizer=True)
    assert (out / "README.md").exists()
    assert foreign_files(LocalFolder(out)) == []
    tx.convert(source, out, to=to, overwrite=True)
    (out / "README.md").write_text("what I found out")
    with pytest.raises(UsageError, match=r"README\.md belongs"):
        tx.convert(source, out, to=to, overwrite=True)
    assert (out / "README.md").read_text() == "what I found out"


def test_a_manifest_that_claims_what_is_not_its_own(tmp_path: Path) -> None:
    """Whoever wrote the manifest must have known the file: its size and hash are compared."""
    out = put(tmp_path / "out", "model.safetensors", "thesis.tex", ".git/HEAD")
    record = {"size": 1, "head": 1, "xxh3": "0" * 32}
    (out / "transaxle.json").write_text(json.dumps({"files": {"thesis.tex": record, ".git/HEAD": record}}))
    assert foreign_files(LocalFolder(out)) == [".git/HEAD", "thesis.tex"]
    for text in ("{", "[]", "\0", '{"files": 3}'):
        (out / "transaxle.json").write_text(text)
        assert foreign_files(LocalFolder(out)) == [".git/", "thesis.tex"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_and_safetensors_write_is_replaced(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "ck")
    save_dcp({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    tx.convert(source, tmp_path / "dcp", to="hf", overwrite=True)
    (tmp_path / "st").mkdir()
    save_file({"a": np.ones(3)}, tmp_path / "st" / "model.safetensors")
    tx.convert(source, tmp_path / "st", to="dcp:hf", overwrite=True)
    torch.save({"a": torch.ones(3)}, tmp_path / "one.bin")
    tx.convert(source, tmp_path / "one.bin", to="torch", overwrite=True)
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    tx.convert(source, tmp_path / "old.pt", to="torch", overwrite=True)


def test_a_file_that_holds_no_tensors_stays(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "ck")
    for name, to in (("work.bin", "torch"), ("work.safetensors", "hf"), ("work.pt", "torch")):
        target = tmp_path / name
        target.write_text("years of work")
        with pytest.raises(UsageError, match="does not begin") as caught:
            tx.convert(source, target, to=to, overwrite=True)
        assert "--overwrite=everything" in caught.value.hint
        assert target.read_text() == "years of work"
        tx.convert(source, target, to=to, overwrite="everything")
        assert tx.diff(source, target).equal


def test_what_came_while_it_was_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note that appears between the last look and the exchange is not deleted: the old folder comes back."""
    source, out = checkpoints.tiny(tmp_path / "ck"), tmp_path / "out"
    tx.convert(source, out, to="hf")
    for exchange in (place.exchange, lambda *_: False):
        check = place.TargetPlace.check

        def late(self: place.TargetPlace, hint: str = "", check: Any = check) -> None:
            check(self, hint)
            (out / "late.md").write_text("mine")

        with monkeypatch.context() as patch:
            patch.setattr(place, "exchange", exchange)
            patch.setattr(place.TargetPlace, "check", late)
            with pytest.raises(UsageError, match=r"late\.md belongs"):
                tx.convert(source, out, to="dcp:hf", overwrite=True)
        assert (out / "late.md").read_text() == "mine"
        assert (out / "model.safetensors").exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "out"]
        (out / "late.md").unlink()


def test_overwrite_is_one_of_three(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "ck")
    with refuses("AMBIGUOUS"):
        tx.convert(source, tmp_path / "out", to="hf", overwrite="all")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
