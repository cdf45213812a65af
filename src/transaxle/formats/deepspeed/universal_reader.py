"""Opens universal checkpoints, which have one folder per parameter; each folder has one file per optimizer state.

DeepSpeed writes two variants of universal checkpoints. In the first variant (ZeRO below stage 3, or tensor parallelism)
a file contains a dict with the tensor in its real shape, and untrained tensors also have files. In the second variant
(ZeRO-3 without other parallelism) a file contains only the flattened tensor; the tensor's shape, and all untrained
tensors, are in the model files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from transaxle.arguments import Weights
from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import Checksum, Container, Entry, Extent, NumbersInMemory, Shape
from transaxle.formats.deepspeed import keys, spread
from transaxle.formats.deepspeed.categories import Patterns
from transaxle.formats.deepspeed.files import sort_files
from transaxle.formats.deepspeed.hints import Hint, check_hint, hints_entry, read_hint
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.rank_files import RankModel, TensorReader, read_model, run_of, universal_groups
from transaxle.formats.deepspeed.reader import SCRIPTS, TIES, check_one_save, degrees
from transaxle.formats.deepspeed.trained_state import ModelRank, Stage, assemble
from transaxle.formats.deepspeed.universal_record import UniversalInfo
from transaxle.formats.registry import HERE, sort_sidecars
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import read_saved
from transaxle.formats.training_state import OPTIMIZER, RUN

_MODEL = f"*{keys.MODEL_END}"
_PLAIN = "mp_rank_"
"""Prefix of the model files that are not split over data-parallel ranks; the model files of ZeRO-3, which are split,
have a different prefix."""


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes of parameters, as the model files state them."""

    ranks: int
    """Tensor-parallel degree of the run from which the universal checkpoint was made."""
    on_first_rank: Mapping[str, Shape]
    """Parameter name -> shape of the parameter's shard on the first tensor-parallel rank."""
    logical: Mapping[str, Shape]
    """Parameter name -> shape of the whole parameter, if the metadata states it."""


def open_universal(storage: Storage, path: str, member: str, weights: Weights = "fp32") -> Container:
    """Open a universal checkpoint.

    Args:
        storage: storage that reads the checkpoint's files.
        path: the checkpoint's path as the user typed it.
        member: name of the step folder; `HERE` if the path is the step folder itself.
        weights: which values are listed under the parameters' own names: the optimizer's master weights, or the
            model's low-precision weights. The low-precision weights are listed only if the model files contain them as
            whole tensors.

    Raises:
        Refused: with every problem in the files, and codes such as UNSAFE_PICKLE, CORRUPT, INCOMPLETE and UNSUPPORTED.
        StorageError: with the code IO if a file cannot be read.
    """
    prefix = "" if member == HERE else f"{member}/"
    inline = NumbersInMemory(storage)
    faults = Faults()
    checksums: list[Checksum] = []
    models = _models(inline, storage, prefix, checksums, faults)
    if faults:
        raise faults.error()
    check_one_save(models)
    shapes, stage = _read_model_files(models, faults)
    settings, files = _settings(inline, prefix, checksums)
    entries: dict[str, Entry] = {}
    hints: dict[str, Hint] = {}
    parameters = storage.listing(f"{prefix}{keys.ZERO_FOLDER}").folders
    for parameter in parameters:
        tensors = _parameter(inline, f"{prefix}{keys.ZERO_FOLDER}", parameter, shapes, files, checksums, hints, faults)
        entries |= tensors
    if not parameters:
        faults.add("INCOMPLETE", "the folder has no parameters", f"{prefix}{keys.ZERO_FOLDER}")
    if not faults:
        _check_all_there(entries, parameters, shapes, faults)
    if faults:
        raise faults.error()
    _add_steps(entries, settings, inline)
    # Trained parameters are read from their folders; the model files only add untrained tensors.
    trained = {name for model in models for shapes_of in model.shapes for name in shapes_of}
    untrained = {name: entry for name, entry in stage.weights.items() if name not in entries and name not in trained}
    if weights == "lp":
        untrained = {name: entry for name, entry in stage.low.items() if prod(entry.shape)}
        missing = [name for name in entries if not name.startswith(OPTIMIZER) and name not in untrained]
        if missing:
            message = f"the model files do not hold {missing[0]} in low precision"
            raise refuse("UNSUPPORTED", message, file=path, hint="Leave out --weights lp.")
    entries |= {name: Entry(name, entry.dtype, entry.shape, entry.extents) for name, entry in untrained.items()}
    ties = {alias: name for model in models for alias, name in model.shared.items() if name in entries}
    for alias, name in ties.items():
        entries.setdefault(alias, Entry(alias, entries[name].dtype, entries[name].shape, entries[name].extents))
    files += [model.file for model in models]
    sizes = {name: storage.size(name) for name in files}
    sidecars = sort_sidecars(storage, sizes)
    carried = tuple(name for name in sidecars.carried if name not in SCRIPTS and name not in sizes)
    ignored = tuple(sorted({*sidecars.ignored, *(set(sidecars.carried) & SCRIPTS)} - {prefix}))
    metadata: dict[str, Any] = {RUN: {**run_of(models[0], settings), **hints_entry(hints)}}
    group_settings = settings.get(keys.GROUPS)
    if group_settings is not None:
        metadata[keys.GROUPS] = universal_groups(group_settings.list(), models)
        _check_states(entries, metadata[keys.GROUPS])
    if ties:
        metadata[TIES] = ties
    return Container(
        keys.UNIVERSAL, path, inline, entries, sizes, metadata, carried, ignored, tuple(checksums), tuple(stage.twins)
    )


def _models(
    inline: NumbersInMemory, storage: Storage, prefix: str, checksums: list[Checksum], faults: Faults
) -> list[RankModel]:
    """Read the model files in the step folder; if there are model files that are not split over data-parallel ranks,
    only these are read.
    """
    names = [name for name in storage.listing(prefix.rstrip("/")).everything() if name.endswith(keys.MODEL_END)]
    plain = [name for name in names if name.startswith(_PLAIN)]
    try:
        grid = sort_files(plain or names, prefix).model
    except TransaxleError as error:
        faults.extend(*error.refusals)
        return []
    models = []
    for _, parts in sorted(grid.items()):
        for _, name in sorted(parts.items()):
            try:
                models.append(read_model(inline, prefix + name))
                checksums.extend(models[-1].checksums)
            except TransaxleError as error:
                faults.extend(*error.refusals)
    return models


def _read_model_files(models: Sequence[RankModel], faults: Faults) -> tuple[_Shapes, Stage]:
    """Return the parameter shapes that the model files state, and the whole tensors in these files."""
    shapes_by_name = {name: shape for group in models[0].shapes for name, shape in group.items()}
    by_rank = _by_rank(models)
    pp, tp = degrees(by_rank, ())
    shapes_by_name |= {
        name: shape for ranks in by_rank.values() for group in ranks[0].shapes for name, shape in group.items()
    }
    node = models[0].root.get(keys.INFO)
    logical: dict[str, Shape] = {}
    if tp > 1 and node is not None:
        maps = spread.maps_of(node)
        patterns = Patterns(maps)
        for name in [*shapes_by_name, *models[0].module, *models[0].frozen]:
            matching_patterns = patterns.match(name)
            if matching_patterns:
                logical[name] = maps[matching_patterns[0]][keys.LOGICAL_SHAPE].naturals()
    stage = Stage()
    if pp == 1:
        info = UniversalInfo(node, tp) if node is not None and tp > 1 else None
        stage_faults = Faults()
        empty = () if _is_plain(models[0]) else tuple(shapes_by_name)
        stage = assemble([ModelRank(ranks, {}) for ranks in by_rank.values()], info, stage_faults, empty)
        if stage_faults and info is not None:
            faults.extend(*stage_faults.error().refusals)
    return _Shapes(tp, shapes_by_name, logical), stage


def _is_plain(model: RankModel) -> bool:
    return model.file.rpartition("/")[2].startswith(_PLAIN)


def _by_rank(models: Sequence[RankModel]) -> dict[int, list[RankModel]]:
    """Group model files by model-parallel rank; under ZeRO-3, a group has one file per data-parallel rank."""
    grid = sort_files([model.file.rpartition("/")[2] for model in models], "").model
    by_name = {model.file.rpartition("/")[2]: model for model in models}
    return {rank: [by_name[name] for _, name in sorted(parts.items())] for rank, parts in sorted(grid.items())}


def _settings(inline: NumbersInMemory, prefix: str, checksums: list[Checksum]) -> tuple[CheckedValue, list[str]]:
    file = f"{prefix}{keys.ZERO_FOLDER}/{keys.OPTIMIZER_FILE}"
    if keys.OPTIMIZER_FILE not in inline.listing(f"{prefix}{keys.ZERO_FOLDER}").everything():
        raise refuse(
            "INCOMPLETE", "the file with the optimizer's settings is missing", file=file, hint="Copy the missing file."
        )
    saved = read_saved(inline, file)
    checksums.extend(saved.checksums)
    return CheckedValue(saved.value, file), [file]


def _parameter(
    inline: NumbersInMemory, zero: str, parameter: str, shapes: _Shapes, files: list[str], checksums: list[Checksum],
    hints: dict[str, Hint], faults: Faults,
) -> Iterator[tuple[str, Entry]]:  # fmt: skip
    """Yield (name, tensor) for the files in one parameter's folder; problems of files are added to the faults."""
    for file in inline.listing(f"{zero}/{parameter}").everything():
        full_path = f"{zero}/{parameter}/{file}"
        if not file.endswith(keys.STATE_END):
            continue
        state = file.removesuffix(keys.STATE_END)
        name = parameter if state == keys.FP32 else f"{OPTIMIZER}{parameter}/{state}"
        try:
            saved = read_saved(inline, full_path)
            node = CheckedValue(saved.value, full_path)
            entry = _tensor(TensorReader(inline, full_path), name, node, parameter, state, shapes)
            hint = read_hint(node) if node.is_dict and state == keys.FP32 else None
            check_hint(hint or {}, parameter, entry.shape, full_path)
        except TransaxleError as error:
            faults.extend(*error.refusals)
            continue
        if hint:
            hints[parameter] = hint
        files.append(full_path)
        checksums.extend(saved.checksums)
        yield name, entry


def _check_all_there(entries: Mapping[str, Entry], parameters: Sequence[str], shapes: _Shapes, faults: Faults) -> None:
    """Check that all trained parameters, and all parameters with a folder, have weights; check the shapes of their
    optimizer states.
    """
    trained = [name for name, shape in shapes.on_first_rank.items() if prod(shape)]
    for name in dict.fromkeys((*parameters, *trained)):
        if name not in entries:
            faults.add("INCOMPLETE", f"its file {keys.FP32}{keys.STATE_END} is missing", keys.ZERO_FOLDER, name)
    for name, entry in entries.items():
        parameter, slash, state = name.removeprefix(OPTIMIZER).rpartition("/")
        weights = entries.get(parameter) if slash and name.startswith(OPTIMIZER) else None
        if weights is not None and entry.shape and entry.shape != weights.shape:
            message = f"its {state} has the shape {list(entry.shape)}, but its weights have {list(weights.shape)}"
            faults.add("SHAPE_MISMATCH", message, f"{keys.ZERO_FOLDER}/{parameter}/{state}{keys.STATE_END}", parameter)


def _check_states(entries: Mapping[str, Entry], groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that all parameters of a group have the same optimizer states.

    A parameter without any optimizer state is valid, because the optimizer never updated it.
    """
    states_of: dict[str, set[str]] = {}
    for name in entries:
        parameter, slash, state = name.removeprefix(OPTIMIZER).rpartition("/")
        if slash and name.startswith(OPTIMIZER) and state != keys.STEP:
            states_of.setdefault(parameter, set()).add(state)
    faults = Faults()
    for group in groups:
        states_in_group = {name: frozenset(states_of[name]) for name in group[keys.PARAMS] if name in states_of}
        for name, states in states_in_group.items():
            missing = {
                state
                for other_states in set(states_in_group.values())
                if states < other_states
                for state in other_states - states
            }
            for state in sorted(missing):
                faults.add(
                    "INCOMPLETE",
                    f"its file {state}{keys.STATE_END} is missing, but other parameters of its group have one",
                    keys.ZERO_FOLDER,
                    name,
                )
    if faults:
        raise faults.error()


def _tensor(tensors: TensorReader, name: str, node: CheckedValue, parameter: str, state: str, shapes: _Shapes) -> Entry:
    """Return the tensor in the file of one optimizer state, in the parameter's shape."""
    if state == keys.STEP:
        step_entry = tensors.number(name, node)
        if step_entry is None:
            raise node.fault("expected a number")
        return step_entry
    if node.is_dict:
        if node.get(keys.EXPERT) is not None and node[keys.EXPERT].flag():
            raise refuse(
                "UNSUPPORTED", "it is a stack of experts, which cannot be read yet", file=node.file, tensor=name
            )
        entry = tensors.tensor(name, node[keys.PARAM])
        return _check_shape(entry, parameter, shapes, node.file)
    entry = tensors.tensor(name, node)
    shape = shapes.on_first_rank.get(parameter)
    if shape is None:
        message = f"it is stored flat, and no file {_MODEL} gives its shape"
        raise refuse("INCOMPLETE", message, file=node.file, tensor=name)
    if entry.shape != (prod(shape),):
        message = f"it has the shape {list(entry.shape)}, but a parameter of {list(shape)} has {prod(shape)} elements"
        raise refuse("CORRUPT", message, file=node.file, tensor=name)
    return _view_as(entry, shape)


def _check_shape(entry: Entry, parameter: str, shapes: _Shapes, file: str) -> Entry:
    """Compare a tensor's shape with the model files, and return the tensor in the shape that the parameter has in the
    module.
    """
    first_rank_shape, logical = shapes.on_first_rank.get(parameter), shapes.logical.get(parameter)
    # If there are several ranks, the model files state only the first rank's shape; the metadata may state the whole
    # shape.
    expected_shape = logical if shapes.ranks > 1 else first_rank_shape
    if expected_shape is not None and prod(expected_shape) != prod(entry.shape):
        message = (
            f"it has the shape {list(entry.shape)}, but {list(expected_shape)} by the model file; "
            "DeepSpeed 0.19.8 writes only the first rank's part of parameters that are not trained"
        )
        raise refuse("INCOMPLETE", message, file=file, tensor=entry.name)
    # DeepSpeed stores a fused parameter with a separate dim for its sub-parameters; in the module this dim is merged
    # with the next dim.
    if first_rank_shape is not None and len(first_rank_shape) < len(entry.shape):
        extra = len(entry.shape) - len(first_rank_shape) + 1
        return _view_as(entry, (prod(entry.shape[:extra]), *entry.shape[extra:]) if first_rank_shape else ())
    return entry


def _view_as(entry: Entry, shape: Shape) -> Entry:
    """Return a contiguous tensor with a new shape."""
    extent = entry.extents[0]
    if extent.strides is not None:
        raise refuse(
            "UNSUPPORTED",
            "it is stored with strides; a dense tensor is required here",
            file=extent.file,
            tensor=entry.name,
        )
    return Entry(entry.name, entry.dtype, shape, (Extent((0,) * len(shape), shape, extent.file, extent.offset),))


def _add_steps(entries: dict[str, Entry], settings: CheckedValue, inline: NumbersInMemory) -> None:
    """Add a step tensor for every trained parameter if the checkpoint stores the step only in the settings, as under
    ZeRO-3.
    """
    inner = settings.get(keys.STATE)
    states = None if inner is None else inner.get(keys.STATES)
    first_state = None if states is None else states.get(0)
    step = None if first_state is None else first_state.get(keys.STEP)
    if step is None:
        return
    step_entry = TensorReader(inline, settings.file).number(keys.STEP, step)
    if step_entry is None:
        raise step.fault("expected a number")
    parameters = {name.removeprefix(OPTIMIZER).rpartition("/")[0] for name in entries if name.startswith(OPTIMIZER)}
    for parameter in sorted(parameters):
        name = f"{OPTIMIZER}{parameter}/{keys.STEP}"
        entries.setdefault(name, Entry(name, step_entry.dtype, step_entry.shape, step_entry.extents))
