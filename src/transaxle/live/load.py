"""Loading: each rank reads just the bytes of its own shards, from any format and dialect, into the tensors' storage.

Everything is planned and agreed on by all ranks before the first byte is written. What several ranks hold alike is
read by one of them and sent to the others. Whatever changes the model by more than bytes happens after the last of
them came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from transaxle.arguments import (
    Axes,
    Config,
    DType,
    PathLike,
    check_flags,
    read_count,
    read_float_type,
    read_optional_text,
    suggests,
)
from transaxle.engine.checkpoint.checkpoint import CheckpointLike, StoredTensor
from transaxle.engine.duplicates import PlannedCheck, plan_checks, unequal
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog import nbytes
from transaxle.formats.storage.storage import Storage
from transaxle.live.derived import settle, untaken
from transaxle.live.global_tensors import Census, Global
from transaxle.live.load_plan import LoadPlan, check_read, leaves_for, materialise, opened
from transaxle.live.model.destination import Conversion, Landing, LoadReport, Rooms, check_filled, overlapping
from transaxle.live.model.source_view import left_out
from transaxle.live.model.state_tensors import State
from transaxle.live.optimizers import AnyOptimizer
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import Clock, World
from transaxle.move.mover import Movement
from transaxle.move.workers import Item, limits
from transaxle.quant.entries import put_values, reset_scaling_state
from transaxle.torch_tensors import Device, Positions, Ranks, ShardGrid, local_of, local_parts, local_shape, read_device

_WASTE, _GAP, _FEW = 1.4, 64, 256
"""Bytes that may be read for each one needed, the gap between runs that is read along in any case, and the number of
runs up to which none is."""
_TIED = "the model has one tensor for it and {first}"
_UNTIED = "Build the model without the tie."


@suggests
def load(
    state: State,
    src: CheckpointLike,
    *,
    optimizer: AnyOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
    device: Device | None = None,
    group: Ranks | None = None,
    family: str | None = None,
    dialect: str | None = None,
    config: Config | None = None,
    axes: Axes | None = None,
    rules: PathLike | None = None,
    decode: DType | None = None,
    dtype: DType | None = None,
    broadcast_replicated: bool = True,
    jobs: int | None = None,
) -> LoadReport:
    """Load a checkpoint into a model or state dict; collective over the group.

    Args:
        state: a model under any parallelism, or a state dict whose leaves are tensors, DTensors or numpy arrays; of a
            Megatron model its `sharded_state_dict()`.
        src: path of a checkpoint of any format and dialect, or an opened one.
        optimizer: the model's optimizer, whose state and settings are loaded too; it need not have made a step yet.
            Also a list or dict of several, or a wrapper or container (ZeRO, accelerate, torchtitan).
        extra: other objects to restore, by name: objects with `load_state_dict` receive their states, and the report
            returns the states of the other names. A state that differs between ranks needs the same number of ranks as
            at the save.
        strict: refuse names that only one side has, and a source without state for `optimizer`; otherwise the report
            lists them.
        device: device for plain meta tensors; None: the current GPU, or the CPU if there is none.
        group: the ranks that load together, a process group or a mesh of one dim; None: all.
        family: the model's family, such as `qwen3_moe`; None: recognised.
        dialect: dialect of the model's names, such as `hf`; None: recognised.
        config: the model's config for a source without one: a path, a mapping or an object with `to_dict()`. Of an
            opened source, `config`, `axes` and `rules` are for `open`.
        axes: axis -> size, which overrides everything, such as `{"g": 8}`.
        rules: path of a table of your own, with families and dialects.
        decode: `bf16`, `fp16` or `fp32`: parameters of this type take encoded tensors, decoded; None: refuse them.
        dtype: `bf16`, `fp16` or `fp32`: parameters of this type take plain floating-point tensors of other types, cast
            as `.to` does; None: refuse them.
        broadcast_replicated: one rank reads what several have, and sends it to the others.
        jobs: reading threads per rank; None: as many as the processors allow, at most 8.

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank, before anything is written, with every problem of every rank.
    """
    world, clock = World(group), Clock()
    with world.together():
        check_flags(strict=strict, broadcast_replicated=broadcast_replicated)
        if jobs is not None:
            read_count("jobs", jobs)
        family = read_optional_text("family", family, "qwen3_moe")
        dialect = read_optional_text("dialect", dialect, "hf")
        decode, dtype = read_float_type("decode", decode), read_float_type("dtype", dtype)
        meta_device = read_device("device", device)
    world.require_alike({
        "family": family, "dialect": dialect, "strict": strict, "decode": decode, "dtype": dtype,
        "optimizer": optimizer is not None, "axes": axes, "broadcast_replicated": broadcast_replicated,
    })  # fmt: skip
    reading = {"axes": axes, "config": config, "rules": rules}
    with opened(src, world, reading, with_state=optimizer is not None, strict=strict) as source:
        checkpoint = (source if decode is None or source.undecoded is None else source.undecoded).stored
        with clock.stage("plan"):
            plan = LoadPlan(
                state, checkpoint, world, optimizer=optimizer, extra=extra or {}, family=family, dialect=dialect,
                strict=strict, decode=decode, dtype=dtype,
            )  # fmt: skip
            reads = plan_reads(plan.wanted, plan.stored, world.rank, once=broadcast_replicated)
        with clock.stage("check"), world.together():
            _check_copies(plan, world, jobs)
        with world.together():
            filling = Filling(plan, meta_device)
            movement = _movement(reads, plan.storage, filling, jobs, world)
        read_before = plan.storage.bytes_read
        with clock.stage("read"), world.together():
            plan.extra.read()
            movement.move_local()
        with clock.stage("exchange"), world.together():
            received = movement.move_exchanged()
        bytes_read = plan.storage.bytes_read - read_before
        with clock.stage("check"):
            check_read(plan.storage, world)
    with world.together():
        check_filled(filling.landings)
    with world.together():
        written = filling.finish()
    return _report(plan, filling, world, clock, bytes_read=bytes_read, bytes_received=received, bytes_written=written)


@dataclass(frozen=True)
class PlannedReads:
    """What one rank reads, and what ranks read for one another."""

    items: list[Item]
    """Parts of tensors that this rank holds, or several ranks do; of these, the same on every rank."""
    names: list[str]
    """For each of them, the name of its local tensor."""
    elsewhere: Mapping[int, int]
    """Rank -> bytes that it alone needs, of ranks other than this one."""


@dataclass
class _SameParts:
    """Tensors of one type and shape of which all ranks hold the same parts."""

    here: list[tuple[Positions, Positions, int, tuple[int, ...]]]
    """What a rank holds, the positions of it that the source has, their bytes and the ranks that read them: parts that
    this rank takes part in, or several."""
    elsewhere: Mapping[int, int]
    """Rank -> bytes of one tensor that it alone needs."""
    count: int = 0
    """How many there are."""


def plan_reads(wanted: Census, stored: Mapping[str, StoredTensor], rank: int, *, once: bool) -> PlannedReads:
    """Return what a rank reads; what other ranks read for themselves alone is only counted.

    Args:
        wanted: the tensors to be loaded, as all ranks hold them.
        stored: the source's tensors by the same names.
        rank: this rank.
        once: let one rank read what several need: of those that hold it, the one that reads least so far.

    Post-condition: the parts that a rank takes are its shards.
    """
    items, names = list[Item](), list[str]()
    kinds: dict[tuple[int, bool, bool, tuple[int, ...], str], _SameParts] = {}
    for name, tensor in wanted.items():
        source = stored[name]
        # Tensors on one mesh share what the ranks hold of them, so each of a few kinds is looked at once for all ranks.
        key = id(tensor.held), tensor.apart, tensor.padded, source.shape, source.dtype
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _parts(tensor, source, rank, once=once)
        kind.count += 1
        for held, needed, size, ranks in kind.here:
            items.append(Item(len(items), size, partial(source.transfers, needed), ranks, ranks))
            names.append(tensor.part_name(held))
    elsewhere: Counter[int] = Counter()
    for kind in kinds.values():
        for other, size in kind.elsewhere.items():
            elsewhere[other] += kind.count * size
    return PlannedReads(items, names, elsewhere)


def _parts(tensor: Global, source: StoredTensor, rank: int, *, once: bool) -> _SameParts:
    """Return the parts of a tensor that ranks hold."""
    here, elsewhere = list[tuple[Positions, Positions, int, tuple[int, ...]]](), Counter[int]()
    for held, ranks in tensor.boxes.items():
        needed = tensor.within(held, source.shape)
        size = nbytes(source.dtype, local_shape(needed))
        for group in [ranks] if once else [(one,) for one in ranks]:
            if len(group) == 1 and group[0] != rank:
                elsewhere[group[0]] += size
            else:
                here.append((held, needed, size, group))
    return _SameParts(here, elsewhere)


class Filling:
    """A model being filled: where loaded bytes go on this rank, and what its modules and optimizers make of them.

    Args:
        plan: the load.
        device: where plain meta tensors go; None: the current GPU, or the CPU where there is none.

    Attributes:
        own: what the model holds, with memory.
        landings: for each tensor that is read, or part of one (`local_parts`), where its bytes go.
        names: for each of them, the tensor that it is a part of.

    Raises:
        Refused: UNSUPPORTED, MISSING_TENSOR for modules that do not load what their state dict shows.
    """

    def __init__(self, plan: LoadPlan, device: torch.device | None) -> None:
        self._plan = plan
        self.own = plan.own
        if isinstance(plan.state, nn.Module) and materialise(
            plan.state, plan.stored.keys() | plan.filled_by_modules, device or _default_device()
        ):
            self._take_memory()
        self._values = plan.values_of_quantized(self.own, meta=False)
        filled = {**plan.read_into(self.own), **self._values, **plan.optimizers.states}
        wanted = {name: tensor for name, tensor in filled.items() if name in plan.wanted}
        shapes = {name: plan.stored[name].shape for name in wanted}
        parts = list(local_parts(wanted, shapes))
        shared = overlapping({part: tensor for _, part, tensor in parts})
        self.landings = {
            part: Landing(tensor, plan.stored[name].dtype, apart=part in shared) for name, part, tensor in parts
        }
        self.names = {part: name for name, part, _ in parts}

    def _take_memory(self) -> None:
        """Take the tensors of a model that was given memory; what could not be tried without it is tried now."""
        plan = self._plan
        self.own = leaves_for(plan.state, plan.checkpoint)
        problems, omitted = untaken(island for island in self.own.islands if island.path in plan.on_meta)
        if problems or omitted:
            raise gathered([*problems, *left_out(omitted)])
        plan.optimizers.follow(self.own, plan.stored)

    def finish(self) -> int:
        """Make of loaded bytes what modules and optimizers need: codes, derived entries, settings, extra state.

        Returns:
            bytes written into this rank's tensors.

        Raises:
            Refused: UNSUPPORTED where a module does not take the values that it was given.
        """
        plan, own = self._plan, self.own
        written = sum(landing.written for name, landing in self.landings.items() if name not in self._values)
        written += sum(put_values(own.weights[name], local_of(values)) for name, values in self._values.items())
        for name in plan.quantized.begins:
            if name in own.weights:
                reset_scaling_state(own.weights[name])
        if own.islands:
            settle(own.islands, own.tensors)
        for name in plan.padded.keys() & own.tensors.keys():
            grid = own.tensors[name]
            assert isinstance(grid, ShardGrid)  # no other tensor may be longer than what fills it
            grid.clear_beyond(plan.stored[name].shape)
        for factory in own.factories:
            factory.finish()
        with torch.no_grad():
            for name in own.copies.keys() & self.landings.keys():
                for copy in own.copies[name]:
                    copy.copy_(own.tensors[name])
        plan.optimizers.install(own.weights, self._values)
        plan.extra.install()
        return written


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _movement(reads: PlannedReads, storage: Storage, filling: Filling, jobs: int | None, world: World) -> Movement:
    """Return what carries the bytes from the source into this rank's tensors."""
    limit = msgspec.structs.replace(limits(jobs), waste=_WASTE, gap=_GAP, few=_FEW)
    exchange = RankExchange(world) if world.size > 1 else None
    return Movement(reads.items, storage, Rooms(filling.landings, reads.names), limit, exchange, reads.elsewhere)


def _report(
    plan: LoadPlan,
    filling: Filling,
    world: World,
    clock: Clock,
    *,
    bytes_read: int,
    bytes_received: int,
    bytes_written: int,
) -> LoadReport:
    """Return what was done; collective."""
    return LoadReport(
        path=plan.checkpoint.path,
        format=plan.checkpoint.format,
        dialect=plan.view.dialect,
        tensors=len(set(filling.names.values())),
        states=sum(name in plan.optimizers.states for name in filling.landings),
        bytes_needed=sum(landing.size for landing in filling.landings.values()),
        bytes_read=bytes_read,
        bytes_received=bytes_received,
        bytes_written=bytes_written,
        converted=_converted(plan.conversions, filling, world),
        missing=(*plan.missing, *plan.extra.missing),
        unexpected=plan.unexpected,
        untouched=filling.own.untouched,
        padded=plan.padded,
        zeros=tuple(name for name in plan.wanted if not plan.stored[name].origins),
        scalars=plan.extra.scalars,
        extra=plan.extra.extra,
        untrained=plan.optimizers.untrained,
        seconds=clock.total,
        stages=clock.stages,
    )


def _converted(planned: Mapping[str, Conversion], filling: Filling, world: World) -> tuple[Conversion, ...]:
    """Return what was converted, with what all ranks know of its exactness; collective."""
    if not planned:
        return ()
    mine = {filling.names[part] for part, landing in filling.landings.items() if not landing.exact}
    rounded = {name for names in world.gather(mine) for name in names}
    return tuple(
        replace(conversion, exact=False) if name in rounded else conversion for name, conversion in planned.items()
    )


def _check_copies(plan: LoadPlan, world: World, jobs: int | None) -> None:
    """Prove stored copies equal, and what the model has one tensor for, each pair by one rank."""
    problems: list[Refusal] = []
    checkpoint = plan.view.checkpoint
    checks: list[PlannedCheck] = []
    for first, second in sorted(plan.same_memory):
        one, other = plan.wanted[first], plan.wanted[second]
        if (one.shape, one.held) == (other.shape, other.held):
            checks += _plan_tie_check(first, second, plan.stored, problems)
        # else they are alike on some ranks only, and no two names of one tensor: see `overlapping`
    for first, second in sorted(plan.same_state):
        checks += _plan_tie_check(first, second, plan.stored, problems)
    if checkpoint.checks or checkpoint.container.twins:
        checks += plan_checks(checkpoint.source, checkpoint.checks, problems)
    if not checks and not problems:
        return
    place = world.ranks.index(world.rank)
    problems += unequal(checks[place :: world.size], checkpoint.container.storage, limits(jobs))
    if problems:
        raise gathered(problems)


def _plan_tie_check(
    first: str, second: str, stored: Mapping[str, StoredTensor], problems: list[Refusal]
) -> Iterator[PlannedCheck]:
    """Yield the comparison of two tensors of a source that are one in the model; none where they lie in one place."""
    one, other = stored[first], stored[second]
    why = _TIED.format(first=first)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        a, b = (one.dtype, other.dtype) if one.dtype != other.dtype else (list(one.shape), list(other.shape))
        message = f"{why}\nbut one is {a} in the source, the other {b}"
        problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, second), _UNTIED))
        return
    transfers = tuple(one.transfers()), tuple(other.transfers())
    if transfers[0] != transfers[1]:
        yield PlannedCheck(second, why, nbytes(one.dtype, one.shape), *transfers)
