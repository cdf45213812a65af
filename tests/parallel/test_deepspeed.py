"""DeepSpeed and a model that we cut: its engine trains and saves it, and each resumes the other's checkpoints."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

import transaxle as tx
from tests.live.ranks import run
from tests.oracles.deepspeed_peer.case import BY_NAME, FP32, STATES
from tests.oracles.deepspeed_peer.farm import Farm, facts, raw
from tests.parallel.models import CONFIGS, build
from transaxle.formats.deepspeed.keys import INFO, UNIVERSAL
from transaxle.formats.deepspeed.record import read as read_record
from transaxle.parallel.metadata import record_of
from transaxle.parallel.plan import make_plan
from transaxle.parallel.reading import read

pytestmark = [pytest.mark.peers, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
RANKS = 4
KINDS = ("llama", "phi3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed's engine saved of models that we cut."""
    pytest.importorskip("deepspeed")
    out = tmp_path_factory.mktemp("engine")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "-m", "tests.parallel.engine", str(out), *KINDS],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-1000:]}{done.stderr[-5000:]}"
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_saves_what_we_cut(trained: Path, kind: str) -> None:
    """Read whole by its metadata: every rank's part of it is what the engine held there, key and value heads too."""
    model = build(CONFIGS[kind])
    cuts = {cut.weight.name: cut for cut in make_plan(model, read(model), RANKS, None).cuts}
    with tx.open(trained / kind) as saved:
        for rank in range(RANKS):
            held, info = pickle.loads((trained / f"{kind}.{rank}.truth").read_bytes())  # noqa: S301 - our own
            for name, value in held.items():
                parameter = name.removeprefix("optim/").rpartition("/")[0] if name.startswith("optim/") else name
                cut, whole = cuts[parameter], saved[name].read()
                spans = [whole.take(range(start, stop), cut.dim) for start, stop in cut.held[rank]]
                assert np.concatenate(spans, cut.dim).tobytes() == value.tobytes(), name
            for file in (trained / kind).glob("*/*_states.pt"):
                state = torch.load(file, weights_only=False)
                assert state.get(INFO, state.get("optimizer_state_dict", {}).get(INFO)) == info, file.name


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_record_says_the_same_when_it_is_read(kind: str) -> None:
    model = build(CONFIGS[kind])
    for ranks in (2, 3, 4):
        for cut in make_plan(model, read(model), ranks, None).cuts:
            record = record_of(cut, cut.shares, ranks)
            again = read_record(record.as_dict(), cut.weight.name, ranks)
            assert again.spread == record.spread, cut.weight.name
            assert again.as_dict() == record.as_dict(), cut.weight.name


def _carried(rank: int, world: int, config: dict[str, Any], source: str, target: str) -> int:
    model = build(config)
    tx.parallel.tensor_parallel(model, init_device_mesh("cpu", (world,)))
    weights = list(model.parameters())
    matrices, others = ([weight for weight in weights if (weight.dim() > 1) == wide] for wide in (True, False))
    optimizer = AdamW([{"params": matrices}, {"params": others}])  # the groups that DeepSpeed's run has
    tx.load(model, source, optimizer=optimizer, strict=True)
    first = tx.parallel.universal_checkpoint_info(model)
    assert tx.parallel.universal_checkpoint_info(model) == first
    tx.save(model, target, to=UNIVERSAL, optimizer=optimizer)
    return len(first)


def _through_ours(source: Path, target: Path) -> None:
    """A checkpoint of DeepSpeed's, resumed by a model that we cut over four ranks, and saved by it."""
    case = BY_NAME["tp4"]
    config = {
        "model_type": "llama", "vocab_size": case.vocab, "hidden_size": case.hidden, "intermediate_size": case.inner,
        "num_hidden_layers": case.layers, "num_attention_heads": case.heads, "num_key_value_heads": case.kv,
        "tie_word_embeddings": case.tied, "max_position_embeddings": 64,
    }  # fmt: skip
    run(RANKS, _carried, config, str(source), str(target))


def test_autotp_resumes_ours_and_we_resume_autotp(farm: Farm) -> None:
    """From DeepSpeed at 4 to us at 4 to DeepSpeed at 2: it loads what it had, to the bit, and steps alike."""
    source, target = "tp4", "tp2-wide"
    out = farm.resumed(source, target, [(source, target)], _through_ours, kind="ours")
    for state in (FP32, *STATES):
        assert raw(out / "loaded" / f"{state}.safetensors") == farm.truth(source, state), state
        ours, begun_there = (raw(f / f"{state}.safetensors") for f in (out / "next", out / "started" / "next"))
        assert ours == begun_there, state
    assert facts(out / "loaded")["steps"] == farm.facts(source)["steps"]
    assert facts(out / "loaded")["loss"] == facts(out / "started" / "next")["loss"]
