"""Records which elements of a model get which tensors of the files, whatever code copies them.

Every operation of torch passes here while a reader runs on the meta device. An operation that computes hands the
names of its inputs on to its outputs; one that writes marks the elements of its target as written. So a parameter of
which one expert is never filled shows, and so does a tensor that nothing takes, or of which only a part goes in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Region = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Part of a storage: the first element, sizes, strides."""
_MOST_RUNS = 1 << 16
"""Largest number of runs of adjacent elements into which a region is divided."""


class _Operation(NamedTuple):
    """What an operation of torch does with its arguments."""

    written: tuple[tuple[int, str], ...]
    """Positions and names of the arguments that it writes to."""

    is_view: bool
    """Whether its results share the memory of an argument that it does not write to."""

    def targets(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that it writes to."""
        places = [arguments[place] if place < len(arguments) else options.get(name) for place, name in self.written]
        return [each for each in tree_leaves(places) if isinstance(each, torch.Tensor)]


class Written(TorchDispatchMode):
    """What is written while the mode is active.

    Before `recording` is set, while the model is built, only copies of other tensors count: a table of sines that a
    model computes needs no tensor of the files.

    Tensors on the meta device have no values: where code asks for one, it gets 0, or False.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = False
        self._names: dict[int, set[str]] = {}
        self._kept: list[Any] = []
        self._computed: set[int] = set()
        self._regions: dict[int, set[Region]] = defaultdict(set)
        self._read: dict[int, set[Region]] = defaultdict(set)
        self._files: dict[str, torch.Tensor] = {}
        self._asked: set[str] = set()
        self._latest: set[str] = set()
        self._operations: dict[Any, _Operation] = {}

    def tag(self, name: str, tensor: torch.Tensor) -> None:
        """Say that a tensor comes from the files."""
        self._files[name] = tensor
        self._names[_storage(tensor)] = {name}

    def names_of(self, tensor: torch.Tensor) -> set[str]:
        """Return the names of the file tensors from which a tensor was computed."""
        return self._names.get(_storage(tensor), set())

    def used(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        """Return the names of the file tensors that are in one of these tensors, or whose values the code asked for."""
        used = set(self._asked)
        for tensor in tensors:
            used |= self.names_of(tensor)
        return used

    def gap(self, tensor: torch.Tensor) -> list[int] | None:
        """Return the position of the first element that was never written; None if all were."""
        whole = _region(tensor)
        if self._files_in(tensor):
            return None
        return _gap(whole, self._regions.get(_storage(tensor), set()), tensor)

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Return whether any element of a tensor was written."""
        return _storage(tensor) in self._regions

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Return whether the model gave a tensor computed values when it was built."""
        return _storage(tensor) in self._computed

    def partly_read(self) -> list[tuple[str, list[int]]]:
        """Return the names of the file tensors of which only a part was copied, with the first element that was not."""
        partial = []
        for name, tensor in self._files.items():
            regions = self._read.get(_storage(tensor))
            if regions and (gap := _gap(_region(tensor), regions, tensor)) is not None:
                partial.append((name, gap))
        return partial

    def _files_in(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is one of the files, or was computed from them and then assigned."""
        storage = _storage(tensor)
        return bool(self._names.get(storage)) and storage not in self._regions

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        operation = self._operations.get(function)
        if operation is None:
            operation = self._operations[function] = _describe(function)
        if function is _ITEM and arguments[0].is_meta:
            self._latest = set(self.names_of(arguments[0]))
            self._asked |= self._latest
            return False if arguments[0].dtype is torch.bool else 0
        if function is _COPY and arguments[0].is_meta:
            options = {**options, "device": arguments[0].device}
        targets = operation.targets(arguments, options)
        if targets and not targets[0].is_meta and _has_meta(arguments, options):
            result = targets[0]  # a parameter that the model builds on its own device
        else:
            result = function(*arguments, **options)
        if self.recording and not operation.is_view:
            self._record(targets, (arguments, options), result)
        elif function is _WRITE:
            self._computed.add(_storage(targets[0]))
        return result

    def _record(self, targets: list[torch.Tensor], arguments: Any, result: Any) -> None:
        sources: set[str] = set()
        for tensor in tree_leaves(arguments):
            if isinstance(tensor, torch.Tensor) and not any(tensor is target for target in targets):
                storage = _storage(tensor)
                if names := self._names.get(storage):
                    sources |= names
                    self._read[storage].add(_region(tensor))
        if targets:
            sources = sources or self._latest
            for target in targets:
                self._regions[_storage(target)].add(_region(target))
                self._hand_on(target, sources)
        elif sources:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._hand_on(tensor, sources)

    def _hand_on(self, tensor: torch.Tensor, names: set[str]) -> None:
        storage = tensor.untyped_storage()
        if (known := self._names.get(storage._cdata)) is None:
            self._names[storage._cdata] = set(names)
            self._kept.append(storage)  # so that no later storage gets the same number
        else:
            known |= names


_ITEM = torch.ops.aten._local_scalar_dense.default
_WRITE = torch.ops.aten.copy_.default
_COPY = torch.ops.aten._to_copy.default


def _describe(function: Any) -> _Operation:
    arguments = function._schema.arguments
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info and argument.alias_info.is_write
    )
    shares = any(each.alias_info and not each.alias_info.is_write for each in function._schema.returns)
    return _Operation(written, shares and not written)


def _has_meta(*arguments: Any) -> bool:
    return any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(arguments))


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _region(tensor: torch.Tensor) -> Region:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _gap(whole: Region, regions: set[Region], tensor: torch.Tensor) -> list[int] | None:
    """Return the position of the first element of a tensor that is in none of the regions of its storage."""
    if not tensor.numel() or whole in regions:
        return None
    runs = iter(_merged(run for region in regions for run in _runs(region)))
    first, stop = next(runs, (0, 0))
    for start, end in sorted(_runs(whole)):
        while stop <= start and (following := next(runs, None)):
            first, stop = following
        if not first <= start < stop or stop < end:
            return _position((stop if first <= start < stop else start) - whole[0], whole)
    return None


def _merged(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return runs that neither overlap nor touch."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _runs(region: Region) -> Iterator[tuple[int, int]]:
    """Yield the runs of adjacent elements, as first and one after the last."""
    start, sizes, strides = region
    dims = sorted(
        ((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1 and stride), reverse=True
    )
    length = 1
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    count = 1
    for _, size in dims:
        count *= size
    if count > _MOST_RUNS:
        raise OverflowError(f"a region of {count} runs")
    starts = [start]
    for stride, size in dims:
        starts = [first + stride * step for first in starts for step in range(size)]
    for first in starts:
        yield first, first + length


def _position(offset: int, whole: Region) -> list[int]:
    """Return the indices of an element of a tensor from its distance from the first one."""
    position = [0] * len(whole[1])
    for dim in sorted(range(len(position)), key=lambda dim: -whole[2][dim]):
        if whole[1][dim] > 1:
            position[dim], offset = divmod(offset, whole[2][dim])
    return position
