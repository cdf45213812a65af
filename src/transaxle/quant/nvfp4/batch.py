"""The batch that an input is a part of, where ranks have different rows of it.

By itself a rank numbers its rows from 0 and scales by its own amax, as if no other had rows. Inside `batch_over` the
ranks of a group do both together, so that each quantizes its rows as one rank would that has them all.

Where several ranks have the same columns of an output, all get the whole gradient of these, and one of them counts it
towards the gradient of the input, which is summed over the ranks (`counting`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from transaxle.axes.geometry.chunk import Intervals
from transaxle.errors import refuse
from transaxle.torch_tensors.torch_arguments import Ranks, read_group


@dataclass(frozen=True, slots=True)
class Batch:
    """Which rows of a batch are here, and which columns of the output count here."""

    group: dist.ProcessGroup | None = None
    """The ranks that have its rows, in order; None: all rows are here."""
    counted: Intervals | None = None
    """Columns of the output that this rank counts towards the gradient of the input; None: all that it has."""

    def first_rows(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Return, for each expert, the number of the first of its rows that is here. Collective.

        Args:
            counts: rows of each expert that are here; of a layer without experts, of the input.
            device: of the rows.
        """
        if self.group is None:
            return [0] * len(counts)
        own = torch.tensor(counts, dtype=torch.int64, device=device)
        ranks = own.new_zeros((dist.get_world_size(self.group), len(counts)))
        ranks[dist.get_rank(self.group)] = own
        dist.all_reduce(ranks, group=self.group)
        firsts: list[int] = ranks[: dist.get_rank(self.group)].sum(0).tolist()
        return firsts


_CURRENT: ContextVar[Batch] = ContextVar("batch", default=Batch())  # noqa: B039 - it is frozen


def current() -> Batch:
    """Return the batch that the caller's inputs are parts of."""
    return _CURRENT.get()


def batch_over(group: Ranks) -> AbstractContextManager[None]:
    """Context manager: inputs of NVFP4 layers are consecutive rows of one batch that the ranks of a group share.

    Amaxes of inputs and gradients are reduced over the group, and rows are numbered through, so that codes equal those
    of one rank with the whole batch, bit for bit, wherever each rank has a multiple of 16 rows. Only forward has to be
    inside; backward remembers. Every rank of the group has to call the same layers.

    Args:
        group: the ranks among which the batch is divided: a process group or a mesh of one dim.

    Raises:
        Refused: UNSUPPORTED without a group.
    """
    ranks = read_group("group", group)
    if ranks is None:
        raise refuse("UNSUPPORTED", "batch_over needs the ranks that share the batch")
    return _inside(replace(current(), group=ranks))


def counting(columns: Intervals) -> AbstractContextManager[None]:
    """Context manager: of a layer's output, only some columns count towards the gradient of its input.

    Args:
        columns: those of the output as it is here; other ranks count the rest.
    """
    return _inside(replace(current(), counted=columns))


@contextmanager
def _inside(batch: Batch) -> Iterator[None]:
    token = _CURRENT.set(batch)
    try:
        yield
    finally:
        _CURRENT.reset(token)
