"""Runs whose newest iteration is not there, and configs of another model: refused by file and reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import transaxle as tx
from tests.formats.dcp.damage import MARKER, Evil
from tests.formats.refusals import refuses
from tests.oracles import hub
from transaxle.engine.checkpoint.stored_names import check_same
from transaxle.errors import Code, TransaxleError

TRACKER, METADATA, COMMON, BACKEND = "latest_checkpointed_iteration.txt", ".metadata", "common.pt", "metadata.json"
RELEASE = "release"
SIZES = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 50,
}  # fmt: skip
Damage = Callable[[Path], object]
TORCH_DIST = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run, without the config beside it, and the config."""
    folder = tmp_path_factory.mktemp("hub")
    config, tensors = hub.make(SIZES, 0)
    Path(folder, "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / hub.WEIGHTS)
    written = tmp_path_factory.mktemp("run") / "run"
    tx.convert(folder, written, to="torch_dist")
    for name in ("config.json", "transaxle.json"):
        Path(written, name).unlink()
    return written, config


def _without(*names: str) -> Damage:
    def remove(run: Path) -> None:
        for name in names:
            (run / RELEASE / name).unlink()

    return remove


def _emptied(run: Path) -> None:
    shutil.rmtree(run / RELEASE)
    (run / RELEASE).mkdir()


def _zarr(run: Path) -> None:
    _emptied(run)
    (run / RELEASE / BACKEND).write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    (run / RELEASE / "embedding.word_embeddings.weight").mkdir()


def _about(**changes: object) -> Damage:
    return lambda run: (run / RELEASE / BACKEND).write_text(json.dumps({**TORCH_DIST, **changes}))


def _without_folders(run: Path) -> None:
    _without(METADATA, BACKEND)(run)
    for file in (run / RELEASE).iterdir():
        file.rename(run / file.name)
    (run / TRACKER).unlink()


RUNS: dict[str, tuple[Damage, Code, str]] = {
    "another iteration": (lambda run: (run / TRACKER).write_text("9"), "INCOMPLETE", "no folder iter_0000009"),
    "bytes": (lambda run: (run / TRACKER).write_bytes(b"\xff\x00"), "CORRUPT", "neither an iteration nor"),
    "an empty folder": (_emptied, "INCOMPLETE", "there is no checkpoint in it"),
    "a folder of the older format": (_zarr, "UNSUPPORTED", "zarr"),
    "a later version": (
        _about(sharded_backend_version=2), "UNSUPPORTED", "sharded_backend_version is 2; version 1 is read"),
    "no metadata": (_without(METADATA), "INCOMPLETE", "the save was interrupted"),
    "data alone": (_without(METADATA, BACKEND, COMMON), "INCOMPLETE", "the save was interrupted"),
    "no metadata, and no folders": (_without_folders, "INCOMPLETE", "the save was interrupted"),
    "arguments that run something": (
        lambda run: torch.save({"args": Evil(run)}, run / RELEASE / COMMON), "UNSAFE_PICKLE", "system"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "code", "said"), RUNS.values(), ids=RUNS.keys())
def test_broken_runs(damage: Damage, code: Code, said: str, run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run[0], tmp_path / "run"))
    damage(folder)
    with refuses(code, exit_code=3) as caught:
        tx.convert(folder, tmp_path / "out", to="hf", config=run[1])
    refusal = caught.value.refusals[0]
    assert said in refusal.message
    assert refusal.hint
    assert refusal.where.file
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob(MARKER))


OTHER = [
    ({"num_hidden_layers": 3}, "num_hidden_layers 3"),
    ({"hidden_size": 24}, "hidden_size 24"),
    ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
    ({"intermediate_size": 10}, "expected [2, 20, 16]"),
    ({"vocab_size": 40}, "10 rows of its vocabulary would be left out"),
    ({"vocab_size": 70}, "a size of p that makes a dim of 50"),
    ({"model_type": "qwen2"}, "lacks these tensors"),
]


@pytest.mark.parametrize(("changes", "said"), OTHER, ids=[str(changes) for changes, _ in OTHER])
def test_the_config_of_another_model(
    changes: dict[str, Any], said: str, run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(TransaxleError) as caught:
        tx.convert(run[0], tmp_path / "out", to="hf", config={**run[1], **changes})
    assert caught.value.exit_code == 3
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_rows_that_only_pad_the_vocabulary_may_be_left_out(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A run may have been told of a vocabulary that was padded already."""
    tx.convert(run[0], tmp_path / "out", to="hf", config={**run[1], "vocab_size": 40}, axes={"n": 40})
    with tx.open(tmp_path / "out") as written:
        assert written["model.embed_tokens.weight"].shape == (40, 16)


def test_a_config_with_defaults_of_other_keys() -> None:
    """transformers writes every key of a config, those too that the model does not ask."""
    said = {"num_experts": 6, "n_routed_experts": 6, "num_local_experts": 6, "moe_intermediate_size": 44}
    check_same(
        {"num_experts": 256, "n_routed_experts": 6, "intermediate_size": 44, "moe_intermediate_size": 8}, said, {}
    )
    for config in ({"num_experts": 256}, {"n_routed_experts": 8}, {"moe_intermediate_size": 8}):
        with pytest.raises(TransaxleError, match="SHAPE_MISMATCH"):
            check_same(config, said, {})


def test_a_config_that_is_not_there(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    for text, exit_code in ((None, 4), ("{", 3), ("[1]", 3)):
        file = tmp_path / "config.json"
        if text is not None:
            file.write_text(text)
        with pytest.raises(TransaxleError) as caught:
            tx.convert(run[0], tmp_path / "out", to="hf", config=file)
        assert caught.value.exit_code == exit_code
        assert caught.value.refusals[0].where.file == str(file)
