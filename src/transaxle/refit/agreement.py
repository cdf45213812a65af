"""What a refit moves, as all ranks of both sides have agreed when it was made: later pushes ask nothing of it again.

Values are cast where they are sent, so what is compared with the target is the source as it arrives. A target that
keeps codes gets values, which it quantizes when it has all of them.

**Encoded targets**: an engine's plain tensors of codes and scales, which are made of a source's values on their way.

Each rank gets the values of the whole tiles that its codes and scales lie in, and encodes these: what comes out is what
encoding the whole tensor gives. Where there is a scale for a whole matrix, the ranks tell each other their largest
values.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch

from transaxle.arguments import Config, PathLike
from transaxle.axes.geometry import Intervals
from transaxle.axes.layout.relayout import Check
from transaxle.encodings.arithmetic.codec import amax, encode_rows
from transaxle.encodings.conventions.buffer_group import group
from transaxle.encodings.conventions.convention import CONVENTIONS
from transaxle.encodings.conventions.quantization import read
from transaxle.encodings.encoding import CASTS, ENCODINGS, PLAIN, WIDE, Encoded, Encoding, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.settings import Settings, settings
from transaxle.engine.plan.rank_parts import RANKS, for_ranks
from transaxle.engine.views.encode import METHODS
from transaxle.errors import Refusal, Where
from transaxle.formats.catalog import nbytes, numpy_dtype
from transaxle.live.global_tensors import Census, Global, census
from transaxle.live.memory import Replicas, container
from transaxle.live.model.quantized_model import Sorted, Weights, stand_in
from transaxle.live.model.source_view import View
from transaxle.live.model.state_tensors import Leaves, State, shared_config, unsavable
from transaxle.live.reshard import Match, matched
from transaxle.live.ties import Sides
from transaxle.live.transport.world import World
from transaxle.move.workers import Item
from transaxle.torch_tensors import (
    Part,
    Positions,
    as_bytes,
    byte_view,
    code_of,
    local_parts,
    local_shape,
    mark,
    torch_dtype,
)

_ROLES = frozenset({Role.CODES, Role.SCALE, Role.GLOBAL})
Buffers = Mapping[str, np.ndarray]
"""Bytes of a rank's codes and scales, by the names of its tensors."""
Sizes = Mapping[str, np.ndarray]
"""Largest magnitude of each matrix of a tensor, by name."""


@dataclass(frozen=True)
class EncodedTarget:
    """One tensor that a target has as codes and scales."""

    tensor: Encoded
    """Its buffers."""
    buffers: Mapping[Role, Global]
    """How they lie on the ranks."""

    @property
    def spec(self) -> Encoding:
        """The encoding, as it is made."""
        return ENCODINGS[self.tensor.encoding.name]

    def held(self, rank: int) -> Positions | None:
        """Return the values that a rank needs, whole tiles of them; None where it has neither codes nor scales."""
        spans: list[list[tuple[int, int]]] = [[] for _ in self.tensor.shape]
        for role in (Role.CODES, Role.SCALE):
            own = self.buffers[role].held.get(rank)
            for dim, intervals in enumerate(() if own is None else own):
                unit, size, tile = self.unit(role, dim), self.tensor.shape[dim], self.unit(Role.SCALE, dim)
                for first, last in intervals:
                    low, high = first * unit // tile * tile, -(-min(last * unit, size) // tile) * tile
                    spans[dim].append((low, min(high, size)))
        return tuple(_joined(each) for each in spans) if spans[-1] else None

    def unit(self, role: Role, dim: int) -> int:
        """Return how many values one number of a buffer stands for along a dim."""
        if role is Role.SCALE:
            return self.spec.tiles(self.tensor.shape)[dim]
        return self.tensor.shape[dim] // max(self.buffers[role].shape[dim], 1) or 1

    def stand_in(self, rank: int, code: str, device: str) -> torch.Tensor | None:
        """Return room for a rank's values; None where it needs none."""
        held = self.held(rank)
        if held is None:
            return None
        values = torch.empty(local_shape(held), dtype=torch_dtype(code), device=device)
        return mark(values, Part(self.tensor.shape, held))


def encoded_targets(
    wanted: Census, config: Mapping[str, Any] | None, aside: Container[str], rank: int
) -> dict[str, EncodedTarget]:
    """Return what a target has in codes that can be made here, by the names that tables know.

    Args:
        wanted: the target's tensors.
        config: its model's config, which may say how they are stored.
        aside: names of tensors that belong to quantized parameters.
        rank: this rank.

    Raises:
        Refused: INCOMPLETE where the ranks do not hold all codes of a tensor.
    """
    entries = {name: tensor for name, tensor in wanted.items() if name not in aside}
    found = {}
    for name, tensor in group(entries, None if config is None else read(config)).encoded.items():
        one = EncodedTarget(tensor, {role: wanted[stored] for role, stored in tensor.parts.items()})
        if _is_made_here(one):
            codes = one.buffers[Role.CODES]
            container({codes.name: codes}, {}, rank, None)  # the largest value of a matrix is that of all its parts
            found[name] = one
    return found


def _is_made_here(one: EncodedTarget) -> bool:
    """Tell whether the codes of a target, and how they are stored, are what is written here."""
    tensor, usual = one.tensor, ENCODINGS.get(one.tensor.encoding.name)
    if usual is None or usual.name not in METHODS or not _ROLES.issuperset(tensor.parts) or len(tensor.shape) < 2:
        return False
    if (usual.code, usual.scale, usual.tile) != (tensor.encoding.code, tensor.encoding.scale, tensor.encoding.tile):
        return False
    if usual.has_global != (Role.GLOBAL in tensor.parts) or usual.scale_max != tensor.encoding.scale_max:
        return False
    convention = CONVENTIONS[tensor.convention]
    for role, buffer in one.buffers.items():
        code, shape = convention.presented(usual, tensor.shape, role)
        if buffer.shape != shape or buffer.padded or buffer.apart:
            return False
        if buffer.dtype != code and {buffer.dtype, code} != {"U8", "F8_E8M0"}:
            return False
        if role is not Role.GLOBAL and len(shape) != len(tensor.shape):
            return False
    return True


def largest(targets: Mapping[str, EncodedTarget], values: Mapping[str, torch.Tensor], world: World) -> Sizes:
    """Return the largest values of matrices that have a scale for the whole; collective where any has.

    Args:
        targets: those that are encoded in this push, the same on all ranks.
        values: what this rank has received, by name.
        world: the ranks.
    """
    names = [name for name, one in targets.items() if one.spec.has_global]
    if not names:
        return {}
    own = {n: np.array([amax(m) for m in _matrices(values[n])], np.float32) for n in names if n in values}
    places = {name: [(rank, targets[name].held(rank)) for rank in world.ranks] for name in names}
    return dict(_heard(world.gather(own), places, targets))


def _heard(
    of_ranks: Sequence[Mapping[str, np.ndarray]],
    places: Mapping[str, Sequence[tuple[int, Positions | None]]],
    targets: Mapping[str, EncodedTarget],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, largest value of each of its matrices), whichever ranks hold parts of them."""
    for name, helds in places.items():
        leading = targets[name].tensor.shape[:-2]
        sizes = np.zeros(leading, np.float32)
        for sizes_of_rank, (_, held) in zip(of_ranks, helds, strict=True):
            if held is None or name not in sizes_of_rank:
                continue
            index = np.ix_(*(_positions(intervals) for intervals in held[:-2])) if leading else ()
            shape = local_shape(held)[:-2]
            sizes[index] = np.maximum(sizes[index], sizes_of_rank[name].reshape(shape))
        yield name, sizes


def encode(one: EncodedTarget, values: torch.Tensor, sizes: np.ndarray | None, rank: int) -> Buffers:
    """Encode what a rank has received of a tensor.

    Args:
        one: the tensor.
        values: whole tiles, see `EncodedTarget.held`.
        sizes: largest value of each matrix, where there is a scale for the whole.
        rank: this rank.

    Returns:
        The bytes of its own codes and scales.
    """
    held = one.held(rank)
    assert held is not None  # else there are no values
    convention, codes, scales = CONVENTIONS[one.tensor.convention], [], []
    own_sizes = None
    if sizes is not None:
        leading = np.ix_(*(_positions(intervals) for intervals in held[:-2])) if len(held) > 2 else ()
        own_sizes = sizes[leading].reshape(-1)
    for number, matrix in enumerate(_matrices(values)):
        size = None if own_sizes is None else float(own_sizes[number])
        own_codes, own_scales = encode_rows(one.spec, matrix, amax=size)
        codes.append(own_codes)
        scales.append(np.ascontiguousarray(own_scales))
    found: dict[str, np.ndarray] = {}
    for role, made in ((Role.CODES, codes), (Role.SCALE, scales)):
        buffer = one.buffers[role]
        if rank in buffer.held:
            shape = [-(-size // one.unit(role, dim)) for dim, size in enumerate(local_shape(held))]
            stacked = np.stack(made).reshape(shape) if made else np.zeros(shape, np.uint8)
            for dim, intervals in enumerate(buffer.held[rank]):
                there = _in_units(held[dim], one.unit(role, dim))
                if there == intervals:
                    continue
                places = {at: local for local, at in enumerate(_positions(there))}
                stacked = np.take(stacked, [places[at] for at in _positions(intervals)], dim)
            found[buffer.name] = np.ascontiguousarray(stacked).reshape(-1).view(np.uint8)
    buffer_of_whole = one.buffers.get(Role.GLOBAL)
    if buffer_of_whole is not None and sizes is not None and rank in buffer_of_whole.held:
        every = np.array([convention.global_from_amax(float(size), one.spec) for size in sizes.reshape(-1)], np.float32)
        every = every.reshape(buffer_of_whole.shape)
        for dim, intervals in enumerate(buffer_of_whole.held[rank]):
            every = np.take(every, _positions(intervals), dim)
        found[buffer_of_whole.name] = np.ascontiguousarray(every).reshape(-1).view(np.uint8)
    return found


def put(buffers: Buffers, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write codes and scales into local tensors; return the bytes."""
    for name, content in buffers.items():
        local = tensors[name]
        made = byte_view(torch.empty(local.shape, dtype=local.dtype))
        made.copy_(torch.from_numpy(content))
        local.view(torch.uint8).copy_(made.view(torch.uint8).view(local.view(torch.uint8).shape))
    return sum(content.nbytes for content in buffers.values())


def _matrices(values: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield the matrices of a stack, as numpy has them."""
    array = as_bytes(values).view(numpy_dtype(code_of(values.dtype)))
    rows, columns = values.shape[-2:]
    yield from array.reshape(prod(values.shape[:-2]), rows, columns)


def _joined(spans: Sequence[tuple[int, int]]) -> Intervals:
    """Return intervals in order; those that touch are one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _in_units(intervals: Intervals, unit: int) -> Intervals:
    return tuple((start // unit, -(-stop // unit)) for start, stop in intervals)


def _positions(intervals: Intervals) -> list[int]:
    return [at for start, stop in intervals for at in range(start, stop)]


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
