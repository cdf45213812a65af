"""Tensors that ranks saved as ranges of their flattened parts, against numpy's reshape."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.formats.refusals import refuses
from transaxle.formats.catalog import Container, Entry, Extent, Shape
from transaxle.formats.megatron.torch_dist.reader import restore_shapes
from transaxle.formats.storage.local import LocalStorage

NAME, FILE = "optim/decoder.layers.mlp.linear_fc1.weight/exp_avg", ".metadata"


def _container(entry: Entry, folder: Path) -> Container:
    return Container("torch_dist", "run", LocalStorage(str(folder)), {NAME: entry}, {})


@st.composite
def _cuts(draw: st.DrawFn) -> tuple[Shape, Shape, list[list[int]]]:
    """Parts along each dim, shape of a part, and where ranges of each part begin."""
    parts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    part = draw(st.lists(st.integers(1, 5), min_size=len(parts), max_size=len(parts)))
    size = prod(part)
    begins = [sorted({0, *draw(st.lists(st.integers(0, size - 1), max_size=3))}) for _ in range(prod(parts))]
    return tuple(parts), tuple(part), begins


@given(_cuts())
def test_ranges_become_boxes_of_the_whole(cuts: tuple[Shape, Shape, list[list[int]]]) -> None:
    parts, part, begins = cuts
    shape = tuple(count * size for count, size in zip(parts, part, strict=True))
    whole = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    data, extents = b"", []
    for at, starts in zip(product(*map(range, parts)), begins, strict=True):
        box = tuple(slice(n * size, (n + 1) * size) for n, size in zip(at, part, strict=True))
        flat = whole[box].reshape(-1)
        for low, high in pairwise([*starts, flat.size]):
            extents.append(Extent((*at, low), (*(1 for _ in at), high - low), "file", len(data)))
            data += flat[low:high].tobytes()
    stored = Entry(NAME, "F32", (*parts, prod(part)), tuple(extents))
    entry = restore_shapes(_container(stored, Path()), {NAME: shape, "another": (1,)}, FILE).entries[NAME]
    assert entry.shape == shape
    assert [extent.start for extent in entry.extents] == sorted(extent.start for extent in entry.extents)
    found = np.full(shape, -1, np.float32)
    for extent in entry.extents:
        values = np.frombuffer(data, np.float32, prod(extent.shape), extent.offset).reshape(extent.shape)
        box = tuple(slice(start, start + size) for start, size in zip(extent.start, extent.shape, strict=True))
        assert (found[box] == -1).all()
        found[box] = values
    assert np.array_equal(found, whole)


_STORED = Entry(NAME, "F32", (2, 1, 12), tuple(Extent((at, 0, 0), (1, 1, 12), "file", 48 * at) for at in range(2)))


@pytest.mark.parametrize(
    ("change", "shape", "code", "said"),
    [
        ({}, (6, 5), "CORRUPT", "12 elements each; those of the shape [6, 5] 15"),
        ({}, (7, 4), "CORRUPT", "do not make the shape [7, 4]"),
        ({}, (24,), "CORRUPT", "do not make the shape [24]"),
        ({"shape": (0, 1, 12)}, (6, 4), "CORRUPT", "do not make the shape"),
        ({"extents": (Extent((0, 0, 0), (2, 1, 12), "file", 0),)}, (6, 4), "UNSUPPORTED", "not a range of one part"),
        ({"extents": (Extent((0, 0, 0), (1, 1, 12), "file", 0, (0, 0, 2)),)}, (6, 4), "UNSUPPORTED",
            "not a range of one part"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any], shape: Shape, code: str, said: str) -> None:
    with refuses(code, said, file=FILE) as caught:
        restore_shapes(_container(replace(_STORED, **change), Path()), {NAME: shape}, FILE)
    assert len(caught.value.refusals) == 1
