"""What a refit moves, as all ranks of both sides have agreed when it was made: later pushes ask nothing of it again.

Values are cast where they are sent, so what is compared with the target is the source as it arrives. A target that
keeps codes gets values, which it quantizes when it has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from transaxle.arguments import Config, PathLike
from transaxle.axes.layout.relayout import Check
from transaxle.encodings.plain_types import CASTS, PLAIN, WIDE
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.settings import Settings, settings
from transaxle.engine.plan.rank_parts import RANKS, for_ranks
from transaxle.errors import Refusal, Where
from transaxle.formats.catalog import nbytes
from transaxle.live.model.quantized_model import Sorted, Weights, stand_in
from transaxle.live.model.source_view import View
from transaxle.live.model.state_tensors import Leaves, State, shared_config, unsavable
from transaxle.live.reexpress.agreed_match import Match, matched
from transaxle.live.reexpress.ties import Sides
from transaxle.live.sharding.global_tensors import Census, Global, census
from transaxle.live.sharding.memory import Replicas, container
from transaxle.live.transport.world import World
from transaxle.move.workers import Item
from transaxle.refit.encoded_targets import EncodedTarget, encoded_targets
from transaxle.torch_tensors.placement import local_parts, local_shape

_CAST = 'Give dtype="bf16" to cast values on the way, or build both sides with the same dtypes.'
_TOKENS = "_token_id"
_CONFIGS = "Give the engine the trainer's config; if it differs on purpose, use strict=False."


@dataclass(frozen=True)
class Asked:
    """What the user says of a refit; arguments of `Refit`, which documents them."""

    family: str | None
    """Model family."""
    dialect: str | None
    """Dialect of the target's names."""
    config: Config | None
    """The model's config."""
    rules: PathLike | None
    """A table of the user's own."""
    dtype: str | None
    """Type that values may be cast to, a key of `CASTS`."""
    strict: bool
    """Whether names that only one side has are refused."""


@dataclass(frozen=True)
class Agreement:
    """What is moved; the same on all ranks."""

    match: Match
    """The source's tensors by the target's names."""
    quantized: Sorted
    """The target's parameters that quantize what comes."""
    codes: Mapping[str, EncodedTarget]
    """The target's tensors that are encoded, by table name."""
    checks: tuple[Check, ...]
    """What must be so in the source for the target to be the same model."""
    sent_as: Mapping[str, str]
    """Safetensors codes of the source's tensors that are cast on the way."""
    items: list[Item]
    """Every part of the target that ranks hold."""
    names: list[str]
    """The target's tensor of each item, by its key."""
    parts: list[str]
    """The name of the part on the ranks that hold it, likewise."""


def agreed(source: tuple[State, Leaves], target: tuple[State, Leaves], world: World, asked: Asked) -> Agreement:
    """Find out what all ranks hold, and what goes where; collective.

    Args:
        source: what is read, and what this rank holds of it.
        target: what is written, likewise.
        world: the ranks.
        asked: what the user says.

    Raises:
        TransaxleError: on every rank, with every problem of every rank.
    """
    with world.together():
        said = settings(family=asked.family, config=asked.config, rules=asked.rules)
    own_source, own_target = source[1], target[1]
    config = shared_config(source[0], said.config, world)
    config_of_target = shared_config(target[0], None, world)
    differences = _differences(
        shared_config(source[0], said.config, world, whole=True), shared_config(target[0], None, world, whole=True)
    )
    if config is not None and RANKS in (config_of_target or ()):  # some tensors have a part for each of an engine's
        config = for_ranks(config, config_of_target[RANKS])  # type: ignore[index]  # it is in there
    everything, wanted = census(own_source.tensors, world), census(own_target.tensors, world)
    weights = Weights(own_target.weights, world)
    with world.together():
        codes = encoded_targets(wanted, config_of_target, weights.names, world.rank)
        views = _Views(own_source, config or config_of_target, said, asked, weights, world.rank)
        seen = views.of(everything, wanted, codes)
        stand_ins = _stand_ins(own_target, seen, world.rank)
    gone = seen.quantized.gone | {name for one in seen.codes.values() for name in one.tensor.parts.values()}
    filled = {n: t for n, t in own_target.tensors.items() if n not in gone} | stand_ins
    targets = {n: t for n, t in wanted.items() if n not in gone} | dict(census(stand_ins, world))
    sides = Sides(own_source.tensors, filled, seen.everything, targets, world)
    others = [*seen.quantized.problems, *unsavable(own_source.tensors), *(differences if asked.strict else ())]
    made = seen.quantized.anew.keys() | seen.codes.keys()
    kept = {name: tensor for name, tensor in seen.stored.items() if name not in gone or name in made}
    match = matched(sides, own_target, lambda: kept, strict=asked.strict, others=lambda: others, hint=_CAST, once=False)
    return Agreement(
        match, seen.quantized, seen.codes, seen.checks, seen.sent_as, *_items(targets, match, Replicas(seen.everything))
    )


@dataclass(frozen=True)
class _Seen:
    """The source by the target's names, as it arrives there."""

    everything: Census
    """What all ranks hold of it, in the types that are sent."""
    sent_as: Mapping[str, str]
    """Safetensors codes of its tensors that are cast on the way."""
    stored: Mapping[str, StoredTensor]
    """Its tensors by the target's names."""
    quantized: Sorted
    """The target's parameters that quantize what comes."""
    codes: Mapping[str, EncodedTarget]
    """The target's tensors that are encoded, by table name."""
    checks: tuple[Check, ...]
    """What must be so for the target to be the same model."""


@dataclass(frozen=True)
class _Views:
    """Sees a source as a target names it."""

    own: Leaves
    """What this rank holds of the source."""
    config: Mapping[str, Any] | None
    """The model's config."""
    said: Settings
    """What the user says of the source."""
    asked: Asked
    """What the user says of both."""
    weights: Weights
    """The target's quantized parameters."""
    rank: int
    """This rank."""

    def of(self, everything: Census, wanted: Census, codes: Mapping[str, EncodedTarget]) -> _Seen:
        """Return the source in the target's names.

        Args:
            everything: what all ranks hold of it.
            wanted: the target's tensors.
            codes: those that could be encoded.
        """
        view = self._view(everything, _shown(wanted, codes))
        stored = view.tensors()
        plain = {name: one for name, one in codes.items() if name in stored and stored[name].dtype in WIDE}
        if plain.keys() != codes.keys():  # what the source has in codes travels so
            codes, view = plain, self._view(everything, _shown(wanted, plain))
        sent_as = self._casts(view, everything, wanted, codes)
        if sent_as:
            everything = {n: replace(t, dtype=sent_as.get(n, t.dtype)) for n, t in everything.items()}
            view = self._view(everything, _shown(wanted, codes))
        stored = view.tensors()
        return _Seen(everything, sent_as, stored, self.weights.sorted(view, stored), codes, view.checkpoint.checks)

    def _view(self, everything: Census, names: Census) -> View:
        parts = {part: tensor for _, part, tensor in local_parts(self.own.tensors)}
        memory = container(everything, parts, self.rank, self.config)
        source = Checkpoint(memory, msgspec.structs.replace(self.said, config=None, partial=True), None, None)
        return self.weights.seen(source, names, self.asked.family, self.asked.dialect, None, partial=False)

    def _casts(
        self, view: View, everything: Census, wanted: Census, codes: Mapping[str, EncodedTarget]
    ) -> dict[str, str]:
        """Return the source's tensors that are cast on the way: those of which others of the asked type are made."""
        if self.asked.dtype is None:
            return {}
        to = CASTS[self.asked.dtype]
        takes = dict.fromkeys(codes, to) | {n: t.dtype for n, t in wanted.items() if n not in codes}
        found: dict[str, str] = {}
        for name, stored in view.tensors().items():
            if (self.weights.value_type(name) or takes.get(name)) == to:
                found |= {o: to for o in stored.origins if everything[o].dtype in PLAIN and everything[o].dtype != to}
        return found


def _shown(wanted: Census, codes: Mapping[str, EncodedTarget]) -> Census:
    """Return a target's tensors with values in the place of codes and scales."""
    parts = {stored for one in codes.values() for stored in one.tensor.parts.values()}
    values = {name: Global(name, "", one.tensor.shape, {}) for name, one in codes.items()}
    return {name: tensor for name, tensor in wanted.items() if name not in parts} | values


def _stand_ins(own_target: Leaves, seen: _Seen, rank: int) -> dict[str, torch.Tensor]:
    """Return tensors without memory for the values that this rank's target quantizes or encodes."""
    found = {
        name: stand_in(own_target.weights[name], code, meta=True)
        for name, code in seen.quantized.anew.items()
        if name in own_target.weights
    }
    for name, one in seen.codes.items():
        values = one.stand_in(rank, seen.stored[name].dtype, "meta")
        found |= {} if values is None else {name: values}
    return found


def _differences(config: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> list[Refusal]:
    """Return why the target's model is another one than the source's, whatever their shapes say.

    Args:
        config: the source's.
        other: the target's.
    """
    if other is None or config is None:
        return []
    here, there = _sizes(config), _sizes(other)
    unlike = [
        f"{key} is {there[key]} in the target's config, but {here[key]} in the source's"
        for key in here
        if here[key] != there.get(key, here[key])
    ]
    return [Refusal("SHAPE_MISMATCH", message, Where(), _CONFIGS) for message in unlike]


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of a config that say what a model is."""
    nested = config.get("text_config")
    flat = {**config, **nested} if isinstance(nested, Mapping) else config
    return {key: value for key, value in flat.items() if type(value) is int and not key.endswith(_TOKENS)}


def _items(targets: Census, match: Match, replicas: Replicas) -> tuple[list[Item], list[str], list[str]]:
    """Return every part of a target that ranks hold; by the items' keys, the names of its tensor and of itself."""
    items, names, parts = list[Item](), list[str](), list[str]()
    for name, tensor in targets.items():
        stored = match.stored.get(name)
        if stored is None:
            continue
        for held, ranks in tensor.boxes.items():
            within = tensor.within(held, stored.shape)
            size = nbytes(stored.dtype, local_shape(within))
            items += replicas.near(Item(len(names), size, stored.transfers(within), ranks))
            names.append(name)
            parts.append(tensor.part_name(held))
    return items, names, parts
