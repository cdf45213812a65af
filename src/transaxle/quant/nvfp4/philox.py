"""Philox4x32-10: random numbers that are a function of a key and a counter.

J. Salmon, M. Moraes, R. Dror, D. Shaw, *Parallel random numbers: as easy as 1, 2, 3* (SC 2011). No generator keeps a
state, so a number belongs to the element that it is drawn for, whichever rank draws it and in whatever order. Words of
32 bits are held in int64, whose products wrap as unsigned ones do.
"""

from __future__ import annotations

import torch

_ROUNDS = 10
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_BITS = 32
_LANES = 4
"""Words that one counter gives."""


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return four words for each counter.

    Args:
        counter: four words, int64 tensors of shapes that broadcast.
        key: two words, likewise.
    """
    first, second, third, fourth = counter
    low, high = key
    for _ in range(_ROUNDS):
        one, two = first * _FACTORS[0], third * _FACTORS[1]
        first, second, third, fourth = _upper(two) ^ second ^ low, two & _WORD, _upper(one) ^ fourth ^ high, one & _WORD
        low, high = (low + _STEPS[0]) & _WORD, (high + _STEPS[1]) & _WORD
    return first, second, third, fourth


def _upper(product: torch.Tensor) -> torch.Tensor:
    return (product >> _BITS) & _WORD


def words(state: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, stream: int) -> torch.Tensor:
    """Return a random word for each element of a matrix, int64 [rows, columns] below 2**32.

    Element (r, c) gets word c % 4 of the counter (c // 4, r, calls, stream).

    Args:
        state: key and number of calls, int64 [2]; see `transaxle.quant.frame.rounding_state`.
        rows: numbers of the rows, int64.
        columns: numbers of the columns, int64.
        stream: numbers of different streams are independent.
    """
    key, calls = state[0], state[1]
    quads, places = torch.unique(columns // _LANES, return_inverse=True)
    counter = (quads & _WORD, rows[:, None] & _WORD, calls & _WORD, torch.full_like(calls, stream))
    four = torch.broadcast_tensors(*philox(counter, (key & _WORD, _upper(key))))
    lanes = torch.stack(four, -1).flatten(-2)
    return lanes[:, places * _LANES + columns % _LANES]
