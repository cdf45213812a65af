"""What a refit moves, as all ranks of both sides have agreed when it was made: later pushes ask nothing of it again.

Values are cast where they are sent, so what is compared with the target is the source as it arrives. A target that
keeps codes gets values, which it quantizes when it has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transaxle.arguments import Config, PathLike
from transaxle.encodings.arithmetic.casting import CASTS, PLAIN
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.settings import settings
from transaxle.errors import Refusal, Where
from transaxle.formats.dtype import nbytes
from transaxle.live.model.live_config import shared_config
from transaxle.live.model.quantized_model import Sorted, Weights, stand_in
from transaxle.live.model.source_view import View
from transaxle.live.model.state_tensors import Leaves, State, unsavable
from transaxle.live.reexpress.agreed_match import Match, matched
from transaxle.live.reexpress.ties import Sides
from transaxle.live.sharding.global_tensors import Census, census
from transaxle.live.sharding.memory import container
from transaxle.live.transport.world import World
from transaxle.move.runs import Item
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
    sent_as: Mapping[str, str]
    """Safetensors codes of the source's tensors that are cast on the way."""
    items: list[Item]
    """Every part of the target that ranks hold."""
    names: list[str]
    """The target's tensor of each item."""
    parts: list[str]
    """The name of the part on the ranks that hold it."""


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
    differences = _differences(config, config_of_target)
    config = config_of_target if config is None else config
    everything, wanted = census(own_source.tensors, world), census(own_target.tensors, world)
    weights = Weights(own_target.weights, world)
    parts = {part: tensor for _, part, tensor in local_parts(own_source.tensors)}

    def seen(held: Census) -> View:
        memory = container(held, parts, world.rank, config)
        source_now = Checkpoint(memory, replace(said, config=None, partial=True), None, None)
        return weights.seen(source_now, wanted, asked.family, asked.dialect, None, partial=False)

    with world.together():
        view = seen(everything)
        sent_as = _casts(view, everything, wanted, weights, asked.dtype)
        if sent_as:
            everything = {n: replace(t, dtype=sent_as.get(n, t.dtype)) for n, t in everything.items()}
            view = seen(everything)
        stored = view.tensors()
        quantized = weights.sorted(view, stored)
        stand_ins = {
            name: stand_in(own_target.weights[name], code, meta=True)
            for name, code in quantized.anew.items()
            if name in own_target.weights
        }
    gone = quantized.gone
    filled = {n: t for n, t in own_target.tensors.items() if n not in gone} | stand_ins
    targets = {n: t for n, t in wanted.items() if n not in gone} | dict(census(stand_ins, world))
    sides = Sides(own_source.tensors, filled, everything, targets, world)
    others = [*quantized.problems, *unsavable(own_source.tensors), *(differences if asked.strict else ())]
    kept = {name: tensor for name, tensor in stored.items() if name not in gone or name in quantized.anew}
    match = matched(sides, own_target, lambda: kept, strict=asked.strict, others=lambda: others, hint=_CAST, once=False)
    return Agreement(match, quantized, sent_as, *_items(targets, match))


def _casts(view: View, everything: Census, wanted: Census, weights: Weights, dtype: str | None) -> dict[str, str]:
    """Return the source's tensors that are cast on the way, with the type of the target's that are made of them."""
    if dtype is None:
        return {}
    to = CASTS[dtype]
    found: dict[str, str] = {}
    for name, stored in view.tensors().items():
        target = wanted.get(name)
        takes = weights.value_type(name) or (None if target is None else target.dtype)
        if takes == to:
            found |= {o: to for o in stored.origins if everything[o].dtype in PLAIN and everything[o].dtype != to}
    return found


def _differences(config: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> list[Refusal]:
    """Return why the target's model is another one than the source's, whatever their shapes say.

    Args:
        config: the source's.
        other: the target's.
    """
    if other is None or config is None:
        return []
    pairs = {key: (value, other[key]) for key, value in _sizes(config).items() if key in _sizes(other)}
    unlike = {
        key: f"{key} is {there} in the target's config, but {here} in the source's"
        for key, (here, there) in pairs.items()
        if here != there
    }
    return [Refusal("SHAPE_MISMATCH", message, Where(), _CONFIGS) for message in unlike.values()]


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of a config that say what a model is."""
    nested = config.get("text_config")
    flat = {**config, **nested} if isinstance(nested, Mapping) else config
    return {key: value for key, value in flat.items() if type(value) is int and not key.endswith(_TOKENS)}


def _items(targets: Census, match: Match) -> tuple[list[Item], list[str], list[str]]:
    """Return every part of a target that ranks hold, with the names of its tensor and of itself."""
    items, names, parts = list[Item](), list[str](), list[str]()
    for name, tensor in targets.items():
        stored = match.stored.get(name)
        if stored is None:
            continue
        for held, ranks in tensor.boxes.items():
            within = tensor.within(held, stored.shape)
            size = nbytes(stored.dtype, local_shape(within))
            items.append(Item(len(items), size, stored.transfers(within), ranks))
            names.append(name)
            parts.append(tensor.part_name(held))
    return items, names, parts
