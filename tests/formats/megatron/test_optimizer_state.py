"""The optimizer's state of Megatron, in every form that megatron-core saves: by parameter, flat buckets, gathered."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.formats.dcp.damage import archive, payload, put, read
from tests.formats.megatron import trained_job
from tests.formats.megatron.conftest import Hubs, Trained
from tests.formats.megatron.test_torch_dist import stored
from tests.formats.megatron.trained_job import Job, after_a_step
from tests.formats.refusals import refuses
from tests.oracles import hub
from transaxle.errors import Refused

JOBS = {
    "cut by tensor-parallel ranks": Job("llama", tp=2, dp=2),
    "many buckets": Job("llama", tp=2, pp=2, bucket=1500),
    "a tied embedding on two stages": Job("tied", pp=2, dp=2),
    "a tied embedding on one": Job("tied", dp=2),
    "model chunks": Job("llama", pp=2, vp=2),
    "biases": Job("qwen2", dp=2, bucket=600),
    "experts shared out": Job("qwen3_moe", ep=2, dp=4),
    "experts cut": Job("qwen3_moe", tp=2, ep=2, dp=2),
    "experts not cut": Job("qwen3_moe", tp=2, ep=2, etp=1, dp=2),
    "experts not cut, in the model's shapes": Job("qwen3_moe", "fully_reshardable", tp=2, ep=2, etp=1, dp=2),
    "experts not cut, of every rank": Job("qwen3_moe", None, tp=2, ep=2, etp=1, dp=2),
    "experts on every rank": Job("qwen3_moe", dp=2),
    "experts on some layers": Job("mixed", pp=2, ep=2, dp=2),
    "in the model's shapes": Job("qwen3_moe", "fully_reshardable", ep=2, dp=2),
    "of every rank": Job("tied", None, pp=2),
    "of every rank, experts": Job("qwen3_moe", None, ep=2, dp=2),
    "gathered": Job("llama", "dp_zero_gather_scatter", tp=2, pp=2),
    "gathered, experts": Job("qwen3_moe", "dp_zero_gather_scatter", ep=2, dp=4),
}

pytestmark = pytest.mark.peers


@pytest.mark.oracle
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_moments_and_copies_are_those_of_the_step(job: Job, hubs: Hubs, trained: Trained, tmp_path: Path) -> None:
    tx.convert(trained(job), tmp_path / "out", to="hf", config=hubs[job.model] / "config.json", optimizer=True)
    weights, state = load_file(tmp_path / "out" / hub.WEIGHTS), _state(tmp_path / "out")
    expected = after_a_step(load_file(hubs[job.model] / hub.WEIGHTS))
    assert {name for name in state if not name.endswith("/step")} == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
        if name.endswith("/fp32"):
            weight = name.removeprefix("optim/").removesuffix("/fp32")
            assert torch.equal(weights[weight], state[name].bfloat16())
            assert state[f"optim/{weight}/step"] == 1


def _state(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted((folder / "optimizer").glob("*.safetensors")):
        found |= load_file(file)
    return found


FLAT = JOBS["cut by tensor-parallel ranks"]


def test_a_hub_gets_the_weights_alone(hubs: Hubs, trained: Trained, tmp_path: Path) -> None:
    report = tx.convert(trained(FLAT), tmp_path / "out", to="hf", config=hubs["llama"] / "config.json")
    with tx.open(tmp_path / "out") as written:
        assert written.keys() == load_file(hubs["llama"] / hub.WEIGHTS).keys()
    assert not (tmp_path / "out" / "optimizer").exists()
    assert any(name.startswith("optim/") for name in report.ignored)


@pytest.mark.oracle
@pytest.mark.parametrize("job", [FLAT, JOBS["experts shared out"]], ids=["dense", "experts"])
@pytest.mark.parametrize("to", ["deepspeed-universal", "dcp", "safetensors", "torch_dist"])
def test_training_moves_to_other_formats(to: str, job: Job, hubs: Hubs, trained: Trained, tmp_path: Path) -> None:
    config = hubs[job.model] / "config.json"
    plain = to in ("deepspeed-universal", "dcp")
    tx.convert(trained(job), tmp_path / "there", to=f"{to}:hf" if plain else to, config=config)
    tx.convert(tmp_path / "there", tmp_path / "back", to="hf", config=config, optimizer=True)
    tx.convert(trained(job), tmp_path / "direct", to="hf", config=config, optimizer=True)
    expected, found = _state(tmp_path / "direct"), _state(tmp_path / "back")
    weights = load_file(tmp_path / "back" / hub.WEIGHTS)
    if to == "deepspeed-universal":  # weights are in full precision there, and nowhere else
        found |= {f"optim/{name}/fp32": value for name, value in weights.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in expected.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.form == "fully_reshardable"])
def test_by_way_of_the_hub_megatron_gets_what_it_saved(name: str, hubs: Hubs, trained: Trained, tmp_path: Path) -> None:
    job = JOBS[name]
    tx.convert(trained(job), tmp_path / "hub", to="hf", config=hubs[job.model] / "config.json", optimizer=True)
    tx.convert(tmp_path / "hub", tmp_path / "back", to="torch_dist")
    theirs, ours = (
        {re.sub(r"^chained_\d\.", "", key): value for key, value in stored(folder / "iter_0000007").items()}
        for folder in (trained(job), tmp_path / "back")
    )  # releases differ in the prefix of experts
    kinds = {name.split(".state.")[1].split(".")[0] for name in theirs if ".state." in name}
    assert kinds == {"exp_avg", "exp_avg_sq", "param"}
    for key, value in theirs.items():
        rows = 50 if key.endswith(("word_embeddings.weight", "output_layer.weight")) else None  # the others are padding
        assert torch.equal(ours[key][:rows], value[:rows]), key


def test_weights_are_those_of_full_precision_on_request(hubs: Hubs, trained: Trained, tmp_path: Path) -> None:
    config = hubs["llama"] / "config.json"
    tx.convert(trained(FLAT), tmp_path / "full", to="hf", config=config, weights="fp32")
    tx.convert(trained(FLAT), tmp_path / "both", to="hf", config=config, optimizer=True)
    masters = _state(tmp_path / "both")
    for name, value in load_file(tmp_path / "full" / hub.WEIGHTS).items():
        assert torch.equal(value, masters[f"optim/{name}/fp32"])


def test_what_the_run_says_of_itself(hubs: Hubs, trained: Trained) -> None:
    with tx.open(trained(JOBS["experts shared out"]), config=hubs["qwen3_moe"] / "config.json") as checkpoint:
        about = checkpoint.metadata["megatron"]
        assert about["iteration"] == 7
        assert about["counters"] == {"consumed_train_samples": 56}
        groups = {(group["weight_decay"], group["lr"]): group for group in checkpoint.metadata["param_groups"]}
        assert groups.keys() == {(trained_job.DECAY, trained_job.LR), (0.0, trained_job.LR)}
        for (decay, _), group in groups.items():
            assert group["betas"] == trained_job.BETAS
            assert group["step"] == 1
            assert not {"wd_mult", "is_expert_parallel"} & group.keys()
            assert all(("norm" in name) == (decay == 0) for name in group["params"])
        assert not any("bucket" in name for name in checkpoint.metadata["left_behind"])


def test_files_of_safetensors_keep_what_the_run_counts(hubs: Hubs, trained: Trained, tmp_path: Path) -> None:
    config = hubs["llama"] / "config.json"
    tx.convert(trained(FLAT), tmp_path / "hub", to="hf", config=config, optimizer=True)
    report = tx.convert(tmp_path / "hub", tmp_path / "back", to="torch_dist", config=config)
    assert report.notes == ()
    with tx.open(trained(FLAT), config=config) as begun, tx.open(tmp_path / "back") as back:
        wanted, found = (each.metadata["megatron"] for each in (begun, back))
        assert found["iteration"] == wanted["iteration"] == 7
        assert found["counters"] == wanted["counters"] == {"consumed_train_samples": 56}
    tx.convert(tmp_path / "hub", tmp_path / "universal", to="deepspeed-universal", config=config)
    with tx.open(tmp_path / "universal") as universal:
        assert universal.metadata["deepspeed"]["global_samples"] == 56
    report = tx.convert(tmp_path / "universal", tmp_path / "there", to="torch_dist:identity", config=config)
    assert not any("samples" in note for note in report.notes)
    tx.convert(trained(FLAT), tmp_path / "weights", to="hf", config=config)
    with tx.open(tmp_path / "weights") as weights:
        assert "megatron" not in weights.metadata


def test_weights_that_are_not_their_rounded_copies_are_refused(hubs: Hubs, trained: Trained, tmp_path: Path) -> None:
    """That they are is the proof that the order of the parameters in the buckets is right."""
    folder = _copied(trained(FLAT), tmp_path)
    _overwrite(folder, _flat("param", group=0), 8, torch.tensor([1.0]))
    config = hubs["llama"] / "config.json"
    tx.convert(folder, tmp_path / "weights", to="hf", config=config)
    with refuses("UNEQUAL_COPIES", "proves the order of their parameters"):
        tx.convert(folder, tmp_path / "out", to="hf", config=config, optimizer=True)
    assert not (tmp_path / "out").exists()


def test_ranks_that_keep_a_state_alike_must_agree(hubs: Hubs, trained: Trained, tmp_path: Path) -> None:
    folder = _copied(trained(FLAT), tmp_path)
    output = 32 * 24  # elements of a rank's output layer, which is first; the norm before it follows
    _overwrite(folder, _flat("exp_avg", group=1), output, torch.tensor([1.0]))
    with pytest.raises(Refused, match="several ranks keep this state of decoder"):
        tx.convert(folder, tmp_path / "out", to="hf", config=hubs["llama"] / "config.json", optimizer=True)


def _flat(state: str, group: int) -> str:
    buffer = f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
    return f"{buffer}.bucket_idx_0.{state}"


def _copied(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / "run"))


def _overwrite(folder: Path, key: str, element: int, values: torch.Tensor) -> None:
    """Change elements of a stored tensor of one dim."""
    iteration = folder / "iter_0000007"
    metadata: Any = read(iteration)
    chunks = metadata.state_dict_metadata[key].chunks
    number = next(
        at for at, chunk in enumerate(chunks) if 0 <= element - chunk.offsets[0] <= chunk.sizes[0] - len(values)
    )
    saved = torch.load(io.BytesIO(payload(iteration, key, number)))
    at = element - chunks[number].offsets[0]
    saved[at : at + len(values)] = values
    put(iteration, key, archive(saved), number)
