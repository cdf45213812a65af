"""Where a state dict shows copies, values reach the parameters all the same; what could not is refused beforehand.

Parameters are compared by `named_parameters`, never through the state dicts that are in question.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import ranks, run
from tests.live.refusals import refused
from tests.live.topologies import full, same
from tests.oracles.quiet import quiet
from transaxle.errors import TransaxleError
from transaxle.live.global_tensors import census
from transaxle.live.load import load
from transaxle.live.reshard import reshard
from transaxle.live.save import save
from transaxle.live.transport.world import World


class Fused(nn.Module):
    """One weight that its state dict shows as two, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 6, bias=False)
        self.register_state_dict_post_hook(self._cut)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._joined)  # type: ignore[no-untyped-call]

    @staticmethod
    def _cut(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        both = state.pop(f"{prefix}both.weight")
        state[f"{prefix}even"], state[f"{prefix}odd"] = both[::2].clone(), both[1::2].clone()

    @staticmethod
    def _joined(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        pair = [state.pop(f"{prefix}{name}") for name in ("even", "odd")]
        state[f"{prefix}both.weight"] = torch.stack(pair, 1).flatten(0, 1)


class Packed(nn.Module):
    """A weight that is kept transposed, and a table that is no parameter, by overriding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.table = torch.randn(4)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}turned"] = self.weight.detach().t().contiguous()
        destination[f"{prefix}table"] = self.table

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[f"{prefix}turned"].t())
        self.table = state[f"{prefix}table"].clone()


class Viewed(nn.Module):
    """A weight whose state dict shows views of it: these are its memory, and nothing else is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(2, 3, 4))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination.update({f"{prefix}{number}": part for number, part in enumerate(self.stack.detach())})


class Deaf(Packed):
    """Its load does nothing."""

    def _load_from_state_dict(self, *_: Any) -> None:
        pass


class Rounding(Packed):
    """Its load gives back other values than its save showed."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        super()._load_from_state_dict({**state, f"{prefix}turned": state[f"{prefix}turned"].half()}, prefix)


class Silent(nn.Module):
    """A parameter that its state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.hidden = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.register_state_dict_post_hook(self._hide)  # type: ignore[no-untyped-call]

    @staticmethod
    def _hide(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        del state[f"{prefix}hidden"]


def _pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two models, of the same modules with other values, with ordinary ones beside them."""
    return nn.Sequential(nn.Linear(2, 2), make()), nn.Sequential(nn.Linear(2, 2), make())


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tables = {f"{path}.table": m.table for path, m in model.named_modules() if isinstance(m, Packed)}
    return {name: full(tensor).detach().clone() for name, tensor in {**found, **tables}.items()}


@pytest.mark.parametrize("make", [Fused, Packed, Viewed])
def test_derived_entries_are_loaded_into_the_parameters(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    given, taken = _pair(make)
    save(given, tmp_path / "out", to="safetensors")
    report = load(taken, tmp_path / "out")
    assert same(_tensors(given), _tensors(taken))
    assert report.bytes_written == report.bytes_needed
    _, other = _pair(make)
    reshard(given, other)
    assert same(_tensors(given), _tensors(other))


@pytest.mark.parametrize("make", [Deaf, Rounding])
def test_modules_that_do_not_load_their_own_entries_are_refused(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    given, taken = _pair(make)
    save(given, tmp_path / "out", to="safetensors")
    before = _tensors(taken)
    for ask in (lambda: load(taken, tmp_path / "out"), lambda: reshard(given, taken)):
        with pytest.raises(TransaxleError) as found:
            ask()
        assert {r.code for r in found.value.refusals} == {"UNSUPPORTED"}
        assert "1.weight" in {r.where.tensor for r in found.value.refusals}
        assert all(r.hint for r in found.value.refusals)
        assert same(before, _tensors(taken))


def test_a_parameter_that_the_state_dict_omits_is_reported(tmp_path: Path) -> None:
    given, taken = _pair(Silent)
    save(given, tmp_path / "out", to="safetensors")
    before = _tensors(taken)
    with refused("MISSING_TENSOR", tensors=["1.hidden"]):
        load(taken, tmp_path / "out")
    assert same(before, _tensors(taken))
    report = load(taken, tmp_path / "out", strict=False)
    assert report.missing == ("1.hidden",)
    assert same(_tensors(taken), {**_tensors(given), "1.hidden": before["1.hidden"]})


def _nested(make: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), make(), nn.Sequential(make(), nn.BatchNorm1d(3)))


def _sharded(rank: int, world: int, source: str, meta: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    with torch.device("meta" if meta else "cpu"):
        model = _nested(Fused)
    mesh = init_device_mesh("cpu", (world,))
    for module in (model[1], model[2][0], model):  # type: ignore[index]
        fully_shard(module, mesh=mesh)
    load(model, source)
    return _tensors(model)


@pytest.mark.parametrize("meta", [pytest.param(False, marks=pytest.mark.oracle), True])
def test_derived_entries_are_loaded_under_fsdp2(tmp_path: Path, meta: bool) -> None:
    given = _nested(Fused)
    save(given, tmp_path / "out", to="safetensors")
    for held in run(2, _sharded, str(tmp_path / "out"), meta):
        assert same(held, _tensors(given))


def _flat(rank: int, world: int, source: str, target: str, orig: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    model = _nested(lambda: nn.Linear(5, 3))
    for module in (model[1], model[2]):  # type: ignore[index]
        wrapped = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=orig)
        setattr(model, "1" if module is model[1] else "2", wrapped)  # type: ignore[index]
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=orig)
    other = FullyShardedDataParallel(_nested(lambda: nn.Linear(5, 3)), device_id=torch.device("cpu"))
    with pytest.raises(TransaxleError, match=r"fully_shard \(FSDP2\)"):
        load(model, source, optimizer=torch.optim.AdamW(model.parameters()))
    load(model, source)
    save(model, target, to="safetensors")
    reshard(model, other)
    found: dict[str, torch.Tensor] = {}
    for each in (model, other):
        with FullyShardedDataParallel.summon_full_params(each):
            tensors = {**dict(each.named_parameters()), **dict(each.named_buffers())}
            names = {name: name.replace("_fsdp_wrapped_module.", "") for name in tensors}
            found |= {f"{each is other}.{names[name]}": tensor.detach().clone() for name, tensor in tensors.items()}
    return found


@pytest.mark.parametrize("orig", [False, pytest.param(True, marks=pytest.mark.oracle)])
def test_fsdp1_is_loaded_saved_and_resharded(tmp_path: Path, orig: bool) -> None:
    given = _nested(lambda: nn.Linear(5, 3))
    save(given, tmp_path / "out", to="safetensors")
    want = {f"{other}.{name}": tensor for other in (True, False) for name, tensor in _tensors(given).items()}
    for held in run(2, _flat, str(tmp_path / "out"), str(tmp_path / "new"), orig):
        assert same(held, want)
    kept = load_file(tmp_path / "new" / "model.safetensors")
    assert same(kept, {name: tensor.clone() for name, tensor in given.state_dict().items()})


# Parameters that FSDP2 has gathered are freed with what is written into them, so nothing is loaded into these.


def _gathered(rank: int, world: int, folder: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (model[0], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=False)
    tx.save(model, f"{folder}/out", to="safetensors:identity")
    wanted = {name: full(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model(torch.ones(2, 4))
    state = dict(model.named_parameters())
    room = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    calls: list[Callable[[], object]] = [
        lambda: tx.load(state, f"{folder}/out"),
        lambda: tx.save(state, f"{folder}/other", to="safetensors:identity"),
        lambda: tx.reshard(room, state),
        lambda: tx.Refit(room, state),
    ]
    said = []
    for call in calls:
        with pytest.raises(tx.TransaxleError, match="Give the model itself, or its state_dict") as found:
            call()
        said += [f"{each.code} {each.where.tensor}" for each in found.value.refusals]
    tx.load(model.state_dict(), f"{folder}/out")
    tx.load(dict(model.named_parameters()), f"{folder}/out")
    model(torch.ones(2, 4))
    model.state_dict()  # shards them again
    assert all(torch.equal(full(parameter), wanted[name]) for name, parameter in model.named_parameters())
    return said


def test_gathered_parameters_are_refused(tmp_path: object) -> None:
    names = [f"{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")]
    assert run(2, _gathered, str(tmp_path)) == [[f"UNSUPPORTED {name}" for name in names] * 4] * 2


# Parameters whose values are kept somewhere else: what is written into them would be lost, and is refused.

with quiet():
    from accelerate import disk_offload, dispatch_model

CPU = torch.device("cpu")
MAP: Any = {"0": "cpu", "1": "disk"}


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


OFFLOADED: dict[str, Callable[[Path], Any]] = {
    "disk_offload": lambda folder: disk_offload(_net(), folder, execution_device=CPU),
    "dispatch_model": lambda folder: dispatch_model(
        _net(), MAP, main_device="cpu", offload_dir=folder, force_hooks=True
    ),
}


@pytest.mark.parametrize("how", OFFLOADED)
def test_models_that_accelerate_has_offloaded_are_refused(tmp_path: Path, how: str) -> None:
    given = _net()
    save(given, tmp_path / "saved", to="safetensors")
    with quiet():
        model = OFFLOADED[how](tmp_path / "away")
    shown = model(torch.ones(1, 2))
    for ask in (lambda: load(model, tmp_path / "saved"), lambda: reshard(given, model)):
        with pytest.raises(TransaxleError) as found:
            ask()
        assert any(how in refusal.hint for refusal in found.value.refusals)
        assert {refusal.code for refusal in found.value.refusals} == {"UNSUPPORTED"}
    assert torch.equal(model(torch.ones(1, 2)), shown)
    assert all(parameter.is_meta for parameter in model[1].parameters())


def test_parameters_whose_values_deepspeed_keeps_are_refused(tmp_path: Path) -> None:
    """The marks are those of its ZeRO-1 and 2 and of bf16 (`_hp_mapping`), and of ZeRO-3 (`ds_id`)."""
    save(_net(), tmp_path / "saved", to="safetensors")
    for mark, what in (
        ("_hp_mapping", "would overwrite the loaded values"),
        ("ds_id", "ZeRO-3 has moved the parameter"),
    ):
        model: Any = _net()
        setattr(model[1].weight, mark, 1)
        before = model[1].weight.detach().clone()
        with pytest.raises(TransaxleError, match=what) as found:
            load(model, tmp_path / "saved")
        assert [refusal.where.tensor for refusal in found.value.refusals] == ["1.weight"]
        assert torch.equal(model[1].weight, before)


def test_torchs_own_quantized_modules_are_refused(tmp_path: Path) -> None:
    with quiet():
        import torch.ao.nn.quantized as quantized

        modules = [quantized.Linear(3, 4), quantized.Embedding(4, 8)]
    for module in modules:
        with pytest.raises(TransaxleError) as found:
            save(nn.Sequential(module), tmp_path / "saved", to="safetensors")
        assert {refusal.code for refusal in found.value.refusals} == {"UNSUPPORTED"}
        assert all(refusal.hint for refusal in found.value.refusals)


# A DTensor that a rank of its mesh omits, a group smaller than the mesh: refused everywhere, nothing is written.

SOURCE = {"a": torch.arange(64.0).reshape(8, 8), "b": torch.arange(24.0).reshape(8, 3), "c": torch.ones(4)}
KEPT = 5.0


def _state(mesh: DeviceMesh, value: float) -> dict[str, Any]:
    fulls = {name: torch.full_like(tensor, value) for name, tensor in SOURCE.items()}
    state: dict[str, Any] = {
        name: distribute_tensor(fulls[name], mesh, [Shard(0)], src_data_rank=None) for name in ("a", "b")
    }
    return {**state, "c": fulls["c"]}


def _omitted(rank: int, world: int, folder: str, call: str, who: int, placement: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    placed = Shard(0) if placement == "shard" else Replicate()
    source, target = _state(mesh, KEPT), _state(mesh, KEPT)
    target["b"] = distribute_tensor(torch.full_like(SOURCE["b"], KEPT), mesh, [placed], src_data_rank=None)
    source["b"] = distribute_tensor(torch.full_like(SOURCE["b"], KEPT), mesh, [placed], src_data_rank=None)
    lacking = source if call == "reshard from" else target
    if rank == who:
        del lacking["b"]
    try:
        if call.startswith("reshard"):
            tx.reshard(source, target)
        elif call == "load":
            tx.load(target, f"{folder}/source", strict=False)
        elif call == "save":
            tx.save(target, f"{folder}/target", to="safetensors")
        else:
            tx.async_save(target, f"{folder}/target", to="safetensors").result()
    finally:
        for value in target.values():
            assert bool(((value.to_local() if isinstance(value, DTensor) else value) == KEPT).all())


@pytest.mark.parametrize(
    ("call", "who", "placement"),
    [
        ("load", 0, "shard"), ("load", 1, "replicate"), ("save", 1, "shard"), ("async_save", 0, "replicate"),
        ("reshard to", 1, "replicate"), ("reshard from", 0, "shard"),
    ],
)  # fmt: skip
def test_a_tensor_that_one_rank_omits_is_refused_before(tmp_path: Path, call: str, who: int, placement: str) -> None:
    (tmp_path / "source").mkdir()
    save_file(SOURCE, tmp_path / "source" / "model.safetensors")
    for error in ranks(2).refusals(_omitted, str(tmp_path), call, who, placement):
        assert [(one.code, one.where.tensor) for one in error.refusals] == [("INCOMPLETE", "b")]
        assert f"its mesh has ranks 0, 1, but rank {who} does not have the tensor" in str(error)
        assert error.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def _narrow(rank: int, world: int, folder: str, call: str) -> str:
    """Call it on ranks 0 and 1 alone; the tensors lie on all three."""
    mesh = init_device_mesh("cpu", (world,))
    pair = dist.new_group([0, 1], backend="gloo")
    if rank == 2:
        return "not asked"
    source, target = _state(mesh, KEPT), _state(mesh, KEPT)
    try:
        if call == "reshard":
            tx.reshard(source, target, pair)
        elif call == "load":
            tx.load(target, f"{folder}/source", group=pair)
        else:
            tx.save(target, f"{folder}/target", to="safetensors", group=pair)
    except TransaxleError as error:
        for value in target.values():
            assert bool(((value.to_local() if isinstance(value, DTensor) else value) == KEPT).all())
        return "\n".join(f"{one.code} {one.where.tensor} {one.message} {bool(one.hint)}" for one in error.refusals)
    return "taken"


@pytest.mark.parametrize("call", ["load", "save", "reshard"])
def test_a_group_smaller_than_the_mesh_is_refused_before(tmp_path: Path, call: str) -> None:
    (tmp_path / "source").mkdir()
    save_file(SOURCE, tmp_path / "source" / "model.safetensors")
    said = "its mesh has ranks 0, 1, 2, of which 2 are not in the process group True"
    want = f"UNSUPPORTED a {said}\nUNSUPPORTED b {said}"
    assert run(3, _narrow, str(tmp_path), call) == [want, want, "not asked"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def _seen(rank: int, world: int) -> dict[str, Any]:
    """One name is a plain tensor on rank 0, and a DTensor on the mesh of ranks 0 and 1 as rank 1 sees it."""
    mesh = init_device_mesh("cpu", (world,))
    full = torch.ones(4, 2)
    mixed = full if rank == 0 else distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    found = census({"mixed": mixed}, World())["mixed"]
    return {"held": {who: tuple(map(list, held)) for who, held in found.positions.items()}, "loose": found.loose}


def test_the_census_takes_each_ranks_own_part() -> None:
    held = {0: ([(0, 4)], [(0, 2)]), 1: ([(2, 4)], [(0, 2)])}
    assert run(2, _seen) == [{"held": held, "loose": True}] * 2


def _outside(rank: int, world: int) -> tuple[list[str], list[str]]:
    """A DTensor on a mesh of rank 0 alone, which rank 1 sees too."""
    mesh = DeviceMesh("cpu", torch.tensor([0]))
    state = {"model.norm.weight": DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False)}
    made = tx.state_dict_as(state, "identity")
    return sorted(made), [type(one).__name__ for one in made.values()]


def test_state_dict_as_omits_tensors_on_other_ranks_meshes() -> None:
    assert run(2, _outside) == [(["model.norm.weight"], ["DTensor"]), ([], [])]
