"""Agreement on the data that a refit moves: all ranks of source and target agree once, when the refit is made, and
later pushes (transfers of weights) use this agreement.

Values are cast before they are sent, so the target is compared with the source tensors as they are after the cast. A
target parameter that quantizes its values receives plain values, and quantizes them when all values have arrived.

**Encoded targets** are plain tensors of codes and scales in an engine; they are encoded, when values arrive, from the
source's values.

Each rank receives the values of every whole tile (block with one scale) that overlaps its codes and scales, and encodes
these tiles. The result is the same as if the whole tensor were encoded. If an encoding has one scale per matrix, the
ranks exchange the largest magnitudes of their values.
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
from transaxle.encodings.encoding import CASTS, ENCODINGS, PLAIN, WIDE, EncodedTensor, Encoding, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.settings import Settings, settings
from transaxle.engine.plan.rank_parts import RANKS, config_for_ranks
from transaxle.engine.views.encode import METHODS
from transaxle.errors import Refusal, Where
from transaxle.formats.catalog import nbytes, numpy_dtype
from transaxle.live.global_tensors import Census, GlobalTensor, census
from transaxle.live.memory import Replicas, container
from transaxle.live.model.quantized_model import FillModes, Weights, stand_in
from transaxle.live.model.source_view import View
from transaxle.live.model.state_tensors import Leaves, State, common_config, unsavable
from transaxle.live.reshard import Match, match_sides
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
"""Tensor name -> encoded bytes of this rank's codes or scales."""
Maxima = Mapping[str, np.ndarray]
"""Tensor name -> amax (largest magnitude) of each matrix of the tensor."""


@dataclass(frozen=True)
class EncodedTarget:
    """One logical tensor that the target stores as codes and scales."""

    tensor: EncodedTensor
    """The encoding, logical shape and buffer names of the tensor."""
    buffers: Mapping[Role, GlobalTensor]
    """Role (codes, scales, global scale) -> the buffer, with its shard on each rank."""

    @property
    def spec(self) -> Encoding:
        """The built-in encoding of the tensor."""
        return ENCODINGS[self.tensor.encoding.name]

    def value_intervals(self, rank: int) -> Positions | None:
        """Return, for each dim, the indices of the values that a rank needs, in whole tiles (blocks with one scale);
        None if it needs no values.
        """
        spans: list[list[tuple[int, int]]] = [[] for _ in self.tensor.shape]
        for role in (Role.CODES, Role.SCALE):
            intervals_by_dim = self.buffers[role].positions.get(rank)
            for dim, intervals in enumerate(() if intervals_by_dim is None else intervals_by_dim):
                unit, size, tile = self.unit(role, dim), self.tensor.shape[dim], self.unit(Role.SCALE, dim)
                for first, last in intervals:
                    low, high = first * unit // tile * tile, -(-min(last * unit, size) // tile) * tile
                    spans[dim].append((low, min(high, size)))
        return tuple(_join_intervals(each) for each in spans) if spans[-1] else None

    def unit(self, role: Role, dim: int) -> int:
        """Return how many values along a dim belong to one element of a buffer (a code or a scale)."""
        if role is Role.SCALE:
            return self.spec.tiles(self.tensor.shape)[dim]
        return self.tensor.shape[dim] // max(self.buffers[role].shape[dim], 1) or 1

    def stand_in(self, rank: int, code: str, device: str) -> torch.Tensor | None:
        """Return an uninitialized tensor for the values that a rank receives; None if the rank needs no values."""
        needed_box = self.value_intervals(rank)
        if needed_box is None:
            return None
        values = torch.empty(local_shape(needed_box), dtype=torch_dtype(code), device=device)
        return mark(values, Part(self.tensor.shape, needed_box))


def find_encodable(
    targets: Census, config: Mapping[str, Any] | None, aside: Container[str], rank: int
) -> dict[str, EncodedTarget]:
    """Return logical tensor name -> encoded tensor of the target, for the tensors that this module can encode.

    Args:
        targets: the tensors of the target on all ranks.
        config: the target model's config, whose `quantization_config` may name the encoding.
        aside: names of tensors to exclude, because they belong to parameters that quantize themselves.
        rank: number of this rank.

    Raises:
        Refused: with code INCOMPLETE, if the ranks together lack some codes of a tensor.
    """
    entries = {name: tensor for name, tensor in targets.items() if name not in aside}
    encodable = {}
    for name, tensor in group(entries, None if config is None else read(config)).encoded.items():
        target = EncodedTarget(tensor, {role: targets[stored] for role, stored in tensor.parts.items()})
        if _is_encodable(target):
            codes = target.buffers[Role.CODES]
            # this refuses gaps, because the amax of a matrix can be computed only from all of its values
            container({codes.name: codes}, {}, rank, None)
            encodable[name] = target
    return encodable


def _is_encodable(target: EncodedTarget) -> bool:
    """Return whether `encode` can produce the codes and scales of a target with their stored dtypes and shapes."""
    tensor, encoding = target.tensor, ENCODINGS.get(target.tensor.encoding.name)
    if encoding is None or encoding.name not in METHODS or not _ROLES.issuperset(tensor.parts) or len(tensor.shape) < 2:
        return False
    if (encoding.code, encoding.scale, encoding.tile) != (
        tensor.encoding.code,
        tensor.encoding.scale,
        tensor.encoding.tile,
    ):
        return False
    if encoding.has_global != (Role.GLOBAL in tensor.parts) or encoding.scale_max != tensor.encoding.scale_max:
        return False
    convention = CONVENTIONS[tensor.convention]
    for role, buffer in target.buffers.items():
        code, shape = convention.presented(encoding, tensor.shape, role)
        if buffer.shape != shape or buffer.padded or buffer.apart:
            return False
        if buffer.dtype != code and {buffer.dtype, code} != {"U8", "F8_E8M0"}:
            return False
        if role is not Role.GLOBAL and len(shape) != len(tensor.shape):
            return False
    return True


def gather_maxima(targets: Mapping[str, EncodedTarget], values: Mapping[str, torch.Tensor], world: World) -> Maxima:
    """Return tensor name -> amax of each matrix that has a global scale; if there is any, all ranks must call this
    function.

    Args:
        targets: the tensors that are encoded in this push, the same on all ranks.
        values: tensor name -> values that this rank has received.
        world: the ranks.
    """
    names = [name for name, one in targets.items() if one.spec.has_global]
    if not names:
        return {}
    rank_maxima = {n: np.array([amax(m) for m in _matrices(values[n])], np.float32) for n in names if n in values}
    needed_by_rank = {name: [(rank, targets[name].value_intervals(rank)) for rank in world.ranks] for name in names}
    return dict(_merge_maxima(world.gather(rank_maxima), needed_by_rank, targets))


def _merge_maxima(
    maxima_by_rank: Sequence[Mapping[str, np.ndarray]],
    needed_by_name: Mapping[str, Sequence[tuple[int, Positions | None]]],
    targets: Mapping[str, EncodedTarget],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (tensor name, amax of each matrix), where the amax is the maximum over all ranks that hold a shard of the
    matrix.
    """
    for name, needed_by_rank in needed_by_name.items():
        leading = targets[name].tensor.shape[:-2]
        maxima = np.zeros(leading, np.float32)
        for rank_maxima, (_, needed_box) in zip(maxima_by_rank, needed_by_rank, strict=True):
            if needed_box is None or name not in rank_maxima:
                continue
            index = np.ix_(*(_positions(intervals) for intervals in needed_box[:-2])) if leading else ()
            shape = local_shape(needed_box)[:-2]
            maxima[index] = np.maximum(maxima[index], rank_maxima[name].reshape(shape))
        yield name, maxima


def encode(target: EncodedTarget, values: torch.Tensor, maxima: np.ndarray | None, rank: int) -> Buffers:
    """Encode the received values of a tensor into this rank's codes and scales.

    Args:
        target: the tensor to encode.
        values: this rank's values in whole tiles; see `EncodedTarget.value_intervals`.
        maxima: the amax of each matrix; None if the encoding has no global scale.
        rank: number of this rank.

    Returns:
        The bytes of this rank's codes and scales.
    """
    needed_box = target.value_intervals(rank)
    assert needed_box is not None  # only ranks that have received values call this function
    convention, codes, scales = CONVENTIONS[target.tensor.convention], [], []
    matrix_maxima = None
    if maxima is not None:
        leading = np.ix_(*(_positions(intervals) for intervals in needed_box[:-2])) if len(needed_box) > 2 else ()
        matrix_maxima = maxima[leading].reshape(-1)
    for number, matrix in enumerate(_matrices(values)):
        size = None if matrix_maxima is None else float(matrix_maxima[number])
        matrix_codes, matrix_scales = encode_rows(target.spec, matrix, amax=size)
        codes.append(matrix_codes)
        scales.append(np.ascontiguousarray(matrix_scales))
    buffers: dict[str, np.ndarray] = {}
    for role, elements in ((Role.CODES, codes), (Role.SCALE, scales)):
        buffer = target.buffers[role]
        if rank in buffer.positions:
            shape = [-(-size // target.unit(role, dim)) for dim, size in enumerate(local_shape(needed_box))]
            stacked = np.stack(elements).reshape(shape) if elements else np.zeros(shape, np.uint8)
            for dim, intervals in enumerate(buffer.positions[rank]):
                encoded_intervals = _in_units(needed_box[dim], target.unit(role, dim))
                if encoded_intervals == intervals:
                    continue
                index_of = {at: local for local, at in enumerate(_positions(encoded_intervals))}
                stacked = np.take(stacked, [index_of[at] for at in _positions(intervals)], dim)
            buffers[buffer.name] = np.ascontiguousarray(stacked).reshape(-1).view(np.uint8)
    global_buffer = target.buffers.get(Role.GLOBAL)
    if global_buffer is not None and maxima is not None and rank in global_buffer.positions:
        global_scales = np.array(
            [convention.global_from_amax(float(size), target.spec) for size in maxima.reshape(-1)], np.float32
        )
        global_scales = global_scales.reshape(global_buffer.shape)
        for dim, intervals in enumerate(global_buffer.positions[rank]):
            global_scales = np.take(global_scales, _positions(intervals), dim)
        buffers[global_buffer.name] = np.ascontiguousarray(global_scales).reshape(-1).view(np.uint8)
    return buffers


def put(buffers: Buffers, tensors: Mapping[str, torch.Tensor]) -> int:
    """Copy codes and scales into local tensors; return the number of copied bytes."""
    for name, content in buffers.items():
        local = tensors[name]
        plain = byte_view(torch.empty(local.shape, dtype=local.dtype))
        plain.copy_(torch.from_numpy(content))
        local.view(torch.uint8).copy_(plain.view(torch.uint8).view(local.view(torch.uint8).shape))
    return sum(content.nbytes for content in buffers.values())


def _matrices(values: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield each matrix of a stack as a numpy array that shares the memory of the stack."""
    array = as_bytes(values).view(numpy_dtype(code_of(values.dtype)))
    rows, columns = values.shape[-2:]
    yield from array.reshape(prod(values.shape[:-2]), rows, columns)


def _join_intervals(spans: Sequence[tuple[int, int]]) -> Intervals:
    """Sort intervals, and join those that touch or overlap."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _in_units(intervals: Intervals, unit: int) -> Intervals:
    return tuple((start // unit, -(-stop // unit)) for start, stop in intervals)


def _positions(intervals: Intervals) -> list[int]:
    return [at for start, stop in intervals for at in range(start, stop)]


_CAST = 'Give dtype="bf16" to cast values on the way, or build both sides with the same dtypes.'
_TOKENS = "_token_id"
_CONFIGS = "Give the engine the trainer's config; if the configs differ on purpose, use strict=False."


@dataclass(frozen=True)
class RefitOptions:
    """Options of a refit, as the user gave them; for their documentation see `Refit`."""

    family: str | None
    """Model family."""
    dialect: str | None
    """Dialect of the target's tensor names."""
    config: Config | None
    """The model's config."""
    rules: PathLike | None
    """Path of the user's own table of tensor names."""
    dtype: str | None
    """Dtype to which values may be cast, a key of `CASTS`."""
    strict: bool
    """Whether to refuse tensor names that only the source or only the target has, and configs that differ."""


@dataclass(frozen=True)
class Agreement:
    """The result of the agreement, equal on all ranks: the data that a push (a transfer of weights) moves."""

    match: Match
    """The source's tensors, matched with the target's tensor names."""
    quantized: FillModes
    """The target's parameters that quantize the values that they receive."""
    codes: Mapping[str, EncodedTarget]
    """Logical tensor name -> tensor of the target that is encoded when its values arrive."""
    checks: tuple[Check, ...]
    """Checks that the source's values must pass, such as that padding is zero."""
    sent_as: Mapping[str, str]
    """Source tensor name -> safetensors code of the dtype to which the tensor is cast before it is sent."""
    items: list[Item]
    """One item for each distinct shard of a target tensor, with the ranks that hold this shard."""
    names: list[str]
    """Target tensor name of each item; the key of an item is an index into this list."""
    parts: list[str]
    """Name of each item's shard on the ranks that hold it; the key of an item is an index into this list."""


def agree(source: tuple[State, Leaves], target: tuple[State, Leaves], world: World, options: RefitOptions) -> Agreement:
    """Collect descriptions of the tensors of all ranks, and match source with target tensors; all ranks must call this
    function.

    Args:
        source: the model or state dict to read, with this rank's tensors of it.
        target: the model or state dict to write, with this rank's tensors of it.
        world: all ranks of source and target.
        options: the user's options.

    Raises:
        TransaxleError: raised on every rank, with every problem of every rank.
    """
    with world.together():
        model_settings = settings(family=options.family, config=options.config, rules=options.rules)
    source_leaves, target_leaves = source[1], target[1]
    config = common_config(source[0], model_settings.config, world)
    config_of_target = common_config(target[0], None, world)
    config_differences = _config_differences(
        common_config(source[0], model_settings.config, world, whole=True),
        common_config(target[0], None, world, whole=True),
    )
    # The number of the engine's ranks affects some tensors, which have one part for each rank.
    if config is not None and RANKS in (config_of_target or ()):
        config = config_for_ranks(config, config_of_target[RANKS])  # type: ignore[index]  # it is in there
    sources, targets = census(source_leaves.tensors, world), census(target_leaves.tensors, world)
    weights = Weights(target_leaves.weights, world)
    with world.together():
        codes = find_encodable(targets, config_of_target, weights.names, world.rank)
        views = _Translator(source_leaves, config or config_of_target, model_settings, options, weights, world.rank)
        translation = views.of(sources, targets, codes)
        stand_ins = _stand_ins(target_leaves, translation, world.rank)
    replaced = translation.quantized.gone | {
        name for one in translation.codes.values() for name in one.tensor.parts.values()
    }
    local_targets = {n: t for n, t in target_leaves.tensors.items() if n not in replaced} | stand_ins
    global_targets = {n: t for n, t in targets.items() if n not in replaced} | dict(census(stand_ins, world))
    sides = Sides(source_leaves.tensors, local_targets, translation.tensors, global_targets, world)
    problems = [
        *translation.quantized.problems,
        *unsavable(source_leaves.tensors),
        *(config_differences if options.strict else ()),
    ]
    computed = translation.quantized.anew.keys() | translation.codes.keys()
    stored = {name: tensor for name, tensor in translation.stored.items() if name not in replaced or name in computed}
    match = match_sides(
        sides,
        target_leaves,
        lambda: stored,
        strict=options.strict,
        find_others=lambda: problems,
        hint=_CAST,
        once=False,
    )
    return Agreement(
        match,
        translation.quantized,
        translation.codes,
        translation.checks,
        translation.sent_as,
        *_items(global_targets, match, Replicas(translation.tensors)),
    )


@dataclass(frozen=True)
class _Translation:
    """The source's tensors after their casts, under the target's names."""

    tensors: Census
    """The source's tensors on all ranks, with the dtypes in which they are sent."""
    sent_as: Mapping[str, str]
    """Source tensor name -> safetensors code of the dtype to which the tensor is cast before it is sent."""
    stored: Mapping[str, StoredTensor]
    """Target tensor name -> source tensor."""
    quantized: FillModes
    """The target's parameters that quantize the values that they receive."""
    codes: Mapping[str, EncodedTarget]
    """Logical tensor name -> tensor of the target that is encoded when its values arrive."""
    checks: tuple[Check, ...]
    """Checks that the source's values must pass, such as that padding is zero."""


@dataclass(frozen=True)
class _Translator:
    """Translates the tensors of a source into the target's names."""

    leaves: Leaves
    """This rank's tensors of the source."""
    config: Mapping[str, Any] | None
    """The model's config."""
    settings: Settings
    """Family, config and table of tensor names of the source, as the user gave them."""
    options: RefitOptions
    """Options of the refit."""
    weights: Weights
    """The target's parameters that quantize themselves."""
    rank: int
    """Number of this rank."""

    def of(self, sources: Census, targets: Census, codes: Mapping[str, EncodedTarget]) -> _Translation:
        """Return the source's tensors under the target's names.

        Args:
            sources: the tensors of the source on all ranks.
            targets: the tensors of the target on all ranks.
            codes: the target's tensors that could be encoded when their values arrive.
        """
        view = self._view(sources, _with_values(targets, codes))
        stored = view.tensors()
        encodable = {name: target for name, target in codes.items() if name in stored and stored[name].dtype in WIDE}
        if encodable.keys() != codes.keys():  # codes that the source already contains are moved unchanged
            codes, view = encodable, self._view(sources, _with_values(targets, encodable))
        sent_as = self._casts(view, sources, targets, codes)
        if sent_as:
            sources = {n: replace(t, dtype=sent_as.get(n, t.dtype)) for n, t in sources.items()}
            view = self._view(sources, _with_values(targets, codes))
        stored = view.tensors()
        return _Translation(
            sources, sent_as, stored, self.weights.choose_modes(view, stored), codes, view.checkpoint.checks
        )

    def _view(self, sources: Census, targets: Census) -> View:
        parts = {part: tensor for _, part, tensor in local_parts(self.leaves.tensors)}
        memory = container(sources, parts, self.rank, self.config)
        source = Checkpoint(memory, msgspec.structs.replace(self.settings, config=None, partial=True), None, None)
        return self.weights.view_source(source, targets, self.options.family, self.options.dialect, None, partial=False)

    def _casts(
        self, view: View, sources: Census, targets: Census, codes: Mapping[str, EncodedTarget]
    ) -> dict[str, str]:
        """Return source tensor name -> safetensors code of a dtype, for tensors that must be cast to the dtype of the
        target.
        """
        if self.options.dtype is None:
            return {}
        to = CASTS[self.options.dtype]
        target_types = dict.fromkeys(codes, to) | {n: t.dtype for n, t in targets.items() if n not in codes}
        casts: dict[str, str] = {}
        for name, stored in view.tensors().items():
            if (self.weights.value_type(name) or target_types.get(name)) == to:
                casts |= {o: to for o in stored.origins if sources[o].dtype in PLAIN and sources[o].dtype != to}
        return casts


def _with_values(targets: Census, codes: Mapping[str, EncodedTarget]) -> Census:
    """Replace the codes and scales of each encoded target tensor by one tensor of values."""
    parts = {stored for target in codes.values() for stored in target.tensor.parts.values()}
    values = {name: GlobalTensor(name, "", target.tensor.shape, {}) for name, target in codes.items()}
    return {name: tensor for name, tensor in targets.items() if name not in parts} | values


def _stand_ins(target_leaves: Leaves, translation: _Translation, rank: int) -> dict[str, torch.Tensor]:
    """Return name -> meta tensor, for the values that this rank will quantize or encode."""
    tensors = {
        name: stand_in(target_leaves.weights[name], code, meta=True)
        for name, code in translation.quantized.anew.items()
        if name in target_leaves.weights
    }
    for name, target in translation.codes.items():
        values = target.stand_in(rank, translation.stored[name].dtype, "meta")
        tensors |= {} if values is None else {name: values}
    return tensors


def _config_differences(source: Mapping[str, Any] | None, target: Mapping[str, Any] | None) -> list[Refusal]:
    """Return one refusal for each size that differs between the configs of source and target.

    Args:
        source: the source model's config.
        target: the target model's config.
    """
    if target is None or source is None:
        return []
    source_sizes, target_sizes = _sizes(source), _sizes(target)
    messages = [
        f"{key} is {target_sizes[key]} in the target's config, but {source_sizes[key]} in the source's"
        for key in source_sizes
        if source_sizes[key] != target_sizes.get(key, source_sizes[key])
    ]
    return [Refusal("SHAPE_MISMATCH", message, Where(), _CONFIGS) for message in messages]


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return key -> size or count in a model's config: all integers except token ids."""
    nested = config.get("text_config")
    flat = {**config, **nested} if isinstance(nested, Mapping) else config
    return {key: value for key, value in flat.items() if type(value) is int and not key.endswith(_TOKENS)}


def _items(targets: Census, match: Match, replicas: Replicas) -> tuple[list[Item], list[str], list[str]]:
    """Return (items, tensor name of each item, name of each item's shard); the keys of items are indices into the lists
    of names.
    """
    items, names, parts = list[Item](), list[str](), list[str]()
    for name, tensor in targets.items():
        stored = match.stored.get(name)
        if stored is None:
            continue
        for held_box, ranks in tensor.boxes.items():
            within = tensor.within(held_box, stored.shape)
            size = nbytes(stored.dtype, local_shape(within))
            items += replicas.near(Item(len(names), size, stored.transfers(within), ranks))
            names.append(name)
            parts.append(tensor.part_name(held_box))
    return items, names, parts
