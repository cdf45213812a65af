"""Opening Megatron's distributed checkpoints: weights, the optimizer's state in the model's shapes, the run's facts.

Layers, and experts, are axes of the tensors; the tables know that. Here the names of the optimizer's state are turned
round (Megatron: state first, then parameter), and the pickled objects are told apart by their names: the arguments of
the run are read by the restricted interpreter, everything else is left behind unread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from transaxle.arguments import Weights
from transaxle.axes.layout.bind import split_slot
from transaxle.errors import Refusal, TransaxleError, Where, refuse
from transaxle.formats.builtin_formats import MEGATRON_TRACKER, TORCH_DIST
from transaxle.formats.catalog import Container, Entry, Extent, NumbersInMemory, Shape, number
from transaxle.formats.dcp.metadata import Payload, SavedChunk, SavedItem
from transaxle.formats.dcp.reader import Conventions, metadata_files, read_folder
from transaxle.formats.format import HERE
from transaxle.formats.megatron.arguments_of_run import NAMES, RunState, run_state
from transaxle.formats.megatron.flat_buckets.restored_state import LEAVE_OUT, with_state_of_parameters
from transaxle.formats.megatron.flat_buckets.stored_buckets import is_of_groups, object_name
from transaxle.formats.megatron.iterations import BACKEND_FILE, COMMON_FILE, check_backend, check_complete
from transaxle.formats.megatron.settings_of_run import (
    LATEST_TRAIN_STATE,
    RUN_CONFIG,
    TRAIN_STATE,
    settings_files,
    with_settings_of_run,
)
from transaxle.formats.megatron.torch_dist.flattened_ranges import in_whole_shapes
from transaxle.formats.megatron.torch_dist.fsdp_names import (
    fsdp_path,
    is_fact,
    is_of_fsdp,
    run_of_items,
    short_key,
    with_whole_gates,
)
from transaxle.formats.megatron.torch_dist.group_settings import with_groups, with_settings
from transaxle.formats.megatron.torch_dist.numbered_layers import with_numbered_layers
from transaxle.formats.pickled.descriptors import TensorRef
from transaxle.formats.registry import sort_sidecars
from transaxle.formats.step_parts import moved_out
from transaxle.formats.storage.storage import Storage, SubFolder, layer
from transaxle.formats.torch_file.saved import StoredStorage, read_saved
from transaxle.formats.training_state.full_precision import MASTER, with_full_precision
from transaxle.formats.training_state.state import LEFT_BEHIND, MEGATRON, OPTIMIZER, KeyPath, Leaf, joined
from transaxle.formats.training_state.state_groups import single

COMMON = "common_state/shard_0_1"
"""The state beside the sharded tensors from megatron-core 0.19 on: an item of the folder."""
_MASTERS = frozenset({"fp32_param", "param", "master_param"})
_STATE = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.state\.([A-Za-z_][A-Za-z0-9_]*)\.(.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_WRAPPER = "module."
"""NeMo 2 saves the module that holds the model."""
_SHARD = "/shard_"
_NUMBERS_OF_SHARD = re.compile(r"[\d.]+_[\d.]+")


def open_torch_dist(storage: Storage, path: str, member: str, weights: Weights | None = None) -> Container:
    """Open a distributed checkpoint of Megatron.

    Args:
        storage: where the files are.
        path: what the user typed.
        member: the folder of an iteration in it; `HERE` for the path itself.
        weights: the model's own (`lp`, what None means), or the full-precision copies that the optimizer keeps.

    Raises:
        Refused: what a DCP folder is refused for; INCOMPLETE where a save was interrupted; UNSUPPORTED where the
            optimizer's copies are wanted and not there.
        StorageError: IO.
    """
    files = storage if member == HERE else SubFolder(storage, member)
    names = metadata_files(files.names())
    if not names:
        message = "the folder has no .metadata: the save was interrupted, or the file was not copied"
        hint = "Take an earlier iteration, or copy the missing files."
        raise refuse("INCOMPLETE", message, file=path if member == HERE else member, hint=hint)
    check_backend(files)
    items = _Items()
    conventions = Conventions(TORCH_DIST.name, items.paths, items.unread, items.wanted)
    container = in_whole_shapes(read_folder(files, path, names, conventions), items.shapes, names[0])
    if items.is_of_fsdp:
        container, state = with_whole_gates(container), run_of_items(files, items.facts)
    else:
        check_complete(files, has_state=items.common is not None or bool(settings_files(storage, member)))
        container, state = _with_optimizer(files, container, items, _run_state(files, items.common))
    container = with_numbered_layers(container)
    state, left = with_settings_of_run(state, storage, member, _number)
    metadata = {**container.metadata, MEGATRON: state.described()}
    left = {**metadata.pop(LEFT_BEHIND, {}), **left}
    left.pop(_without_shard(COMMON), None)  # read above, with names that only Megatron's pickles may have
    metadata |= {LEFT_BEHIND: left} if left else {}
    container = replace(container, metadata=metadata, config=state.config())
    if weights == "fp32":
        container = with_full_precision(container, strict=True)
    container = with_groups(_with_steps(container, state), state)
    if isinstance(files, SubFolder):
        container = moved_out(container, files.below, NumbersInMemory(files.below))
    return _with_sidecars(container)


class _Items:
    """Tells the items of a folder apart by their names."""

    def __init__(self) -> None:
        self.common: Payload | None = None
        """Where the state beside the tensors is, if it is an item."""
        self.of_groups: dict[tuple[int, int, str], Payload] = {}
        """Where the objects of groups of data-parallel ranks are, see `stored_buckets.object_name`."""
        self.is_of_fsdp = False
        self.facts: dict[str, Payload] = {}
        """Of Megatron-FSDP: where the state beside the tensors is."""
        self.shapes: dict[str, Shape] = {}
        """Name of a flattened tensor -> its shape in the model."""
        self._unread: dict[str, Leaf] = {}
        self._alike: dict[str, Leaf] = {}
        """Of those, what every shard is that has this name."""

    def wanted(self, items: Sequence[SavedItem]) -> list[SavedItem]:
        """Return the items that are tensors of their own, or objects; shapes of flattened tensors are noted."""
        self.is_of_fsdp = is_of_fsdp([item.key for item in items])
        for item in items:
            if item.unflattened is not None:
                self.shapes[_name(item.key)] = item.unflattened
        return _without_aliases(items)

    def paths(self, paths: Sequence[KeyPath]) -> tuple[list[KeyPath], None]:
        """Return the paths of items: the optimizer's state by parameter."""
        return [(fsdp_path if self.is_of_fsdp else _path)(joined(path)) for path in paths], None

    def unread(self, item: SavedItem) -> Leaf | None:
        """Return an item that is not read: an object."""
        if item.key == COMMON:
            self.common = item.payload
        if item.dtype is not None:
            return None
        if self.is_of_fsdp:
            if is_fact(item.key) and item.payload is not None:
                self.facts[item.key] = item.payload
            return Leaf((short_key(item.key),), "other", None, "pickled state of Megatron's")
        # One for each layer, expert and rank: listed once.
        begin, shard, number = item.key.rpartition(_SHARD)
        leaf = self._alike.get(begin)
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
            self._alike[begin] = leaf
        return leaf


def _without_aliases(items: Sequence[SavedItem]) -> list[SavedItem]:
    """Return the items without those that lie where an earlier one does: further names of one tensor.

    We write such names: see `draft`.
    """
    placed: dict[SavedChunk, list[tuple[SavedChunk, ...]]] = {}  # by the first one: a tensor may have very many
    wanted = []
    for item in items:
        if item.dtype is not None and item.chunks:
            alike = placed.setdefault(item.chunks[0], [])
            if item.chunks in alike:
                continue
            alike.append(item.chunks)
        wanted.append(item)
    return wanted


def _without_shard(key: str) -> str:
    """Return the key of an object without the numbers that tell where it is."""
    begin, shard, numbers = key.rpartition(_SHARD)
    return begin if shard and _NUMBERS_OF_SHARD.fullmatch(numbers) else key


def _path(key: str) -> KeyPath:
    match = _STATE.fullmatch(key)
    if match is None:
        return (key.removeprefix(_WRAPPER),)
    state, parameter = match.groups()
    return ("optimizer", "state", parameter.removeprefix(_WRAPPER), MASTER if state in _MASTERS else state)


def _name(key: str) -> str:
    """Return the name that the tensor of an item gets."""
    path = _path(key)
    return str(path[0]) if len(path) == 1 else f"{OPTIMIZER}{path[2]}/{path[3]}"


def _run_state(storage: Storage, common: Payload | None) -> RunState:
    """Return the state beside the tensors; an empty one where the folder has none.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT.
    """
    if COMMON_FILE in storage.names():
        common = Payload(COMMON_FILE, 0, storage.size(COMMON_FILE))
    if common is None:
        return RunState()
    return run_state(read_saved(storage, *common, allowed=NAMES).value, partial(_number, storage, common.file))


def _number(storage: Storage, file: str, tensor: TensorRef) -> float | None:
    """Return the value of a tensor without dims; None for any other tensor."""
    stored = tensor.storage
    if tensor.shape or not isinstance(stored, StoredStorage) or tensor.offset >= stored.count:
        return None
    value = single(storage, Entry("", stored.dtype.code, (), (Extent((), (), file, stored.offset, ()),)))
    return float(value) if isinstance(value, np.number) and not tensor.offset else None


def _with_optimizer(
    storage: Storage, container: Container, items: _Items, state: RunState
) -> tuple[Container, RunState]:
    """Return a container with the optimizer's state by parameter, and the state of the run with its settings."""
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
    container = _without_unknown(with_state_of_parameters(container, objects, files, state.args))
    left = {name: why for name, why in container.metadata.get(LEFT_BEHIND, {}).items() if not is_of_groups(name)}
    metadata = {**container.metadata, LEFT_BEHIND: left}
    return replace(container, metadata=metadata, unread=(*container.unread, *problems)), state


def _without_unknown(container: Container) -> Container:
    """Return a container without tensors of an optimizer in a form that is not known: they are no weights."""
    unknown = [name for name in container.entries if _OPTIMIZER.match(name)]
    if not unknown:
        return container
    message = f"the optimizer's state is stored in a form that is not known; {len(unknown)} tensors are like this one"
    refusal = Refusal("UNSUPPORTED", message, Where(container.path, unknown[0]), LEAVE_OUT)
    entries = {name: entry for name, entry in container.entries.items() if name not in set(unknown)}
    return replace(container, entries=entries, unread=(*container.unread, refusal))


def _with_sidecars(container: Container) -> Container:
    """Return a container with the files beside it: Megatron's own describe the folder, and do not travel."""
    sidecars = sort_sidecars(container.storage, container.files)
    own = {COMMON_FILE, BACKEND_FILE, MEGATRON_TRACKER, RUN_CONFIG, TRAIN_STATE, LATEST_TRAIN_STATE}
    carried = tuple(name for name in sidecars.carried if name not in own)
    ignored = tuple(name for name in sidecars.ignored if name not in own)
    return replace(container, carried=carried, ignored=ignored)


def _with_steps(container: Container, state: RunState) -> Container:
    """Return a container in which every parameter has the optimizer's step, which Megatron keeps once."""
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
