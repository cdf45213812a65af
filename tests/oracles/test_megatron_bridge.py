"""The dialects `megatron` and `te` against Megatron-Bridge 0.6.2: what it makes of the hub's tensors is what we write.

It runs in an environment of its own, once for all models that are compared (`make megatron`; see `bridge_peer`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import transaxle as tx
from tests.oracles.bridge_peer.models import MODELS, SILENT
from tests.oracles.peer_bytes import Tensors, differing, loaded, write

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("MEGATRON_PYTHON", ROOT / ".venv-megatron/bin/python"))
SECONDS = 1800
MEGATRON, TE, HF = "megatron", "te", "hf"
SAVED, OURS = "saved", "ours"

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"Megatron-Bridge has no environment at {PYTHON}: make megatron"),
]

DENSE_BETWEEN = "qwen3_moe-dense_between"
RIGHT = [name for name, model in MODELS.items() if not model.fault]
WRONG = [name for name, model in MODELS.items() if model.fault]
COMPUTED = re.compile(r"linear_attn\.norm\.weight$")
"""Stored with one taken off in Megatron: adding it again does not give every bit back."""
EXPERT = re.compile(r"(.*\.experts\.linear_fc[12]\.(?:weight|bias))([0-9]+)$")
NO_TABLE = {
    "DeciLMForCausalLM", "Ernie4_5_VLMoeForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "MiMoForCausalLM",
    "NemotronH_Nano_VL_V2", "NemotronLabsDiffusionModel", "Qwen3ASRForConditionalGeneration", "SarvamMLAForCausalLM",
    "SarvamMoEForCausalLM",
}  # fmt: skip
"""Architectures with a bridge and without a table."""
NO_DIALECT = {
    "DeepseekV4ForCausalLM", "Glm4vMoeForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration", "NemotronH_Nano_Omni_Reasoning_V3", "Qwen2AudioForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration", "Step3p7ForConditionalGeneration",
}  # fmt: skip
"""Architectures with a bridge, and with a table that has no dialect of Megatron."""
ALIASES = {"ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM"}


@pytest.fixture(scope="session")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Megatron-Bridge made of the models that the selected tests compare."""
    folder = tmp_path_factory.mktemp("bridge")
    _run(str(folder), *sorted({DENSE_BETWEEN, *_selected(request)}))
    return folder


def _selected(request: pytest.FixtureRequest, fixture: str = "made") -> Iterator[str]:
    """Yield the model of each selected test of this file that uses the fixture."""
    for item in request.session.items:
        if item.path == Path(__file__) and fixture in getattr(item, "fixturenames", ()) and hasattr(item, "callspec"):
            yield item.callspec.params["name"]


def _run(*words: str) -> None:
    command = [str(PYTHON), "-m", "tests.oracles.bridge_peer.run", *words]
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NVTE"))}
    done = subprocess.run(command, cwd=ROOT, env=cleared, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="session")
def ours(request: pytest.FixtureRequest, made: Path) -> Path:
    """The same folder, when we have written distributed checkpoints of its hubs, and Megatron has loaded them."""
    names = sorted(set(_selected(request, "ours")))
    for name in names:
        theirs = _written_by(made / name / SAVED / "iter_0000000")
        dialect = "megatron_layers" if any("decoder.layers.0." in key for key in theirs) else "megatron_dist"
        source, target = made / name / "hub", made / name / OURS
        tx.convert(source, target, to=f"torch_dist:{dialect}", sync=False, allow_lossy=True)
    _run(str(made), "--load", *names)
    return made


def _said(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "said.json").read_text("utf-8")))


def _stacked(held: Tensors) -> Tensors:
    """Every expert's own tensor as one slice of all of them."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    out: Tensors = {}
    for name, value in held.items():
        if found := EXPERT.fullmatch(name):
            stacks.setdefault(found[1], {})[int(found[2])] = value
        else:
            out[name] = value
    return out | {name: torch.stack([held[e] for e in range(len(held))]) for name, held in stacks.items()}


def _convert(source: Path, target: Path, to: str) -> Tensors:
    tx.convert(source, target, to=f"safetensors:{to}", sync=False, allow_lossy=True)
    return loaded(target)


@pytest.mark.oracle
@pytest.mark.parametrize("name", RIGHT)
def test_the_bridge_holds_what_we_write(name: str, made: Path, tmp_path: Path) -> None:
    folder = made / name
    assert _said(folder) == {"not loaded": []}
    hub, held, back = (loaded(folder / part) for part in ("hub", "held", "back"))
    rounded = {stored for stored in hub if COMPUTED.search(stored)}
    assert set(differing(back, hub)) <= {*rounded, *(back.keys() - hub.keys())}, "the bridge does not give back"
    wanted = hub | {stored: back[stored] for stored in rounded}
    assert differing(_convert(folder / "hub", tmp_path / MEGATRON, MEGATRON), held) == []
    assert differing(_convert(folder / "held", tmp_path / "back", HF), wanted) == []
    stacked = _stacked(held)
    assert differing(_convert(folder / "hub", tmp_path / TE, TE), stacked) == []
    write(tmp_path / "stacked", stacked, (folder / "held/config.json").read_text("utf-8"))
    assert differing(_convert(tmp_path / "stacked", tmp_path / "unstacked", HF), wanted) == []


def _written_by(folder: Path) -> dict[str, tuple[int, ...] | None]:
    """Every key of a distributed checkpoint, with the shape of its tensor."""
    metadata = FileSystemReader(folder).read_metadata()
    return {key: tuple(size) if (size := getattr(item, "size", None)) is not None else None
            for key, item in metadata.state_dict_metadata.items()}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", RIGHT)
def test_what_the_bridge_saves_is_read(name: str, made: Path, tmp_path: Path) -> None:
    folder = made / name
    hub, back = (loaded(folder / part) for part in ("hub", "back"))
    rounded = {stored for stored in hub if COMPUTED.search(stored)}
    out = tmp_path / "out"
    report = tx.convert(folder / SAVED, out, to="hf", config=folder / "hub/config.json", sync=False, allow_lossy=True)
    assert report.format == "safetensors"
    assert differing(loaded(out), hub | {stored: back[stored] for stored in rounded}) == []


@pytest.mark.oracle
@pytest.mark.parametrize("name", RIGHT)
def test_megatron_loads_what_we_write(name: str, ours: Path) -> None:
    """Megatron refuses a folder that lacks the state of one of its modules, whatever is in it."""
    folder = ours / name
    assert json.loads((folder / "said_of_ours.json").read_text("utf-8")) == {}
    assert differing(loaded(folder / "loaded"), loaded(folder / "held")) == []
    theirs, written = (_written_by(folder / part) for part in (f"{SAVED}/iter_0000000", f"{OURS}/release"))
    keys = {key for key in theirs if not key.startswith("common_state/")}
    assert {key: written.get(key) for key in keys} == {key: theirs[key] for key in keys}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_bridge_does_wrong_is_still_wrong(name: str, made: Path, tmp_path: Path) -> None:
    """docs/comparison.md says so; our own conversion has all tensors, and gives them back."""
    folder, fault = made / name, MODELS[name].fault
    said = _said(folder)
    hub = loaded(folder / "hub")
    if fault == SILENT:
        assert differing(loaded(folder / "back"), hub)
    else:
        assert fault in said["error"]
    out = _convert(folder / "hub", tmp_path / MEGATRON, MEGATRON)
    assert sum(value.numel() for value in out.values()) == sum(value.numel() for value in hub.values())
    assert differing(_convert(tmp_path / MEGATRON, tmp_path / "back", HF), hub) == []


def test_a_dense_layer_among_experts_stays_dense(made: Path, tmp_path: Path) -> None:
    """The bridge leaves the experts of such a layer as they were drawn, and drops its MLP."""
    folder = made / DENSE_BETWEEN
    left = _said(folder)["not loaded"]
    assert all(name.startswith("decoder.layers.0.mlp.") for name in left)
    hub, held = loaded(folder / "hub"), loaded(folder / "held")
    out = _convert(folder / "hub", tmp_path / "out", MEGATRON)
    assert differing({n: v for n, v in out.items() if ".0.mlp." not in n},
                     {n: v for n, v in held.items() if ".0." not in n or ".0.self" in n}) == []  # fmt: skip
    dense = [hub[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(out["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat(dense))


def test_every_bridge_is_compared_or_named(made: Path) -> None:
    bridges = {ALIASES.get(each, each) for each in json.loads((made / "bridges.json").read_text("utf-8"))}
    compared = {model.config["architectures"][0] for model in MODELS.values()}
    assert not compared & (NO_TABLE | NO_DIALECT)
    assert bridges == compared | NO_TABLE | NO_DIALECT
