"""What a plan reads from and the smallest executor there can be: strided copies between flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import settings

from tests.some import some
from transaxle.axes.geometry import BoxCopy, Interval
from transaxle.axes.layout.bind import BoundNames, bind, group, score, split_slot
from transaxle.axes.layout.relayout import Copier, Shape, Target
from transaxle.axes.notation import tables
from transaxle.axes.notation.family import Family, Recode, Sizes
from transaxle.axes.notation.family import same as unchanged
from transaxle.axes.translation.translate import Translation, translate

Array = npt.NDArray[Any]
Intervals = Sequence[Sequence[Interval]]

HOLE = -1
"""What an element keeps that no copy writes."""
DTYPE = "I64"

law = settings(derandomize=True, max_examples=200, database=None)
"""How many examples a law is tried on."""


@dataclass(frozen=True)
class Extent:
    """A chunk of a stored tensor."""

    start: Shape
    shape: Shape
    strides: Shape | None = None


@dataclass(frozen=True)
class Entry:
    """A stored tensor."""

    dtype: str
    shape: Shape
    extents: Sequence[Extent]


class Store:
    """Stored tensors with their numbers."""

    def __init__(self, arrays: Mapping[str, Any] | None = None) -> None:
        self.entries: dict[str, Entry] = {}
        self.chunks: dict[tuple[str, int], Array] = {}
        for name, array in (arrays or {}).items():
            self.put(name, array)

    def put(self, name: str, array: Any, boxes: Sequence[Sequence[Interval]] | None = None, dtype: str = DTYPE) -> None:
        """Store an array, whole or as the chunks that hold these boxes."""
        array = numbers(array)
        boxes = [[(0, size) for size in array.shape]] if boxes is None else boxes
        extents = []
        for number, box in enumerate(boxes):
            chunk = array[tuple(slice(*span) for span in box)]
            self.chunks[name, number] = np.ascontiguousarray(chunk).reshape(-1)
            extents.append(Extent(tuple(start for start, _ in box), chunk.shape))
        self.entries[name] = Entry(dtype, array.shape, tuple(extents))


def numbers(tensor: Any) -> Array:
    """A tensor's numbers as an array."""
    array: Array = tensor.numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
    return array


def arange(*shape: int, start: int = 0) -> torch.Tensor:
    """A tensor whose elements are their own numbers."""
    count = int(np.prod(shape, dtype=np.int64))
    return torch.arange(start, start + count).reshape(shape)


def move(source: Array, target: Array, step: BoxCopy) -> None:
    """Carry out one box copy between flat arrays."""
    view, into = (
        np.lib.stride_tricks.as_strided(
            flat[offset:], [loop[0] for loop in step.loops], [loop[side] * flat.itemsize for loop in step.loops]
        )
        for flat, offset, side in ((source, step.source_offset, 1), (target, step.target_offset, 2))
    )
    into[...] = view


def fill(store: Store, target: Target, intervals: Intervals | None = None, copier: Copier | None = None) -> Array:
    """Produce a target tensor, or the chunk of it that holds these positions."""
    shape = target.shape
    if intervals is not None:
        shape = tuple(sum(stop - start for start, stop in held) for held in intervals)
    out = np.full(int(np.prod(shape, dtype=np.int64)), HOLE)
    for copy in (copier or Copier(store.entries)).copies(target, intervals):
        move(store.chunks[copy.source, copy.chunk], out, copy.move)
    return out.reshape(shape)


def take(array: Any, intervals: Intervals) -> Array:
    """The positions that intervals hold, per dim, picked one by one."""
    for dim, held in enumerate(intervals):
        array = np.take(numbers(array), [i for start, stop in held for i in range(start, stop)], axis=dim)
    return numbers(array)


def only(text: str) -> Family:
    """The one family of a table."""
    (family,) = tables.read(text)
    return family


def bound_to(
    family: Family, dialect: str, store: Store, sizes: Sizes, encodings: Mapping[str, str] | None = None
) -> BoundNames:
    """Read a store's names through a dialect."""
    names = list(store.entries)
    read = some(family.dialect(dialect))
    _, prefix = score(group(split_slot(name)[0] for name in names), read)
    return bind(names, family, read, sizes, prefix, encodings, store.entries)


def translated(
    family: Family,
    source: str,
    target: str,
    store: Store,
    config: Mapping[str, Any] | None = None,
    given: Mapping[str, int] | None = None,
    encodings: Mapping[str, str] | None = None,
    recode: Recode = unchanged,
) -> Translation:
    """A store's tensors in another dialect, with whatever stands against it."""
    sizes = Sizes(family, config or {}, given or {})
    wanted = some(family.dialect(target))
    return translate(bound_to(family, source, store, sizes, encodings), store.entries, wanted, sizes, recode)


def carried(
    family: Family,
    source: str,
    target: str,
    store: Store,
    config: Mapping[str, Any] | None = None,
    given: Mapping[str, int] | None = None,
) -> dict[str, Array]:
    """A store's numbers in another dialect; nothing may stand against it."""
    view = translated(family, source, target, store, config, given)
    assert view.refusals == ()
    copier = Copier(store.entries)
    return {name: fill(store, one, copier=copier) for name, one in view.targets.items()}


def same(found: Mapping[str, Array], wanted: Mapping[str, Any]) -> None:
    """Assert that names, order left aside, shapes and every number agree."""
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].shape == tuple(value.shape), name
        np.testing.assert_array_equal(found[name], numbers(value), name)
