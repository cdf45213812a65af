"""Megatron's sharded state dicts: what `model.sharded_state_dict()` says of this rank's parameters, as grids of shards.

A `ShardedTensor` is a box of a whole tensor: several of them, of other layers or experts, or of the gate and the up
projection, have one key. A `ShardedTensorFactory` makes such boxes of a parameter: views of it, or copies that it can
put together again. Megatron is never imported: its objects exist only where it has been imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from transaxle.axes.geometry.chunk import Intervals
from transaxle.errors import Refusal, Where
from transaxle.torch_tensors.placement import Cell, ShardGrid, cells_of

MODULE = "megatron.core.dist_checkpointing.mapping"
"""Where Megatron defines its objects."""
_ODD = "Give the state dict of model.sharded_state_dict()."


def is_sharded(value: object) -> bool:
    """Tell whether an entry is one of Megatron's own."""
    mapping = sys.modules.get(MODULE)
    return mapping is not None and isinstance(value, (mapping.ShardedBase, mapping.LocalNonpersistentObject))


@dataclass(frozen=True)
class Factory:
    """A parameter of which Megatron has made copies: what is written into these must be put together again."""

    key: str
    """Its key."""
    parameter: torch.Tensor
    """The parameter."""
    merge: Any
    """Makes the parameter's values of the copies, given as they were built."""
    built: Any
    """The copies, in lists and dicts."""

    def finish(self) -> None:
        """Write what the copies hold into the parameter."""
        with torch.no_grad():
            self.parameter.copy_(self.merge(_data_of(self.built)))


@dataclass(frozen=True)
class MegatronState:
    """What a sharded state dict holds on this rank."""

    grids: Mapping[str, torch.Tensor]
    """Its tensors, by key."""
    objects: tuple[str, ...]
    """Keys of what is no tensor: extra states of modules, random states."""
    factories: tuple[Factory, ...]
    """Parameters that are to be put together after a load."""
    problems: list[Refusal]
    """Why some tensor can be neither loaded nor saved."""


@dataclass(frozen=True)
class _Shard:
    """One `ShardedTensor`."""

    cell: Cell
    """Where it lies in the whole tensor."""
    data: torch.Tensor
    """Its values, with all dims of the whole."""
    spare: bool
    """It is a copy of another rank's."""
    padded: bool
    """The whole may have more rows than a checkpoint."""


def megatron_state(values: Iterable[Any]) -> MegatronState:
    """Read the entries of a sharded state dict.

    Args:
        values: those for which `is_sharded` holds.
    """
    mapping = sys.modules[MODULE]
    shards: dict[str, list[Any]] = {}
    objects: list[str] = []
    factories: list[Factory] = []
    problems: list[Refusal] = []
    for value in values:
        built = value
        if isinstance(value, mapping.ShardedTensorFactory):
            built, copied = _built(value, problems)
            if copied:
                factories.append(Factory(value.key, value.data, value.merge_fn, built))
        for each in _flat(built):
            if isinstance(each, mapping.ShardedTensor):
                shards.setdefault(each.key, []).append(each)
            elif isinstance(each, mapping.ShardedObject):
                objects.append(each.key)
    grids: dict[str, torch.Tensor] = {}
    for key, alike in shards.items():
        unusable = [message for each in alike if (message := _unusable(each)) is not None]
        if unusable:
            problems.append(Refusal("UNSUPPORTED", unusable[0], Where(None, key), _ODD))
        else:
            _add(key, alike, grids, problems)
    return MegatronState(grids, tuple(dict.fromkeys(objects)), tuple(factories), problems)


def _built(factory: Any, problems: list[Refusal]) -> tuple[Any, bool]:
    """Return what a factory makes of its parameter, and whether these are copies of it."""
    try:
        built = factory.build()
    except Exception as error:  # noqa: BLE001 - it is Megatron's, or the user's
        message = f"its factory failed: {error!r}"
        problems.append(Refusal("UNSUPPORTED", message, Where(None, factory.key)))
        return None, False
    data = [each.data for each in _flat(built) if isinstance(getattr(each, "data", None), torch.Tensor)]
    own = factory.data
    if own is None or own.is_meta:
        return built, False
    memory = own.untyped_storage().data_ptr()
    return built, any(each.numel() and each.untyped_storage().data_ptr() != memory for each in data)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _flat(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _data_of(value: Any) -> Any:
    """Return what a factory has built with the tensors in place of what describes them."""
    if isinstance(value, Mapping):
        return {key: _data_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_data_of(item) for item in value]
    return value.unwrap() if hasattr(value, "unwrap") else value.data


def _unusable(shard: Any) -> str | None:
    """Return why a `ShardedTensor` can be neither loaded nor saved; None where it can."""
    if shard.data is None:
        return "it describes a tensor without its data"
    if getattr(shard, "flattened_range", None) is not None:
        return "it is a range of a flattened tensor, as older versions describe the distributed optimizer's state"
    if type(shard.data.detach()) is not torch.Tensor:
        return f"its data is a {type(shard.data).__name__}, whose memory is not its values"
    local = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
    pairs = zip(shard.global_offset, local, shard.global_shape, strict=False)
    if len(local) != len(shard.global_shape) or any(start < 0 or start + size > of for start, size, of in pairs):
        return f"its local shape {list(local)} at {list(shard.global_offset)} is no part of {list(shard.global_shape)}"
    return None


def _add(key: str, alike: list[Any], grids: dict[str, torch.Tensor], problems: list[Refusal]) -> None:
    """Put the shards of one key together; those without elements hold nothing."""
    shapes = dict.fromkeys(tuple(each.global_shape) for each in alike)
    dtypes = dict.fromkeys(each.data.dtype for each in alike)
    if len(shapes) > 1:
        listed = " and ".join(str(list(shape)) for shape in shapes)
        problems.append(Refusal("SHAPE_MISMATCH", f"its shards are of tensors of shapes {listed}", Where(None, key)))
        return
    if len(dtypes) > 1:
        listed = " and ".join(map(str, dtypes))
        problems.append(Refusal("DTYPE_MISMATCH", f"its shards have dtypes {listed}", Where(None, key)))
        return
    (shape,) = shapes
    if not shape:
        grids[key] = alike[0].data.detach()
        return
    shards = [_shard(each) for each in alike if prod(each.data.shape)]
    by_cell: dict[Cell, _Shard] = {}
    for shard in shards:
        twin = by_cell.setdefault(shard.cell, shard)
        if twin is not shard and twin.data.data_ptr() != shard.data.data_ptr():
            message = "two tensors of this rank are the same part of it"
            problems.append(Refusal("NAME_COLLISION", message, Where(None, key), "Give each part once."))
            return
    if not by_cell:
        return
    held = tuple(tuple(sorted({cell[dim][0] for cell in by_cell})) for dim in range(len(shape)))
    if _overlap(held) or by_cell.keys() != set(cells_of(held)):
        message = (
            f"this rank's {len(by_cell)} shards of it form no grid: not every combination of their intervals is one"
        )
        problems.append(Refusal("UNSUPPORTED", message, Where(None, key), _ODD))
        return
    cells = [by_cell[cell] for cell in cells_of(held)]
    spare, padded = any(each.spare for each in cells), all(each.padded for each in cells)
    grids[key] = ShardGrid(shape, held, [each.data for each in cells], spare=spare, padded=padded)


def _shard(shard: Any) -> _Shard:
    data = shard.data.detach()[(None,) * shard.prepend_axis_num]
    spans = ((start, start + size) for start, size in zip(shard.global_offset, data.shape, strict=True))
    replica = shard.replica_id
    main = replica == 0 if isinstance(replica, int) else not any(replica)
    padded = bool(shard.allow_shape_mismatch) and not shard.prepend_axis_num
    return _Shard(tuple((span,) for span in spans), data, not main, padded)


def _overlap(held: Iterable[Intervals]) -> bool:
    return any(first[1] > second[0] for spans in held for first, second in pairwise(spans))
