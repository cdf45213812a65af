"""Opening DeepSpeed checkpoints: the files of all ranks as one catalog of whole tensors, read where they lie.

A plain name is a weight in full precision, `optim/<parameter>/<state>` its optimizer state. Nothing is joined by guess:
lengths, maps, shapes and metadata of all files must agree, and what several ranks hold must be equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import Checksum, Container, Entry, Twin
from transaxle.formats.company import company
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.files import ModelRank as Rank
from transaxle.formats.deepspeed.files import RankFiles, sort_files
from transaxle.formats.deepspeed.info import Info
from transaxle.formats.deepspeed.ranks import RankModel, RankState, read_layer, read_model, read_state
from transaxle.formats.deepspeed.run import DEGREES, RUN, run_of, state_groups
from transaxle.formats.deepspeed.scale import unscaled
from transaxle.formats.deepspeed.shard import Shard, merged
from transaxle.formats.deepspeed.spread import whole
from transaxle.formats.deepspeed.stage import ModelRank, Stage, assemble
from transaxle.formats.deepspeed.trained import trained
from transaxle.formats.faults import Faults
from transaxle.formats.inline import Inline
from transaxle.formats.state import LEFT_BEHIND, OPTIMIZER
from transaxle.formats.storage import Storage

Weights = Literal["fp32", "lp"]
HERE = "."
"""Candidate of a path that is itself the folder of one step."""
TIES = "ties"
"""Key of the metadata: name -> name of the tensor that it shares."""
SCRIPTS = frozenset({keys.LATEST, keys.LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py"})
"""Files beside the folders of steps that mean nothing elsewhere."""
_TIED = "tied_modules."
_NO_LOW = "ZeRO-3 saves no weights in low precision: its module holds empty placeholders"


@dataclass(slots=True)
class _Catalog:
    """What has been put together so far, stage by stage."""

    weights: dict[str, Entry] = field(default_factory=dict)
    low: dict[str, Entry] = field(default_factory=dict)
    states: dict[str, dict[str, Entry]] = field(default_factory=dict)
    twins: list[Twin] = field(default_factory=list)
    scaled: dict[str, float] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    def add(self, stage: Stage, number: int) -> None:
        """Add a pipeline stage; what an earlier one holds too must be equal."""
        for mine, others in ((self.weights, stage.weights), (self.low, stage.low)):
            for name, entry in others.items():
                self._same(mine.setdefault(name, entry), entry, number)
        for name, states in stage.states.items():
            held = self.states.setdefault(name, {})
            for state, entry in states.items():
                self._same(held.setdefault(state, entry), entry, number)
        self.twins.extend(stage.twins)
        self.scaled |= stage.scaled

    def _same(self, first: Entry, entry: Entry, number: int) -> None:
        if first is not entry:
            self.twins.append(Twin(first, entry, f"pipeline stage {number} and an earlier one hold the same tensor"))


def open_deepspeed(storage: Storage, path: str, member: str, weights: Weights = "fp32") -> Container:
    """Open the checkpoint of one step.

    Args:
        storage: where the files are.
        path: what the user typed.
        member: folder of the step; `HERE` for the path itself.
        weights: which weights the plain names stand for: the optimizer's, or the module's own in low precision.

    Raises:
        Refused: everything that is wrong with its files: UNSAFE_PICKLE, CORRUPT, INCOMPLETE, UNSUPPORTED, ….
        StorageError: IO.
    """
    prefix = "" if member == HERE else f"{member}/"
    listing = storage.listing(prefix.rstrip("/"))
    files = sort_files(listing.everything(), path)
    inline = Inline(storage)
    faults = Faults()
    models, states, layers, checksums = _read(inline, files, prefix, faults)
    if faults:
        raise faults.error()
    pp, tp = degrees(models, files.layers.values(), len(files.optimizer.get(0, {})))
    catalog = _Catalog()
    for stage in range(pp):
        numbers = [stage * tp + rank for rank in range(tp)]
        catalog.add(_stage([(models[n], states.get(n, ())) for n in numbers], faults), stage)
    _add_layers(catalog, layers, tp, faults)
    if faults:
        raise faults.error()
    _share(catalog, models)
    entries = _entries(catalog, inline, weights, files)
    size = {f"{prefix}{name}": storage.size(f"{prefix}{name}") for name in files.all}
    around = company(storage, size)
    carried = tuple(name for name in around.carried if name not in SCRIPTS and name not in size)
    left = tuple(sorted({*around.ignored, *(set(around.carried) & SCRIPTS)} - {prefix}))
    metadata = _metadata(catalog, models, states, (pp, tp))
    return Container(
        keys.FORMAT, path, inline, entries, size, metadata, carried, left, tuple(checksums), tuple(catalog.twins)
    )


_Models = Mapping[Rank, Sequence[RankModel]]
_States = Mapping[Rank, Sequence[RankState]]
_Layers = Mapping[int, Sequence[Mapping[str, Entry]]]


def _read(
    inline: Inline, files: RankFiles, prefix: str, faults: Faults
) -> tuple[_Models, _States, _Layers, list[Checksum]]:
    """Read what all files describe; every one that cannot be read is a fault."""
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
                tensors, said = read_layer(inline, prefix + name)
            except TransaxleError as error:
                faults.extend(*error.refusals)
                continue
            layers.setdefault(number, []).append(tensors)
            checksums.extend(said)
    return models, states, layers, checksums


def degrees(models: _Models, layers: Collection[Mapping[int, str]], parts: int = 0) -> tuple[int, int]:
    """Return pipeline and tensor-parallel degree; their product is the number of model ranks.

    Args:
        models: model rank -> its model files.
        layers: per layer of a pipeline, its files.
        parts: data-parallel ranks whose optimizer files are there; 0 where there are none.

    Raises:
        Refused: CORRUPT where the files contradict that; INCOMPLETE for missing ranks.
    """
    first = models[0][0]
    said = first.root.get(keys.DIMENSIONS)
    ranks = len(models)
    if said is not None:
        pp, tp = (said[key].natural() for key in (keys.PP_DEGREE, keys.TP_DEGREE))
    else:  # files of earlier versions: the files of a layer are those of its tensor-parallel ranks
        tp = len(next(iter(layers))) if layers else ranks
        pp = ranks // max(tp, 1)
    if pp * tp != ranks:
        message = f"it is of a run with {pp} pipeline stages and {tp} tensor-parallel ranks; there are {ranks} in all"
        raise refuse("INCOMPLETE" if pp * tp > ranks else "CORRUPT", message, file=first.file)
    world = first.root.get(keys.DP_WORLD)
    if world is not None and parts and world.natural() != parts:
        message = f"it is of a run with {world.natural()} data-parallel ranks; there are optimizer files of {parts}"
        raise refuse("INCOMPLETE" if world.natural() > parts else "CORRUPT", message, file=first.file)
    return pp, tp


def _stage(ranks: Sequence[tuple[Sequence[RankModel], Sequence[RankState]]], faults: Faults) -> Stage:
    """Put one pipeline stage together."""
    held = []
    twins: list[Twin] = []
    for models, states in ranks:
        try:
            found, more = trained(models[0], states) if states else ({}, [])
        except TransaxleError as error:
            faults.extend(*error.refusals)
            continue
        twins.extend(more)
        held.append(ModelRank(models, found))
    if len(held) < len(ranks):
        return Stage()
    node = held[0].models[0].root.get(keys.INFO)
    try:
        info = None if node is None or len(held) == 1 else Info(node, len(held))
        stage = assemble(held, info, faults)
    except TransaxleError as error:
        faults.extend(*error.refusals)
        return Stage()
    stage.twins.extend(twins)
    return stage


def _add_layers(catalog: _Catalog, layers: _Layers, tp: int, faults: Faults) -> None:
    """Add what only the layer files of a pipeline hold: the module's tensors, and parameters that are not trained."""
    for number, ranks in layers.items():
        for name in ranks[0]:
            full = f"{number}.{name}"
            known = catalog.weights.get(full)
            shared = next((one for one in catalog.weights if one.startswith(_TIED) and one.endswith(f".{name}")), None)
            if known is None and shared is not None and not _trains(catalog, number):
                catalog.low.setdefault(shared, ranks[0][name])
                catalog.ties.setdefault(full, shared)
                continue
            if tp > 1:
                faults.add("UNSUPPORTED", "the layer files of tensor-parallel pipelines are not read", None, full)
                return
            shard = Shard(ranks[0][name].dtype, ranks[0][name].shape, ranks[0][name].extents, "")
            entry, _ = merged(full, [shard], whole(shard.shape, 1))
            catalog.low[full] = entry
            catalog.weights.setdefault(full, entry)


def _trains(catalog: _Catalog, layer: int) -> bool:
    """Tell whether any parameter of a layer is trained under the layer's own name."""
    return any(name.startswith(f"{layer}.") for name in catalog.states)


def _share(catalog: _Catalog, models: _Models) -> None:
    """Give shared parameters their second names."""
    for ranks in models.values():
        for model in ranks:
            for alias, name in model.shared.items():
                if name in catalog.weights and alias not in catalog.weights:
                    catalog.ties[alias] = name
                    for held in (catalog.weights, catalog.low):
                        if name in held:
                            held[alias] = held[name]


def _entries(catalog: _Catalog, inline: Inline, weights: Weights, files: RankFiles) -> dict[str, Entry]:
    if weights == "lp" and files.zero3:
        raise refuse("UNSUPPORTED", _NO_LOW, file=inline.path, hint="Leave out --weights lp.")
    chosen = catalog.low if weights == "lp" else catalog.weights
    entries = {name: Entry(name, entry.dtype, entry.shape, entry.extents) for name, entry in chosen.items()}
    for name, factor in catalog.scaled.items():
        if name in entries:
            entries[name] = unscaled(entries[name], factor, inline)
    for parameter, states in catalog.states.items():
        for state, entry in states.items():
            name = f"{OPTIMIZER}{parameter}/{state}"
            entries[name] = Entry(name, entry.dtype, entry.shape, entry.extents)
    return {name: entry for name, entry in entries.items() if prod(entry.shape) or entry.extents or entry.shape}


def _metadata(catalog: _Catalog, models: _Models, states: _States, shape: tuple[int, int]) -> dict[str, Any]:
    left = {path: what for ranks in states.values() for state in ranks for path, what in state.left.items()}
    optimizer = models[0][0].root.get(keys.OPTIMIZER)
    if optimizer is not None and not states:
        left[keys.OPTIMIZER] = "the state of an optimizer without ZeRO"
    firsts = [ranks[0] for _, ranks in sorted(models.items())]
    held = [ranks for _, ranks in sorted(states.items())]
    facts = run_of(firsts[0], held[0][0].root if held else None)
    facts[DEGREES] = {"pp": shape[0], "tp": shape[1], "dp": max(map(len, held), default=1)}
    if held:
        facts[keys.ZERO_STAGE] = held[0][0].stage
        facts[keys.GROUPS] = state_groups(held, firsts)
    found: dict[str, Any] = {RUN: facts}
    if catalog.ties:
        found[TIES] = dict(catalog.ties)
    if left:
        found[LEFT_BEHIND] = left
    return found
