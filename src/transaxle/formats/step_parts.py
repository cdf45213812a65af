"""Combines two checkpoints in one step folder: some trainers save the weights and the optimizer's state of a training
step as separate checkpoints.

    checkpoint-3/pytorch_model_fsdp_0/   optimizer_0/     accelerate, transformers' Trainer under FSDP: DCP folders
    checkpoint-3/model.safetensors       optimizer.bin    accelerate and Trainer, with unsharded files
    checkpoint-3/model.safetensors       optimizer.pt     Trainer on one process: parameters have numbers only
    epoch_0_step_3/model/                optim/           NeMo Automodel, with the model's config in model/.hf_metadata
    actor/model_world_size_2_rank_0.pt   optim_world_…    verl: rank files (see `ranks`), its config in huggingface/

The step folder is opened as one checkpoint; file names are relative to the step folder. Each of the two separate
checkpoints can also be opened alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace as replaced
from typing import Any

from msgspec.structs import replace

from transaxle.errors import Faults, Refusal, Refused, TransaxleError, Where, gathered
from transaxle.formats.catalog import NUMBERS, Container, Entry, Extent, NumbersInMemory, Twin
from transaxle.formats.ranks.names import RankSets
from transaxle.formats.registry import ADAPTER_CONFIG, TORCH, Folder, SidecarFiles, is_of_model, sort_sidecars
from transaxle.formats.storage.storage import LiftedFiles, Renaming, Storage, layer
from transaxle.formats.torch_file.saved import read_saved
from transaxle.formats.training_state import GROUPS, LEFT_BEHIND, OPTIMIZER, TRAINING, TrainingItem, rename_parameters

_WEIGHTS = re.compile(r"pytorch_model_fsdp_\d+")
_MODEL = "model"
"""Name of a folder that contains weights, if there is a folder of optimizer state next to it."""
_STATES = re.compile(r"optim|optimizer_\d+")
_STATE_FILES = re.compile(r"optimizer(?:_\d+)?\.(?:pt|bin)")
_SCHEDULES = re.compile(r"scheduler\.(?:pt|bin)")
_SCHEDULER = "scheduler"
"""Name of the item of training state that contains a learning-rate schedule, see `TrainingItem`."""
_SETTINGS = "settings"
_MODEL_METADATA = (".hf_metadata", "huggingface")
"""Folders with the model's config and tokenizer, in checkpoints of NeMo Automodel and of verl."""
NUMBERED = f"{OPTIMIZER}#"
"""Prefix of the names of optimizer state whose parameters are known only by number."""
_LEAVE_OUT = "To do without the optimizer's state: --no-optimizer (optimizer=False)."

Naming = Callable[[Container, Container], Mapping[str, str]]
"""A function `naming(weights, state)`, which maps an optimizer's numbered parameters (`#0`) to names, or raises
`Refused` if the names are uncertain."""
OpenPart = Callable[[str], Container]
"""A function `open_part(member)`, which opens a file or a sub-folder of the step folder."""


def weights_folders(folder: Folder) -> list[str]:
    """Return the names of the sub-folders that contain a model's weights."""
    folders = [name for name in folder.folders if _WEIGHTS.fullmatch(name)]
    has_model = _MODEL in folder.folders and any(map(_STATES.fullmatch, folder.folders))
    return [*folders, _MODEL] if has_model else folders


def with_model_files(folder: Folder) -> Storage:
    """Return a storage in which the folder also contains the model's config and tokenizer files, if a sub-folder has
    them.
    """
    storage = folder.storage
    lifted = {
        name: f"{folder.inside}{inner}/{name}"
        for inner in _MODEL_METADATA
        if inner in folder.folders
        for name in storage.listing(f"{folder.inside}{inner}").names
        if is_of_model(name) and name not in folder.names
    }
    return LiftedFiles(storage, lifted) if lifted else storage


def with_parts(
    weights: Container,
    folder: Folder,
    part: str | None,
    open_part: OpenPart,
    naming: Naming | None,
    sets: RankSets,
    *,
    without_state: bool,
) -> Container:
    """Combine the weights of a step folder with the optimizer's state and the schedules in the same folder.

    Optimizer state that cannot be read, or cannot be matched with the weights, is added to the field `unread` of the
    result. The state of numbered parameters is left out unless `naming` is given.

    Args:
        weights: the checkpoint of the weights.
        folder: storage of the step folder.
        part: name of the sub-folder with the weights; None means that the weights are in the step folder itself.
        open_part: function that opens the other files and sub-folders of the step folder.
        naming: function that names numbered parameters; None means that the optimizer's state was not requested.
        sets: the sets of rank files in the step folder.
        without_state: whether to skip the optimizer's state.
    """
    complete = without_state or any(name.startswith(OPTIMIZER) for name in weights.entries)
    members = [] if complete else [*_state_members(folder), *filter(None, [sets.optimizer])]
    members += filter(None, [sets.extra])
    has_schedule = _SCHEDULER in weights.metadata.get(TRAINING, ())
    schedules = [name for name in folder.names if _SCHEDULES.fullmatch(name) and not has_schedule]
    if part is None and (not (members or schedules) or not _is_plain(weights.storage, folder.storage)):
        return weights
    unread: list[Refusal] = []
    left_behind: dict[str, str] = {}
    states: list[Container] = []
    inner = [weights] if part is not None else []
    for member in members:
        try:
            state = open_part(member)
            if naming is not None and any(name.startswith(NUMBERED) for name in state.entries):
                state = _with_names(state, naming(weights, state))
        except TransaxleError as error:
            if error.exit_code != TransaxleError.exit_code:
                raise
            unread += (Refusal(one.code, one.message, one.where, one.hint or _LEAVE_OUT) for one in error.refusals)
            continue
        if any(name.startswith(NUMBERED) for name in state.entries):
            left_behind[member] = "its parameters have numbers: --optimizer (optimizer=True) looks for their names"
        elif all(name.startswith(OPTIMIZER) or name in state.beside for name in state.entries):
            states.append(state)
            inner += [state] if member in folder.folders else []
    for file in schedules:
        with suppress(Refused):  # a schedule that cannot be read is skipped, and reported among the ignored files
            states.append(_schedule(folder.storage, weights.path, file))
    joined = _merge(folder.storage, weights, states)
    metadata = {
        **joined.metadata,
        **({LEFT_BEHIND: {**joined.metadata.get(LEFT_BEHIND, {}), **left_behind}} if left_behind else {}),
    }
    joined = replace(joined, metadata=metadata, unread=(*joined.unread, *unread))
    return _with_sidecars(joined, folder.storage, inner, apart=part is not None)


def _state_members(folder: Folder) -> list[str]:
    """Return the names of the sub-folders and files that contain an optimizer's state."""
    return [
        *(name for name in folder.folders if _STATES.fullmatch(name)),
        *(name for name in folder.names if _STATE_FILES.fullmatch(name)),
    ]


def _schedule(storage: Storage, path: str, file: str) -> Container:
    """Open the state of a learning-rate schedule as a checkpoint without tensors, with one item of training state.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE, CORRUPT or UNSUPPORTED if the schedule's pickle cannot be read.
        StorageError: with the code IO if the file cannot be read.
    """
    item = TrainingItem((_SCHEDULER,), None, read_saved(storage, file).value, _SETTINGS)
    metadata = {TRAINING: [_SCHEDULER], LEFT_BEHIND: {_SCHEDULER: _SETTINGS}}
    return Container(TORCH.name, path, storage, {}, {file: storage.size(file)}, metadata, training=(item,))


def _with_names(state: Container, names: Mapping[str, str]) -> Container:
    """Rename the numbered parameters of an optimizer's state; `names` maps `#0` and so on to parameter names."""

    def new_name(name: str) -> str:
        parameter, _, state_name = name.removeprefix(OPTIMIZER).partition("/")
        return f"{OPTIMIZER}{names[parameter]}/{state_name}" if parameter in names else name

    entries = {new_name(name): replace(entry, name=new_name(name)) for name, entry in state.entries.items()}
    groups = rename_parameters(state.metadata.get(GROUPS, ()), {number: (name,) for number, name in names.items()})
    return replace(state, entries=entries, metadata={**state.metadata, GROUPS: groups})


def _merge(storage: Storage, weights: Container, states: Sequence[Container]) -> Container:
    """Merge opened checkpoints into one, whose file names are relative to the step folder.

    Raises:
        Refused: with the code NAME_COLLISION for a tensor that two of the checkpoints have.
    """
    faults = Faults()
    numbers = NumbersInMemory(storage)
    parts = [move_out(part, storage, numbers) for part in (weights, *states)]
    entries: dict[str, Entry] = {}
    for part in parts:
        for name in part.entries.keys() & entries.keys():
            first, second = (
                each.extents[0].file if each.extents else "" for each in (entries[name], part.entries[name])
            )
            faults.add("NAME_COLLISION", f"the tensor is also in {first}", second, name, _LEAVE_OUT)
        entries |= part.entries
    if faults:
        raise faults.error()
    return replace(
        parts[0],
        storage=numbers,
        entries=entries,
        files={name: size for part in parts for name, size in part.files.items()},
        metadata=_metadata(parts),
        checksums=tuple(each for part in parts for each in part.checksums),
        twins=tuple(each for part in parts for each in part.twins),
        training=tuple(each for part in parts for each in part.training),
        seals=tuple(each for part in parts for each in part.seals),
        unread=tuple(each for part in parts for each in part.unread),
        paths={name: path for part in parts for name, path in part.paths.items()},
        in_order=[part.in_order for part in parts if GROUPS in part.metadata] == [True],
    )


def _metadata(parts: Iterable[Container]) -> dict[str, Any]:
    """Merge the metadata of opened checkpoints: lists and dicts are merged; any other value is that of the first
    checkpoint with the key.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.metadata.items():
            if key in (GROUPS, TRAINING):
                merged[key] = [*merged.get(key, ()), *value]
            elif isinstance(value, dict):
                merged[key] = {**merged.get(key, {}), **value}
            else:
                merged.setdefault(key, value)
    return merged


def move_out(container: Container, storage: Storage, numbers: NumbersInMemory) -> Container:
    """Turn the opened checkpoint of a sub-folder into one of the step folder, with file names relative to the step
    folder.

    Args:
        container: the opened checkpoint of the sub-folder.
        storage: storage of the step folder, under the storage of the sub-folder.
        numbers: storage of the result, to which the numbers in memory of `container` are added.
    """
    inline = layer(container.storage, NumbersInMemory)
    start = numbers.add_all(inline) if inline is not None else 0
    names_below = {name: _named_below(container.storage, storage, name) for name in container.files}

    def extent(part: Extent) -> Extent:
        if part.file == NUMBERS:
            return Extent(part.start, part.shape, NUMBERS, part.offset + start, part.strides)
        return Extent(part.start, part.shape, names_below[part.file], part.offset, part.strides)

    def entry(part: Entry) -> Entry:
        return Entry(part.name, part.dtype, part.shape, tuple(map(extent, part.extents)))

    def twins(pairs: Sequence[Twin]) -> tuple[Twin, ...]:
        return tuple(replace(twin, first=entry(twin.first), second=entry(twin.second)) for twin in pairs)

    if not start and all(name == below for name, below in names_below.items()):
        return replace(container, storage=numbers)
    return replace(
        container,
        storage=numbers,
        entries={name: entry(part) for name, part in container.entries.items()},
        files={names_below[name]: size for name, size in container.files.items()},
        checksums=tuple(replace(part, file=names_below[part.file]) for part in container.checksums),
        twins=twins(container.twins),
        uncompared=twins(container.uncompared),
        left={name: entry(part) for name, part in container.left.items()},
        seals=tuple(replace(part, file=names_below[part.file]) for part in container.seals),
    )


def _is_plain(storage: Storage, below: Storage) -> bool:
    """Return whether a storage only renames files of `below` or adds numbers, so that it can be rebuilt on a different
    storage.
    """
    while storage is not below:
        if not isinstance(storage, Renaming | NumbersInMemory):
            return False
        storage = storage.below
    return True


def _named_below(storage: Storage, below: Storage, name: str) -> str:
    """Translate the name of a file in `storage` into the file's name in the storage `below`."""
    at: Any = storage
    while at is not below:
        name = at.name_below(name) if isinstance(at, Renaming) else name
        at = at.below
    return name


def _with_sidecars(container: Container, storage: Storage, inner: Sequence[Container], *, apart: bool) -> Container:
    """Return an opened checkpoint with its sidecar files (files without tensors): those in the step folder and those in
    its sub-folders.

    Args:
        container: the opened checkpoint of the step folder; unless `apart`, it already has the sidecars of its weights.
        storage: storage that reads the step folder.
        inner: opened checkpoints of sub-folders; their config and tokenizer files are copied along, and all other files
            are listed as ignored.
        apart: whether the weights are in a sub-folder, as the optimizer's state is.
    """
    inner_files = [
        _named_below(each.storage, storage, name) for each in inner for name in (*each.carried, *each.ignored)
    ]
    top = storage.names()
    travelling = [path for path in inner_files if apart and _travels(path.rpartition("/")[2])]
    lifted = {name: path for path in travelling if (name := path.rpartition("/")[2]) not in top}
    inline = layer(container.storage, NumbersInMemory)
    assert inline is not None
    files = inline.moved_onto(LiftedFiles(storage, lifted)) if lifted else inline
    sidecars = sort_sidecars(files, container.files) if apart else SidecarFiles(container.carried, container.ignored)
    used_names = {*container.files, *(f"{file.partition('/')[0]}/" for file in container.files), *lifted.values()}
    other_files = (path for path in inner_files if not path.endswith(tuple(f"/{name}/" for name in _MODEL_METADATA)))
    ignored = sorted({*sidecars.ignored, *other_files} - used_names)
    carried = tuple(name for name in sidecars.carried if name not in used_names)
    return replace(container, storage=files, carried=carried, ignored=tuple(ignored))


def _travels(name: str) -> bool:
    return is_of_model(name) or name == ADAPTER_CONFIG


def in_part(part: str, path: str, opening: Callable[[], Container]) -> Container:
    """Open a sub-folder; a refusal then names files by their paths in the step folder.

    Args:
        part: name of the sub-folder.
        path: path of the step folder, as the user typed it.
        opening: function that opens the sub-folder.
    """
    try:
        return opening()
    except TransaxleError as error:
        refusals = []
        for refusal in error.refusals:
            inside = refusal.where.file is not None and refusal.where.file != path
            file = f"{part}/{refusal.where.file}" if inside else f"{path.rstrip('/')}/{part}"
            refusals.append(replaced(refusal, where=Where(file, refusal.where.tensor)))
        raise gathered(refusals) from None
