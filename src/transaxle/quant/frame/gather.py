"""How FSDP2 gathers quantized parameters: codes, and scales that are cut with them, as bytes.

Scales that stand for tiles of several rows are on every rank already, and do not travel. Ranks with fewer rows than
the first one send padding, which is dropped on arrival.

Where FSDP2 cuts another dim than the first, torch puts together what it gathered as if it had the parameter's shape.
That is right for codes of eight bits. Codes of four bits travel, with their scales, in a buffer of that many bytes,
which is taken apart again. What is left is gathered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from transaxle.errors import refuse
from transaxle.quant.frame.band import Band
from transaxle.quant.frame.buffers import ORIGIN, ROUNDING
from transaxle.quant.frame.frame import Frame


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank knows of the whole matrix when it sends its rows."""

    shard: Frame
    """Its own rows, and the shared buffers."""
    buffers: tuple[tuple[str, torch.Tensor], ...]
    """Name of each buffer that is sent, and what of it is."""
    rest: torch.Tensor | None = None
    """Bytes [ranks, bytes] of buffers of a band that torch does not gather."""
    world: int = 1
    """Ranks among which the matrix is cut."""


def sent(frame: Frame, skip: int, height: int, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Sent]:
    """Return the bytes to gather, padded to what the first rank has, and what to know on arrival.

    Raises:
        Refused: `UNSUPPORTED` for rows that are not those that FSDP2 cuts for this rank.
    """
    world = mesh.size()
    if frame.band is not None:
        return _sent_bands(frame, frame.band, skip, height, mesh)
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
    if shard.band is not None:
        return _received_bands(outputs, knowledge, shard.band)
    cut = {}
    for place, (name, own) in enumerate(knowledge.buffers):
        whole = outputs[place] if place < len(outputs) else own
        cut[name] = whole[: shard.whole].view(shard.cut[name].dtype)
    copied = () if ROUNDING not in shard.cut else (shard.cut[ROUNDING],)
    return Frame(
        shard.quantizer,
        shard.columns,
        shard.whole,
        cut,
        dict(shard.shared),
        matrix=shard.matrix,
        share=shard.share,
        identity=shard.identity,
        echoes=(*copied, *shard.echoes),
    )


def _sent_bands(
    frame: Frame, band: Band, skip: int, height: int, mesh: DeviceMesh
) -> tuple[tuple[torch.Tensor, ...], Sent]:
    """Return what torch gathers of a band; the rest is gathered here.

    Raises:
        Refused: `UNSUPPORTED` for a band that is not the one that FSDP2 cuts for this rank.
    """
    world, rank = mesh.size(), mesh.get_local_rank()
    wanted = (rank * band.size, band.size * world)
    if (band.start, band.whole) != wanted or (skip, height) != (0, frame.rows):
        raise refuse(
            "UNSUPPORTED",
            f"this rank has {band.size} of {band.whole} along dim {band.dim}, from {band.start} on; "
            f"FSDP2 on {world} ranks expects {wanted[0]}",
            hint="Call fully_shard on the whole parameter, over one mesh dim.",
        )
    shape = (frame.rows, *frame.row)
    buffers = _bytes_of(frame, band)
    direct = tuple(buffer for buffer in buffers.values() if buffer.shape == shape)
    rest = torch.cat(
        [buffer.flatten() for buffer in buffers.values() if buffer.shape != shape] or [direct[0][:0].flatten()]
    )
    carried = 0 if direct else prod(shape)
    inputs = direct or (_padded(rest[:carried], carried).view(shape),)
    others, gathered = rest[carried:], None
    if others.numel():
        gathered = others.new_empty((world, others.numel()))
        dist.all_gather_into_tensor(gathered.view(-1), others, group=mesh.get_group())
    return inputs, Sent(frame, (), gathered, world)


def _padded(octets: torch.Tensor, size: int) -> torch.Tensor:
    return octets if octets.numel() == size else torch.cat([octets, octets.new_zeros(size - octets.numel())])


def _bytes_of(frame: Frame, band: Band) -> Mapping[str, torch.Tensor]:
    """Return the buffers that are cut with a band, as bytes."""
    names = [name for name in (*frame.cut, *frame.shared) if name != ORIGIN and band.step(frame.quantizer, name)]
    buffers = {**frame.cut, **frame.shared}
    return {name: buffers[name].contiguous().view(torch.uint8) for name in names}


def _received_bands(outputs: tuple[torch.Tensor, ...], knowledge: Sent, band: Band) -> Frame:
    """Return the frame of the whole matrix, or stack, around the gathered bytes."""
    shard, world = knowledge.shard, knowledge.world
    shape = (shard.rows, *shard.row)
    whole = tuple(size * world if dim == band.dim else size for dim, size in enumerate(shape))
    buffers = {**shard.cut, **shard.shared}
    buffers.pop(ORIGIN, None)
    own = _bytes_of(shard, band)
    direct = [name for name, buffer in own.items() if buffer.shape == shape]
    gathered = {name: output.view(whole) for name, output in zip(direct, outputs, strict=False)}
    rest = [] if knowledge.rest is None else [knowledge.rest]
    if not direct:
        bands = outputs[0].view(whole).chunk(world, band.dim)
        rest = [torch.stack([each.flatten() for each in bands]), *rest]
    at, octets = 0, torch.cat(rest, 1) if rest else None
    for name, buffer in own.items():
        if name not in gathered:
            assert octets is not None
            parts = octets[:, at : at + buffer.numel()].reshape(world, *buffer.shape)
            gathered[name], at = torch.cat(parts.unbind(0), band.dim), at + buffer.numel()
    buffers |= {name: buffer.view(buffers[name].dtype) for name, buffer in gathered.items()}
    return Frame(
        shard.quantizer,
        prod(whole[1:]),
        shard.whole,
        {name: buffers[name] for name in shard.cut if name in buffers},
        {name: buffers[name] for name in shard.shared},
        matrix=None if shard.matrix is None else (whole[1], whole[2]),
        share=shard.share,
        identity=shard.identity,
        echoes=shard.echoes,
    )
