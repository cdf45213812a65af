"""Reads the files of each rank (parameters, flat buffers, counters, settings), and merges the shards of tensors into
whole tensors.

In stages 1 and 2, ZeRO concatenates the parameters of an optimizer group into one vector, and each rank stores an
interval of the vector. In stage 3, each rank stores an equal interval of each parameter. In all stages a rank stores an
interval of a parameter's row-major elements; such an interval consists of a few boxes. Elements of padding belong to no
parameter.

`merge_shards` joins the shards on all tensor-parallel ranks into the whole tensor; a `Spread` describes which boxes
each rank has. `run_of` and the functions after it collect the facts about the training run: counters, versions, and
optimizer settings by parameter name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

from transaxle.axes.geometry import lexicographic_boxes, row_major
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import BITS, Checksum, Entry, Extent, NumbersInMemory, Shape, Twin, number
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.auto_experts import AutoExperts, read_auto_experts
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.spread import Owners, RankBlock, ShardBlock, Spread, owners, whole
from transaxle.formats.flattened_state import describe
from transaxle.formats.pickled.descriptors import NOTHING, Object, Scalar, TensorRef
from transaxle.formats.torch_file.saved import ViewFault, place, read_saved
from transaxle.formats.training_state import plain as plain_setting


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A contiguous vector of elements in one rank's file; it contains the rank's intervals of many parameters."""

    dtype: str
    length: int
    file: str
    offset: int
    """Offset in bytes of the vector's first element in the file."""

    def at(self, element: int) -> int:
        """Return the offset in bytes of one of the vector's elements in the file."""
        return self.offset + element * BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class FlatInterval:
    """An interval of a parameter's row-major elements, and where the interval is in a rank's flat buffer."""

    start: int
    """First element of the interval, counted from the beginning of the parameter; `stop` is one past the last
    element."""
    stop: int
    part: int
    """Index of the flat buffer that contains the interval."""
    at: int
    """First element of the interval, counted from the beginning of the flat buffer."""


@dataclass(frozen=True, slots=True)
class FlatPosition:
    """The place of a parameter in the concatenated vector of its parameter group."""

    name: str
    shape: Shape
    start: int
    """First element of the parameter, counted from the beginning of the vector."""

    @property
    def size(self) -> int:
        """Return the number of elements of the parameter."""
        return prod(self.shape)


def lay_out(shapes: Mapping[str, Shape], paddings: Sequence[int]) -> tuple[list[FlatPosition], int]:
    """Place parameters one after another in a vector, each followed by padding.

    Returns:
        the position of each parameter in the vector, and the length of the vector in elements.
    """
    placed = []
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        placed.append(FlatPosition(name, shape, at))
        at += prod(shape) + padding
    return placed, at


def rank_intervals(position: FlatPosition, width: int, parts: int) -> Iterator[FlatInterval]:
    """Yield the intervals of a parameter in a group's vector, which is cut into parts of equal width, one part per
    rank.

    Args:
        position: place of the parameter in the vector.
        width: number of elements in each rank's part.
        parts: number of ranks.
    """
    parameter_end = position.start + position.size
    if not width or position.start >= parameter_end:
        return
    # Only parts that overlap the parameter are visited, at most up to the last rank's part.
    for dp_rank in range(position.start // width, min((parameter_end - 1) // width + 1, parts)):
        start, end = max(position.start, dp_rank * width), min(parameter_end, (dp_rank + 1) * width)
        yield FlatInterval(start - position.start, end - position.start, dp_rank, start - dp_rank * width)


def shard_width(size: int, parts: int) -> int:
    """Return how many elements of a parameter each rank has under ZeRO-3, including padding."""
    # The division is rounded up, so the last ranks may have fewer real elements than this number, or none.
    return -(-size // parts)


def chunks(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Split an interval of a row-major array into boxes that are contiguous in the array.

    Yields:
        for each box: its first index, its shape, and its first element counted from the beginning of the interval.
    """
    at = 0
    for box in lexicographic_boxes(shape, start, stop):
        first, sizes = tuple(low for low, _ in box), tuple(high - low for low, high in box)
        yield first, sizes, at
        at += prod(sizes)


def extents(shape: Shape, intervals: Sequence[FlatInterval], vectors: Sequence[FlatBuffer]) -> tuple[Extent, ...]:
    """Return the extents of a parameter in the ranks' flat buffers.

    Args:
        shape: shape of the parameter.
        intervals: the intervals of the parameter in the flat buffers.
        vectors: the flat buffers of all ranks.
    """
    return tuple(
        Extent(first_index, sizes, vectors[run.part].file, vectors[run.part].at(run.at + at))
        for run in intervals
        for first_index, sizes, at in chunks(shape, run.start, run.stop)
    )


_MAX_DEPTH, _MAX_VALUES = 8, 1_000_000
"""Maximum nesting depth of a setting, and maximum number of values in it."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupBuffers:
    """One rank's share of an optimizer group: its flat buffers, and numbers such as the step."""

    vectors: Mapping[str, FlatBuffer]
    """Name of the optimizer state -> flat buffer; the state `fp32` contains the master weights."""
    numbers: Mapping[str, Entry]
    """Name of the optimizer state -> number that applies to the whole group, such as `step`."""


@dataclass(frozen=True, slots=True, eq=False)
class RankState:
    """The contents of one rank's optimizer file."""

    file: str
    stage: int
    groups: tuple[GroupBuffers, ...]
    root: CheckedValue
    """The dict `optimizer_state_dict` of the file."""
    settings: tuple[tuple[tuple[int, ...], CheckedValue], ...]
    """For each optimizer group, the indices of its flat buffers, and the group's settings."""
    unread: Mapping[str, str]
    """Path in the file -> description, for values that are not read because they are neither tensors of a group nor
    numbers."""
    checksums: tuple[Checksum, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RankModel:
    """The contents of one rank's model file."""

    file: str
    root: CheckedValue
    shapes: tuple[Mapping[str, Shape], ...]
    """For each optimizer group, the shapes of its parameters on this rank, in the order of the flat buffer."""
    frozen: Mapping[str, Shape]
    """Parameter name -> shape, for the frozen parameters that the file lists."""
    fragments: Mapping[str, Entry]
    """Parameter name -> tensor, for frozen parameters; under ZeRO-3, the tensor is only this rank's interval of the
    parameter."""
    module: Mapping[str, Entry]
    """Name -> tensor of the module's state dict, in low precision; under ZeRO-3, the parameters among these tensors are
    empty."""
    buffers: frozenset[str]
    shared: Mapping[str, str]
    """Second name of a shared parameter -> first name of this parameter."""
    checksums: tuple[Checksum, ...] = ()
    auto: AutoExperts = field(default_factory=AutoExperts)
    """The mixtures of experts that AutoEP replaced in the module; empty if the run did not use AutoEP."""


@dataclass(slots=True)
class TensorReader:
    """Reads the tensors and numbers in one file.

    Args:
        inline: storage in memory, to which numbers are added whose bytes are in the pickle itself.
        file: name of the file.
    """

    inline: NumbersInMemory
    file: str
    unread: dict[str, str] = field(default_factory=dict)

    def tensor(self, name: str, node: CheckedValue) -> Entry:
        """Return the catalog entry of a tensor in the file.

        Raises:
            Refused: with the code CORRUPT if the value is not a tensor; with the code UNSUPPORTED if the tensor is not
                a strided view of its storage.
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

    def vector(self, node: CheckedValue) -> FlatBuffer:
        """Return a tensor in the file as a flat buffer.

        Raises:
            Refused: with the code CORRUPT if the tensor is not a contiguous vector.
        """
        entry = self.tensor(" > ".join(node.path), node)
        if len(entry.shape) != 1 or any(extent.strides not in (None, (1,)) for extent in entry.extents):
            raise node.fault(f"expected a flat buffer, not a tensor of shape {list(entry.shape)}")
        extents = entry.extents
        if len(extents) > 1:
            raise node.fault("expected a flat buffer in one piece")
        extent = extents[0] if extents else Extent((0,), (0,), self.file, 0)
        return FlatBuffer(entry.dtype, entry.shape[0], extent.file, extent.offset)

    def number(self, name: str, node: CheckedValue) -> Entry | None:
        """Return the catalog entry of a number, a tensor without dims; None if the value is not a number."""
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
    """Read a rank's optimizer file.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE, CORRUPT or UNSUPPORTED if the file cannot be read as DeepSpeed's.
        StorageError: with the code IO if the file cannot be read.
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
    reader = TensorReader(inline, file)
    base = root[keys.STATE] if stage == 3 else root[keys.BASE_STATE]
    masters = root[keys.MASTER_ZERO3 if stage == 3 else keys.MASTER].list()
    states: list[CheckedValue | None]
    settings: list[tuple[tuple[int, ...], CheckedValue]] = []
    if base.is_list:  # an elastic checkpoint has optimizer states without padding, and no settings
        states = list(base.list())
    else:
        states_by_index = base[keys.STATES]
        states = [states_by_index.get(index) for index in range(len(masters))]
        settings = [
            (group_settings[keys.PARAMS].naturals(), group_settings) for group_settings in base[keys.GROUPS].list()
        ]
        for _, group_settings in settings:
            _note_unread(reader, group_settings)
    if len(states) != len(masters):
        raise base.fault(f"it has states of {len(states)} groups, but weights of {len(masters)}")
    step = _common_step(root, settings)
    groups = [_optimizer_group(reader, master, state, step) for master, state in zip(masters, states, strict=True)]
    return RankState(file, stage, tuple(groups), root, tuple(settings), reader.unread, saved.checksums)


def _note_unread(reader: TensorReader, settings: CheckedValue) -> None:
    """Add those settings of a group that are not plain data to the list of unread values."""
    for _, node in settings.string_items():
        if plain_setting(node.value) is NOTHING:
            reader.unread[".".join(node.path)] = describe(node.value)


def _stage(root: CheckedValue) -> int:
    """Return the ZeRO stage, which the file stores as a number or as a member of DeepSpeed's enum."""
    stage = root.get(keys.ZERO_STAGE)
    if stage is None:
        return 1
    if isinstance(stage.value, Object):
        args = stage.value.args
        return CheckedValue(args[0] if args else None, stage.file, stage.path).natural()
    return stage.natural()


def _common_step(root: CheckedValue, settings: list[tuple[tuple[int, ...], CheckedValue]]) -> CheckedValue | None:
    """Return the step if the file stores one step for all groups, as fused optimizers and elastic checkpoints do;
    otherwise None.
    """
    step = root.get(keys.BASE_STEP)
    if step is None and settings:
        step = settings[0][1].get(keys.STEP)
    return step


def _optimizer_group(
    reader: TensorReader, master: CheckedValue, state: CheckedValue | None, step: CheckedValue | None
) -> GroupBuffers:
    vectors = {keys.FP32: reader.vector(master)}
    numbers: dict[str, Entry] = {}
    for name, node in () if state is None else state.string_items():
        if node.value is None:
            continue
        entry = reader.number(name, node)
        if entry is not None:
            numbers[name] = entry
        elif isinstance(node.value, TensorRef | Object):
            vectors[name] = reader.vector(node)
        else:
            reader.unread[".".join(node.path)] = f"a {type(node.value).__name__}"
    if step is not None and keys.STEP not in numbers and state is not None:
        entry = reader.number(keys.STEP, step)
        if entry is None:
            raise step.fault("expected a number")
        numbers[keys.STEP] = entry
    return GroupBuffers(vectors, numbers)


def read_model(inline: NumbersInMemory, file: str) -> RankModel:
    """Read a rank's model file.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE, CORRUPT or UNSUPPORTED if the file cannot be read as DeepSpeed's.
        StorageError: with the code IO if the file cannot be read.
    """
    saved = read_saved(inline, file)
    root = CheckedValue(saved.value, file)
    reader = TensorReader(inline, file)
    shapes = root.get(keys.PARAM_SHAPES)
    module = root.get(keys.MODULE)
    frozen, fragments = root.get(keys.FROZEN_SHAPES), root.get(keys.FROZEN_FRAGMENTS)
    shared = root.get(keys.SHARED)
    names = root.get(keys.BUFFER_NAMES)
    module_tensors = {} if module is None else dict(_tensors(reader, module))
    auto = read_auto_experts(root, module_tensors)
    return RankModel(
        file,
        root,
        tuple(_shapes(group) for group in _shapes_by_group(shapes)),
        {} if frozen is None else _without_experts(_shapes(frozen), auto),
        {} if fragments is None else _without_experts(dict(_tensors(reader, fragments)), auto),
        module_tensors,
        frozenset() if names is None else frozenset(names.texts()),
        {} if shared is None else dict(_alias_pairs(shared)),
        saved.checksums,
        auto,
    )


_Value = TypeVar("_Value")


def _without_experts(values: dict[str, _Value], auto: AutoExperts) -> dict[str, _Value]:
    """Return values by name, except those of this rank's experts, whose values for all ranks are in other files."""
    return {name: value for name, value in values.items() if auto.mixture_of(name) is None}


def read_layer(inline: NumbersInMemory, file: str) -> tuple[Mapping[str, Entry], tuple[Checksum, ...]]:
    """Read the file of one pipeline layer: its tensors, and the checksums of the tensors' bytes.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE, CORRUPT or UNSUPPORTED if the file cannot be read as DeepSpeed's.
        StorageError: with the code IO if the file cannot be read.
    """
    saved = read_saved(inline, file)
    return dict(_tensors(TensorReader(inline, file), CheckedValue(saved.value, file))), saved.checksums


def _shapes_by_group(shapes: CheckedValue | None) -> list[CheckedValue]:
    """Return for each optimizer group a dict from parameter name to shape; old files have a single dict."""
    if shapes is None:
        return []
    return [shapes] if shapes.is_dict else shapes.list()


def _shapes(node: CheckedValue) -> dict[str, Shape]:
    return {name: shape.naturals() for name, shape in node.string_items()}


def _tensors(reader: TensorReader, node: CheckedValue) -> Iterator[tuple[str, Entry]]:
    for name, value in node.string_items():
        if isinstance(value.value, TensorRef | Object):
            yield name, reader.tensor(name, value)


def _alias_pairs(node: CheckedValue) -> Iterator[tuple[str, str]]:
    if node.is_list:
        for pair in node.list():
            alias, name = pair.texts()
            yield alias, name
        return
    for alias, target in node.string_items():
        yield alias, target.text()


def plain(node: CheckedValue) -> Any:
    """Return a setting as plain data (numbers, strings, lists, dicts); None if the setting is not plain data.

    Raises:
        Refused: with the code CORRUPT if a setting contains more values than any real setting; by repeating one list, a
            short pickle can describe exponentially many values.
    """
    return _plain(node, _MAX_DEPTH, [_MAX_VALUES])


def _plain(node: CheckedValue, depth: int, budget: list[int]) -> Any:
    value = node.value
    budget[0] -= 1
    if budget[0] < 0:
        raise node.fault(f"it has more than {_MAX_VALUES} values")
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
    """One tensor-parallel rank's shard of a tensor, complete over the data-parallel ranks of this rank."""

    dtype: str
    shape: Shape
    extents: tuple[Extent, ...]
    """Byte ranges in files that together contain every element of the shard once."""
    file: str
    """Name of a file that describes the shard, for error messages."""


def merge_shards(name: str, shards: Sequence[RankShard], spread: Spread) -> tuple[Entry, list[Twin]]:
    """Merge the shards of a tensor into the whole tensor.

    Args:
        name: name of the whole tensor.
        shards: the shard on each tensor-parallel rank, in rank order.
        spread: which boxes of the tensor each rank has.

    Returns:
        the whole tensor, and pairs of blocks that must be equal because several ranks have the same block.

    Raises:
        Refused: with the code DTYPE_MIXED if shards have different dtypes; with the code INCOMPLETE if there is an
            element that no rank has.
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
    chunks = tuple(
        extent
        for read in owned.blocks_to_read
        for extent in block_extents(shards[read.rank], read.block, read.block.start)
    )
    twins = [
        Twin(
            _block_entry(name, dtype, shards, first),
            _block_entry(name, dtype, shards, second),
            f"tensor-parallel ranks {first.rank} and {second.rank} hold the same part of it",
            replica=True,
        )
        for first, second in owned.copies
    ]
    return Entry(name, dtype, spread.shape, chunks), twins


def full_spread(shards: Sequence[RankShard]) -> Spread:
    """Return the spread (which boxes each rank has) of a tensor that is whole on every rank."""
    return whole(shards[0].shape, len(shards))


def _block_entry(name: str, dtype: str, shards: Sequence[RankShard], holding: RankBlock) -> Entry:
    origin = (0,) * len(holding.block.shape)
    return Entry(name, dtype, holding.block.shape, tuple(block_extents(shards[holding.rank], holding.block, origin)))


def block_extents(shard: RankShard, block: ShardBlock, start: Shape) -> Iterator[Extent]:
    """Yield the extents of a rank's block as extents of a tensor in which the block begins at index `start`."""
    for extent in shard.extents:
        low = tuple(map(max, extent.start, block.at))
        high = tuple(
            min(e + n, b + m) for e, n, b, m in zip(extent.start, extent.shape, block.at, block.shape, strict=True)
        )
        if any(stop_index <= start_index for start_index, stop_index in zip(low, high, strict=True)):
            continue
        sizes = tuple(stop_index - start_index for start_index, stop_index in zip(low, high, strict=True))
        strides = extent.strides or row_major(extent.shape)
        # Number of elements of the extent that precede the first common element.
        skipped = sum((a - b) * step for a, b, step in zip(low, extent.start, strides, strict=True))
        yield Extent(
            tuple(s + a - b for s, a, b in zip(start, low, block.at, strict=True)),
            sizes,
            extent.file,
            extent.offset + skipped * BITS[shard.dtype] // 8,
            None if _is_row_major(sizes, strides) else strides,
        )


def _is_row_major(shape: Shape, strides: Shape) -> bool:
    return all(size == 1 or step == want for size, step, want in zip(shape, strides, row_major(shape), strict=True))


def block_with_scale(spread: Spread) -> ShardBlock | None:
    """Return the first block whose stored values include a factor; None if no block is scaled."""
    return next((block for blocks in spread.blocks for block in blocks if block.scale != 1), None)


def moment_refusal(name: str, block: ShardBlock, file: str) -> TransaxleError:
    """Return the `Refused` error for the optimizer state of a parameter that is stored multiplied by a factor."""
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
_DEEPSPEED_KEYS = frozenset({
    *_COUNTERS, keys.MODULE, keys.BUFFER_NAMES, keys.OPTIMIZER, keys.PARAM_SHAPES, keys.FROZEN_SHAPES,
    keys.FROZEN_FRAGMENTS, keys.SHARED, keys.DIMENSIONS, keys.SCHEDULER, keys.NUM_EXPERTS, keys.INFO,
    *keys.EXPERT_LAYERS, "data_sampler", "random_ltd", keys.CONFIG,
})  # fmt: skip


def run_of(model: RankModel, settings: CheckedValue | None) -> dict[str, Any]:
    """Return the facts about a training run, as plain data.

    Args:
        model: contents of the model file of the first rank.
        settings: the dict `optimizer_state_dict` in the optimizer file of the first rank; None without ZeRO.
    """
    facts: dict[str, Any] = {}
    for key in (*_COUNTERS, keys.SCHEDULER):
        node = model.root.get(key)
        if node is not None:
            facts[key] = plain(node)
    client = {key: plain(node) for key, node in model.root.string_items() if key not in _DEEPSPEED_KEYS}
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
    """Return the optimizer's parameter groups, each with its settings and its parameter names.

    Args:
        states: contents of the optimizer files of each model-parallel rank.
        models: contents of the first model file of each model-parallel rank.
    """
    groups = []
    for group, (indices, settings) in enumerate(states[0][0].settings):
        buffer_indices = indices if states[0][0].stage == 3 else (group,)
        groups.append(_settings_of_group(settings, buffer_indices, models))
    return groups


def universal_groups(settings: Sequence[CheckedValue], models: Sequence[RankModel]) -> list[dict[str, Any]]:
    """Return the optimizer groups of a universal checkpoint, without the empty groups that DeepSpeed only skips."""
    groups = [
        _settings_of_group(group_settings, _indices(group_settings, group_index), models)
        for group_index, group_settings in enumerate(settings)
    ]
    return [group for group in groups if len(group) > 1 or group[keys.PARAMS]]


def _indices(settings: CheckedValue, number: int) -> tuple[int, ...]:
    """Return the indices of a group's flat buffers: several under ZeRO-3; otherwise one, which equals the group's
    number.
    """
    listed = settings.get(keys.PARAMS)
    return (number,) if listed is None else listed.naturals()


def _settings_of_group(settings: CheckedValue, indices: Sequence[int], models: Sequence[RankModel]) -> dict[str, Any]:
    names: dict[str, None] = {}
    for model in models:
        for index in indices:
            if index < len(model.shapes):
                names |= dict.fromkeys(model.shapes[index])
    plain_settings = {key: plain_setting(node.value) for key, node in settings.string_items() if key != keys.PARAMS}
    plain_settings = {key: value for key, value in plain_settings.items() if value is not NOTHING}
    return {**plain_settings, keys.PARAMS: list(names)}
