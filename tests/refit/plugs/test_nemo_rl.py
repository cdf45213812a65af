"""The checkpoint engine for NeMo-RL, its methods called as NeMo-RL's driver and workers call them, on ranks over gloo.

`connect`, `send` and `receive` are NeMo-RL's calls, from its sources (0.6, commit 7ea279a): the order is that of
`weight_sync/checkpoint_engine_weight_synchronizer.py`, and the arguments are those of the mixins in
`models/policy/workers/checkpoint_engine.py` and `models/generation/vllm/checkpoint_engine.py`. `test_nemo_rl_updates`
runs these classes themselves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import LLAMA, MOE, full, shard
from tests.oracles import hub
from transaxle.nemo_rl_plugin import NemoEngine
from transaxle.refit import checkpoint_engine
from transaxle.refit.checkpoint_engine import ShardedWeights

TRAINERS, ROLLOUTS = 2, 2
BUCKET = 20_000
TRANSPORT = "transaxle.nemo_rl_plugin:NemoEngine"
Tensors = dict[str, torch.Tensor]


def create(**options: Any) -> NemoEngine:
    """Create an engine, as all workers do: `refit_transport` is a path, and `release_after_refit` is always passed."""
    module, name = TRANSPORT.split(":")
    engine = getattr(import_module(module), name)(bucket_size=BUCKET, **{"release_after_refit": False, **options})
    assert isinstance(engine, NemoEngine)
    assert not engine.shard_expert_weights
    return engine


def connect(engine: NemoEngine, rollouts: int = ROLLOUTS) -> NemoEngine:
    """Prepare all workers, and give all the metadata of all, in plain data; the last ranks may be left out."""
    rank, trainers = dist.get_rank(), TRAINERS
    own_rank = rank if rank < trainers else rank - trainers
    metadata: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(metadata, json.dumps({**engine.prepare(), "rank": own_rank}))
    topology: Any = {
        "train_world_size": trainers,
        "rollout_world_size": rollouts,
        "metadata": [json.loads(worker) for worker in metadata[: trainers + rollouts]],
    }
    if rank < trainers:
        engine.init_policy_process_group(worker_rank=rank, **topology)
    elif rank < trainers + rollouts:
        engine.init_rollout_process_group(rollout_rank=own_rank, **topology)
    return engine


def update(engine: NemoEngine, weights: Any, refuses: str = "") -> tuple[Tensors, str]:
    """Return the tensors that this rank gets in an update, and the error, if there is one.

    Args:
        engine: the engine of this rank.
        weights: what the policy's ranks send.
        refuses: tensor that the last rank does not take.
    """
    tensors: Tensors = {}

    async def receive() -> None:
        async for batch in engine.receive_weight_batches():
            assert isinstance(batch, list)
            assert sum(tensor.nbytes for _, tensor in batch) <= BUCKET or len(batch) == 1
            tensors.update({name: tensor.clone() for name, tensor in batch})
            if refuses in tensors and dist.get_rank() == TRAINERS + ROLLOUTS - 1:
                raise ZeroDivisionError(refuses)

    try:
        asyncio.run(engine.send_weights(weights) if dist.get_rank() < TRAINERS else receive())
    except (tx.TransaxleError, ZeroDivisionError) as error:
        return tensors, str(error)
    return tensors, ""


def _model(settings: dict[str, Any]) -> Any:
    """Return a model that FSDP2 has cut over the trainer's ranks."""
    torch.manual_seed(0)
    model = hub.model(settings, torch.float32)
    mesh = DeviceMesh("cpu", range(TRAINERS))  # all ranks create the group of some
    if dist.get_rank() < TRAINERS:
        shard(model, mesh)
    return model


def _gather(model: Any, scale: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what NeMo-RL passes on: each tensor whole, in the policy's precision; only the policy's ranks iterate."""
    for name, tensor in model.state_dict().items():
        yield name, (full(tensor.detach()) * scale).bfloat16()


def _fail(weights: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights, with an error on the policy's second rank; no rank waits for another one meanwhile."""
    for number, pair in enumerate(weights.items()):
        if number == 9 and dist.get_rank() == 1:
            raise ZeroDivisionError
        yield pair


def _updates(rank: int, world: int) -> tuple[dict[str, tuple[Tensors, str]], list[Tensors], list[int]]:
    model, engine = _model(LLAMA), connect(create(timeout=60))
    sent: list[int] = []

    def spy(state: Any, **options: Any) -> Any:
        sent.append(sum(tensor.nbytes for tensor in state.values()))
        return tx.refit.named_tensors(state, **options)

    steps = {}
    with mock.patch.object(checkpoint_engine, "named_tensors", spy):
        steps["first"] = update(engine, _gather(model))
    steps["second"] = update(engine, _gather(model, 1.5))
    joined = [engine.prepare()["joined"]]
    expected = [dict(_gather(model, scale)) if rank < TRAINERS else {} for scale in (1.0, 1.5, 2.0)]
    steps["failure"] = update(engine, _fail(expected[0]))
    steps["unprepared"] = update(engine, _gather(model))
    engine.finalize()
    steps["one rollout"] = (
        update(connect(engine, 1), _gather(model, 2.0)) if rank < 3 else ({}, str(connect(engine, 1)))
    )
    steps["both"] = update(connect(engine), _gather(model))
    joined.append(engine.prepare()["joined"])
    steps["same group"] = update(connect(engine), _gather(model, 1.5))
    joined.append(engine.prepare()["joined"])
    steps["no weights"] = update(engine, iter(()))
    steps["not taken"] = update(connect(create(timeout=60, staged=False)), _gather(model), "lm_head.weight")
    connect(engine)
    other = [("a", torch.ones(4)), ("b" if rank else "c", torch.ones(4))]
    steps["other names"] = update(engine, iter(other))
    steps["cast"] = update(connect(create(timeout=60, dtype="bf16")), _gather(model))
    assert joined[0] != joined[1] == joined[2] != ""
    return steps, expected, sent


def test_rollouts_get_the_tensors_of_a_hub_and_failures_reach_every_rank() -> None:
    answers = run(TRAINERS + ROLLOUTS, _updates)
    plain, larger, largest = answers[0][1]
    nothing: Tensors = {}
    expected = {
        "first": (plain, ""),
        "second": (larger, ""),
        "failure": (nothing, "ZeroDivisionError"),
        "unprepared": (nothing, "release_after_refit: true"),
        "one rollout": (largest, ""),
        "both": (plain, ""),
        "same group": (larger, ""),
        "no weights": (nothing, "NeMo-RL passed no weights"),
        "not taken": (plain, "rank 3 stopped before it had all weights"),
        "other names": (nothing, "different weights"),
        "cast": (nothing, "dtype: NeMo-RL has already gathered"),
    }
    for rank, (steps, _, _) in enumerate(answers):
        assert list(steps) == list(expected)
        for step, (tensors, words) in expected.items():
            received, error = steps[step]
            if step == "one rollout" and rank == 3:
                continue
            assert words in error or (rank, step) in {(1, "failure"), (3, "not taken")}, (rank, step, error)
            assert bool(words) == bool(error) or rank == 1, (rank, step, error)
            assert received.keys() == (tensors.keys() if rank >= TRAINERS else set()), (rank, step)
            for name, tensor in received.items():
                assert tensor.dtype == tensors[name].dtype
                assert torch.equal(tensor, tensors[name]), (rank, step, name)
    sizes = [tensor.nbytes for tensor in plain.values()]
    first, second, *rollouts = [sum(sent) for _, _, sent in answers]
    assert first + second == sum(sizes), "each tensor is sent once"
    assert abs(first - second) <= max(sizes), "the ranks of the policy share the sending"
    assert rollouts == [0, 0]


def _sharded(rank: int, world: int) -> tuple[Tensors, str]:
    model, engine = _model(MOE), connect(create(timeout=60, dtype="bf16", staged=False))
    received, error = update(engine, ShardedWeights(model, lambda: pytest.fail("the weights are gathered")))
    return (dict(_gather(model)) if rank < TRAINERS else received), error


def test_shards_of_a_worker_s_own_class() -> None:
    (whole, _), _, *rollouts = run(TRAINERS + ROLLOUTS, _sharded)
    expected = hub.to_hf(MOE, whole)
    for received, error in rollouts:
        assert not error
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(received[name], tensor), name
