"""Planning a load: what every rank needs, where the source has it, and every reason not to begin.

All ranks come to the same plan, or raise the same error; no tensor has been written then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import nn

from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.peft_adapter import adapter_config
from transaxle.engine.views.cast import scales_alone
from transaxle.engine.views.param_groups import regrouped
from transaxle.errors import Refusal, gathered
from transaxle.formats.storage.storage import Storage
from transaxle.formats.training_state.state import OPTIMIZER
from transaxle.formats.training_state.state_groups import GROUPS, PARAMS, ParamGroup
from transaxle.live.derived.settle import reached, untaken
from transaxle.live.model.live_config import sizes_that_differ
from transaxle.live.model.matching import compared, left_out, unmatched
from transaxle.live.model.meta import unloadable
from transaxle.live.model.peft_model import adapted, seen_by
from transaxle.live.model.quantized_model import Sorted, Weights, stand_in
from transaxle.live.model.source_view import View
from transaxle.live.model.state_tensors import Leaves, State, leaves, tied, unwritable
from transaxle.live.sharding.global_tensors import Census, census
from transaxle.live.tensors.destination import NamePair, same_memory
from transaxle.live.tensors.type_change import Conversion, check_dtype, is_plain
from transaxle.live.training.group_options import misordered, settings_for, unlike_tied
from transaxle.live.training.optimizer_state import (
    by_name,
    doubled,
    lacking_state,
    of_another_kind,
    other_names,
    rooms_for,
    unrestored,
    untrained,
)
from transaxle.live.training.optimizers import AnyOptimizer, Optimizers
from transaxle.live.training.state_beside import Beside
from transaxle.live.transport.world import World

_OPTIMIZER = "optimizer"
"""What a report calls an optimizer of which the source has nothing."""


@dataclass(frozen=True)
class LoadRequest:
    """What a load is asked for on this rank: arguments of `load`, which documents them."""

    state: State
    """Model or state dict to fill."""
    optimizer: AnyOptimizer | None
    """Its optimizer, or several."""
    extra: Mapping[str, Any]
    """What else is restored, by name."""
    family: str | None
    """Model family."""
    dialect: str | None
    """Dialect of the model's names."""
    strict: bool
    """Whether names that only one side has are refused."""
    decode: str | None
    """Type of the parameters that take encoded tensors."""
    dtype: str | None
    """Type of the parameters that take plain tensors of other types."""


@dataclass(frozen=True)
class LoadPlan:
    """What a load does; all ranks have agreed on it."""

    view: View
    """The source in the model's dialect."""
    stored: Mapping[str, StoredTensor]
    """The source's tensors by the model's names."""
    wanted: Census
    """The tensors to be read, as all ranks hold them."""
    quantized: Sorted
    """How the source fills quantized parameters of all ranks."""
    optimizers: Optimizers | None
    """The optimizers whose state is loaded."""
    parameters: Mapping[str, torch.Tensor]
    """Their parameters by name."""
    settings: list[Mapping[str, Any]]
    """Settings that the source has for each of their parameter groups."""
    beside: Beside
    """State that is no tensor."""
    conversions: Mapping[str, Conversion]
    """Type changes by the model's names; whether a cast is exact is known when it is done."""
    missing: tuple[str, ...]
    """Names that only the model has."""
    unexpected: tuple[str, ...]
    """Names that only the source has."""
    untrained: tuple[str, ...]
    """Parameters that have gradients and belong to no optimizer."""
    filled_by_modules: frozenset[str]
    """Parameters and buffers of this rank that are no entries: their modules' `load_state_dict` fills them."""
    padded: Mapping[str, tuple[int, int]]
    """Tensors with rows of padding: rows in the source and in the model."""
    untried: frozenset[str]
    """Modules of this rank on the meta device: whether they load what they show is tried when they have memory."""
    same_memory: frozenset[NamePair]
    """Names whose tensors are one on some rank, and that the source has both."""
    same_state: frozenset[NamePair]
    """Optimizer state that is loaded, and that the source has for another name of the same parameter, too."""

    @property
    def storage(self) -> Storage:
        """The source's files."""
        return self.view.checkpoint.container.storage


def plan_load(request: LoadRequest, checkpoint: Checkpoint, world: World) -> LoadPlan:
    """Find out what every rank needs and where the source has it; collective.

    Args:
        request: what this rank is asked for.
        checkpoint: the source under its stored names.
        world: the ranks.

    Raises:
        TransaxleError: on every rank, with every problem of every rank.
    """
    with world.together():
        if request.dtype is not None:
            check_dtype(request.dtype)
        own = leaves_for(request.state, checkpoint)
    global_tensors = census(own.tensors, world)
    weights = Weights(own.weights, world)
    with world.together():
        source = _source(request, checkpoint, weights, global_tensors, world.gather(tuple(own.unshown)))
        stand_ins = {
            name: stand_in(own.weights[name], code, meta=True)
            for name, code in source.quantized.anew.items()
            if name in own.weights
        }
        filled = {**read_into(own, source.quantized), **stand_ins}
        optimizer = _optimizer(request.optimizer, own, source.stored)
        unloadable_modules, omitted = untaken(own.islands) if own.islands and not own.kept else ([], ())
    added = census({**stand_ins, **optimizer.states}, world)
    names = _shared_names(own, source.stored, filled, optimizer, omitted, world)
    targets = {name: tensor for name, tensor in global_tensors.items() if name not in source.quantized.gone}
    targets = {name: tensor for name, tensor in {**targets, **added}.items() if name not in names.tied}
    with world.together():
        model = _Model(own, filled, targets, optimizer)
        match = _matched(request, checkpoint, model, source, names)
        beside = Beside(request.state, own.others, request.extra, source.view.checkpoint, source.stored, world)
        problems = [*match.problems, *beside.problems, *own.kept, *unloadable_modules]
        if request.strict:
            problems += [*_left_over(checkpoint, model, match, names), *left_out(names.omitted), *beside.lacking]
            problems += [] if optimizer.optimizers is None else lacking_state(checkpoint)
        filled_by_modules = reached(own.islands, source.stored.keys() | names.tied) if own.islands else set[str]()
        if _is_on_meta(request.state, own):
            problems += unloadable(request.state, source.stored.keys() | names.tied | filled_by_modules)
        problems += unwritable(filled)
        settings = _settings(optimizer, source, problems)
        if optimizer.optimizers is not None:
            problems += misordered(optimizer.optimizers, settings, beside.given())
        if problems:
            raise gathered(problems)
    wanted = {name: tensor for name, tensor in targets.items() if name not in match.missing}
    conversions = _conversions(wanted, source)
    requantized = weights.conversions(source.quantized.anew, source.view, source.stored)
    return LoadPlan(
        source.view,
        source.stored,
        wanted,
        source.quantized,
        optimizer.optimizers,
        optimizer.parameters,
        settings,
        beside,
        conversions | {each.name: each for each in requantized},
        match.missing,
        match.unexpected,
        () if optimizer.optimizers is None else untrained(optimizer.parameters, own.parameters),
        frozenset(filled_by_modules),
        _padded(wanted, source),
        frozenset(island.path for island in own.islands if island.is_meta),
        frozenset(pair for pair in names.same_memory if wanted.keys() >= set(pair)),
        names.same_state,
    )


def leaves_for(state: State, checkpoint: Checkpoint) -> Leaves:
    """Return what a state holds; of a model with adapters, the side that the checkpoint is for.

    Raises:
        Refused: see `leaves`.
    """
    own = leaves(state, sharded=True)
    peft_model = adapted(state) if isinstance(state, nn.Module) else None
    if peft_model is None:
        return own
    is_adapter = adapter_config(checkpoint.container) is not None
    return seen_by(peft_model, own, checkpoint.catalog.entries.keys(), adapter=is_adapter)


def _is_on_meta(state: State, own: Leaves) -> bool:
    """Tell whether any tensor of a state is on the meta device; `own` is what it holds."""
    of_module = chain(state.parameters(), state.buffers()) if isinstance(state, nn.Module) else own.tensors.values()
    return any(tensor.is_meta for tensor in of_module)


def read_into(own: Leaves, quantized: Sorted) -> dict[str, torch.Tensor]:
    """Return this rank's tensors without those that nothing is read into."""
    return {name: tensor for name, tensor in own.tensors.items() if name not in quantized.gone}


@dataclass(frozen=True)
class _Source:
    """The source by the model's names."""

    view: View
    """The source in the model's dialect."""
    stored: Mapping[str, StoredTensor]
    """Its tensors by the model's names."""
    quantized: Sorted
    """How it fills quantized parameters."""


@dataclass(frozen=True)
class _Optimizer:
    """What is loaded into optimizers; nothing where none is given."""

    optimizers: Optimizers | None = None
    """The optimizers."""
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Their parameters by name."""
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors for the state that the source has."""
    unrestored: tuple[str, ...] = ()
    """State that they have made and the source lacks."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied parameters, with those above."""


@dataclass(frozen=True)
class _Model:
    """What is to be filled."""

    own: Leaves
    """Everything that this rank holds."""
    filled: Mapping[str, torch.Tensor]
    """This rank's tensors that values are read into."""
    targets: Census
    """The tensors of all ranks that values are looked for in the source."""
    optimizer: _Optimizer
    """Optimizers and their state."""


@dataclass(frozen=True)
class _SharedNames:
    """Names that any rank has something to say of."""

    tied: frozenset[str]
    """Names of tensors that have another name, under which they are filled."""
    same_state: frozenset[NamePair]
    """Optimizer state, and where the source has it once more, under another name of a tied parameter."""
    others: frozenset[str]
    """Entries that are no tensors."""
    omitted: frozenset[str]
    """Parameters and buffers that neither a state dict shows nor a load fills."""
    same_memory: frozenset[NamePair]
    """Names of the source whose tensors are one in the model."""


@dataclass(frozen=True)
class _Match:
    """The model's tensors against the source's."""

    problems: list[Refusal]
    """Why what both have does not fit."""
    missing: tuple[str, ...]
    """Names that only the model has."""
    unexpected: tuple[str, ...]
    """Names that only the source has."""


def _source(
    request: LoadRequest,
    checkpoint: Checkpoint,
    weights: Weights,
    global_tensors: Census,
    unshown: Iterable[Sequence[str]],
) -> _Source:
    """Return the source in the model's dialect, with state for the parameters that state dicts of the ranks do not show
    rather than for their parts.
    """
    if request.optimizer is None and not any(name.startswith(OPTIMIZER) for name in global_tensors):
        checkpoint = checkpoint.without_optimizer()  # its names may ask for sizes that the values do not need
    asked = request.family, request.dialect, request.decode
    view = weights.seen(
        checkpoint, global_tensors, *asked, partial=not request.strict, trained=frozenset(chain(*unshown))
    )
    stored = view.tensors()
    return _Source(view, stored, weights.sorted(view, stored))


def _optimizer(optimizer: AnyOptimizer | None, own: Leaves, stored: Mapping[str, StoredTensor]) -> _Optimizer:
    """Find the optimizers' parameters by name, and tensors for their state."""
    if optimizer is None:
        return _Optimizer()
    optimizers, parameters = by_name(optimizer, own)
    states = rooms_for(optimizers, parameters, stored)
    made = unrestored(optimizers, parameters, stored)
    return _Optimizer(optimizers, parameters, states, made, other_names(parameters, own.parameters))


def _shared_names(
    own: Leaves,
    stored: Mapping[str, StoredTensor],
    filled: Mapping[str, torch.Tensor],
    optimizer: _Optimizer,
    omitted: tuple[str, ...],
    world: World,
) -> _SharedNames:
    """Put together what the ranks know of their names; collective."""
    states = tuple(doubled(optimizer.other_names, stored)) if optimizer.other_names else ()
    held = {name: own.weights.get(name, tensor) for name, tensor in filled.items()}
    doubles = tuple(same_memory(held, stored))
    of_all_ranks = world.gather((tied(filled, stored), states, tuple(own.others), omitted, doubles))
    return _SharedNames(*(frozenset(chain.from_iterable(each)) for each in zip(*of_all_ranks, strict=True)))


def _matched(
    request: LoadRequest, checkpoint: Checkpoint, model: _Model, source: _Source, names: _SharedNames
) -> _Match:
    """Hold the model's tensors against the source's."""
    seen = source.view.checkpoint
    with_state = model.optimizer.optimizers is not None
    sizes = cache(lambda: sizes_that_differ(request.state, seen.config))
    problems, missing, unexpected = compared(
        model.targets,
        source.stored,
        with_state,
        request.decode,
        sizes,
        request.dtype,
        seen.decoded,
        seen.config.get("vocab_size"),
    )
    problems += _scales_alone(seen, model.targets, source.stored) if request.dtype is not None else ()
    nothing = (_OPTIMIZER,) if with_state and not checkpoint.has_state else ()
    copies = {second for _, second in names.same_state}
    expected = names.others | copies | source.quantized.gone | checkpoint.container.beside
    return _Match(
        [*problems, *source.quantized.problems],
        (*missing, *model.optimizer.unrestored, *sorted(names.omitted), *nothing),
        tuple(name for name in unexpected if name not in expected),
    )


def _scales_alone(seen: Checkpoint, wanted: Census, stored: Mapping[str, StoredTensor]) -> Iterator[Refusal]:
    """Yield why some tensors must not be cast; to float32 no value of a scale changes."""
    there = ((stored[name], tensor.dtype) for name, tensor in wanted.items() if name in stored)
    casts = [(source, dtype) for source, dtype in there if source.dtype != dtype and is_plain(source.dtype)]
    if casts:
        yield from seen.catalog.refusals
    narrowed = dict.fromkeys(origin for source, dtype in casts if dtype != "F32" for origin in source.origins)
    for refusal in scales_alone((origin for origin in narrowed if origin not in seen.decoded), seen.catalog):
        yield replace(refusal, hint="Build the model with the type that the source has.")


def _left_over(checkpoint: Checkpoint, model: _Model, match: _Match, names: _SharedNames) -> list[Refusal]:
    """Return a refusal for each name that only one side has."""
    unused = [name for name in checkpoint if name not in model.targets]
    missing = [name for name in match.missing if name not in {*names.omitted, _OPTIMIZER}]
    return unmatched(missing, match.unexpected, unused)


def _settings(optimizer: _Optimizer, source: _Source, problems: list[Refusal]) -> list[Mapping[str, Any]]:
    """Return the settings that the source has for each parameter group; add what stands against them."""
    if optimizer.optimizers is None:
        return []
    groups = _groups(source.view, problems)
    settings, unlike = settings_for(optimizer.optimizers, optimizer.parameters, groups)
    problems += [*unlike, *unlike_tied(optimizer.other_names, groups)]
    problems += of_another_kind(optimizer.optimizers, optimizer.parameters, settings, source.stored)
    return settings


def _groups(view: View, problems: list[Refusal]) -> list[ParamGroup]:
    """Return the source's parameter groups by the model's names."""
    stored_groups = view.checkpoint.container.metadata.get(GROUPS, ())
    groups = regrouped(stored_groups, view.checkpoint.targets, problems)
    return [{**group, PARAMS: [view.named(name) for name in group[PARAMS]]} for group in groups]


def _padded(wanted: Census, source: _Source) -> dict[str, tuple[int, int]]:
    """Return which tensors have more, or fewer, rows than the source."""
    shapes = ((name, source.stored[name].shape, tensor.shape) for name, tensor in wanted.items() if tensor.padded)
    return {name: (stored[0], shape[0]) for name, stored, shape in shapes if stored != shape}


def _conversions(wanted: Census, source: _Source) -> dict[str, Conversion]:
    """Return which tensors are decoded or cast."""
    decoded = source.view.checkpoint.decoded
    conversions = {}
    for name, tensor in wanted.items():
        stored = source.stored[name]
        codes = next((decoded[origin] for origin in stored.origins if origin in decoded), None)
        if codes is not None:
            conversions[name] = Conversion(name, codes.encoding.name, tensor.dtype, None)
        elif stored.dtype != tensor.dtype:
            conversions[name] = Conversion(name, stored.dtype, tensor.dtype, exact=True)
    return conversions
