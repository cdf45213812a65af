"""`dcp.load` from any checkpoint and `dcp.save` into any, with torch's planners: sharded models against whole ones."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

import transaxle as tx
from tests.live import topologies
from tests.live.ranks import run
from tests.live.topologies import ALONE, FSDP, FSDP_TP, HSDP, MOE, TP, build, full
from tests.oracles.hub import WEIGHTS

Tensors = dict[str, torch.Tensor]
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
OPTIMIZER, MODEL = "optimizer", "model"


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts as transformers saves it, in float32."""
    return Path(topologies.source(tmp_path_factory.mktemp("dcp") / "hub", MOE))


def _whole(folder: Path) -> Tensors:
    """The model's tensors, in one process."""
    model = topologies.build(MOE, ALONE, meta=False)
    tx.load(model, folder)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _load(rank: int, world: int, how: str, source: str, truth: Tensors, options: dict[str, Any]) -> float:
    """Load into a model that is divided, compare every tensor, and return bytes read per byte of this rank's shards."""
    model = build(MOE, how, meta=False)
    state = model.state_dict()
    for tensor in state.values():
        _local(tensor).detach().fill_(-1)
    reader = tx.dcp.Reader(source, "transformers", **options)
    with torch.no_grad():
        if how == FSDP_TP:  # torch's planner asks for other rows of packed projections
            with pytest.raises(CheckpointException, match="several runs of rows"):
                load(dict(state), storage_reader=tx.dcp.Reader(source, "transformers", **options))
        load(tx.as_runs(state) if how in (TP, FSDP_TP) else state, storage_reader=reader)
    assert state.keys() == truth.keys()
    for name, tensor in state.items():
        assert torch.equal(full(tensor), truth[name]), name
    return reader.bytes_read / sum(_local(tensor).nbytes for tensor in state.values())


SOURCES = ("hf", "dcp:torchtitan", "dcp:automodel", "torch_dist", "deepspeed-universal:transformers", "torch:stacked")


@pytest.mark.parametrize("target", SOURCES)
def test_sharded_models_load_any_checkpoint(hub_folder: Path, tmp_path: Path, target: str) -> None:
    tx.convert(hub_folder, tmp_path / "source", to=target)
    truth = _whole(hub_folder)
    for how, world in ((FSDP, 2), (FSDP_TP, 4)) if target in ("hf", "dcp:torchtitan") else ((FSDP, 2),):
        assert max(run(world, _load, how, str(tmp_path / "source"), truth, {})) <= 1.05


@pytest.mark.oracle
@pytest.mark.parametrize("target", SOURCES)
@pytest.mark.parametrize(("how", "world"), [(FSDP, 1), (TP, 2), (HSDP, 4), (FSDP, 8), (FSDP_TP, 8)])
def test_every_division_loads_any_checkpoint(
    hub_folder: Path, tmp_path: Path, target: str, how: str, world: int
) -> None:
    tx.convert(hub_folder, tmp_path / "source", to=target)
    assert max(run(world, _load, how, str(tmp_path / "source"), _whole(hub_folder), {})) <= 1.05


def _expert_parallel(rank: int, world: int, source: str, target: str, truth: Tensors) -> float:
    """Load experts that are divided over one mesh dim, and each over another; compare them, and save them as files."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
    state = {
        name: distribute_tensor(
            torch.full_like(value, -1), mesh,
            [Shard(1), Shard(0)] if ".experts." in name else [Shard(0), Replicate()], src_data_rank=None,
        )
        for name, value in truth.items()
    }  # fmt: skip
    reader = tx.dcp.Reader(source, "transformers")
    load(state, storage_reader=reader)
    for name, tensor in state.items():
        assert torch.equal(full(tensor), truth[name]), name
    save(state, storage_writer=tx.dcp.Writer(target, to="hf", dialect="transformers", config=MOE))
    return reader.bytes_read / sum(_local(tensor).nbytes for tensor in state.values())


@pytest.mark.parametrize(
    ("target", "world"),
    [("hf", 4), *(pytest.param("torch_dist", world, marks=pytest.mark.oracle) for world in (2, 8))],
)
def test_expert_parallel_models_load_and_save(hub_folder: Path, tmp_path: Path, target: str, world: int) -> None:
    tx.convert(hub_folder, tmp_path / "source", to=target)
    out = tmp_path / "out"
    assert max(run(world, _expert_parallel, str(tmp_path / "source"), str(out), _whole(hub_folder))) <= 1.05
    assert tx.diff(hub_folder, out).equal


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_are_cast_and_decoded_only_on_request(hub_folder: Path, tmp_path: Path) -> None:
    tx.convert(hub_folder, tmp_path / "half", to="hf", dtype="bf16")
    state = build(MOE, ALONE, meta=False).state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(CheckpointException) as caught:
        load(state, storage_reader=tx.dcp.Reader(tmp_path / "half", "transformers"))
    assert "DTYPE_MISMATCH" in str(caught.value)
    assert 'dtype="fp32"' in str(caught.value)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    load(state, storage_reader=tx.dcp.Reader(tmp_path / "half", "transformers", dtype="fp32"))
    truth = _whole(hub_folder)
    assert all(torch.equal(tensor, truth[name].bfloat16().float()) for name, tensor in state.items())
    tx.convert(hub_folder, tmp_path / "codes", to="hf", encode="mxfp8", skip="*down_proj*")
    load(state, storage_reader=tx.dcp.Reader(tmp_path / "codes", "transformers", decode="fp32"))
    with tx.open(tmp_path / "codes", decode="fp32") as decoded:
        for name, tensor in decoded.as_dialect("transformers").items():
            assert state[name].numpy().tobytes() == tensor.tobytes()


def _trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made a step."""
    optimizer = topologies.adamw(model)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, (number + 1) / 1000)
    optimizer.step()
    return optimizer


def _save(rank: int, world: int, how: str, folder: str, to: str, kind: str) -> Tensors:
    """Save a divided model and its optimizer by torch's function, and return all values in full."""
    model = build(MOE, how, meta=False)
    optimizer = _trained(model)
    truth = topologies.gathered(model, optimizer)
    writer = tx.dcp.Writer(to=to, model=MODEL, optimizer=OPTIMIZER, leave_out=["step"], config=MOE)
    states = get_optimizer_state_dict(model, optimizer)
    state = {MODEL: model.state_dict(), OPTIMIZER: states, "step": {"count": 7}}
    if kind == "sync":
        save(state, storage_writer=writer, checkpoint_id=folder)
        assert writer.report is not None
        assert writer.report.bytes_own <= 1.05 * sum(tensor.nbytes for tensor in truth.values())
    else:
        job = async_save(
            state, storage_writer=writer, checkpoint_id=folder, async_checkpointer_type=AsyncCheckpointerType[kind]
        )
        assert isinstance(job, Future)
        with torch.no_grad():
            for tensor in model.parameters():
                _local(tensor).fill_(-9)  # what was staged is saved
        job.result()
    return truth


def _resume(rank: int, world: int, how: str, folder: str, truth: Tensors) -> None:
    """Load weights, optimizer state and its settings into another division."""
    model = build(MOE, how, meta=False)
    optimizer = _trained(model)
    state = {MODEL: model.state_dict(), OPTIMIZER: get_optimizer_state_dict(model, optimizer)}
    for group in state[OPTIMIZER]["param_groups"]:
        group["lr"] = -1.0
    with torch.no_grad():
        for tensors in (state[MODEL], *state[OPTIMIZER]["state"].values()):
            for tensor in tensors.values():
                _local(tensor).detach().fill_(-1)
        reader = tx.dcp.Reader(folder, "transformers", model=MODEL, optimizer=OPTIMIZER)
        asked = tx.as_runs(state)
        load(asked, storage_reader=reader)
    for name, tensor in state[MODEL].items():
        assert torch.equal(full(tensor), truth[name]), name
    for name, tensors in state[OPTIMIZER]["state"].items():
        for slot, tensor in tensors.items():
            assert torch.equal(full(tensor), truth[f"{name}/{slot}"]), (name, slot)
    assert {group["lr"] for group in asked[OPTIMIZER]["param_groups"]} == {1e-3, 3e-3}


@pytest.mark.parametrize("kind", ["sync", "THREAD", "PROCESS"])
def test_a_training_state_is_saved_in_any_form_and_resumed_elsewhere(tmp_path: Path, kind: str) -> None:
    to = {"sync": "dcp:torchtitan", "THREAD": "dcp:automodel", "PROCESS": "deepspeed-universal:transformers"}[kind]
    folder = str(tmp_path / "out")
    truth, *_ = run(2, _save, FSDP, folder, to, kind)
    assert tx.verify(folder).ok
    run(2 if kind == "sync" else 1, _resume, TP if kind == "sync" else ALONE, folder, truth)


GROUPS, PARAMS, LR = "param_groups", "params", "lr"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["hf", "dcp:torchtitan", "deepspeed-universal:transformers"])
@pytest.mark.parametrize("flat", [False, True])
def test_parameter_groups_have_their_parameters_and_settings(tmp_path: Path, to: str, flat: bool) -> None:
    """torch flattens a list of groups by number, or a flattened optimizer by parameter; a new optimizer takes both."""
    model = build(MOE, ALONE, meta=False)
    optimizer = _trained(model)
    states = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    writer = tx.dcp.Writer(tmp_path / "out", to=to, model=MODEL, optimizer=OPTIMIZER, config=MOE)
    save({MODEL: model.state_dict(), OPTIMIZER: states}, storage_writer=writer)
    tx.save(model, tmp_path / "expected", to=to, optimizer=optimizer, config=MOE)
    with tx.open(tmp_path / "out") as checkpoint, tx.open(tmp_path / "expected") as expected:
        groups, expected_groups = checkpoint.metadata[GROUPS], expected.metadata[GROUPS]
        assert [{*group[PARAMS]} for group in groups] == [{*group[PARAMS]} for group in expected_groups]
        assert [group[LR] for group in groups] == [1e-3, 3e-3]
    resumed = topologies.adamw(model)
    for group in resumed.param_groups:
        group[LR] = group["weight_decay"] = 0.77
    tx.load(model, tmp_path / "out", optimizer=resumed)
    assert [(group[LR], group["weight_decay"]) for group in resumed.param_groups] == [
        (group[LR], group["weight_decay"]) for group in optimizer.param_groups
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_parameter_in_no_group_is_refused(tmp_path: Path) -> None:
    """torch saves the groups of one rank only, so under a pipeline the parameters of other ranks are in none."""
    model = build(MOE, ALONE, meta=False)
    states: Any = get_optimizer_state_dict(model, _trained(model))
    lost = states[GROUPS][0][PARAMS].pop()
    writer = tx.dcp.Writer(tmp_path / "out", model=MODEL, optimizer=OPTIMIZER, config=MOE)
    with pytest.raises(CheckpointException, match="MISSING_TENSOR") as caught:
        save({MODEL: model.state_dict(), OPTIMIZER: states}, storage_writer=writer)
    assert lost in str(caught.value)
    assert "flatten_optimizer_state_dict=True" in str(caught.value)
    states[GROUPS][0][PARAMS].append(lost)
    states[GROUPS][0]["betas"] = [torch.tensor(0.9), torch.tensor(0.95)]
    with pytest.raises(CheckpointException, match="a setting of several tensors"):
        save({MODEL: model.state_dict(), OPTIMIZER: states}, storage_writer=writer)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("entry", [3, torch.arange(3), "abc", Path("x"), {"loader": [1, Path("x")]}])
def test_an_entry_is_left_out_whatever_it_is(hub_folder: Path, tmp_path: Path, entry: Any) -> None:
    for to, key in (("hf", MODEL), ("dcp:identity", MODEL), ("dcp:identity", "")):
        out = tmp_path / f"{to.replace(':', '-')}-{key}"
        weights: Any = _whole(hub_folder)
        state = {key: weights, "odd": entry} if key else {**weights, "odd": entry}
        save(state, storage_writer=tx.dcp.Writer(out, to=to, config=MOE, leave_out=["odd"], model=key))
        with tx.open(out) as checkpoint:
            assert "odd" not in str([*checkpoint])


def _save_weights(rank: int, world: int, how: str, folder: str, kind: str) -> None:
    model = build(MOE, how, meta=False)
    tx.load(model, Path(folder).parent / "hub")
    writer = tx.dcp.Writer(folder, to="hf", config=MOE)
    if kind == "sync":
        save(tx.as_runs(model.state_dict()), storage_writer=writer)
    else:
        job = async_save(
            tx.as_runs(model.state_dict()), storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType[kind]
        )
        assert isinstance(job, Future)
        job.result()


@pytest.mark.parametrize("how", [FSDP, TP])
def test_a_hub_folder_is_that_of_the_model(hub_folder: Path, how: str) -> None:
    target = hub_folder.parent / how
    run(2, _save_weights, how, str(target), "sync")
    assert tx.diff(hub_folder, target).equal
    assert (target / WEIGHTS).exists()


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["sync", "THREAD", "PROCESS"])
@pytest.mark.parametrize(("how", "world"), [(FSDP, 1), (HSDP, 4), (FSDP_TP, 4), (FSDP, 8), (TP, 4)])
def test_every_division_saves_a_hub_folder(hub_folder: Path, tmp_path: Path, how: str, world: int, kind: str) -> None:
    (tmp_path / "hub").symlink_to(hub_folder)
    run(world, _save_weights, how, str(tmp_path / "out"), kind)
    assert tx.diff(hub_folder, tmp_path / "out").equal


def _foreign(rank: int, world: int, folder: str) -> list[str]:
    """Save what the writer has no place for, and load what the reader does not have."""
    mesh = init_device_mesh("cpu", (world,))
    cut = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)], src_data_rank=None)
    said = []
    attempts: list[dict[str, Any]] = [
        {"state": {"model": {"w": cut}, "extra": {"n": 3}}, "model": "model"},
        {"state": {"w": cut, "optim": {"state": {"w": {"exp_avg": cut}}}}},
        {"state": {"w": cut, "odd": Path()}},
    ]
    for attempt in attempts:
        state = attempt.pop("state")
        writer = tx.dcp.Writer(folder, to="dcp:identity", **attempt)
        try:
            save(state, storage_writer=writer)
        except CheckpointException as error:
            said.append(str(error))
        assert not Path(folder).exists()
    return said


def test_entries_without_a_place_are_refused(tmp_path: Path) -> None:
    for said in run(2, _foreign, str(tmp_path / "out")):
        assert [code for text in said for code in ("UNEXPECTED_TENSOR", "UNSUPPORTED") if code in text] == [
            "UNEXPECTED_TENSOR", "UNEXPECTED_TENSOR", "UNSUPPORTED",
        ]  # fmt: skip
        assert 'leave_out=["extra"]' in said[0]
        assert 'optimizer="optim"' in said[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("entry", [{"step": 3}, {"step": torch.tensor(3)}, {"loader": "abc"}, {"x": torch.ones(2)}])
def test_a_hub_folder_gets_no_entries_that_are_not_the_models(hub_folder: Path, tmp_path: Path, entry: Any) -> None:
    weights = _whole(hub_folder)
    state = {**weights, "train_state": entry}
    for to in ("hf", "torch_dist"):
        with pytest.raises(CheckpointException, match="UNEXPECTED_TENSOR") as caught:
            save(state, storage_writer=tx.dcp.Writer(tmp_path / to, to=to, config=MOE))
        assert 'leave_out=["train_state"]' in str(caught.value)
        assert not (tmp_path / to).exists()
    out = tmp_path / "runs" / "step-3"  # torch's own writer creates parents too
    save(state, storage_writer=tx.dcp.Writer(out, to="hf", config=MOE, leave_out=["train_state"]))
    assert tx.diff(hub_folder, out).equal
    save(state, storage_writer=tx.dcp.Writer(tmp_path / "kept", to="dcp:identity"))
    with tx.open(tmp_path / "kept") as kept:
        assert [name for name in kept if name not in weights] == [
            f"train_state.{key}" for key, value in entry.items() if not isinstance(value, str)
        ]
    nested = {MODEL: {**weights, "score.weight": torch.ones(2, 3)}}
    save(nested, storage_writer=tx.dcp.Writer(tmp_path / "headed", to="hf", config=MOE, model=MODEL))
    with tx.open(tmp_path / "headed") as headed:
        assert "score.weight" in headed


def _load_parts(rank: int, world: int, source: str) -> list[str]:
    """Load half of a model on each rank, then less than that."""
    state = build(MOE, ALONE, meta=False).state_dict()
    names = sorted(state)[rank::world]
    load({name: state[name] for name in names}, storage_reader=tx.dcp.Reader(source, "transformers"))
    rest = {name: state[name] for name in names if "norm" not in name}
    with pytest.raises(CheckpointException, match="UNEXPECTED_TENSOR") as caught:
        load(rest, storage_reader=tx.dcp.Reader(source, "transformers"))
    load(rest, storage_reader=tx.dcp.Reader(source, "transformers", strict=False))
    return [name for name in state if name in str(caught.value)]


def test_what_no_rank_asks_for_is_refused(hub_folder: Path) -> None:
    missing = [name for name in _whole(hub_folder) if "norm" in name]
    assert run(2, _load_parts, str(hub_folder)) == [missing, missing]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dialect", ["transformers", "torchtitan"])
def test_a_head_of_its_own_is_refused_by_a_tied_model(tmp_path: Path, dialect: str) -> None:
    for tied in ("", "one name", "two names"):
        folder = tmp_path / tied.replace(" ", "-")
        model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=bool(tied)))
        model.save_pretrained(folder)
        if tied == "two names":
            tensors = load_file(folder / WEIGHTS)
            head = tensors["model.embed_tokens.weight"].clone()
            save_file({**tensors, "lm_head.weight": head}, folder / WEIGHTS, {"format": "pt"})
        with tx.open(folder) as checkpoint:
            state = checkpoint.as_dialect(dialect).state_dict()
        state.pop("lm_head.weight", None)
        reader = tx.dcp.Reader(folder, dialect)
        if tied:
            load(state, storage_reader=reader)
        else:
            with pytest.raises(CheckpointException, match=r"UNEXPECTED_TENSOR(?s:.)*lm_head\.weight"):
                load(state, storage_reader=reader)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_wrong_arguments_and_paths_say_so(hub_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'decod'"):
        tx.dcp.Reader(hub_folder, decod="bf16")
    with pytest.raises(TypeError, match="Did you mean 'shard_size'"):
        tx.dcp.Writer(tmp_path / "out", shardsize=3)
    with tx.open(hub_folder) as checkpoint, pytest.raises(TypeError, match="already open"):
        tx.dcp.Reader(checkpoint, decode="bf16")
    state = {"w": torch.zeros(3)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: w"):
        load(state, storage_reader=tx.dcp.Reader(hub_folder))
    with pytest.raises(CheckpointException, match="no such file or folder"):
        load(state, storage_reader=tx.dcp.Reader(tmp_path / "none"))


def _in_pairs(rank: int, world: int, folder: str, source: str) -> None:
    """Save and load with a process group that has two of the ranks."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    own_pair = pairs[rank // 2]
    state = build(MOE, ALONE, meta=False).state_dict()
    load(state, storage_reader=tx.dcp.Reader(source, "transformers"), process_group=own_pair)
    writer = tx.dcp.Writer(f"{folder}-{rank // 2}", to="hf", config=MOE, group=own_pair)
    save(state, storage_writer=writer, process_group=own_pair)
    other_group = tx.dcp.Writer(f"{folder}-refused", to="hf", config=MOE)
    with pytest.raises(CheckpointException, match="Give Writer the group="):
        save(state, storage_writer=other_group, process_group=own_pair)


def test_some_of_the_ranks_save_and_load(hub_folder: Path, tmp_path: Path) -> None:
    run(4, _in_pairs, str(tmp_path / "out"), str(hub_folder))
    assert tx.diff(hub_folder, tmp_path / "out-0").equal
    assert tx.diff(hub_folder, tmp_path / "out-1").equal
    assert not (tmp_path / "out-refused").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_settings_of_other_names_are_neither_saved_nor_ignored(tmp_path: Path) -> None:
    """A planner translates tensors, but not the parameter names in settings; the learning rate would be lost."""
    model = build(MOE, ALONE, meta=False)
    optimizer = _trained(model)
    states: Any = get_optimizer_state_dict(model, optimizer)
    for state in ({**model.state_dict(), OPTIMIZER: states}, {MODEL: model.state_dict(), OPTIMIZER: states}):
        with pytest.raises(CheckpointException, match="which no weight has in the dialect torchtitan"):
            save(state, checkpoint_id=tmp_path / "out", planner=tx.SavePlanner("torchtitan", config=MOE))
    without = {**model.state_dict(), OPTIMIZER: {"state": states["state"]}}
    save(without, checkpoint_id=tmp_path / "weights", planner=tx.SavePlanner("torchtitan", config=MOE))
    for group in states[GROUPS]:
        group[PARAMS] = [f"renamed.{name}" for name in group[PARAMS]]
    save({MODEL: model.state_dict(), OPTIMIZER: states}, checkpoint_id=tmp_path / "renamed")
    with pytest.raises(tx.TransaxleError, match="none of its parameter groups has this parameter") as caught:
        tx.load(model, tmp_path / "renamed", optimizer=optimizer)
    assert {refusal.where.tensor for refusal in caught.value.refusals} == {"optimizer group 0", "optimizer group 1"}
    for group in optimizer.param_groups:
        group[LR] = 0.5
    tx.load(model, tmp_path / "renamed", optimizer=optimizer, strict=False)
    assert {group[LR] for group in optimizer.param_groups} == {0.5}
