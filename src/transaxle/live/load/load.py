"""Loading: each rank reads just the bytes of its own shards, from any format and dialect, into the tensors' storage.

Everything is planned and agreed on by all ranks before the first byte is written. What several ranks hold alike is
read by one of them and sent to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import msgspec

from transaxle.arguments import (
    Config,
    DType,
    PathLike,
    check_keywords,
    read_count,
    read_float_type,
    read_optional_text,
    shows,
)
from transaxle.engine.checkpoint.checkpoint import CheckpointLike, StoredTensor
from transaxle.engine.copying.duplicate_checks import PlannedCheck, plan_checks, unequal
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.dtype import nbytes
from transaxle.formats.storage.storage import Storage
from transaxle.live.load.filling import Destinations, destinations, finish
from transaxle.live.load.load_plan import LoadPlan, LoadRequest, plan_load
from transaxle.live.load.planned_reads import Reads, reads
from transaxle.live.load.shared_source import check_read, counted, opened
from transaxle.live.model.report import LoadReport
from transaxle.live.model.state_tensors import State
from transaxle.live.sharding.global_tensors import Census
from transaxle.live.tensors.destination import NamePair, Rooms, check_filled
from transaxle.live.tensors.type_change import Conversion
from transaxle.live.training.optimizers import AnyOptimizer
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import Clock, World
from transaxle.move.mover import Movement
from transaxle.move.workers import limits
from transaxle.torch_tensors.torch_arguments import Device, Ranks, read_device

_WASTE, _GAP, _FEW = 1.4, 64, 256
"""Bytes that may be read for each one needed, the gap between runs that is read along in any case, and the number of
runs up to which none is."""
_TIED = "the model has one tensor for it and {first}"
_UNTIED = "Build the model without the tie."


class Loading(TypedDict, total=False):
    """How a checkpoint is loaded: further keyword arguments of `load`."""

    family: str | None
    """Model family, such as `qwen3_moe`; None: recognised."""
    dialect: str | None
    """Dialect of the model's names, such as `hf`; None: recognised."""
    config: Config | None
    """The model's config, where the source has none."""
    axes: Mapping[str, int] | None
    """Axis sizes that override everything, such as `{"g": 8}`."""
    rules: PathLike | None
    """A file with families and dialects of your own."""
    decode: DType | None
    """Parameters of this type take encoded tensors, decoded; None: these are refused."""
    dtype: DType | None
    """Parameters of this type take plain floating-point tensors of other types, cast as `.to` does; None: a type that
    differs is refused."""
    broadcast_replicated: bool
    """Read what several ranks hold once, and send it."""
    jobs: int | None
    """Reading threads per rank."""


@shows(Loading, broadcast_replicated=True)
def load(
    state: State,
    src: CheckpointLike,
    *,
    optimizer: AnyOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
    device: Device | None = None,
    group: Ranks | None = None,
    **options: Unpack[Loading],
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
        **options: `family` (None: recognised), `dialect` (of the model's names; None: recognised), `config` (for a
            source without one: a path, a mapping or an object with `to_dict()`), `axes` (axis -> size) and `rules`
            (path of a table of your own; of an opened source, these three are for `open`), `decode` and `dtype`
            (`bf16`, `fp16`, `fp32`: parameters of this type take encoded tensors, decoded, or floating-point ones of
            other types, cast; None: refuse them), `broadcast_replicated` (one rank reads what several have), `jobs`
            (reading threads per rank).

    Raises:
        TypeError: an argument of a type that it cannot have.
        TransaxleError: on every rank, before anything is written, with every problem of every rank.
    """
    world, clock = World(group), Clock()
    with world.together():
        check_keywords("load", options, Loading.__annotations__)
        request, meta_device = _request(state, optimizer, extra, options, strict=strict), read_device("device", device)
    world.require_alike(_alike(request, options))
    with opened(src, options, world, with_state=optimizer is not None, strict=strict) as source:
        checkpoint, counter = counted(source, request.decode)
        with clock.stage("plan"):
            plan = plan_load(request, checkpoint, world)
            read = reads(plan.wanted, plan.stored, world.rank, once=options.get("broadcast_replicated", True))
        with clock.stage("check"), world.together():
            _check_copies(plan, world, options.get("jobs"))
        with world.together():
            filled = destinations(plan, state, checkpoint, meta_device)
            movement = _movement(read, plan.storage, filled, options.get("jobs"), world)
        read_before = counter.count
        with clock.stage("read"), world.together():
            plan.beside.read()
            movement.move_own()
        with clock.stage("exchange"), world.together():
            received = movement.move_others()
        with clock.stage("check"):
            check_read(plan.storage, world)
    with world.together():
        check_filled(filled.landings)
    with world.together():
        written = finish(plan, filled)
    return LoadReport(
        path=checkpoint.path,
        format=checkpoint.format,
        dialect=plan.view.dialect,
        tensors=len(set(filled.names.values())),
        states=sum(name in filled.states for name in filled.landings),
        bytes_needed=sum(landing.size for landing in filled.landings.values()),
        bytes_read=counter.count - read_before,
        bytes_received=received,
        bytes_written=written,
        converted=_converted(plan.conversions, filled, world),
        missing=(*plan.missing, *plan.beside.missing),
        unexpected=plan.unexpected,
        untouched=filled.own.untouched,
        padded=plan.padded,
        zeros=tuple(name for name in plan.wanted if not plan.stored[name].origins),
        scalars=plan.beside.scalars,
        extra=plan.beside.extra,
        untrained=plan.untrained,
        seconds=clock.total,
        stages=clock.stages,
    )


def _request(
    state: State, optimizer: AnyOptimizer | None, extra: Mapping[str, Any] | None, options: Loading, *, strict: bool
) -> LoadRequest:
    """Return what is asked of `load`, checked.

    Raises:
        TypeError: an argument of a type that it cannot have.
    """
    if options.get("jobs") is not None:
        read_count("jobs", options["jobs"])
    return LoadRequest(
        state,
        optimizer,
        extra or {},
        read_optional_text("family", options.get("family"), "qwen3_moe"),
        read_optional_text("dialect", options.get("dialect"), "hf"),
        strict,
        read_float_type("decode", options.get("decode")),
        read_float_type("dtype", options.get("dtype")),
    )


def _alike(request: LoadRequest, options: Loading) -> dict[str, Any]:
    """Return the arguments that all ranks have to give alike."""
    asked = {name: getattr(request, name) for name in ("family", "dialect", "strict", "decode", "dtype")}
    said = {"optimizer": request.optimizer is not None, "axes": options.get("axes")}
    return asked | said | {"broadcast_replicated": options.get("broadcast_replicated", True)}


def _movement(read: Reads, storage: Storage, filled: Destinations, jobs: int | None, world: World) -> Movement:
    """Return what carries the bytes from the source into this rank's tensors."""
    limit = msgspec.structs.replace(limits(jobs), waste=_WASTE, gap=_GAP, few=_FEW)
    rooms = Rooms(filled.landings, read.names)
    exchange = RankExchange(world) if world.size > 1 else None
    return Movement(read.items, storage, rooms, limit, exchange, read.elsewhere)


def _converted(planned: Mapping[str, Conversion], filled: Destinations, world: World) -> tuple[Conversion, ...]:
    """Return what was converted, with what all ranks know of its exactness; collective."""
    if not planned:
        return ()
    mine = {filled.names[part] for part, landing in filled.landings.items() if not landing.exact}
    rounded = {name for each in world.gather(mine) for name in each}
    return tuple(replace(each, exact=False) if name in rounded else each for name, each in planned.items())


def _check_copies(plan: LoadPlan, world: World, jobs: int | None) -> None:
    """Prove stored copies equal, and what the model has one tensor for, each pair by one rank."""
    problems: list[Refusal] = []
    seen = plan.view
    checks = _plan_tie_checks(plan.same_memory, plan.wanted, plan.stored, problems)
    checks += _plan_state_checks(plan.same_state, plan.stored, problems)
    if seen.checkpoint.checks or seen.checkpoint.container.twins:
        checks += plan_checks(seen.checkpoint.source, seen.checkpoint.checks, problems)
    if not checks and not problems:
        return
    place = world.ranks.index(world.rank)
    problems += unequal(checks[place :: world.size], seen.checkpoint.container.storage, limits(jobs))
    if problems:
        raise gathered(problems)


def _plan_tie_checks(
    pairs: Iterable[NamePair], targets: Census, stored: Mapping[str, StoredTensor], problems: list[Refusal]
) -> list[PlannedCheck]:
    """Plan the comparisons of what a source has for two names of one tensor; the same on all ranks.

    Args:
        pairs: see `same_memory`, of all ranks.
        targets: the model's tensors.
        stored: the source's, by the model's names.
        problems: takes UNEQUAL_COPIES for pairs of two types.
    """
    planned: list[PlannedCheck] = []
    for first, second in sorted(pairs):
        if (targets[first].shape, targets[first].held) != (targets[second].shape, targets[second].held):
            continue  # they are alike on some ranks only, and no two names of one tensor: see `overlapping`
        planned += _plan_tie_check(first, second, stored, problems)
    return planned


def _plan_state_checks(
    pairs: Iterable[NamePair], stored: Mapping[str, StoredTensor], problems: list[Refusal]
) -> list[PlannedCheck]:
    """Plan the comparisons of optimizer state that a source has for two names of one parameter."""
    return [check for first, second in sorted(pairs) for check in _plan_tie_check(first, second, stored, problems)]


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
