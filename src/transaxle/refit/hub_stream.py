"""A stream of whole tensors under a dialect's names; they are assembled, bucket by bucket, from the shards on all
ranks.

The stream is for inference engines that take whole tensors and shard them themselves. If the sharding of the engine is
known, `Refit` sends much fewer bytes. The function `carry` moves the bytes: each rank packs and sends its shards, and
copies received shards to their places.

`VllmSource` passes the stream to the trainer engines that vLLM itself contains, such as `nccl`, which broadcast every
tensor to every worker. `VllmRefit`, by contrast, sends each worker only its own shards.
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
from transaxle.engine.plan.conversion import for_hub, make_plan, require_ready
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.engine.views.cast import precise_names
from transaxle.errors import gathered
from transaxle.live.global_tensors import census
from transaxle.live.memory import Replicas, check_zero, container, rank_of
from transaxle.live.model.destination import check_dtype
from transaxle.live.model.quantized_model import to_hub_convention
from transaxle.live.model.state_tensors import Leaves, State, common_config, leaves, unsavable
from transaxle.live.transport.tensor_exchange import BucketExchange
from transaxle.live.transport.world import World
from transaxle.move.transfer import DeferredErrors
from transaxle.move.workers import Item
from transaxle.options import select
from transaxle.refit.endpoints import SourceReader, TargetMemory
from transaxle.refit.hops import Program, program, schedule
from transaxle.torch_tensors import Device, Ranks, local_of, local_parts, read_device, torch_dtype

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import ParamMeta


def carry(program: Program, source: SourceReader, target: TargetMemory, exchange: BucketExchange) -> None:
    """Execute a program: send this rank's parcels (blocks of bytes), and receive and unpack the parcels for its target.
    All ranks must call this function.

    Raises:
        StorageError: with code IO, if the connection to a rank is lost.
        Exception: an error of this rank's source or target; it is raised on this rank only, after all exchanges.
    """
    rounds = program.schedule.rounds

    def copy_own() -> None:
        for _, key, transfers in program.schedule.local_copies:
            for transfer in transfers:
                source.copy(transfer, target.of(key))

    def pack(number: int, parcel: int, buffer: torch.Tensor) -> None:
        for packing, _ in rounds[number][parcel].steps:
            source.copy(packing, buffer)

    def take(number: int, parcel: int, buffer: torch.Tensor) -> None:
        hop = rounds[number][parcel]
        for _, spreading in hop.steps:
            target.lay(hop.key, spreading, buffer)

    # After an error, this rank continues with its collective calls, because the other ranks would wait for it.
    later = DeferredErrors()
    later(copy_own)()
    exchange.run(program.route, later(pack), later(take))
    later.check()


_BUCKET = 64_000_000
"""Size in bytes of each exchange bucket (buffer)."""
_FORMAT = "safetensors:"
Bucket = list[tuple[str, torch.Tensor]]
"""Pairs (tensor name, whole tensor) that are yielded together."""


STREAMING = ("family", "dialect", "config", "rules", "dtype", "device")
"""Keyword arguments of `named_tensors` that determine names and dtypes of the assembled tensors."""


@dataclass(frozen=True)
class Stream:
    """The plan of a stream of tensors; it is equal on all ranks, except for `parts`."""

    planned: Sequence[PlannedTensor]
    """The whole tensors to assemble, in the order of the stream."""
    parts: Leaves
    """This rank's shards of the source tensors."""
    sent_as: Mapping[str, str]
    """Source tensor name -> safetensors code of the dtype to which the tensor is cast before it is sent."""
    replicas: Replicas
    """Which ranks hold copies of the same shards."""


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
    """Yield whole tensors under a dialect's names, bucket by bucket; all ranks must iterate to the end, because every
    step needs all ranks.

        for tensors in tx.refit.named_tensors(model, bucket="1GB"):
            engine.update_weights_from_tensor(tensors)

    The tensors equal those that `tx.save(model, ..., to=to)` writes, byte for byte. The yielded tensors have their own
    memory, so changes to them do not change the model.

    Args:
        state: a model under any parallelism, or a state dict whose values are tensors or DTensors.
        to: dialect of the yielded tensor names.
        bucket: number of bytes of the tensors that are yielded together; a larger tensor is yielded alone.
        on: ranks that get the tensors, while all other ranks get empty buckets; None means all ranks.
        group: the ranks that hold the state, as a process group or a mesh with one dim; None means all ranks.
        family: model family; None means that it is recognised from config and names.
        dialect: dialect of the model's tensor names; None means that it is recognised from the names.
        config: the model's config; None means the attribute `config` of the model, if it has one.
        rules: path of the user's own table of tensor names.
        dtype: `bf16`, `fp16` or `fp32`. Plain weights are cast to this dtype before they are sent, except those that
            the table marks as precise. If `dtype` is None, nothing is cast.
        device: device of the yielded tensors; None means the device of the model's tensors.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank, with every problem of every rank.
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
    return assemble(plan_stream(state, target, options, world), target_ranks, size, place, world)


def read_streaming(options: Mapping[str, Any]) -> tuple[str | None, Settings]:
    """Check the options listed in `STREAMING`; return the dtype to which weights are cast, and the settings of the
    model.

    Raises:
        TypeError: if an option has the wrong type.
        Refused: with code UNSUPPORTED, if parameters cannot be cast to `dtype`; also any error that `settings` raises.
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


def plan_stream(state: State, to: str, options: Mapping[str, Any], world: World) -> Stream:
    """Collect descriptions of the shards of all ranks, and plan how whole tensors are assembled from them; all ranks
    must call this function.

    Args:
        state: the model or state dict of this rank.
        to: dialect of the yielded tensor names.
        options: the keyword arguments of `named_tensors` listed in `STREAMING`.
        world: the ranks that take part.

    Raises:
        TransaxleError: raised on every rank, with every problem of every rank.
    """
    with world.together():
        dtype, model_settings = read_streaming(options)
        state_leaves = leaves(state, sharded=True, ranges=True)
        if problems := unsavable(state_leaves.tensors):
            raise gathered(problems)
    config = common_config(state, model_settings.config, world)
    global_tensors, tensors = census(state_leaves.tensors, world), state_leaves.tensors
    if for_hub(_FORMAT + to):
        of_hub = to_hub_convention(tensors, global_tensors, state_leaves.weights, config, world)
        tensors, global_tensors, config = of_hub.tensors, of_hub.global_tensors, of_hub.config
    with world.together():
        parts = {part: tensor for _, part, tensor in local_parts(tensors)}

        def open_source() -> Checkpoint:
            memory = container(global_tensors, parts, world.rank, config)
            return Checkpoint(memory, msgspec.structs.replace(model_settings, config=None), None, None)

        sent_as: dict[str, str] = {}
        if dtype is not None:
            source = open_source()
            keep = precise_names(None if source.family is None else source.bound)
            code = CASTS[dtype]
            sent_as = {
                n: code for n, t in global_tensors.items() if t.dtype in PLAIN and t.dtype != code and n not in keep
            }
            sent_as = {name: code for name in sent_as if name not in _scales(source)}
            global_tensors = {n: replace(t, dtype=sent_as.get(n, t.dtype)) for n, t in global_tensors.items()}
        plan = require_ready(make_plan(open_source(), _FORMAT + to, shard_size=_BUCKET, target=to))
        check_zero(plan.checks, tensors)
    return Stream(plan.tensors, replace(state_leaves, tensors=tensors), sent_as, Replicas(global_tensors))


def _scales(source: Checkpoint) -> set[str]:
    """Return the stored names of the codes and scales of all encoded tensors, because these buffers are not cast."""
    return {stored for encoded in source.catalog.encoded.values() for stored in encoded.parts.values()}


def assemble(
    stream: Stream, target_ranks: tuple[int, ...], size: int, device: torch.device | None, world: World
) -> Iterator[Bucket]:
    """Assemble the tensors of a stream, and yield them bucket by bucket; all ranks must iterate to the end.

    Args:
        stream: the plan of the stream.
        target_ranks: ranks that get the tensors.
        size: number of bytes of the tensors that are yielded together.
        device: device of the yielded tensors; None means the device of the model's tensors.
        world: the ranks that take part.
    """
    source, exchange = SourceReader(stream.parts, stream.sent_as), BucketExchange(world)
    place = device or next((local_of(tensor).device for tensor in stream.parts.tensors.values()), torch.device("cpu"))
    try:
        for planned in _buckets(stream.planned, size):
            whole = [Item(key, tensor.nbytes, tensor.transfers, target_ranks) for key, tensor in enumerate(planned)]
            items = [item for each in whole for item in stream.replicas.near(each)]
            names = [tensor.name for tensor in planned]
            with world.together():
                local_plan = planned if world.rank in target_ranks else []
                assembled = {t.name: torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=place) for t in local_plan}
                padded = [item.key for item in items if sum(each.size for each in item.transfers) != item.size]
                memory = TargetMemory(assembled, names, padded, in_place=True)
                memory.begin(range(len(names)))
            steps = program(schedule(items, names, rank_of, world, _BUCKET), None, exchange)
            with world.together():
                carry(steps, source, memory, exchange)
            yield list(assembled.items())
    finally:
        exchange.close()


def _buckets(planned: Sequence[PlannedTensor], size: int) -> Iterator[list[PlannedTensor]]:
    """Split tensors, in order, into lists of at most `size` bytes; a larger tensor is alone in its list."""
    bucket: list[PlannedTensor] = []
    total = 0
    for tensor in planned:
        if bucket and total + tensor.nbytes > size:
            yield bucket
            bucket, total = [], 0
        bucket.append(tensor)
        total += tensor.nbytes
    if bucket:
        yield bucket


Named = tuple[str, torch.Tensor]


class VllmSource:
    """Makes a model a `WeightSource` of vLLM 0.32, for the trainer engines of vLLM; all ranks must create it and
    iterate over it.

        source = tx.refit.VllmSource(model, dtype="bf16")
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    The source yields the tensors that `tx.save(model, ..., to=to)` would write. All ranks must iterate to the end, as
    the engines of vLLM do. vLLM must be installed in the environment of the trainer.

    Args:
        state: a model under any parallelism, or a state dict.
        to: dialect of the yielded tensor names.
        bucket: number of bytes of the tensors that are assembled together.
        group: the ranks that hold the state, as a process group or a mesh with one dim; None means all ranks.

    All other arguments are those of `tx.refit.named_tensors`.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank, with every problem of every rank.
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
        self._planned = plan_stream(state, self._to, self._options, self._world).planned

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and whole shape of every tensor, in the order of the stream."""
        from vllm.distributed.weight_transfer import ParamMeta

        ordered = _by_layer(self._planned)
        return [ParamMeta(each.name, torch_dtype(each.dtype), tuple(each.shape)) for each in ordered]

    def __iter__(self) -> Iterator[Named]:
        stream = plan_stream(self._state, self._to, self._options, self._world)
        stream, target_ranks = replace(stream, planned=_by_layer(stream.planned)), self._world.ranks
        for tensors in assemble(stream, target_ranks, self._bucket, self._device, self._world):
            yield from tensors

    def held_names(self) -> None:
        """Return None, which tells vLLM that every rank gets every tensor."""

    def groups(self) -> list[list[str]]:
        """Return the tensor names, one list per layer."""
        from vllm.distributed.weight_transfer.base import layerwise_groups

        return list(layerwise_groups([each.name for each in self.metadata()]))

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Yield (names, tensors), one pair per layer; all ranks must iterate to the end."""
        tensors = iter(self)
        for names in self.groups():
            yield names, [next(tensors)[1] for _ in names]
        for _ in tensors:  # iterate to the end, because the other ranks need this rank for every step
            raise AssertionError("there are as many tensors as names")


def _by_layer(planned: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """Sort tensors by layer, in the order of vLLM."""
    from vllm.distributed.weight_transfer.base import layerwise_groups

    by_name = {each.name: each for each in planned}
    return [by_name[name] for names in layerwise_groups(list(by_name)) for name in names]
