"""Live tensors as a checkpoint container: the chunks of its tensors are the ranks' shards, and the memory of the ranks
takes the place of files.

The catalog of this container is equal on all ranks, so all ranks make equal plans. Each rank can read only its own
chunks. The catalog names one rank for each chunk; a rank that needs a chunk and holds a replica of it reads its own
replica (`Replicas`).

**Value checks** compare copies that must be equal, and check that values are zero if the target dialect omits them.

For a DTensor, torch guarantees that all replicas are equal. Nothing guarantees this for plain tensors on several ranks
(norms beside tensor-parallel weights, a model under DDP, counters), or for a tensor whose ranks are on different
meshes. Only one copy of such a tensor is saved, so all its copies are compared before the save. Tensors for which the
target dialect has no name must be zero.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from msgspec.structs import replace

from transaxle.axes.geometry import lexicographic_boxes, row_major
from transaxle.axes.layout.relayout import Check
from transaxle.engine.duplicates import PlannedCheck
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Extent, nbytes
from transaxle.formats.storage.storage import Listing, Storage
from transaxle.formats.training_state import GROUPS, ParamGroup
from transaxle.live.global_tensors import Census, GlobalTensor
from transaxle.live.transport.world import World
from transaxle.move.workers import Item, Load
from transaxle.torch_tensors import (
    Bytes,
    Positions,
    as_bytes,
    byte_view,
    copy_to_cpu,
    local_of,
    local_shape,
    with_own_bytes,
)

FORMAT = "live"
CONFIG = "config.json"
_SEPARATOR = "/"
_APART = 4
"""A requested range is copied to the CPU by itself if the whole tensor is at least this many times longer; otherwise
the whole tensor is copied.
"""
_KEPT = 1 << 30
"""Largest number of bytes of CPU copies of tensors that remain cached."""


def file_of(rank: int, name: str) -> str:
    """Return the name of the virtual file that represents a rank's shard of a tensor."""
    return f"{rank}{_SEPARATOR}{name}"


def rank_of(file: str) -> int:
    """Return the rank whose memory a virtual file represents."""
    return int(file.partition(_SEPARATOR)[0])


def tensor_of(file: str) -> str:
    """Return the name of the tensor whose local shard a virtual file represents."""
    return file.partition(_SEPARATOR)[2]


class Memory(Storage):
    """A `Storage` whose virtual files are this rank's tensors, in row-major order.

    Contiguous CPU tensors are read without a copy. GPU tensors and strided tensors are copied to the CPU when they are
    read. If a small range of a contiguous tensor is requested, only this range is copied, otherwise the whole tensor.
    Copies of whole tensors remain cached, up to a limit.

    Args:
        tensors: name -> tensor, for this rank's tensors.
        rank: number of this rank.
        files: file name -> content, for the checkpoint's files that are not tensors.
    """

    single = None
    path = FORMAT

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int, files: Mapping[str, bytes]) -> None:
        self._tensors = tensors
        self._rank = rank
        self._files = files
        self._lent: dict[str, Bytes] = {}
        self._cached: OrderedDict[str, Bytes] = OrderedDict()

    def listing(self, folder: str = "") -> Listing:
        """List the virtual files; there are no folders."""
        return Listing(tuple(sorted(self._files)) if not folder else (), (), {})

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return len(self._files[name]) if name in self._files else self._local(name).nbytes

    def version(self, name: str) -> str:
        """Return the file's name as its version, because changes of memory cannot be detected."""
        return name

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Copy bytes of a virtual file, from an offset on, into `view`."""
        view[:] = self.lend(name, offset, len(view)).data

    def lend(self, name: str, offset: int, size: int) -> Bytes:
        """Return bytes of a virtual file; if the tensor is contiguous on the CPU, they are not copied. The caller must
        not change the bytes.
        """
        if name in self._files:
            return np.frombuffer(self._files[name], np.uint8, size, offset)
        lent = self._lent.get(name)
        if lent is None:
            local = self._local(name)
            if local.device.type == "cpu" and local.is_contiguous():
                lent = self._lent[name] = as_bytes(local)
            # A small range is copied by itself. For a larger range, the whole tensor is copied and cached, because the
            # other ranges of the tensor are usually read next.
            elif local.is_contiguous() and _APART * size <= local.nbytes:
                return as_bytes(copy_to_cpu(byte_view(local)[offset : offset + size]))
            else:
                lent = self._copy_to_cpu(name, local)
        return lent[offset : offset + size]

    def owner(self, name: str) -> int:
        """Return the rank whose memory a virtual file represents."""
        return rank_of(name)

    def recheck(self) -> None:
        """Do nothing, because changes of memory cannot be detected, and each byte is read only once."""

    def close(self) -> None:
        """Drop all cached copies of tensors."""
        self._lent.clear()
        self._cached.clear()

    def _local(self, name: str) -> torch.Tensor:
        """Return this rank's shard of a tensor; a 0-d tensor of another rank is read from this rank's equal copy."""
        rank, _, tensor = name.partition(_SEPARATOR)
        own_tensor = self._tensors.get(tensor)
        # 0-d tensors (such as a step) are read by every rank for planning, although the catalog names one rank as their
        # owner. 0-d tensors are equal on all ranks, so each rank reads its own copy.
        if int(rank) != self._rank and (own_tensor is None or own_tensor.dim()):
            raise refuse("IO", f"rank {self._rank} cannot read it: it is in the memory of rank {rank}", tensor=tensor)
        return with_own_bytes(local_of(self._tensors[tensor]))

    def _copy_to_cpu(self, name: str, local: torch.Tensor) -> Bytes:
        """Copy a tensor to the CPU, and store the copy in a cache of the most recently used copies."""
        # The entry is removed and appended, so that the first entry of the cache is the least recently used copy.
        copied = self._cached.pop(name, None)
        if copied is None:
            copied = as_bytes(copy_to_cpu(local))
        self._cached[name] = copied
        # The new copy remains cached even if it alone exceeds the limit, because it is about to be used.
        while len(self._cached) > 1 and sum(map(len, self._cached.values())) > _KEPT:
            self._cached.popitem(last=False)
        return copied


def memory_of(container: Container) -> Memory:
    """Return the `Memory` of a container of live tensors."""
    if not isinstance(container.storage, Memory):
        raise TypeError(f"{container.path} is not a model in memory")
    return container.storage


def container(
    global_tensors: Census,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    config: Mapping[str, Any] | None,
    *,
    groups: Sequence[ParamGroup] = (),
    files: Mapping[str, bytes] | None = None,
) -> Container:
    """Return a checkpoint container whose tensors are the live tensors of all ranks.

    Args:
        global_tensors: the tensors of all ranks, with the shard that each rank holds.
        tensors: name of a shard (see `local_parts`) -> local tensor, for this rank.
        rank: number of this rank.
        config: the model's config, which is stored as the checkpoint's config.json.
        groups: the optimizer's parameter groups, which list the names of their parameters.
        files: file name -> content, for additional files of the checkpoint.

    Post-condition: one replica of each shard is read, from the rank with the fewest bytes to read until then.

    Raises:
        Refused: with code INCOMPLETE, if no rank holds some region of a tensor.
    """
    load = Load()
    entries = {name: _entry(tensor, load) for name, tensor in global_tensors.items()}
    all_files = dict(files or {})
    if config is not None:
        all_files[CONFIG] = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    metadata = {GROUPS: list(groups)} if groups else {}
    return Container(FORMAT, FORMAT, Memory(tensors, rank, all_files), entries, {}, metadata, carried=tuple(all_files))


def own_entry(tensor: GlobalTensor, rank: int) -> Entry:
    """Return a catalog entry that contains only this rank's chunks of a tensor."""
    chunks = _extents(tensor, tensor.positions[rank], file_of(rank, tensor.name))
    return Entry(tensor.name, tensor.dtype, tensor.shape, tuple(extent for _, extent in chunks))


def _entry(tensor: GlobalTensor, load: Load) -> Entry:
    extents: list[Extent] = []
    covered: set[tuple[tuple[int, int], ...]] = set()
    # Ranks may share some chunks of their shards (such as one key and value head), so each chunk is listed once.
    for intervals, ranks in tensor.boxes.items():
        # Of several replicas, the one on the rank with the fewest bytes so far is listed, or on the lowest of several
        # such ranks, so that all ranks agree. A replica that its rank declares to be a copy is listed only if all
        # replicas are declared copies.
        sources = [rank for rank in ranks if rank not in tensor.spare] or ranks
        owner = load.add(load.least(sources), nbytes(tensor.dtype, local_shape(intervals)))
        for spans, extent in _extents(tensor, intervals, file_of(owner, tensor.part_name(intervals))):
            if spans not in covered:
                covered.add(spans)
                extents.append(extent)
    # No chunk is listed twice. So if no chunk is missing, the sizes of the chunks add up to the size of the tensor.
    size = sum(_count(extent.shape) for extent in extents)
    if size != _count(tensor.shape):
        message = f"all ranks together hold only {size} of its {_count(tensor.shape)} elements"
        raise refuse("INCOMPLETE", message, tensor=tensor.name)
    return Entry(tensor.name, tensor.dtype, tensor.shape, tuple(extents))


def _extents(tensor: GlobalTensor, part: Positions, file: str) -> list[tuple[tuple[tuple[int, int], ...], Extent]]:
    """Return the chunks of a rank's shard: one for each combination of its intervals, or the boxes that make up a flat
    range.
    """
    item = nbytes(tensor.dtype, (1,)) if tensor.shape else 1
    if len(part) < len(tensor.shape):
        return list(_extents_of_range(tensor.shape, part, file, item))
    strides = row_major(local_shape(part))
    per_dim = []
    for intervals in part:
        base, intervals_with_base = 0, []
        for first, last in intervals:
            intervals_with_base.append((first, last, base))
            base += last - first
        per_dim.append(intervals_with_base)
    chunks = []
    for parts in product(*per_dim):
        offset = sum(base * stride for (_, _, base), stride in zip(parts, strides, strict=True)) * item
        start = tuple(first for first, _, _ in parts)
        shape = tuple(last - first for first, last, _ in parts)
        if _count(shape) or not _count(tensor.shape):
            spans = tuple((first, last) for first, last, _ in parts)
            chunks.append((spans, Extent(start, shape, file, offset, strides)))
    return chunks


def _extents_of_range(
    shape: tuple[int, ...], part: Positions, file: str, item: int
) -> Iterator[tuple[tuple[tuple[int, int], ...], Extent]]:
    """Yield the chunks that make up a flat range of a tensor's elements."""
    ((first, stop),), strides = part[0], row_major(shape)
    for box in lexicographic_boxes(shape, first, stop):
        start = tuple(begin for begin, _ in box)
        offset = (sum(at * stride for at, stride in zip(start, strides, strict=True)) - first) * item
        yield box, Extent(start, tuple(end - begin for begin, end in box), file, offset, strides)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


class Replicas:
    """Ranks that hold equal shards of tensors, as the tensors' meshes show.

    Tensors that are not on a single mesh are excluded: their replicas may differ, so all ranks should receive the
    values of one rank.

    Args:
        global_tensors: the tensors of all ranks, with the shard that each rank holds.
    """

    def __init__(self, global_tensors: Census) -> None:
        self._holders: dict[str, frozenset[int]] = {}
        for tensor in global_tensors.values():
            for intervals, ranks in tensor.boxes.items() if not tensor.loose else ():
                alike = frozenset(ranks) - tensor.spare
                if len(alike) > 1:
                    part = tensor.part_name(intervals)
                    self._holders |= {file_of(rank, part): alike for rank in alike}

    def near(self, item: Item) -> list[Item]:
        """Split an item into one item for each receiver that holds some of the bytes itself, and one item for all other
        receivers.

        The new items have the same key, and each receiver is in only one of them.
        """
        shared = {each.file for each in item.transfers} & self._holders.keys()
        own_files = {
            taker: {file for file in shared if taker in self._holders[file] and rank_of(file) != taker}
            for taker in item.target_ranks
        }
        if not any(own_files.values()):
            return [item]
        other_takers = tuple(taker for taker in item.target_ranks if not own_files[taker])
        items = [replace(item, target_ranks=other_takers)] if other_takers else []
        for taker in filter(own_files.get, item.target_ranks):
            transfers = [
                msgspec.structs.replace(each, file=file_of(taker, tensor_of(each.file)))
                if each.file in own_files[taker]
                else each
                for each in item.transfers
            ]
            items.append(replace(item, lazy_transfers=transfers, target_ranks=(taker,)))
        return items


_Peers = tuple[int, ...]
"""Ranks that hold the same shard of a tensor."""
_NAMED = 8
"""Largest number of ranks that a message lists."""
_HINT = (
    "Broadcast the tensor from one rank, or find out why the copies drifted apart (a gradient that is not summed over "
    "all ranks). Use check_copies=False to write one of them."
)


def compare_copies(global_tensors: Census, tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Refuse copies of a tensor that differ between ranks; all ranks must call this function. Each set of ranks with
    equal shards exchanges one hash of all these shards.

    Args:
        global_tensors: the tensors of all ranks, with the shard that each rank holds.
        tensors: name of a shard (see `local_parts`) -> local tensor, for this rank.
        world: all ranks that take part.

    Raises:
        Refused: raised on every rank with code UNEQUAL_COPIES, if copies of a tensor differ; the error has one refusal
            per tensor.
    """
    if not any(tensor.loose for tensor in global_tensors.values()):
        return
    digests: dict[str, bytes] = {}

    def hash_own() -> dict[_Peers, bytes]:
        sums: dict[_Peers, xxhash.xxh3_128] = {}
        for tensor in global_tensors.values():
            for name, peers in _loose_parts(tensor, world.rank):
                own_bytes = as_bytes(copy_to_cpu(local_of(tensors[name])))
                digests[name] = xxhash.xxh3_128_digest(own_bytes.data)
                sums.setdefault(peers, xxhash.xxh3_128()).update(digests[name])
        return {peers: sums_of_rank.digest() for peers, sums_of_rank in sums.items()}

    sums_of_ranks = world.pool(hash_own)
    sums: dict[_Peers, set[bytes]] = {}
    for sums_of_rank in sums_of_ranks:
        for peers, digest in sums_of_rank.items():
            sums.setdefault(peers, set()).add(digest)
    if any(len(digests_of_peers) > 1 for digests_of_peers in sums.values()):
        digests_by_rank = dict(zip(world.ranks, world.gather(digests), strict=True))
        raise gathered([problem for tensor in global_tensors.values() for problem in _unequal(tensor, digests_by_rank)])


def _loose_parts(tensor: GlobalTensor, rank: int) -> Iterator[tuple[str, _Peers]]:
    """Yield (name of a shard, ranks that hold the shard), for this rank's shards of a tensor that must equal the shards
    of other ranks.
    """
    if tensor.loose and rank in tensor.positions:
        for intervals, peers in tensor.boxes.items():
            if rank in peers and len(peers) > 1:
                yield tensor.part_name(intervals), peers


def _unequal(tensor: GlobalTensor, digests: Mapping[int, Mapping[str, bytes]]) -> list[Refusal]:
    """Return a refusal for each shard of a tensor whose copies differ.

    Args:
        tensor: the tensor, with the shard that each rank holds.
        digests: rank -> name of a shard -> hash of the shard.
    """
    problems = []
    for intervals, peers in tensor.boxes.items() if tensor.loose else ():
        name = tensor.part_name(intervals)
        ranks_by_digest: dict[bytes | None, list[int]] = {}
        for rank in peers:
            ranks_by_digest.setdefault(digests[rank].get(name), []).append(rank)
        if len(ranks_by_digest) > 1:
            message = f"the values differ between these ranks: {'; '.join(map(_name_ranks, ranks_by_digest.values()))}"
            problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, name), _HINT))
    return problems


def _name_ranks(ranks: list[int]) -> str:
    suffix = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(map(str, ranks[:_NAMED])) + suffix


def check_zero(checks: Iterable[Check | PlannedCheck], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse nonzero values in this rank's shards of tensors that must be zero.

    Args:
        checks: all checks of a translation; this function makes only the checks for zeros.
        tensors: name -> tensor, for this rank's tensors.

    Raises:
        Refused: with code UNEXPECTED_TENSOR, if a value that must be zero is not zero.
    """
    refusals = {check.refusal.where.tensor or "": check.refusal for check in checks if check.zero}
    problems = [refusals[name] for name in refusals.keys() & tensors.keys() if local_of(tensors[name]).count_nonzero()]
    if problems:
        raise gathered(sorted(problems, key=str))
