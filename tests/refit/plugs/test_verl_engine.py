"""The checkpoint engine for verl, its methods called in verl's order on ranks over gloo; without verl."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import MOE, full, shard
from tests.oracles import hub
from transaxle.refit.verl_engine import ShardedWeights, VerlEngine

TRAINERS, ROLLOUTS = 2, 2
BUCKET = 20_000
Tensors = dict[str, torch.Tensor]


def _connect(engine: VerlEngine) -> VerlEngine:
    """Call what verl's driver calls before an update."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    metadata: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(metadata, engine.prepare())
    trainers, rollouts = VerlEngine.build_topology(TRAINERS, ROLLOUTS, metadata)
    arguments = {name: values + rollouts[name] for name, values in trainers.items()}
    engine.init_process_group(**{name: values[dist.get_rank()] for name, values in arguments.items()})
    return engine


def _engine(**options: Any) -> VerlEngine:
    return _connect(VerlEngine(BUCKET, is_master=dist.get_rank() == 0, timeout=60, **options))


def _update(engine: VerlEngine, weights: Any, step: int = 0) -> tuple[Tensors, str]:
    """Return the tensors that this rank gets in an update, and the error, if there is one."""
    tensors: Tensors = {}

    async def receive() -> None:
        async for name, tensor in engine.receive_weights(global_steps=step):
            assert name not in tensors
            tensors[name] = tensor.clone()

    try:
        asyncio.run(engine.send_weights(weights, global_steps=step) if dist.get_rank() < TRAINERS else receive())
    except (tx.TransaxleError, ZeroDivisionError) as error:
        return tensors, str(error)
    engine.finalize()
    return tensors, ""


def _fsdp_model() -> Any:
    """Return a model that FSDP2 has cut over the trainer's ranks."""
    torch.manual_seed(0)
    model = hub.model(MOE, torch.float32)
    mesh = DeviceMesh("cpu", range(TRAINERS))  # all ranks create the group of some
    if dist.get_rank() < TRAINERS:
        shard(model, mesh)
    return model


def _sharded(rank: int, world: int) -> tuple[Tensors, Tensors, list[str]]:
    model, engine = _fsdp_model(), _engine(dtype="bf16")
    weights = ShardedWeights(model, lambda: pytest.fail("the weights are gathered"))
    joined = [engine.prepare().joined]
    first, error = _update(engine, weights)
    assert not error
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    joined.append(_connect(engine).prepare().joined)
    second, error = _update(engine, weights, step=1)
    assert not error
    assert first.keys() == second.keys()
    whole = {name: full(tensor.detach()) for name, tensor in model.state_dict().items()} if rank < TRAINERS else {}
    return second, whole, joined


def test_shards_become_the_tensors_of_a_hub() -> None:
    """Rounded to bf16 by torch, and split into experts by transformers; the group remains."""
    (nothing, whole, joined), *others = run(TRAINERS + ROLLOUTS, _sharded)
    expected = hub.to_hf(MOE, {name: tensor.bfloat16() for name, tensor in whole.items()})
    assert not nothing
    for received, _, _ in others[1:]:
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor), name
    assert joined[0] == joined[1] != ""


def _pairs(rank: int, fails: int = -1) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in a buffer of which every tensor is a part, as some of verl's engines do."""
    buffer = torch.empty(64, 96)
    for number in range(8):
        if number == fails and rank == 1:
            raise ZeroDivisionError
        buffer.fill_(number)
        yield f"layer.{number}.weight", buffer.t()
    buffer.zero_()


def _gathered(rank: int, world: int) -> tuple[Tensors, list[tuple[Tensors, str]]]:
    engine = _engine()
    whole, error = _update(engine, _pairs(rank))
    assert not error
    failures = [_update(_connect(engine), _pairs(rank, fails=6), step=1)]
    failures.append(_update(_engine(staged=False), _pairs(rank, fails=6), step=1))
    twice = [("a", torch.zeros(2)), ("a", torch.ones(2))]
    failures.append(_update(_connect(engine), twice))
    failures.append(_update(_connect(engine), _pairs(rank), step=rank))
    failures.append(_update(_engine(dtype="bf16"), _pairs(rank)))
    failures.append(_update(_connect(engine), _pairs(rank) if rank else ShardedWeights(torch.nn.Linear(1, 1), dict)))
    after, error = _update(_connect(engine), _pairs(rank))
    assert not error
    assert after.keys() == whole.keys()
    return whole, failures


def test_gathered_tensors_arrive_and_failures_reach_every_rank() -> None:
    answers = run(TRAINERS + ROLLOUTS, _gathered)
    for rank, (whole, failures) in enumerate(answers):
        rollout = rank >= TRAINERS
        assert [int(tensor[0, 0]) for tensor in whole.values()] == (list(range(8)) if rollout else [])
        assert all(tensor.shape == (96, 64) and len(tensor.unique()) == 1 for tensor in whole.values())
        (raised, streamed, *others) = failures
        assert not raised[0]
        assert len(streamed[0]) == (5 if rollout else 0)  # a bucket has no room for two
        assert all(not tensors for tensors, _ in others)
        expected = ["ZeroDivisionError", "ZeroDivisionError", "a", "different steps", "dtype: verl has", "some ranks"]
        for (_, message), words in zip(failures, expected, strict=True):
            assert words in message or (rank == 1 and words == "ZeroDivisionError"), (rank, message)


def test_the_secret_is_not_shown() -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    worker = VerlEngine(BUCKET, is_master=True).prepare()
    assert worker.secret not in repr(worker)


def test_a_worker_without_a_group_is_refused() -> None:
    with pytest.raises(tx.TransaxleError, match="no process group"):
        asyncio.run(VerlEngine(BUCKET).send_weights([]))
