"""Quantized parameters under FSDP2 on real ranks, cut along any dim: bit for bit those of one rank."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

import transaxle as tx
from tests.live.ranks import run
from tests.quant.kinds import MORE, raw, same, values
from tests.quant.test_tensor import stack
from tests.quant.training import CountingGather, equal, mesh_of
from tests.some import a, some
from transaxle.errors import TransaxleError
from transaxle.quant import MasterWeights, QuantizedTensor, quantize_
from transaxle.quant.entries import give_entries

kinds = pytest.mark.parametrize("kind", MORE)
WIDTH, HIDDEN, OUT = 64, 166, 51
"""Sizes that no world cuts evenly, and that are no multiples of tiles."""


def _model(kind: str, mesh: DeviceMesh | None, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, OUT)
    model = nn.Sequential(*layers).bfloat16()
    quantize_(model, MORE[kind], preserve_high_precision_init=True)
    if mesh is not None:
        fully_shard(model, mesh=mesh, **options)
    return model


def _optimizer(model: nn.Module) -> MasterWeights:
    return MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=1e-2, foreach=False))


def _step(model: nn.Module, optimizer: MasterWeights, x: torch.Tensor) -> float:
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def _shards(model: nn.Module) -> list[tuple[DTensor, QuantizedTensor]]:
    found: list[tuple[DTensor, QuantizedTensor]] = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        inner = parameter.to_local()
        if isinstance(inner, QuantizedTensor):
            found.append((parameter, inner))
    return found


def _quantize_shards(rank: int, world: int, kind: str, rows: int) -> None:
    x = values(rows, 150)
    whole, shard = MORE[kind].quantize(x), (x.chunk(world)[rank] if rank < len(x.chunk(world)) else x[:0])
    made = MORE[kind].quantize(shard, group=dist.group.WORLD)
    step = -(-rows // world)
    wanted = whole[min(step * rank, rows) : min(step * (rank + 1), rows)]
    assert same(made, wanted)


@pytest.mark.oracle
@kinds
@pytest.mark.parametrize(("world", "rows"), [(2, 201), (3, 4)])
def test_sharded_is_unsharded(kind: str, world: int, rows: int) -> None:
    """Each rank has its own rows, the largest value among the last ones, and one rank may have none."""
    run(world, _quantize_shards, kind, rows)


def _train(rank: int, world: int, kind: str) -> None:
    model, alone = _model(kind, mesh_of(world)), _model(kind, None)
    optimizer, other = _optimizer(model), _optimizer(alone)
    for step in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        losses = _step(model, optimizer, x), _step(alone, other, x)
        if world < 3:  # the mean of three equal gradients in bfloat16 is not that gradient
            assert losses[0] == losses[1]
        for (parameter, shard), master, twin in zip(
            _shards(model), optimizer.masters, alone.parameters(), strict=False
        ):
            whole = a(QuantizedTensor, twin).detach() if world < 3 else None
            if whole is None and not shard.state:
                whole = shard.quantizer.quantize(a(DTensor, master).full_tensor().detach().bfloat16())
            if whole is not None:
                start = min(-(-parameter.shape[0] // world) * rank, parameter.shape[0])
                part = a(QuantizedTensor, whole[start : start + shard.height])
                assert same(shard, part)


def _grow(rank: int, world: int) -> None:
    layers = [nn.Linear(WIDTH, 2, bias=False).bfloat16() for _ in range(2)]
    for layer in layers:
        nn.init.constant_(layer.weight, 3.0)
        quantize_(layer, MORE["float8 delayed"])
    fully_shard(layers[0], mesh=mesh_of(world))
    for step in range(3):
        for layer in layers:
            weight = layer.weight
            inner = a(QuantizedTensor, weight.to_local() if isinstance(weight, DTensor) else weight)
            group = dist.group.WORLD if isinstance(weight, DTensor) else None
            inner.quantize_(torch.full(tuple(inner.shape), 5.0 + step).bfloat16(), group=group)
    shard, whole = layers[0].weight, layers[1].weight
    inner = a(QuantizedTensor, a(DTensor, shard).to_local())
    assert isinstance(whole, QuantizedTensor)
    assert len(inner) == (1 if rank < 2 else 0)
    assert torch.equal(inner.components["scale_inv"], whole.components["scale_inv"])
    assert all(torch.equal(inner.state[name], whole.state[name]) for name in whole.state)


def test_a_rank_without_rows_keeps_the_history() -> None:
    """It gathers the others' codes under its own copy of the scale."""
    run(3, _grow)


@pytest.mark.oracle
@kinds
@pytest.mark.parametrize("world", [2, 3])
def test_training_is_that_of_one_rank(kind: str, world: int) -> None:
    run(world, _train, kind)


def _gather_bytes(rank: int, world: int, kind: str) -> tuple[int, int]:
    torch.manual_seed(0)
    model = nn.Linear(128, 256, bias=False).bfloat16()
    quantize_(model, MORE[kind])
    weight: torch.Tensor = model.weight
    assert isinstance(weight, QuantizedTensor)
    shared = weight.frame.shared
    wanted = sum(buffer.nbytes for name, buffer in weight.components.items() if name not in shared)
    sharded, counting = fully_shard(model, mesh=mesh_of(world)), CountingGather()
    a(FSDPModule, sharded).set_custom_all_gather(counting)  # type: ignore[arg-type]
    model(values(4, 128))
    return counting.bytes, wanted


@pytest.mark.parametrize("kind", ["float8_block", "mxfp8, both ways", "nvfp4"])
def test_what_travels_are_codes_and_cut_scales(kind: str) -> None:
    for counted, wanted in run(2, _gather_bytes, kind):
        assert counted == wanted
        assert counted < 2 * 128 * 256 or MORE[kind].columnwise


def _wide_checkpoint(rank: int, world: int, kind: str) -> None:
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, OUT)).bfloat16()
    model = _model(kind, mesh_of(world))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.load_state_dict({**model.state_dict(), "0.weight": plain[0].weight, "2.weight": plain[2].weight})
    assert sum("are quantized once" in str(one.message) for one in told) == 2
    for (parameter, shard), layer in zip(_shards(model), (plain[0], plain[2]), strict=True):
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        start = min(-(-parameter.shape[0] // world) * rank, parameter.shape[0])
        part = MORE[kind].quantize(weight)[start : start + shard.height]
        assert same(shard, part)


@pytest.mark.parametrize("kind", ["float8_block", "mxfp8", "nvfp4, 16x16"])
def test_a_wide_checkpoint_is_quantized_as_if_unsharded(kind: str) -> None:
    run(2, _wide_checkpoint, kind)


def _full(rank: int, world: int, kind: str) -> None:
    model = _model(kind, mesh_of(world))
    alone = [tensor for tensor in _model(kind, None).parameters() if isinstance(tensor, QuantizedTensor)]
    for (parameter, _), whole in zip(_shards(model), alone, strict=True):
        replicated = parameter.redistribute(placements=[Replicate()])
        for found in (parameter.full_tensor(), replicated.to_local()):
            assert same(found, whole)
            assert torch.equal(found.dequantize(), whole.dequantize())
        again, shard = replicated.redistribute(placements=[Shard(0)]).to_local(), parameter.to_local()
        assert same(again, shard)


@pytest.mark.oracle
@kinds
@pytest.mark.parametrize("world", [2, 3])
def test_full_tensors_are_the_whole_one(kind: str, world: int) -> None:
    run(world, _full, kind)


def _twice(rank: int, world: int) -> None:
    model = nn.Linear(WIDTH, OUT)
    fully_shard(model, mesh=mesh_of(world))
    quantize_(model, MORE["mxfp8"])


def test_sharded_models_are_refused() -> None:
    with pytest.raises(TransaxleError, match="Quantize the model before it is sharded"):
        run(1, _twice)


# Quantized parameters that FSDP2 cuts along any dim, of sizes that it cuts evenly: bit for bit those of one rank.

WORLD = 2
ROWS, COLUMNS = 256, 256
"""Sizes that two ranks cut between tiles, of every quantizer and along both dims."""
CUTS: dict[str, tuple[int | None, int]] = {
    "rows of a matrix": (None, 0), "columns of a matrix": (None, 1), "rows of a stack": (3, 1),
    "columns of a stack": (3, 2),
}  # fmt: skip
"""How many matrices there are, and the dim that is cut."""


class _Layers(nn.Module):
    """One matrix, or a stack of them."""

    def __init__(self, kind: str, count: int | None, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        x = values(ROWS, COLUMNS, seed) if count is None else stack(count, ROWS, COLUMNS, seed)
        self.weight = nn.Parameter(MORE[kind].quantize((x / 64).to(dtype)))
        give_entries(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return functional.linear(x, weight) if weight.dim() < 3 else torch.stack([x @ each.t() for each in weight])


def _made(kind: str, cut: str, seed: int = 0, mesh: Any = None, **options: Any) -> _Layers:
    count, dim = CUTS[cut]
    model = _Layers(kind, count, seed)
    mesh = mesh_of(dist.get_world_size()) if mesh is None else mesh
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(dim), **options)
    return model


def _steps_bands(model: nn.Module, steps: int = 2) -> list[float]:
    optimizer = _optimizer(model)
    return [_step(model, optimizer, values(4, COLUMNS, seed=step)) for step in range(steps)]


def _entries(model: nn.Module) -> dict[str, torch.Tensor]:
    """All of each entry as bytes; torch gathers what is a DTensor."""
    return {
        name: raw(entry.full_tensor() if isinstance(entry, DTensor) else entry.detach())
        for name, entry in model.state_dict().items()
    }


def _shard(model: nn.Module) -> QuantizedTensor:
    weight: Any = model.weight
    return a(QuantizedTensor, weight.to_local())


def _train_bands(rank: int, world: int, kind: str, folder: str) -> None:
    for cut, (count, dim) in CUTS.items():
        model, alone = _made(kind, cut), _Layers(kind, count)
        assert _shard(model).shape[dim] == alone.weight.shape[dim] // world
        assert _steps_bands(model) == _steps_bands(alone)
        found = _entries(model)
        assert equal(found, _entries(alone))
        saved = Path(folder, cut)
        save(model.state_dict(), checkpoint_id=str(saved / "torch"))
        tx.save(model, saved / "ours", to="dcp:identity")
        for source in ("torch", "ours"):
            fresh = _made(kind, cut, seed=5)
            tx.load(fresh, saved / source)
            assert equal(_entries(fresh), found)
            assert _steps_bands(fresh, 1) == _steps_bands(copy.deepcopy(alone), 1)
        fresh = _made(kind, cut, seed=6)
        state = fresh.state_dict()
        load(state, checkpoint_id=str(saved / "ours"))
        assert equal(_entries(fresh), found)
        # From a state dict in one piece; and into parameters that are cut along dim 0.
        fresh = _made(kind, cut, seed=7)
        fresh.load_state_dict(alone.state_dict())
        assert equal(_entries(fresh), found)
        other = _Layers(kind, count, seed=8)
        fully_shard(other, mesh=mesh_of(world))
        other.load_state_dict(model.state_dict())
        assert equal(_entries(other), found)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", MORE)
def test_training_and_checkpoints_are_those_of_one_rank(kind: str, tmp_path: Path) -> None:
    """What is lost, the codes after each step, and what is saved and loaded, by us and by torch."""
    run(WORLD, _train_bands, kind, str(tmp_path))


def _gathered(rank: int, world: int, kind: str) -> list[int]:
    found = []
    for cut in [cut for cut, (_, dim) in CUTS.items() if dim]:
        sharded, counting = _made(kind, cut), CountingGather()
        assert isinstance(sharded, FSDPModule)
        sharded.set_custom_all_gather(counting)  # type: ignore[arg-type]
        count = CUTS[cut][0]
        sharded.unshard()
        whole: Any = sharded.weight
        alone: Any = _Layers(kind, count).weight
        assert same(whole.data, alone.data)
        found.append(counting.bytes // (count or 1))
    return found


@pytest.mark.parametrize(("kind", "times"), [("float8", 1), ("mxfp8, both ways", 2), ("nvfp4", 1), ("float8_block", 1)])
def test_torch_gathers_a_byte_for_each_code(kind: str, times: int) -> None:
    """Of four bits too: torch puts together only what has as many elements as the parameter."""
    assert run(WORLD, _gathered, kind) == [[times * ROWS * COLUMNS] * 3] * WORLD


def _options(rank: int, world: int, kind: str) -> None:
    hybrid = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    for cut, (count, _) in CUTS.items():
        wanted = _steps_bands(_Layers(kind, count))
        assert _steps_bands(_made(kind, cut, offload_policy=CPUOffloadPolicy(pin_memory=False))) == wanted
        assert _steps_bands(_made(kind, cut, reshard_after_forward=False)) == wanted
        assert _steps_bands(_made(kind, cut, mesh=hybrid)) == wanted


@pytest.mark.parametrize("kind", ["float8 delayed", "nvfp4, both ways"])
def test_options_of_fsdp2(kind: str) -> None:
    run(WORLD, _options, kind)


def _mixed(rank: int, world: int, kind: str, dim: int) -> None:
    alone = _Layers(kind, 3, dtype=torch.float32)
    model = _Layers(kind, 3, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh_of(world), mp_policy=policy, shard_placement_fn=lambda _: Shard(dim))
    plain: torch.Tensor = alone.weight
    leaf = a(QuantizedTensor, plain).dequantize(torch.bfloat16).requires_grad_()
    x = values(4, COLUMNS)
    model(x).float().square().mean().backward()
    made = model(x)  # into what the first pass has gathered
    made.float().square().mean().backward()
    wanted = torch.stack([x @ each.t() for each in leaf])
    assert torch.equal(made, wanted)
    wanted.float().square().mean().backward()
    grad: Any = model.weight.grad
    assert grad.dtype == torch.float32
    assert torch.equal(grad.full_tensor(), 2 * some(leaf.grad).float())


@pytest.mark.parametrize(("kind", "dim"), [("float8", 0), ("mxfp8", 1), ("nvfp4", 2)])
def test_mixed_precision(kind: str, dim: int) -> None:
    """Values of float32, multiplied as bfloat16, with gradients that are added in float32."""
    run(WORLD, _mixed, kind, dim)


def _misaligned(rank: int, world: int, kind: str, count: int, dim: int) -> None:
    model = _Layers(kind, count)
    fully_shard(model, mesh=mesh_of(world), shard_placement_fn=lambda _: Shard(dim))


@pytest.mark.parametrize("dim", [1, 2])
def test_a_cut_through_tiles_is_refused(dim: int) -> None:
    """Each of four ranks would get 64 rows or columns, where tiles have 128."""
    with pytest.raises(TransaxleError, match="0 to 64 would cut tiles of 128") as refused:
        run(4, _misaligned, "float8_block", 3, dim)
    assert refused.value.code == "BLOCK_MISALIGNED"


@torch.no_grad()
def _alone(rank: int, world: int) -> None:
    shard = _shard(_made("float8", "rows of a stack"))
    kept = {name: raw(buffer).clone() for name, buffer in shard.components.items()}
    other = MORE["float8"].quantize(stack(3, ROWS // world, COLUMNS, seed=4))
    for act in (shard.quantize_, shard.copy_):
        with pytest.raises(TransaxleError) as refused:
            act(stack(3, ROWS // world, COLUMNS, seed=4))
        assert refused.value.code == "UNSUPPORTED"
    with pytest.raises(TransaxleError) as refused:
        shard.copy_(other)
    assert refused.value.code == "UNEQUAL_COPIES"
    assert equal(kept, {name: raw(buffer) for name, buffer in shard.components.items()})
    shard.quantize_(stack(3, ROWS, COLUMNS, seed=4).chunk(world, 1)[rank], group=dist.group.WORLD)
    whole = MORE["float8"].quantize(stack(3, ROWS, COLUMNS, seed=4))
    part = whole.chunk(world, 1)[rank]
    assert same(shard, part)
    parameter: Any = _made("float8", "rows of a stack").weight
    with pytest.raises(TransaxleError):
        parameter.full_tensor()


def test_one_rank_alone_cannot_give_a_common_scale() -> None:
    """The scale of each matrix is every rank's: values are quantized by all of them, or refused."""
    run(WORLD, _alone)
