"""`check` against Megatron itself: what it finds is what Megatron does with the same folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.oracles.bridge_peer.models import MODELS
from tests.oracles.quiet import quiet
from tests.readers import planted
from tests.readers.conftest import served
from tests.readers.real_readers import ROOT, SECONDS

PYTHON = Path(os.environ.get("MEGATRON_PYTHON", ROOT / ".venv-megatron/bin/python"))
pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"Megatron has no environment at {PYTHON}"),
    pytest.mark.filterwarnings("ignore"),
]
HEAD, NORM = "output_layer.weight", "decoder.layers.self_attention.q_layernorm.weight"
GLM: Mapping[str, Any] = {**planted.GLM4_MOE, "num_nextn_predict_layers": 0}
GOOD = {
    "llama": (planted.LLAMA, "torch_dist"), "qwen3_moe": (planted.QWEN3_MOE, "torch_dist"),
    "glm4_moe": (GLM, "torch_dist"), "numbered layers": (planted.QWEN3, "torch_dist:megatron_layers"),
}  # fmt: skip
FAULTS: Mapping[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "layers ahead": ("glm4_moe", {"num_nextn_predict_layers": 1}, {"missing": "mtp.layers.0.eh_proj.weight"}),
    "a depth": ("qwen3_moe", {"num_hidden_layers": 3}, {"shape": NORM}),
    "a vocabulary": ("qwen3_moe", {"vocab_size": planted.WORDS + 8}, {"shape": HEAD}),
    "a tied head": ("llama", {"tie_word_embeddings": True}, {"dropped": HEAD}),
    "a norm": ("llama", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, {"missing": NORM}),
}  # fmt: skip
"""What the config has otherwise -> the folder, the keys, and the kind and a name of the finding."""
SILENT = {"a vocabulary", "a tied head"}
"""Faults at which Megatron does not stop."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("megatron")
    for name, (config, to) in GOOD.items():
        planted.make(config, place / "hub" / name)
        tx.convert(place / "hub" / name, place / name, to=to, sync=False)
    for name, (good, keys, _) in FAULTS.items():
        shutil.copytree(place / good, place / name)
        planted.reconfigure(place / name, lambda config, keys=keys: config.update(keys))  # type: ignore[misc]
    return place


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with served(PYTHON, "of_megatron", tmp_path_factory.mktemp("probe")):
        yield


@pytest.fixture(scope="module")
def loaded(folders: Path) -> dict[str, str]:
    """What Megatron says when it loads each folder in full; empty if every parameter got a value."""
    names = [*GOOD, *FAULTS]
    command = [
        str(PYTHON),
        "-m",
        "tests.readers.megatron_loads",
        str(folders / "said"),
        *(str(folders / n) for n in names),
    ]
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NVTE"))}
    ended = subprocess.run(command, cwd=ROOT, env=cleared, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return dict(zip(names, json.loads((folders / "said").read_text("utf-8")), strict=True))


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("name", GOOD)
def test_a_good_folder_loads(name: str, folders: Path, loaded: dict[str, str]) -> None:
    verdict = tx.check(folders / name, "megatron", python=PYTHON)
    assert verdict.ok, verdict
    assert (verdict.findings, verdict.traced) == ((), "run")
    assert loaded[name] == ""


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("name", FAULTS)
def test_a_config_of_another_model(name: str, folders: Path, loaded: dict[str, str]) -> None:
    verdict = tx.check(folders / name, "megatron", python=PYTHON)
    kinds: dict[str, tuple[str, ...]] = {finding.kind: finding.names for finding in verdict.findings if finding.wrong}
    for kind, tensor in FAULTS[name][2].items():
        assert tensor in kinds[kind]
    assert (loaded[name] == "") == (name in SILENT)


FIRST = {model.config["model_type"]: name for name, model in reversed(MODELS.items()) if not model.fault}
AHEAD = {"num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 0}


@pytest.mark.oracle
@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("name", sorted(FIRST.values()))
def test_good_checkpoints_give_no_false_alarm(name: str, tmp_path: Path) -> None:
    """What we write of a model of transformers, without layers that it does not store."""
    import transformers

    config = {key: value for key, value in MODELS[name].config.items() if key not in AHEAD}
    (architecture,) = config.pop("architectures")
    if (kind := getattr(transformers, architecture, None)) is None:
        pytest.skip(f"transformers has no {architecture}")
    with quiet():
        model = kind(transformers.AutoConfig.for_model(**config)).float()
        planted.draw(model)
        model.save_pretrained(tmp_path / "hub")
    planted.reconfigure(tmp_path / "hub", lambda keys: keys.update(AHEAD))
    tx.convert(tmp_path / "hub", tmp_path / "own", to="torch_dist", sync=False, allow_lossy=True)
    assert tx.check(tmp_path / "own", "megatron", python=PYTHON).ok


@pytest.mark.usefixtures("service")
def test_tables_stand_for_what_megatron_is_not_asked(folders: Path, tmp_path: Path) -> None:
    """A model without a bridge, and rank files."""
    shutil.copytree(folders / "llama", tmp_path / "other")
    planted.reconfigure(tmp_path / "other", lambda config: config.update(architectures=["OurLlama"]))
    verdict = tx.check(tmp_path / "other", "megatron", python=PYTHON)
    assert (verdict.ok, verdict.traced) == (True, "tables")
    assert "Megatron-Bridge cannot build the model" in str(verdict)
    tx.convert(folders / "hub" / "llama", tmp_path / "ranks", to="megatron_torch", sync=False)
    assert tx.check(tmp_path / "ranks", "megatron", python=PYTHON).traced == "tables"
