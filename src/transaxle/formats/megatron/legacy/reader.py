"""Opens Megatron checkpoints with one folder for each rank (`--ckpt-format torch`) as a single catalog of whole
tensors.

Tensor names are those that Megatron would use if one rank had the whole model. The family's table of tensor names
describes how parameters are cut over tensor-parallel ranks. Shards that several ranks have must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transaxle.arguments import Weights
from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import Container, Entry, NumbersInMemory
from transaxle.formats.deepspeed.rank_files import RankShard
from transaxle.formats.deepspeed.spread import Cutter, TableCuts, refuse_unknown_cuts
from transaxle.formats.megatron.legacy.global_names import (
    Numbering,
    OrderUnknown,
    Parameter,
    experts_of,
    is_expert,
    stage_layers,
)
from transaxle.formats.megatron.legacy.rank_grid import OPTIMIZER_KEY, Mesh, MeshPlace, RankFile, place_ranks, read_rank
from transaxle.formats.megatron.legacy.rank_optimizer import (
    EMBEDDING,
    HEAD,
    JoinedTensors,
    ParameterState,
    RankOptimizer,
    RankParameter,
    ShardJoiner,
    check_copies,
    optimizer_settings,
    read_optimizer,
)
from transaxle.formats.registry import (
    HERE,
    MEGATRON_FLAT,
    MEGATRON_MODEL,
    MEGATRON_RANK,
    MEGATRON_TORCH,
    MEGATRON_TRACKER,
    sort_sidecars,
)
from transaxle.formats.storage.storage import Storage
from transaxle.formats.torch_file.saved import find_copies
from transaxle.formats.training_state import GROUPS, LEFT_BEHIND, MASTER, MEGATRON, OPTIMIZER, PARAMS, ParamGroup

_RANK = re.compile(MEGATRON_RANK)
_ROUTER, _ROUTER_PARAMETERS = "router", ("weight", "bias")
_TIED = "untie_embeddings_and_output_weights"
_EXTRA = "state of TransformerEngine's modules"


@dataclass(frozen=True, slots=True, eq=False)
class _LocalModel:
    """One rank's share of the model, under the tensor names of the whole model."""

    place: MeshPlace
    file: RankFile
    chunks: list[dict[str, Entry]]
    """For each virtual pipeline stage: name in the whole model -> tensor, in the order in which the module registers
    the tensors."""
    extra: list[str]
    """Whole-model names of Transformer Engine's extra state, which Transaxle does not read."""
    flat_file: str | None
    """Name of the file of the rank's distributed optimizer; None if the rank has no such file."""


def open_legacy(
    storage: Storage,
    path: str,
    member: str,
    weights: Weights | None = None,
    cutter: Cutter = refuse_unknown_cuts,
    optimizer: bool | None = None,
) -> Container:
    """Open the folder of one iteration, which contains a folder for each rank.

    Args:
        storage: storage that reads the checkpoint's files.
        path: the checkpoint's path as the user typed it.
        member: name of the iteration's folder; `HERE` if the path is this folder itself.
        weights: which values get the plain parameter names: the model's weights (`lp`, also for None), or the
            optimizer's full-precision copies (`fp32`).
        cutter: function that finds how parameters are cut over tensor-parallel ranks.
        optimizer: True to require optimizer state; False to ignore it; None to read it only if the order of parameters
            is known.

    Raises:
        Refused: with every problem in the files, and codes such as UNSAFE_PICKLE, CORRUPT, INCOMPLETE and UNSUPPORTED.
        UsageError: if the family's table of tensor names needs information that the checkpoint lacks, such as a number
            of attention heads.
        StorageError: with the code IO if a file cannot be read.
    """
    prefix = "" if member == HERE else f"{member}/"
    inline = NumbersInMemory(storage)
    files = _read_files(inline, prefix, path)
    mesh, ranks = place_ranks(files)
    _refuse_copies(inline, files)
    run = files[0].run
    models = _with_global_names(inline, prefix, ranks, mesh)
    unread = {key: what for file in files for key, what in file.unread.items()}
    unread |= {name: _EXTRA for model in models for name in model.extra}
    try:
        optimizers, why_not = _optimizers(inline, models, mesh)
        whole = _join_shards(storage, models, optimizers, mesh, cutter)
    except TransaxleError:
        if optimizer is not False:
            raise
        optimizers, why_not = {}, _why_not_read(files)
        whole = _join_shards(storage, models, optimizers, mesh, cutter)
    if why_not:
        unread[OPTIMIZER_KEY] = why_not
    if why_not and optimizer:
        hint = "Leave the optimizer out (--no-optimizer), or save the checkpoint with --ckpt-format torch_dist."
        raise refuse("UNSUPPORTED", f"optimizer: {why_not}", file=path, hint=hint)
    entries = _entries(whole, weights, path)
    sizes = {model.file.file: inline.size(model.file.file) for model in models}
    sizes |= {model.flat_file: inline.size(model.flat_file) for model in models if model.flat_file}
    sidecars = sort_sidecars(storage, sizes, of_run=True)
    unread_files = [name for model in models for name in _unread_files(inline, model)]
    groups = _groups(list(optimizers.values()), entries)
    facts = run.to_metadata() | optimizer_settings(files[0].root.get(OPTIMIZER_KEY))
    metadata: dict[str, Any] = {MEGATRON: facts} | ({GROUPS: groups} if groups else {})
    metadata |= {LEFT_BEHIND: unread} if unread else {}
    checksums = [each for model in models for each in model.file.checksums]
    checksums += [each for found in optimizers.values() for each in found.checksums]
    ignored = tuple(sorted({*sidecars.ignored, *unread_files} - {MEGATRON_TRACKER, prefix}))
    return Container(
        MEGATRON_TORCH.name, path, inline, entries, sizes, metadata, sidecars.carried, ignored, tuple(checksums),
        tuple(whole.twins), config=run.config(),
    )  # fmt: skip


def _read_files(inline: NumbersInMemory, prefix: str, path: str) -> list[RankFile]:
    """Read the model files of all ranks; a file that cannot be read is added to the faults.

    Raises:
        Refused: with every problem in the files; with the code INCOMPLETE if there are no model files.
    """
    listing = inline.listing(prefix.rstrip("/"))
    faults = Faults()
    files = []
    for folder in listing.folders:
        if _RANK.fullmatch(folder) is None:
            continue
        try:
            if MEGATRON_MODEL not in inline.listing(f"{prefix}{folder}").everything():
                message = "the file is missing: the save was interrupted, or the file was not copied"
                faults.add("INCOMPLETE", message, f"{prefix}{folder}/{MEGATRON_MODEL}", hint="Copy the missing file.")
            else:
                files.append(read_rank(inline, prefix, folder))
        except TransaxleError as error:
            faults.extend(*error.refusals)
        if faults.full:
            break
    if faults:
        raise faults.error()
    if not files:
        message = "this is what one rank wrote, and not the whole checkpoint"
        raise refuse("INCOMPLETE", message, file=path, hint="Give the folder above, which holds all ranks' folders.")
    return files


def _refuse_copies(inline: NumbersInMemory, files: Sequence[RankFile]) -> None:
    """Refuse two identical files of ranks: one of them is a copy by mistake, and would be read as the data of a
    different rank.

    Raises:
        Refused: with the code CORRUPT if two ranks' files are identical.
    """
    faults = Faults()
    for file, first in find_copies(inline, [(each.file, each.checksums) for each in files]):
        message = f"it is a copy of {first}, though each rank has its own part of the model"
        faults.add("CORRUPT", message, file, hint="Copy this rank's own file from where it was saved.")
    if faults:
        raise faults.error()


def _with_global_names(
    inline: NumbersInMemory, prefix: str, ranks: Mapping[MeshPlace, RankFile], mesh: Mesh
) -> list[_LocalModel]:
    """Return each rank's share of the model, under the tensor names of the whole model.

    Raises:
        Refused: with the codes of `Numbering.names` if the names do not fit; with the code CORRUPT if a rank's number
            of virtual stages contradicts its arguments.
    """
    first = next(iter(ranks.values()))
    args = first.run.args
    layers = stage_layers(args, mesh, first.file)
    faults = Faults()
    models = []
    for place, file in ranks.items():
        if len(file.chunks) != mesh.vp:
            message = f"it holds {len(file.chunks)} stages of a virtual pipeline of {mesh.vp}, by its args"
            faults.add("CORRUPT", message, file.file)
            continue
        chunks: list[dict[str, Entry]] = []
        extra: list[str] = []
        try:
            experts = experts_of(args, mesh, place.ep, file.file)
            for number, chunk in enumerate(file.chunks):
                names = Numbering(layers[place.pp][number], experts).names((*chunk.tensors, *chunk.extra), file.file)
                chunks.append({names[name]: entry for name, entry in chunk.tensors.items()})
                extra += [names[name] for name in chunk.extra]
        except TransaxleError as error:
            faults.extend(*error.refusals)
            continue
        flat = f"{prefix}{file.folder}/{MEGATRON_FLAT}"
        has_flat = MEGATRON_FLAT in inline.listing(f"{prefix}{file.folder}").everything()
        models.append(_LocalModel(place, file, chunks, extra, flat if has_flat else None))
    if faults:
        raise faults.error()
    return models


def _optimizers(
    inline: NumbersInMemory, models: Sequence[_LocalModel], mesh: Mesh
) -> tuple[dict[MeshPlace, RankOptimizer], str]:
    """Return the optimizers of all ranks and an empty string, or no optimizers and the reason why the order of
    parameters is unknown.

    Raises:
        Refused: with every problem in the optimizer files.
    """
    optimizers: dict[MeshPlace, RankOptimizer] = {}
    try:
        for model in models:
            shared = _embeddings_of_stages(model.file.run.args, mesh)
            parameters = [
                Parameter(chunk, name, entry.dtype, entry.shape, is_expert(name), shared=name in shared)
                for chunk, tensors in enumerate(model.chunks)
                for name, entry in tensors.items()
                if not _is_buffer(name)
            ]
            optimizer = read_optimizer(inline, model.file, model.place.pp, parameters, model.flat_file)
            weights = {(chunk, name): entry for chunk, held in enumerate(model.chunks) for name, entry in held.items()}
            check_copies(inline, weights, optimizer)
            optimizers[model.place] = optimizer
    except OrderUnknown as reason:
        return {}, f"it is not known which state belongs to which parameter: {reason}"
    return optimizers, ""


def _why_not_read(files: Sequence[RankFile]) -> str:
    """Return the reason why the files' optimizer state is not read; an empty string if they have no optimizer state."""
    return "not wanted" if any(file.root.get(OPTIMIZER_KEY) is not None for file in files) else ""


def _is_buffer(name: str) -> bool:
    """Return whether a module's tensor is a buffer: the token counts or the expert bias of a router."""
    *_, parent, last = ("", *name.split("."))
    return parent == _ROUTER and last not in _ROUTER_PARAMETERS


def _embeddings_of_stages(args: Mapping[str, Any], mesh: Mesh) -> frozenset[str]:
    """Return the names of parameters that several pipeline stages share in training: the embedding, and an output head
    that is tied to it.
    """
    tied = args.get(_TIED) is False
    if mesh.pp == 1 or not (tied or args.get("mtp_num_layers")):
        return frozenset()
    return frozenset((EMBEDDING, HEAD) if tied else (EMBEDDING,))


def _join_shards(
    storage: Storage, models: Sequence[_LocalModel], optimizers: Mapping[MeshPlace, RankOptimizer], mesh: Mesh,
    cutter: Cutter,
) -> JoinedTensors:  # fmt: skip
    """Join the shards of all ranks into whole tensors.

    Raises:
        Refused, UsageError: with every reason why shards cannot be joined.
    """
    shards_by_name: dict[str, dict[tuple[int, int], list[RankParameter]]] = {}
    for model in models:
        optimizer = optimizers.get(model.place, RankOptimizer())
        for chunk, tensors in enumerate(model.chunks):
            for name, entry in tensors.items():
                shard = RankShard(entry.dtype, entry.shape, entry.extents, model.file.file)
                state = optimizer.states.get((chunk, name), ParameterState())
                shards_by_name.setdefault(name, {}).setdefault((model.place.pp, chunk), []).append(
                    RankParameter(model.place, shard, state)
                )
    run = models[0].file.run
    cuts = TableCuts(cutter, storage, tuple(shards_by_name), run.config()) if mesh.tp > 1 else None
    joining = ShardJoiner(mesh, cuts, run.args)
    flat = frozenset(name for optimizer in optimizers.values() for name in optimizer.flat)
    whole = joining.join(shards_by_name, flat)
    if joining.faults:
        raise joining.faults.error()
    if run.args.get(_TIED) is False:
        joining.tie(whole)
    return whole


def _entries(whole: JoinedTensors, weights: Weights | None, path: str) -> dict[str, Entry]:
    """Return the catalog entries: first those of the weights, then those of the optimizer state.

    Raises:
        Refused: with the code UNSUPPORTED if `weights` is `fp32` and a full-precision copy is missing.
    """
    entries: dict[str, Entry] = {}
    for name, entry in whole.weights.items():
        master = whole.states.get(name, {}).pop(MASTER, None) if weights == "fp32" else None
        if weights == "fp32" and master is None and entry.dtype != "F32":
            message = "the checkpoint holds no full-precision copy of this tensor"
            raise refuse("UNSUPPORTED", message, file=path, tensor=name, hint="Omit --weights fp32.")
        chosen = master or entry
        entries[name] = Entry(name, chosen.dtype, chosen.shape, chosen.extents)
    for name, states in whole.states.items():
        for state, entry in states.items():
            key = f"{OPTIMIZER}{name}/{state}"
            entries[key] = Entry(key, entry.dtype, entry.shape, entry.extents)
    return entries


def _unread_files(inline: NumbersInMemory, model: _LocalModel) -> list[str]:
    """Return the paths of the files in a rank's folder that Transaxle does not read."""
    folder = model.file.file.removesuffix(f"/{MEGATRON_MODEL}")
    read = (model.file.file, model.flat_file)
    return [name for each in inline.listing(folder).everything() if (name := f"{folder}/{each}") not in read]


def _groups(optimizers: Sequence[RankOptimizer], entries: Mapping[str, Entry]) -> list[ParamGroup]:
    """Return the optimizer groups of all ranks, merged if their settings are equal, with the parameters that have
    optimizer state.
    """
    trained = {name.removeprefix(OPTIMIZER).rpartition("/")[0] for name in entries if name.startswith(OPTIMIZER)}
    groups: dict[str, tuple[ParamGroup, dict[str, None]]] = {}
    for optimizer in optimizers:
        for settings, names in optimizer.groups:
            trained_names = [name for name in names if name in trained]
            if trained_names:
                groups.setdefault(repr(sorted(settings.items())), (settings, {}))[1].update(
                    dict.fromkeys(trained_names)
                )
    return [{**settings, PARAMS: list(names)} for settings, names in groups.values()]
