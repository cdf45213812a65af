"""One pipeline stage: all of its tensors, assembled from its tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import Entry, Extent, Twin
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.metadata.spread import Spread
from transaxle.formats.deepspeed.metadata.universal_info import UniversalInfo
from transaxle.formats.deepspeed.table_cuts import HINT, UNTOLD, TableCuts
from transaxle.formats.deepspeed.zero.flat import FlatRun, Shape, Vector, extents, shard_width
from transaxle.formats.deepspeed.zero.ranks import RankModel
from transaxle.formats.deepspeed.zero.shard import RankShard, merge_shards, scaled, scaled_moment, unspread
from transaxle.formats.deepspeed.zero.trained import Trained


@dataclass(frozen=True, slots=True)
class ModelRank:
    """One tensor-parallel rank of a stage."""

    models: Sequence[RankModel]
    """Its model files: one, or with ZeRO-3 one per data-parallel rank."""
    trained: Mapping[str, Trained]


@dataclass(slots=True)
class Stage:
    """The tensors of a stage."""

    weights: dict[str, Entry] = field(default_factory=dict)
    """Trained weights in full precision, and everything that is not trained."""
    low: dict[str, Entry] = field(default_factory=dict)
    """The module's own tensors."""
    states: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """Parameter -> state -> tensor."""
    twins: list[Twin] = field(default_factory=list)
    compared: set[tuple[tuple[Extent, ...], tuple[Extent, ...]]] = field(default_factory=set)
    """Pairs of numbers on two ranks that are compared already: all parameters of a group share one."""
    scaled: dict[str, float] = field(default_factory=dict)
    """Weights that every rank stores multiplied by a number -> the number."""


def assemble(
    ranks: Sequence[ModelRank], info: UniversalInfo | TableCuts | None, faults: Faults, without: Collection[str] = ()
) -> Stage:
    """Put the tensors of a stage together.

    Args:
        ranks: its tensor-parallel ranks.
        info: the metadata, or what a table says instead; None where there is neither.
        faults: whatever stands against it is added.
        without: tensors to leave out: the empty placeholders of what is elsewhere.
    """
    stage = Stage()
    spreads = _Spreads(info, len(ranks), faults)
    for name in _names(ranks):
        if name in without:
            continue
        shards = [_untrained(rank, name) for rank in ranks]
        if any(name in rank.trained for rank in ranks):
            _trained(stage, name, ranks, spreads, faults)
        # Frozen parameters and buffers: they must be on every tensor-parallel rank.
        elif all(shard is not None for shard in shards):
            present = [shard for shard in shards if shard is not None]
            buffer = name in ranks[0].models[0].buffers
            _put(stage.weights, name, present, spreads.of(name, present, buffer=buffer), stage, faults)
        if all(name in rank.models[0].module for rank in ranks):
            low = [_dense(rank.models[0].module[name], rank.models[0].file) for rank in ranks]
            # What is not trained exists once, in the module: it is both the full and the low precision weight.
            if name not in ranks[0].trained and name in stage.weights:
                stage.low[name] = stage.weights[name]
            # Under ZeRO-3 the module holds empty placeholders of its trained parameters, which are no weights.
            elif any(prod(shard.shape) for shard in low) or not any(name in rank.trained for rank in ranks):
                _put(stage.low, name, low, spreads.of(name, low), stage, faults)
    return stage


def _names(ranks: Sequence[ModelRank]) -> list[str]:
    """Return the stage's tensors in the module's order, without the second names of shared ones."""
    shared = {alias for rank in ranks for model in rank.models for alias in model.shared}
    names: dict[str, None] = {}
    for rank in ranks:
        first_model = rank.models[0]
        names |= dict.fromkeys([*first_model.module, *rank.trained, *first_model.frozen, *first_model.fragments])
    return [name for name in names if name not in shared]


class _Spreads:
    """The spread of each parameter; one that was refused is not requested again."""

    def __init__(self, info: UniversalInfo | TableCuts | None, ranks: int, faults: Faults) -> None:
        self._info, self._ranks, self._faults = info, ranks, faults
        self._known: dict[tuple[str, tuple[Shape, ...]], Spread | None] = {}
        self._lacking = False

    def of(self, name: str, shards: Sequence[RankShard], *, buffer: bool = False) -> Spread | None:
        """Return the spread; None where there is none, which has been noted."""
        shapes = tuple(shard.shape for shard in shards)
        # Buffers of equal shape are taken as copies: the metadata lists parameters only.
        if self._ranks == 1 or (buffer and len(set(shapes)) == 1):
            return unspread(shards)
        key = name, shapes
        if key not in self._known:
            self._known[key] = self._ask(name, shapes, shards[0].file)
        return self._known[key]

    def _ask(self, name: str, shapes: Sequence[Shape], file: str) -> Spread | None:
        if self._info is None:
            if not self._lacking:
                self._faults.add("UNSUPPORTED", UNTOLD, file, name, HINT)
            self._lacking = True
            return None
        try:
            return self._info.spread(name, shapes)
        except TransaxleError as error:
            self._faults.extend(*error.refusals)
            return None


def _trained(stage: Stage, name: str, ranks: Sequence[ModelRank], spreads: _Spreads, faults: Faults) -> None:
    """Add a trained parameter: its weights, its states and its numbers."""
    first = next(rank.trained[name] for rank in ranks if name in rank.trained)
    for state in first.states:
        shards = []
        for rank in ranks:
            item = rank.trained.get(name)
            shard = _empty(rank, name, first.states[state].dtype) if item is None else item.states.get(state)
            if shard is None:
                file = rank.models[0].file
                faults.add("INCOMPLETE", f"this rank has no {state} of it, but other ranks do", file, name)
                return
            shards.append(shard)
        spread = spreads.of(name, shards)
        if spread is None:
            return
        if state == keys.FP32:
            _put(stage.weights, name, shards, spread, stage, faults)
            continue
        block = scaled(spread)
        if block is not None:
            faults.extend(*scaled_moment(f"{name}/{state}", block, shards[0].file).refusals)
            continue
        _put(stage.states.setdefault(name, {}), state, shards, spread, stage, faults, shown=f"{name}/{state}")
    stage.states.setdefault(name, {}).update(first.numbers)
    for rank in ranks:
        item = rank.trained.get(name)
        for key, entry in () if item is None or item is first else item.numbers.items():
            first_entry = first.numbers.get(key, entry)
            # A step belongs to a group, so all its parameters refer to the same bytes: one comparison is enough.
            if (first_entry.extents, entry.extents) not in stage.compared and first_entry is not entry:
                stage.compared.add((first_entry.extents, entry.extents))
                why = f"{key} of {name} is one number on all tensor-parallel ranks"
                stage.twins.append(Twin(first_entry, entry, why, dates=key == keys.STEP))


def _put(
    into: dict[str, Entry], name: str, shards: Sequence[RankShard], spread: Spread | None, stage: Stage, faults: Faults,
    *, shown: str = "",
) -> None:  # fmt: skip
    """Merge shards and add the tensor, with the copies that must be equal."""
    if spread is None:
        return
    try:
        entry, twins = merge_shards(shown or name, shards, spread)
    except TransaxleError as error:
        faults.extend(*error.refusals)
        return
    into[name] = entry
    stage.twins.extend(twins)
    block = scaled(spread)
    if block is not None:
        if any(other_block.scale != block.scale for blocks in spread.blocks for other_block in blocks):
            faults.add("UNSUPPORTED", "its ranks store it multiplied by different numbers", shards[0].file, name)
        stage.scaled[name] = block.scale


def _empty(rank: ModelRank, name: str, dtype: str) -> RankShard | None:
    """Return the shard of a rank that owns no element of a parameter; None where it should."""
    model = rank.models[0]
    shape = model.frozen.get(name)
    if shape is None and name in model.module:
        shape = model.module[name].shape
    if shape is None or 0 not in shape:
        return None
    return RankShard(dtype, shape, (), model.file)


def _untrained(rank: ModelRank, name: str) -> RankShard | None:
    """Return a frozen parameter or a buffer; None where this rank has none."""
    first_model = rank.models[0]
    shape = first_model.frozen.get(name)
    if len(rank.models) > 1 and shape is not None:
        return _gathered(rank.models, name, shape)
    entry = first_model.module.get(name)
    if shape is not None and (entry is None or entry.shape != shape):
        entry = first_model.fragments.get(name, entry)
    if entry is None:
        return None
    if shape is not None and entry.shape != shape:
        size = prod(shape)
        if len(rank.models) == 1 and entry.shape == (size,):  # ZeRO-3 on one data-parallel rank
            return _gathered(rank.models, name, shape)
        raise refuse(
            "CORRUPT",
            f"it has the shape {list(entry.shape)}, but the file lists {list(shape)}",
            file=first_model.file,
            tensor=name,
        )
    return _dense(entry, first_model.file)


def _dense(entry: Entry, file: str) -> RankShard:
    return RankShard(entry.dtype, entry.shape, entry.extents if prod(entry.shape) else (), file)


def _gathered(models: Sequence[RankModel], name: str, shape: Shape) -> RankShard:
    """Return a frozen parameter that ZeRO-3 keeps as equal runs, the last one padded."""
    size, parts = prod(shape), len(models)
    width = shard_width(size, parts)
    vectors, intervals = [], []
    for dp_rank, model in enumerate(models):
        entry = model.fragments.get(name)
        low, high = min(dp_rank * width, size), min((dp_rank + 1) * width, size)
        length = 0 if entry is None else prod(entry.shape)
        if entry is None or length < high - low or (len(entry.shape) != 1 and length):
            message = f"this rank must hold {high - low} of its {size} elements, but has {length}"
            raise refuse("INCOMPLETE", message, file=model.file, tensor=name)
        extent = entry.extents[0] if entry.extents else Extent((0,), (0,), model.file, 0)
        vectors.append(Vector(entry.dtype, length, extent.file, extent.offset))
        if low < high:
            intervals.append(FlatRun(low, high, dp_rank, 0))
    kinds = {vector.dtype for vector in vectors}
    if len(kinds) > 1:
        raise refuse(
            "DTYPE_MIXED", f"its ranks store it in different dtypes: {sorted(kinds)}", file=models[0].file, tensor=name
        )
    return RankShard(vectors[0].dtype, shape, extents(shape, intervals, vectors), models[0].file)
