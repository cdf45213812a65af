"""Opens DeepSpeed checkpoints: joins the files of all ranks into one catalog of whole tensors, without copying bytes.

In the catalog, a tensor under a parameter's name is the weight in full precision, and `optim/<parameter>/<state>` is
optimizer state. Lengths, maps, shapes and metadata of all files must agree, and elements that several ranks store must
be equal; otherwise the checkpoint is refused.

Some parameters are stored multiplied by a factor: in a row-parallel layer the outputs of all ranks are summed, so each
rank stores the bias divided by the number of ranks. Parameters with such a factor are small, so their values are read
and rescaled when the checkpoint is opened, if rescaling is exact.

Without ZeRO, the model file contains the optimizer's whole state, by numbers of parameters. The file does not state
which parameter has which number, and Transaxle never pairs parameters by shape or order; so the tensors of optimizer
state have names with the number: `optim/#<i>/<state>`. The optimizer state `fp32` contains the full-precision copies of
low-precision weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from transaxle.arguments import Weights
from transaxle.axes.geometry import row_major
from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import Checksum, Container, Entry, Extent, NumbersInMemory, Twin, numpy_dtype
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.auto_experts import AutoExperts
from transaxle.formats.deepspeed.files import ModelRank as Rank
from transaxle.formats.deepspeed.files import RankFiles, sort_files
from transaxle.formats.deepspeed.hints import hints_entry, hints_of
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.rank_files import (
    DEGREES,
    RankModel,
    RankShard,
    RankState,
    TensorReader,
    full_spread,
    merge_shards,
    read_layer,
    read_model,
    read_state,
    run_of,
    shard_width,
    state_groups,
)
from transaxle.formats.deepspeed.spread import Cutter, TableCuts, refuse_unknown_cuts
from transaxle.formats.deepspeed.trained_state import (
    OF_ONE_RUN,
    ExpertShares,
    ModelRank,
    Stage,
    add_experts,
    assemble,
    read_trained,
)
from transaxle.formats.deepspeed.universal_record import UniversalInfo
from transaxle.formats.flattened_state import flatten
from transaxle.formats.registry import HERE, sort_sidecars
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import find_copies, read_saved
from transaxle.formats.training_state import LEFT_BEHIND, OPTIMIZER, RUN, Leaf, ParamGroup, arrange, join_path

_LARGEST = 64 << 20


def unscale(entry: Entry, factor: float, inline: NumbersInMemory) -> Entry:
    """Return a tensor divided by the factor that its stored values include.

    Raises:
        Refused: with the code LOSSY if the division is not exact; with the code UNSUPPORTED if the tensor is large, or
            its dtype is not a floating-point dtype.
    """
    dtype = numpy_dtype(entry.dtype)
    if entry.nbytes > _LARGEST or entry.dtype not in ("F32", "F16", "BF16", "F64"):
        message = f"it is stored multiplied by {factor}; {entry.nbytes} bytes of {entry.dtype} cannot be divided again"
        raise refuse("UNSUPPORTED", message, tensor=entry.name)
    stored = _values(entry, dtype, inline)
    with np.errstate(all="ignore"):
        # Divide in extended precision, then round the quotient to the stored dtype.
        divided = (stored.astype(np.longdouble) / np.longdouble(factor)).astype(dtype)
        rescaled = (divided.astype(np.longdouble) * np.longdouble(factor)).astype(dtype)
        # That the rounded product has the same bits is not enough: the division itself must have been exact.
        exact = divided.astype(np.longdouble) * np.longdouble(factor) == stored.astype(np.longdouble)
    if rescaled.tobytes() != stored.tobytes() or not bool(np.all(exact | np.isnan(stored.astype(np.float64)))):
        count = int(np.count_nonzero(~exact))
        message = f"it is stored multiplied by {factor}, and dividing would round {count} of its values"
        raise refuse("LOSSY", message, tensor=entry.name)
    place = inline.add(divided.tobytes())
    extent = Extent((0,) * len(entry.shape), entry.shape, place.file, place.offset)
    return Entry(entry.name, entry.dtype, entry.shape, (extent,))


def _values(entry: Entry, kind: np.dtype, inline: NumbersInMemory) -> np.ndarray:
    """Read a small tensor into memory."""
    out = np.zeros(entry.shape, kind)
    for extent in entry.extents:
        box = tuple(slice(s, s + n) for s, n in zip(extent.start, extent.shape, strict=True))
        strides = extent.strides or row_major(extent.shape)
        out[box] = _extent_view(extent, strides, kind, inline)
    return out


def _extent_view(extent: Extent, strides: tuple[int, ...], kind: np.dtype, inline: NumbersInMemory) -> np.ndarray:

    span = 1 + sum((size - 1) * step for size, step in zip(extent.shape, strides, strict=True))
    data = inline.read(extent.file, extent.offset, span * kind.itemsize)
    steps = [step * kind.itemsize for step in strides]
    return np.ndarray(extent.shape, kind, data, 0, steps)


def read_numbered_state(
    model: RankModel, inline: NumbersInMemory
) -> tuple[Mapping[str, Entry], Mapping[str, str], Sequence[ParamGroup]]:
    """Read the optimizer state in the model file of a run without ZeRO; the file lists this state by parameter number.

    Args:
        model: contents of the model file.
        inline: a storage in memory, to which the numbers that the pickle itself contains are added.

    Returns:
        a dict from name to tensor of optimizer state, a dict from path to description of each unread value, and the
        optimizer's groups.

    Raises:
        Refused: with the code CORRUPT if the state is malformed; with the code UNSUPPORTED if a tensor is not a strided
            view of its storage.
    """
    node = model.root.get(keys.OPTIMIZER)
    if node is None:
        return {}, {}, ()
    reader = TensorReader(inline, model.file)
    leaves = flatten({keys.OPTIMIZER: node.value}, model.file)
    state = arrange(leaves, file=model.file)
    entries: dict[str, Entry] = {}
    left_behind = dict(state.left_behind)
    masters = 0
    for name, leaf in state.leaves.items():
        if leaf.path[1:2] in ((keys.MASTERS,), (keys.MASTERS_FLAT,)):
            name = f"{OPTIMIZER}#{masters}/{keys.FP32}"
            masters += 1
        elif not name.startswith(OPTIMIZER):
            left_behind[join_path(leaf.path)] = "a setting" if leaf.kind == "number" else "a tensor"
            continue
        entries[name] = _entry(reader, name, leaf)
    return entries, left_behind, state.groups


def _entry(reader: TensorReader, name: str, leaf: Leaf) -> Entry:
    node = CheckedValue(leaf.value, reader.file, tuple(map(str, leaf.path)))
    if leaf.kind == "tensor":
        return reader.tensor(name, node)
    number = reader.number(name, node)
    if number is None:
        raise node.fault("expected a number")
    return number


TIES = "ties"
"""Key of the ties (second names of shared weights) in the metadata: a dict from second name to first name."""
SCRIPTS = frozenset({keys.LATEST, keys.LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py"})
"""Names of files next to the step folders that a conversion does not copy, because only DeepSpeed uses them."""
_TIED = "tied_modules."
_LAYER_NUMBER = re.compile(r"(\d{1,6})\.")
_WITHOUT_ZERO = "state of an optimizer without ZeRO"
_MISSING_MASTERS_HINT = "Copy the missing files, or use --weights lp to read the module's own weights in low precision."
_NO_LOW_PRECISION = "ZeRO-3 saves no weights in low precision; the module in its files holds empty placeholders"


@dataclass(slots=True)
class _Assembly:
    """Collects the tensors of all pipeline stages."""

    weights: dict[str, Entry] = field(default_factory=dict)
    low: dict[str, Entry] = field(default_factory=dict)
    states: dict[str, dict[str, Entry]] = field(default_factory=dict)
    twins: list[Twin] = field(default_factory=list)
    numbered: dict[str, Entry] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    scaled: dict[str, float] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    def add(self, stage: Stage, number: int) -> None:
        """Add the tensors of a pipeline stage; a tensor that an earlier stage also has must be equal in the two
        stages.
        """
        for first_entries, stage_entries in ((self.weights, stage.weights), (self.low, stage.low)):
            for name, entry in stage_entries.items():
                self._require_equal(first_entries.setdefault(name, entry), entry, number)
        for name, states in stage.states.items():
            first_states = self.states.setdefault(name, {})
            for state, entry in states.items():
                self._require_equal(first_states.setdefault(state, entry), entry, number)
        self.twins.extend(stage.twins)
        self.scaled |= stage.scaled

    def _require_equal(self, first_entry: Entry, entry: Entry, number: int) -> None:
        if first_entry is not entry:
            self.twins.append(
                Twin(first_entry, entry, f"pipeline stage {number} and an earlier one hold the same tensor")
            )


def open_deepspeed(
    storage: Storage, path: str, member: str, weights: Weights = "fp32", cutter: Cutter = refuse_unknown_cuts
) -> Container:
    """Open the checkpoint in one step folder of a DeepSpeed run.

    Args:
        storage: storage that reads the checkpoint's files.
        path: the checkpoint's path as the user typed it.
        member: name of the step folder; `HERE` if the path is the step folder itself.
        weights: which values get the plain parameter names: the optimizer's master weights, or the module's
            low-precision weights.
        cutter: function that finds how parameters are cut over tensor-parallel ranks; called if the files do not state
            the cuts.

    Raises:
        Refused: with every problem in the files, and codes such as UNSAFE_PICKLE, CORRUPT, INCOMPLETE and UNSUPPORTED.
        StorageError: with the code IO if a file cannot be read.
    """
    prefix = "" if member == HERE else f"{member}/"
    listing = storage.listing(prefix.rstrip("/"))
    files = sort_files(listing.everything(), path)
    inline = NumbersInMemory(storage)
    faults = Faults()
    models, states, layers, checksums = _read(inline, files, prefix, faults)
    models = _add_expert_tensors(inline, models, files, prefix, checksums, faults)
    if weights != "lp" and not files.optimizer and any(model.shapes for ranks in models.values() for model in ranks):
        message = f"the run used ZeRO, which stores its weights in files *{keys.OPTIM_END}, and these are missing"
        faults.add("INCOMPLETE", message, prefix.rstrip("/") or path, hint=_MISSING_MASTERS_HINT)
    if faults:
        raise faults.error()
    check_one_save([model for ranks in models.values() for model in ranks])
    _refuse_copies(inline, models, states)
    pp, tp = degrees(models, files.layers.values(), len(files.optimizer.get(0, {})))
    catalog = _Assembly()
    table_cuts = _table_cuts(models, layers, storage, cutter) if tp > 1 else None
    # Model-parallel ranks are numbered stage by stage: stage * tensor-parallel degree + tensor-parallel rank.
    for stage in range(pp):
        numbers = [stage * tp + rank for rank in range(tp)]
        catalog.add(_stage([(models[n], states.get(n, ())) for n in numbers], table_cuts, faults), stage)
    catalog.twins.extend(_steps_of_stages([states[stage * tp][0] for stage in range(pp) if states.get(stage * tp)]))
    # Layer files are added last, because the full-precision weights in optimizer files have precedence over their
    # weights.
    _add_layers(catalog, layers, _info(models[0], table_cuts, tp), tp, faults)
    if pp > 1 or layers:
        _check_layers(catalog, models, layers, faults)
    if faults:
        raise faults.error()
    _add_aliases(catalog, models)
    _restore_module(catalog, models[0][0].auto, path, faults)
    if faults:
        raise faults.error()
    left_behind = _add_numbered(catalog, models, states, inline, files, prefix)
    entries = _entries(catalog, inline, weights, files)
    size = {f"{prefix}{name}": storage.size(f"{prefix}{name}") for name in files.all}
    sidecars = sort_sidecars(storage, size)
    carried = tuple(name for name in sidecars.carried if name not in SCRIPTS and name not in size)
    left_alone = tuple(sorted({*sidecars.ignored, *(set(sidecars.carried) & SCRIPTS)} - {prefix}))
    metadata = _metadata(catalog, models, states, (pp, tp), left_behind)
    return Container(
        keys.FORMAT, path, inline, entries, size, metadata, carried, left_alone, tuple(checksums), tuple(catalog.twins)
    )


_Models = Mapping[Rank, Sequence[RankModel]]
_States = Mapping[Rank, Sequence[RankState]]
_Layers = Mapping[int, Sequence[Mapping[str, Entry]]]


def _read(
    inline: NumbersInMemory, files: RankFiles, prefix: str, faults: Faults
) -> tuple[_Models, _States, _Layers, list[Checksum]]:
    """Read the model, optimizer and layer files, and collect the checksums in these files; a file that cannot be read
    is added to the faults.
    """
    models: dict[Rank, list[RankModel]] = {}
    states: dict[Rank, list[RankState]] = {}
    layers: dict[int, list[Mapping[str, Entry]]] = {}
    checksums: list[Checksum] = []
    for rank, parts in sorted(files.model.items()):
        for _, name in sorted(parts.items()):
            try:
                model = read_model(inline, prefix + name)
            except TransaxleError as error:
                faults.extend(*error.refusals)
                continue
            models.setdefault(rank, []).append(model)
            checksums.extend(model.checksums)
    for rank, parts in sorted(files.optimizer.items()):
        for _, name in sorted(parts.items()):
            try:
                state = read_state(inline, prefix + name)
            except TransaxleError as error:
                faults.extend(*error.refusals)
                continue
            states.setdefault(rank, []).append(state)
            checksums.extend(state.checksums)
    for number, parts in sorted(files.layers.items()):
        for _, name in sorted(parts.items()):
            try:
                tensors, layer_checksums = read_layer(inline, prefix + name)
            except TransaxleError as error:
                faults.extend(*error.refusals)
                continue
            layers.setdefault(number, []).append(tensors)
            checksums.extend(layer_checksums)
    return models, states, layers, checksums


def _add_expert_tensors(
    inline: NumbersInMemory, models: _Models, files: RankFiles, prefix: str, checksums: list[Checksum], faults: Faults
) -> _Models:
    """Return the contents of the model files, each completed with the tensors from the expert files of the same
    rank.
    """
    models_by_rank = dict(models)
    for rank, expert_files in files.experts.items():
        read: dict[str, Mapping[str, Entry]] = {}
        for name in expert_files.values():
            try:
                read[name], file_checksums = read_layer(inline, prefix + name)
            except TransaxleError as error:
                faults.extend(*error.refusals)
                continue
            checksums.extend(file_checksums)
        if rank in models_by_rank:
            models_by_rank[rank] = [add_experts(model, expert_files, read, faults) for model in models_by_rank[rank]]
        else:
            faults.add(
                "INCOMPLETE", f"there are expert files of model rank {rank}, but its model file is missing", inline.path
            )
    return models_by_rank


def check_one_save(models: Sequence[RankModel]) -> None:
    """Check that all model files were saved after the same number of steps.

    Raises:
        Refused: with the code CORRUPT if the folder mixes files of two saves.
    """
    first_file, first_steps = "", None
    for model in models:
        steps = model.root.get(keys.GLOBAL_STEPS)
        if steps is None:
            continue
        if first_steps is not None and steps.value != first_steps:
            message = f"it was saved after {steps.value} steps, but {first_file} after {first_steps}"
            raise refuse("CORRUPT", message, file=model.file, hint=OF_ONE_RUN)
        first_file, first_steps = model.file, steps.value


def _refuse_copies(storage: Storage, models: _Models, states: _States) -> None:
    """Check that no two ranks' optimizer files of ZeRO-3 are identical, because these files do not record which rank
    wrote them.

    Raises:
        Refused: with the code CORRUPT if two ranks' files are identical.
    """
    faults = Faults()
    for number, parts in states.items():
        sizes = [
            prod(shape) for model in models.get(number, ())[:1] for group in model.shapes for shape in group.values()
        ]
        widths = [(size, shard_width(size, len(parts))) for size in sizes]
        # The files of the last ranks may contain only padding, and are equal then.
        own_parts = [
            each for at, each in enumerate(parts) if each.stage == 3 and any(size > at * n for size, n in widths)
        ]
        for file, first in find_copies(storage, [(each.file, each.checksums) for each in own_parts]):
            message = f"it is a copy of {first}, though each rank has its own part of the optimizer's buffers"
            faults.add("CORRUPT", message, file, hint="Copy this rank's own file from where it was saved.")
    if faults:
        raise faults.error()


def _steps_of_stages(states: Sequence[RankState]) -> Iterator[Twin]:
    """Yield pairs of steps that must be equal: the step of a group in the first pipeline stage, and its step in a later
    stage.

    Args:
        states: contents of one optimizer file of each pipeline stage.
    """
    for state in states[1:]:
        if len(state.groups) != len(states[0].groups):
            continue
        for number, (group, first_group) in enumerate(zip(state.groups, states[0].groups, strict=True)):
            step, first_step = group.numbers.get(keys.STEP), first_group.numbers.get(keys.STEP)
            if step is not None and first_step is not None:
                yield Twin(first_step, step, f"step of group {number} is one number in all pipeline stages", dates=True)


def degrees(models: _Models, layers: Collection[Mapping[int, str]], parts: int = 0) -> tuple[int, int]:
    """Return the pipeline-parallel degree and the tensor-parallel degree; their product is the number of model-parallel
    ranks.

    Args:
        models: model-parallel rank -> contents of its model files.
        layers: pipeline layer -> tensor-parallel rank -> name of the layer file.
        parts: number of data-parallel ranks with optimizer files; 0 if there are no such files.

    Raises:
        Refused: with the code CORRUPT if the files contradict each other; with the code INCOMPLETE if files of ranks
            are missing.
    """
    first_model = models[0][0]
    dimensions = first_model.root.get(keys.DIMENSIONS)
    ranks = len(models)
    if dimensions is not None:
        pp, tp = (dimensions[key].natural() for key in (keys.PP_DEGREE, keys.TP_DEGREE))
    else:  # files of earlier versions do not state the degree, but each layer has one file per tensor-parallel rank
        tp = len(next(iter(layers))) if layers else ranks
        pp = ranks // max(tp, 1)
    if pp * tp != ranks:
        message = f"the run had {pp} pipeline stages of {tp} tensor-parallel ranks, but {ranks} ranks have files"
        if pp * tp > ranks:
            raise refuse("INCOMPLETE", f"{message}; mp_rank_{ranks:02d} is missing", file=first_model.file)
        raise refuse("CORRUPT", message, file=first_model.file)
    world = first_model.root.get(keys.DP_WORLD)
    if world is not None and parts and world.natural() != parts:
        message = f"the run had {world.natural()} data-parallel ranks, but there are optimizer files of {parts}"
        if world.natural() > parts:
            raise refuse("INCOMPLETE", f"{message}; zero_pp_rank_{parts} is missing", file=first_model.file)
        raise refuse("CORRUPT", message, file=first_model.file)
    return pp, tp


def _table_cuts(models: _Models, layers: _Layers, storage: Storage, cutter: Cutter) -> TableCuts | None:
    """Return the tensor-parallel cuts according to the family's table of tensor names; None if all files have metadata
    about the cuts.
    """
    firsts = [ranks[0] for _, ranks in sorted(models.items())]
    # The run itself wrote the metadata, so it has precedence over any table of tensor names.
    if all(model.root.get(keys.INFO) is not None for model in firsts):
        return None
    names = dict.fromkeys(
        name
        for model in firsts
        for group in (model.module, *model.shapes, model.frozen)
        for name in group
        if name not in model.buffers
    )
    names |= dict.fromkeys(f"{number}.{name}" for number, ranks in layers.items() for name in ranks[0])
    return TableCuts(cutter, storage, tuple(names))


def _stage(
    ranks: Sequence[tuple[Sequence[RankModel], Sequence[RankState]]], table_cuts: TableCuts | None, faults: Faults
) -> Stage:
    """Assemble the tensors of one pipeline stage from its tensor-parallel ranks."""
    model_ranks = []
    twins: list[Twin] = []
    for models, states in ranks:
        try:
            trained_parameters, number_twins = read_trained(models[0], states) if states else ({}, [])
        except TransaxleError as error:
            faults.extend(*error.refusals)
            continue
        twins.extend(number_twins)
        model_ranks.append(ModelRank(models, trained_parameters))
    if len(model_ranks) < len(ranks):
        return Stage()
    try:
        stage = assemble(model_ranks, _info(model_ranks[0].models, table_cuts, len(model_ranks)), faults)
    except TransaxleError as error:
        faults.extend(*error.refusals)
        return Stage()
    stage.twins.extend(twins)
    return stage


def _info(models: Sequence[RankModel], table_cuts: TableCuts | None, tp: int) -> UniversalInfo | TableCuts | None:
    """Return the source of tensor-parallel cuts: the metadata in the files, or the family's table of tensor names."""
    node = models[0].root.get(keys.INFO)
    return table_cuts if node is None or tp == 1 else UniversalInfo(node, tp)


def _add_layers(
    catalog: _Assembly, layers: _Layers, info: UniversalInfo | TableCuts | None, tp: int, faults: Faults
) -> None:
    """Add the tensors in the layer files of a pipeline: low-precision weights, buffers, and frozen parameters."""
    for number, ranks in layers.items():
        if len(ranks) != tp:
            message = f"it has files of {len(ranks)} tensor-parallel ranks; the run had {tp}"
            faults.add("INCOMPLETE", message, f"layer {number}")
            continue
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            full_name = f"{number}.{name}"
            own_weight = catalog.weights.get(full_name)
            shared = next(
                (weight for weight in catalog.weights if weight.startswith(_TIED) and weight.endswith(f".{name}")), None
            )
            # A tied layer's file contains the shared weight a second time, but only the weight under the tied name is
            # trained.
            tied = own_weight is None and shared is not None and not _trains(catalog, number)
            entry_name = shared if tied and shared is not None else full_name
            if tied:
                catalog.ties.setdefault(full_name, entry_name)
            if tied and entry_name in catalog.low:
                continue
            try:
                entry, twins = _merge_layer_tensor(entry_name, [rank.get(name) for rank in ranks], info)
            except TransaxleError as error:
                faults.extend(*error.refusals)
                continue
            catalog.twins.extend(twins)
            catalog.low[entry_name] = entry
            catalog.weights.setdefault(entry_name, entry)


def _check_layers(catalog: _Assembly, models: _Models, layers: _Layers, faults: Faults) -> None:
    """Add a fault for each pipeline layer that has parameters but no file."""
    frozen = (name for ranks in models.values() for name in ranks[0].frozen)
    numbers = {int(match[1]) for name in (*catalog.states, *frozen) if (match := _LAYER_NUMBER.match(name))}
    for number in sorted(numbers - layers.keys()):
        faults.add("INCOMPLETE", "the layer has parameters, but its file is missing", f"layer {number}")


def _merge_layer_tensor(
    name: str, rank_entries: Sequence[Entry | None], info: UniversalInfo | TableCuts | None
) -> tuple[Entry, list[Twin]]:
    """Merge a layer's tensor from the layer files of the tensor-parallel ranks."""
    shards = [RankShard(entry.dtype, entry.shape, entry.extents, "") for entry in rank_entries if entry is not None]
    if len(shards) < len(rank_entries):
        raise refuse(
            "INCOMPLETE",
            f"it is missing in the files of {len(rank_entries) - len(shards)} of {len(rank_entries)} ranks",
            tensor=name,
        )
    spread = full_spread(shards) if info is None else info.spread(name, tuple(shard.shape for shard in shards))
    return merge_shards(name, shards, spread)


def _trains(catalog: _Assembly, layer: int) -> bool:
    """Return whether any parameter of a layer is trained under the layer's own name."""
    return any(name.startswith(f"{layer}.") for name in catalog.states)


def _with_all_experts(model: RankModel, states: Sequence[RankState]) -> RankModel:
    return model if states[0].stage == 3 else ExpertShares(model, states).with_all_experts()


def _add_aliases(catalog: _Assembly, models: _Models) -> None:
    """Add the second names of shared parameters to the collected tensors."""
    for ranks in models.values():
        for model in ranks:
            for alias, name in model.shared.items():
                if name in catalog.weights and alias not in catalog.weights:
                    catalog.ties[alias] = name
                    for entries in (catalog.weights, catalog.low):
                        if name in entries:
                            entries[alias] = entries[name]


def _restore_module(catalog: _Assembly, auto: AutoExperts, path: str, faults: Faults) -> None:
    """Give the collected tensors the names and shapes that the module had before AutoEP replaced parts of it."""
    if not auto.mixtures:
        return
    catalog.twins.extend(auto.second_routers(catalog.low))
    catalog.weights = auto.restore(catalog.weights, path, faults)
    catalog.low = auto.restore(catalog.low, path, faults)
    by_state: dict[str, dict[str, Entry]] = {}
    for parameter, states in catalog.states.items():
        for state, entry in states.items():
            by_state.setdefault(state, {})[parameter] = entry
    catalog.states = {}
    for state, entries in by_state.items():
        for parameter, entry in auto.restore(entries, path, faults).items():
            catalog.states.setdefault(parameter, {})[state] = entry


def _entries(catalog: _Assembly, inline: NumbersInMemory, weights: Weights, files: RankFiles) -> dict[str, Entry]:
    if weights == "lp" and files.zero3:
        raise refuse("UNSUPPORTED", _NO_LOW_PRECISION, file=inline.path, hint="Leave out --weights lp.")
    chosen = catalog.low if weights == "lp" else catalog.weights
    for name in catalog.states if weights == "lp" else ():
        if name not in chosen and name in catalog.weights and catalog.weights[name].nbytes:
            message = "no file holds this parameter in low precision"
            raise refuse("INCOMPLETE", message, file=inline.path, tensor=name, hint="Leave out --weights lp.")
    entries = {name: Entry(name, entry.dtype, entry.shape, entry.extents) for name, entry in chosen.items()}
    for name, factor in catalog.scaled.items():
        if name in entries:
            entries[name] = unscale(entries[name], factor, inline)
    for parameter, states in catalog.states.items():
        for state, entry in states.items():
            name = f"{OPTIMIZER}{parameter}/{state}"
            if name in entries:
                raise refuse("NAME_COLLISION", f"a parameter has the same name as a state of {parameter}", tensor=name)
            entries[name] = Entry(name, entry.dtype, entry.shape, entry.extents)
    # Optimizer state of a run without ZeRO is either in model files or in numbered files.
    entries |= catalog.numbered
    return {name: entry for name, entry in entries.items() if prod(entry.shape) or entry.extents or entry.shape}


def _add_numbered(
    catalog: _Assembly, models: _Models, states: _States, inline: NumbersInMemory, files: RankFiles, prefix: str
) -> dict[str, str]:
    """Add the optimizer state of a run without ZeRO; return path -> description of each unread value.

    Each model-parallel rank numbers its parameters separately from the other ranks. With several model-parallel ranks
    it is therefore unknown which shards belong to one parameter, and no optimizer state is read.
    """
    # With ZeRO, these files contain no state: it is in the optimizer files of data-parallel ranks.
    numbered = [name for name in files.numbered if not states or _has_state(inline, f"{prefix}{name}")]
    left_behind = dict.fromkeys(numbered, f"{_WITHOUT_ZERO}, of one expert-parallel rank")
    if states or models[0][0].root.get(keys.OPTIMIZER) is None:
        return left_behind
    if len(models) > 1 or files.numbered:
        return left_behind | {keys.OPTIMIZER: f"{_WITHOUT_ZERO}, of one of several ranks"}
    entries, unread_leaves, groups = read_numbered_state(models[0][0], inline)
    catalog.numbered |= entries
    catalog.groups.extend(groups)
    return {**left_behind, **unread_leaves}


def _has_state(inline: NumbersInMemory, file: str) -> bool:
    """Return whether the optimizer file of an expert-parallel rank contains optimizer state."""
    return CheckedValue(read_saved(inline, file).value, file).get(keys.OPTIMIZER) is not None


def _metadata(
    catalog: _Assembly,
    models: _Models,
    states: _States,
    degrees_pp_tp: tuple[int, int],
    left_behind: Mapping[str, str],
) -> dict[str, Any]:
    unread = {
        path: description for ranks in states.values() for state in ranks for path, description in state.unread.items()
    }
    unread |= left_behind
    firsts = [ranks[0] for _, ranks in sorted(models.items())]
    states_by_rank = [ranks for _, ranks in sorted(states.items())]
    facts = run_of(firsts[0], states_by_rank[0][0].root if states_by_rank else None)
    facts |= hints_entry(hints_of(firsts))
    metadata: dict[str, Any] = {RUN: facts}
    facts[DEGREES] = {
        "pp": degrees_pp_tp[0],
        "tp": degrees_pp_tp[1],
        "dp": max(map(len, states_by_rank), default=1),
    }
    if states_by_rank:
        facts[keys.ZERO_STAGE] = states_by_rank[0][0].stage
        groups = state_groups(
            states_by_rank, [_with_all_experts(models[rank][0], states[rank]) for rank in sorted(states)]
        )
        auto = firsts[0].auto
        metadata[keys.GROUPS] = [{**group, keys.PARAMS: auto.names_before(group[keys.PARAMS])} for group in groups]
    if catalog.groups:
        metadata[keys.GROUPS] = catalog.groups
    if catalog.ties:
        metadata[TIES] = dict(catalog.ties)
    if unread:
        metadata[LEFT_BEHIND] = unread
    return metadata
