"""The contents of each rank's files: parameters, flat buffers, numbers and settings, as plain descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transaxle.errors import refuse
from transaxle.formats.catalog import BITS, Checksum, Entry, Extent, NumbersInMemory, number
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.checked_value import CheckedValue
from transaxle.formats.deepspeed.zero.flat import Shape, Vector
from transaxle.formats.pickled.descriptors import NOTHING, Object, Scalar, TensorRef
from transaxle.formats.torch_file.saved import ViewFault, place, read_saved
from transaxle.formats.training_state.flatten import described
from transaxle.formats.training_state.state_groups import plain as plain_setting

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
    groups = [_group(reader, master, state, step) for master, state in zip(masters, states, strict=True)]
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


def _group(
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
