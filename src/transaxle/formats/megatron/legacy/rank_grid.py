"""Which ranks there are, and what the file of each describes.

Which ranks wrote a checkpoint: their places on the mesh, and that together they hold everything.

mp_rank_TT              tensor-parallel rank
mp_rank_TT_PPP          and pipeline stage, or expert-parallel rank: the run's arguments tell
mp_rank_TT_PPP_EEE      all three

Not every combination has a folder: ranks that hold nothing of their own write nothing. Dense parameters must be
there of every tensor-parallel rank and stage, experts of every expert-parallel and expert-tensor-parallel rank and
stage.

**What one rank wrote**: its part of the model, by local names, and everything beside it as plain descriptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transaxle.errors import Faults, refuse
from transaxle.formats.catalog import Checksum, Entry, Extent, NumbersInMemory
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.rank_files import TensorReader
from transaxle.formats.flattened_state import is_tensor
from transaxle.formats.megatron.run_arguments import DEGREES, KEYS, NAMES, RunState, run_state
from transaxle.formats.pickled.descriptors import Object, TensorRef
from transaxle.formats.registry import MEGATRON_MODEL
from transaxle.formats.torch_file.saved import read_saved

OPTIMIZER_KEY = "optimizer"
STEPS = "transaxle_steps"
"""Tensors that we write besides: for each part of the optimizer, number of the parameter -> its steps."""
_MODEL = re.compile(r"model(\d{0,4})")
_EXTRA = "_extra_state"
_ARGS, _VERSION, _SCHEDULER = "args", "checkpoint_version", "opt_param_scheduler"
_FACTS = (_ARGS, _VERSION, "iteration", _SCHEDULER, "num_floating_point_operations_so_far")
"""Entries of a file whose plain data is kept."""
_SETTLED = 3.0
"""Version from which q, k and v are in the order of today."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleChunk:
    """A part of the model, by the names that the rank has for it."""

    tensors: Mapping[str, Entry]
    """In the order of the module."""
    extra: tuple[str, ...]
    """Names of TransformerEngine's own state, which is not read."""


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """The contents of one rank's model file."""

    folder: str
    """Its folder, as named in the iteration's."""
    file: str
    """The file, inside the checkpoint."""
    root: CheckedValue
    """All of it."""
    run: RunState
    """Arguments and counters."""
    chunks: tuple[ModuleChunk, ...]
    """One for each stage of a virtual pipeline."""
    left: Mapping[str, str]
    """Key -> description of what is not read."""
    checksums: tuple[Checksum, ...]


def read_rank(inline: NumbersInMemory, prefix: str, folder: str) -> RankFile:
    """Read the model file of one rank.

    Args:
        inline: the checkpoint's files.
        prefix: folder of the iteration, with a `/`; empty for the checkpoint itself.
        folder: the rank's folder in it.

    Raises:
        Refused: UNSAFE_PICKLE, CORRUPT, UNSUPPORTED.
        StorageError: IO.
    """
    file = f"{prefix}{folder}/{MEGATRON_MODEL}"
    saved = read_saved(inline, file, allowed=NAMES)
    root = CheckedValue(saved.value, file)
    _check_version(root)
    left: dict[str, str] = {}
    chunks: dict[int, ModuleChunk] = {}
    for key, node in root.items():
        stage = _MODEL.fullmatch(key) if isinstance(key, str) else None
        if stage is not None:
            chunks[int(stage[1] or 0)] = _chunk(TensorReader(inline, file), node, left)
        elif key not in (*_FACTS, OPTIMIZER_KEY, STEPS):
            left[str(key)] = "state of Megatron's that is not read"
    if not chunks:
        raise root.fault("it holds no model")
    if sorted(chunks) != list(range(len(chunks))):
        raise root.fault(f"it holds the stages {sorted(chunks)[:8]} of a virtual pipeline, which are not all")
    run = run_state({key: root.value[key] for key in _FACTS if key in root.value})
    return RankFile(folder, file, root, run, tuple(chunk for _, chunk in sorted(chunks.items())), left, saved.checksums)


def _check_version(root: CheckedValue) -> None:
    """Refuse files in which q, k and v may be in another order.

    Raises:
        Refused: CORRUPT, UNSUPPORTED.
    """
    node = root.get(_VERSION)
    version = 0.0 if node is None else node.real()
    if version < _SETTLED:
        message = f"its checkpoint_version is {version:g}; below {_SETTLED:g}, q, k and v may be in another order"
        hint = "Load it with the Megatron-LM of its time, save it with one from 2021 or later, and convert that."
        raise refuse("UNSUPPORTED", message, file=root.file, hint=hint)


def _chunk(reader: TensorReader, model: CheckedValue, left: dict[str, str]) -> ModuleChunk:
    """Return the tensors of a module; what is neither tensor nor extra state is listed in `left`."""
    tensors: dict[str, Entry] = {}
    extra: list[str] = []
    places: dict[tuple[Extent, ...], str] = {}
    for name, node in model.string_items():
        if name.rpartition(".")[2] == _EXTRA:
            if node.value is not None:
                extra.append(name)
        elif isinstance(node.value, dict):
            message = f"{name!r} is a module in a module: this is the model of a Megatron-LM before megatron-core"
            hint = "Load it with Megatron-LM, save it with --use-mcore-models, and convert that."
            raise refuse("UNSUPPORTED", message, file=model.file, hint=hint)
        elif isinstance(node.value, TensorRef | Object) and is_tensor(node.value):
            entry = reader.tensor(name, node)
            # A further name of a tensor, for another kind of module, is none of its own.
            if entry.extents and places.setdefault(entry.extents, name) == name:
                tensors[name] = entry
        elif is_tensor(node.value):
            message = "it is a quantized tensor, whose numbers Megatron keeps in several"
            hint = "Save the checkpoint without --fp8-param-gather."
            raise refuse("UNSUPPORTED", message, file=model.file, tensor=name, hint=hint)
        elif node.value is not None:
            left[f"{'/'.join(model.path)}/{name}"] = f"a {type(node.value).__name__}"
    return ModuleChunk(tensors, tuple(extra))


_FOLDER = re.compile(r"mp_rank_(\d{2,6})((?:_\d{3,6}){0,2})")
_MOST = 1 << 20
_AGREED = (
    *dict.fromkeys(KEYS.values()), *DEGREES.values(), "padded_vocab_size", "swiglu", "moe_layer_freq",
    "group_query_attention", "multi_latent_attention", "untie_embeddings_and_output_weights", "add_bias_linear",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "use_distributed_optimizer",
    "overlap_grad_reduce", "ddp_bucket_size", "ddp_num_buckets", "optimizer",
)  # fmt: skip
"""Arguments that decide how files are read."""
_OTHER_RANKS = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")
"""Arguments of runs whose first ranks have another model."""
_COPY = "Copy the missing folders; where each machine wrote to its own disk, gather them in one place first."


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of parallelism."""

    tp: int = 1
    """Of tensors outside of experts."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Over experts."""
    etp: int = 1
    """Of the tensors of experts."""
    vp: int = 1
    """Stages of the virtual pipeline on each rank."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where on the mesh a rank is."""

    pp: int
    ep: int
    tp: int


def folder_of(place: Place, mesh: Mesh) -> str:
    """Return the name of a rank's folder."""
    stage = f"_{place.pp:03d}" if mesh.pp > 1 else ""
    return f"mp_rank_{place.tp:02d}{stage}{f'_{place.ep:03d}' if mesh.ep > 1 else ''}"


def placed(files: Sequence[RankFile]) -> tuple[Mesh, Mapping[Place, RankFile]]:
    """Place the ranks on their mesh.

    Raises:
        Refused: CORRUPT where the files contradict each other, or the names of their folders; INCOMPLETE for ranks
            whose folders are missing; UNSUPPORTED where the mesh cannot be known.
    """
    faults = Faults()
    first = files[0]
    for other in files[1:]:
        for key in _differing(first.run, other.run):
            message = (
                f"its args have {key} {_of(other.run, key)!r}; those of {first.folder} have {_of(first.run, key)!r}"
            )
            hint = "The folder belongs to another checkpoint: remove it, or copy the right one."
            faults.add("CORRUPT", message, other.file, hint=hint)
    if faults:
        raise faults.error()
    mesh = _mesh(first, [file.folder for file in files])
    ranks: dict[Place, RankFile] = {}
    for file in files:
        place = _place(file.folder, mesh)
        if place is None:
            message = f"no rank of a run with {_said(mesh)} has a folder of this name"
            faults.add("CORRUPT", message, file.file, hint="Remove the folder that belongs to another checkpoint.")
        else:
            ranks[place] = file
    if faults:
        raise faults.error()
    _check_complete(ranks, mesh, first)
    _check_numbers(ranks, mesh)
    return mesh, dict(sorted(ranks.items()))


def _differing(first: RunState, second: RunState) -> list[str]:
    keys = [key for key in _AGREED if first.args.get(key) != second.args.get(key)]
    return keys + [key for key in ("iteration", "checkpoint_version") if first.facts.get(key) != second.facts.get(key)]


def _of(run: RunState, key: str) -> Any:
    return run.args.get(key) if key in _AGREED else run.facts.get(key)


def _mesh(file: RankFile, folders: Sequence[str]) -> Mesh:
    args = file.run.args
    if not args:
        if any(_FOLDER.fullmatch(folder)[2] for folder in folders):  # type: ignore[index]
            message = "it holds no args, so nothing tells pipeline stages from expert-parallel ranks"
            raise refuse("UNSUPPORTED", message, file=file.file, hint="Save the checkpoint again with Megatron-LM.")
        return Mesh(len(folders), etp=len(folders), vp=len(file.chunks))
    sizes = {axis: _degree(file, name, args.get(name)) for axis, name in DEGREES.items()}
    tp = sizes["tp"] or 1
    mesh = Mesh(tp, sizes["pp"] or 1, sizes["ep"] or 1, sizes["etp"] or tp, sizes["vp"] or 1)
    if mesh.tp * mesh.pp * mesh.ep * mesh.vp > _MOST:
        raise refuse("CORRUPT", f"its args claim {_said(mesh)}; at most {_MOST} ranks are read", file=file.file)
    if mesh.tp % mesh.etp:
        message = (
            f"the experts' tensors are cut over {mesh.etp} ranks and all others over {mesh.tp}, which it does not "
            "divide: several ranks wrote to one folder, and only the last one's experts are there"
        )
        raise refuse("UNSUPPORTED", message, file=file.file, hint="Save the checkpoint with --ckpt-format torch_dist.")
    return mesh


def _degree(file: RankFile, name: str, value: object) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST):
        raise refuse("CORRUPT", f"args > {name}: expected a number of ranks, not {value!r}", file=file.file)
    return value


def _place(folder: str, mesh: Mesh) -> Place | None:
    match = _FOLDER.fullmatch(folder)
    numbers = [int(number) for number in match[2].split("_")[1:]] if match is not None else []
    axes = [axis for axis, size in (("pp", mesh.pp), ("ep", mesh.ep)) if size > 1]
    if match is None or len(numbers) != len(axes):
        return None
    found = dict(zip(axes, numbers, strict=True))
    place = Place(found.get("pp", 0), found.get("ep", 0), int(match[1]))
    inside = place.tp < mesh.tp and place.pp < mesh.pp and place.ep < mesh.ep
    return place if inside and folder_of(place, mesh) == folder else None


def _check_complete(ranks: Mapping[Place, RankFile], mesh: Mesh, first: RankFile) -> None:
    """Check that all dense parameters and all experts are there."""
    faults = Faults()
    dense = {(place.pp, place.tp) for place in ranks}
    experts = {(place.pp, place.ep, place.tp % mesh.etp) for place in ranks}
    has_experts = bool(first.run.args.get("num_experts")) or mesh.ep > 1
    for place in (Place(pp, ep, tp) for pp in range(mesh.pp) for ep, tp in _writers(mesh)):
        held = (place.pp, place.ep, place.tp % mesh.etp) in experts or not has_experts
        if (place.pp, place.tp) not in dense or not held:
            message = f"the folder of this rank is missing: the run had {_said(mesh)}"
            faults.add("INCOMPLETE", message, f"{_above(first)}{folder_of(place, mesh)}", hint=_COPY)
        if faults.full:
            break
    if faults:
        raise faults.error()


def _check_numbers(ranks: Mapping[Place, RankFile], mesh: Mesh) -> None:
    """Check that every file is in the folder of the rank that wrote it, by the numbers of ranks in their args.

    Converters write all files under one number; where numbers repeat, they tell nothing.
    """
    numbers = {place: _number(file.run.args) for place, file in ranks.items()}
    if None in numbers.values() or len(set(numbers.values())) < len(ranks):
        return
    faults = Faults()
    for place, file in ranks.items():
        args = file.run.args
        wrote = _place_of(args, mesh, place)
        if wrote != place:
            writer = f"rank {args['rank']} of {args['world_size']}"
            message = f"its args say that {writer} wrote it; that rank's folder is {folder_of(wrote, mesh)}"
            faults.add("CORRUPT", message, file.file, hint="Put the files of each rank back into its own folder.")
    if faults:
        raise faults.error()


def _number(args: Mapping[str, Any]) -> int | None:
    """Return the number of the rank that wrote a file; None where its args do not tell."""
    rank, world = args.get("rank"), args.get("world_size")
    told = type(rank) is int and type(world) is int and not any(args.get(name) for name in _OTHER_RANKS)
    return rank if told and 0 <= rank < world else None  # type: ignore[operator]


def _place_of(args: Mapping[str, Any], mesh: Mesh, place: Place) -> Place:
    """Return where Megatron places the rank of these args: tensor-parallel ranks lie side by side, stages far apart.

    Where the args leave an axis open, it is that of `place`.
    """
    rank, world, context = args["rank"], args["world_size"], args.get("context_parallel_size") or 1
    beside = mesh.tp * context if args.get("use_tp_pp_dp_mapping") else world // mesh.pp
    expert = rank // mesh.etp % mesh.ep if context == 1 else place.ep  # releases differ
    return Place(rank // max(beside, 1) % mesh.pp, expert, rank % mesh.tp)


def _writers(mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Yield the expert- and tensor-parallel rank of those ranks of a stage that together hold everything.

    Megatron counts both kinds of ranks of tensor parallelism first, so that the first ranks of a stage hold all.
    """
    for rank in range(max(mesh.tp, mesh.etp * mesh.ep)):
        yield rank // mesh.etp % mesh.ep, rank % mesh.tp


def _above(file: RankFile) -> str:
    return file.file[: -len(f"{file.folder}/{file.file.rpartition('/')[2]}")]


def _said(mesh: Mesh) -> str:
    sizes = (("tp", mesh.tp), ("pp", mesh.pp), ("ep", mesh.ep), ("etp", mesh.etp), ("vp", mesh.vp))
    return " ".join(f"{axis} {size}" for axis, size in sizes if size > 1 or axis in ("tp", "pp"))
