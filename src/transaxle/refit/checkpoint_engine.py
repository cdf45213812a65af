"""What the checkpoint engines for verl and NeMo-RL have in common: the process group of all workers, and an update of
all rollouts.

A driver calls methods of the engines on all workers in a fixed order: `prepare`, a method by which the workers join a
process group, then sending on the trainer's workers and receiving on the rollouts' workers, and `finalize`. The two
programs differ in the names of these methods, and in what their driver passes.

All workers are ranks of one process group, first those of the trainer. Each rank of the trainer sends the shards that
it has, if it gets the weights as `ShardedWeights`. Otherwise the program has already gathered them, and ranks send
whole tensors. In both cases every worker of the rollouts receives whole tensors, because both programs pass whole
tensors to vLLM and other inference engines, which cut them.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

import torch
import xxhash
from torch import nn

from transaxle.arguments import DType, PathLike, read_text
from transaxle.errors import TransaxleError, refuse
from transaxle.live.model.state_tensors import State
from transaxle.live.transport.world import World
from transaxle.refit.hops import disband, free_address, meet
from transaxle.refit.hub_stream import Bucket, Named, named_tensors, read_streaming

_HUB, _SAME_NAMES = "hf", "identity"
"""The dialect of hubs, and the one that keeps all tensor names."""
_TIMEOUT = 300.0
_CPU = torch.device("cpu")
_NO_WEIGHTS = "Pass all weights of the trainer; an iterator that was used before has none left."
_STOPPED = "Look at the first error of that worker."
_TWICE = "Give each parameter of the trainer's model a name of its own."


class ShardedWeights:
    """The weights of a trainer's model in their shards; iterating over this object gathers whole tensors, as the
    trainer's program does.

    Args:
        model: the sharded model.
        gather: function that returns the pairs (name, whole tensor) that the program would pass on.
    """

    def __init__(self, model: nn.Module, gather: Callable[[], Iterable[Named]]) -> None:
        self.model = model
        self._gather = gather

    def __iter__(self) -> Iterator[Named]:
        return iter(self._gather())


@dataclass(frozen=True)
class Worker:
    """What a worker tells the driver before an update."""

    joined: str
    """Name of the process group that this worker is in; "" if it is in none."""
    number: int
    """The worker's rank in this group; -1 if it is in none."""
    address: str = ""
    """`HOST:PORT` at which this worker can listen for others; "" on workers that cannot be the first of a group."""
    secret: str = field(default="", repr=False)
    """Secret of a new process group at this address."""
    name: str = ""
    """Name of this new process group."""


def same_group(workers: Sequence[Worker]) -> bool:
    """Return whether all workers, in this order, are the ranks of one process group."""
    joined = {worker.joined for worker in workers}
    return len(joined) == 1 and "" not in joined and [worker.number for worker in workers] == [*range(len(workers))]


class CheckpointEngine:
    """Sends the weights of a trainer's ranks to the workers of all rollouts.

    The program makes one engine for each worker. A failed update raises an error on every worker, after which no
    worker is in a process group.

    Args:
        bucket_size: number of bytes of the tensors that are sent together.
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

    Weights that the program has gathered keep their names and dtypes, and are refused if `to`, `dtype`, `family` or
    `rules` ask for something else.

    Raises:
        TypeError, ValueError: if an option is invalid.
    """

    program: ClassVar[str]
    """Name of the program."""
    order_hint: ClassVar[str]
    """The hint for methods that are not called in order on all workers."""
    shards_hint: ClassVar[str]
    """The hint how the program passes shards on."""
    all_send: ClassVar[bool]
    """Whether the ranks of the trainer share the sending of gathered tensors; otherwise the first rank sends all."""

    def __init__(
        self,
        bucket_size: int,
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
        self._to, self._bucket_size = read_text("to", to, _HUB), bucket_size
        self._staged, self._backend, self._timeout = staged, backend, timeout
        self._world: World | None = None
        self._joined = ""
        self._rollouts: list[int] = []
        """Ranks of the rollouts' workers."""

    def _describe(self, host: str) -> Worker:
        """Return what this worker tells the driver.

        Args:
            host: address of this machine, at which a new process group can meet; "" if this worker is not its first.
        """
        number = -1 if self._world is None else self._world.rank
        if not host:
            return Worker(self._joined, number)
        return Worker(self._joined, number, free_address(host), secrets.token_hex(), secrets.token_hex(8))

    def _join(self, number: int, size: int, trainers: int, first: Worker) -> None:
        """Leave the present process group, and join that of all workers.

        Args:
            number: this worker's rank in the new group.
            size: number of ranks in the group.
            trainers: number of the trainer's ranks, which come first.
            first: the trainer's first rank.

        Raises:
            TransaxleError: if not all workers join in time; see `transaxle.refit.meet`.
        """
        self._leave()
        group = meet(first.address, number, size, secret=first.secret, backend=self._backend, timeout=self._timeout)
        self._world, self._joined = World(group), first.name
        self._rollouts = [*range(trainers, size)]

    def _send(self, weights: Iterable[Named], step: int | None) -> None:
        """Send all weights to the rollouts; every rank of the trainer must call this method.

        Args:
            weights: `ShardedWeights`, or the pairs (name, whole tensor), the same on all ranks, all of which iterate.
            step: number of the trainer's step, the same on all workers.

        Raises:
            TransaxleError: raised on every worker, with every problem of every worker.
        """
        with self._update() as world:
            self._agree(world, step, sharded=isinstance(weights, ShardedWeights))
            if isinstance(weights, ShardedWeights):
                stream = self._shards(world, weights.model, None)
            else:
                stream = self._whole_tensors(world, self._fill_buckets(weights, world.rank), None)
            for _ in self._confirm(world, stream):
                pass

    def _receive(self, step: int | None) -> Generator[Bucket]:
        """Yield lists of pairs (name, whole tensor) that the trainer sends; every worker of the rollouts must iterate
        to the end.

        Args:
            step: number of the trainer's step, the same on all workers.

        Raises:
            TransaxleError: raised on every worker, with every problem of every worker.
        """
        yielded_on = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU
        with self._update() as world:
            sharded = self._agree(world, step, sharded=None)
            device = _CPU if self._staged else yielded_on
            stream = self._shards(world, {}, device) if sharded else self._whole_tensors(world, iter(()), device)
            stream = self._confirm(world, stream)
            if not self._staged:
                yield from stream
                return
            staged = deque(stream)
        while staged:
            yield [(name, tensor.to(yielded_on)) for name, tensor in staged.popleft()]

    def _confirm(self, world: World, stream: Iterator[Bucket]) -> Generator[Bucket]:
        """Yield buckets, and let all workers wait until each bucket was taken on all of them.

        Raises:
            StorageError: with code IO, if another worker does not iterate to the end.
        """
        for bucket in stream:
            try:
                yield bucket
            except BaseException:
                with suppress(TransaxleError):  # this worker raises its own error
                    world.agree(refuse("IO", f"rank {world.rank} stopped before it had all weights", hint=_STOPPED))
                raise
            world.agree(None)

    @contextmanager
    def _update(self) -> Iterator[World]:
        """Return the ranks of an update; after an error this worker leaves their group, so that none waits for it."""
        if self._world is None:
            raise refuse("IO", "this worker is in no process group", hint=self.order_hint)
        try:
            yield self._world
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        if self._world is not None and self._world.group is not None:
            disband(self._world.group)
        self._world, self._joined = None, ""

    def _agree(self, world: World, step: int | None, *, sharded: bool | None) -> bool:
        """Return whether the trainer's ranks send shards.

        Args:
            world: the ranks of the update.
            step: number of the trainer's step, as this worker knows it.
            sharded: whether this rank sends shards; None on the workers of rollouts.
        """
        answers = world.gather((step, sharded))
        steps = {step for step, _ in answers}
        if len(steps) > 1:
            raise refuse("AMBIGUOUS", f"the workers are at different steps: {steps}", hint=self.order_hint)
        kinds = {kind for _, kind in answers if kind is not None}
        if len(kinds) != 1:
            raise refuse(
                "AMBIGUOUS", "some ranks of the trainer have shards, others whole tensors", hint=self.shards_hint
            )
        translations = [name for name, value in self._options.items() if value is not None]
        translations += ["to"] * (self._to != _HUB)
        if kinds == {False} and translations:
            options = ", ".join(translations)
            message = f"{options}: {self.program} has already gathered the weights, under its own names"
            raise refuse("UNSUPPORTED", message, hint=f"{self.shards_hint} Or omit the option.")
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

    def _whole_tensors(self, world: World, shares: Iterator[_Share], device: torch.device | None) -> Iterator[Bucket]:
        """Yield the tensors of the trainer, bucket by bucket, on the workers of rollouts.

        Args:
            world: the ranks of the update.
            shares: the buckets of the trainer, and what this rank sends of each; empty on the workers of rollouts.
            device: device of the yielded tensors.
        """
        for number in count():
            share: _Share | None = None
            with world.together():
                share = next(shares, None)
            contents = world.gather(None if share is None else share.contents)[: self._rollouts[0]]
            if len(set(contents)) > 1:
                raise refuse("AMBIGUOUS", "the ranks of the trainer have different weights", hint=self.order_hint)
            if contents[0] is None:
                if not number:
                    raise refuse("MISSING_TENSOR", f"{self.program} passed no weights to send", hint=_NO_WEIGHTS)
                return
            state = {} if share is None else share.tensors
            yield from named_tensors(
                state, to=_SAME_NAMES, bucket=self._bucket_size, on=self._rollouts, group=world.group, device=device
            )

    def _fill_buckets(self, weights: Iterable[Named], rank: int) -> Iterator[_Share]:
        """Collect tensors into buckets of at most `bucket_size` bytes; a larger tensor is alone in its bucket.

        Args:
            weights: pairs (name, whole tensor); the tensors are copied, since the program may change them afterwards.
            rank: this rank of the trainer. If the ranks share the sending, the next tensor is sent by the rank that
                has sent the fewest bytes so far.
        """
        bytes_by_rank = [0] * (self._rollouts[0] if self.all_send else 1)
        tensors: dict[str, torch.Tensor] = {}
        names: set[str] = set()
        contents, size = xxhash.xxh3_128(), 0
        for name, tensor in weights:
            if name in names:
                raise refuse(
                    "NAME_COLLISION", f"{self.program} sends two tensors of this name", tensor=name, hint=_TWICE
                )
            if size and size + tensor.nbytes > self._bucket_size:
                yield _Share(tensors, contents.hexdigest())
                tensors, size = {}, 0
            names.add(name)
            size += tensor.nbytes
            if self.all_send:
                contents.update(repr((name, tensor.shape, tensor.dtype)).encode())
            sender = bytes_by_rank.index(min(bytes_by_rank))
            bytes_by_rank[sender] += tensor.nbytes
            if sender == rank:
                tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        if names:
            yield _Share(tensors, contents.hexdigest())


@dataclass(frozen=True)
class _Share:
    """What one rank of the trainer sends of a bucket."""

    tensors: State
    """The tensors that this rank sends."""
    contents: str
    """Hash of names, shapes and dtypes of all tensors up to the end of this bucket; the same for every bucket if only
    the trainer's first rank sends.
    """
