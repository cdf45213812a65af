"""Megatron jobs save hub folders: what they loaded comes out again, byte for byte, without the padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.formats.megatron import gpt_job
from tests.formats.megatron.gpt_job import Degrees
from tests.live.load.test_megatron_load import JOBS, MODELS, hubs
from tests.live.ranks import run
from tests.oracles import hub
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.save import save

__all__ = ["hubs"]
pytestmark = pytest.mark.peers


def saved(
    rank: int, world: int, config: dict[str, Any], degrees: Degrees, source: str, target: str, to: str
) -> dict[str, Any]:
    """Load a hub folder, and save it again."""
    with gpt_job.models(config, degrees) as models:
        state = [model.sharded_state_dict() for model in models]
        load({"model": state}, source)
        return save({"model": state}, target, to=to, config=source).as_json()


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "degrees"), [JOBS[0], JOBS[3], JOBS[4], JOBS[5], JOBS[7], JOBS[8]], ids=str)
def test_what_was_loaded_is_saved(name: str, degrees: Degrees, hubs: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run(4, saved, MODELS[name], degrees, hubs[name], str(out), "safetensors:hf")
    truth, written = load_file(Path(hubs[name], hub.WEIGHTS)), load_file(out / hub.WEIGHTS)
    assert written.keys() == truth.keys()
    assert all(torch.equal(written[key], value) for key, value in truth.items())
    assert sum(each["bytes_own"] for each in found) == sum(value.nbytes for value in truth.values())
    assert all(any(key.endswith("._extra_state") for key in each["ignored"]) for each in found)


def test_a_folder_of_dcp_has_the_names_and_the_padding_of_megatron(hubs: dict[str, str], tmp_path: Path) -> None:
    degrees, out = Degrees(tp=2, pp=2), tmp_path / "out"
    run(4, saved, MODELS["dense"], degrees, hubs["dense"], str(out), "dcp:identity")
    with tx.open(out) as written:
        assert written["embedding.word_embeddings.weight"].shape == (64, 64)
        assert written["decoder.layers.mlp.linear_fc1.weight"].shape == (4, 192, 64)
    assert run(4, _loaded_again, degrees, hubs["dense"], str(out)) == [[]] * 4


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "degrees"), [JOBS[0], JOBS[4], JOBS[5], JOBS[8]], ids=str)
def test_megatron_loads_the_distributed_checkpoint_that_is_saved(
    name: str, degrees: Degrees, hubs: dict[str, str], tmp_path: Path
) -> None:
    out, config = tmp_path / "out", MODELS[name]
    run(4, saved, config, degrees, hubs[name], str(out), "torch_dist")
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    folder = str(out / "release")
    assert run(4, gpt_job.load, config, hubs[name], folder, degrees.tp, degrees.pp, degrees.ep) == [[]] * 4


def _loaded_again(rank: int, world: int, degrees: Degrees, source: str, folder: str) -> list[str]:
    with gpt_job.models(MODELS["dense"], degrees) as (model,):
        load(model.sharded_state_dict(), folder)
        expected = gpt_job.parts(model, gpt_job.whole(MODELS["dense"], source))
        return [name for name, value in expected.items() if not torch.equal(model.get_parameter(name), value)]


def _drifted(rank: int, world: int, source: str, target: str, check: bool) -> list[str]:
    with gpt_job.models(MODELS["dense"], Degrees(tp=2, pp=2)) as (model,):
        state = model.sharded_state_dict()
        load(state, source)
        if any(state["decoder.layers.0.input_layernorm.weight"].replica_id):
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.data.zero_()
        try:
            save(state, target, config=source, check_copies=check)
        except TransaxleError as error:
            return [f"{each.code} {each.where.tensor}" for each in error.refusals]
    return []


def test_replicas_that_differ_are_refused_or_left_out(hubs: dict[str, str], tmp_path: Path) -> None:
    source, no, out = hubs["dense"], tmp_path / "no", tmp_path / "out"
    told = run(4, _drifted, source, str(no), True)
    assert all(each == told[0] and len(each) == 4 * 4 + 1 for each in told)
    assert "UNEQUAL_COPIES decoder.layers.self_attention.q_layernorm.weight[2, 0]" in told[0]
    assert not no.exists()
    assert run(4, _drifted, source, str(out), False) == [[]] * 4
    truth, written = load_file(Path(source, hub.WEIGHTS)), load_file(out / hub.WEIGHTS)
    assert all(torch.equal(written[name], value) for name, value in truth.items()), "those with replica id 0 are saved"
