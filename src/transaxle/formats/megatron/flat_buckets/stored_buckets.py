"""The flat buckets that a folder holds, by the names of its items.

    chained_1.optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg
    chained_1.optimizer.distributed.dp_group_idx_3.per_bucket_numel/shard_0_1          elements with padding
    chained_1.optimizer.distributed.dp_group_idx_3.optimizer/shard_0_1                 settings

Where a rank has experts that are not on every rank, their optimizer is the last of those that are chained; a rank
without any has one optimizer, and no `chained_` before its items.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from transaxle.formats.catalog import Entry
from transaxle.formats.megatron.flat_buckets.bucket_layout import Bucket, FlatBuffer
from transaxle.formats.megatron.flat_buckets.parameter_order import UnknownOrderError
from transaxle.formats.megatron.flat_buckets.pipeline_stages import Groups
from transaxle.formats.pickled.descriptors import CODES, DType, Key, TensorRef
from transaxle.formats.torch_file.saved import StoredStorage, ViewFault, place

_GROUP = r"(?:chained_(?P<chain>\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,7})\."
_BUCKET = re.compile(
    rf"(?P<buffer>{_GROUP}gbuf_idx_(?P<number>\d{{1,5}})\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\))"
    r"\.bucket_idx_(?P<bucket>\d{1,7})\.(?P<state>\w+)"
)
_OBJECT = re.compile(rf"{_GROUP}(?P<what>\w+)/shard_0_1")
_PADDED, _UNPADDED = "per_bucket_numel", "per_bucket_numel_unpadded"
GATHERED = "param_state"
"""What a group calls the state of its buffers where it is in one object."""
_COALESCED, _COUNT = "buckets_coalesced", "numel_unpadded"
_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000

Objects = Mapping[tuple[int, int, str], Any]
"""What groups have besides buckets: optimizer, group and name -> value, as the interpreter describes it."""


@dataclass(frozen=True)
class Chain:
    """One of the optimizers that ranks chain."""

    number: int
    groups: Groups


def is_of_groups(key: str) -> bool:
    """Tell whether an item belongs to one group of data-parallel ranks: a bucket, sizes, settings."""
    return re.match(_GROUP, key) is not None


def gathered(objects: Objects, files: Mapping[tuple[int, int, str], str], arguments: Mapping[str, Any]) -> list[Chain]:
    """Return the buffers of every optimizer where one rank gathered all of a group's (`dp_zero_gather_scatter`).

    They are tensors in a pickled object, without anything between the buckets of a buffer.

    Args:
        objects: what groups have.
        files: where each object is.
        arguments: of the run.

    Raises:
        UnknownOrderError: an object is not such a state.
    """
    ranks = (arguments.get(each) for each in ("data_parallel_size", "context_parallel_size"))
    usual = max(_LEAST_BUCKET, _BUCKET_PER_RANK * prod(count for count in ranks if isinstance(count, int)))
    given = arguments.get("ddp_bucket_size")
    full = given if isinstance(given, int) and given > 0 else usual
    found: dict[int, dict[int, list[FlatBuffer]]] = {}
    for (chain, group, what), value in sorted(objects.items()):
        if what != GATHERED:
            continue
        name = f"the gathered state of group {group} of optimizer {chain}"
        buffers = {number: each for number, each in value.items() if type(number) is int} if type(value) is dict else {}
        if sorted(buffers) != list(range(len(buffers))) or not buffers or value.get(_COALESCED) is not True:
            raise UnknownOrderError(f"{name} is not in the form of megatron-core 0.12 and later")
        found.setdefault(chain, {})[group] = [
            _gathered(f"buffer {number} of {name}", buffers[number], files[chain, group, what], full)
            for number in sorted(buffers)
        ]
    return [Chain(number, groups) for number, groups in sorted(found.items())]


def _gathered(name: str, value: object, file: str, full: int) -> FlatBuffer:
    ((key, states),) = value.items() if isinstance(value, dict) and len(value) == 1 else ((None, None),)
    dtypes = key.value if isinstance(key, Key) else None
    if not isinstance(dtypes, tuple) or not dtypes or not isinstance(dtypes[0], DType) or not isinstance(states, dict):
        raise UnknownOrderError(f"{name} is malformed")
    entries = {state: _vector(f"{name}, {state}", tensor, file) for state, tensor in states.items() if state != _COUNT}
    if len({entry.shape for entry in entries.values()}) != 1:
        raise UnknownOrderError(f"the states in {name} have different sizes")
    bucket = Bucket(entries, next(iter(entries.values())).shape[0])
    return FlatBuffer(name, dtypes[0].code, (bucket,), full)


def _vector(name: str, tensor: object, file: str) -> Entry:
    """Return a tensor of one dim in a pickled object."""
    if not isinstance(tensor, TensorRef) or len(tensor.shape) != 1 or not isinstance(tensor.storage, StoredStorage):
        raise UnknownOrderError(f"{name} is no tensor of one dim")
    try:
        return place(name, tensor, file)[0]
    except ViewFault as fault:
        raise UnknownOrderError(f"{name}: {fault.message}") from None


def object_name(key: str) -> tuple[int, int, str] | None:
    """Return optimizer, group and name of an object that a group has; None for any other item."""
    match = _OBJECT.fullmatch(key)
    return None if match is None else (int(match["chain"] or 0), int(match["group"]), match["what"])


def is_bucket(key: str) -> bool:
    """Tell whether an item is one state of a bucket."""
    return _BUCKET.fullmatch(key) is not None


def chains(entries: Mapping[str, Entry], objects: Objects) -> list[Chain]:
    """Return the buffers of every optimizer.

    Args:
        entries: the tensors of a folder; others than buckets are left aside.
        objects: what groups have besides.

    Raises:
        UnknownOrderError: buckets are missing, or contradict the sizes beside them.
    """
    states: dict[tuple[int, int, int], dict[int, dict[str, Entry]]] = {}
    about: dict[tuple[int, int, int], tuple[str, str]] = {}
    for name, entry in entries.items():
        match = _BUCKET.fullmatch(name)
        if match is None:
            continue
        at = int(match["chain"] or 0), int(match["group"]), int(match["number"])
        if about.setdefault(at, (match["buffer"], match["dtype"])) != (match["buffer"], match["dtype"]):
            raise UnknownOrderError(f"{match['buffer']} and {about[at][0]} are one buffer")
        states.setdefault(at, {}).setdefault(int(match["bucket"]), {})[match["state"]] = entry
    found: dict[int, dict[int, list[FlatBuffer]]] = {}
    for at, buckets in sorted(states.items()):
        chain, group, number = at
        listed = found.setdefault(chain, {}).setdefault(group, [])
        name, dtype = about[at]
        if number != len(listed):
            raise UnknownOrderError(f"{name} is there, but not the buffer before it")
        sizes = [_sizes(objects.get((chain, group, what)), number) for what in (_PADDED, _UNPADDED)]
        listed.append(FlatBuffer(name, CODES.get(dtype, dtype), _buckets(name, buckets, *sizes)))
    return [Chain(number, groups) for number, groups in sorted(found.items())]


def _buckets(
    name: str, states: Mapping[int, Mapping[str, Entry]], padded: list[int] | None, stored: list[int] | None
) -> tuple[Bucket, ...]:
    """Return the buckets of a buffer, once their sizes are what the objects beside them say.

    Raises:
        UnknownOrderError: they are not, or buckets are missing.
    """
    if padded is None or stored is None:
        raise UnknownOrderError(f"the sizes of the buckets of {name} are missing")
    if sorted(states) != list(range(len(padded))) or len(stored) != len(padded):
        raise UnknownOrderError(f"{name} has the buckets {sorted(states)}, and sizes for {len(padded)}")
    kinds = {tuple(sorted(states[number])) for number in states}
    if len(kinds) > 1:
        raise UnknownOrderError(f"the buckets of {name} hold different states: {sorted(kinds)}")
    found = []
    for number, (elements, with_padding) in enumerate(zip(stored, padded, strict=True)):
        layouts = {(entry.shape, tuple(each.start for each in entry.extents)) for entry in states[number].values()}
        dense = all(each.strides is None for entry in states[number].values() for each in entry.extents)
        if len(layouts) > 1 or not dense or next(iter(layouts))[0] != (elements,) or with_padding < elements:
            message = f"bucket {number} of {name} is not the {elements} elements that the sizes beside it say"
            raise UnknownOrderError(message)
        found.append(Bucket(states[number], with_padding))
    return tuple(found)


def _sizes(value: Any, number: int) -> list[int] | None:
    """Return the sizes of the buckets of one buffer: of each there is a list, in a dict by its dtypes."""
    if not isinstance(value, list) or number >= len(value) or not isinstance(value[number], dict):
        return None
    (sizes,) = value[number].values() if len(value[number]) == 1 else (None,)
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        return None
    return sizes
