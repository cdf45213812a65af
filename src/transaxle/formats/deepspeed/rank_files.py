"""What the files of each rank hold, and where in the flat buffers each parameter lies.

The contents of each rank's files: parameters, flat buffers, numbers and settings, as plain descriptions.

Flat cuts: where a parameter is in the flat buffers of the ranks, and which boxes that makes.

ZeRO writes the parameters of a group one after the other into one vector and gives every rank a run of it (stages 1 and
2), or gives every rank an equal run of each parameter (stage 3). Either way a rank holds an interval of a parameter's
row-major elements, which is a few boxes. Paddings belong to no parameter.

**Shards**: one tensor-parallel rank's share of a tensor, and the whole assembled from them along its spread.

Facts about the training run: counters, versions, and the optimizer's settings by parameter name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from transaxle.axes.geometry import lexicographic_boxes, row_major
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import BITS, Checksum, Entry, Extent, NumbersInMemory, Shape, Twin, number
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.spread import Owners, RankBlock, ShardBlock, Spread, owners, whole
from transaxle.formats.flattened_state import described
from transaxle.formats.pickled.descriptors import NOTHING, Object, Scalar, TensorRef
from transaxle.formats.torch_file.saved import ViewFault, place, read_saved
from transaxle.formats.training_state import plain as plain_setting


@dataclass(frozen=True, slots=True)
class Vector:
    """A contiguous vector in a file: one rank's flat buffer."""

    dtype: str
    length: int
    file: str
    offset: int
    """Byte of its first element."""

    def at(self, element: int) -> int:
        """Return the byte of an element."""
        return self.offset + element * BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class FlatRun:
    """An interval of a parameter's elements, with its place in a rank's flat buffer."""

    start: int
    """First element of the parameter."""
    stop: int
    part: int
    """Number of the buffer."""
    at: int
    """First element in the buffer."""


@dataclass(frozen=True, slots=True)
class Position:
    """The place of a parameter in its group's vector."""

    name: str
    shape: Shape
    start: int
    """First element."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def positions(shapes: Mapping[str, Shape], paddings: Sequence[int]) -> tuple[list[Position], int]:
    """Lay parameters out one after the other, each followed by its padding.

    Returns:
        the positions, and the length of it all.
    """
    placed = []
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        placed.append(Position(name, shape, at))
        at += prod(shape) + padding
    return placed, at


def runs(position: Position, width: int, parts: int) -> Iterator[FlatRun]:
    """Yield the intervals of a parameter in a vector that is cut into equal parts.

    Args:
        position: where it lies in the vector.
        width: elements of each part.
        parts: number of parts.
    """
    stop = position.start + position.size
    if not width or position.start >= stop:
        return
    # Only the parts that the parameter touches, and none beyond the last rank's.
    for dp_rank in range(position.start // width, min((stop - 1) // width + 1, parts)):
        low, high = max(position.start, dp_rank * width), min(stop, (dp_rank + 1) * width)
        yield FlatRun(low - position.start, high - position.start, dp_rank, low - dp_rank * width)


def shard_width(size: int, parts: int) -> int:
    """Return the elements that every rank keeps of a parameter under ZeRO-3; the last ones may be padding."""
    # Rounded up: the last ranks may have fewer real elements than this, or none.
    return -(-size // parts)


def chunks(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Split an interval of a row-major array into boxes, each of which lies in it without gaps.

    Yields:
        first index, shape, and the box's first element counted from the beginning of the interval.
    """
    at = 0
    for box in lexicographic_boxes(shape, start, stop):
        first, sizes = tuple(low for low, _ in box), tuple(high - low for low, high in box)
        yield first, sizes, at
        at += prod(sizes)


def extents(shape: Shape, intervals: Sequence[FlatRun], vectors: Sequence[Vector]) -> tuple[Extent, ...]:
    """Return the boxes of a parameter in the ranks' buffers.

    Args:
        shape: of the parameter.
        intervals: its intervals.
        vectors: each rank's buffer.
    """
    return tuple(
        Extent(first_index, sizes, vectors[run.part].file, vectors[run.part].at(run.at + at))
        for run in intervals
        for first_index, sizes, at in chunks(shape, run.start, run.stop)
    )


_DEEPEST, _MOST = 8, 1_000_000
"""Levels of a setting, and values in it."""


@dataclass(frozen=True, slots=True, eq=False)
class BufferedGroup:
    """One rank's part of one group of parameters."""

    vectors: Mapping[str, Vector]
    """State -> flat buffer; `fp32` is the weights."""
    numbers: Mapping[str, Entry]
    """State -> a number for the whole group, such as `step`."""


@dataclass(frozen=True, slots=True, eq=False)
class RankState:
    """An optimizer file."""

    file: str
    stage: int
    groups: tuple[BufferedGroup, ...]
    root: CheckedValue
    """The file's `optimizer_state_dict`."""
    settings: tuple[tuple[tuple[int, ...], CheckedValue], ...]
    """Per optimizer group: the indices of its flat buffers, and its settings."""
    left: Mapping[str, str]
    """Path -> description, for values that are neither a tensor of the group nor a number."""
    checksums: tuple[Checksum, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RankModel:
    """A model file."""

    file: str
    root: CheckedValue
    shapes: tuple[Mapping[str, Shape], ...]
    """Per group: trained parameter -> shape on this rank, in the order of the flat buffer."""
    frozen: Mapping[str, Shape]
    """Parameters that are not trained, where the file lists them."""
    fragments: Mapping[str, Entry]
    """The frozen parameters' values, or this rank's part of them (ZeRO-3)."""
    module: Mapping[str, Entry]
    """The module's tensors; with ZeRO-3 its parameters are empty there."""
    buffers: frozenset[str]
    shared: Mapping[str, str]
    """Second name of a shared parameter -> its first name."""
    checksums: tuple[Checksum, ...] = ()


@dataclass(slots=True)
class Tensors:
    """Reads tensors and numbers of one file.

    Args:
        inline: keeps numbers that lie in the pickle itself.
        file: the file.
    """

    inline: NumbersInMemory
    file: str
    left: dict[str, str] = field(default_factory=dict)

    def tensor(self, name: str, node: CheckedValue) -> Entry:
        """Return a tensor.

        Raises:
            Refused: CORRUPT for anything else; UNSUPPORTED for tensors that are no plain views.
        """
        value = node.value
        if not isinstance(value, TensorRef | Object):
            raise node.fault("expected a tensor")
        try:
            entry, repeated = place(name, value, self.file)
        except ViewFault as fault:
            raise refuse(fault.code, fault.message, file=self.file, tensor=name, hint=fault.hint) from None
        if repeated:
            raise node.fault("its strides use elements more than once")
        if entry.dtype not in BITS:
            raise refuse("UNSUPPORTED", f"tensors of {entry.dtype} cannot be read", file=self.file, tensor=name)
        return entry

    def vector(self, node: CheckedValue) -> Vector:
        """Return a flat buffer.

        Raises:
            Refused: CORRUPT for a tensor that is no contiguous vector.
        """
        entry = self.tensor(" > ".join(node.path), node)
        if len(entry.shape) != 1 or any(extent.strides not in (None, (1,)) for extent in entry.extents):
            raise node.fault(f"expected a flat buffer, not a tensor of shape {list(entry.shape)}")
        extents = entry.extents
        if len(extents) > 1:
            raise node.fault("expected a flat buffer in one piece")
        extent = extents[0] if extents else Extent((0,), (0,), self.file, 0)
        return Vector(entry.dtype, entry.shape[0], extent.file, extent.offset)

    def number(self, name: str, node: CheckedValue) -> Entry | None:
        """Return a number as a tensor without dims; None for anything else."""
        value = node.value
        if isinstance(value, TensorRef | Object):
            entry = self.tensor(name, node)
            return entry if not entry.shape else None
        code_and_bytes = None
        if isinstance(value, Scalar):
            code_and_bytes = value.code, value.data
        elif isinstance(value, int | float):
            code_and_bytes = number(value)
        return (
            None
            if code_and_bytes is None
            else Entry(name, code_and_bytes[0], (), (self.inline.add(code_and_bytes[1]),))
        )


def read_state(inline: NumbersInMemory, file: str) -> RankState:
    """Read an optimizer file.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, UNSUPPORTED.
        StorageError: IO.
    """
    saved = read_saved(inline, file)
    root = CheckedValue(saved.value, file)[keys.STATE]
    stage = _stage(root)
    if stage > 3:
        raise root.fault(f"{keys.ZERO_STAGE} must be at most 3, not {stage}")
    if root.get(keys.PARTITION_GROUPS) is not None:
        raise refuse(
            "UNSUPPORTED",
            "its parameter groups are cut over expert-parallel ranks, which cannot be read yet",
            file=file,
        )
    reader = Tensors(inline, file)
    base = root[keys.STATE] if stage == 3 else root[keys.BASE_STATE]
    masters = root[keys.MASTER_ZERO3 if stage == 3 else keys.MASTER].list()
    states: list[CheckedValue | None]
    settings: list[tuple[tuple[int, ...], CheckedValue]] = []
    if base.is_list:  # an elastic checkpoint: its states without padding, and no settings
        states = list(base.list())
    else:
        states_by_index = base[keys.STATES]
        states = [states_by_index.get(index) for index in range(len(masters))]
        settings = [
            (group_settings[keys.PARAMS].naturals(), group_settings) for group_settings in base[keys.GROUPS].list()
        ]
        for _, group_settings in settings:
            _note_odd(reader, group_settings)
    if len(states) != len(masters):
        raise base.fault(f"it has states of {len(states)} groups, but weights of {len(masters)}")
    step = _common_step(root, settings)
    groups = [_optimizer_group(reader, master, state, step) for master, state in zip(masters, states, strict=True)]
    return RankState(file, stage, tuple(groups), root, tuple(settings), reader.left, saved.checksums)


def _note_odd(reader: Tensors, settings: CheckedValue) -> None:
    """Note the settings of a group that are not plain data."""
    for _, node in settings.named():
        if plain_setting(node.value) is NOTHING:
            reader.left[".".join(node.path)] = described(node.value)


def _stage(root: CheckedValue) -> int:
    """Return the ZeRO stage: a number, or a member of DeepSpeed's enumeration."""
    stage = root.get(keys.ZERO_STAGE)
    if stage is None:
        return 1
    if isinstance(stage.value, Object):
        args = stage.value.args
        return CheckedValue(args[0] if args else None, stage.file, stage.path).natural()
    return stage.natural()


def _common_step(root: CheckedValue, settings: list[tuple[tuple[int, ...], CheckedValue]]) -> CheckedValue | None:
    """Return the step if it is stored once for all, as by fused optimizers and elastic checkpoints."""
    step = root.get(keys.BASE_STEP)
    if step is None and settings:
        step = settings[0][1].get(keys.STEP)
    return step


def _optimizer_group(
    reader: Tensors, master: CheckedValue, state: CheckedValue | None, step: CheckedValue | None
) -> BufferedGroup:
    vectors = {keys.FP32: reader.vector(master)}
    numbers: dict[str, Entry] = {}
    for name, node in () if state is None else state.named():
        if node.value is None:
            continue
        entry = reader.number(name, node)
        if entry is not None:
            numbers[name] = entry
        elif isinstance(node.value, TensorRef | Object):
            vectors[name] = reader.vector(node)
        else:
            reader.left[".".join(node.path)] = f"a {type(node.value).__name__}"
    if step is not None and keys.STEP not in numbers and state is not None:
        entry = reader.number(keys.STEP, step)
        if entry is None:
            raise step.fault("expected a number")
        numbers[keys.STEP] = entry
    return BufferedGroup(vectors, numbers)


def read_model(inline: NumbersInMemory, file: str) -> RankModel:
    """Read a model file.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, UNSUPPORTED.
        StorageError: IO.
    """
    saved = read_saved(inline, file)
    root = CheckedValue(saved.value, file)
    reader = Tensors(inline, file)
    if any(root.get(key) is not None for key in keys.EXPERT_LAYERS):
        raise refuse(
            "UNSUPPORTED",
            "its experts are cut over expert-parallel ranks (AutoEP), which cannot be read yet",
            file=file,
        )
    shapes = root.get(keys.PARAM_SHAPES)
    module = root.get(keys.MODULE)
    frozen, fragments = root.get(keys.FROZEN_SHAPES), root.get(keys.FROZEN_FRAGMENTS)
    shared = root.get(keys.SHARED)
    names = root.get(keys.BUFFER_NAMES)
    return RankModel(
        file,
        root,
        tuple(_shapes(group) for group in _listed(shapes)),
        {} if frozen is None else _shapes(frozen),
        {} if fragments is None else dict(_tensors(reader, fragments)),
        {} if module is None else dict(_tensors(reader, module)),
        frozenset() if names is None else frozenset(names.texts()),
        {} if shared is None else dict(_pairs(shared)),
        saved.checksums,
    )


def read_layer(inline: NumbersInMemory, file: str) -> tuple[Mapping[str, Entry], tuple[Checksum, ...]]:
    """Read the file of one layer of a pipeline: its tensors, and what it says of their bytes.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, UNSUPPORTED.
        StorageError: IO.
    """
    saved = read_saved(inline, file)
    return dict(_tensors(Tensors(inline, file), CheckedValue(saved.value, file))), saved.checksums


def _listed(shapes: CheckedValue | None) -> list[CheckedValue]:
    """Return the shapes group by group; old files have just one dict."""
    if shapes is None:
        return []
    return [shapes] if shapes.is_dict else shapes.list()


def _shapes(node: CheckedValue) -> dict[str, Shape]:
    return {name: shape.naturals() for name, shape in node.named()}


def _tensors(reader: Tensors, node: CheckedValue) -> Iterator[tuple[str, Entry]]:
    for name, value in node.named():
        if isinstance(value.value, TensorRef | Object):
            yield name, reader.tensor(name, value)


def _pairs(node: CheckedValue) -> Iterator[tuple[str, str]]:
    if node.is_list:
        for pair in node.list():
            alias, name = pair.texts()
            yield alias, name
        return
    for alias, target in node.named():
        yield alias, target.text()


def plain(node: CheckedValue) -> Any:
    """Return a setting as plain data: numbers, texts, lists and dicts of them; None for anything else.

    Raises:
        Refused: CORRUPT where it describes more than any real one: a list may be shared again and again.
    """
    return _plain(node, _DEEPEST, [_MOST])


def _plain(node: CheckedValue, depth: int, budget: list[int]) -> Any:
    value = node.value
    budget[0] -= 1
    if budget[0] < 0:
        raise node.fault(f"it has more than {_MOST} values")
    if depth < 0:
        return None
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if node.is_list:
        items = [_plain(item, depth - 1, budget) for item in node.list()]
        return tuple(items) if isinstance(value, tuple) else items
    if node.is_dict:
        return {str(key): _plain(item, depth - 1, budget) for key, item in node.items() if isinstance(key, str | int)}
    return None


@dataclass(frozen=True, slots=True)
class RankShard:
    """One rank's share of a tensor, whole over its data-parallel group."""

    dtype: str
    shape: Shape
    extents: tuple[Extent, ...]
    """Chunks that tile it."""
    file: str
    """A file that describes it, for errors."""


def merge_shards(name: str, shards: Sequence[RankShard], spread: Spread) -> tuple[Entry, list[Twin]]:
    """Put shards together.

    Args:
        name: of the whole tensor.
        shards: what each rank holds, in rank order.
        spread: how the whole is spread over them.

    Returns:
        the whole tensor, and every copy that must be equal to what was taken.

    Raises:
        Refused: DTYPE_MIXED; INCOMPLETE where no rank holds an element; LOSSY for scaled moments (see `reader`).
    """
    # A rank without elements has an empty tensor, whose dtype does not matter.
    holders = [shard for shard, blocks in zip(shards, spread.blocks, strict=True) if blocks]
    if len({shard.dtype for shard in holders}) > 1:
        kinds = ", ".join(dict.fromkeys(shard.dtype for shard in holders))
        raise refuse("DTYPE_MIXED", f"its shards have different dtypes: {kinds}", file=shards[0].file, tensor=name)
    dtype = (holders or list(shards))[0].dtype
    owned: Owners = owners(spread)
    if owned.missing:
        message = f"no rank holds {owned.missing} of its elements"
        raise refuse("INCOMPLETE", message, file=shards[0].file, tensor=name)
    chunks = tuple(extent for holding in owned.holdings for extent in _taken(shards, holding, holding.block.start))
    twins = [
        Twin(
            _copy(name, dtype, shards, first),
            _copy(name, dtype, shards, second),
            f"tensor-parallel ranks {first.rank} and {second.rank} hold the same part of it",
            replica=True,
        )
        for first, second in owned.copies
    ]
    return Entry(name, dtype, spread.shape, chunks), twins


def unspread(shards: Sequence[RankShard]) -> Spread:
    """Return the spread of a tensor that every rank holds."""
    return whole(shards[0].shape, len(shards))


def _copy(name: str, dtype: str, shards: Sequence[RankShard], holding: RankBlock) -> Entry:
    origin = (0,) * len(holding.block.shape)
    return Entry(name, dtype, holding.block.shape, tuple(_taken(shards, holding, origin)))


def _taken(shards: Sequence[RankShard], holding: RankBlock, start: Shape) -> Iterator[Extent]:
    """Yield the chunks of a rank's block as chunks of a tensor in which the block begins at `start`."""
    shard, block = shards[holding.rank], holding.block
    for extent in shard.extents:
        low = tuple(map(max, extent.start, block.at))
        high = tuple(
            min(e + n, b + m) for e, n, b, m in zip(extent.start, extent.shape, block.at, block.shape, strict=True)
        )
        if any(stop_index <= start_index for start_index, stop_index in zip(low, high, strict=True)):
            continue
        sizes = tuple(stop_index - start_index for start_index, stop_index in zip(low, high, strict=True))
        strides = extent.strides or row_major(extent.shape)
        # Elements of the extent before the part that is taken.
        skipped = sum((a - b) * step for a, b, step in zip(low, extent.start, strides, strict=True))
        yield Extent(
            tuple(s + a - b for s, a, b in zip(start, low, block.at, strict=True)),
            sizes,
            extent.file,
            extent.offset + skipped * BITS[shard.dtype] // 8,
            None if _dense(sizes, strides) else strides,
        )


def _dense(shape: Shape, strides: Shape) -> bool:
    return all(size == 1 or step == want for size, step, want in zip(shape, strides, row_major(shape), strict=True))


def scaled(spread: Spread) -> ShardBlock | None:
    """Return a block with scaled values; None if there is none."""
    return next((block for blocks in spread.blocks for block in blocks if block.scale != 1), None)


def scaled_moment(name: str, block: ShardBlock, file: str) -> TransaxleError:
    """Build the refusal of optimizer state that belongs to a scaled parameter."""
    message = (
        f"its parameter is stored multiplied by {block.scale}: the moments could be divided too, but the optimizer's "
        "settings could not, so training would continue differently"
    )
    return refuse("UNSUPPORTED", message, file=file, tensor=name)


CLASS, FIELDS = "class", "fields"
CLIENT = "client_state"
DEGREES = "degrees"

_COUNTERS = (keys.GLOBAL_STEPS, keys.GLOBAL_SAMPLES, keys.SKIPPED_STEPS, keys.DP_WORLD, keys.MP_WORLD, keys.VERSION)
_GLOBALS = (keys.DYNAMIC_SCALE, keys.OVERFLOW, keys.CLIP)
_OWN = frozenset({
    *_COUNTERS, keys.MODULE, keys.BUFFER_NAMES, keys.OPTIMIZER, keys.PARAM_SHAPES, keys.FROZEN_SHAPES,
    keys.FROZEN_FRAGMENTS, keys.SHARED, keys.DIMENSIONS, keys.SCHEDULER, keys.NUM_EXPERTS, keys.INFO,
    *keys.EXPERT_LAYERS, "data_sampler", "random_ltd", keys.CONFIG,
})  # fmt: skip


def run_of(model: RankModel, settings: CheckedValue | None) -> dict[str, Any]:
    """Return the facts in the files of a run, as plain data.

    Args:
        model: the model file of the first rank.
        settings: the first optimizer state; None if there is none.
    """
    facts: dict[str, Any] = {}
    for key in (*_COUNTERS, keys.SCHEDULER):
        node = model.root.get(key)
        if node is not None:
            facts[key] = plain(node)
    client = {key: plain(node) for key, node in model.root.named() if key not in _OWN}
    if client:
        facts[CLIENT] = client
    if settings is not None:
        for key in _GLOBALS:
            node = settings.get(key)
            if node is not None:
                facts[key] = plain(node)
        scaler = settings.get(keys.LOSS_SCALER)
        if scaler is not None and isinstance(scaler.value, Object):
            state = scaler.value.state
            fields = plain(CheckedValue(state, scaler.file)) if isinstance(state, dict) else {}
            facts[keys.LOSS_SCALER] = {CLASS: str(scaler.value.cls), FIELDS: fields}
    return facts


def state_groups(states: Sequence[Sequence[RankState]], models: Sequence[RankModel]) -> list[dict[str, Any]]:
    """Return the optimizer's groups: settings, and the names of their parameters.

    Args:
        states: per model rank, its optimizer files.
        models: per model rank, its first model file.
    """
    groups = []
    for group, (indices, settings) in enumerate(states[0][0].settings):
        wanted = indices if states[0][0].stage == 3 else (group,)
        groups.append(_settings_of_group(settings, wanted, models))
    return groups


def groups_of(settings: Sequence[CheckedValue], models: Sequence[RankModel]) -> list[dict[str, Any]]:
    """Return the groups of a universal checkpoint; empty ones that only fill the list are left out."""
    groups = [
        _settings_of_group(group_settings, _indices(group_settings, number), models)
        for number, group_settings in enumerate(settings)
    ]
    return [group for group in groups if len(group) > 1 or group[keys.PARAMS]]


def _indices(settings: CheckedValue, number: int) -> tuple[int, ...]:
    """Return the numbers of a group's sub-groups; without ZeRO-3 it is one of its own."""
    listed = settings.get(keys.PARAMS)
    return (number,) if listed is None else listed.naturals()


def _settings_of_group(settings: CheckedValue, indices: Sequence[int], models: Sequence[RankModel]) -> dict[str, Any]:
    names: dict[str, None] = {}
    for model in models:
        for index in indices:
            if index < len(model.shapes):
                names |= dict.fromkeys(model.shapes[index])
    settings_kept = {key: plain_setting(node.value) for key, node in settings.named() if key != keys.PARAMS}
    settings_kept = {key: value for key, value in settings_kept.items() if value is not NOTHING}
    return {**settings_kept, keys.PARAMS: list(names)}
