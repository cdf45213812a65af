"""DeepSpeed's own tensor-parallel layers for every rank of a group, in one process: real shards and real records.

The layers cut a parameter without talking to anyone; they only ask how many ranks there are and which one they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from transaxle.formats.deepspeed.keys import RECORD

Build = Callable[[nn.Module, Any], nn.Module]


@dataclass(frozen=True)
class Cut:
    """One parameter: whole, and as every rank holds it, with the record it carries there."""

    full: Tensor
    shards: tuple[Tensor, ...]
    records: tuple[dict[str, Any], ...]


@contextmanager
def rank_of(rank: int, ranks: int) -> Iterator[None]:
    """Let DeepSpeed's layers believe that they are one of several ranks."""
    from deepspeed.module_inject import layers

    with (
        patch.object(layers.dist, "get_world_size", lambda *_, **__: ranks),
        patch.object(layers.dist, "get_rank", lambda *_, **__: rank),
        patch.object(layers.pg_utils, "is_parallel", lambda *_: True),
    ):
        yield


def numbered(module: nn.Module) -> nn.Module:
    """Fill a module's parameters with numbers that are all different."""
    for parameter in module.parameters():
        parameter.data.copy_(torch.arange(1.0, parameter.numel() + 1).reshape(parameter.shape))
    return module


def on_each(make: Callable[[], nn.Module], build: Build, ranks: int) -> list[nn.Module]:
    """Build a layer as every rank has it."""
    found = []
    for rank in range(ranks):
        with rank_of(rank, ranks):
            found.append(build(numbered(make()), object()))
    return found


def cuts(make: Callable[[], nn.Module], build: Build, ranks: int) -> dict[str, Cut]:
    """Return every parameter of a layer, cut by DeepSpeed itself."""
    full = {name: value.detach().clone() for name, value in numbered(make()).named_parameters()}
    layers = [dict(layer.named_parameters(recurse=False)) for layer in on_each(make, build, ranks)]
    return {
        name: Cut(
            full[name],
            tuple(layer[name].detach() for layer in layers),
            tuple(getattr(layer[name], RECORD) for layer in layers),
        )
        for name in layers[0]
    }


def carrying(shard: Tensor, record: dict[str, Any]) -> nn.Parameter:
    """A live parameter with a record on it."""
    parameter = nn.Parameter(torch.zeros_like(shard))
    setattr(parameter, RECORD, record)
    return parameter


def restored(record: dict[str, Any], full: Tensor, shards: Sequence[Tensor], rank: int) -> Tensor:
    """The shard that DeepSpeed's own reader takes of a whole parameter, going by a record."""
    from deepspeed.checkpoint.constants import PARAM
    from deepspeed.checkpoint.universal_checkpoint import _resolve_autotp_partition

    parameter = carrying(shards[rank], record)
    found: Tensor = _resolve_autotp_partition(parameter, {PARAM: full}, full, rank, len(shards))
    return found.reshape(shards[rank].shape)
