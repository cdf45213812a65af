"""Random numbers against published answers, and against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.quant.nvfp4 import statement
from transaxle.quant.nvfp4 import philox, words

ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""Known answers of Random123, `kat_vectors`: counter, key, words."""


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, int, int, int]
) -> None:
    """The authors' own vectors, here and in the statement."""
    one, two, three, four = (torch.tensor(word) for word in counter)
    low, high = (torch.tensor(word) for word in key)
    assert tuple(int(word) for word in philox((one, two, three, four), (low, high))) == answer
    assert statement.philox(counter, key) == answer


@pytest.mark.parametrize("key", [0, 1, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF])
def test_an_element_has_its_word(key: int) -> None:
    """Wherever a part of the matrix begins, and whatever columns it has."""
    state = torch.tensor([key, 3])
    wanted = statement.words((key, 3), range(5, 9), range(3, 14), 1)
    found = words(state, torch.arange(5, 9), torch.arange(3, 14), 1)
    assert np.array_equal(found.numpy().astype(np.uint64), wanted)
    some = torch.tensor([12, 4, 5, 3])
    assert torch.equal(words(state, torch.arange(6, 8), some, 1), found[1:3, some - 3])


def test_words_differ_by_call_stream_and_key() -> None:
    """No two of these share a number by more than chance: 256 words of 32 bits."""
    rows = columns = torch.arange(16)
    drawn = [
        words(torch.tensor([key, calls]), rows, columns, stream)
        for key in (1, 2)
        for calls in (0, 1)
        for stream in (0, 1)
    ]
    assert all((one != two).all() for place, one in enumerate(drawn) for two in drawn[:place])
