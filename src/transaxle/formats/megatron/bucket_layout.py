"""Laying parameters into flat buckets as Megatron does, and checking that stored buckets are laid out so.

Last parameters come first, each at a multiple of 64 elements. A bucket ends when it is full, which its stored size
tells, and before an embedding that another stage has too. What each rank of a data-parallel group saved is a chunk of
a bucket for each parameter and each gap. So every beginning of a chunk must be explained: a parameter begins there, a
gap does, or the share of the next rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import NamedTuple

from transaxle.formats.catalog import Entry
from transaxle.formats.megatron.rank_parameters import LocalParameter

_ALIGNED = 64
"""Elements at whose multiples parameters begin."""


@dataclass(frozen=True)
class Bucket:
    """A flat bucket of one group of data-parallel ranks."""

    states: Mapping[str, Entry]
    """State -> the elements of all parameters in it, as a tensor of one dim."""
    padded: int
    """Elements with the padding at its end, which is not stored; ranks have equal shares of them."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return next(iter(self.states.values())).shape[0]

    @cached_property
    def starts(self) -> frozenset[int]:
        """First elements of its chunks."""
        return frozenset(extent.start[0] for extent in next(iter(self.states.values())).extents)


@dataclass(frozen=True)
class FlatBuffer:
    """The parameters of one dtype that a group of data-parallel ranks has, of one model chunk."""

    key: str
    """First part of the names of its tensors."""
    dtype: str
    """Safetensors code of the parameters."""
    buckets: tuple[Bucket, ...]
    full: int | None = None
    """Where all buckets are stored as one, without the padding after each: elements after which a bucket ended, in
    those stages where a bucket did not hold all.
    """

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(bucket.size for bucket in self.buckets)


class Placed(NamedTuple):
    """A parameter's place in a buffer."""

    parameter: LocalParameter
    bucket: int
    """Number of the bucket."""
    start: int
    """First element in it."""


def laid_out(parameters: Sequence[LocalParameter], buffer: FlatBuffer) -> list[Placed] | None:
    """Lay parameters into the buckets of a buffer; None if these are not what it holds.

    Args:
        parameters: in the order in which the model registers them.
        buffer: with the sizes of its buckets, and where their chunks begin.
    """
    if buffer.full is not None:
        tries = (_laid_end_to_end(parameters, full, apart) for full in (None, buffer.full) for apart in (False, True))
        return next((placed for placed, size in tries if size == buffer.size), None)
    sizes = [bucket.size for bucket in buffer.buckets]
    placed: list[Placed] = []
    number = at = 0
    for parameter in reversed(parameters):
        at = _aligned(at)
        if number < len(sizes) and parameter.shared and at == sizes[number]:
            number, at = number + 1, 0
        if number == len(sizes) or at + parameter.size > sizes[number]:
            return None
        placed.append(Placed(parameter, number, at))
        at += parameter.size
        if at == sizes[number]:
            number, at = number + 1, 0
    if number < len(sizes) or at:
        return None
    of_bucket: dict[int, list[Placed]] = {}
    for each in placed:
        of_bucket.setdefault(each.bucket, []).append(each)
    is_explained = all(_explained(buffer.buckets[number], listed) for number, listed in of_bucket.items())
    return placed if is_explained else None


def _laid_end_to_end(parameters: Sequence[LocalParameter], full: int | None, apart: bool) -> tuple[list[Placed], int]:
    """Lay parameters into buckets that are stored as one; also return the elements of it all.

    Args:
        parameters: in the order in which the model registers them.
        full: elements after which a bucket ends; None: one holds all.
        apart: whether embeddings have buckets of their own.
    """
    placed: list[Placed] = []
    base = at = 0
    for parameter in reversed(parameters):
        at = _aligned(at)
        alone = apart and parameter.shared
        if alone and at:
            base, at = base + at, 0
        placed.append(Placed(parameter, 0, base + at))
        at += parameter.size
        if alone or (full is not None and at >= full):
            base, at = base + at, 0
    return placed, base + at


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED


def _explained(bucket: Bucket, placed: Sequence[Placed]) -> bool:
    """Tell whether chunks begin where parameters and gaps do, and otherwise only where the share of a rank does."""
    starts, size = bucket.starts, bucket.size
    begins = {each.start for each in placed}
    ends = {each.start + each.parameter.size for each in placed} - {size}
    if not begins | ends <= starts:
        return False
    others = starts - begins - ends
    if not others:
        return True
    least = min(others)
    for ranks in count(2):
        share, rest = divmod(bucket.padded, ranks)
        if share < 1 or -(-size // share) - 1 > len(starts):
            return False
        if not rest and not least % share and _shared_out(starts, others, share, size):
            return True
    return False


def _shared_out(starts: frozenset[int], others: frozenset[int], share: int, size: int) -> bool:
    """Tell whether some chunks begin where the shares of ranks do, and whether every share begins a chunk."""
    return not any(other % share for other in others) and all(at in starts for at in range(share, size, share))
