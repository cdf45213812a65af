"""Loading: every local shard equals the full tensor cut by torch itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import SGD, AdamW

import transaxle as tx
from tests.corpus.checksums import flip
from tests.live.ranks import ranks, run
from tests.live.refusals import refused
from tests.live.topologies import LLAMA, MOE, source
from tests.oracles import hub
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.reshard import reshard
from transaxle.live.save import save

FULL = {
    "rows": torch.arange(70, dtype=torch.float32).reshape(10, 7),
    "wide": torch.arange(3 * 4096, dtype=torch.bfloat16).reshape(3, 4096),
    "experts": torch.arange(10 * 6 * 7, dtype=torch.float32).reshape(10, 6, 7),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "codes": torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(torch.float8_e4m3fn),
}
STRIDED = _StridedShard(0, split_factor=2)
PLACEMENTS: dict[str, list[tuple[Any, Any]]] = {
    "rows": [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(1)), (STRIDED, Shard(0))],
    "wide": [(Shard(-1), Replicate()), (Shard(1), Shard(0)), (Replicate(), Replicate())],
    "experts": [(Shard(1), Shard(0)), (Shard(2), Shard(0)), (Shard(-1), Shard(1)), (Replicate(), Shard(0))],
    "scalar": [(Replicate(), Replicate())],
    "empty": [(Shard(0), Shard(1))],
    "codes": [(Shard(0), Shard(1)), (Replicate(), Shard(0))],
}
WORLDS = [
    (1, (1, 1)), (2, (2, 1)), (3, (1, 3)), (4, (1, 4)), (4, (2, 2)), (8, (2, 4)), (8, (4, 2)), (8, (2, 2, 2)),
]  # fmt: skip
"""Ranks and their mesh: 7 columns over 3, 10 experts over 4. A third dim in front is one of replicas (HSDP)."""


def on(shape: tuple[int, ...], placements: tuple[Any, Any]) -> tuple[Any, ...]:
    return (Replicate(),) * (len(shape) - len(placements)) + placements


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _dict(rank: int, world: int, folder: str, shape: tuple[int, ...], once: bool) -> dict[str, int]:
    mesh = init_device_mesh("cpu", shape)
    state, truth = {}, {}
    for name, choices in PLACEMENTS.items():
        for number, placements in enumerate(choices):
            key = f"{name}.{number}"
            cut = distribute_tensor(FULL[name].clone(), mesh, on(shape, placements), src_data_rank=None)
            truth[key] = _octets(cut.to_local()).clone()
            cut.to_local().view(-1).view(torch.uint8).fill_(77)
            state[key] = cut
    report = load(state, folder, broadcast_replicated=once)
    for key, value in state.items():
        assert torch.equal(_octets(value.to_local()), truth[key]), key
    assert report.bytes_written == report.bytes_needed == sum(len(t) for t in truth.values())
    return {"read": report.bytes_read, "needed": report.bytes_needed, "received": report.bytes_received}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("source")
    tensors = {f"{name}.{n}": FULL[name].clone() for name, choices in PLACEMENTS.items() for n in range(len(choices))}
    save_file(tensors, Path(place, "model.safetensors"))
    return str(place)


@pytest.mark.oracle
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(("world", "shape"), WORLDS)
def test_every_shard_equals_the_shard_that_torch_cuts(
    folder: str, world: int, shape: tuple[int, ...], once: bool
) -> None:
    found = run(world, _dict, folder, shape, once)
    if once and world > 1:
        assert sum(each["received"] for each in found) > 0
        assert sum(each["read"] for each in found) < sum(each["needed"] for each in found)
    if not once:
        assert all(each["received"] == 0 for each in found)


def _columns(rank: int, world: int, folder: str, rows: int, columns: int) -> float:
    mesh = init_device_mesh("cpu", (world,))
    state = {"w": distribute_tensor(torch.zeros(rows, columns), mesh, [Shard(1)], src_data_rank=None)}
    report = load(state, folder)
    return report.bytes_read / report.bytes_needed


@pytest.mark.parametrize(("rows", "columns", "most"), [(512, 32, 2.0), (512, 34, 1.0), (256, 4, 1.0)])
def test_gaps_are_read_only_where_they_are_short_and_numerous(
    tmp_path: Path, rows: int, columns: int, most: float
) -> None:
    save_file({"w": torch.rand(rows, columns)}, tmp_path / "model.safetensors")
    assert all(most - 0.01 < found <= most for found in run(2, _columns, str(tmp_path), rows, columns))


# Checksums of storages that several ranks read, each a part.


def rows(rank: int, world: int, path: str, cut: int) -> int | list[str]:
    del rank
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, DTensor] = {"w": distribute_tensor(torch.zeros(64, 40), mesh, [Shard(cut)])}
    try:
        return tx.load(state, path).bytes_read
    except tx.TransaxleError as error:
        return [each.code for each in error.refusals]


@pytest.mark.parametrize("cut", [0, 1])
def test_ranks_that_read_parts_of_a_storage_check_its_checksum_together(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "model.pt"
    torch.save({"w": torch.rand(64, 40)}, file)
    assert run(2, rows, str(file), cut) == [64 * 40 * 2, 64 * 40 * 2]  # each byte once
    flip(file)
    assert run(2, rows, str(file), cut) == [["CORRUPT"], ["CORRUPT"]]


# What does not fit is refused before anything is written: on every rank, with everything that is wrong.


def _bad(rank: int, world: int, source: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Any] = {
        "good": distribute_tensor(torch.full((4, 2), 5.0), mesh, [Shard(0)], src_data_rank=None),
        "tall": torch.full((3, 2), 5.0),
        "kind": torch.full((2,), 5),
    }
    if rank == 1:
        state["only here"] = torch.full((1,), 5.0)
    try:
        load(state, source)
    finally:
        for value in state.values():
            assert bool(((value.to_local() if hasattr(value, "to_local") else value) == 5).all())


def test_every_rank_lists_all_refusals_and_writes_nothing(tmp_path: Path) -> None:
    tensors = {"good": torch.arange(8.0).reshape(4, 2), "tall": torch.ones(2, 2), "kind": torch.ones(2)}
    save_file({**tensors, "more": torch.ones(1)}, tmp_path / "model.safetensors")
    want = {
        ("SHAPE_MISMATCH", "tall"), ("DTYPE_MISMATCH", "kind"), ("MISSING_TENSOR", "only here"),
        ("UNEXPECTED_TENSOR", "more"),
    }  # fmt: skip
    for error in ranks(2).refusals(_bad, str(tmp_path)):
        assert {(r.code, r.where.tensor) for r in error.refusals} == want
        assert all(r.hint for r in error.refusals if r.code.endswith("TENSOR"))


def _partial(rank: int, world: int, target: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    save({"w": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)}, target, to="safetensors")


def test_partial_placements_are_refused(tmp_path: Path) -> None:
    with refused("UNSUPPORTED"):
        run(2, _partial, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


class Rotary(nn.Module):
    """A buffer that no checkpoint holds, computed by its module."""

    def __init__(self, *, knows: bool) -> None:
        super().__init__()
        self.register_buffer("turns", torch.arange(3.0), persistent=False)
        if knows:
            self.reset_parameters = self._reset

    def _reset(self) -> None:
        with torch.no_grad():
            self.turns.copy_(torch.arange(3.0))  # type: ignore[operator]


def _meta(*, knows: bool = True) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 2), Rotary(knows=knows), nn.Linear(2, 2))


@pytest.mark.parametrize("strict", [True, False])
def test_no_meta_tensor_is_left(tmp_path: Path, strict: bool) -> None:
    full = nn.Linear(2, 2).state_dict()
    save_file({f"0.{name}": tensor for name, tensor in full.items()}, tmp_path / "model.safetensors")
    model = _meta()
    with pytest.raises(TransaxleError) as found:
        load(model, tmp_path, strict=strict)
    assert {r.where.tensor for r in found.value.refusals} == {"2.weight", "2.bias"}
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(TransaxleError) as found:
        load(_meta(knows=False), tmp_path, strict=strict)
    assert {r.where.tensor for r in found.value.refusals} == {"2.weight", "2.bias", "1.turns"}
    save_file({f"{n}.{k}": t + n for n in (0, 2) for k, t in full.items()}, tmp_path / "model.safetensors")
    load(model, tmp_path, strict=strict)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model[2].weight, full["weight"] + 2)  # type: ignore[index]
    assert torch.equal(model[1].turns, torch.arange(3.0))  # type: ignore[index]


def test_a_meta_tensor_of_a_state_dict_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with refused("UNSUPPORTED"):
        load({"w": torch.empty(2, device="meta")}, tmp_path)


def test_an_expanded_tensor_is_refused_as_a_target(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0), "w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model.safetensors")
    state = {"a": torch.zeros(3), "w": torch.zeros(3).expand(2, 3)}
    for ask in (
        lambda: load(state, tmp_path),
        lambda: reshard({n: torch.ones(t.shape) for n, t in state.items()}, state),
    ):
        with refused("UNSUPPORTED", tensors=["w"]):
            ask()
        assert not state["a"].any()


# What is refused names everything at once, with what to do; what is allowed leaves nothing unfilled.

SAFETENSORS = "safetensors"


class Net(nn.Module):
    """A tie, buffers of both kinds, a frozen parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.middle.bias.requires_grad_(False)
        self.scratch: torch.Tensor
        self.register_buffer("scratch", torch.full((3,), 5.0), persistent=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scratch.fill_(5.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.middle(self.table(tokens))))
        return found


class Outer(nn.Module):
    """A model whose part computes its own buffer, as rotary embeddings do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = Net(seed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(tokens)
        return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _refusals(found: pytest.ExceptionInfo[TransaxleError]) -> dict[tuple[str, str | None], str]:
    return {(refusal.code, refusal.where.tensor): refusal.hint for refusal in found.value.refusals}


@pytest.mark.parametrize("where", ["real", "meta", "part"])
@pytest.mark.parametrize("strict", [True, False])
def test_every_kind_of_model_is_filled(tmp_path: Path, where: str, strict: bool) -> None:
    truth = Outer(1)
    _step(truth, SGD(truth.parameters(), lr=0.1))  # its running statistics are not those of a new one
    save(truth, tmp_path / "out", to=SAFETENSORS)
    with torch.device("meta" if where == "meta" else "cpu"):
        model = Outer(2)
    if where == "part":
        model.net.middle.to("meta")
        model.net.norm.to("meta")
    load(model, tmp_path / "out", strict=strict)
    everything = dict(model.named_parameters()) | dict(model.named_buffers())
    assert not any(tensor.is_meta for tensor in everything.values())
    for name, tensor in (dict(truth.named_parameters()) | dict(truth.named_buffers())).items():
        assert torch.equal(everything[name], tensor), name
    assert model.net.head.weight is model.net.table.weight
    assert not model.net.middle.bias.requires_grad
    assert model.net.middle.weight.requires_grad


def test_all_refusals_come_at_once_with_hints(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2), "b.weight": torch.ones(2, 2), "c.weights": torch.ones(3)}
    save_file({**tensors, "x.bias": torch.ones(1)}, tmp_path / "model.safetensors")
    state = {"a.weight": torch.zeros(2).bfloat16(), "b.weight": torch.zeros(4), "c.weight": torch.zeros(3)}
    state["model.x.bias"] = torch.zeros(1)
    with pytest.raises(TransaxleError) as found:
        load(state, tmp_path)
    others = "Use strict=False to load all other tensors."
    assert _refusals(found) == {
        ("DTYPE_MISMATCH", "a.weight"): 'Use dtype="bf16" to cast the stored values to the parameter\'s dtype.',
        ("SHAPE_MISMATCH", "b.weight"): "Build the model with the sizes that the source has.",
        ("MISSING_TENSOR", "c.weight"): others,
        ("MISSING_TENSOR", "model.x.bias"): f"The closest name in the source is x.bias. {others}",
        ("UNEXPECTED_TENSOR", "c.weights"): others,
        ("UNEXPECTED_TENSOR", "x.bias"): f"The closest name in the model is model.x.bias. {others}",
    }
    assert all(not tensor.any() for tensor in state.values())


@pytest.mark.parametrize("told", ["config given", "no config"])
@pytest.mark.parametrize(
    ("config", "lacks", "missing"),
    [
        (LLAMA, "self_attn.o_proj", ("self_attn.o_proj.weight",)),
        (MOE, "layers.0.mlp.experts.1.", ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj")),
    ],
    ids=["names alike", "experts in one tensor"],
)
def test_an_incomplete_hub_folder_loads_what_is_complete(
    tmp_path: Path, config: dict[str, Any], lacks: str, missing: tuple[str, ...], told: str
) -> None:
    """All that is there is loaded; a tensor of which some expert lacks stays whole as it was."""
    folder = Path(source(tmp_path / "hub", config))
    model = hub.model(config, torch.float32)
    truth = type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
    stored = load_file(folder / hub.WEIGHTS)
    save_file({name: tensor for name, tensor in stored.items() if lacks not in name}, folder / hub.WEIGHTS)
    folder.joinpath("config.json").unlink()
    said = config if told == "config given" else None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TransaxleError) as found:
        load(model, folder, config=said)
    assert found.value.code == "MISSING_TENSOR"
    assert found.value.hint == "A shard may be missing. Use strict=False to load the tensors that exist."
    report = load(model, folder, strict=False, config=said)
    assert set(report.missing) == {name for name in before if name.endswith(missing)} != set()
    assert report.unexpected == ()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, (before if name in report.missing else truth)[name]), name


def test_the_checkpoint_of_another_model_is_recognized(tmp_path: Path) -> None:
    save(nn.Linear(3, 2), tmp_path / "out", to=SAFETENSORS)
    with pytest.raises(TransaxleError) as found:
        load(nn.ModuleDict({"encoder": nn.Linear(5, 5)}), tmp_path / "out")
    for said in (str(tmp_path / "out"), "model: encoder.weight", "source: bias, weight", "another model"):
        assert said in str(found.value)


@pytest.mark.parametrize("state", [None, [torch.ones(1)], "model"])
def test_objects_that_are_no_model_are_refused(tmp_path: Path, state: Any) -> None:
    for work in (load, save):
        with pytest.raises(TransaxleError) as found:
            work(state, tmp_path / "out")
        assert found.value.code in ("UNSUPPORTED", "IO")
    assert not (tmp_path / "out").exists()


def test_tensors_without_values_are_not_saved(tmp_path: Path) -> None:
    state = {"meta": torch.ones(2, device="meta"), "sparse": torch.eye(2).to_sparse(), "fine": torch.ones(2)}
    with refused("UNSUPPORTED", tensors=["meta", "sparse"]):
        save(state, tmp_path / "out", to=SAFETENSORS)
    with refused("UNSUPPORTED", tensors=["lazy"]):
        save({**state, "lazy": nn.LazyLinear(2).weight}, tmp_path / "out", to=SAFETENSORS)
    assert not (tmp_path / "out").exists()


def test_optimizer_state_that_would_stay_stale_is_refused(tmp_path: Path) -> None:
    """An optimizer that has made steps keeps no moments of another run; one that has made none is told of it."""
    save(Outer(1), tmp_path / "out", to=SAFETENSORS)
    model = Outer(2)
    optimizer = AdamW(model.parameters())
    with refused("MISSING_TENSOR", "there is no optimizer state to take"):
        load(model, tmp_path / "out", optimizer=optimizer)
    report = load(model, tmp_path / "out", optimizer=optimizer, strict=False)
    assert (report.states, report.missing) == (0, ("optimizer",))
    _step(model, optimizer)
    with pytest.raises(TransaxleError) as found:
        load(model, tmp_path / "out", optimizer=optimizer)
    assert ("MISSING_TENSOR", "optim/net.middle.weight/exp_avg") in _refusals(found)
    report = load(model, tmp_path / "out", optimizer=optimizer, strict=False)
    assert "optim/net.middle.weight/exp_avg" in report.missing


def test_a_deleted_optimizer_folder_is_refused(tmp_path: Path) -> None:
    """A model without it may be published; a run that means to go on must hear of it."""
    model, other, out = Outer(1), Outer(2), tmp_path / "out"
    optimizer = AdamW(model.parameters())
    _step(model, optimizer)
    saved = save(model, out, to=SAFETENSORS, optimizer=optimizer)
    assert str(saved).startswith(f"{out} · safetensors · identity · {saved.tensors} tensors · ")
    shutil.rmtree(out / "optimizer")
    with pytest.raises(TransaxleError) as found:
        load(other, out, optimizer=AdamW(other.parameters()))
    assert (found.value.code, found.value.where.file) == ("INCOMPLETE", "optimizer/optimizer.safetensors")
    report = load(other, out, optimizer=AdamW(other.parameters()), strict=False)
    assert str(report).startswith(f"{out} · identity · {report.tensors} tensors, 0 of the optimizer, 1 missing · ")
    assert load(other, out).tensors == report.tensors


def test_an_optimizer_without_some_parameters_needs_strict_false(tmp_path: Path) -> None:
    model = Outer(1)
    optimizer = AdamW(model.parameters())
    _step(model, optimizer)
    save(model, tmp_path / "out", to=SAFETENSORS, optimizer=optimizer)
    other = Outer(2)
    fewer = AdamW(other.net.middle.parameters())
    with pytest.raises(TransaxleError) as found:
        load(other, tmp_path / "out", optimizer=fewer)
    assert ("UNEXPECTED_TENSOR", "optim/net.table.weight/exp_avg") in _refusals(found)
    load(other, tmp_path / "out", optimizer=fewer, strict=False)
    moments = fewer.state[other.net.middle.weight]
    assert torch.equal(moments["exp_avg"], optimizer.state[model.net.middle.weight]["exp_avg"])
    stranger = AdamW(Outer(3).parameters())
    with pytest.raises(TransaxleError) as found:
        load(other, tmp_path / "out", optimizer=stranger)
    assert "after fully_shard" in found.value.hint


class Scaled(nn.Embedding):
    """A module whose initialiser, that of the class it comes from, knows nothing of its buffer."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)


def test_a_meta_buffer_that_its_module_does_not_initialise_is_refused(tmp_path: Path) -> None:
    save(nn.Sequential(Scaled()), tmp_path / "saved", to="dcp")
    with torch.device("meta"):
        model = nn.Sequential(Scaled())
    with pytest.raises(TransaxleError, match="does not give it values") as caught:
        load(model, tmp_path / "saved")
    assert set(_refusals(caught)) == {("MISSING_TENSOR", "0.scale")}
