"""Which ranks wrote a checkpoint: their places on the mesh, and that together they hold everything.

mp_rank_TT              tensor-parallel rank
mp_rank_TT_PPP          and pipeline stage, or expert-parallel rank: the run's arguments tell
mp_rank_TT_PPP_EEE      all three

Not every combination has a folder: ranks that hold nothing of their own write nothing. Dense parameters must be there
of every tensor-parallel rank and stage, experts of every expert-parallel and expert-tensor-parallel rank and stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transaxle.errors import Faults, refuse
from transaxle.formats.megatron.arguments_of_run import DEGREES, KEYS, RunState
from transaxle.formats.megatron.legacy.rank_file import RankFile

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
