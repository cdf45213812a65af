"""The checkpoint engine that verl's workers use if `checkpoint_engine.backend` is `transaxle`.

verl's driver calls the engine's methods on all workers in a fixed order: `prepare`, `init_process_group`, then
`send_weights` on the trainer's workers and `receive_weights` on the rollout's, and `finalize`. The engine has the
methods of verl's `CheckpointEngine` (0.9), but does not inherit from this class; `transaxle.verl_plugin` registers it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import closing
from typing import Any

from transaxle.errors import refuse
from transaxle.refit.checkpoint_engine import CheckpointEngine, ShardedWeights, Worker, same_group
from transaxle.refit.hub_stream import Named

__all__ = ["BACKEND", "ShardedWeights", "VerlEngine"]

BACKEND = "transaxle"
"""Name of the checkpoint engine in verl's config."""
_MASTER = "MASTER_ADDR"
"""Environment variable with the address of the first rank of a worker's job."""


class VerlEngine(CheckpointEngine):
    """Sends the weights of a trainer's ranks to the workers of all rollouts.

    verl makes one for each worker, with the options in `checkpoint_engine.engine_kwargs.transaxle`. A failed update
    raises an error on every worker, and the next update makes a new process group.

    Args:
        bucket_size: number of bytes of the tensors that are sent together.
        is_master: whether this worker is the trainer's first rank.
        **options: the options of `CheckpointEngine`.
    """

    wire_format = "named_tensors"
    program = "verl"
    order_hint = "Call the engine's methods on all workers, in the order of verl's CheckpointEngineManager."
    shards_hint = "Set actor_rollout_ref.model.external_lib=transaxle.verl_plugin, for FSDP2 without adapters."
    all_send = False  # verl needs the tensors of the first rank only

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:
        super().__init__(bucket_size, **options)
        self._is_master = is_master

    def prepare(self) -> Worker:
        """Return what verl's driver passes to `build_topology`."""
        host = os.environ.get(_MASTER, "").strip("[]")
        if self._is_master and not host:
            raise refuse(
                "IO",
                f"{_MASTER} is not set",
                hint="Start workers with verl, which sets it to the address of the trainer's first rank.",
            )
        return self._describe(host if self._is_master else "")

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Worker]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`, for the trainer's workers and for the rollouts'.

        The workers keep the process group of the last update if it has the same workers in the same order.

        Args:
            actor_wg_world_size: number of the trainer's workers.
            rollout_world_size: number of the rollouts' workers.
            metadata: what `prepare` has returned, first on the trainer's workers.
        """
        trainers, size = actor_wg_world_size, actor_wg_world_size + rollout_world_size
        arguments = {
            "number": [*range(size)],
            "size": [size] * size,
            "trainers": [trainers] * size,
            "master": [None if same_group(metadata) else metadata[0]] * size,
        }
        return (
            {name: values[:trainers] for name, values in arguments.items()},
            {name: values[trainers:] for name, values in arguments.items()},
        )

    def init_process_group(self, number: int, size: int, trainers: int, master: Worker | None) -> None:
        """Join the process group of all workers.

        Args:
            number: this worker's rank in the group.
            size: number of ranks in the group.
            trainers: number of the trainer's ranks, which come first.
            master: the trainer's first rank; None means that this worker stays in the group of the last update.

        Raises:
            TransaxleError: if not all workers join in time; see `transaxle.refit.meet`.
        """
        if master is not None:
            self._join(number, size, trainers, master)

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> None:
        """Send all weights to the rollouts; every rank of the trainer must call this method.

        Args:
            weights: `ShardedWeights`, or the pairs (name, whole tensor), the same on all ranks, all of which iterate.
            global_steps: number of the trainer's step, the same on all workers.

        Raises:
            TransaxleError: raised on every worker, with every problem of every worker.
        """
        self._send(weights, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        """Yield the pairs (name, whole tensor) that the trainer sends; every worker of the rollouts must iterate to the
        end.

        Args:
            global_steps: number of the trainer's step, the same on all workers.

        Raises:
            TransaxleError: raised on every worker, with every problem of every worker.
        """
        with closing(self._receive(global_steps)) as buckets:
            for bucket in buckets:
                for pair in bucket:
                    yield pair

    def finalize(self) -> None:
        """Do nothing: an update leaves no memory behind, and the process group remains for the next update."""
