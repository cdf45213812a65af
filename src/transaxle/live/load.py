"""Loading a checkpoint into a live model: each rank reads only the bytes of its own shards, from any format and
dialect, into the memory of the model's tensors.

All ranks plan the load and agree on it before the first byte is written. A shard that several ranks need is read by one
rank, which sends it to the other ranks. Quantized codes, optimizer settings and extra state are set after all bytes
have arrived.
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
    Patterns,
    check_flags,
    read_float_type,
    read_optional_text,
    suggests,
)
from transaxle.engine.checkpoint.checkpoint import CheckpointLike, StoredTensor
from transaxle.engine.checkpoint.source_hashes import damage_first
from transaxle.engine.duplicates import PlannedCheck, compare_copies, plan_checks
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog import nbytes
from transaxle.live.derived import find_unloadable, settle
from transaxle.live.global_tensors import Census, GlobalTensor
from transaxle.live.load_plan import LoadPlan, leaves_for, materialise, open_source
from transaxle.live.model.destination import (
    Conversion,
    LoadReport,
    LocalSink,
    TensorDestination,
    check_filled,
    find_overlapping,
)
from transaxle.live.model.source_view import refuse_omitted
from transaxle.live.model.state_tensors import State
from transaxle.live.optimizers import AnyOptimizer
from transaxle.live.source_check import SourceCheck
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import Clock, World
from transaxle.move.mover import Movement
from transaxle.move.workers import Item, Limits, limits
from transaxle.options import select
from transaxle.quant.entries import put_values, reset_scaling_state
from transaxle.torch_tensors import Device, Positions, Ranks, ShardGrid, local_of, local_parts, local_shape, read_device

_WASTE, _GAP, _FEW = 1.4, 64, 256
"""Three limits for reading byte runs together: the most bytes to read per needed byte; the size in bytes of a gap
between two runs that is always read; the number of runs up to which gaps are never read.
"""
_ALIKE = ("family", "dialect", "strict", "decode", "dtype", "axes", "broadcast_replicated", "check_source")
"""Arguments of `load` that must be equal on all ranks."""
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
    graft: PathLike | None = None,
    graft_over: Patterns = (),
    decode: DType | None = None,
    dtype: DType | None = None,
    broadcast_replicated: bool = True,
    check_source: bool = True,
    jobs: int | None = None,
) -> LoadReport:
    """Load a checkpoint into a model or state dict; all ranks of the group must call this function.

    Args:
        state: a model under any parallelism, or a state dict whose values are tensors, DTensors or numpy arrays; for a
            Megatron model, its `sharded_state_dict()`.
        src: path of a checkpoint of any format and dialect, or an open checkpoint.
        optimizer: the model's optimizer, whose state and settings are loaded too; it need not have made a step before.
            A list or dict of optimizers, or a wrapper or container of them (ZeRO, accelerate, torchtitan), is accepted
            too.
        extra: name -> additional object to restore. An object with the method `load_state_dict` receives its state; the
            report contains the states of all other objects. A state that differs between ranks can only be loaded by
            the same number of ranks that saved it.
        strict: whether to refuse tensor names that only the model or only the source has, and a source without state
            for `optimizer`. If `strict` is False, the report lists these names.
        device: device for plain tensors that are on `meta`; None means the current GPU, or the CPU without a GPU.
        group: the ranks that load together, as a process group or a mesh with one dim; None means all ranks.
        family: the model's family, such as `qwen3_moe`; None means that it is recognised from the tensor names.
        dialect: dialect of the model's tensor names, such as `hf`; None means that it is recognised from the names.
        config: the model's config for a source without a config: a path, a mapping or an object with `to_dict()`. For a
            source that is already open, pass `config`, `axes` and `rules` to `open` instead.
        axes: axis -> size, such as `{"g": 8}`; these sizes override sizes from configs and shapes.
        rules: path of a rules file with your own families and dialects.
        graft: path or URL of a checkpoint of the same model, from which tensors are loaded that the source lacks.
        graft_over: patterns of the names of the source's tensors that are loaded from `graft` instead.
        decode: `bf16`, `fp16` or `fp32`. Parameters of this dtype may be loaded from encoded (quantized) tensors, which
            are decoded. If `decode` is None, encoded tensors are refused.
        dtype: `bf16`, `fp16` or `fp32`. Parameters of this dtype may be loaded from floating-point tensors of other
            dtypes, which are cast as `.to` casts; with `own`, parameters of each of these dtypes may. If `dtype` is
            None, tensors of other dtypes are refused.
        broadcast_replicated: whether a shard that several ranks need is read by one rank, which sends it to the others.
        check_source: whether to compare what is read with the hashes in the source's manifest and the checksums in its
            files, if it has any. Tensors that the ranks have read in parts are read a second time for their hashes.
        jobs: number of reading threads per rank; None means as many as there are processors for the rank, but at most
            8.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: raised on every rank, with every problem of every rank: before anything is written, except for
            the code CORRUPT of bytes that do not match their hashes, which are known once they are read.
    """
    world, clock = World(group), Clock()
    with world.together():
        check_flags(strict=strict, broadcast_replicated=broadcast_replicated, check_source=check_source)
        limit = reading_limits(jobs)
        family = read_optional_text("family", family, "qwen3_moe")
        dialect = read_optional_text("dialect", dialect, "hf")
        decode, dtype = read_float_type("decode", decode), read_float_type("dtype", dtype)
        meta_device = read_device("device", device)
    world.require_alike({**select(locals(), _ALIKE), "optimizer": optimizer is not None})
    reading = {"axes": axes, "config": config, "rules": rules, "graft": graft, "graft_over": graft_over or None}
    with open_source(src, world, reading, with_state=optimizer is not None, strict=strict) as source:
        checkpoint = (source if decode is None or source.undecoded is None else source.undecoded).stored
        with clock.stage("plan"):
            plan = LoadPlan(
                state, checkpoint, world, optimizer=optimizer, extra=extra or {}, family=family, dialect=dialect,
                strict=strict, decode=decode, dtype=dtype,
            )  # fmt: skip
        with clock.stage("check"):
            source_check = SourceCheck(checkpoint, world, is_enabled=check_source)
            _check_copies(plan, world, jobs, is_checked=check_source)
        with world.together():
            filling = Filling(plan, meta_device)
            movement = _movement(plan, filling, limit, world, once=broadcast_replicated)
        read_before = plan.storage.bytes_read
        with clock.stage("read"), world.together():
            plan.extra.read()
            movement.move_local()
        with clock.stage("exchange"), world.together():
            received = movement.move_exchanged()
            check_filled(filling.destinations)
        bytes_read = plan.storage.bytes_read - read_before
        with clock.stage("check"):
            source_check.finish()
    with world.together():
        written = filling.finish()
    return _report(
        plan, filling, source_check, world, clock, bytes_read=bytes_read, bytes_received=received, bytes_written=written
    )


@dataclass(frozen=True)
class PlannedReads:
    """The shards of tensors that this rank reads for itself, or that one rank reads for several ranks."""

    items: list[Item]
    """Shards that only this rank needs, and shards that several ranks need; the list of the latter is the same on every
    rank.
    """
    names: list[str]
    """For each item of `items`, the name of its local tensor."""
    elsewhere: Mapping[int, int]
    """Rank -> number of bytes that only that rank needs, for all ranks except this one."""


@dataclass
class _SameParts:
    """Tensors of one dtype and shape that are divided into the same shards."""

    parts: list[tuple[Positions, Positions, int, tuple[int, ...]]]
    """For each shard that this rank or several ranks need: the shard, its portion that the source contains, its bytes,
    and its ranks.
    """
    elsewhere: Mapping[int, int]
    """Rank -> number of bytes, per tensor of this kind, that only that rank needs."""
    count: int = 0
    """Number of tensors with this dtype, shape and shards."""


def plan_reads(targets: Census, stored: Mapping[str, StoredTensor], rank: int, *, once: bool) -> PlannedReads:
    """Plan the reads of one rank. A shard that only one different rank needs is only counted in `elsewhere`.

    Args:
        targets: the tensors to load, with the shards of all ranks.
        stored: the model's tensor name -> tensor of the source.
        rank: number of this rank.
        once: whether a shard that several ranks need is read by one rank: by the rank with the fewest bytes to read
            until then.

    Post-condition: what a rank reads or receives is exactly its shards.
    """
    items, names = list[Item](), list[str]()
    kinds: dict[tuple[int, bool, bool, tuple[int, ...], str], _SameParts] = {}
    for name, tensor in targets.items():
        source = stored[name]
        # Tensors on one mesh share a `positions` object, so shards are computed once for each of the few distinct kinds
        # of tensors.
        key = id(tensor.positions), tensor.apart, tensor.padded, source.shape, source.dtype
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = _parts(tensor, source, rank, once=once)
        kind.count += 1
        for intervals, needed, size, ranks in kind.parts:
            items.append(Item(len(items), size, partial(source.transfers, needed), ranks, ranks))
            names.append(tensor.part_name(intervals))
    elsewhere: Counter[int] = Counter()
    for kind in kinds.values():
        for rank_elsewhere, size in kind.elsewhere.items():
            elsewhere[rank_elsewhere] += kind.count * size
    return PlannedReads(items, names, elsewhere)


def _parts(tensor: GlobalTensor, source: StoredTensor, rank: int, *, once: bool) -> _SameParts:
    """Return the shards of a tensor that this rank or several ranks need."""
    parts, elsewhere = list[tuple[Positions, Positions, int, tuple[int, ...]]](), Counter[int]()
    for intervals, ranks in tensor.boxes.items():
        needed = tensor.within(intervals, source.shape)
        size = nbytes(source.dtype, local_shape(needed))
        for group in [ranks] if once else [(one,) for one in ranks]:
            if len(group) == 1 and group[0] != rank:
                elsewhere[group[0]] += size
            else:
                parts.append((intervals, needed, size, group))
    return _SameParts(parts, elsewhere)


class Filling:
    """A model while it is loaded: memory for this rank's bytes, and the steps that complete modules and optimizers.

    Args:
        plan: the plan of the load.
        device: device for plain tensors that are on `meta`; None means the current GPU, or the CPU without a GPU.

    Attributes:
        leaves: the model's tensors, none of which is left on the meta device.
        destinations: name of each local tensor that is read (see `local_parts`) -> destination of its bytes.
        names: key of `destinations` -> name of the tensor.

    Raises:
        Refused: with code UNSUPPORTED or MISSING_TENSOR, if a module cannot load its own state dict.
    """

    def __init__(self, plan: LoadPlan, device: torch.device | None) -> None:
        self._plan = plan
        self.leaves = plan.leaves
        if isinstance(plan.state, nn.Module) and materialise(
            plan.state, plan.stored.keys() | plan.filled_by_modules, device or _default_device()
        ):
            self._take_memory()
        self._values = plan.values_of_quantized(self.leaves, meta=False)
        filled = {**plan.read_into(self.leaves), **self._values, **plan.optimizers.states}
        targets = {name: tensor for name, tensor in filled.items() if name in plan.targets}
        shapes = {name: plan.stored[name].shape for name in targets}
        parts = list(local_parts(targets, shapes))
        shared = find_overlapping({part: tensor for _, part, tensor in parts})
        self.destinations = {
            part: TensorDestination(tensor, plan.stored[name].dtype, apart=part in shared)
            for name, part, tensor in parts
        }
        self.names = {part: name for name, part, _ in parts}

    def _take_memory(self) -> None:
        """Collect the tensors of a model that has just left the meta device, and test whether its modules can load a
        state dict.
        """
        plan = self._plan
        self.leaves = leaves_for(plan.state, plan.checkpoint)
        problems, omitted = find_unloadable(
            custom_module for custom_module in self.leaves.custom_modules if custom_module.path in plan.on_meta
        )
        if problems or omitted:
            raise gathered([*problems, *refuse_omitted(omitted)])
        plan.optimizers.follow(self.leaves, plan.stored)

    def finish(self) -> int:
        """Complete modules and optimizers after all bytes have arrived: set codes, derived entries, settings and extra
        state.

        Returns:
            the number of bytes written into this rank's tensors.

        Raises:
            Refused: with code UNSUPPORTED, if a module does not keep the loaded values.
        """
        plan, leaves = self._plan, self.leaves
        written = sum(
            destination.bytes_written for name, destination in self.destinations.items() if name not in self._values
        )
        written += sum(put_values(leaves.weights[name], local_of(values)) for name, values in self._values.items())
        for name in plan.quantized.begins:
            if name in leaves.weights:
                reset_scaling_state(leaves.weights[name])
        if leaves.custom_modules:
            settle(leaves.custom_modules, leaves.tensors)
        for name in plan.padding_rows.keys() & leaves.tensors.keys():
            grid = leaves.tensors[name]
            assert isinstance(grid, ShardGrid)  # only grids of shards may have more rows than the source
            grid.clear_beyond(plan.stored[name].shape)
        for factory in leaves.factories:
            factory.finish()
        with torch.no_grad():
            for name in leaves.copies.keys() & self.destinations.keys():
                for copy in leaves.copies[name]:
                    copy.copy_(leaves.tensors[name])
        plan.optimizers.install(leaves.weights, self._values)
        plan.extra.install()
        return written


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _movement(plan: LoadPlan, filling: Filling, limit: Limits, world: World, *, once: bool) -> Movement:
    """Return the `Movement` that moves bytes from the source into this rank's tensors; `once` is an argument of
    `plan_reads`.
    """
    reads = plan_reads(plan.targets, plan.stored, world.rank, once=once)
    exchange = RankExchange(world) if world.size > 1 else None
    sink = LocalSink(filling.destinations, reads.names)
    return Movement(reads.items, plan.storage, sink, limit, exchange, reads.elsewhere)


def reading_limits(jobs: int | None) -> Limits:
    """Return the limits of a load, which reads through small gaps between byte runs; `jobs` is the argument of
    `load`.
    """
    return msgspec.structs.replace(limits(jobs), waste=_WASTE, gap=_GAP, few=_FEW)


def _report(
    plan: LoadPlan,
    filling: Filling,
    source_check: SourceCheck,
    world: World,
    clock: Clock,
    *,
    bytes_read: int,
    bytes_received: int,
    bytes_written: int,
) -> LoadReport:
    """Return the load's report for this rank; all ranks must call this method."""
    return LoadReport(
        path=plan.checkpoint.path,
        format=plan.checkpoint.format,
        dialect=plan.view.dialect,
        tensors=len(set(filling.names.values())),
        states=sum(name in plan.optimizers.states for name in filling.destinations),
        bytes_needed=sum(destination.size for destination in filling.destinations.values()),
        bytes_read=bytes_read,
        bytes_received=bytes_received,
        bytes_written=bytes_written,
        converted=_list_conversions(plan.conversions, filling, world),
        missing=(*plan.missing, *plan.extra.missing),
        unexpected=plan.unexpected,
        untouched=filling.leaves.untouched,
        padded=plan.padding_rows,
        zeros=tuple(name for name in plan.targets if not plan.stored[name].origins),
        scalars=plan.extra.scalars,
        extra=plan.extra.extra,
        untrained=plan.optimizers.names_without_optimizer,
        source_against=source_check.against,
        partly_read=source_check.partly_read,
        seconds=clock.total,
        stages=clock.stages,
    )


def _list_conversions(planned: Mapping[str, Conversion], filling: Filling, world: World) -> tuple[Conversion, ...]:
    """Return the changes of dtype. A conversion is marked inexact if any rank has rounded a value. All ranks must call
    this function.
    """
    if not planned:
        return ()
    inexact_names = {filling.names[part] for part, destination in filling.destinations.items() if not destination.exact}
    rounded_anywhere = {name for names in world.gather(inexact_names) for name in names}
    return tuple(
        replace(conversion, exact=False) if name in rounded_anywhere else conversion
        for name, conversion in planned.items()
    )


def _check_copies(plan: LoadPlan, world: World, jobs: int | None, *, is_checked: bool) -> None:
    """Compare stored copies of a tensor, and stored tensors that are a single tensor in the model; one rank compares
    each pair. All ranks must call this function.

    Raises:
        Refused: raised on every rank, with code UNEQUAL_COPIES; with code CORRUPT, if damage is the reason.
    """
    checkpoint = plan.view.checkpoint
    storage, recoding = checkpoint.container.storage, checkpoint.container.recoding
    with world.together(), damage_first(storage, recoding, is_checked=is_checked):
        problems: list[Refusal] = []
        checks: list[PlannedCheck] = []
        for first, second in sorted(plan.same_memory):
            first_target, second_target = plan.targets[first], plan.targets[second]
            if (first_target.shape, first_target.positions) == (second_target.shape, second_target.positions):
                checks += _plan_tie_check(first, second, plan.stored, problems)
            # Tensors that share memory on some ranks only are handled by `find_overlapping`, which treats them as
            # overlapping.
        for first, second in sorted(plan.same_state):
            checks += _plan_tie_check(first, second, plan.stored, problems)
        if checkpoint.checks or checkpoint.container.twins:
            checks += plan_checks(checkpoint.source, checkpoint.checks, problems)
        if not checks and not problems:
            return
        place = world.ranks.index(world.rank)
        problems += compare_copies(checks[place :: world.size], storage, limits(jobs))
        if problems:
            raise gathered(problems)


def _plan_tie_check(
    first: str, second: str, stored: Mapping[str, StoredTensor], problems: list[Refusal]
) -> Iterator[PlannedCheck]:
    """Yield the comparison of two stored tensors that are a single tensor in the model, unless the source stores them
    as the same bytes.
    """
    first_stored, second_stored = stored[first], stored[second]
    why = _TIED.format(first=first)
    if (first_stored.dtype, first_stored.shape) != (second_stored.dtype, second_stored.shape):
        value_of_first, value_of_second = (
            (first_stored.dtype, second_stored.dtype)
            if first_stored.dtype != second_stored.dtype
            else (list(first_stored.shape), list(second_stored.shape))
        )
        message = f"{why}\nbut one is {value_of_first} in the source, the other {value_of_second}"
        problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, second), _UNTIED))
        return
    transfers = tuple(first_stored.transfers()), tuple(second_stored.transfers())
    if transfers[0] != transfers[1]:
        yield PlannedCheck(second, why, nbytes(first_stored.dtype, first_stored.shape), *transfers)
