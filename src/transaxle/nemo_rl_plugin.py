"""The checkpoint engine that NeMo-RL's workers use if `policy.generation.refit_transport` names it.

    policy:
      generation:
        refit_transport: transaxle.nemo_rl_plugin:NemoEngine
        refit_cfg:
          transaxle.nemo_rl_plugin:NemoEngine: {release_after_refit: true}

NeMo-RL's driver calls the engine's methods on all workers in a fixed order: `prepare`, `init_policy_process_group` on
the policy's workers and `init_rollout_process_group` on the rollouts', then for each update `send_weights` and
`receive_weight_batches`. The engine has the methods of NeMo-RL's `CheckpointEngine` (0.6), but does not inherit from
this class. NeMo-RL gathers each weight on all ranks of the policy, which share the sending.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields
from typing import Any

from transaxle.refit.checkpoint_engine import CheckpointEngine, Worker, same_group
from transaxle.refit.hub_stream import Bucket, Named

Described = Mapping[str, Any]
"""What a worker tells NeMo-RL's driver: the fields of `Worker`, and `rank`, which NeMo-RL adds and sorts by."""
_FIELDS = [field.name for field in fields(Worker)]


class NemoEngine(CheckpointEngine):
    """Sends the weights of a policy's ranks to the workers of all rollouts.

    NeMo-RL makes one for each worker, with the options in `policy.generation.refit_cfg`. A failed update raises an
    error on every worker. The driver must prepare the workers again before the next update, which it does if
    `release_after_refit` is True.

    Args:
        bucket_size: number of bytes of the tensors that are sent together.
        release_after_refit: whether NeMo-RL's driver prepares the workers again before every update. The process group
            remains nevertheless, while the same workers take part.
        **options: the options of `CheckpointEngine`.
    """

    shard_expert_weights = False
    """Whether NeMo-RL cuts experts before it passes them to this engine."""
    program = "NeMo-RL"
    order_hint = "Set release_after_refit: true, so that NeMo-RL's driver prepares all workers before every update."
    shards_hint = "Return ShardedWeights from the method _checkpoint_engine_weight_iterator of all policy workers."
    all_send = True

    def __init__(self, bucket_size: int, release_after_refit: bool = False, **options: Any) -> None:
        super().__init__(bucket_size, **options)
        self.release_after_refit = release_after_refit

    def get_target_weight_layout(self) -> None:
        """Return None: every worker of the rollouts receives whole tensors."""

    def prepare(self) -> dict[str, Any]:
        """Return what NeMo-RL's driver passes to all workers, as plain data."""
        from ray.util import get_node_ip_address

        return asdict(self._describe(get_node_ip_address().strip("[]")))

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Described]
    ) -> None:
        """Join the process group of all workers, as a rank of the policy.

        The workers keep the process group of the last update if it has the same workers in the same order.

        Args:
            worker_rank: rank of this worker among the policy's workers.
            train_world_size: number of the policy's workers.
            rollout_world_size: number of the rollouts' workers.
            metadata: what `prepare` has returned, first on the policy's workers.

        Raises:
            TransaxleError: if not all workers join in time; see `transaxle.refit.meet`.
        """
        workers = [Worker(**{name: worker[name] for name in _FIELDS}) for worker in metadata]
        if not same_group(workers):
            self._join(worker_rank, train_world_size + rollout_world_size, train_world_size, workers[0])

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Described]
    ) -> None:
        """Join the process group of all workers, as a worker of the rollouts; `init_policy_process_group` describes the
        arguments.
        """
        self.init_policy_process_group(
            worker_rank=train_world_size + rollout_rank,
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
            metadata=metadata,
        )

    async def send_weights(self, weights: Iterable[Named]) -> None:
        """Send all weights to the rollouts; every rank of the policy must call this method.

        Args:
            weights: `ShardedWeights`, or the pairs (name, whole tensor), the same on all ranks, all of which iterate.

        Raises:
            TransaxleError: raised on every worker, with every problem of every worker.
        """
        self._send(weights, None)

    async def receive_weight_batches(self) -> AsyncIterator[Bucket]:
        """Yield lists of pairs (name, whole tensor); every worker of the rollouts must iterate to the end.

        Raises:
            TransaxleError: raised on every worker, with every problem of every worker.
        """
        with closing(self._receive(None)) as batches:
            for batch in batches:
                yield batch

    def finalize(self) -> None:
        """Do nothing: an update leaves no memory behind, and the process group remains for the next update."""
