"""The adapter: every local value equals the full tensor of the target dialect, cut by torch; and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import transaxle as tx
from tests import checkpoints
from tests.live.ranks import run
from tests.live.refusals import refused
from tests.oracles import automodel_peer
from tests.oracles import hub as hub_models
from transaxle.errors import TransaxleError
from transaxle.live.reshard import reshard
from transaxle.live.state_dict_adapter import loadable_as, state_dict_as
from transaxle.torch_tensors import local_of

E, D, F, L = 10, 6, 8, 2
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 16, "hidden_size": D, "intermediate_size": 12, "num_hidden_layers": L,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": E, "num_experts_per_tok": 2,
    "moe_intermediate_size": F, "tie_word_embeddings": False, "decoder_sparse_step": 1,
}  # fmt: skip
NATIVE = "model.layers.{}.mlp.experts.{}"


def _values(*shape: int, start: int) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32).reshape(shape)


def automodel() -> dict[str, torch.Tensor]:
    """Automodel's experts: `[E, D, 2F]`, gate before up, and `[E, F, D]`."""
    found = {}
    for layer in range(L):
        found[NATIVE.format(layer, "gate_and_up_projs")] = _values(E, D, 2 * F, start=1000 * layer)
        found[NATIVE.format(layer, "down_projs")] = _values(E, F, D, start=5000 + 1000 * layer)
    return found


def hub(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same experts one by one, in torch operations."""
    found = {}
    for layer in range(L):
        both = full[NATIVE.format(layer, "gate_and_up_projs")].transpose(1, 2)
        gate, up = both.chunk(2, dim=1)
        down = full[NATIVE.format(layer, "down_projs")].transpose(1, 2)
        for expert in range(E):
            found[NATIVE.format(layer, f"{expert}.gate_proj.weight")] = gate[expert].contiguous()
            found[NATIVE.format(layer, f"{expert}.up_proj.weight")] = up[expert].contiguous()
            found[NATIVE.format(layer, f"{expert}.down_proj.weight")] = down[expert].contiguous()
    return found


@pytest.mark.parametrize(
    "beside", [(), pytest.param((Shard(1),), marks=pytest.mark.oracle)], ids=["alone", "rows cut too"]
)
def test_a_cut_of_gate_and_up_together_leaves_each_whole_on_one_half(tmp_path: Path, beside: tuple[Shard, ...]) -> None:
    """Each half of the mesh has one of the two names; torch saves them, and loads them into what knows the way back."""
    names = run(2 << len(beside), _halves, beside, str(tmp_path / "saved"))
    half = len(names) // 2
    assert all("up_proj" not in name for one in names[:half] for name in one)
    assert all("gate_proj" not in name for one in names[half:] for name in one)


def _halves(rank: int, world: int, beside: tuple[Shard, ...], folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, world // 2)[: 1 + len(beside)], mesh_dim_names=("a", "b")[: 1 + len(beside)])
    full = automodel()
    placed = {name: (Shard(2) if "gate" in name else Replicate(), *beside) for name in full}
    sd = {name: distribute_tensor(full[name], mesh, placed[name], src_data_rank=None) for name in full}
    found = state_dict_as(sd, "hf", config=CONFIG, source="automodel")
    truth = hub(full)
    for name, tensor in found.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, truth[name]), name
    with refused("MISSING_TENSOR", hint='state, give_back = tx.loadable_as(model, "hf")'):
        state_dict_as(found, "automodel", config=CONFIG, source="hf")
    dcp_save(dict(found), checkpoint_id=folder)
    empty = {name: distribute_tensor(torch.zeros_like(full[name]), mesh, placed[name]) for name in full}
    state, give_back = tx.loadable_as(empty, "hf", config=CONFIG, source="automodel")
    dcp_load(state, checkpoint_id=folder)
    give_back()
    for name, tensor in empty.items():
        assert torch.equal(tensor.to_local(), sd[name].to_local()), name
    return sorted(found)


def _fused(rank: int, world: int, gate: Any, up: Any) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    w1, w3 = _values(E, F, D, start=0), _values(E, F, D, start=7000)
    names = ("layers.0.moe.routed_experts.inner_experts.w1_EFD", "layers.0.moe.routed_experts.inner_experts.w3_EFD")
    sd = {
        name: distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
        for name, tensor, placement in zip(names, (w1, w3), (gate, up), strict=True)
    }
    (tensor,) = state_dict_as(sd, "transformers", config=CONFIG, source="torchtitan").values()
    assert isinstance(tensor, DTensor)
    parts = [torch.chunk(w, world, dim=gate.dim)[rank] for w in (w1, w3)]
    assert torch.equal(tensor.to_local(), torch.cat(parts, dim=1))
    return tensor.placements


def test_gate_and_up_cut_alike_fuse_into_a_strided_shard() -> None:
    assert run(2, _fused, Shard(1), Shard(1))[0] == (_StridedShard(1, split_factor=2),)
    assert run(2, _fused, Shard(2), Shard(2))[0] == (Shard(2),)


def test_gate_and_up_cut_differently_are_refused() -> None:
    with refused("UNSUPPORTED", "w1_EFD"):
        run(2, _fused, Shard(1), Shard(2))


@pytest.mark.parametrize("dialect", ["automodel", "transformers"])
def test_a_rank_with_some_experts_cannot_make_the_stack(dialect: str) -> None:
    """Of experts that ranks share out: what a rank lacks is not taken for zeros."""
    mine = {name: tensor for name, tensor in hub(automodel()).items() if ".7." not in name}
    with refused("INCOMPLETE", "this rank has 18 tensors of it, but needs more"):
        state_dict_as(mine, dialect, config=CONFIG)


# Experts on a mesh (ep_shard, ep), from dialect to dialect: the placements that come out, and every local value.

Tensors = dict[str, torch.Tensor]
LAYER = 1
SIZES = [(10, 7, 9), (12, 6, 10)]
"""Experts, width of the model, width of an expert."""


def config(family: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
    experts, width, inner = sizes
    both = {"model_type": family, "num_hidden_layers": LAYER + 1, "hidden_size": width, "moe_intermediate_size": inner}
    if family == hub_models.STEP:
        return {**both, "moe_num_experts": experts, "moe_layers_enum": str(LAYER), "intermediate_size": 2 * inner}
    return {**both, "num_experts": experts, "decoder_sparse_step": 1}


def native(family: str, sizes: tuple[int, int, int]) -> Tensors:
    """Automodel's experts, `[E, D, 2F]` and `[E, F, D]`; no bit pattern is there twice."""
    experts, width, inner = sizes
    place = f"model.layers.{LAYER}.{'moe' if family == hub_models.STEP else 'mlp'}.experts."
    count = experts * width * inner
    both = torch.arange(2 * count, dtype=torch.int16).view(torch.bfloat16).reshape(experts, width, 2 * inner)
    down = torch.arange(2 * count, 3 * count, dtype=torch.int16).view(torch.bfloat16).reshape(experts, inner, width)
    return {f"{place}gate_and_up_projs": both, f"{place}down_projs": down}


def stored(family: str, sizes: tuple[int, int, int]) -> Tensors:
    """The same on the hub, in torch operations: stacked for Step-3.5, one by one for Qwen3-MoE."""
    inner = sizes[2]
    both, down = native(family, sizes).values()
    parts = {"gate": both[:, :, :inner].mT, "up": both[:, :, inner:].mT, "down": down.mT}
    if family == hub_models.STEP:
        return {f"model.layers.{LAYER}.moe.{name}_proj.weight": part.contiguous() for name, part in parts.items()}
    return {
        f"model.layers.{LAYER}.mlp.experts.{expert}.{name}_proj.weight": part[expert].contiguous()
        for name, part in parts.items()
        for expert in range(sizes[0])
    }


def chunk(tensor: torch.Tensor, dim: int, count: int, place: int) -> torch.Tensor:
    """What `torch.chunk` would give a rank, nothing included."""
    size = tensor.shape[dim]
    width = -(-size // count)
    first, last = min(place * width, size), min((place + 1) * width, size)
    return tensor.narrow(dim, first, last - first)


def by_hand(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> torch.Tensor:
    """What a rank holds, written out: mesh dim after mesh dim."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for placement, count, place in zip(placements, mesh.mesh.shape, coordinate, strict=True):
        if isinstance(placement, _StridedShard):
            factor = int(placement.split_factor)
            pieces = [chunk(tensor, placement.dim, factor, number) for number in range(factor)]
            tensor = torch.cat([chunk(piece, placement.dim, count, place) for piece in pieces], placement.dim)
        elif isinstance(placement, Shard):
            tensor = chunk(tensor, placement.dim, count, place)
    return tensor.contiguous()


def placed(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    return DTensor.from_local(
        by_hand(full, mesh, placements), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


@contextmanager
def played(world: int) -> Iterator[Iterator[DeviceMesh]]:
    """Be each rank in turn; gives the mesh of each."""

    def ranks() -> Iterator[DeviceMesh]:
        for rank in range(world):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            yield init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
            dist.destroy_process_group()

    try:
        yield ranks()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check(found: Mapping[str, torch.Tensor], truth: Tensors, meshes: dict[str, DeviceMesh | None], wanted: Any) -> None:
    """Hold tensors against the full ones, cut by hand, and their placements against those wanted."""
    assert found.keys() == meshes.keys()
    for name, tensor in found.items():
        assert tensor.shape == truth[name].shape, name
        mesh = meshes[name]
        if mesh is None:
            assert not isinstance(tensor, DTensor)
            assert torch.equal(tensor, truth[name]), name
            continue
        assert isinstance(tensor, DTensor)
        assert tensor.device_mesh == mesh
        assert tensor.placements == wanted[name], name
        assert tensor.stride() == truth[name].stride(), name
        assert torch.equal(tensor.to_local(), by_hand(truth[name], mesh, tensor.placements)), name


EP = -1
"""Stands for the number of ranks along `ep`."""
TO_HUB: list[tuple[Any, Any, Any]] = [
    ((1, 0), (2, 0), (2, 0)),
    ((-2, -3), (2, 0), (2, 0)),
    (((2, 2), 0), (1, 0), ((1, 2), 0)),
    (((0, EP), 0), ((0, EP), 0), ((0, EP), 0)),
]
"""Placements of Automodel's tensors, then of gate and up, then of down."""


def placements(said: tuple[Any, ...], world: int) -> tuple[Any, ...]:
    """A pair is a strided shard."""
    return tuple(
        _StridedShard(each[0], split_factor=world // 2 if each[1] == EP else each[1])
        if isinstance(each, tuple)
        else Shard(each)
        for each in said
    )


@pytest.mark.oracle
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world", [4, 8])
def test_stacked_experts_are_translated_to_the_hub_and_back(world: int, sizes: tuple[int, int, int]) -> None:
    full, truth, said = (native(hub_models.STEP, sizes), stored(hub_models.STEP, sizes), config(hub_models.STEP, sizes))
    with played(world) as ranks:
        for mesh in ranks:
            for given, gates, down in TO_HUB:
                state = {name: placed(tensor, mesh, placements(given, world)) for name, tensor in full.items()}
                with CommDebugMode() as sent:
                    found = state_dict_as(state, "hf", config=said, source="automodel")
                    again = state_dict_as(found, "automodel", config=said, source="hf")
                assert sent.get_total_counts() == 0
                with CommDebugMode() as sent:
                    next(iter(state.values())).full_tensor()
                assert sent.get_total_counts() > 0  # it would have been seen
                wanted = {name: placements(down if "down" in name else gates, world) for name in truth}
                check(found, truth, dict.fromkeys(truth, mesh), wanted)
                check(again, full, dict.fromkeys(full, mesh), {name: t.placements for name, t in state.items()})


@pytest.mark.oracle
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world", [4, 8])
def test_single_experts_are_translated_and_back(world: int, sizes: tuple[int, int, int]) -> None:
    """Each rank names its own experts, on the other dim of the mesh: alone they make no stack, but fill one."""
    family = "qwen3_moe"
    full, truth, said = native(family, sizes), stored(family, sizes), config(family, sizes)
    cases = [((1, 0), (1,), (1,)), (((2, 2), 0), (0,), ((0, 2),))]
    seen: set[str] = set()
    with played(world) as ranks:
        for mesh in ranks:
            own = chunk(torch.arange(sizes[0]), 0, world // 2, mesh["ep"].get_local_rank()).tolist()
            names = [name for name in truth if int(name.split(".")[5]) in own]
            for given, gates, down in cases:
                state = {name: placed(tensor, mesh, placements(given, world)) for name, tensor in full.items()}
                with CommDebugMode() as sent:
                    found = state_dict_as(state, "hf", config=said, source="automodel")
                assert sent.get_total_counts() == 0
                wanted = {name: placements(down if "down" in name else gates, world) for name in names}
                check(found, truth, dict.fromkeys(names, mesh["ep_shard"]), wanted)
                seen |= found.keys()
                with refused("INCOMPLETE"):
                    state_dict_as(found, "automodel", config=said, source="hf")
                again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
                made, give_back = loadable_as(again, "hf", config=said, source="automodel")
                for name, tensor in made.items():
                    local_of(tensor).copy_(local_of(found[name]))
                give_back()
                assert all(torch.equal(local_of(again[n]), local_of(t)) for n, t in state.items())
    assert seen == truth.keys()


def test_automodels_own_adapter_agrees() -> None:
    """Its adapter, without and with DTensors, where it is right: even cuts, and none through gate and up."""
    sizes = (16, 6, 10)
    said = config(hub_models.STEP, sizes)
    full, truth = native(hub_models.STEP, sizes), stored(hub_models.STEP, sizes)
    theirs = automodel_peer.to_hf(said, full)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in truth.items())
    plain = state_dict_as(full, "hf", config=said, source="automodel")
    assert plain.keys() == theirs.keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in theirs.items())
    back = state_dict_as(plain, "automodel", config=said, source="hf")
    theirs = automodel_peer.from_hf(said, plain)
    assert all(torch.equal(back[name], tensor) and torch.equal(full[name], tensor) for name, tensor in theirs.items())
    with played(4) as ranks:
        for mesh in ranks:
            state = {name: placed(tensor, mesh, (Shard(1), Shard(0))) for name, tensor in full.items()}
            ours = state_dict_as(state, "hf", config=said, source="automodel")
            _alike(ours, automodel_peer.to_hf(said, dict(state)))
            given = {name: placed(tensor, mesh, (Shard(2), Shard(0))) for name, tensor in truth.items()}
            ours = state_dict_as(given, "automodel", config=said, source="hf")
            _alike(ours, automodel_peer.from_hf(said, dict(given)))


def _alike(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        own = ours[name]
        assert isinstance(own, DTensor)
        assert isinstance(tensor, DTensor)
        assert (own.placements, own.shape, own.device_mesh) == (tensor.placements, tensor.shape, tensor.device_mesh)
        assert torch.equal(own.to_local(), tensor.to_local()), name


# The bias of torchtitan's routers in live states: zeros where the other side has none, and never lost.

BIAS = "layers.{}.moe.expert_bias_E"


def _hub() -> Tensors:
    return {name: torch.from_numpy(array.astype("float32")) for name, array in checkpoints.tensors().items()}


def _titan(bias: float) -> Tensors:
    state = tx.state_dict_as(_hub(), "torchtitan", config=checkpoints.CONFIG)
    for layer in range(2):
        assert not state[BIAS.format(layer)].any()
        state[BIAS.format(layer)] = torch.full((8,), bias)
    return state


def _pushed(source: Tensors, target: Tensors) -> None:
    with tx.Refit(source, target, config=checkpoints.CONFIG) as refit:
        refit.push()


WAYS: dict[str, Callable[[Tensors], object]] = {
    "state_dict_as": lambda state: tx.state_dict_as(state, "hf", config=checkpoints.CONFIG),
    "reshard": lambda state: tx.reshard(state, _hub(), config=checkpoints.CONFIG),
    "Refit": lambda state: _pushed(state, _hub()),
    "named_tensors": lambda state: list(tx.refit.named_tensors(state, config=checkpoints.CONFIG)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_nonzero_router_bias_is_refused_by_name(way: str) -> None:
    WAYS[way](_titan(0.0))
    with refused("UNEXPECTED_TENSOR", "layers.0.moe.expert_bias_E"):
        WAYS[way](_titan(0.25))


def test_loadable_as_resets_the_router_bias() -> None:
    state = _titan(0.25)
    given, give_back = tx.loadable_as(state, "hf", config=checkpoints.CONFIG)
    assert given.keys() == _hub().keys()
    give_back()
    assert not any(state[BIAS.format(layer)].any() for layer in range(2))


def test_a_router_bias_that_the_state_lacks_is_refused() -> None:
    state = _hub()
    given, give_back = tx.loadable_as(state, "torchtitan", config=checkpoints.CONFIG)
    give_back()
    given[BIAS.format(1)].fill_(0.5)
    with pytest.raises(TransaxleError, match="the state has no such tensor"):
        give_back()


# Ties, and names that only one side of `reshard` has: told, or proved to be nothing else than what is copied.

EMBED, HEAD, NORM = "embed.weight", "head.weight", "norm.weight"


class Tiny(nn.Module):
    def __init__(self, *, tie: bool, head: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3, bias=False)
        if head:
            self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def zeros(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(3) if name == NORM else torch.zeros(5, 3) for name in names}


def test_reshard_reports_names_that_one_side_lacks() -> None:
    source = Tiny(tie=False)
    target = {**zeros(EMBED, NORM), "heda.weight": torch.full((5, 3), 7.0)}
    report = reshard(source, target, strict=False)
    assert report.tensors == 2
    assert report.missing == ("heda.weight",)
    assert report.unexpected == (HEAD,)
    assert torch.equal(target["heda.weight"], torch.full((5, 3), 7.0))
    assert torch.equal(target[EMBED], source.embed.weight)
    assert (reshard(source, zeros(EMBED, NORM, HEAD)).missing, report.as_json()["missing"]) == ((), ("heda.weight",))


def test_reshard_refuses_states_with_nothing_in_common() -> None:
    target = {"a.b": torch.zeros(2)}
    with refused("UNKNOWN_FAMILY", "c.d"):
        reshard({"c.d": torch.ones(2)}, target, strict=False)
    assert not target["a.b"].any()


@pytest.mark.parametrize("given", ["model", "copies"])
def test_a_tied_model_is_copied_into_its_embedding_alone(given: str) -> None:
    model = Tiny(tie=True)
    source: Any = model if given == "model" else model.state_dict()
    if given == "copies":  # as a gathered state dict has them
        source = {name: tensor.clone() for name, tensor in source.items()}
    target = zeros(EMBED, NORM)
    report = reshard(source, target)
    assert (report.tensors, report.missing, report.unexpected) == (2, (), ())
    assert torch.equal(target[EMBED], model.head.weight)


def test_an_untied_head_is_refused_if_the_target_lacks_it() -> None:
    model = Tiny(tie=True)
    source = {**model.state_dict(), HEAD: model.head.weight.detach().clone()}
    source[HEAD][4, 2] += 1e-6
    target = zeros(EMBED, NORM)
    with refused("UNEXPECTED_TENSOR", tensors=[HEAD]):
        reshard(source, target)
    assert not target[EMBED].any()


def test_a_tied_target_takes_one_name_and_refuses_two_that_differ() -> None:
    given, target = Tiny(tie=False), Tiny(tie=True)
    assert reshard({EMBED: given.embed.weight, NORM: given.norm.weight}, target).missing == ()
    assert torch.equal(target.head.weight, given.embed.weight)
    before = target.embed.weight.detach().clone()
    with refused("UNEQUAL_COPIES", tensors=[HEAD]):
        reshard(given, target)
    assert torch.equal(target.embed.weight, before)
    assert reshard(Tiny(tie=True), target).tensors == 3


def _cut(rank: int, world: int, tie: str) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(30.0).reshape(10, 3)
    embed = distribute_tensor(whole, mesh, [Shard(0)])
    head = distribute_tensor(whole, mesh, [Shard(0) if tie != "elsewhere" else Replicate()])
    if tie == "one rank differs" and rank:
        head.to_local()[0, 0] += 1
    source = {EMBED: embed, HEAD: embed if tie == "same" else head}
    target = {EMBED: distribute_tensor(torch.zeros(10, 3), mesh, [Replicate()])}
    report = reshard(source, target)
    return report.unexpected, torch.equal(local_of(target[EMBED]), whole)


@pytest.mark.parametrize("tie", ["same", "equal", "one rank differs", "elsewhere"])
def test_ties_are_checked_on_every_rank(tie: str) -> None:
    if tie in ("same", "equal"):
        assert run(2, _cut, tie) == [((), True)] * 2
        return
    with pytest.raises(TransaxleError) as found:
        run(2, _cut, tie)
    assert {one.where.tensor for one in found.value.refusals} == {HEAD}


@pytest.mark.parametrize("how", ["refit", "reshard"])
def test_two_names_of_one_memory_take_equal_tensors_only(how: str) -> None:
    def move(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
        if how == "refit":
            tx.Refit(source, target).push()
        else:
            tx.reshard(source, target)

    memory = torch.zeros(4, 3)
    target = {"embed": memory.detach(), "head": memory.detach()}
    with pytest.raises(tx.TransaxleError, match="embed has other"):
        move({"embed": torch.ones(4, 3), "head": torch.full((4, 3), 2.0)}, target)
    assert not memory.any()
    both = torch.ones(4, 3)
    move({"embed": both, "head": both.detach()}, target)
    assert torch.equal(memory, both)
