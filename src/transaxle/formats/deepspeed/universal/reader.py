"""Opening universal checkpoints: one folder a parameter, one file a state.

DeepSpeed writes two variants. Below ZeRO-3, and under tensor parallelism, a file holds a dict with the tensor in its
shape; of plain ZeRO-3 it holds the bare flat tensor, whose shape is in the model files beside. What is not trained is
there in the one and only in the model files in the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from transaxle.arguments import Weights
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog.catalog import Checksum, Container, Entry, Extent
from transaxle.formats.catalog.inline import NumbersInMemory
from transaxle.formats.catalog.problem_list import Faults
from transaxle.formats.catalog.sidecar_files import sort_sidecars
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.checked_value import Node
from transaxle.formats.deepspeed.files import sort_files
from transaxle.formats.deepspeed.hints import Hint, check_hint, hint_in, told_by
from transaxle.formats.deepspeed.metadata import affine
from transaxle.formats.deepspeed.metadata.name_patterns import Patterns
from transaxle.formats.deepspeed.metadata.universal_info import Info
from transaxle.formats.deepspeed.reader import SCRIPTS, TIES, degrees
from transaxle.formats.deepspeed.zero.flat import Shape
from transaxle.formats.deepspeed.zero.ranks import RankModel, Tensors, read_model
from transaxle.formats.deepspeed.zero.stage import ModelRank, Stage, assemble
from transaxle.formats.deepspeed.zero.training_run import groups_of, run_of
from transaxle.formats.format import HERE
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import read_saved
from transaxle.formats.training_state.state import OPTIMIZER, RUN

_MODEL = f"*{keys.MODEL_END}"
_PLAIN = "mp_rank_"
"""How the names of model files begin, unless they are cut over data-parallel ranks (ZeRO-3)."""


@dataclass(frozen=True, slots=True)
class _Shapes:
    """What the model files say of the shapes of parameters."""

    ranks: int
    """Tensor-parallel degree of the run that was converted."""
    said: Mapping[str, Shape]
    """Parameter -> its shape on the first rank."""
    logical: Mapping[str, Shape]
    """Parameter -> its whole shape, where the metadata gives it."""


def open_universal(storage: Storage, path: str, member: str, weights: Weights = "fp32") -> Container:
    """Open a universal checkpoint.

    Args:
        storage: where the files are.
        path: what the user typed.
        member: folder of the step; `HERE` for the path itself.
        weights: the optimizer's, or the module's own in low precision, where its model files hold them whole.

    Raises:
        Refused: everything that is wrong with its files: UNSAFE_PICKLE, CORRUPT, INCOMPLETE, UNSUPPORTED, ….
        StorageError: IO.
    """
    prefix = "" if member == HERE else f"{member}/"
    inline = NumbersInMemory(storage)
    faults = Faults()
    checksums: list[Checksum] = []
    models = _models(inline, storage, prefix, checksums, faults)
    if faults:
        raise faults.error()
    shapes, stage = _beside(models, faults)
    settings, files = _settings(inline, prefix, checksums)
    entries: dict[str, Entry] = {}
    hints: dict[str, Hint] = {}
    parameters = storage.listing(f"{prefix}{keys.ZERO_FOLDER}").folders
    for parameter in parameters:
        found = _parameter(inline, f"{prefix}{keys.ZERO_FOLDER}", parameter, shapes, files, checksums, hints, faults)
        entries |= found
    if not parameters:
        faults.add("INCOMPLETE", "it holds no parameters", f"{prefix}{keys.ZERO_FOLDER}")
    if not faults:
        _check_all_there(entries, parameters, shapes, faults)
    if faults:
        raise faults.error()
    _add_step(entries, settings, inline)
    trained = {name for model in models for shapes_of in model.shapes for name in shapes_of}
    rest = {name: entry for name, entry in stage.weights.items() if name not in entries and name not in trained}
    if weights == "lp":
        rest = {name: entry for name, entry in stage.low.items() if prod(entry.shape)}
        missing = [name for name in entries if not name.startswith(OPTIMIZER) and name not in rest]
        if missing:
            message = f"its model files do not hold {missing[0]} in low precision"
            raise refuse("UNSUPPORTED", message, file=path, hint="Leave out --weights lp.")
    entries |= {name: Entry(name, entry.dtype, entry.shape, entry.extents) for name, entry in rest.items()}
    ties = {alias: name for model in models for alias, name in model.shared.items() if name in entries}
    for alias, name in ties.items():
        entries.setdefault(alias, Entry(alias, entries[name].dtype, entries[name].shape, entries[name].extents))
    files += [model.file for model in models]
    sizes = {name: storage.size(name) for name in files}
    around = sort_sidecars(storage, sizes)
    carried = tuple(name for name in around.carried if name not in SCRIPTS and name not in sizes)
    left = tuple(sorted({*around.ignored, *(set(around.carried) & SCRIPTS)} - {prefix}))
    metadata: dict[str, Any] = {RUN: {**run_of(models[0], settings), **told_by(hints)}}
    listed = settings.get(keys.GROUPS)
    if listed is not None:
        metadata[keys.GROUPS] = groups_of(listed.list(), models)
        _check_states(entries, metadata[keys.GROUPS])
    if ties:
        metadata[TIES] = ties
    return Container(
        keys.UNIVERSAL, path, inline, entries, sizes, metadata, carried, left, tuple(checksums), tuple(stage.twins)
    )


def _models(
    inline: NumbersInMemory, storage: Storage, prefix: str, checksums: list[Checksum], faults: Faults
) -> list[RankModel]:
    """Read the model files that lie beside; one of each rank is enough."""
    names = [name for name in storage.listing(prefix.rstrip("/")).everything() if name.endswith(keys.MODEL_END)]
    plain = [name for name in names if name.startswith(_PLAIN)]
    try:
        grid = sort_files(plain or names, prefix).model
    except TransaxleError as error:
        faults.extend(*error.refusals)
        return []
    found = []
    for _, parts in sorted(grid.items()):
        for _, name in sorted(parts.items()):
            try:
                found.append(read_model(inline, prefix + name))
                checksums.extend(found[-1].checksums)
            except TransaxleError as error:
                faults.extend(*error.refusals)
    return found


def _beside(models: Sequence[RankModel], faults: Faults) -> tuple[_Shapes, Stage]:
    """Return what the model files say of shapes, and the tensors that they hold whole."""
    said = {name: shape for group in models[0].shapes for name, shape in group.items()}
    by_rank = _by_rank(models)
    pp, tp = degrees(by_rank, ())
    said |= {name: shape for ranks in by_rank.values() for group in ranks[0].shapes for name, shape in group.items()}
    node = models[0].root.get(keys.INFO)
    logical: dict[str, Shape] = {}
    if tp > 1 and node is not None:
        maps = affine.maps_of(node)
        patterns = Patterns(maps)
        for name in [*said, *models[0].module, *models[0].frozen]:
            found = patterns.match(name)
            if found:
                logical[name] = maps[found[0]][keys.LOGICAL_SHAPE].naturals()
    stage = Stage()
    if pp == 1:
        info = Info(node, tp) if node is not None and tp > 1 else None
        held = Faults()
        empty = () if _is_plain(models[0]) else tuple(said)
        stage = assemble([ModelRank(ranks, {}) for ranks in by_rank.values()], info, held, empty)
        if held and info is not None:
            faults.extend(*held.error().refusals)
    return _Shapes(tp, said, logical), stage


def _is_plain(model: RankModel) -> bool:
    return model.file.rpartition("/")[2].startswith(_PLAIN)


def _by_rank(models: Sequence[RankModel]) -> dict[int, list[RankModel]]:
    """Group model files by the rank of the model; those of ZeRO-3 are one per data-parallel rank."""
    grid = sort_files([model.file.rpartition("/")[2] for model in models], "").model
    by_name = {model.file.rpartition("/")[2]: model for model in models}
    return {rank: [by_name[name] for _, name in sorted(parts.items())] for rank, parts in sorted(grid.items())}


def _settings(inline: NumbersInMemory, prefix: str, checksums: list[Checksum]) -> tuple[Node, list[str]]:
    file = f"{prefix}{keys.ZERO_FOLDER}/{keys.OPTIMIZER_FILE}"
    if keys.OPTIMIZER_FILE not in inline.listing(f"{prefix}{keys.ZERO_FOLDER}").everything():
        raise refuse("INCOMPLETE", "the file with its settings is missing", file=file, hint="Copy the missing file.")
    saved = read_saved(inline, file)
    checksums.extend(saved.checksums)
    return Node(saved.value, file), [file]


def _parameter(
    inline: NumbersInMemory, zero: str, parameter: str, shapes: _Shapes, files: list[str], checksums: list[Checksum],
    hints: dict[str, Hint], faults: Faults,
) -> Iterator[tuple[str, Entry]]:  # fmt: skip
    """Yield the tensors of one parameter's folder."""
    for file in inline.listing(f"{zero}/{parameter}").everything():
        whole = f"{zero}/{parameter}/{file}"
        if not file.endswith(keys.STATE_END):
            continue
        state = file.removesuffix(keys.STATE_END)
        name = parameter if state == keys.FP32 else f"{OPTIMIZER}{parameter}/{state}"
        try:
            saved = read_saved(inline, whole)
            node = Node(saved.value, whole)
            entry = _tensor(Tensors(inline, whole), name, node, parameter, state, shapes)
            hint = hint_in(node) if node.is_dict and state == keys.FP32 else None
            check_hint(hint or {}, parameter, entry.shape, whole)
        except TransaxleError as error:
            faults.extend(*error.refusals)
            continue
        if hint:
            hints[parameter] = hint
        files.append(whole)
        checksums.extend(saved.checksums)
        yield name, entry


def _check_all_there(entries: Mapping[str, Entry], parameters: Sequence[str], shapes: _Shapes, faults: Faults) -> None:
    """Check that every parameter that is trained, or of which there is anything, has its weights."""
    trained = [name for name, shape in shapes.said.items() if prod(shape)]
    for name in dict.fromkeys((*parameters, *trained)):
        if name not in entries:
            faults.add("INCOMPLETE", f"there is no {keys.FP32}{keys.STATE_END} of it", keys.ZERO_FOLDER, name)
    for name, entry in entries.items():
        parameter, slash, state = name.removeprefix(OPTIMIZER).rpartition("/")
        held = entries.get(parameter) if slash and name.startswith(OPTIMIZER) else None
        if held is not None and entry.shape and entry.shape != held.shape:
            message = f"its {state} has the shape {list(entry.shape)}, its weights have {list(held.shape)}"
            faults.add("SHAPE_MISMATCH", message, f"{keys.ZERO_FOLDER}/{parameter}/{state}{keys.STATE_END}", parameter)


def _check_states(entries: Mapping[str, Entry], groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that no parameter has a part of the states only that another one of its group has.

    A parameter without any was never updated, which is no fault.
    """
    held: dict[str, set[str]] = {}
    for name in entries:
        parameter, slash, state = name.removeprefix(OPTIMIZER).rpartition("/")
        if slash and name.startswith(OPTIMIZER) and state != keys.STEP:
            held.setdefault(parameter, set()).add(state)
    faults = Faults()
    for group in groups:
        mine = {name: frozenset(held[name]) for name in group[keys.PARAMS] if name in held}
        for name, states in mine.items():
            lacking = {state for others in set(mine.values()) if states < others for state in others - states}
            for state in sorted(lacking):
                faults.add("INCOMPLETE", f"there is no {state}{keys.STATE_END} of it", keys.ZERO_FOLDER, name)
    if faults:
        raise faults.error()


def _tensor(tensors: Tensors, name: str, node: Node, parameter: str, state: str, shapes: _Shapes) -> Entry:
    """Return the tensor of one file, in the parameter's own shape."""
    if state == keys.STEP:
        found = tensors.number(name, node)
        if found is None:
            raise node.fault("a number was expected")
        return found
    if node.is_dict:
        if node.get(keys.EXPERT) is not None and node[keys.EXPERT].flag():
            raise refuse("UNSUPPORTED", "it is stacked over experts", file=node.file, tensor=name)
        entry = tensors.tensor(name, node[keys.PARAM])
        return _checked(entry, parameter, shapes, node.file)
    entry = tensors.tensor(name, node)
    shape = shapes.said.get(parameter)
    if shape is None:
        message = f"it is a flat tensor, and no file {_MODEL} says what its shape is"
        raise refuse("INCOMPLETE", message, file=node.file, tensor=name)
    if entry.shape != (prod(shape),):
        message = f"it has {list(entry.shape)} elements, a parameter of {list(shape)} has {prod(shape)}"
        raise refuse("CORRUPT", message, file=node.file, tensor=name)
    return _viewed(entry, shape)


def _checked(entry: Entry, parameter: str, shapes: _Shapes, file: str) -> Entry:
    """Hold a tensor's shape against what the model files say."""
    said, logical = shapes.said.get(parameter), shapes.logical.get(parameter)
    want = logical if shapes.ranks > 1 else said
    if want is not None and prod(want) != prod(entry.shape):
        message = (
            f"it has the shape {list(entry.shape)}, and the model file says {list(want)}; "
            "DeepSpeed 0.19.8 writes the first rank's part only of what is not trained"
        )
        raise refuse("INCOMPLETE", message, file=file, tensor=entry.name)
    if said is not None and len(said) < len(entry.shape):
        extra = len(entry.shape) - len(said) + 1
        return _viewed(entry, (prod(entry.shape[:extra]), *entry.shape[extra:]) if said else ())
    return entry


def _viewed(entry: Entry, shape: Shape) -> Entry:
    """Return a dense tensor in another shape."""
    extent = entry.extents[0]
    if extent.strides is not None:
        raise refuse("UNSUPPORTED", "it is no dense tensor", file=extent.file, tensor=entry.name)
    return Entry(entry.name, entry.dtype, shape, (Extent((0,) * len(shape), shape, extent.file, extent.offset),))


def _add_step(entries: dict[str, Entry], settings: Node, inline: NumbersInMemory) -> None:
    """Give every trained parameter its step where only the settings have it, as those of ZeRO-3 do."""
    inner = settings.get(keys.STATE)
    states = None if inner is None else inner.get(keys.STATES)
    first = None if states is None else states.get(0)
    step = None if first is None else first.get(keys.STEP)
    if step is None:
        return
    found = Tensors(inline, settings.file).number(keys.STEP, step)
    if found is None:
        raise step.fault("a number was expected")
    parameters = {name.removeprefix(OPTIMIZER).rpartition("/")[0] for name in entries if name.startswith(OPTIMIZER)}
    for parameter in sorted(parameters):
        name = f"{OPTIMIZER}{parameter}/{keys.STEP}"
        entries.setdefault(name, Entry(name, found.dtype, found.shape, found.extents))
