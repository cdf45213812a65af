"""How the rows of an input are divided among experts: on the device, and never read back from there.

What is on the host (a list, a CPU tensor) is looked at and refused if it is wrong. What is on the device is not looked
at: negative numbers count as none, and rows past the input's end are left out, so that no offset leads outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import Any

import torch

from transaxle.errors import refuse

INTEGERS = (torch.int32, torch.int64)
"""Types of the numbers of rows."""


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows of each expert, one after the other from the first row on."""

    offsets: torch.Tensor
    """Row at which each expert ends; int32 [experts], on the device of the input."""
    rows: int
    """Rows of the input."""
    counts: tuple[int, ...] | None
    """Rows of each expert, where the host knows them."""

    @property
    def complete(self) -> bool:
        """Whether it is known that every row has an expert."""
        return self.counts is not None and sum(self.counts) == self.rows

    def experts(self) -> torch.Tensor:
        """Return the number of each row's expert, int64 [rows]; rows past the end have that of no expert."""
        rows = torch.arange(self.rows, dtype=torch.int32, device=self.offsets.device)
        return torch.searchsorted(self.offsets, rows, right=True)

    def past(self) -> torch.Tensor:
        """Return which rows are past the last expert's, bool [rows, 1]."""
        rows = torch.arange(self.rows, dtype=torch.int32, device=self.offsets.device)
        return (rows >= self.offsets[-1:]).unsqueeze(1)

    def empty(self) -> torch.Tensor:
        """Return which experts have no rows, bool [experts, 1, 1]."""
        before = torch.nn.functional.pad(self.offsets[:-1], (1, 0))
        return (self.offsets == before).view(-1, 1, 1)


def on_host(m_splits: Sequence[int] | torch.Tensor) -> bool:
    """Tell whether the numbers may be read: a list, or a CPU tensor outside of tracing.

    Tensors of other classes (fake, traced) may have no numbers in them.
    """
    if not isinstance(m_splits, torch.Tensor):
        return True
    plain = type(m_splits) is torch.Tensor and m_splits.device.type == "cpu"
    return plain and not torch.compiler.is_compiling()


def splits(m_splits: Sequence[int] | torch.Tensor, experts: int, rows: int, device: torch.device) -> Splits:
    """Return the offsets of numbers of rows.

    Args:
        m_splits: rows of each expert; a list or an int32 or int64 tensor on any device.
        experts: how many there are.
        rows: of the input.
        device: of the input.

    Raises:
        Refused: SHAPE_MISMATCH, DTYPE_MISMATCH for what is no such list; SHAPE_MISMATCH for numbers on the host that
            are negative or more than the rows; UNSUPPORTED for these while a CUDA graph is captured.
    """
    if isinstance(m_splits, torch.Tensor):
        if m_splits.dtype not in INTEGERS:
            raise refuse("DTYPE_MISMATCH", f"m_splits is {m_splits.dtype}, expected one of {INTEGERS}")
        if tuple(m_splits.shape) != (experts,):
            raise refuse("SHAPE_MISMATCH", f"m_splits is {list(m_splits.shape)}, expected [{experts}]: one per expert")
        if not on_host(m_splits):
            ends = m_splits.to(device).clamp(0, rows).cumsum(0).clamp(max=rows)  # int64; clamped first: no overflow
            return Splits(ends.to(torch.int32), rows, None)
    counts = _numbers(m_splits.tolist() if isinstance(m_splits, torch.Tensor) else m_splits)
    _check(counts, experts, rows)
    return Splits(_sent(list(accumulate(counts)), device), rows, counts)


def _sent(ends: list[int], device: torch.device) -> torch.Tensor:
    """Return numbers of the host as int32 on the device; nothing waits for the copy.

    Raises:
        Refused: UNSUPPORTED while a CUDA graph is captured, which would always have these numbers.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(ends, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        message = "m_splits is on the host, and a CUDA graph is being captured, which would have no others"
        raise refuse("UNSUPPORTED", message, hint="give a tensor on the device")
    return torch.tensor(ends, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


def _numbers(m_splits: Sequence[Any]) -> tuple[int, ...]:
    """Return whole numbers as such; nothing is rounded to one, and truth is none.

    Raises:
        Refused: DTYPE_MISMATCH.
    """
    numbers: tuple[int, ...] = ()
    try:
        numbers = tuple(index(number) for number in m_splits)
        whole = not any(
            isinstance(number, bool) or (isinstance(number, torch.Tensor) and number.dtype == torch.bool)
            for number in m_splits
        )
    except TypeError:
        whole = False
    if not whole:
        raise refuse("DTYPE_MISMATCH", f"m_splits is {m_splits!r}, expected whole numbers, one per expert")
    return numbers


def _check(counts: tuple[int, ...], experts: int, rows: int) -> None:
    if len(counts) != experts:
        raise refuse("SHAPE_MISMATCH", f"m_splits has {len(counts)} numbers, expected {experts}: one per expert")
    for expert, count in enumerate(counts):
        if count < 0:
            raise refuse("SHAPE_MISMATCH", f"m_splits has {count} rows for expert {expert}")
    if sum(counts) > rows:
        raise refuse("SHAPE_MISMATCH", f"m_splits sums to {sum(counts)}, the input has {rows} rows")


@torch.compiler.disable(reason="one product per expert needs m_splits on the host")  # type: ignore[untyped-decorator]
def read_back(m_splits: torch.Tensor, rows: int) -> tuple[int, ...]:
    """Copy numbers of rows from the device to the host, which waits for it; the same rules as on the device.

    Raises:
        Refused: UNSUPPORTED while a CUDA graph is captured: there is nothing to wait for.
    """
    if m_splits.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise refuse(
            "UNSUPPORTED",
            "one product per expert needs m_splits on the host, and a CUDA graph is being captured",
            hint="layer.path(x) says why there is no grouped product; or give m_splits as a list",
        )
    counts, left = [], rows
    for count in m_splits.tolist():
        counts.append(min(max(count, 0), left))
        left -= counts[-1]
    return tuple(counts)
