"""The checkpoint engine that verl's workers use if `checkpoint_engine.backend` is `transaxle`.

verl's driver calls the engine's methods on all workers in a fixed order: `prepare`, `init_process_group`, then
`send_weights` on the trainer's workers and `receive_weights` on the rollout's, and `finalize`. The engine has the
methods of verl's `CheckpointEngine` (0.9), but does not inherit from this class; `transaxle.verl_plugin` registers it.

All workers are ranks of one process group, first those of the trainer. Each rank of the trainer sends the shards that
it has, if it gets the weights as `ShardedWeights`. Otherwise verl has already gathered them, and the trainer's first
rank sends them. In both cases every worker of the rollout receives whole tensors, because verl passes whole tensors to
vLLM, SGLang and TensorRT-LLM, which cut them.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from transaxle.arguments import DType, PathLike, read_text
from transaxle.errors import refuse
from transaxle.live.model.state_tensors import State
from transaxle.live.transport.world import World
from transaxle.refit.hops import disband, free_address, meet
from transaxle.refit.hub_stream import Bucket, Named, named_tensors, read_streaming

BACKEND = "transaxle"
"""Name of the checkpoint engine in verl's config."""
_HUB, _SAME_NAMES = "hf", "identity"
"""The dialect of hubs, and the one that keeps all tensor names."""
_TIMEOUT = 300.0
_CPU = torch.device("cpu")
_MASTER = "MASTER_ADDR"
"""Environment variable with the address of the first rank of a worker's job."""
_ORDER = "Call the engine's methods on all workers, in the order of verl's CheckpointEngineManager."
_TWICE = "Give each parameter of the trainer's model a name of its own."
_PLUGIN = "Set actor_rollout_ref.model.external_lib=transaxle.verl_plugin, for FSDP2 without adapters."


class ShardedWeights:
    """The weights of a trainer's model in their shards; iterating over this object gathers whole tensors, as verl does.

    Args:
        model: the sharded model.
        gather: function that returns the pairs (name, whole tensor) that verl would pass on.
    """

    def __init__(self, model: nn.Module, gather: Callable[[], Iterable[Named]]) -> None:
        self.model = model
        self._gather = gather

    def __iter__(self) -> Iterator[Named]:
        return iter(self._gather())


@dataclass(frozen=True)
class Worker:
    """What a worker tells verl's driver before an update."""

    joined: str
    """Name of the process group that this worker is in; "" if it is in none."""
    number: int
    """The worker's rank in this group; -1 if it is in none."""
    address: str = ""
    """`HOST:PORT` at which this worker can listen for others; "" on all workers but the trainer's first."""
    secret: str = field(default="", repr=False)
    """Secret of a new process group at this address."""
    name: str = ""
    """Name of this new process group."""


class VerlEngine:
    """Sends the weights of a trainer's ranks to the workers of all rollouts.

    verl makes one for each worker, with the options in `checkpoint_engine.engine_kwargs.transaxle`. A failed update
    raises an error on every worker, and the next update makes a new process group.

    Args:
        bucket_size: number of bytes of the tensors that are sent together.
        is_master: whether this worker is the trainer's first rank.
        to: dialect of the tensor names that the rollouts get.
        dtype: `bf16`, `fp16` or `fp32`. Plain weights are cast to this dtype before they are sent, except those that
            the table marks as precise. If `dtype` is None, nothing is cast.
        family: model family; None means that it is recognised from config and names.
        rules: path of the user's own table of tensor names.
        staged: whether a worker of a rollout receives the whole model, in the machine's memory, before it passes the
            first tensor on, so that a failed update changes no rollout. If `staged` is False, a worker needs memory for
            one bucket only, but a failed update can leave a rollout with some new weights.
        backend: `gloo` or `nccl`; None means `nccl` if torch finds a GPU, else `gloo`.
        timeout: seconds that a worker waits for other workers.

    Weights that verl has gathered keep their names and dtypes, and are refused if `to`, `dtype`, `family` or `rules`
    ask for something else.

    Raises:
        TypeError, ValueError: if an option is invalid.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        to: str = _HUB,
        dtype: DType | None = None,
        family: str | None = None,
        rules: PathLike | None = None,
        staged: bool = True,
        backend: str | None = None,
        timeout: float = _TIMEOUT,
    ) -> None:
        self._options: dict[str, Any] = {"dtype": dtype, "family": family, "rules": rules}
        read_streaming(self._options)
        self._to, self._bucket_size, self._is_master = read_text("to", to, _HUB), bucket_size, is_master
        self._staged, self._backend, self._timeout = staged, backend, timeout
        self._world: World | None = None
        self._joined = ""
        self._rollouts: list[int] = []
        """Ranks of the rollouts' workers."""

    def prepare(self) -> Worker:
        """Return what verl's driver passes to `build_topology`."""
        number = -1 if self._world is None else self._world.rank
        if not self._is_master:
            return Worker(self._joined, number)
        host = os.environ.get(_MASTER, "").strip("[]")
        if not host:
            raise refuse(
                "IO",
                f"{_MASTER} is not set",
                hint="Start workers with verl, which sets it to the address of the trainer's first rank.",
            )
        return Worker(self._joined, number, free_address(host), secrets.token_hex(), secrets.token_hex(8))

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
        joined = {worker.joined for worker in metadata}
        same_group = len(joined) == 1 and "" not in joined and [worker.number for worker in metadata] == [*range(size)]
        arguments = {
            "number": [*range(size)],
            "size": [size] * size,
            "trainers": [trainers] * size,
            "master": [None if same_group else metadata[0]] * size,
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
        if master is None:
            return
        self._leave()
        group = meet(master.address, number, size, secret=master.secret, backend=self._backend, timeout=self._timeout)
        self._world, self._joined = World(group), master.name
        self._rollouts = [*range(trainers, size)]

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> None:
        """Send all weights to the rollouts; every rank of the trainer must call this method.

        Args:
            weights: `ShardedWeights`, or the pairs (name, whole tensor), the same on all ranks, all of which iterate.
            global_steps: number of the trainer's step, the same on all workers.

        Raises:
            TransaxleError: raised on every worker, with every problem of every worker.
        """
        with self._update() as world:
            self._agree(world, global_steps, sharded=isinstance(weights, ShardedWeights))
            if isinstance(weights, ShardedWeights):
                stream = self._shards(world, weights.model, None)
            else:
                stream = self._whole_tensors(world, self._fill_buckets(weights, keep=world.rank == 0), None)
            for _ in stream:
                pass

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        """Yield the pairs (name, whole tensor) that the trainer sends; every worker of the rollouts must iterate to the
        end.

        Args:
            global_steps: number of the trainer's step, the same on all workers.

        Raises:
            TransaxleError: raised on every worker, with every problem of every worker.
        """
        yielded_on = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU
        with self._update() as world:
            sharded = self._agree(world, global_steps, sharded=None)
            device = _CPU if self._staged else yielded_on
            stream = self._shards(world, {}, device) if sharded else self._whole_tensors(world, iter(()), device)
            if not self._staged:
                for bucket in stream:
                    for pair in bucket:
                        yield pair
                return
            staged = deque(pair for bucket in stream for pair in bucket)
        while staged:
            name, tensor = staged.popleft()
            yield name, tensor.to(yielded_on)

    def finalize(self) -> None:
        """Do nothing: an update leaves no memory behind, and the process group remains for the next update."""

    @contextmanager
    def _update(self) -> Iterator[World]:
        """Return the ranks of an update; after an error this worker leaves their group, so that none waits for it."""
        if self._world is None:
            raise refuse("IO", "this worker is in no process group", hint=_ORDER)
        try:
            yield self._world
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        if self._world is not None and self._world.group is not None:
            disband(self._world.group)
        self._world, self._joined = None, ""

    def _agree(self, world: World, global_steps: int | None, *, sharded: bool | None) -> bool:
        """Return whether the trainer's ranks send shards.

        Args:
            world: the ranks of the update.
            global_steps: number of the trainer's step, as this worker knows it.
            sharded: whether this rank sends shards; None on the workers of rollouts.
        """
        answers = world.gather((global_steps, sharded))
        steps = {step for step, _ in answers}
        if len(steps) > 1:
            raise refuse("AMBIGUOUS", f"the workers are at different steps: {steps}", hint=_ORDER)
        kinds = {kind for _, kind in answers if kind is not None}
        if len(kinds) != 1:
            raise refuse("AMBIGUOUS", "some ranks of the trainer have shards, others whole tensors", hint=_PLUGIN)
        translations = [name for name, value in self._options.items() if value is not None]
        translations += ["to"] * (self._to != _HUB)
        if kinds == {False} and translations:
            message = f"{', '.join(translations)}: verl has already gathered the weights, under its own names"
            raise refuse("UNSUPPORTED", message, hint=f"{_PLUGIN} Or omit the option.")
        return kinds == {True}

    def _shards(self, world: World, state: State, device: torch.device | None) -> Iterator[Bucket]:
        """Yield whole tensors, assembled from the shards of all ranks, on the workers of rollouts."""
        return named_tensors(
            state,
            to=self._to,
            bucket=self._bucket_size,
            on=self._rollouts,
            group=world.group,
            device=device,
            **self._options,
        )

    def _whole_tensors(self, world: World, buckets: Iterator[State], device: torch.device | None) -> Iterator[Bucket]:
        """Yield the tensors of the trainer's first rank, bucket by bucket, on the workers of rollouts.

        Args:
            world: the ranks of the update.
            buckets: the buckets of this rank; empty on the workers of rollouts.
            device: device of the yielded tensors.
        """
        while True:
            bucket: State | None = None
            with world.together():
                bucket = next(buckets, None)
            counts = world.gather(bucket is not None)
            if len(set(counts[: self._rollouts[0]])) > 1:
                raise refuse("AMBIGUOUS", "the ranks of the trainer have different weights", hint=_ORDER)
            if not counts[0]:
                return
            yield from named_tensors(
                bucket or {}, to=_SAME_NAMES, bucket=self._bucket_size, on=self._rollouts, group=world.group,
                device=device,
            )  # fmt: skip

    def _fill_buckets(self, weights: Iterable[Named], *, keep: bool) -> Iterator[State]:
        """Collect tensors into buckets of at most `bucket_size` bytes; a larger tensor is alone in its bucket.

        Args:
            weights: pairs (name, whole tensor); the tensors are copied, since verl may change them afterwards.
            keep: whether the buckets contain the tensors; otherwise they are empty.
        """
        bucket: dict[str, torch.Tensor] = {}
        names: set[str] = set()
        size = 0
        for name, tensor in weights:
            if name in names:
                raise refuse("NAME_COLLISION", "verl sends two tensors of this name", tensor=name, hint=_TWICE)
            if size and size + tensor.nbytes > self._bucket_size:
                yield bucket
                bucket, size = {}, 0
            names.add(name)
            size += tensor.nbytes
            if keep:
                bucket[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        if names:
            yield bucket
