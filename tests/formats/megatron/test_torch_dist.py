"""Megatron's distributed checkpoints: what megatron-core itself saves is read, and it loads what we write."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import transaxle as tx
from tests.formats.megatron import gpt_job
from tests.formats.refusals import refuses
from tests.journeys.trained_models import hub_folder
from tests.live.ranks import run, stop_all
from tests.oracles import hub
from transaxle.errors import Refused

_SIZES = {
    "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 50, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama"},
    "tied": {**_SIZES, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**_SIZES, "model_type": "qwen2", "head_dim": 6, "tie_word_embeddings": False},
    "qwen3_moe": {**_SIZES, **_EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": []},
    "mixed": {**_SIZES, **_EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [0, 2]},
}
JOBS = [
    ("llama", 1, 1, 1),
    ("llama", 2, 2, 1),
    ("tied", 1, 2, 1),
    ("qwen2", 2, 1, 1),
    ("qwen3_moe", 1, 1, 2),
    ("mixed", 1, 2, 1),
]
"""Model, and the degrees of tensor, pipeline and expert parallelism."""

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    stop_all()


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A hub folder of each model."""
    folders = {}
    for number, (name, sizes) in enumerate(MODELS.items()):
        config, tensors = hub.make(sizes, number)
        folder = folders[name] = tmp_path_factory.mktemp(name)
        Path(folder, "config.json").write_text(json.dumps(config))
        save_file({key: value.float() for key, value in tensors.items()}, folder / hub.WEIGHTS)
    return folders


@pytest.mark.oracle
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_what_a_job_saved_becomes_the_hub_weights_that_it_had(
    job: tuple[str, int, int, int], hubs: dict[str, Path], tmp_path: Path
) -> None:
    name, tp, pp, ep = job
    source, folder = hubs[name], tmp_path / "run" / "iter_0000003"
    run(tp * pp * ep, gpt_job.save, MODELS[name], str(source), str(folder), tp, pp, ep)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("3")
    expected = load_file(source / hub.WEIGHTS)
    for number, place in enumerate((folder.parent, folder)):
        out = tmp_path / str(number)
        report = tx.convert(place, out, to="hf", config=source / "config.json")
        assert report.format == "safetensors"
        found = load_file(out / hub.WEIGHTS)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a distributed checkpoint, as torch reads them."""
    items = FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    state = {
        name: torch.zeros(item.size, dtype=item.properties.dtype)
        for name, item in items
        if isinstance(item, TensorStorageMetadata)
    }
    load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.oracle
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_job_loads_what_is_written_from_hub_weights(
    job: tuple[str, int, int, int], hubs: dict[str, Path], tmp_path: Path
) -> None:
    name, tp, pp, ep = job
    out = tmp_path / "out"
    report = tx.convert(hubs[name], out, to="torch_dist")
    assert report.dialect == ("megatron_layers" if name == "mixed" else "megatron_dist")
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    differ = run(tp * pp * ep, gpt_job.load, MODELS[name], str(hubs[name]), str(out / "release"), tp, pp, ep)
    assert differ == [[]] * (tp * pp * ep)


@pytest.mark.parametrize("name", MODELS)
def test_a_round_gives_the_same_files(name: str, hubs: dict[str, Path], tmp_path: Path) -> None:
    tx.convert(hubs[name], tmp_path / "there", to="torch_dist")
    assert tx.verify(tmp_path / "there")
    tx.convert(tmp_path / "there", tmp_path / "back", to="hf")
    expected, found = (load_file(folder / hub.WEIGHTS) for folder in (hubs[name], tmp_path / "back"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    tx.convert(tmp_path / "back", tmp_path / "again", to="torch_dist")
    first, second = (sorted(tmp_path.glob(f"{side}/release/*")) for side in ("there", "again"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_the_model_and_the_run_are_told_without_a_config(hubs: dict[str, Path], tmp_path: Path) -> None:
    tx.convert(hubs["qwen3_moe"], tmp_path / "out", to="torch_dist")
    (tmp_path / "out" / "config.json").unlink()
    (tmp_path / "out" / "transaxle.json").unlink()
    with tx.open(tmp_path / "out") as checkpoint:
        assert checkpoint.family == "qwen3_moe"
        assert {key: checkpoint.config[key] for key in _SIZES if key in checkpoint.config} == {
            key: value for key, value in _SIZES.items() if key not in ("max_position_embeddings", "rms_norm_eps")
        }
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf")
    assert tx.diff(hubs["qwen3_moe"], tmp_path / "back")


@pytest.mark.parametrize("given", [{}, {"tp": 2, "make_vocab_size_divisible_by": 6}, {"tp": 4}], ids=str)
def test_the_vocabulary_is_padded_on_request(given: dict[str, Any], hubs: dict[str, Path], tmp_path: Path) -> None:
    """And otherwise by Megatron: a run of any tensor parallelism takes `padded_vocab_size` for what it needs itself."""
    rows = {0: 50, 1: 512, 2: 60}[len(given)]
    tx.convert(hubs["tied"], tmp_path / "out", to="torch_dist", **given)
    with tx.open(tmp_path / "out") as checkpoint:
        assert checkpoint["embedding.word_embeddings.weight"].shape[0] == rows
    state = torch.load(tmp_path / "out/release/common.pt", weights_only=False)
    assert vars(state["args"]).get("padded_vocab_size") == (rows if given else None)
    assert state["args"].vocab_size == _SIZES["vocab_size"]
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf")
    assert tx.diff(hubs["tied"], tmp_path / "back")
    tx.convert(tmp_path / "out", tmp_path / "again", to="torch_dist")
    assert (tmp_path / "again/release/common.pt").read_bytes() == (tmp_path / "out/release/common.pt").read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("by_name", [False, True])
def test_the_state_of_a_run_is_an_item_from_0_19_on(
    hubs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    """Its arguments have members of enums, which no other pickle may name; up to Python 3.11.3 written by name."""
    tx.convert(hubs["llama"], tmp_path / "out", to="torch_dist")
    with tx.open(tmp_path / "out") as checkpoint:
        read = {
            name: torch.frombuffer(bytearray(each.tobytes()), dtype=torch.float32) for name, each in checkpoint.items()
        }
        tensors = {name: value.reshape(checkpoint[name].shape) for name, value in read.items()}
    state = torch.load(tmp_path / "out/release/common.pt", weights_only=False)
    state["args"].exit_signal = signal.SIGTERM
    extra = {"common_state/shard_0_1": [state], "rng_state/shard_0_1": [{"torch": signal.SIGTERM}]}
    folder = tmp_path / "run" / "release"
    planner = DefaultSavePlanner(flatten_state_dict=False)
    if by_name:
        monkeypatch.setattr(Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    save({**tensors, **extra}, checkpoint_id=folder, no_dist=True, planner=planner)
    shutil.copy(tmp_path / "out/release/metadata.json", folder)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("release")
    with tx.open(tmp_path / "run") as checkpoint:
        assert checkpoint.metadata["megatron"]["arguments"]["num_layers"] == 4
        assert checkpoint.metadata["left_behind"].keys() == {"rng_state"}
    tx.convert(tmp_path / "run", tmp_path / "back", to="hf")
    assert tx.diff(hubs["llama"], tmp_path / "back")


@pytest.mark.parametrize("lost", ["common.pt", "metadata.json"])
def test_tensors_of_a_folder_without_megatrons_own_files(lost: str, hubs: dict[str, Path], tmp_path: Path) -> None:
    """DCP reads them alone; the two keys that each norm has in Megatron's folders are of one tensor."""
    tx.convert(hubs["qwen3_moe"], tmp_path / "out", to="torch_dist")
    (tmp_path / "out/release" / lost).unlink()
    with refuses("INCOMPLETE", "the copy is not whole", hint="/out/release --format dcp"):
        tx.open(tmp_path / "out")
    tx.convert(tmp_path / "out/release", tmp_path / "back", to="hf", format="dcp")
    assert tx.diff(hubs["qwen3_moe"], tmp_path / "back")


def test_a_folder_for_any_ranks_is_not_for_some(hubs: dict[str, Path], tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{"pp": 2}, {"tp": 2, "ep": 2}]
    for given in cases:
        with refuses("UNSUPPORTED", "Omit --pp (pp=) and --ep (ep=)"):
            tx.convert(hubs["llama"], tmp_path / "out", to="torch_dist", **given)


def test_what_the_shares_of_experts_add_up_to_is_told(hubs: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads(Path(hubs["qwen3_moe"], "config.json").read_text())
    told = {}
    for number, (normed, scores) in enumerate(((True, None), (False, "softmax"), (False, "sigmoid"), (None, None))):
        said = {"norm_topk_prob": normed, "scoring_func": scores}
        given = {**config, **said}
        given = {key: value for key, value in given.items() if key not in said or said[key] is not None}
        tx.convert(hubs["qwen3_moe"], tmp_path / str(number), to="torch_dist", config=given)
        state = torch.load(tmp_path / str(number) / "release/common.pt", weights_only=False)
        told[normed, scores] = vars(state["args"]).get("moe_router_pre_softmax")
    assert list(told.values()) == [False, True, None, None]


@pytest.mark.parametrize("ahead", [0, 1])
def test_arguments_are_those_of_the_tensors_that_are_there(ahead: int, tmp_path: Path) -> None:
    """Megatron takes them with `--use-checkpoint-args`; configs name layers ahead that transformers does not store."""
    hub_folder("deepseek_v3", tmp_path / "hub", ahead=ahead)
    tx.convert(tmp_path / "hub", tmp_path / "out", to="torch_dist")
    found = vars(torch.load(tmp_path / "out/release/common.pt", weights_only=False)["args"])
    assert json.loads((tmp_path / "hub/config.json").read_text())["num_nextn_predict_layers"] == 1
    assert found.get("mtp_num_layers") == (ahead or None)
    assert found["group_query_attention"] is (found["num_query_groups"] != found["num_attention_heads"])
    assert found["moe_router_enable_expert_bias"] is True
    assert found["moe_router_topk_scaling_factor"] == 2.5
    assert found["moe_shared_expert_intermediate_size"] == 16


def test_layers_that_differ_do_not_fit_into_one_tensor(hubs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(Refused, match="holds for some of them only"):
        tx.convert(hubs["mixed"], tmp_path / "out", to="torch_dist:megatron_dist")
    assert not (tmp_path / "out").exists()
