"""Live tensors as a container: every rank's shards are the chunks of the stored tensors, its memory the files.

The catalog is the same on all ranks, so all of them plan alike; only this rank's own chunks can be read here. It names
one rank for each chunk; a taker that holds the same part reads its own (`Replicas`).

Values that must be equal or zero, where nothing but a look at them tells.

What several ranks hold without a mesh that keeps it equal is compared before one of them is saved. A DTensor says of
its replicas that they are the same. Nobody says so of plain tensors (the norms next to tensor parallel weights, a model
under DDP, counters), nor of DTensors that lie on several meshes; and only one of them is written. Tensors for which
another dialect has no place must be zero.
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
from transaxle.live.global_tensors import Census, Global
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
"""A range is copied alone where the tensor is so many times longer."""
_KEPT = 1 << 30
"""Bytes of copied tensors that are kept."""


def file_of(rank: int, name: str) -> str:
    """Return the name of the file that stands for a rank's part of a tensor."""
    return f"{rank}{_SEPARATOR}{name}"


def rank_of(file: str) -> int:
    """Return the rank whose memory a file stands for."""
    return int(file.partition(_SEPARATOR)[0])


def tensor_of(file: str) -> str:
    """Return the tensor whose local part a file stands for."""
    return file.partition(_SEPARATOR)[2]


class Memory(Storage):
    """This rank's tensors as files of row-major bytes; see `Storage`.

    Contiguous tensors of the CPU are lent out as they are. Others are copied there when they are read: the part that is
    asked for where it is a small one of a contiguous tensor, else all of it, which is kept while there is room.

    Args:
        tensors: this rank's, by name.
        rank: this rank.
        files: other files of the checkpoint, with their bytes.
    """

    single = None
    path = FORMAT

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int, files: Mapping[str, bytes]) -> None:
        self._tensors = tensors
        self._rank = rank
        self._files = files
        self._lent: dict[str, Bytes] = {}
        self._kept: OrderedDict[str, Bytes] = OrderedDict()

    def listing(self, folder: str = "") -> Listing:
        """See `Storage`."""
        return Listing(tuple(sorted(self._files)) if not folder else (), (), {})

    def size(self, name: str) -> int:
        """See `Storage`."""
        return len(self._files[name]) if name in self._files else self._local(name).nbytes

    def version(self, name: str) -> str:
        """See `Storage`."""
        return name

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        view[:] = self.lend(name, offset, len(view)).data

    def lend(self, name: str, offset: int, size: int) -> Bytes:
        """Return bytes of a file without copying them, where they lie in memory as they are; not to be written to."""
        if name in self._files:
            return np.frombuffer(self._files[name], np.uint8, size, offset)
        lent = self._lent.get(name)
        if lent is None:
            local = self._local(name)
            if local.device.type == "cpu" and local.is_contiguous():
                lent = self._lent[name] = as_bytes(local)
            # A small range of a tensor on a device is copied alone; for a larger one the whole tensor is copied and
            # kept, as the other ranges are usually read next.
            elif local.is_contiguous() and _APART * size <= local.nbytes:
                return as_bytes(copy_to_cpu(byte_view(local)[offset : offset + size]))
            else:
                lent = self._copied(name, local)
        return lent[offset : offset + size]

    def owner(self, name: str) -> int:
        """Return the rank whose memory a file stands for."""
        return rank_of(name)

    def recheck(self) -> None:
        """Whether memory has changed nobody can tell: each byte of it is read once, to be hashed and written."""

    def close(self) -> None:
        """Let copies go."""
        self._lent.clear()
        self._kept.clear()

    def _local(self, name: str) -> torch.Tensor:
        """Return this rank's part of a tensor; its own copy of another's number, which a format reads when it plans."""
        rank, _, tensor = name.partition(_SEPARATOR)
        own = self._tensors.get(tensor)
        # Numbers (a step) are read while planning, on every rank, though the catalog names one owner. They are equal on
        # all ranks, so the own copy serves.
        if int(rank) != self._rank and (own is None or own.dim()):
            raise refuse("IO", f"rank {self._rank} cannot read it: it is in the memory of rank {rank}", tensor=tensor)
        return with_own_bytes(local_of(self._tensors[tensor]))

    def _copied(self, name: str, local: torch.Tensor) -> Bytes:
        """Copy a tensor to the CPU; the copies that were asked for last are kept."""
        # Taken out and put back at the end, so that the first entry is the one unused for longest.
        copied = self._kept.pop(name, None)
        if copied is None:
            copied = as_bytes(copy_to_cpu(local))
        self._kept[name] = copied
        # The copy just made stays even if it alone exceeds the limit: it is about to be used.
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT:
            self._kept.popitem(last=False)
        return copied


def memory_of(container: Container) -> Memory:
    """Return the memory behind a container of live tensors."""
    if not isinstance(container.storage, Memory):
        raise TypeError(f"{container.path} is not a model in memory")
    return container.storage


def container(
    everything: Census,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    config: Mapping[str, Any] | None,
    *,
    groups: Sequence[ParamGroup] = (),
    files: Mapping[str, bytes] | None = None,
) -> Container:
    """Return the live tensors of all ranks as one container.

    Args:
        everything: what all ranks hold.
        tensors: what this rank holds, by the names of the parts (`local_parts`).
        rank: this rank.
        config: the model's config, which becomes the checkpoint's config.json.
        groups: parameter groups of the optimizer, by the names of the parameters.
        files: other files that travel along.

    Post-condition: of replicas, one is read: that of the rank which has least to give so far.

    Raises:
        Refused: INCOMPLETE where no rank holds some part of a tensor.
    """
    given = Load()
    entries = {name: _entry(tensor, given) for name, tensor in everything.items()}
    beside = dict(files or {})
    if config is not None:
        beside[CONFIG] = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    metadata = {GROUPS: list(groups)} if groups else {}
    return Container(FORMAT, FORMAT, Memory(tensors, rank, beside), entries, {}, metadata, carried=tuple(beside))


def own_entry(tensor: Global, rank: int) -> Entry:
    """Return what one rank holds of a tensor, as an entry that has holes where others hold the rest."""
    chunks = _extents(tensor, tensor.held[rank], file_of(rank, tensor.name))
    return Entry(tensor.name, tensor.dtype, tensor.shape, tuple(extent for _, extent in chunks))


def _entry(tensor: Global, given: Load) -> Entry:
    extents: list[Extent] = []
    covered: set[tuple[tuple[int, int], ...]] = set()
    # Parts of different ranks may have chunks in common (ranks that share a key and value head): a chunk is listed
    # once.
    for held, ranks in tensor.boxes.items():
        # Of replicas the rank with the fewest bytes so far gives its own; the rank number breaks ties, so that all
        # ranks agree. Those that call their own a copy give it only if all do.
        givers = [rank for rank in ranks if rank not in tensor.spare] or ranks
        owner = given.add(given.least(givers), nbytes(tensor.dtype, local_shape(held)))
        for spans, extent in _extents(tensor, held, file_of(owner, tensor.part_name(held))):
            if spans not in covered:
                covered.add(spans)
                extents.append(extent)
    # No chunk is listed twice, so their sizes add up to the whole if there is no hole.
    size = sum(_count(extent.shape) for extent in extents)
    if size != _count(tensor.shape):
        message = f"all ranks together hold only {size} of its {_count(tensor.shape)} elements"
        raise refuse("INCOMPLETE", message, tensor=tensor.name)
    return Entry(tensor.name, tensor.dtype, tensor.shape, tuple(extents))


def _extents(tensor: Global, held: Positions, file: str) -> list[tuple[tuple[tuple[int, int], ...], Extent]]:
    """Return the chunks of one rank's part: one for each combination of its intervals, or those of a range."""
    item = nbytes(tensor.dtype, (1,)) if tensor.shape else 1
    if len(held) < len(tensor.shape):
        return list(_extents_of_range(tensor.shape, held, file, item))
    strides = row_major(local_shape(held))
    per_dim = []
    for intervals in held:
        base, found = 0, []
        for first, last in intervals:
            found.append((first, last, base))
            base += last - first
        per_dim.append(found)
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
    shape: tuple[int, ...], held: Positions, file: str, item: int
) -> Iterator[tuple[tuple[tuple[int, int], ...], Extent]]:
    """Yield the chunks of a range of a tensor's elements."""
    ((first, stop),), strides = held[0], row_major(shape)
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
    """Which ranks hold the same parts of tensors, by the meshes that these are on.

    Tensors on no one mesh are left out: nothing says that their replicas are equal, and all takers shall have the
    values of one rank.

    Args:
        everything: what all ranks hold.
    """

    def __init__(self, everything: Census) -> None:
        self._holders: dict[str, frozenset[int]] = {}
        for tensor in everything.values():
            for held, ranks in tensor.boxes.items() if not tensor.loose else ():
                alike = frozenset(ranks) - tensor.spare
                if len(alike) > 1:
                    part = tensor.part_name(held)
                    self._holders |= {file_of(rank, part): alike for rank in alike}

    def near(self, item: Item) -> list[Item]:
        """Return an item as one for each rank that holds some of it itself, and one for all others.

        They share its key: no two of them have a taker in common.
        """
        shared = {each.file for each in item.transfers} & self._holders.keys()
        own = {
            taker: {file for file in shared if taker in self._holders[file] and rank_of(file) != taker}
            for taker in item.target_ranks
        }
        if not any(own.values()):
            return [item]
        others = tuple(taker for taker in item.target_ranks if not own[taker])
        found = [replace(item, target_ranks=others)] if others else []
        for taker in filter(own.get, item.target_ranks):
            made_of = [
                msgspec.structs.replace(each, file=file_of(taker, tensor_of(each.file)))
                if each.file in own[taker]
                else each
                for each in item.transfers
            ]
            found.append(replace(item, lazy_transfers=made_of, target_ranks=(taker,)))
        return found


_Peers = tuple[int, ...]
"""Ranks that hold the same part of a tensor."""
_NAMED = 8
"""Ranks that a message names."""
_HINT = (
    "Broadcast the tensor from one rank, or find out why the copies drifted apart (a gradient that is not summed over "
    "all ranks). Use check_copies=False to write one of them."
)


def compare_copies(everything: Census, tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Refuse copies that differ; collective. What travels is one hash for each set of ranks.

    Args:
        everything: what all ranks hold.
        tensors: what this rank holds, by the names of the parts (`local_parts`).
        world: the ranks.

    Raises:
        Refused: on every rank: UNEQUAL_COPIES for each tensor.
    """
    if not any(tensor.loose for tensor in everything.values()):
        return
    digests: dict[str, bytes] = {}

    def own() -> dict[_Peers, bytes]:
        sums: dict[_Peers, xxhash.xxh3_128] = {}
        for tensor in everything.values():
            for name, peers in _shared(tensor, world.rank):
                own_bytes = as_bytes(copy_to_cpu(local_of(tensors[name])))
                digests[name] = xxhash.xxh3_128_digest(own_bytes.data)
                sums.setdefault(peers, xxhash.xxh3_128()).update(digests[name])
        return {peers: each.digest() for peers, each in sums.items()}

    sums_of_ranks = world.pool(own)
    sums: dict[_Peers, set[bytes]] = {}
    for each in sums_of_ranks:
        for peers, digest in each.items():
            sums.setdefault(peers, set()).add(digest)
    if any(len(found) > 1 for found in sums.values()):
        every = dict(zip(world.ranks, world.gather(digests), strict=True))
        raise gathered([problem for tensor in everything.values() for problem in _unequal(tensor, every)])


def _shared(tensor: Global, rank: int) -> Iterator[tuple[str, _Peers]]:
    """Yield (name, ranks that have it too) of this rank's parts of a tensor that have to equal those of others."""
    if tensor.loose and rank in tensor.held:
        for held, peers in tensor.boxes.items():
            if rank in peers and len(peers) > 1:
                yield tensor.part_name(held), peers


def _unequal(tensor: Global, digests: Mapping[int, Mapping[str, bytes]]) -> list[Refusal]:
    """Return a refusal for each part of a tensor whose copies differ.

    Args:
        tensor: as all ranks hold it.
        digests: for each rank, the hashes of its copies by name.
    """
    problems = []
    for held, peers in tensor.boxes.items() if tensor.loose else ():
        name = tensor.part_name(held)
        ranks_by_digest: dict[bytes | None, list[int]] = {}
        for rank in peers:
            ranks_by_digest.setdefault(digests[rank].get(name), []).append(rank)
        if len(ranks_by_digest) > 1:
            message = f"the values differ between these ranks: {'; '.join(map(_said, ranks_by_digest.values()))}"
            problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, name), _HINT))
    return problems


def _said(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(map(str, ranks[:_NAMED])) + more


def check_zero(checks: Iterable[Check | PlannedCheck], tensors: Mapping[str, torch.Tensor]) -> None:
    """Prove that this rank's parts of the tensors that must be zero are.

    Args:
        checks: all of a view; others are passed over.
        tensors: what this rank holds, by name.

    Raises:
        Refused: UNEXPECTED_TENSOR.
    """
    wanted = {check.refusal.where.tensor or "": check.refusal for check in checks if check.zero}
    problems = [wanted[name] for name in wanted.keys() & tensors.keys() if local_of(tensors[name]).count_nonzero()]
    if problems:
        raise gathered(sorted(problems, key=str))
