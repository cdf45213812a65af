"""Reads the model file of each rank, places the ranks on the mesh (the grid of parallel degrees), and checks that they
have the whole model.

    mp_rank_TT              tensor-parallel rank
    mp_rank_TT_PPP          and pipeline stage or expert-parallel rank, depending on the run's arguments
    mp_rank_TT_PPP_EEE      all three

Not every mesh position has a folder: a rank may write nothing if other ranks write everything that it has. There must
be dense parameters for every pipeline stage and tensor-parallel rank, and experts for every stage, expert-parallel rank
and expert-tensor-parallel rank.
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
"""Key of the step counters that Transaxle adds to the file: for each optimizer, a dict from parameter number to tensor
without dims."""
_MODEL = re.compile(r"model(\d{0,4})")
_EXTRA = "_extra_state"
_ARGS, _VERSION, _SCHEDULER = "args", "checkpoint_version", "opt_param_scheduler"
_FACTS = (_ARGS, _VERSION, "iteration", _SCHEDULER, "num_floating_point_operations_so_far")
"""Keys in a rank's file whose values are plain data, such as counters; the values become part of the run's state."""
_MIN_VERSION = 3.0
"""First checkpoint version in which the rows of fused qkv weights have today's order."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleChunk:
    """One virtual pipeline stage of one rank: the tensors of the module, under the rank's local names."""

    tensors: Mapping[str, Entry]
    """Local name -> tensor, in the order in which the module registers the tensors."""
    extra: tuple[str, ...]
    """Local names of Transformer Engine's extra state, which Transaxle does not read."""


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """The contents of one rank's model file."""

    folder: str
    """Name of the rank's folder inside the iteration's folder."""
    file: str
    """Path of the model file inside the checkpoint."""
    root: CheckedValue
    """The unpickled contents of the file."""
    run: RunState
    """Arguments, counters and scheduler state of the run."""
    chunks: tuple[ModuleChunk, ...]
    """The rank's share of the model, divided into the rank's virtual pipeline stages."""
    unread: Mapping[str, str]
    """Key in the file -> description, for values that Transaxle does not read."""
    checksums: tuple[Checksum, ...]


def read_rank(inline: NumbersInMemory, prefix: str, folder: str) -> RankFile:
    """Read the model file of one rank.

    Args:
        inline: storage that reads the checkpoint's files.
        prefix: path of the iteration's folder, with a final `/`; empty if this folder is the checkpoint itself.
        folder: name of the rank's folder in the iteration's folder.

    Raises:
        Refused: with one of the codes UNSAFE_PICKLE or CORRUPT if the file is no valid pickle; with the code
            UNSUPPORTED if its version is too old.
        StorageError: with the code IO if the file cannot be read.
    """
    file = f"{prefix}{folder}/{MEGATRON_MODEL}"
    saved = read_saved(inline, file, allowed=NAMES)
    root = CheckedValue(saved.value, file)
    _check_version(root)
    unread: dict[str, str] = {}
    chunks: dict[int, ModuleChunk] = {}
    for key, node in root.items():
        stage = _MODEL.fullmatch(key) if isinstance(key, str) else None
        if stage is not None:
            chunks[int(stage[1] or 0)] = _chunk(TensorReader(inline, file), node, unread)
        elif key not in (*_FACTS, OPTIMIZER_KEY, STEPS):
            unread[str(key)] = "state of Megatron's that is not read"
    if not chunks:
        raise root.fault("it holds no model")
    if sorted(chunks) != list(range(len(chunks))):
        raise root.fault(f"it holds the stages {sorted(chunks)[:8]} of a virtual pipeline, which are not all")
    run = run_state({key: root.value[key] for key in _FACTS if key in root.value})
    return RankFile(
        folder, file, root, run, tuple(chunk for _, chunk in sorted(chunks.items())), unread, saved.checksums
    )


def _check_version(root: CheckedValue) -> None:
    """Refuse files of old checkpoint versions, in which the rows of fused qkv weights may be in a different order.

    Raises:
        Refused: with the code CORRUPT if the version is malformed; with the code UNSUPPORTED if the version is too old.
    """
    node = root.get(_VERSION)
    version = 0.0 if node is None else node.real()
    if version < _MIN_VERSION:
        message = f"its checkpoint_version is {version:g}; below {_MIN_VERSION:g}, q, k and v may be in another order"
        hint = "Load it with the Megatron-LM that wrote it, save it with a release since 2021, and convert the result."
        raise refuse("UNSUPPORTED", message, file=root.file, hint=hint)


def _chunk(reader: TensorReader, model: CheckedValue, unread: dict[str, str]) -> ModuleChunk:
    """Return the tensors of a module; values that are neither tensors nor extra state are added to `unread`."""
    tensors: dict[str, Entry] = {}
    extra: list[str] = []
    places: dict[tuple[Extent, ...], str] = {}
    for name, node in model.string_items():
        if name.rpartition(".")[2] == _EXTRA:
            if node.value is not None:
                extra.append(name)
        elif isinstance(node.value, dict):
            message = f"{name!r} is a module in a module: this is the model of a Megatron-LM before megatron-core"
            hint = "Load the file with Megatron-LM, save it with --use-mcore-models, and convert the result."
            raise refuse("UNSUPPORTED", message, file=model.file, hint=hint)
        elif isinstance(node.value, TensorRef | Object) and is_tensor(node.value):
            entry = reader.tensor(name, node)
            # A second name for the same bytes, which a different module class reads, does not count as a tensor.
            if entry.extents and places.setdefault(entry.extents, name) == name:
                tensors[name] = entry
        elif is_tensor(node.value):
            message = "it is a quantized tensor, whose numbers Megatron keeps in several"
            hint = "Save the checkpoint without --fp8-param-gather."
            raise refuse("UNSUPPORTED", message, file=model.file, tensor=name, hint=hint)
        elif node.value is not None:
            unread[f"{'/'.join(model.path)}/{name}"] = f"a {type(node.value).__name__}"
    return ModuleChunk(tensors, tuple(extra))


_FOLDER = re.compile(r"mp_rank_(\d{2,6})((?:_\d{3,6}){0,2})")
_MAX_RANKS = 1 << 20
_EQUAL_ARGUMENTS = (
    *dict.fromkeys(KEYS.values()), *DEGREES.values(), "padded_vocab_size", "swiglu", "moe_layer_freq",
    "group_query_attention", "multi_latent_attention", "untie_embeddings_and_output_weights", "add_bias_linear",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "use_distributed_optimizer",
    "overlap_grad_reduce", "ddp_bucket_size", "ddp_num_buckets", "optimizer",
)  # fmt: skip
"""Megatron arguments that determine how files are read; each must have the same value in all files."""
_OTHER_RANKS = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")
"""Megatron arguments of runs in which the first ranks have a separate model, an encoder."""
_COPY = "Copy the missing folders; where each machine wrote to its own disk, gather the folders in one place first."


@dataclass(frozen=True, slots=True)
class Mesh:
    """The parallel degrees of a run."""

    tp: int = 1
    """Tensor-parallel degree of all tensors except those of experts."""
    pp: int = 1
    """Number of pipeline stages."""
    ep: int = 1
    """Expert-parallel degree."""
    etp: int = 1
    """Tensor-parallel degree of the experts' tensors."""
    vp: int = 1
    """Number of virtual pipeline stages on each rank."""


@dataclass(frozen=True, slots=True, order=True)
class MeshPlace:
    """A rank's coordinates on the mesh: pipeline stage, expert-parallel rank, tensor-parallel rank."""

    pp: int
    ep: int
    tp: int


def folder_of(place: MeshPlace, mesh: Mesh) -> str:
    """Return the name that Megatron gives to a rank's folder."""
    stage = f"_{place.pp:03d}" if mesh.pp > 1 else ""
    return f"mp_rank_{place.tp:02d}{stage}{f'_{place.ep:03d}' if mesh.ep > 1 else ''}"


def place_ranks(files: Sequence[RankFile]) -> tuple[Mesh, Mapping[MeshPlace, RankFile]]:
    """Find the coordinates of each rank on the mesh of the run.

    Raises:
        Refused: with the code CORRUPT if files contradict each other or the names of their folders; with the code
            INCOMPLETE if folders of ranks are missing; with the code UNSUPPORTED if the mesh cannot be determined.
    """
    faults = Faults()
    first = files[0]
    for file in files[1:]:
        for key in _conflicting_keys(first.run, file.run):
            value, first_value = _value_of(file.run, key), _value_of(first.run, key)
            message = f"its args have {key} {value!r}; those of {first.folder} have {first_value!r}"
            hint = "The folder belongs to another checkpoint: remove it, or copy the right folder."
            faults.add("CORRUPT", message, file.file, hint=hint)
    if faults:
        raise faults.error()
    mesh = _mesh(first, [file.folder for file in files])
    ranks: dict[MeshPlace, RankFile] = {}
    for file in files:
        place = _place_of_folder(file.folder, mesh)
        if place is None:
            message = f"no rank of a run with {_mesh_text(mesh)} has a folder of this name"
            faults.add("CORRUPT", message, file.file, hint="Remove the folder that belongs to another checkpoint.")
        else:
            ranks[place] = file
    if faults:
        raise faults.error()
    _check_complete(ranks, mesh, first)
    _check_numbers(ranks, mesh)
    return mesh, dict(sorted(ranks.items()))


def _conflicting_keys(first: RunState, second: RunState) -> list[str]:
    keys = [key for key in _EQUAL_ARGUMENTS if first.args.get(key) != second.args.get(key)]
    return keys + [key for key in ("iteration", "checkpoint_version") if first.facts.get(key) != second.facts.get(key)]


def _value_of(run: RunState, key: str) -> Any:
    return run.args.get(key) if key in _EQUAL_ARGUMENTS else run.facts.get(key)


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
    if mesh.tp * mesh.pp * mesh.ep * mesh.vp > _MAX_RANKS:
        raise refuse(
            "CORRUPT", f"its args claim {_mesh_text(mesh)}; at most {_MAX_RANKS} ranks are read", file=file.file
        )
    if mesh.tp % mesh.etp:
        message = (
            f"the experts' tensors are cut over {mesh.etp} ranks and all others over {mesh.tp}, which it does not "
            "divide: several ranks wrote to one folder, and only the last one's experts are there"
        )
        raise refuse("UNSUPPORTED", message, file=file.file, hint="Save the checkpoint with --ckpt-format torch_dist.")
    return mesh


def _degree(file: RankFile, name: str, value: object) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_RANKS):
        raise refuse("CORRUPT", f"args > {name}: expected a number of ranks, not {value!r}", file=file.file)
    return value


def _place_of_folder(folder: str, mesh: Mesh) -> MeshPlace | None:
    match = _FOLDER.fullmatch(folder)
    numbers = [int(number) for number in match[2].split("_")[1:]] if match is not None else []
    axes = [axis for axis, size in (("pp", mesh.pp), ("ep", mesh.ep)) if size > 1]
    if match is None or len(numbers) != len(axes):
        return None
    coordinates = dict(zip(axes, numbers, strict=True))
    place = MeshPlace(coordinates.get("pp", 0), coordinates.get("ep", 0), int(match[1]))
    inside = place.tp < mesh.tp and place.pp < mesh.pp and place.ep < mesh.ep
    return place if inside and folder_of(place, mesh) == folder else None


def _check_complete(ranks: Mapping[MeshPlace, RankFile], mesh: Mesh, first: RankFile) -> None:
    """Check that there are the files that together contain all dense parameters and all experts."""
    faults = Faults()
    dense = {(place.pp, place.tp) for place in ranks}
    experts = {(place.pp, place.ep, place.tp % mesh.etp) for place in ranks}
    has_experts = bool(first.run.args.get("num_experts")) or mesh.ep > 1
    for place in (MeshPlace(pp, ep, tp) for pp in range(mesh.pp) for ep, tp in _writers(mesh)):
        has_its_experts = (place.pp, place.ep, place.tp % mesh.etp) in experts or not has_experts
        if (place.pp, place.tp) not in dense or not has_its_experts:
            message = f"the folder of this rank is missing: the run had {_mesh_text(mesh)}"
            faults.add("INCOMPLETE", message, f"{_iteration_prefix(first)}{folder_of(place, mesh)}", hint=_COPY)
        if faults.full:
            break
    if faults:
        raise faults.error()


def _check_numbers(ranks: Mapping[MeshPlace, RankFile], mesh: Mesh) -> None:
    """Check that each file is in the folder of the rank that wrote it, by the rank number in the file's arguments.

    Some converters write the same rank number into all files; if a number repeats, nothing is checked.
    """
    numbers = {place: _writer_rank(file.run.args) for place, file in ranks.items()}
    if None in numbers.values() or len(set(numbers.values())) < len(ranks):
        return
    faults = Faults()
    for place, file in ranks.items():
        args = file.run.args
        wrote = _place_of_rank(args, mesh, place)
        if wrote != place:
            writer = f"rank {args['rank']} of {args['world_size']}"
            message = f"its args say that {writer} wrote it; that rank's folder is {folder_of(wrote, mesh)}"
            faults.add("CORRUPT", message, file.file, hint="Put the files of each rank back into its own folder.")
    if faults:
        raise faults.error()


def _writer_rank(args: Mapping[str, Any]) -> int | None:
    """Return the number of the rank that wrote a file, according to the arguments in the file; None if they do not
    state it.
    """
    rank, world = args.get("rank"), args.get("world_size")
    is_known = type(rank) is int and type(world) is int and not any(args.get(name) for name in _OTHER_RANKS)
    return rank if is_known and 0 <= rank < world else None  # type: ignore[operator]


def _place_of_rank(args: Mapping[str, Any], mesh: Mesh, place: MeshPlace) -> MeshPlace:
    """Return the mesh coordinates that Megatron gives to the rank whose number is in these arguments.

    Rank numbers count tensor-parallel ranks fastest and pipeline stages slowest. A coordinate that the arguments do not
    determine is taken from `place`.
    """
    rank, world, context = args["rank"], args["world_size"], args.get("context_parallel_size") or 1
    ranks_per_stage = mesh.tp * context if args.get("use_tp_pp_dp_mapping") else world // mesh.pp
    # with context parallelism, Megatron's releases number expert-parallel ranks in different ways
    expert = rank // mesh.etp % mesh.ep if context == 1 else place.ep
    return MeshPlace(rank // max(ranks_per_stage, 1) % mesh.pp, expert, rank % mesh.tp)


def _writers(mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Yield the coordinates (expert-parallel rank, tensor-parallel rank) of ranks that together have all parameters of
    a stage.

    In Megatron's numbering of ranks, tensor-parallel and expert-tensor-parallel ranks are adjacent, so the first ranks
    of a stage are enough.
    """
    for rank in range(max(mesh.tp, mesh.etp * mesh.ep)):
        yield rank // mesh.etp % mesh.ep, rank % mesh.tp


def _iteration_prefix(file: RankFile) -> str:
    return file.file[: -len(f"{file.folder}/{file.file.rpartition('/')[2]}")]


def _mesh_text(mesh: Mesh) -> str:
    sizes = (("tp", mesh.tp), ("pp", mesh.pp), ("ep", mesh.ep), ("etp", mesh.etp), ("vp", mesh.vp))
    return " ".join(f"{axis} {size}" for axis, size in sizes if size > 1 or axis in ("tp", "pp"))
