"""The stream of whole tensors: what every rank holds a part of, put together bucket by bucket under a hub's names.

For engines that cut what they are given themselves. Where both sides are known, `Refit` sends much less.

**Carrying a program out**: what each rank holds is packed, sent, and laid where it belongs.

A source for the trainer engines that vLLM itself has, such as `nccl`: whole tensors under a hub's names.

Those engines broadcast every tensor to every worker. `VllmRefit` sends each worker its own part alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from transaxle.arguments import (
    Config,
    DType,
    PathLike,
    Size,
    read_float_type,
    read_optional_text,
    read_size,
    read_text,
    suggests,
)
from transaxle.encodings.encoding import CASTS, PLAIN
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.settings import Settings, settings
from transaxle.engine.plan.conversion import for_hub, make_plan, ready
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.engine.views.cast import precise
from transaxle.errors import gathered
from transaxle.live.global_tensors import census
from transaxle.live.memory import Replicas, check_zero, container, rank_of
from transaxle.live.model.destination import check_dtype
from transaxle.live.model.quantized_model import published
from transaxle.live.model.state_tensors import Leaves, State, leaves, shared_config, unsavable
from transaxle.live.transport.tensor_exchange import BucketExchange
from transaxle.live.transport.world import World
from transaxle.move.transfer import DeferredErrors
from transaxle.move.workers import Item
from transaxle.options import select
from transaxle.refit.endpoints import SourceValues, TargetRoom
from transaxle.refit.hops import Program, program, schedule
from transaxle.torch_tensors import Device, Ranks, local_of, local_parts, read_device, torch_dtype

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import ParamMeta


def carry(program: Program, source: SourceValues, target: TargetRoom, exchange: BucketExchange) -> None:
    """Give this rank's target everything that the program moves into it; collective.

    Raises:
        StorageError: IO where a rank is lost.
        Exception: what an endpoint raised, on this rank alone, when all exchanges are over.
    """
    rounds = program.schedule.rounds

    def copy_own() -> None:
        for _, key, transfers in program.schedule.own:
            for transfer in transfers:
                source.copy(transfer, target.of(key))

    def pack(number: int, parcel: int, buffer: torch.Tensor) -> None:
        for packing, _ in rounds[number][parcel].steps:
            source.copy(packing, buffer)

    def take(number: int, parcel: int, buffer: torch.Tensor) -> None:
        hop = rounds[number][parcel]
        for _, spreading in hop.steps:
            target.lay(hop.key, spreading, buffer)

    # An error of this rank must not end the collective calls, or the others would wait for it.
    later = DeferredErrors()
    later(copy_own)()
    exchange.run(program.route, later(pack), later(take))
    later.check()


_BUCKET = 64_000_000
"""Bytes of the buckets in which parts travel."""
_FORMAT = "safetensors:"
Bucket = list[tuple[str, torch.Tensor]]
"""Whole tensors by name."""


STREAMING = ("family", "dialect", "config", "rules", "dtype", "device")
"""How tensors are put together: keyword arguments of `named_tensors`."""


@dataclass(frozen=True)
class Stream:
    """What is put together; the same on all ranks."""

    planned: Sequence[PlannedTensor]
    """The tensors, in order."""
    own: Leaves
    """What this rank holds of what they are made of."""
    sent_as: Mapping[str, str]
    """Safetensors codes of the tensors whose values are cast on the way."""
    replicas: Replicas
    """The ranks that hold the same."""


@suggests
def named_tensors(
    state: State,
    *,
    to: str = "hf",
    bucket: Size = "1GB",
    on: Sequence[int] | None = None,
    group: Ranks | None = None,
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    rules: PathLike | None = None,
    dtype: DType | None = None,
    device: Device | None = None,
) -> Iterator[Bucket]:
    """Yield whole tensors in a dialect's names, bucket by bucket; collective: all ranks go through it to the end.

        for tensors in tx.refit.named_tensors(model, bucket="1GB"):
            engine.update_weights_from_tensor(tensors)

    They are those that `tx.save(model, ..., to=to)` writes, with the same bytes, and in memory of their own: nothing
    that is done to them changes the model.

    Args:
        state: a model under any parallelism, or a state dict whose leaves are tensors or DTensors.
        to: the dialect.
        bucket: bytes of the tensors that are yielded at once; a larger one is alone.
        on: ranks that get the tensors; the others get empty buckets. None: all.
        group: ranks that hold the state, a process group or a mesh of one dim; None: all.
        family: model family; None: recognised.
        dialect: of the model's names; None: recognised.
        config: the model's config; None: `model.config`, where it has one.
        rules: path of a table of your own.
        dtype: `bf16`, `fp16` or `fp32`: plain weights are cast where they are sent, but for those that the table marks
            as precise.
        device: where the tensors are; None: where the model's are.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank.
    """
    options = select(locals(), STREAMING)
    world = World(group)
    with world.together():
        size, target = read_size("bucket", bucket), read_text("to", to, "hf")
        place = read_device("device", device)
        target_ranks = world.ranks if on is None else tuple(on)
        if not set(target_ranks) <= set(world.ranks):
            raise ValueError(f"on must be ranks of the group, {list(world.ranks)}; got {on!r}")
    world.require_alike({"to": target, "bucket": size, "on": target_ranks, "dtype": str(dtype)})
    return streamed(planned_stream(state, target, options, world), target_ranks, size, place, world)


def read_streaming(options: Mapping[str, Any]) -> tuple[str | None, Settings]:
    """Return the type that weights are cast to, and what the user says of the model.

    Raises:
        TypeError: an argument of a type that it cannot have.
        Refused: UNSUPPORTED for a `dtype` that parameters cannot be cast to; see `settings`.
    """
    dtype = read_float_type("dtype", options.get("dtype"))
    if dtype is not None:
        check_dtype(dtype)
    return dtype, settings(
        family=read_optional_text("family", options.get("family"), "qwen3_moe"),
        dialect=read_optional_text("dialect", options.get("dialect"), "hf"),
        config=options.get("config"),
        rules=options.get("rules"),
    )


def planned_stream(state: State, to: str, options: Mapping[str, Any], world: World) -> Stream:
    """Find out what all ranks hold, and how it is put together; collective.

    Args:
        state: what they hold.
        to: the dialect.
        options: see `named_tensors`.
        world: the ranks.

    Raises:
        TransaxleError: on every rank.
    """
    with world.together():
        dtype, said = read_streaming(options)
        own = leaves(state, sharded=True, ranges=True)
        if problems := unsavable(own.tensors):
            raise gathered(problems)
    config = shared_config(state, said.config, world)
    everything, tensors = census(own.tensors, world), own.tensors
    if for_hub(_FORMAT + to):
        of_hub = published(tensors, everything, own.weights, config, world)
        tensors, everything, config = of_hub.tensors, of_hub.everything, of_hub.config
    with world.together():
        parts = {part: tensor for _, part, tensor in local_parts(tensors)}

        def seen() -> Checkpoint:
            memory = container(everything, parts, world.rank, config)
            return Checkpoint(memory, msgspec.structs.replace(said, config=None), None, None)

        sent_as: dict[str, str] = {}
        if dtype is not None:
            source = seen()
            keep = precise(None if source.family is None else source.bound)
            code = CASTS[dtype]
            sent_as = {n: code for n, t in everything.items() if t.dtype in PLAIN and t.dtype != code and n not in keep}
            sent_as = {name: code for name in sent_as if name not in _scales(source)}
            everything = {n: replace(t, dtype=sent_as.get(n, t.dtype)) for n, t in everything.items()}
        plan = ready(make_plan(seen(), _FORMAT + to, shard_size=_BUCKET, target=to))
        check_zero(plan.checks, tensors)
    return Stream(plan.tensors, replace(own, tensors=tensors), sent_as, Replicas(everything))


def _scales(source: Checkpoint) -> set[str]:
    """Return the tensors that are scales of codes: these are not values."""
    return {stored for encoded in source.catalog.encoded.values() for stored in encoded.parts.values()}


def streamed(
    stream: Stream, target_ranks: tuple[int, ...], size: int, device: torch.device | None, world: World
) -> Iterator[Bucket]:
    """Put the tensors together; collective.

    Args:
        stream: what is put together.
        target_ranks: ranks that get it.
        size: bytes of the tensors that are yielded at once.
        device: where they are; None: where the model's are.
        world: the ranks.
    """
    source, exchange = SourceValues(stream.own, stream.sent_as), BucketExchange(world)
    place = device or next((local_of(tensor).device for tensor in stream.own.tensors.values()), torch.device("cpu"))
    try:
        for planned in _buckets(stream.planned, size):
            whole = [Item(key, tensor.nbytes, tensor.transfers, target_ranks) for key, tensor in enumerate(planned)]
            items = [item for each in whole for item in stream.replicas.near(each)]
            names = [tensor.name for tensor in planned]
            with world.together():
                mine = planned if world.rank in target_ranks else []
                made = {t.name: torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=place) for t in mine}
                padded = [item.key for item in items if sum(each.size for each in item.transfers) != item.size]
                room = TargetRoom(made, names, padded, in_place=True)
                room.begin(range(len(names)))
            steps = program(schedule(items, names, rank_of, world, _BUCKET), None, exchange)
            with world.together():
                carry(steps, source, room, exchange)
            yield list(made.items())
    finally:
        exchange.close()


def _buckets(planned: Sequence[PlannedTensor], size: int) -> Iterator[list[PlannedTensor]]:
    """Yield tensors in order, so many at once that they do not exceed a size."""
    held: list[PlannedTensor] = []
    total = 0
    for tensor in planned:
        if held and total + tensor.nbytes > size:
            yield held
            held, total = [], 0
        held.append(tensor)
        total += tensor.nbytes
    if held:
        yield held


Named = tuple[str, torch.Tensor]


class VllmSource:
    """A model as vLLM's trainer engines take it: a `WeightSource` of vLLM 0.32; collective to make and to go through.

        source = tx.refit.VllmSource(model, dtype="bf16")
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    Its tensors are those that `tx.save(model, ..., to=to)` writes. All ranks go through it to the end, as vLLM's
    engines do. It needs vLLM in the trainer's environment.

    Args:
        state: a model under any parallelism, or a state dict.
        to: the dialect.
        bucket: bytes of the tensors that are put together at once.
        group: ranks that hold the state, a process group or a mesh of one dim; None: all.

    The other arguments are those of `tx.refit.named_tensors`.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank.
    """

    @suggests
    def __init__(
        self,
        state: State,
        *,
        to: str = "hf",
        bucket: Size = "1GB",
        group: Ranks | None = None,
        family: str | None = None,
        dialect: str | None = None,
        config: Config | None = None,
        rules: PathLike | None = None,
        dtype: DType | None = None,
        device: Device | None = None,
    ) -> None:
        self._state, self._options = state, select(locals(), STREAMING)
        self._world = World(group)
        with self._world.together():
            read_streaming(self._options)
            self._to, self._bucket = read_text("to", to, "hf"), read_size("bucket", bucket)
            self._device = read_device("device", device)
        self._planned = planned_stream(state, self._to, self._options, self._world).planned

    def metadata(self) -> list[ParamMeta]:
        """Return name, type and whole shape of everything that comes, in its order."""
        from vllm.distributed.weight_transfer import ParamMeta

        ordered = _by_layer(self._planned)
        return [ParamMeta(each.name, torch_dtype(each.dtype), tuple(each.shape)) for each in ordered]

    def __iter__(self) -> Iterator[Named]:
        stream = planned_stream(self._state, self._to, self._options, self._world)
        stream, target_ranks = replace(stream, planned=_by_layer(stream.planned)), self._world.ranks
        for tensors in streamed(stream, target_ranks, self._bucket, self._device, self._world):
            yield from tensors

    def held_names(self) -> None:
        """Return None: every rank gets every tensor."""

    def groups(self) -> list[list[str]]:
        """Return the names layer by layer."""
        from vllm.distributed.weight_transfer.base import layerwise_groups

        return list(layerwise_groups([each.name for each in self.metadata()]))

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield names and tensors layer by layer; collective."""
        tensors = iter(self)
        for names in self.groups():
            yield names, [next(tensors)[1] for _ in names]
        for _ in tensors:  # to the end, as all ranks
            raise AssertionError("there are as many tensors as names")


def _by_layer(planned: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """Return tensors in the order of the layers."""
    from vllm.distributed.weight_transfer.base import layerwise_groups

    by_name = {each.name: each for each in planned}
    return [by_name[name] for names in layerwise_groups(list(by_name)) for name in names]
