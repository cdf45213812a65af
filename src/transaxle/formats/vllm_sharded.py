"""vLLM's `sharded_state`: safetensors files from which each tensor-parallel worker of vLLM reads its own tensors only.

    OUT/model-rank-0-part-0.safetensors     what the worker of rank 0 has: the parameters and buffers of its own model
    OUT/model-rank-1-part-0.safetensors
    OUT/config.json, tokenizer files        as in the hub's folder

vLLM (`load_format="sharded_state"`) opens the files of its rank, and copies each tensor into the tensor of the same
name in its model's state dict. It refuses a folder that lacks a name of the state dict, or has a name that the state
dict lacks. If one tensor of the state dict has several names, only the first name in alphabetical order counts.

The files have no place for the whole model: which part a rank has is known only to vLLM's code. So Transaxle adds a
note to each header, which vLLM ignores: the name and the shape of each whole tensor, and the intervals of it that the
rank has. These notes allow Transaxle to open the folder again as one checkpoint. Folders that vLLM itself saved have no
notes, and are refused: they contain the tensors as vLLM's kernels packed them, which differs from one machine to
another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from transaxle.arguments import Degrees
from transaxle.axes.geometry import Intervals, count_positions, whole
from transaxle.axes.layout.divide import Shares, SharesByName
from transaxle.errors import Faults, TransaxleError, refuse
from transaxle.formats.catalog import PACKED, Container, Draft, Entry, Extent, Fragment, Shape, Spec, Twin
from transaxle.formats.deepspeed.rank_files import RankShard, block_extents, merge_shards
from transaxle.formats.deepspeed.spread import ShardBlock, Spread, blocks_at
from transaxle.formats.registry import VLLM_FILE, VLLM_SHARDED, sort_sidecars
from transaxle.formats.safetensors import Header, lay_out_file, read_header, size_of
from transaxle.formats.shards import Sized, refuse_many, split
from transaxle.formats.storage.storage import NotJsonError, Storage, parse_json_as

_NAME = re.compile(VLLM_FILE)
_NOTE = "transaxle.rank"
"""Key in a header's metadata of the note about the rank's parts."""
_ONE = np.ones((), "<f4").tobytes()
_ONE_DTYPE = "F32"
_OWN = (
    "Convert the folder from which vLLM read the model. Folders of sharded state that vLLM saved are not read, because "
    "vLLM packs weights for its kernels before it saves them."
)
_ONE_RANK = "One rank has whole tensors:  --tp 1."
_AGAIN = "Copy the folder again, with the files of all ranks, or write it anew."


class _Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a tensor that a rank has."""

    name: str
    """Name of the tensor in the dialect `vllm`."""
    shape: list[int]
    """Shape of the whole tensor."""
    dim: int = 0
    """Dim that is cut."""
    intervals: list[tuple[int, int]] | None = None
    """Intervals of that dim that the rank has, in the order of the rank's tensor; None if the rank has the whole
    tensor.
    """


class _Note(msgspec.Struct, frozen=True):
    """The note in the header of one file."""

    ranks: int
    """Number of tensor-parallel ranks."""
    parts: int
    """Number of files of this rank."""
    tensors: dict[str, _Part]
    """Name in the file -> part of a tensor. Names in the file that are missing here are scales that vLLM sets to 1."""


def draft(
    tensors: Sequence[Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_size: int | None = None,
    degrees: Degrees | None = None,
    parts: SharesByName | None = None,
    names: Mapping[str, str] | None = None,
    ones: Sequence[str] = (),
) -> Draft:
    """Lay out the files of all ranks.

    Args:
        tensors: the tensors of the whole model, under the names of the dialect `vllm`.
        metadata: strings for the header of each file.
        shard_size: maximum number of tensor bytes in one file of a rank; a larger tensor gets a separate file.
        degrees: the parallel degrees; only `tp` is used, because `parts` already takes `ep` into account.
        parts: the intervals of each tensor that each rank has.
        names: tensor name -> name under which vLLM looks for it in the files; a missing name is the same.
        ones: names of numbers in the files that vLLM's model has besides its weights, and that are 1.

    Raises:
        Refused: with each tensor that cannot be stored, and the code UNSUPPORTED, NAME_COLLISION or SHAPE_MISMATCH.
    """
    degrees = degrees or Degrees()
    ranks = degrees.tp
    pieces, problems = {}, Faults()
    for spec in tensors:
        try:
            pieces[spec.name] = _pieces(spec, (parts or {}).get(spec.name), ranks)
        except TransaxleError as error:
            problems.extend(*error.refusals)
    if problems:
        raise problems.error()
    files: dict[str, int] = {}
    owners: dict[str, dict[str, int]] = {}
    fragments: list[Fragment] = []
    extents: defaultdict[str, list[Extent]] = defaultdict(list)
    copies: defaultdict[str, list[Extent]] = defaultdict(list)
    for rank in range(ranks):
        rank_files = _lay_out_rank(tensors, pieces, rank, ranks, shard_size, names or {}, ones, metadata or {})
        for file, (local_entries, file_fragments, files[file]) in rank_files.items():
            owners[file] = {"tp": rank, "ep": rank} if degrees.ep > 1 else {"tp": rank}
            fragments += file_fragments
            for name, entry in local_entries.items():
                shard = RankShard(entry.dtype, entry.shape, entry.extents, file)
                for block, is_copy in pieces[name].blocks[rank]:
                    (copies if is_copy else extents)[name].extend(block_extents(shard, block, block.start))
    entries = {spec.name: Entry(spec.name, spec.dtype, spec.shape, tuple(extents[spec.name])) for spec in tensors}
    repeated = {name: tuple(places) for name, places in copies.items()}
    return Draft(VLLM_SHARDED.name, entries, files, tuple(fragments), copies=repeated, owners=owners)


class _Pieces(msgspec.Struct, frozen=True):
    """How a tensor is cut over ranks."""

    dim: int
    intervals: tuple[Intervals, ...] | None
    """For each rank, its intervals of the dim; two intervals of different ranks are equal or have no index in common.
    None if every rank has the whole tensor.
    """
    blocks: tuple[tuple[tuple[ShardBlock, bool], ...], ...]
    """For each rank, its boxes, each with whether an earlier rank has the same box."""
    shapes: tuple[Shape, ...]
    """For each rank, the shape of its part."""


def _pieces(spec: Spec, part: Shares | None, ranks: int) -> _Pieces:
    """Return how a tensor is cut.

    Raises:
        Refused: with the code UNSUPPORTED if the elements of a cut tensor are packed, or if no rank has a certain part
            of the tensor.
    """
    if part is None:
        boxes = blocks_at(_positions(spec.shape, 0, None))
        blocks_of_ranks = tuple(tuple((box, rank > 0) for box in boxes) for rank in range(ranks))
        return _Pieces(0, None, blocks_of_ranks, (spec.shape,) * ranks)
    if spec.dtype in PACKED:
        raise refuse("UNSUPPORTED", f"{spec.dtype} elements are not cut over ranks", tensor=spec.name, hint=_ONE_RANK)
    dim, positions = part
    intervals = _split_alike(positions)
    covered: set[tuple[int, int]] = set()
    blocks = []
    for rank_intervals in intervals:
        boxes = blocks_at(_positions(spec.shape, dim, rank_intervals))
        blocks.append(tuple((box, (box.start[dim], box.start[dim] + box.shape[dim]) in covered) for box in boxes))
        covered.update(rank_intervals)
    if count_positions(tuple(covered)) != spec.shape[dim]:
        message = f"the cuts of the dialect give no rank some of the {spec.shape[dim]} indices of dim {dim}"
        raise refuse("UNSUPPORTED", message, tensor=spec.name, hint=_ONE_RANK)
    counts = map(count_positions, intervals)
    shapes = tuple((*spec.shape[:dim], count, *spec.shape[dim + 1 :]) for count in counts)
    return _Pieces(dim, intervals, tuple(blocks), shapes)


def _split_alike(positions: Sequence[Intervals]) -> tuple[Intervals, ...]:
    """Split the intervals of all ranks so that two intervals are equal or have no index in common."""
    ends = sorted({end for intervals in positions for interval in intervals for end in interval})
    return tuple(
        tuple(
            inner
            for start, stop in intervals
            for inner in pairwise([start, *(end for end in ends if start < end < stop), stop])
            if start < stop
        )
        for intervals in positions
    )


def _positions(shape: Shape, dim: int, intervals: Intervals | None) -> list[Intervals]:
    """Return the intervals of each dim that a rank has; `intervals` are those of the cut dim, and None means that the
    rank has the whole tensor.
    """
    positions = [*map(whole, shape)]
    if intervals is not None:
        positions[dim] = intervals
    return positions


_FileLayout = tuple[dict[str, Entry], list[Fragment], int]
"""The entries of a file by the tensors' names in the dialect, the bytes of the file that are known, and its size."""


def _lay_out_rank(
    tensors: Sequence[Spec],
    pieces: Mapping[str, _Pieces],
    rank: int,
    ranks: int,
    shard_size: int | None,
    names: Mapping[str, str],
    ones: Sequence[str],
    metadata: Mapping[str, str],
) -> dict[str, _FileLayout]:
    """Lay out the files of one rank.

    Args:
        tensors: the tensors of the whole model.
        pieces: how each tensor is cut.
        rank: the rank.
        ranks: number of ranks.
        shard_size: maximum number of tensor bytes in one file.
        names: tensor name -> name in the files.
        ones: names of numbers in the files that are 1.
        metadata: strings for the header of each file.

    Raises:
        Refused: with each tensor that cannot be stored.
        UsageError: with the code AMBIGUOUS if there would be too many files.
    """
    faults, names_so_far = Faults(), set[str]()
    sized: list[Sized] = []
    parts: dict[str, _Part] = {}
    specs = [(spec.name, names.get(spec.name, spec.name), spec) for spec in tensors]
    for name, stored_name, spec in specs:
        cut = pieces[name]
        intervals = None if cut.intervals is None else list(cut.intervals[rank])
        parts[stored_name] = _Part(name, list(spec.shape), cut.dim, intervals)
        local = Spec(stored_name, spec.dtype, cut.shapes[rank])
        sized.append((local, size_of(local, names_so_far, faults)))
        names_so_far.add(stored_name)
    for name in ones:
        scale = Spec(name, _ONE_DTYPE, ())
        sized.append((scale, size_of(scale, names_so_far, faults)))
        names_so_far.add(name)
    if faults:
        raise faults.error()
    shards = split(sized, shard_size)
    if shard_size is not None:
        refuse_many(ranks * len(shards), ranks * sum(size for _, size in sized), shard_size)
    layouts = {}
    for number, shard in enumerate(shards):
        file = f"model-rank-{rank}-part-{number}.safetensors"
        tensors_here = {spec.name: parts[spec.name] for spec, _ in shard if spec.name in parts}
        note = msgspec.json.encode(_Note(ranks, len(shards), tensors_here)).decode()
        entries, fragments, size = lay_out_file(file, shard, {**metadata, _NOTE: note})
        numbers = [Fragment(file, entry.extents[0].offset, _ONE) for entry in entries if entry.name not in parts]
        local_entries = {parts[entry.name].name: entry for entry in entries if entry.name in parts}
        layouts[file] = local_entries, [*fragments, *numbers], size
    return layouts


def open_sharded(storage: Storage, path: str, member: str) -> Container:
    """Open the files of all ranks that Transaxle wrote as one checkpoint, with the names of the dialect `vllm`.

    Args:
        storage: storage that reads the files.
        path: the path as the user typed it.
        member: name of one of the files.

    Raises:
        Refused: with the code UNSUPPORTED for files that vLLM saved; with the code INCOMPLETE for missing files; with
            the codes CORRUPT, SHAPE_MISMATCH and DTYPE_MIXED for files that contradict each other; with the codes of
            `read_header`.
        StorageError: with the code IO if a file cannot be read.
    """
    files = {
        (int(match["rank"]), int(match["part"])): name
        for name in storage.listing().names
        if (match := _NAME.fullmatch(name))
    }
    headers = {file: read_header(storage, file) for _, file in sorted(files.items())}
    notes = {file: _note(file, header) for file, header in headers.items()}
    ranks = notes[member].ranks
    _refuse_missing(files, notes, ranks)
    entries, twins = _join(files, headers, notes, ranks)
    sizes = {file: storage.size(file) for file in headers}
    sidecars = sort_sidecars(storage, sizes)
    first = next(iter(headers.values()))
    metadata = {key: text for key, text in first.metadata.items() if key != _NOTE}
    return Container(
        VLLM_SHARDED.name, path, storage, entries, sizes, metadata, sidecars.carried, sidecars.ignored, twins=twins
    )


def _note(file: str, header: Header) -> _Note:
    """Return the note in a file's header.

    Raises:
        Refused: with the code UNSUPPORTED if there is none; with the code CORRUPT if it contradicts the header.
    """
    text = header.metadata.get(_NOTE)
    if text is None:
        message = "its header does not say which parts of the model's tensors the file has: vLLM saved it"
        raise refuse("UNSUPPORTED", message, file=file, hint=_OWN)
    try:
        note = parse_json_as(text, _Note)
    except NotJsonError as error:
        message = f"the header's note {_NOTE} is malformed: {error}"
        raise refuse("CORRUPT", message, file=file, hint=_AGAIN) from None
    faults = Faults()
    for name, part in note.tensors.items():
        entry = header.entries.get(name)
        if entry is None:
            faults.add("INCOMPLETE", "the header's note lists it, but the file has no tensor of this name", file, name)
        elif (expected := _local_shape(part)) != entry.shape:
            message = (
                f"its shape is {list(entry.shape)}; by the header's note it is {part.shape}, cut in dim {part.dim}"
            )
            faults.add("CORRUPT" if expected is None else "SHAPE_MISMATCH", message, file, name, _AGAIN)
    if faults:
        raise faults.error()
    return note


def _local_shape(part: _Part) -> Shape | None:
    """Return the shape of a rank's part; None if its intervals do not lie in the tensor."""
    if part.intervals is None:
        return tuple(part.shape)
    if not 0 <= part.dim < len(part.shape) or min(part.shape) < 0:
        return None
    length = part.shape[part.dim]
    if not all(0 <= start < stop <= length for start, stop in part.intervals):
        return None
    count = count_positions(part.intervals)
    return (*part.shape[: part.dim], count, *part.shape[part.dim + 1 :])


def _refuse_missing(files: Mapping[tuple[int, int], str], notes: Mapping[str, _Note], ranks: int) -> None:
    """Refuse folders that lack files, or have files of another number of ranks.

    Raises:
        Refused: with the code CORRUPT or INCOMPLETE.
    """
    faults = Faults()
    for (rank, _), file in files.items():
        if notes[file].ranks != ranks or rank >= ranks:
            message = f"it is a file of {notes[file].ranks} ranks, beside files of {ranks}: of two conversions"
            faults.add("CORRUPT", message, file, hint=_AGAIN)
    for rank in range(min(ranks, len(files) + 1)):
        counts = {notes[file].parts for (owner, _), file in files.items() if owner == rank}
        numbers = {part for owner, part in files if owner == rank}
        if len(counts) > 1:
            faults.add("CORRUPT", f"the files of rank {rank} are of two conversions", None, hint=_AGAIN)
        elif numbers != set(range(min(next(iter(counts), 1), len(numbers) + 1))):
            faults.add("INCOMPLETE", f"of {ranks} ranks, files of rank {rank} are missing", None, hint=_AGAIN)
    if faults:
        raise faults.error()


def _join(
    files: Mapping[tuple[int, int], str], headers: Mapping[str, Header], notes: Mapping[str, _Note], ranks: int
) -> tuple[dict[str, Entry], tuple[Twin, ...]]:
    """Return the whole tensors, and pairs of parts that must be equal because several ranks have them.

    Raises:
        Refused: with the code INCOMPLETE for a tensor that a rank lacks, and the codes CORRUPT, SHAPE_MISMATCH and
            DTYPE_MIXED for parts that contradict each other.
    """
    holdings: defaultdict[str, dict[int, tuple[str, _Part, Entry]]] = defaultdict(dict)
    for (rank, _), file in sorted(files.items()):
        for stored_name, part in notes[file].tensors.items():
            holdings[part.name][rank] = file, part, headers[file].entries[stored_name]
    faults = Faults()
    entries: dict[str, Entry] = {}
    twins: list[Twin] = []
    for name, by_rank in holdings.items():
        if len(by_rank) < ranks:
            lacking = next(rank for rank in range(ranks) if rank not in by_rank)
            faults.add("INCOMPLETE", f"the files of rank {lacking} lack it", None, name, _AGAIN)
            continue
        try:
            entries[name], pairs = _join_one(name, [by_rank[rank] for rank in range(ranks)])
            twins += pairs
        except TransaxleError as error:
            faults.extend(*error.refusals)
        if faults.full:
            break
    if faults:
        raise faults.error()
    return entries, tuple(twins)


def _join_one(name: str, of_ranks: Sequence[tuple[str, _Part, Entry]]) -> tuple[Entry, list[Twin]]:
    file, first, _ = of_ranks[0]
    shape = tuple(first.shape)
    blocks = []
    for file, part, _ in of_ranks:
        if tuple(part.shape) != shape or (part.dim, part.intervals is None) != (first.dim, first.intervals is None):
            message = f"the shape is {part.shape} here, and {first.shape} in {of_ranks[0][0]}"
            raise refuse("CORRUPT", message, file=file, tensor=name, hint=_AGAIN)
        intervals = None if part.intervals is None else tuple(part.intervals)
        blocks.append(blocks_at(_positions(shape, part.dim, intervals)))
    shards = [RankShard(entry.dtype, entry.shape, entry.extents, file) for file, _, entry in of_ranks]
    return merge_shards(name, shards, Spread(shape, tuple(shard.shape for shard in shards), tuple(blocks)))
