"""Loading: each rank reads just the bytes of its own shards, from any format and dialect, into the tensors' storage.

Everything is planned and agreed on by all ranks before the first byte is written. What several ranks hold alike is
read by one of them and sent to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from transaxle.axes.layout.bind import join_slot
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from transaxle.engine.checkpoint.peft_adapter import adapter_config
from transaxle.engine.copying.duplicate_checks import plan_checks, unequal
from transaxle.engine.copying.transfer import Reader, Scratch
from transaxle.engine.copying.workers import limits, share
from transaxle.engine.views.param_groups import regrouped
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.training_state.state_groups import GROUPS, PARAMS, Group
from transaxle.live.derived.settle import left_out, reached, settle, unnamed, untaken
from transaxle.live.load.file_reading import Counting, Unit, units
from transaxle.live.load.one_source import refuse_different
from transaxle.live.load.shared_checksums import check_sums
from transaxle.live.model.live_config import Config, plain, sizes_that_differ
from transaxle.live.model.matching import compared, unmatched
from transaxle.live.model.meta import materialise, unloadable
from transaxle.live.model.peft_model import adapted, seen_by
from transaxle.live.model.quantized_model import Weights, stand_in
from transaxle.live.model.report import LoadReport
from transaxle.live.model.source_view import View
from transaxle.live.model.state_tensors import Leaves, State, leaves, tied, unwritable
from transaxle.live.sharding.global_tensors import Census, census
from transaxle.live.tensors.clock import Clock
from transaxle.live.tensors.destination import Landing, local_of
from transaxle.live.tensors.type_change import Conversion, check_dtype
from transaxle.live.training.group_options import restore, settings_for
from transaxle.live.training.optimizer_state import (
    doubled,
    follow,
    install,
    names_of,
    rooms_for,
    taken_away,
    unrestored,
    untrained,
)
from transaxle.live.training.optimizers import AnyOptimizer, Optimizers, apart
from transaxle.live.training.state_beside import Beside
from transaxle.live.transport.deferred import Deferred
from transaxle.live.transport.tensor_exchange import Parcel, exchange
from transaxle.live.transport.world import World
from transaxle.quant.modules.entries import begin_anew, put_values
from transaxle.quant.modules.masters import MASTER, MasterWeights

_WASTE, _GAP = 1.4, 64
"""Bytes that may be read for each one needed, and the gap between runs that is read along in any case."""


@dataclass(frozen=True)
class _Planned:
    """What all ranks agreed on."""

    seen: View
    """The source in the model's dialect."""
    stored: Mapping[str, StoredTensor]
    """The source's tensors by the model's names."""
    wanted: Census
    """What is loaded, as all ranks hold it."""
    optimizers: Optimizers | None
    """What the optimizer was taken apart to."""
    named: Mapping[str, torch.Tensor]
    """The optimizer's parameters by name."""
    untrained: tuple[str, ...]
    """Parameters that have gradients, and no optimizer."""
    missing: tuple[str, ...]
    """Names that only the model has."""
    unexpected: tuple[str, ...]
    """Names that only the source has."""
    conversions: Mapping[str, Conversion]
    """What is converted, as far as it is known beforehand, by the model's names."""
    settings: list[Mapping[str, Any]]
    """For each group of the optimizer, the settings that the source has."""
    beside: Beside
    """What is no tensor."""
    anew: Mapping[str, str]
    """Quantized parameters of any rank whose codes are made here, and the safetensors code of the source's values."""
    begins: tuple[str, ...]
    """Quantized parameters of any rank whose state of scaling begins anew."""
    gone: frozenset[str]
    """Names of entries that nothing is read into."""
    reached: set[str]
    """Names of this rank's parameters and buffers that are no entries, and that its modules load."""
    untried: frozenset[str]
    """Paths of this rank's modules on meta: that they load what they show is found out when they have memory."""


def load(
    state: State,
    src: str | Path | Checkpoint,
    *,
    optimizer: AnyOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    family: str | None = None,
    dialect: str | None = None,
    config: str | Path | Config | None = None,
    strict: bool = True,
    decode: Literal["bf16", "fp16", "fp32"] | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    broadcast_replicated: bool = True,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    jobs: int | None = None,
) -> LoadReport:
    """Load a checkpoint into a model or state dict; collective over the group.

    Args:
        state: a model under any parallelism, or a state dict whose leaves are tensors or DTensors.
        src: path of a checkpoint of any format and dialect, or an opened one.
        optimizer: the model's optimizer, whose state and settings are loaded too; it need not have made a step yet.
            Also several in a list or dict, and a wrapper or container of some (ZeRO, accelerate, torchtitan).
        extra: what else is restored, by name: objects with `load_state_dict` get their states, the states of any other
            names are in the report. A state that differed between ranks needs as many ranks as saved it.
        family: model family; None: recognised.
        dialect: dialect of the model's names; None: recognised.
        config: config.json of the source, where it has none: its path, its content or a transformers config.
        strict: refuse names that only one side has; otherwise they are reported.
        decode: parameters of this type take encoded tensors, decoded; None: these are refused.
        dtype: parameters of this type take plain floating-point tensors of other types, cast as `.to` does; None: a
            type that differs is refused.
        broadcast_replicated: read what several ranks hold once, and send it.
        group: the ranks that load together; None: all.
        device: where plain meta tensors go; None: the current GPU, or the CPU where there is none.
        jobs: reading threads per rank.

    Raises:
        TransaxleError: on every rank, before anything is written, with every problem of every rank.
    """
    world, clock = World(group), Clock()
    with _opened(src, config, world) as opened:
        base = _base(opened, decode)
        reader = Counting(base.container.storage)
        checkpoint = _counted(base, reader)
        with clock.stage("plan"):
            planned = _plan(state, checkpoint, optimizer, extra or {}, family, dialect, world, strict, decode, dtype)
            plan = units(planned.wanted, planned.stored, once=broadcast_replicated)
        with clock.stage("check"), world.together():
            _check_copies(planned.seen, world, jobs)
        with world.together():
            if isinstance(state, nn.Module):
                materialise(state, planned.stored.keys() | planned.reached, device or _default_device())
            held = _found(state, checkpoint)
            _check_taken(held, planned.untried)
            values = {
                n: stand_in(held.weights[n], code, meta=False) for n, code in planned.anew.items() if n in held.weights
            }
            mine = {**_left(held, planned.gone), **values}
            named: dict[str, torch.Tensor] = {}
            states: dict[str, torch.Tensor] = {}
            optimizers = planned.optimizers
            if optimizers is not None:
                named = {name: held.parameters[name] for name in planned.named}
                follow(optimizers, planned.named, named)
                states = rooms_for(optimizers, named, planned.stored)
            landings = {
                name: Landing(tensor, planned.stored[name].dtype)
                for name, tensor in {**mine, **states}.items()
                if name in planned.wanted
            }
        before, storage = reader.count, planned.seen.checkpoint.container.storage
        with clock.stage("read"), world.together():
            planned.beside.read()
            _read_own(plan, landings, storage, world.rank, jobs)
        with clock.stage("exchange"), world.together():
            received = _read_shared(plan, landings, storage, world)
        with clock.stage("check"):
            check_sums(storage, world)
    with world.together():
        _check_landed(landings)
    with world.together():
        written = sum(landing.written for name, landing in landings.items() if name not in values)
        written += sum(put_values(held.weights[name], local_of(plain)) for name, plain in values.items())
        for name in planned.begins:
            if name in held.weights:
                begin_anew(held.weights[name])
        settle(held.islands, held.tensors)
        with torch.no_grad():
            for name in held.copies.keys() & landings.keys():
                for copy in held.copies[name]:
                    copy.copy_(held.tensors[name])
        if optimizers is not None:
            restore(optimizers, planned.settings)
            install(optimizers, named, states)
            for one in optimizers.members:
                if isinstance(one, MasterWeights):
                    _restart(one, held, values, states)
        planned.beside.install()
    return LoadReport(
        path=checkpoint.path,
        format=checkpoint.format,
        dialect=planned.seen.dialect,
        tensors=len(landings),
        states=sum(name in states for name in landings),
        bytes_needed=sum(landing.size for landing in landings.values()),
        bytes_read=reader.count - before,
        bytes_received=received,
        bytes_written=written,
        converted=_converted(planned.conversions, landings, world),
        missing=(*planned.missing, *planned.beside.missing),
        unexpected=planned.unexpected,
        untouched=held.untouched,
        scalars=planned.beside.scalars,
        extra=planned.beside.extra,
        untrained=planned.untrained,
        seconds=clock.seconds,
    )


@contextmanager
def _opened(src: str | Path | Checkpoint, config: str | Path | Config | None, world: World) -> Iterator[Checkpoint]:
    """Give the source; one that is opened here is closed again."""
    if isinstance(src, Checkpoint):
        yield src
        return
    with world.together():
        said = config if isinstance(config, str | Path | None) else plain(config)
        checkpoint = open_checkpoint(src, config=said)
    with checkpoint:
        refuse_different(checkpoint, world)
        yield checkpoint


def _base(opened: Checkpoint, decode: str | None) -> Checkpoint:
    """Return the checkpoint that is decoded here, if any is: not one that the caller has decoded already."""
    return opened if decode is None or opened.undecoded is None else opened.undecoded


def _counted(base: Checkpoint, reader: Counting) -> Checkpoint:
    """Return a checkpoint under its stored names, whose bytes are counted when they are read."""
    return Checkpoint(replace(base.container, storage=reader), base.settings, None, None, base.undecoded)


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _plan(
    state: State,
    checkpoint: Checkpoint,
    optimizer: AnyOptimizer | None,
    extra: Mapping[str, Any],
    family: str | None,
    dialect: str | None,
    world: World,
    strict: bool,
    decode: str | None,
    dtype: str | None,
) -> _Planned:
    """Find out what every rank needs and where it lies; collective."""
    with world.together():
        check_dtype(dtype)
        found = _found(state, checkpoint)
    names = census(found.tensors, world)
    weights = Weights(found.weights, world)
    with world.together():
        seen = weights.seen(checkpoint, names, family, dialect, decode, partial=not strict)
        stored = seen.tensors()
        filled = weights.sorted(seen, stored)
        plain = {
            n: stand_in(found.weights[n], code, meta=True) for n, code in filled.anew.items() if n in found.weights
        }
        mine = {**_left(found, filled.gone), **plain}
        optimizers = None if optimizer is None else apart(optimizer)
        if optimizers is not None:
            nameless = unnamed((parameter for _, _, parameter in optimizers.parameters()), found.islands)
            if nameless:
                raise gathered(nameless)
        named = {} if optimizers is None else names_of(optimizers, found.parameters)
        states = {} if optimizers is None else rooms_for(optimizers, named, stored)
        lost = () if optimizers is None else unrestored(optimizers, named, stored)
        unfit, left = untaken(() if found.kept else found.islands)
    kept = {name: tensor for name, tensor in names.items() if name not in filled.gone}
    added = census({**plain, **states}, world)
    told = world.gather((tied(mine, stored), doubled(named, found.parameters, stored), tuple(found.others), left))
    ties, doubles, others, omitted = ({name for each in told for name in each[side]} for side in range(4))
    everything = {name: tensor for name, tensor in {**kept, **added}.items() if name not in ties}
    with world.together():
        sizes, codes = sizes_that_differ(state, seen.checkpoint.config), seen.checkpoint.decoded
        problems, missing, unexpected = compared(everything, stored, optimizer is not None, decode, sizes, dtype, codes)
        problems += filled.problems
        beside_them = {item.name for item in checkpoint.container.training if item.name is not None}
        unexpected = tuple(n for n in unexpected if n not in others | doubles | filled.gone | beside_them)
        beside = Beside(state, found.others, extra, seen.checkpoint, stored, world)
        problems += [*beside.problems, *found.kept, *unfit]
        missing += (*lost, *sorted(omitted))
        if strict:
            names_there = [name for name in checkpoint if name not in everything]
            missed = [name for name in missing if name not in omitted]
            problems += [*unmatched(missed, unexpected, names_there), *left_out(left), *beside.lacking]
            problems += [] if optimizer is None else taken_away(checkpoint)
        reach = reached(found.islands, stored.keys() | ties)
        problems += [*unloadable(state, stored.keys() | ties | reach), *unwritable(mine)]
        settings, unlike = ([], []) if optimizers is None else settings_for(optimizers, named, _groups(seen, problems))
        problems += unlike
        if problems:
            raise gathered(problems)
    wanted = {name: tensor for name, tensor in everything.items() if name not in missing}
    conversions = _conversions(wanted, seen, stored)
    conversions |= {each.name: each for each in weights.conversions(filled.anew, seen, stored)}
    return _Planned(
        seen,
        stored,
        wanted,
        optimizers,
        named,
        () if optimizers is None else untrained(named, found.parameters),
        missing,
        unexpected,
        conversions,
        settings,
        beside,
        filled.anew,
        filled.begins,
        filled.gone,
        reach,
        frozenset(island.path for island in found.islands if island.is_meta),
    )


def _found(state: State, checkpoint: Checkpoint) -> Leaves:
    """Return what a state holds; of a model with adapters what the checkpoint is for."""
    found, model = leaves(state), adapted(state)
    if model is None:
        return found
    is_adapter = adapter_config(checkpoint.container) is not None
    return seen_by(model, found, checkpoint.catalog.entries.keys(), adapter=is_adapter)


def _left(held: Leaves, gone: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return a model's tensors without those that nothing is read into."""
    return {name: tensor for name, tensor in held.tensors.items() if name not in gone}


def _check_taken(held: Leaves, untried: frozenset[str]) -> None:
    """Try modules that had no memory when all was planned.

    Raises:
        Refused: UNSUPPORTED, MISSING_TENSOR.
    """
    problems, left = untaken(island for island in held.islands if island.path in untried)
    if problems or left:
        raise gathered([*problems, *left_out(left)])


def _check_landed(landings: Mapping[str, Landing]) -> None:
    """Prove that every byte of every tensor was written.

    Raises:
        Refused: INCOMPLETE.
    """
    short = [
        Refusal("INCOMPLETE", f"{landing.written} bytes were written, and {landing.left} are left", Where(None, name))
        for name, landing in landings.items()
        if landing.left
    ]
    if short:
        raise gathered(short)


def _restart(
    masters: MasterWeights, held: Leaves, values: Mapping[str, torch.Tensor], states: Mapping[str, torch.Tensor]
) -> None:
    """Give masters that the source lacks the values that were loaded."""
    lacking = [name for name in held.weights if join_slot(name, MASTER) not in states]
    given = {held.weights[name]: local_of(values[name]) for name in lacking if name in values}
    masters.restart({**{held.weights[name]: None for name in lacking}, **given})


def _groups(seen: View, problems: list[Refusal]) -> list[Group]:
    """Return the source's parameter groups by the model's names."""
    groups = seen.checkpoint.container.metadata.get(GROUPS, ())
    found = regrouped(groups, seen.checkpoint.targets, problems)
    return [{**group, PARAMS: [seen.named(name) for name in group[PARAMS]]} for group in found]


def _conversions(wanted: Census, seen: View, stored: Mapping[str, StoredTensor]) -> dict[str, Conversion]:
    """Return what is converted; whether casts are exact is known when they are done."""
    held = seen.checkpoint.decoded
    found = {}
    for name, tensor in wanted.items():
        source = stored[name]
        codes = next((held[origin] for origin in source.origins if origin in held), None)
        if codes is not None:
            found[name] = Conversion(name, codes.encoding.name, tensor.dtype, None)
        elif source.dtype != tensor.dtype:
            found[name] = Conversion(name, source.dtype, tensor.dtype, exact=True)
    return found


def _converted(
    planned: Mapping[str, Conversion], landings: Mapping[str, Landing], world: World
) -> tuple[Conversion, ...]:
    """Return what was converted, with what all ranks know of its exactness; collective."""
    if not planned:
        return ()
    mine = {name for name, landing in landings.items() if not landing.exact}
    rounded = {name for each in world.gather(mine) for name in each}
    return tuple(replace(each, exact=False) if name in rounded else each for name, each in planned.items())


def _check_copies(seen: View, world: World, jobs: int | None) -> None:
    """Prove stored copies equal, each pair by one rank."""
    problems: list[Refusal] = []
    checks = plan_checks(seen.checkpoint.source, seen.checkpoint.checks, problems)
    place = world.ranks.index(world.rank)
    problems += unequal(checks[place :: world.size], seen.checkpoint.container.storage, limits(jobs))
    if problems:
        raise gathered(problems)


def _read_own(plan: list[Unit], landings: Mapping[str, Landing], reader: Reader, rank: int, jobs: int | None) -> None:
    """Read what this rank alone needs, by several threads, straight into place."""
    limit = limits(jobs)

    def work(scratch: Scratch, unit: Unit) -> None:
        landing = landings[unit.name]
        unit.read(reader, landing.part(unit.start, unit.stop), scratch)
        landing.done(unit.stop - unit.start)

    alone = [unit for unit in plan if unit.ranks == (rank,)]
    share(alone, limit.jobs, lambda _: Scratch(limit.scratch, _WASTE, _GAP), work)


def _read_shared(plan: list[Unit], landings: Mapping[str, Landing], reader: Reader, world: World) -> int:
    """Read what several ranks need, each unit by its reader, and send it; return the bytes received."""
    shared = [unit for unit in plan if len(unit.ranks) > 1]
    scratch = Scratch(limits(1).scratch, _WASTE, _GAP)

    def fill(number: int, buffer: np.ndarray) -> None:
        shared[number].read(reader, buffer, scratch)

    def take(number: int, buffer: np.ndarray) -> None:
        unit = shared[number]
        landings[unit.name].part(unit.start, unit.stop)[:] = buffer
        landings[unit.name].done(unit.stop - unit.start)

    later = Deferred()
    parcels = [Parcel(unit.reader, unit.ranks, unit.stop - unit.start) for unit in shared]
    received = exchange(world, parcels, later(fill), later(take))
    later.check()
    return received
