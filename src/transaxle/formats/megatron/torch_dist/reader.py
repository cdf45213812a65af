"""Opens Megatron's distributed checkpoints: weights, optimizer state in the parameters' shapes, and the run's state.

Tensors stack layers and experts along axes, which the family's table of tensor names describes. In Megatron's names of
optimizer state, the state comes before the parameter; this module swaps the two. This module recognises pickled objects
by their keys: the restricted pickle interpreter reads the run's arguments, and all other objects are left unread.

Up to megatron-core 0.15, ranks can save optimizer state as intervals of flattened tensors
(`fully_sharded_model_space`). Each rank of a data-parallel group saves an interval of the group's model-parallel shard
of a parameter. The stored tensor has one dim for each dim of the parameter, with as many entries as there are shards
along the dim, and a last dim for the elements of a shard. The metadata states the parameter's original shape.

Megatron does not store which parameters are in an optimizer group. A group's settings determine its parameters: whether
the group is for expert-parallel experts, has weight decay (vectors and biases have none), or has a separate learning
rate for embeddings.

Megatron numbers multi-token prediction layers (`mtp.layers.0.…`) even if the decoder's layers are stacked in one
tensor. Tables of tensor names describe these layers and the decoder's layers as layers of one kind, so this module also
splits the stacked layers into numbered tensors.

Checkpoints of Megatron-FSDP (`--ckpt-format fsdp_dtensor`) are DCP folders with different tensor names:

    model.module.decoder.layers.0.mlp.linear_fc1.weight_w        gate of a gated MLP; _v is up
    optimizer.state.module.module.module.decoder.….exp_avg       the parameter before the state
    optimizer.param_to_group_meta.module.module.module.….lr      a setting of the parameter's group, such as the step
    args, iteration, opt_param_scheduler.max_lr, …               pickled, each an item of its own

In checkpoints of Megatron-FSDP, layers and experts have the numbers of the whole model, and the weights are the
optimizer's full-precision weights. The parameter groups are those of parameters whose settings are all equal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from transaxle.arguments import Weights
from transaxle.axes.geometry import lexicographic_boxes, row_major
from transaxle.axes.layout.bind import join_slot, split_slot
from transaxle.errors import Faults, Refusal, TransaxleError, Where, refuse
from transaxle.formats.catalog import (
    BITS,
    ITEM_BITS,
    PACKED,
    Container,
    Entry,
    Extent,
    NumbersInMemory,
    Shape,
    Twin,
    number,
)
from transaxle.formats.dcp.metadata import Payload, SavedItem
from transaxle.formats.dcp.reader import Conventions, metadata_files, read_folder, without_aliases
from transaxle.formats.megatron.flat_buckets import (
    LEAVE_OUT,
    Objects,
    is_of_groups,
    object_name,
    with_state_of_parameters,
)
from transaxle.formats.megatron.iterations import BACKEND_FILE, COMMON_FILE, WEIGHTS, check_backend, check_complete
from transaxle.formats.megatron.rank_parameters import has_experts, has_layers
from transaxle.formats.megatron.run_arguments import (
    LATEST_TRAIN_STATE,
    NAMES,
    RUN_CONFIG,
    TRAIN_STATE,
    RunState,
    plain_data,
    run_state,
    settings_files,
    with_settings_of_run,
)
from transaxle.formats.pickled.descriptors import TensorRef
from transaxle.formats.registry import HERE, MEGATRON_TRACKER, TORCH_DIST, is_for_use, sort_sidecars
from transaxle.formats.step_parts import move_out
from transaxle.formats.storage.storage import LiftedFiles, Storage, SubFolder, layer
from transaxle.formats.torch_file.saved import StoredStorage, read_saved
from transaxle.formats.training_state import (
    GROUPS,
    LEFT_BEHIND,
    MASTER,
    MEGATRON,
    OPTIMIZER,
    PARAMS,
    KeyPath,
    Leaf,
    ParamGroup,
    groups_of_equal_settings,
    join_path,
    settings_of,
    single,
    with_full_precision,
)

_MODEL = "model.module."
_FSDP_STATE = re.compile(r"optimizer\.state\.(?:module\.)+(.+)\.([A-Za-z_][A-Za-z0-9_]*)", re.DOTALL)
_FSDP_SETTING = re.compile(r"optimizer\.param_to_group_meta\.(?:module\.)+(.+)\.([A-Za-z_][A-Za-z0-9_]*)", re.DOTALL)
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias)\d*)_([wv])", re.DOTALL)
_GATE, _UP = "w", "v"
_SETTINGS = "optimizer.param_to_group_meta"
_STEP_SETTING = "step"
_NO_SETTINGS = "the folder has no settings for this parameter, though it has the parameter's optimizer state"
_FACTS = frozenset({"args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far"})
_SCHEDULER = "opt_param_scheduler"


def is_of_fsdp(keys: Collection[str]) -> bool:
    """Return whether the keys of a DCP folder are those of Megatron-FSDP."""
    return any(key.startswith(_MODEL) for key in keys)


def fsdp_path(key: str) -> KeyPath:
    """Return the key path of a Megatron-FSDP item, reordered so that the parameter comes before the optimizer state."""
    match = _FSDP_STATE.fullmatch(key)
    if match is not None:
        parameter, state = match.groups()
        return ("optimizer", "state", parameter, MASTER if state in _MASTERS else state)
    return (key.removeprefix(_MODEL),)


def is_fact(key: str) -> bool:
    """Return whether a Megatron-FSDP item is part of the run's state, such as the arguments."""
    return key in _FACTS or key.startswith(f"{_SCHEDULER}.")


def short_key(key: str) -> str:
    """Return the key under which an unread item is listed; the settings of all parameters are listed under a single
    key.
    """
    return _SETTINGS if key.startswith(f"{_SETTINGS}.") else key


def run_of_items(storage: Storage, payloads: Mapping[str, Payload], groups: Sequence[ParamGroup]) -> RunState:
    """Return the state of a Megatron-FSDP run; the folder stores the values of this state as separate items.

    Args:
        storage: storage that reads the checkpoint's files.
        payloads: key -> byte range of each item of the state.
        groups: the optimizer's parameter groups.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE or CORRUPT if a pickled item is unsafe or malformed.
    """
    state: dict[str, Any] = {}
    for key, payload in sorted(payloads.items()):
        value = read_saved(storage, *payload, allowed=NAMES).value
        section, _, name = key.rpartition(".")
        (state if not section else state.setdefault(section, {}))[name] = value
    if groups:
        state[SETTINGS] = {_LISTED: [settings_of(group) for group in groups]}
    return run_state(state)


def groups_of_fsdp(storage: Storage, payloads: Mapping[str, Payload]) -> list[ParamGroup]:
    """Return the parameter groups of a Megatron-FSDP run; the folder stores every setting of every parameter as a
    separate item.

    Args:
        storage: storage that reads the checkpoint's files.
        payloads: key -> byte range of each item with a setting.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE or CORRUPT if a pickled item is unsafe or malformed.
    """
    settings: dict[str, dict[str, Any]] = {}
    values: dict[bytes, Any] = {}  # most parameters have the same settings, so each distinct pickle is read only once
    for key, payload in sorted(payloads.items()):
        match = _FSDP_SETTING.fullmatch(key)
        if match is None:
            continue
        data = storage.read(payload.file, payload.offset, payload.length)
        if data not in values:
            values[data] = plain_data(read_saved(storage, *payload, allowed=NAMES).value)
        settings.setdefault(match[1], {})[match[2]] = values[data]
    return groups_of_equal_settings(settings)


def with_groups_of_fsdp(container: Container, groups: Sequence[ParamGroup]) -> Container:
    """Add the parameter groups of a Megatron-FSDP run to an opened checkpoint, and to every parameter the step of its
    group; a parameter that has optimizer state but is in no group becomes a refusal of the optimizer's state.
    """
    parameters = dict.fromkeys(split_slot(name)[0] for name in container.entries if name.startswith(OPTIMIZER))
    steps = {name: group.get(_STEP_SETTING) for group in groups for name in group[PARAMS]}
    inline = layer(container.storage, NumbersInMemory)
    if not groups or not parameters or inline is None:
        return container
    problems = [
        Refusal("INCOMPLETE", _NO_SETTINGS, Where(container.path, name), LEAVE_OUT)
        for name in parameters
        if name not in steps
    ]
    entries = dict(container.entries)
    for name in parameters:
        slot, step = join_slot(name, _STEP_SETTING), steps.get(name)
        digits = number(step) if isinstance(step, int | float) else None
        if slot not in entries and digits is not None:
            entries[slot] = Entry(slot, digits[0], (), (inline.add(digits[1]),))
    plain_groups = [
        {key: _torch_value(key, value) for key, value in group.items() if key not in _MEGATRON_SETTINGS}
        for group in groups
    ]
    metadata = {**container.metadata, GROUPS: plain_groups}
    return replace(container, entries=entries, metadata=metadata, unread=(*container.unread, *problems))


def join_gates(container: Container) -> Container:
    """Join the separately stored gate and up projections of each MLP into one tensor, as in the model.

    Raises:
        Refused: with the code INCOMPLETE if only one of the two projections exists; with the code SHAPE_MISMATCH if the
            two do not fit together.
    """
    faults = Faults()
    entries: dict[str, Entry] = {}
    twins = list(container.twins)
    for name, entry in container.entries.items():
        parameter, state = split_slot(name)
        match = _HALF.fullmatch(parameter)
        if match is None:
            entries[name] = entry
            continue

        def entry_name(of: str, state: str = state) -> str:
            return f"{OPTIMIZER}{of}/{state}" if state else of

        other_name = entry_name(f"{match[1]}_{_UP if match[2] == _GATE else _GATE}")
        second = container.entries.get(other_name)
        if second is None:
            message = f"the other half of its projection, {other_name}, is missing"
            faults.add("INCOMPLETE", message, container.path, name, "Copy the missing files, or save it again.")
        elif entry.dtype != second.dtype or entry.shape[1:] != second.shape[1:]:
            faults.add("SHAPE_MISMATCH", f"it does not fit to {other_name}, the other half", container.path, name)
        elif match[2] == _GATE:
            whole = entry_name(match[1])
            entries[whole] = _concatenate(whole, entry, second)
            if not entry.shape:
                twins.append(Twin(entry, second, "they are the steps of two halves of one parameter"))
    if faults:
        raise faults.error()
    return replace(container, entries=entries, twins=tuple(twins))


def _concatenate(name: str, first: Entry, second: Entry) -> Entry:
    """Concatenate two tensors along the first dim; if they have no dims, return the first tensor."""
    if not first.shape:
        return replace(first, name=name)
    rows = first.shape[0]
    below = tuple(
        msgspec.structs.replace(each, start=(each.start[0] + rows, *each.start[1:])) for each in second.extents
    )
    return Entry(name, first.dtype, (rows + second.shape[0], *first.shape[1:]), (*first.extents, *below))


def restore_shapes(container: Container, shapes: Mapping[str, Shape], file: str) -> Container:
    """Return the opened checkpoint, with flattened tensors in the shapes that they have in the model.

    Args:
        container: the opened checkpoint, with tensors as the folder stores them.
        shapes: original shape of each flattened tensor, by name.
        file: name of the metadata file, for error messages.

    Raises:
        Refused: with the code CORRUPT if the stored chunks do not fit the tensor's shape; with the code UNSUPPORTED if
            a stored chunk is not a range of elements of one shard.
    """
    faults = Faults()
    entries = dict(container.entries)
    for name, shape in shapes.items():
        entry = entries.get(name)
        if entry is None:
            continue
        parts = entry.shape[:-1]
        if len(parts) != len(shape) or any(not part or size % part for size, part in zip(shape, parts, strict=True)):
            message = f"{list(parts)} parts of {entry.shape[-1:]} elements do not make the shape {list(shape)}"
            faults.add("CORRUPT", message, file, name)
            continue
        part = tuple(size // count for size, count in zip(shape, parts, strict=True))
        if prod(part) != entry.shape[-1]:
            message = f"its parts have {entry.shape[-1]} elements each; those of the shape {list(shape)} {prod(part)}"
            faults.add("CORRUPT", message, file, name)
            continue
        if any(extent.strides is not None or prod(extent.shape[:-1]) != 1 for extent in entry.extents):
            faults.add("UNSUPPORTED", "a chunk of it is not a range of one part", file, name)
            continue
        extents = sorted(_unflatten(entry, part), key=lambda extent: extent.start)
        entries[name] = Entry(name, entry.dtype, shape, tuple(extents))
    if faults:
        raise faults.error()
    return replace(container, entries=entries)


def _unflatten(entry: Entry, part: Shape) -> Iterator[Extent]:
    """Yield the extents of a flattened tensor, as boxes of the original tensor.

    Args:
        entry: the flattened tensor, as the folder stores it.
        part: shape of each shard of the original tensor.
    """
    for extent in entry.extents:
        *number, low = extent.start
        offset = extent.offset
        for box in lexicographic_boxes(part, low, low + extent.shape[-1]):
            bounds = zip(number, part, box, strict=True)
            start = tuple(at * length + begin for at, length, (begin, _) in bounds)
            shape = tuple(end - begin for begin, end in box)
            yield Extent(start, shape, extent.file, offset)
            offset += prod(shape) * BITS[entry.dtype] // 8


SETTINGS = "optimizer"
"""Key of the optimizer's settings, in the objects of data-parallel groups and in the run's state."""
_LISTED = "param_groups"
_DECAY, _EXPERTS, _DECOUPLED = "wd_mult", "is_expert_parallel", "is_decoupled_lr"
_GROUP_KEYS = ("lr_mult", "pre_lr_mult", "pre_wd_mult", _DECAY, _EXPERTS, _DECOUPLED)
_MEGATRON_SETTINGS = frozenset({*_GROUP_KEYS, "default_config"})
"""Settings of optimizer groups that exist only in Megatron; they are not settings of the torch optimizer."""
_BIAS = ".bias"
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_HEAD_NORMS = (".q_layernorm.", ".k_layernorm.")


def with_settings(state: RunState, objects: Objects) -> tuple[RunState, list[str]]:
    """Add the optimizer settings in the objects of data-parallel groups to the state of a run.

    Args:
        state: the state of the run so far.
        objects: the unpickled objects of the data-parallel groups.

    Returns:
        the completed state, and a message for each contradiction between groups.
    """
    settings_by_chain: dict[int, dict[str, Any]] = {}
    problems: list[str] = []
    for (chain, group, name), value in sorted(objects.items()):
        settings = plain_data(value)
        if name != SETTINGS or not isinstance(settings, dict) or not isinstance(settings.get(_LISTED), list):
            continue
        known_groups = settings_by_chain.setdefault(chain, {**settings, _LISTED: []})[_LISTED]
        new_groups = [each for each in settings[_LISTED] if each not in known_groups]
        if any(_kind(new) == _kind(known) for new in new_groups for known in known_groups):
            problems.append(f"the optimizer of group {group} of ranks has other settings than those before it")
        known_groups.extend(new_groups)
    if not settings_by_chain:
        return state, problems
    chained = {str(chain): {SETTINGS: settings} for chain, settings in settings_by_chain.items()}
    optimizer = chained if len(chained) > 1 else next(iter(chained.values()))
    return replace(state, facts={**state.facts, SETTINGS: optimizer}), problems


def _kind(group: object) -> object:
    """Return the values of the settings by which Megatron distinguishes optimizer groups."""
    return [group.get(key) for key in _GROUP_KEYS] if isinstance(group, Mapping) else group


def with_groups(container: Container, state: RunState) -> Container:
    """Add the optimizer's groups with their parameters to the metadata of an opened checkpoint, if these parameters are
    known.
    """
    groups = _groups_with_names(container, state)
    return container if not groups else replace(container, metadata={**container.metadata, GROUPS: groups})


def _groups_with_names(container: Container, state: RunState) -> list[ParamGroup]:
    """Return the optimizer groups with their parameter names; an empty list if it is ambiguous to which group some
    parameter belongs.
    """
    groups = list(settings_of_groups(state.facts.get(SETTINGS)))
    parameters = dict.fromkeys(
        parameter for name in container.entries if name.startswith(OPTIMIZER) for parameter in split_slot(name)[:1]
    )
    names: list[list[str]] = [[] for _ in groups]
    for name in parameters:
        entry = container.entries.get(name)
        if entry is None:
            return []
        dims = len(entry.shape) - has_layers(name) - has_experts(name)
        candidates = _candidate_groups(name, dims, groups, state.args)
        if len(candidates) != 1:
            return []
        names[candidates[0]].append(name)
    return [
        {
            **{key: _torch_value(key, value) for key, value in group.items() if key not in _MEGATRON_SETTINGS},
            PARAMS: group_names,
        }
        for group, group_names in zip(groups, names, strict=True)
        if group_names
    ]


def settings_of_groups(optimizer: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of all groups of an optimizer, which may be a chain of several optimizers."""
    if isinstance(optimizer, Mapping):
        listed = optimizer.get(_LISTED)
        inner: Iterable[Any] = listed if isinstance(listed, list) else ()
        yield from (group for group in inner if isinstance(group, Mapping))
        if not isinstance(listed, list):
            for value in optimizer.values():
                yield from settings_of_groups(value)


def _candidate_groups(name: str, dims: int, groups: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> list[int]:
    """Return the indices of the optimizer groups to which a parameter may belong, by the groups' settings."""
    of_experts = has_experts(name) and any(group.get(_EXPERTS) for group in groups)
    candidates = [number for number, group in enumerate(groups) if bool(group.get(_EXPERTS)) == of_experts]
    if any(groups[number].get(_DECOUPLED) for number in candidates):
        decoupled = name in _VOCABULARY
        candidates = [number for number in candidates if bool(groups[number].get(_DECOUPLED)) == decoupled]
    if len(candidates) < 2:
        return candidates
    bare = dims < 2 or name.endswith(_BIAS)
    if args.get("apply_wd_to_qk_layernorm") and any(norm in name for norm in _HEAD_NORMS):
        bare = False
    return [number for number in candidates if (groups[number].get(_DECAY) == 0) == bare]


def _torch_value(key: str, value: Any) -> Any:
    return tuple(value) if key == "betas" and isinstance(value, list) else value


_AHEAD = re.compile(r"((?:.+\.)?)mtp\.layers\.\d+\..+", re.DOTALL)
_TOGETHER = re.compile(r"((?:.+\.)?)(decoder\.layers)\.(?!\d)(.+)", re.DOTALL)
_MAX_LAYERS = 100_000


def with_numbered_layers(container: Container) -> Container:
    """Split stacked layers into numbered tensors, if the opened checkpoint has multi-token prediction layers."""
    models = {match[1] for name in container.entries if (match := _AHEAD.fullmatch(split_slot(name)[0]))}
    if not models:
        return container
    entries: dict[str, Entry] = {}
    for name, entry in container.entries.items():
        parameter, state = split_slot(name)
        match = _TOGETHER.fullmatch(parameter)
        if (
            match is None
            or match[1] not in models
            or not entry.shape
            or entry.shape[0] > _MAX_LAYERS
            or entry.dtype in PACKED
        ):
            entries[name] = entry
            continue
        for layer_number in range(entry.shape[0]):
            numbered = join_slot(f"{match[1]}{match[2]}.{layer_number}.{match[3]}", state)
            entries[numbered] = Entry(
                numbered, entry.dtype, entry.shape[1:], tuple(_layer_extents(entry, layer_number))
            )
    return replace(container, entries=entries)


def _layer_extents(entry: Entry, layer: int) -> Iterator[Extent]:
    """Yield the extents of one layer of a tensor that stacks all layers."""
    item = ITEM_BITS[entry.dtype] // 8
    for extent in entry.extents:
        row = layer - extent.start[0]
        if 0 <= row < extent.shape[0]:
            strides = extent.strides or row_major(extent.shape)
            inside = None if extent.strides is None else extent.strides[1:]
            offset = extent.offset + row * strides[0] * item
            yield msgspec.structs.replace(
                extent, start=extent.start[1:], shape=extent.shape[1:], offset=offset, strides=inside
            )


COMMON = "common_state/shard_0_1"
"""DCP key of the item with that part of the run's state which is not sharded, since megatron-core 0.19."""
_MASTERS = frozenset({"fp32_param", "param", "master_param"})
_STATE = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.state\.([A-Za-z_][A-Za-z0-9_]*)\.(.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_WRAPPER = "module."
"""Prefix of tensor names in NeMo 2's checkpoints; NeMo 2 saves a module that wraps the model."""
_TOKENIZER = "context", "nemo_tokenizer"
"""Folder beside that of a NeMo checkpoint's tensors, and the folder with the tokenizer in it."""
_SHARD = "/shard_"
_NUMBERS_OF_SHARD = re.compile(r"[\d.]+_[\d.]+")


def open_torch_dist(storage: Storage, path: str, member: str, weights: Weights | None = None) -> Container:
    """Open a distributed checkpoint of Megatron.

    Args:
        storage: storage that reads the checkpoint's files.
        path: the checkpoint's path as the user typed it.
        member: name of the iteration's folder; `HERE` if the path is this folder itself.
        weights: which values get the plain parameter names: the model's weights (`lp`, also for None), or the
            optimizer's full-precision copies (`fp32`).

    Raises:
        Refused: with the codes of `open_dcp`; with the code INCOMPLETE if the save was interrupted; with the code
            UNSUPPORTED if `fp32` copies are missing.
        StorageError: with the code IO if a file cannot be read.
    """
    files = storage if member == HERE else SubFolder(storage, member)
    names = metadata_files(files.names())
    if not names:
        message = "the folder has no .metadata: the save was interrupted, or the file was not copied"
        hint = "Take an earlier iteration, or copy the missing files."
        raise refuse("INCOMPLETE", message, file=path if member == HERE else member, hint=hint)
    check_backend(files)
    items = _Items()
    conventions = Conventions(TORCH_DIST.name, items.paths, items.object_leaf, items.select)
    container = restore_shapes(read_folder(files, path, names, conventions), items.shapes, names[0])
    groups: list[ParamGroup] = []
    if items.is_of_fsdp:
        groups = groups_of_fsdp(files, items.settings)
        container, state = join_gates(container), run_of_items(files, items.facts, groups)
    else:
        folder = path if member == HERE else f"{path.rstrip('/')}/{member}"
        check_complete(files, folder, has_state=items.common is not None or bool(settings_files(storage, member)))
        container, state = _with_optimizer(files, container, items, _run_state(files, items.common))
    container = with_numbered_layers(container)
    state, unread = with_settings_of_run(state, storage, member, _number)
    metadata = {**container.metadata, MEGATRON: state.to_metadata()}
    unread = {**metadata.pop(LEFT_BEHIND, {}), **unread}
    # the item COMMON is not listed as unread, because `_run_state` has read it
    unread.pop(_without_shard(COMMON), None)
    if groups:
        unread.pop(_SETTINGS, None)
    metadata |= {LEFT_BEHIND: unread} if unread else {}
    container = replace(container, metadata=metadata, config=state.config())
    if weights == "fp32":
        container = with_full_precision(container, require_copies=True)
    container = with_groups_of_fsdp(container, groups) if groups else with_groups(_with_steps(container, state), state)
    if isinstance(files, SubFolder):
        container = move_out(container, files.below, NumbersInMemory(files.below))
    return _with_sidecars(_with_tokenizer(container, storage, member))


class _Items:
    """Sorts a folder's items by their keys into tensors, the run's state, objects of data-parallel groups, and unread
    objects.
    """

    def __init__(self) -> None:
        self.common: Payload | None = None
        """Byte range of that part of the run's state which is not sharded; None if the folder has no item with this
        state."""
        self.of_groups: dict[tuple[int, int, str], Payload] = {}
        """Name of an object of data-parallel groups -> byte range; see `flat_buckets.object_name`."""
        self.is_of_fsdp = False
        self.facts: dict[str, Payload] = {}
        """Key -> byte range, for the items with the state of a Megatron-FSDP run, such as its arguments."""
        self.settings: dict[str, Payload] = {}
        """Key -> byte range, for the items with the settings of a Megatron-FSDP run's parameters."""
        self.shapes: dict[str, Shape] = {}
        """Tensor name -> original shape, for each flattened tensor."""
        self._unread: dict[str, Leaf] = {}
        self._shard_leaves: dict[str, Leaf] = {}
        """Key of an unread object, without the number of its shard -> the leaf (listed value) that represents all
        shards of the object."""

    def select(self, items: Sequence[SavedItem]) -> list[SavedItem]:
        """Return the items, except those that are second keys of a tensor; remember the original shapes of flattened
        tensors.
        """
        self.is_of_fsdp = is_of_fsdp([item.key for item in items])
        for item in items:
            if item.unflattened is not None:
                self.shapes[_name(item.key)] = item.unflattened
        return without_aliases(items)

    def paths(self, paths: Sequence[KeyPath]) -> tuple[list[KeyPath], None]:
        """Return the key paths of items, reordered so that the parameter comes before the optimizer state."""
        return [(fsdp_path if self.is_of_fsdp else _path)(join_path(path)) for path in paths], None

    def object_leaf(self, item: SavedItem) -> Leaf | None:
        """Return the leaf to list for an object, which is not read; return None for a tensor, which must be read."""
        if item.key == COMMON:
            self.common = item.payload
        if item.dtype is not None:
            return None
        if self.is_of_fsdp:
            if is_fact(item.key) and item.payload is not None:
                self.facts[item.key] = item.payload
            if item.key.startswith(f"{_SETTINGS}.") and item.payload is not None:
                self.settings[item.key] = item.payload
            return Leaf((short_key(item.key),), "other", None, "pickled state of Megatron's")
        # The shards of an object (one for each layer, expert and rank) are listed as one value.
        begin, shard, number = item.key.rpartition(_SHARD)
        leaf = self._shard_leaves.get(begin)
        if leaf is not None and shard and _NUMBERS_OF_SHARD.fullmatch(number):
            return leaf
        name = object_name(item.key)
        if name is not None and item.payload is not None:
            self.of_groups[name] = item.payload
        key = _without_shard(item.key)
        leaf = self._unread.get(key)
        if leaf is None:
            leaf = self._unread[key] = Leaf((key,), "other", None, "pickled state of Megatron's")
        if key == begin and object_name(f"{begin}{_SHARD}0_1") is None:
            self._shard_leaves[begin] = leaf
        return leaf


def _without_shard(key: str) -> str:
    """Return the key of an object without the shard number."""
    begin, shard, numbers = key.rpartition(_SHARD)
    return begin if shard and _NUMBERS_OF_SHARD.fullmatch(numbers) else key


def _path(key: str) -> KeyPath:
    match = _STATE.fullmatch(key)
    if match is None:
        return (key.removeprefix(_WRAPPER),)
    state, parameter = match.groups()
    return ("optimizer", "state", parameter.removeprefix(_WRAPPER), MASTER if state in _MASTERS else state)


def _name(key: str) -> str:
    """Return the name that an item's tensor gets in the catalog."""
    path = _path(key)
    return str(path[0]) if len(path) == 1 else f"{OPTIMIZER}{path[2]}/{path[3]}"


def _run_state(storage: Storage, common: Payload | None) -> RunState:
    """Read that part of the run's state which is not sharded; the state is empty if the folder has no such item.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE or CORRUPT if a pickled item is unsafe or malformed.
    """
    if COMMON_FILE in storage.names():
        common = Payload(COMMON_FILE, 0, storage.size(COMMON_FILE))
    if common is None:
        return RunState()
    return run_state(read_saved(storage, *common, allowed=NAMES).value, partial(_number, storage, common.file))


def _number(storage: Storage, file: str, tensor: TensorRef) -> float | None:
    """Return the value of a tensor without dims; None if the tensor has dims."""
    stored = tensor.storage
    if tensor.shape or not isinstance(stored, StoredStorage) or tensor.offset >= stored.count:
        return None
    value = single(storage, Entry("", stored.dtype.code, (), (Extent((), (), file, stored.offset, ()),)))
    return float(value) if isinstance(value, np.number) and not tensor.offset else None


def _with_optimizer(
    storage: Storage, container: Container, items: _Items, state: RunState
) -> tuple[Container, RunState]:
    """Return an opened checkpoint with its optimizer state by parameter, and the run's state completed with optimizer
    settings.
    """
    objects: dict[tuple[int, int, str], Any] = {}
    problems: list[Refusal] = []
    for name, payload in items.of_groups.items():
        try:
            value = read_saved(storage, *payload, allowed=NAMES).value
        except TransaxleError as error:
            if error.exit_code != TransaxleError.exit_code:
                raise
            problems.extend(error.refusals)
            continue
        objects[name] = value[0] if isinstance(value, list) and len(value) == 1 else value
    state, contradictions = with_settings(state, objects)
    where = Where(container.path)
    problems.extend(Refusal("UNSUPPORTED", each, where, LEAVE_OUT) for each in contradictions)
    files = {name: payload.file for name, payload in items.of_groups.items()}
    container = _without_unknown_state(with_state_of_parameters(container, objects, files, state.args))
    unread = {name: why for name, why in container.metadata.get(LEFT_BEHIND, {}).items() if not is_of_groups(name)}
    metadata = {**container.metadata, LEFT_BEHIND: unread}
    return replace(container, metadata=metadata, unread=(*container.unread, *problems)), state


def _without_unknown_state(container: Container) -> Container:
    """Remove optimizer tensors of unknown layout from an opened checkpoint, and add a refusal with the reason to it."""
    unknown = [name for name in container.entries if _OPTIMIZER.match(name)]
    if not unknown:
        return container
    message = f"the optimizer's state is stored in a form that is not known; {len(unknown)} tensors are like this one"
    refusal = Refusal("UNSUPPORTED", message, Where(container.path, unknown[0]), LEAVE_OUT)
    entries = {name: entry for name, entry in container.entries.items() if name not in set(unknown)}
    return replace(container, entries=entries, unread=(*container.unread, refusal))


def _with_tokenizer(container: Container, storage: Storage, member: str) -> Container:
    """Show the tokenizer's files of a NeMo checkpoint in the top folder, so that conversions copy them."""
    inline = layer(container.storage, NumbersInMemory)
    if inline is None or member.rpartition("/")[2] != WEIGHTS:
        return container
    run = member.removesuffix(WEIGHTS)
    context, tokenizer = _TOKENIZER
    if context not in storage.listing(run.rstrip("/")).folders:
        return container
    if tokenizer not in storage.listing(f"{run}{context}").folders:
        return container
    folder = f"{run}{context}/{tokenizer}"
    names = [name for name in storage.listing(folder).names if is_for_use(name) and name not in storage.names()]
    lifted = LiftedFiles(storage, {name: f"{folder}/{name}" for name in names})
    return replace(container, storage=inline.moved_onto(lifted))


def _with_sidecars(container: Container) -> Container:
    """Set the further files that conversions copy, leaving out Megatron's own files, which describe only this
    folder.
    """
    sidecars = sort_sidecars(container.storage, container.files)
    megatron_files = {COMMON_FILE, BACKEND_FILE, MEGATRON_TRACKER, RUN_CONFIG, TRAIN_STATE, LATEST_TRAIN_STATE}
    carried = tuple(name for name in sidecars.carried if name not in megatron_files)
    ignored = tuple(name for name in sidecars.ignored if name not in megatron_files)
    return replace(container, carried=carried, ignored=ignored)


def _with_steps(container: Container, state: RunState) -> Container:
    """Add a step tensor to every parameter's optimizer state, because Megatron stores the step only once for all
    parameters.
    """
    step = state.step()
    digits = None if step is None else number(step)
    inline = layer(container.storage, NumbersInMemory)
    if digits is None or inline is None:
        return container
    code, data = digits
    place = inline.add(data)
    parameters = dict.fromkeys(parameter for name in container.entries if (parameter := split_slot(name)[0]) != name)
    steps = {name: Entry(name, code, (), (place,)) for name in (f"{OPTIMIZER}{each}/step" for each in parameters)}
    return replace(
        container, entries={**container.entries, **{n: e for n, e in steps.items() if n not in container.entries}}
    )
