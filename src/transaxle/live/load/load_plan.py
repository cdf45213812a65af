"""Planning a load: what every rank needs, where the source has it, and every reason not to begin.

All ranks come to the same plan, or raise the same error; no tensor has been written then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
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
from transaxle.live.model.destination import Conversion, check_dtype, is_plain, same_memory
from transaxle.live.model.meta import unloadable
from transaxle.live.model.peft_model import adapted, seen_by
from transaxle.live.model.quantized_model import Weights, stand_in
from transaxle.live.model.source_view import View, compared, left_out, unmatched
from transaxle.live.model.state_tensors import Leaves, State, leaves, sizes_that_differ, tied, unwritable
from transaxle.live.sharding.global_tensors import Census, census
from transaxle.live.training.extra_state import ExtraLoad
from transaxle.live.training.optimizer_state import OptimizerLoad, lacking_state
from transaxle.live.training.optimizers import AnyOptimizer
from transaxle.live.transport.world import World

_OPTIMIZER = "optimizer"
"""What a report calls an optimizer of which the source has nothing."""


class LoadPlan:
    """What a load does, agreed on by all ranks; collective to make.

    Args:
        state: model or state dict to fill.
        checkpoint: the source under its stored names.
        world: the ranks.
        optimizer: the model's optimizer, or several.
        extra: what else is restored, by name.
        family: model family.
        dialect: dialect of the model's names.
        strict: whether names that only one side has are refused.
        decode: type of the parameters that take encoded tensors.
        dtype: type of the parameters that take plain tensors of other types.

    Attributes:
        state: the model or state dict.
        checkpoint: the source under its stored names.
        own: what it holds on this rank; of a model with adapters, the side that the checkpoint is for.
        view: the source in the model's dialect.
        stored: the source's tensors by the model's names.
        quantized: how the source fills quantized parameters of all ranks.
        optimizers: what is loaded into optimizers.
        extra: state that is no tensor.
        wanted: the tensors to be read, as all ranks hold them.
        missing: names that only the model has.
        unexpected: names that only the source has.
        conversions: type changes by the model's names; whether a cast is exact is known when it is done.
        on_meta: names of modules of this rank on the meta device: whether they load what they show is tried when they
            have memory.
        filled_by_modules: parameters and buffers of this rank that are no entries: their modules' `load_state_dict`
            fills them.
        same_memory: pairs of names whose tensors are one on some rank, and that the source has both.
        same_state: pairs of names of optimizer state: what is loaded, and what the source has for another name of the
            same parameter.

    Raises:
        TransaxleError: on every rank, with every problem of every rank.
    """

    def __init__(
        self,
        state: State,
        checkpoint: Checkpoint,
        world: World,
        *,
        optimizer: AnyOptimizer | None,
        extra: Mapping[str, Any],
        family: str | None,
        dialect: str | None,
        strict: bool,
        decode: str | None,
        dtype: str | None,
    ) -> None:
        self.state = state
        self.checkpoint = checkpoint
        with world.together():
            if dtype is not None:
                check_dtype(dtype)
            self.own = own = leaves_for(state, checkpoint)
        global_tensors = census(own.tensors, world)
        weights = Weights(own.weights, world)
        with world.together():
            unshown = frozenset(chain.from_iterable(world.gather(tuple(own.unshown))))
            if optimizer is None and not any(name.startswith(OPTIMIZER) for name in global_tensors):
                checkpoint = checkpoint.without_optimizer()  # its names may ask for sizes that the values do not need
            asked = family, dialect, decode
            self.view = weights.seen(checkpoint, global_tensors, *asked, partial=not strict, trained=unshown)
            self.stored = self.view.tensors()
            self.quantized = weights.sorted(self.view, self.stored)
            stand_ins = self.values_of_quantized(own, meta=True)
            self._filled = {**self.read_into(own), **stand_ins}
            self.optimizers = OptimizerLoad(optimizer, own, self.stored)
            unloadable_modules, omitted = untaken(own.islands) if own.islands and not own.kept else ([], ())
        added = census({**stand_ins, **self.optimizers.states}, world)
        self._unite_names(omitted, world)
        targets = {name: tensor for name, tensor in global_tensors.items() if name not in self.quantized.gone}
        targets = {name: tensor for name, tensor in {**targets, **added}.items() if name not in self._tied}
        with world.together():
            problems = self._compare(targets, decode, dtype)
            self.extra = ExtraLoad(state, own.others, extra, self.view.checkpoint, self.stored, world)
            problems += [*self.extra.problems, *own.kept, *unloadable_modules]
            if strict:
                problems += [*self._left_over(targets), *left_out(self._omitted), *self.extra.lacking]
                problems += lacking_state(self.checkpoint) if self.optimizers else []
            problems += [*self._find_unfilled(), *unwritable(self._filled)]
            if self.optimizers:
                problems += self._match_groups()
            if problems:
                raise gathered(problems)
        missing = set(self.missing)
        self.wanted: Census = {name: tensor for name, tensor in targets.items() if name not in missing}
        self.same_memory = frozenset(pair for pair in self._same_memory if self.wanted.keys() >= set(pair))
        requantized = weights.conversions(self.quantized.anew, self.view, self.stored)
        self.conversions = _conversions(self.wanted, self.view, self.stored)
        self.conversions |= {conversion.name: conversion for conversion in requantized}
        self.on_meta = frozenset(island.path for island in own.islands if island.is_meta)

    @property
    def storage(self) -> Storage:
        """The source's files."""
        return self.view.checkpoint.container.storage

    @property
    def padded(self) -> dict[str, tuple[int, int]]:
        """Tensors with rows of padding: rows in the source and in the model."""
        shapes = (
            (name, self.stored[name].shape, tensor.shape) for name, tensor in self.wanted.items() if tensor.padded
        )
        return {name: (stored[0], shape[0]) for name, stored, shape in shapes if stored != shape}

    def values_of_quantized(self, own: Leaves, *, meta: bool) -> dict[str, torch.Tensor]:
        """Return tensors for the values of this rank's parameters that are quantized here, by the parameters' names.

        Args:
            own: what the model holds.
            meta: without memory.
        """
        anew = self.quantized.anew.items()
        return {name: stand_in(own.weights[name], code, meta=meta) for name, code in anew if name in own.weights}

    def read_into(self, own: Leaves) -> dict[str, torch.Tensor]:
        """Return this rank's tensors without those that nothing is read into."""
        return {name: tensor for name, tensor in own.tensors.items() if name not in self.quantized.gone}

    def _unite_names(self, omitted: tuple[str, ...], world: World) -> None:
        """Put together what the ranks know of their names; collective.

        Args:
            omitted: parameters and buffers of this rank that neither a state dict shows nor a load fills.
            world: the ranks.
        """
        own, stored = self.own, self.stored
        in_memory = {name: own.weights.get(name, tensor) for name, tensor in self._filled.items()}
        pairs = tuple(same_memory(in_memory, stored))
        mine = tied(self._filled, stored), self.optimizers.doubled, tuple(own.others), omitted, pairs
        united = [frozenset(chain.from_iterable(names)) for names in zip(*world.gather(mine), strict=True)]
        self._tied, self.same_state, self._no_tensors, self._omitted, self._same_memory = united

    def _compare(self, targets: Census, decode: str | None, dtype: str | None) -> list[Refusal]:
        """Compare the model's tensors with the source's; return what does not fit.

        Args:
            targets: the tensors of all ranks that values are looked for in the source.
            decode: as for the whole.
            dtype: likewise.
        """
        seen, with_state = self.view.checkpoint, bool(self.optimizers)
        problems, missing, unexpected = compared(
            targets,
            self.stored,
            with_state,
            decode,
            cache(partial(sizes_that_differ, self.state, seen.config)),
            dtype,
            seen.decoded,
            seen.config.get("vocab_size"),
        )
        problems += _scales_alone(seen, targets, self.stored) if dtype is not None else ()
        no_state = (_OPTIMIZER,) if with_state and not self.checkpoint.has_state else ()
        self.missing = (*missing, *self.optimizers.unrestored, *sorted(self._omitted), *no_state)
        copies = {second for _, second in self.same_state}
        expected = self._no_tensors | copies | self.quantized.gone | self.checkpoint.container.beside
        self.unexpected = tuple(name for name in unexpected if name not in expected)
        return [*problems, *self.quantized.problems]

    def _left_over(self, targets: Census) -> list[Refusal]:
        """Return a refusal for each name that only one side has."""
        unused = [name for name in self.checkpoint if name not in targets]
        missing = [name for name in self.missing if name not in {*self._omitted, _OPTIMIZER}]
        return unmatched(missing, self.unexpected, unused)

    def _find_unfilled(self) -> list[Refusal]:
        """Return a refusal for each tensor on the meta device that nothing gives values."""
        loaded = self.stored.keys() | self._tied
        self.filled_by_modules = reached(self.own.islands, loaded) if self.own.islands else set[str]()
        tensors: Iterable[torch.Tensor] = self.own.tensors.values()
        if isinstance(self.state, nn.Module):
            tensors = chain(self.state.parameters(), self.state.buffers())
        if not any(tensor.is_meta for tensor in tensors):
            return []
        return unloadable(self.state, loaded | self.filled_by_modules)

    def _match_groups(self) -> list[Refusal]:
        """Find the settings that the source has for the optimizers' groups; return what speaks against them."""
        problems: list[Refusal] = []
        stored_groups = self.view.checkpoint.container.metadata.get(GROUPS, ())
        groups: list[ParamGroup] = [
            {**group, PARAMS: [self.view.named(name) for name in group[PARAMS]]}
            for group in regrouped(stored_groups, self.view.checkpoint.targets, problems)
        ]
        return [*problems, *self.optimizers.match_groups(groups, self.stored, self.extra.given())]


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


def _scales_alone(seen: Checkpoint, targets: Census, stored: Mapping[str, StoredTensor]) -> Iterator[Refusal]:
    """Yield why some tensors must not be cast; to float32 no value of a scale changes."""
    pairs = ((stored[name], tensor.dtype) for name, tensor in targets.items() if name in stored)
    casts = [(source, dtype) for source, dtype in pairs if source.dtype != dtype and is_plain(source.dtype)]
    if casts:
        yield from seen.catalog.refusals
    narrowed = dict.fromkeys(origin for source, dtype in casts if dtype != "F32" for origin in source.origins)
    for refusal in scales_alone((origin for origin in narrowed if origin not in seen.decoded), seen.catalog):
        yield replace(refusal, hint="Build the model with the type that the source has.")


def _conversions(wanted: Census, view: View, stored: Mapping[str, StoredTensor]) -> dict[str, Conversion]:
    """Return which tensors are decoded or cast."""
    decoded = view.checkpoint.decoded
    conversions = {}
    for name, tensor in wanted.items():
        source = stored[name]
        codes = next((decoded[origin] for origin in source.origins if origin in decoded), None)
        if codes is not None:
            conversions[name] = Conversion(name, codes.encoding.name, tensor.dtype, None)
        elif source.dtype != tensor.dtype:
            conversions[name] = Conversion(name, source.dtype, tensor.dtype, exact=True)
    return conversions
