"""Quantized parameters under FSDP2, on real ranks: what is gathered, trained, saved and loaded is bit for bit right."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.live.ranks import run
from tests.quant.kinds import MORE, same, values
from tests.quant.training import CountingGather
from transaxle.errors import TransaxleError
from transaxle.quant import MasterWeights, QuantizedTensor, quantize_

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


def _mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def _optimizer(model: nn.Module) -> MasterWeights:
    return MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=1e-2, foreach=False))


def _steps(model: nn.Module, optimizer: MasterWeights, steps: int, seed: int = 5) -> list[float]:
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        loss = model(torch.randn(8, WIDTH, generator=generator).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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
    assert isinstance(wanted, QuantizedTensor)
    assert same(made, wanted)


@kinds
@pytest.mark.parametrize(("world", "rows"), [(2, 201), (3, 4)])
def test_sharded_is_unsharded(kind: str, world: int, rows: int) -> None:
    """Each rank has its own rows, the largest value among the last ones, and one rank may have none."""
    run(world, _quantize_shards, kind, rows)


def _train(rank: int, world: int, kind: str) -> None:
    model, alone = _model(kind, _mesh(world)), _model(kind, None)
    optimizer, other = _optimizer(model), _optimizer(alone)
    for step in range(3):
        losses = _steps(model, optimizer, 1, seed=step), _steps(alone, other, 1, seed=step)
        if world < 3:  # the mean of three equal gradients in bfloat16 is not that gradient
            assert losses[0] == losses[1]
        for (parameter, shard), master, twin in zip(
            _shards(model), optimizer.masters, alone.parameters(), strict=False
        ):
            assert isinstance(master, DTensor)
            assert isinstance(twin, QuantizedTensor)
            whole = twin.detach() if world < 3 else None
            if whole is None and not shard.state:
                whole = shard.quantizer.quantize(master.full_tensor().detach().bfloat16())
            if whole is not None:
                start = min(-(-parameter.shape[0] // world) * rank, parameter.shape[0])
                part = whole[start : start + shard.height]
                assert isinstance(part, QuantizedTensor)
                assert same(shard, part)


def _grow(rank: int, world: int) -> None:
    layers = [nn.Linear(WIDTH, 2, bias=False).bfloat16() for _ in range(2)]
    for layer in layers:
        nn.init.constant_(layer.weight, 3.0)
        quantize_(layer, MORE["float8 delayed"])
    fully_shard(layers[0], mesh=_mesh(world))
    for step in range(3):
        for layer in layers:
            weight = layer.weight
            inner = weight.to_local() if isinstance(weight, DTensor) else weight
            assert isinstance(inner, QuantizedTensor)
            group = dist.group.WORLD if isinstance(weight, DTensor) else None
            inner.quantize_(torch.full(tuple(inner.shape), 5.0 + step).bfloat16(), group=group)
    shard, whole = layers[0].weight, layers[1].weight
    assert isinstance(shard, DTensor)
    inner = shard.to_local()
    assert isinstance(inner, QuantizedTensor)
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
    sharded, counting = fully_shard(model, mesh=_mesh(world)), CountingGather()
    assert isinstance(sharded, FSDPModule)
    sharded.set_custom_all_gather(counting)  # type: ignore[arg-type]
    model(values(4, 128))
    return counting.bytes, wanted


@pytest.mark.parametrize("kind", ["float8_block", "mxfp8, both ways", "nvfp4"])
def test_what_travels_are_codes_and_cut_scales(kind: str) -> None:
    for counted, wanted in run(2, _gather_bytes, kind):
        assert counted == wanted
        assert counted < 2 * 128 * 256 or MORE[kind].columnwise


def _offload(rank: int, world: int, kind: str) -> None:
    model, alone = _model(kind, _mesh(world), offload_policy=CPUOffloadPolicy(pin_memory=False)), _model(kind, None)
    assert _steps(model, _optimizer(model), 2) == _steps(alone, _optimizer(alone), 2)


@pytest.mark.parametrize("kind", ["float8 delayed", "nvfp4"])
def test_cpu_offload_keeps_codes(kind: str) -> None:
    run(2, _offload, kind)


def _wide_checkpoint(rank: int, world: int, kind: str) -> None:
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, OUT)).bfloat16()
    model = _model(kind, _mesh(world))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.load_state_dict({**model.state_dict(), "0.weight": plain[0].weight, "2.weight": plain[2].weight})
    assert sum("are quantized once" in str(one.message) for one in told) == 2
    for (parameter, shard), layer in zip(_shards(model), (plain[0], plain[2]), strict=True):
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        start = min(-(-parameter.shape[0] // world) * rank, parameter.shape[0])
        part = MORE[kind].quantize(weight)[start : start + shard.height]
        assert isinstance(part, QuantizedTensor)
        assert same(shard, part)


@pytest.mark.parametrize("kind", ["float8_block", "mxfp8", "nvfp4, 16x16"])
def test_a_wide_checkpoint_is_quantized_as_if_unsharded(kind: str) -> None:
    run(2, _wide_checkpoint, kind)


def _full(rank: int, world: int, kind: str) -> None:
    model = _model(kind, _mesh(world))
    alone = [tensor for tensor in _model(kind, None).parameters() if isinstance(tensor, QuantizedTensor)]
    for (parameter, _), whole in zip(_shards(model), alone, strict=True):
        replicated = parameter.redistribute(placements=[Replicate()])
        for found in (parameter.full_tensor(), replicated.to_local()):
            assert isinstance(found, QuantizedTensor)
            assert same(found, whole)
            assert torch.equal(found.dequantize(), whole.dequantize())
        again, shard = replicated.redistribute(placements=[Shard(0)]).to_local(), parameter.to_local()
        assert isinstance(again, QuantizedTensor)
        assert isinstance(shard, QuantizedTensor)
        assert same(again, shard)


@pytest.mark.oracle
@kinds
@pytest.mark.parametrize("world", [2, 3])
def test_full_tensors_are_the_whole_one(kind: str, world: int) -> None:
    run(world, _full, kind)


def _twice(rank: int, world: int) -> None:
    model = nn.Linear(WIDTH, OUT)
    fully_shard(model, mesh=_mesh(world))
    quantize_(model, MORE["mxfp8"])


def test_sharded_models_are_refused() -> None:
    with pytest.raises(TransaxleError, match="Quantize the model before it is sharded"):
        run(1, _twice)
