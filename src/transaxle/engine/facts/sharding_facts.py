"""Who holds what of a live model: plain data that ranks have agreed on, to be printed, written as JSON, or drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from transaxle.engine.number_text import notebook, plural, size
from transaxle.formats.catalog import nbytes

Share = tuple[tuple[tuple[int, int], ...], ...]
"""Per dim, the intervals of positions that a rank holds."""


@dataclass(frozen=True)
class HeldTensor:
    """One tensor as the ranks hold it."""

    name: str
    """Its name."""
    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """Elements along each dim of the whole tensor."""
    held: Mapping[int, Share]
    """What each rank holds that has any of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return nbytes(self.dtype, self.shape)

    @cached_property
    def rank_bytes(self) -> dict[int, int]:
        """Rank -> bytes that it holds; ranks with none are absent."""
        sizes = {share: self._bytes(share) for share in set(self.held.values())}
        return {rank: sizes[share] for rank, share in sorted(self.held.items()) if sizes[share]}

    @cached_property
    def copies(self) -> dict[int, int]:
        """Rank -> on how many ranks there is what it holds, itself included."""
        ranks: dict[Share, int] = {}
        for share in self.held.values():
            ranks[share] = ranks.get(share, 0) + 1
        return {rank: ranks[self.held[rank]] for rank in self.rank_bytes}

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Into how many different parts each dim is cut."""
        return tuple(len({share[dim] for share in self.held.values()}) for dim in range(len(self.shape)))

    def _bytes(self, share: Share) -> int:
        shape = tuple(sum(stop - start for start, stop in intervals) for intervals in share)
        return nbytes(self.dtype, shape) if prod(shape) else 0


@dataclass(frozen=True, repr=False)
class Sharding:
    """Who holds what of a live model."""

    ranks: tuple[int, ...]
    """All ranks, by their number in the job."""
    tensors: tuple[HeldTensor, ...]
    """Its tensors; one that has several names is here once."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of a tensor -> the one under which it is in `tensors`."""
    coordinates: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Rank -> named dim of the tensors' meshes -> where the rank is along it; ranks on none are absent."""

    @property
    def nbytes(self) -> int:
        """Bytes of the model, each tensor counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def rank_bytes(self) -> dict[int, int]:
        """Rank -> bytes that it holds."""
        found = dict.fromkeys(self.ranks, 0)
        for tensor in self.tensors:
            for rank, count in tensor.rank_bytes.items():
                found[rank] += count
        return found

    @property
    def imbalance(self) -> float:
        """By how much the rank that holds most is above the mean: 0 where all hold as much, 1 for twice as much."""
        held = self.rank_bytes.values()
        return max(held) * len(held) / sum(held) - 1 if sum(held) else 0.0

    @property
    def spare_bytes(self) -> int:
        """Bytes on all ranks together beyond one copy of what they hold."""
        held = sum(self.rank_bytes.values())
        once = 0
        for tensor in self.tensors:
            once += sum(count / tensor.copies[rank] for rank, count in tensor.rank_bytes.items()).__round__()
        return held - once

    def __repr__(self) -> str:
        return f"<sharding {self}>"

    def __str__(self) -> str:
        """Return what `print` shows: one line."""
        most = max(self.rank_bytes.values(), default=0)
        return (
            f"{plural(len(self.tensors), 'tensor')}, {size(self.nbytes)} on {plural(len(self.ranks), 'rank')} · "
            f"at most {size(most)} on one, {100 * self.imbalance:.1f} % above the mean · "
            f"{size(self.spare_bytes)} of copies"
        )

    def _repr_html_(self) -> str:
        return notebook(str(self))

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return {
            "ranks": list(self.ranks),
            "bytes": self.nbytes,
            "rank_bytes": {str(rank): count for rank, count in self.rank_bytes.items()},
            "imbalance": self.imbalance,
            "spare_bytes": self.spare_bytes,
            "aliases": dict(self.aliases),
            "coordinates": {str(rank): dict(places) for rank, places in self.coordinates.items()},
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "held": {str(rank): share for rank, share in sorted(tensor.held.items())},
                }
                for tensor in self.tensors
            ],
        }
