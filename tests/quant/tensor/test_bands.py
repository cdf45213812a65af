"""Quantized parameters that FSDP2 cuts along another dim than the first: bit for bit those of one rank."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

import transaxle as tx
from tests.live.ranks import run
from tests.quant.kinds import MORE, raw, same, values
from tests.quant.tensor.test_stack import stack
from tests.quant.training import CountingGather, equal
from transaxle.errors import TransaxleError
from transaxle.quant import MasterWeights, QuantizedTensor
from transaxle.quant.entries import give_entries

WORLD = 2
ROWS, COLUMNS = 256, 256
"""Sizes that two ranks cut between tiles, of every quantizer and along both dims."""
CUTS = {"columns of a matrix": (None, 1), "rows of a stack": (3, 1), "columns of a stack": (3, 2)}
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
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(dim), **options)
    return model


def _steps(model: nn.Module, steps: int = 2) -> list[float]:
    optimizer, losses = MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=1e-2, foreach=False)), []
    for step in range(steps):
        loss = model(values(4, COLUMNS, seed=step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()))
    return losses


def _entries(model: nn.Module) -> dict[str, torch.Tensor]:
    """All of each entry as bytes; torch gathers what is a DTensor."""
    return {
        name: raw(entry.full_tensor() if isinstance(entry, DTensor) else entry.detach())
        for name, entry in model.state_dict().items()
    }


def _shard(model: nn.Module) -> QuantizedTensor:
    weight: Any = model.weight
    local = weight.to_local()
    assert isinstance(local, QuantizedTensor)
    return local


def _train(rank: int, world: int, kind: str, folder: str) -> None:
    for cut, (count, dim) in CUTS.items():
        model, alone = _made(kind, cut), _Layers(kind, count)
        assert _shard(model).shape[dim] == alone.weight.shape[dim] // world
        assert _steps(model) == _steps(alone)
        found = _entries(model)
        assert equal(found, _entries(alone))
        saved = Path(folder, cut)
        save(model.state_dict(), checkpoint_id=str(saved / "torch"))
        tx.save(model, saved / "ours", to="dcp:identity")
        for source in ("torch", "ours"):
            fresh = _made(kind, cut, seed=5)
            tx.load(fresh, saved / source)
            assert equal(_entries(fresh), found)
            assert _steps(fresh, 1) == _steps(copy.deepcopy(alone), 1)
        fresh = _made(kind, cut, seed=6)
        state = fresh.state_dict()
        load(state, checkpoint_id=str(saved / "ours"))
        assert equal(_entries(fresh), found)
        # From a state dict in one piece; and into parameters that are cut along dim 0.
        fresh = _made(kind, cut, seed=7)
        fresh.load_state_dict(alone.state_dict())
        assert equal(_entries(fresh), found)
        other = _Layers(kind, count, seed=8)
        fully_shard(other, mesh=init_device_mesh("cpu", (world,)))
        other.load_state_dict(model.state_dict())
        assert equal(_entries(other), found)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", MORE)
def test_training_and_checkpoints_are_those_of_one_rank(kind: str, tmp_path: Path) -> None:
    """What is lost, the codes after each step, and what is saved and loaded, by us and by torch."""
    run(WORLD, _train, kind, str(tmp_path))


def _gathered(rank: int, world: int, kind: str) -> list[int]:
    found = []
    for cut in CUTS:
        sharded, counting = _made(kind, cut), CountingGather()
        assert isinstance(sharded, FSDPModule)
        sharded.set_custom_all_gather(counting)  # type: ignore[arg-type]
        count = CUTS[cut][0]
        sharded.unshard()
        whole: Any = sharded.weight
        assert isinstance(whole.data, QuantizedTensor)
        alone: Any = _Layers(kind, count).weight
        assert same(whole.data, alone.data)
        found.append(counting.bytes // (count or 1))
    return found


@pytest.mark.parametrize(("kind", "times"), [("float8", 1), ("mxfp8, both ways", 2), ("nvfp4", 1), ("float8_block", 1)])
def test_torch_gathers_a_byte_for_each_code(kind: str, times: int) -> None:
    """Of four bits too: torch puts together only what has as many elements as the parameter."""
    assert run(WORLD, _gathered, kind) == [[times * ROWS * COLUMNS] * len(CUTS)] * WORLD


def _options(rank: int, world: int, kind: str) -> None:
    hybrid = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    for cut, (count, _) in CUTS.items():
        wanted = _steps(_Layers(kind, count))
        assert _steps(_made(kind, cut, offload_policy=CPUOffloadPolicy(pin_memory=False))) == wanted
        assert _steps(_made(kind, cut, reshard_after_forward=False)) == wanted
        assert _steps(_made(kind, cut, mesh=hybrid)) == wanted


@pytest.mark.parametrize("kind", ["float8 delayed", "nvfp4, both ways"])
def test_options_of_fsdp2(kind: str) -> None:
    run(WORLD, _options, kind)


def _mixed(rank: int, world: int, kind: str, dim: int) -> None:
    alone = _Layers(kind, 3, dtype=torch.float32)
    model = _Layers(kind, 3, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda _: Shard(dim))
    plain: torch.Tensor = alone.weight
    assert isinstance(plain, QuantizedTensor)
    leaf = plain.dequantize(torch.bfloat16).requires_grad_()
    x = values(4, COLUMNS)
    model(x).float().square().mean().backward()
    made = model(x)  # into what the first pass has gathered
    made.float().square().mean().backward()
    wanted = torch.stack([x @ each.t() for each in leaf])
    assert torch.equal(made, wanted)
    wanted.float().square().mean().backward()
    grad: Any = model.weight.grad
    assert leaf.grad is not None
    assert grad.dtype == torch.float32
    assert torch.equal(grad.full_tensor(), 2 * leaf.grad.float())


@pytest.mark.parametrize(("kind", "dim"), [("float8", 0), ("mxfp8", 1), ("nvfp4", 2)])
def test_mixed_precision(kind: str, dim: int) -> None:
    """Values of float32, multiplied as bfloat16, with gradients that are added in float32."""
    run(WORLD, _mixed, kind, dim)


def _misaligned(rank: int, world: int, kind: str, count: int, dim: int) -> None:
    model = _Layers(kind, count)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), shard_placement_fn=lambda _: Shard(dim))


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
    assert isinstance(part, QuantizedTensor)
    assert same(shard, part)
    parameter: Any = _made("float8", "rows of a stack").weight
    with pytest.raises(TransaxleError):
        parameter.full_tensor()


def test_one_rank_alone_cannot_give_a_common_scale() -> None:
    """The scale of each matrix is every rank's: values are quantized by all of them, or refused."""
    run(WORLD, _alone)
