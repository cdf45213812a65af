"""`check` against DeepSpeed itself: what it finds is what an engine does with the same folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.readers import planted
from tests.readers.conftest import served
from tests.readers.real_readers import ROOT, SECONDS

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

PLAIN, BIASED, WIDE, ROUTED = "plain", "biased", "wide", "routed"
CONFIGS: dict[str, dict[str, Any]] = {
    PLAIN: planted.LLAMA,
    BIASED: {**planted.LLAMA, "attention_bias": True},
    WIDE: {**planted.LLAMA, "intermediate_size": 112},
    ROUTED: {**planted.GLM4_MOE, "num_nextn_predict_layers": 0},
}
BIAS, UP = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.weight"
ROUTER = "model.layers.1.mlp.gate.e_score_correction_bias"
CASES = {
    (PLAIN, PLAIN): {}, (PLAIN, BIASED): {"missing": BIAS}, (BIASED, PLAIN): {"dropped": BIAS},
    (PLAIN, WIDE): {"shape": UP}, (ROUTED, ROUTED): {},
}  # fmt: skip
"""Saved model and model of the job -> kind and a name of the finding."""
SILENT = {(f"{BIASED}-universal", PLAIN)}
"""Folders and models at which DeepSpeed does not stop."""
PAIRS = [(f"{saved}{end}", config) for saved, config in CASES for end in ("", "-universal")]


def _run(*words: object) -> None:
    command = [sys.executable, "-m", "tests.readers.deepspeed_loads", *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that DeepSpeed saves, and universal ones made of them."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for name, config in CONFIGS.items():
        planted.make(config, folder / "hub" / name)
    saved = list(dict.fromkeys(name for name, _ in CASES))
    _run("save", folder / "saved", *(folder / "hub" / name for name in saved))
    for name in saved:
        source = folder / "saved" / name
        tx.convert(source, folder / "saved" / f"{name}-universal", to="deepspeed-universal", sync=False,
                   config=folder / "hub" / name)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def loaded(place: Path) -> dict[tuple[str, str], str]:
    """What DeepSpeed says of each folder and model; empty if the model then has what was saved."""
    paths = [path for name, config in PAIRS for path in (place / "saved" / name, place / "hub" / config)]
    _run("load", place / "said.json", *paths)
    return dict(zip(PAIRS, json.loads((place / "said.json").read_text("utf-8")), strict=True))


@pytest.fixture(scope="module", autouse=True)
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with served(Path(sys.executable), "of_deepspeed", tmp_path_factory.mktemp("probe")):
        yield


@pytest.mark.parametrize("pair", PAIRS, ids=" into ".join)
def test_folders_and_models(pair: tuple[str, str], place: Path, loaded: dict[tuple[str, str], str]) -> None:
    name, config = pair
    verdict = tx.check(place / "saved" / name, "deepspeed", config=place / "hub" / config)
    kinds: dict[str, tuple[str, ...]] = {finding.kind: finding.names for finding in verdict.findings if finding.wrong}
    assert verdict.traced == "run"
    expected = CASES[name.partition("-")[0], config]
    assert verdict.ok == (not expected), verdict
    for kind, tensor in expected.items():
        assert tensor in kinds[kind]
    if pair == (f"{ROUTED}-universal", ROUTED):
        assert [finding.names for finding in verdict.findings] == [(ROUTER,)]
        assert loaded[pair] == ROUTER
    elif pair in SILENT:
        assert set(loaded[pair].split()) == set(kinds["dropped"])
    else:
        assert (loaded[pair] == "") == verdict.ok, loaded[pair]


def test_numbered_experts_have_other_names_than_the_model(place: Path, tmp_path: Path) -> None:
    tx.convert(place / "hub" / ROUTED, tmp_path / "own", to="deepspeed-universal", sync=False)
    verdict = tx.check(tmp_path / "own", "deepspeed", config=place / "hub" / ROUTED)
    assert not verdict.ok
    remedy = next(finding.remedy for finding in verdict.findings if finding.kind == "missing")
    assert remedy.endswith("DST --to deepspeed-universal:transformers")
    tx.convert(
        tmp_path / "own", tmp_path / "renamed", to="deepspeed-universal:transformers", config=place / "hub" / ROUTED
    )
    assert tx.check(tmp_path / "renamed", "deepspeed", config=place / "hub" / ROUTED).ok
