"""How FSDP2 gathers quantized parameters: codes, and scales that are cut with them, as bytes.

Scales that stand for tiles of several rows are on every rank already, and do not travel. Ranks with fewer rows than
the first one send padding, which is dropped on arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from transaxle.errors import refuse
from transaxle.quant.frame.buffers import ORIGIN
from transaxle.quant.frame.frame import Frame


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank knows of the whole matrix when it sends its rows."""

    shard: Frame
    """Its own rows, and the shared buffers."""
    buffers: tuple[tuple[str, torch.Tensor], ...]
    """Name of each buffer that is sent, and what of it is."""


def sent(frame: Frame, skip: int, height: int, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Sent]:
    """Return the bytes to gather, padded to what the first rank has, and what to know on arrival.

    Raises:
        Refused: `UNSUPPORTED` for rows that are not those that FSDP2 cuts for this rank.
    """
    world = mesh.size()
    if frame.width is not None:
        raise refuse(
            "UNSUPPORTED",
            f"each rank has {frame.columns} of {frame.width} columns; FSDP2 gathers whole rows",
            hint="Call fully_shard so that it cuts dim 0.",
        )
    padded = -(-frame.whole // world)
    start = min(padded * mesh.get_local_rank(), frame.whole)
    if height and frame.tall and frame.start + skip != start:
        raise refuse(
            "UNSUPPORTED",
            f"this rank's rows start at {frame.start + skip} of {frame.whole}; FSDP2 on {world} ranks expects {start}",
            hint="Call fully_shard so that it cuts dim 0, over one mesh dim.",
        )
    buffers = []
    for name, buffer in frame.cut.items():
        if name == ORIGIN:
            continue
        rows = buffer[skip : skip + padded].view(torch.uint8)
        if len(rows) < padded:
            rows = torch.cat([rows, rows.new_zeros((padded - len(rows), *rows.shape[1:]))])
        buffers.append((name, rows.contiguous()))
    return tuple(rows for _, rows in buffers), Sent(frame, tuple(buffers))


def received(outputs: tuple[torch.Tensor, ...], knowledge: Sent) -> Frame:
    """Return the frame of the whole matrix around the gathered bytes.

    A world of one gets the first output only (torch copies no more); the others are its own.
    """
    shard = knowledge.shard
    cut = {}
    for place, (name, own) in enumerate(knowledge.buffers):
        whole = outputs[place] if place < len(outputs) else own
        cut[name] = whole[: shard.whole].view(shard.cut[name].dtype)
    shared = dict(shard.shared)
    return Frame(shard.quantizer, shard.columns, shard.whole, cut, shared, matrix=shard.matrix, share=shard.share)
