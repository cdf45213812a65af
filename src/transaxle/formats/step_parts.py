"""Step folders of parts: a trainer keeps the weights and the optimizer's state of one step as two checkpoints.

    checkpoint-3/pytorch_model_fsdp_0/   optimizer_0/     accelerate, transformers' Trainer under FSDP: DCP folders
    checkpoint-3/model.safetensors       optimizer.bin    the same with whole files
    checkpoint-3/model.safetensors       optimizer.pt     the same of one process: parameters have numbers, not names
    epoch_0_step_3/model/                optim/           NeMo Automodel, with the model's config in model/.hf_metadata

The step folder opens as one checkpoint, whose files have their paths in it. A part alone opens as what it is.
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
from transaxle.formats.registry import ADAPTER_CONFIG, TORCH, Folder, SidecarFiles, is_of_model, sort_sidecars
from transaxle.formats.storage.storage import LiftedFiles, Renaming, Storage, layer
from transaxle.formats.torch_file.saved import read_saved
from transaxle.formats.training_state import GROUPS, LEFT_BEHIND, OPTIMIZER, TRAINING, TrainingItem, renamed

_WEIGHTS = re.compile(r"pytorch_model_fsdp_\d+")
_MODEL = "model"
"""A folder of this name is weights only beside a folder of optimizer state."""
_STATES = re.compile(r"optim|optimizer_\d+")
_STATE_FILES = re.compile(r"optimizer(?:_\d+)?\.(?:pt|bin)")
_SCHEDULES = re.compile(r"scheduler\.(?:pt|bin)")
_SCHEDULER = "scheduler"
"""What the state of a schedule is called, see `TrainingItem`."""
_SETTINGS = "settings"
_MODEL_METADATA = ".hf_metadata"
"""Folder in which Automodel keeps the files that travel with the model."""
NUMBERED = f"{OPTIMIZER}#"
"""How the names of state begin whose parameters have numbers."""
_LEAVE_OUT = "To do without the optimizer's state: --no-optimizer (optimizer=False)."

Naming = Callable[[Container, Container], Mapping[str, str]]
"""Returns the names of an optimizer's numbered parameters, `#0` -> name, given the weights and the state; raises
`Refused` where they cannot be proved."""
OpenPart = Callable[[str], Container]
"""Opens a file or a sub-folder of the step folder."""


def weights_folders(folder: Folder) -> list[str]:
    """Return the sub-folders that hold a model of their own."""
    found = [name for name in folder.folders if _WEIGHTS.fullmatch(name)]
    beside = _MODEL in folder.folders and any(map(_STATES.fullmatch, folder.folders))
    return [*found, _MODEL] if beside else found


def with_model_files(folder: Folder) -> Storage:
    """Return a folder's files, among them those that travel with the model and are in a sub-folder for them."""
    storage = folder.storage
    if _MODEL_METADATA not in folder.folders:
        return storage
    inside = storage.listing(f"{folder.inside}{_MODEL_METADATA}").names
    lifted = {
        name: f"{folder.inside}{_MODEL_METADATA}/{name}"
        for name in inside
        if is_of_model(name) and name not in folder.names
    }
    return LiftedFiles(storage, lifted) if lifted else storage


def with_parts(
    weights: Container,
    folder: Folder,
    part: str | None,
    open_part: OpenPart,
    naming: Naming | None,
    *,
    without_state: bool,
) -> Container:
    """Return the checkpoint of a step folder: its weights, with the optimizer's state that is beside them, if any is.

    State that cannot be read, or that would not be that of the weights, is `unread`. Where nobody asks for names of
    numbered parameters, such state is left behind.

    Args:
        weights: the checkpoint of the weights.
        folder: the step folder.
        part: the sub-folder that the weights are in; None: the step folder itself.
        open_part: opens the other parts.
        naming: names numbered parameters; None: they are not asked for.
        without_state: leave the state unread.
    """
    complete = without_state or any(name.startswith(OPTIMIZER) for name in weights.entries)
    members = [] if complete else _state_members(folder)
    known = _SCHEDULER in weights.metadata.get(TRAINING, ())
    schedules = [name for name in folder.names if _SCHEDULES.fullmatch(name) and not known]
    if part is None and (not (members or schedules) or not _is_plain(weights.storage, folder.storage)):
        return weights
    unread: list[Refusal] = []
    left: dict[str, str] = {}
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
            left[member] = "its parameters have numbers: --optimizer (optimizer=True) looks for their names"
        elif all(name.startswith(OPTIMIZER) or name in state.beside for name in state.entries):
            states.append(state)
            inner += [state] if member in folder.folders else []
    for file in schedules:
        with suppress(Refused):  # it is ignored, and listed
            states.append(_schedule(folder.storage, weights.path, file))
    joined = _joined(folder.storage, weights, states)
    metadata = {**joined.metadata, **({LEFT_BEHIND: {**joined.metadata.get(LEFT_BEHIND, {}), **left}} if left else {})}
    joined = replace(joined, metadata=metadata, unread=(*joined.unread, *unread))
    return _with_sidecars(joined, folder.storage, inner, apart=part is not None)


def _state_members(folder: Folder) -> list[str]:
    """Return the sub-folders and files that hold an optimizer's state."""
    return [
        *(name for name in folder.folders if _STATES.fullmatch(name)),
        *(name for name in folder.names if _STATE_FILES.fullmatch(name)),
    ]


def _schedule(storage: Storage, path: str, file: str) -> Container:
    """Open the state of a schedule, which is settings and counters: one item of the training state.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, UNSUPPORTED.
        StorageError: IO.
    """
    item = TrainingItem((_SCHEDULER,), None, read_saved(storage, file).value, _SETTINGS)
    metadata = {TRAINING: [_SCHEDULER], LEFT_BEHIND: {_SCHEDULER: _SETTINGS}}
    return Container(TORCH.name, path, storage, {}, {file: storage.size(file)}, metadata, training=(item,))


def _with_names(state: Container, names: Mapping[str, str]) -> Container:
    """Return a numbered state under the names of its parameters."""

    def named(name: str) -> str:
        parameter, _, rest = name.removeprefix(OPTIMIZER).partition("/")
        return f"{OPTIMIZER}{names[parameter]}/{rest}" if parameter in names else name

    entries = {named(name): replace(entry, name=named(name)) for name, entry in state.entries.items()}
    groups = renamed(state.metadata.get(GROUPS, ()), {number: (name,) for number, name in names.items()})
    return replace(state, entries=entries, metadata={**state.metadata, GROUPS: groups})


def _joined(storage: Storage, weights: Container, states: Sequence[Container]) -> Container:
    """Return one container of several, with the files of all under their paths in the step folder.

    Raises:
        Refused: NAME_COLLISION for a tensor that two of them have.
    """
    faults = Faults()
    numbers = NumbersInMemory(storage)
    parts = [moved_out(part, storage, numbers) for part in (weights, *states)]
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
    )


def _metadata(parts: Iterable[Container]) -> dict[str, Any]:
    """Return the metadata of all parts: lists and mappings are joined, of anything else the first counts."""
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


def moved_out(container: Container, storage: Storage, numbers: NumbersInMemory) -> Container:
    """Return a container of a sub-folder as one of a folder around it: its files have their paths there.

    Args:
        container: the container.
        storage: files of the folder around it, which its own storage is built on.
        numbers: takes its numbers; the storage of what is returned.
    """
    inline = layer(container.storage, NumbersInMemory)
    start = numbers.add_all(inline) if inline is not None else 0
    named = {name: _named_below(container.storage, storage, name) for name in container.files}

    def extent(each: Extent) -> Extent:
        if each.file == NUMBERS:
            return Extent(each.start, each.shape, NUMBERS, each.offset + start, each.strides)
        return Extent(each.start, each.shape, named[each.file], each.offset, each.strides)

    def entry(each: Entry) -> Entry:
        return Entry(each.name, each.dtype, each.shape, tuple(map(extent, each.extents)))

    def twins(pairs: Sequence[Twin]) -> tuple[Twin, ...]:
        return tuple(replace(twin, first=entry(twin.first), second=entry(twin.second)) for twin in pairs)

    if not start and all(name == below for name, below in named.items()):
        return replace(container, storage=numbers)
    return replace(
        container,
        storage=numbers,
        entries={name: entry(each) for name, each in container.entries.items()},
        files={named[name]: size for name, size in container.files.items()},
        checksums=tuple(replace(each, file=named[each.file]) for each in container.checksums),
        twins=twins(container.twins),
        uncompared=twins(container.uncompared),
        left={name: entry(each) for name, each in container.left.items()},
        seals=tuple(replace(each, file=named[each.file]) for each in container.seals),
    )


def _is_plain(storage: Storage, below: Storage) -> bool:
    """Tell whether a storage is that below with other names and numbers at most: then it can be put together anew."""
    while storage is not below:
        if not isinstance(storage, Renaming | NumbersInMemory):
            return False
        storage = storage.below
    return True


def _named_below(storage: Storage, below: Storage, name: str) -> str:
    """Return the name of a file in a storage below another one."""
    at: Any = storage
    while at is not below:
        name = at.named(name) if isinstance(at, Renaming) else name
        at = at.below
    return name


def _with_sidecars(container: Container, storage: Storage, inner: Sequence[Container], *, apart: bool) -> Container:
    """Return a container with the files beside it: those of the step folder, and those that travel with the weights.

    Args:
        container: the checkpoint of the step folder, with the files beside its weights unless these are apart.
        storage: files of the step folder.
        inner: what was opened of sub-folders; of their other files, those of a model travel, and the rest is listed.
        apart: whether the weights are in a sub-folder, too.
    """
    below = [_named_below(each.storage, storage, name) for each in inner for name in (*each.carried, *each.ignored)]
    top = storage.names()
    travelling = [path for path in below if apart and _travels(path.rpartition("/")[2])]
    lifted = {name: path for path in travelling if (name := path.rpartition("/")[2]) not in top}
    inline = layer(container.storage, NumbersInMemory)
    assert inline is not None
    files = inline.over(LiftedFiles(storage, lifted)) if lifted else inline
    beside = sort_sidecars(files, container.files) if apart else SidecarFiles(container.carried, container.ignored)
    used = {*container.files, *(f"{file.partition('/')[0]}/" for file in container.files), *lifted.values()}
    rest = (path for path in below if not path.endswith(f"/{_MODEL_METADATA}/"))
    ignored = sorted({*beside.ignored, *rest} - used)
    carried = tuple(name for name in beside.carried if name not in used)
    return replace(container, storage=files, carried=carried, ignored=tuple(ignored))


def _travels(name: str) -> bool:
    return is_of_model(name) or name == ADAPTER_CONFIG


def in_part(part: str, path: str, opening: Callable[[], Container]) -> Container:
    """Open a sub-folder; what is refused in it has its path in the step folder.

    Args:
        part: its name.
        path: of the step folder, as the user typed it.
        opening: opens it.
    """
    try:
        return opening()
    except TransaxleError as error:
        refusals = []
        for one in error.refusals:
            inside = one.where.file is not None and one.where.file != path
            file = f"{part}/{one.where.file}" if inside else f"{path.rstrip('/')}/{part}"
            refusals.append(replaced(one, where=Where(file, one.where.tensor)))
        raise gathered(refusals) from None
