"""Which shard of each tensor each rank holds (a range of indices of one dim), for targets with separate files for each
rank.

Tensor parallelism follows the `cut` statements in the family's table, which name the axes that are divided among ranks.
The rows of the vocabulary are padded first, so that they can be divided evenly among the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from transaxle.arguments import Degrees
from transaxle.axes.geometry import Intervals, axes_in, row_major
from transaxle.axes.layout.bind import bind, split_slot
from transaxle.axes.layout.divide import rank_shares, share_out
from transaxle.axes.layout.relayout import unknown
from transaxle.axes.notation.expression import PADDING, Node, Sum, size
from transaxle.axes.notation.family import Family, Line, Sizes
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.recognise import IDENTITY, pick_dialect
from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import ITEM_BITS, Entry, Extent, NumbersInMemory
from transaxle.formats.registry import Format, get_format, writable
from transaxle.formats.storage.storage import layer

Parts = Mapping[str, tuple[int, tuple[Intervals, ...]] | None]
"""Parameter name -> the dim that is divided among tensor-parallel ranks, and the index ranges of each rank; None means
that every rank has the whole parameter.
"""
_TP = "tp"
RANKS = "tensor_parallel_size"
"""Config key for the number of tensor-parallel ranks, which some formulas in tables need."""
_WIDEST = 16
"""Size in bytes of one element of the widest dtype."""


_MEGATRON_OPTIONS = "--tp, --pp, --ep and --make-vocab-size-divisible-by"
_FSDP_OPTIONS = "--dp and --device"


def check_degrees(kind: Format, degrees: Degrees | None, label_suffix: str) -> None:
    """Refuse parallel degrees that a file format does not have.

    Args:
        kind: file format of the target.
        degrees: parallel degrees that the user gave; None means none.
        label_suffix: `:DIALECT` as the user typed it after the format, or nothing.

    Raises:
        Refused: with code UNSUPPORTED.
    """
    if degrees is None:
        return
    of_fsdp = replace(Degrees(), dp=degrees.dp, device=degrees.device, mesh_dim=degrees.mesh_dim)
    alternatives = [f"{each}{label_suffix}" for each in writable() if "degrees" in get_format(each).draft_takes]
    if "fsdp" in kind.draft_takes:
        if degrees != of_fsdp:
            message = f"{kind.title} has the parts of FSDP ranks, not of tensor-parallel ranks"
            hint = f"Omit {_MEGATRON_OPTIONS}, or write --to {' or --to '.join(alternatives)}."
            raise refuse("UNSUPPORTED", message, hint=hint)
        return
    if of_fsdp != Degrees():
        takers = [f"{each}{label_suffix}" for each in writable() if "fsdp" in get_format(each).draft_takes]
        message = f"{kind.title} has no files for FSDP ranks"
        raise refuse("UNSUPPORTED", message, hint=f"Omit {_FSDP_OPTIONS}, or write --to {' or --to '.join(takers)}.")
    if "degrees" not in kind.draft_takes:
        message = f"{kind.title} has no files for each rank: it is read at any degree of parallelism"
        hint = f"Omit {_MEGATRON_OPTIONS}, or write --to {' or --to '.join(alternatives)}."
        raise refuse("UNSUPPORTED", message, hint=hint)
    if "parts" not in kind.draft_takes and degrees.pp * degrees.ep > 1:
        message = f"{kind.title} is read at any degrees; --tp says for how many ranks the vocabulary is padded"
        raise refuse("UNSUPPORTED", message, hint="Omit --pp and --ep.")


def rank_draft_options(
    checkpoint: Checkpoint,
    dialect: str,
    names: Collection[str],
    degrees: Degrees,
    axes: Mapping[str, int],
    problems: list[Refusal],
) -> dict[str, Any]:
    """Return options for the layout of a target with separate files for each rank.

    Args:
        checkpoint: the source checkpoint.
        dialect: dialect of the target; `identity` means the source's own names.
        names: names of the tensors to write.
        degrees: parallel degrees (numbers of ranks) of the target.
        axes: axis -> size taken from tensor shapes, for axes whose size no config states.
        problems: list to which refusals of parameters that cannot be divided evenly are added.
    """
    if degrees.tp > 1 and dialect != IDENTITY:
        parts = rank_parts(checkpoint, dialect, names, degrees.tp, axes, problems)
    else:
        parts = dict.fromkeys(names)
    if degrees.tp > 1 and dialect == IDENTITY:
        message = "under their own names nothing tells how tensor-parallel ranks share out the tensors"
        problems.append(Refusal("UNSUPPORTED", message, Where(), "Name a dialect: --to FORMAT:DIALECT."))
    return {"degrees": degrees, "parts": parts}


def rank_parts(
    checkpoint: Checkpoint,
    dialect: str,
    names: Collection[str],
    ranks: int,
    axes: Mapping[str, int],
    problems: list[Refusal],
) -> Parts:
    """Return which shard of each parameter each tensor-parallel rank holds.

    Args:
        checkpoint: the source checkpoint.
        dialect: dialect of the target.
        names: names of the tensors to write. The result omits names that the dialect does not have. It also omits
            padded tensors, which are divided among ranks later.
        ranks: number of tensor-parallel ranks.
        axes: axis -> size taken from tensor shapes, for axes whose size no config states.
        problems: list to which refusals of parameters that cannot be divided evenly are added.
    """
    family, sizes = checkpoint.reading.family, checkpoint.sizes
    parameters = tuple(dict.fromkeys(split_slot(name)[0] for name in names))
    bound = bind(parameters, family, pick_dialect(family, dialect), sizes)
    cuts = tuple(cut for cut in family.cuts if cut.mesh == _TP)
    parts: dict[str, tuple[int, tuple[Intervals, ...]] | None] = {}
    cached_parts: dict[tuple[Line, frozenset[tuple[str, int]]], tuple[int, tuple[Intervals, ...]] | None] = {}
    for (line, _), names_of_line in bound.names.items():
        if line.expression.padding:
            continue
        for position, name in names_of_line.items():
            axis_sizes = {**axes, **sizes.at(dict(zip(line.name.axes, position, strict=True)))}
            key = line, frozenset(axis_sizes.items())
            try:
                if key not in cached_parts:
                    cached_parts[key] = share_out(line.expression, cuts, axis_sizes, ranks)
                parts[name] = cached_parts[key]
            except TransaxleError as error:
                parts[name] = None  # treated as whole on every rank, so that the parameter gets only one refusal
                problems.extend(
                    Refusal(each.code, each.message, Where(None, name), each.hint) for each in error.refusals
                )
    return parts


def config_for_ranks(config: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Return a copy of a config to which the number of tensor-parallel ranks is added, also in its section for the text
    model.
    """
    nested = config.get("text_config")
    inner = {"text_config": {**nested, RANKS: tp}} if isinstance(nested, Mapping) else {}
    return {**config, **inner, RANKS: tp}


def engine_parts(
    family: Family, dialect: str, config: Mapping[str, Any], names: Collection[str], *, tp: int, ep: int = 1
) -> Parts:
    """Return which shard of each parameter each rank of an inference engine holds.

    Args:
        family: family of the model.
        dialect: dialect of the engine's parameter names.
        config: content of the model's config.
        names: names of the parameters. The result lacks names that the dialect does not have.
        tp: number of tensor-parallel ranks.
        ep: number of ranks among which whole experts are divided: all ranks, or 1 if each rank has a shard of every
            expert.

    Raises:
        Refused: with code UNSUPPORTED, and every parameter that cannot be divided evenly.
        UsageError: with code UNKNOWN_AXIS, if the size of an axis is unknown.
    """
    sizes = Sizes(family, config_for_ranks(config, 1 if ep > 1 else tp))
    label = pick_dialect(family, dialect)
    bound = bind(tuple(names), family, label, sizes)
    parts: dict[str, tuple[int, tuple[Intervals, ...]] | None] = {}
    problems: list[Refusal] = []
    cached_parts: dict[tuple[Line, frozenset[tuple[str, int]]], tuple[int, tuple[Intervals, ...]] | None] = {}
    for (line, _), names_of_line in bound.names.items():
        for position, name in names_of_line.items():
            axis_sizes = sizes.at(dict(zip(line.name.axes, position, strict=True)))
            key = line, frozenset(axis_sizes.items())
            try:
                if key not in cached_parts:
                    cached_parts[key] = rank_shares(line.expression, family, label.name, axis_sizes, tp=tp, ep=ep)
                parts[name] = cached_parts[key]
            except TransaxleError as error:
                problems.extend(replace(each, where=Where(None, name)) for each in error.refusals)
    if problems:
        raise gathered(problems)
    return parts


def pad_for_ranks(checkpoint: Checkpoint, dialect: str, degrees: Degrees) -> Checkpoint:
    """Return the checkpoint with dims padded so that they can be divided evenly among the ranks, unless the user gave a
    size.

    Args:
        checkpoint: the source checkpoint.
        dialect: dialect of the target.
        degrees: parallel degrees (numbers of ranks) of the target.
    """
    reading, multiple = checkpoint.reading, degrees.rows * degrees.tp
    if any(line.expression.padding for line in reading.dialect.lines):
        return _change_padding(checkpoint, multiple)
    sizes = checkpoint.sizes.at({})
    paddings: dict[str, int] = {}
    for line in pick_dialect(reading.family, dialect).lines:
        for node in line.expression.dims if line.expression.padding else ():
            axes, length = _padding(node, sizes)
            if len(axes) == 1 and length is not None and axes[0] not in sizes:
                paddings[axes[0]] = -length % multiple
    settings = msgspec.structs.replace(checkpoint.settings, axes={**paddings, **checkpoint.settings.axes})
    return Checkpoint(checkpoint.container, settings, None, None, checkpoint.undecoded)


def _padding(node: Node, sizes: Mapping[str, int]) -> tuple[list[str], int | None]:
    """Return the padding axes of a dim, and the dim's length without padding; the length is None if a size is
    unknown.
    """
    if not isinstance(node, Sum):
        return [], None
    axes = [axis for name, part in node.segments if name == PADDING for axis in sorted(axes_in(part))]
    segments = [part for name, part in node.segments if name != PADDING]
    length = None if any(unknown(part, sizes) for part in segments) else sum(size(part, sizes) for part in segments)
    return axes, length


def _change_padding(checkpoint: Checkpoint, multiple: int) -> Checkpoint:
    """Return a checkpoint with more padding, made by appending rows of zeros, or with less padding, by omitting padding
    rows.
    """
    container, reading = checkpoint.container, checkpoint.reading
    inline = layer(container.storage, NumbersInMemory) or NumbersInMemory(container.storage)
    entries, left_entries = dict(container.entries), dict(container.left)
    user_axes = checkpoint.settings.axes
    paddings: dict[str, int] = {}
    for (line, _), names in checkpoint.bound.names.items():
        for position, name in names.items() if line.expression.padding else ():
            if name not in entries or len(entries[name].shape) != len(line.expression.dims):
                continue  # such a tensor has other dims than the rule, as an optimizer's step counter does
            sizes = checkpoint.sizes.at(dict(zip(line.name.axes, position, strict=True)))
            for dim, node in enumerate(line.expression.dims):
                axes, length = _padding(node, sizes)
                if len(axes) == 1 and length is not None and axes[0] not in user_axes:
                    paddings[axes[0]] = -length % multiple
                    entries[name], cut_entry = _resize(entries[name], dim, length + paddings[axes[0]], inline)
                    left_entries |= {cut_entry.name: cut_entry} if cut_entry is not None else {}
    if all(entries[name] is entry for name, entry in container.entries.items()):
        return checkpoint
    storage = container.storage if layer(container.storage, NumbersInMemory) is not None else inline
    settings = msgspec.structs.replace(
        checkpoint.settings,
        family=reading.family.name,
        dialect=reading.dialect.label,
        axes={**paddings, **user_axes},
    )
    resized = msgspec.structs.replace(container, storage=storage, entries=entries, left=left_entries)
    return Checkpoint(resized, settings, None, None, checkpoint.undecoded)


def _resize(entry: Entry, dim: int, length: int, inline: NumbersInMemory) -> tuple[Entry, Entry | None]:
    """Return a tensor's entry lengthened or shortened along a dim, and an entry for the rows that were cut off, or
    None.
    """
    old_length = entry.shape[dim]
    if length == old_length:
        return entry, None
    shape = (*entry.shape[:dim], length, *entry.shape[dim + 1 :])
    if length > old_length:
        start = tuple(old_length if at == dim else 0 for at in range(len(shape)))
        added_shape = (*shape[:dim], length - old_length, *shape[dim + 1 :])
        place = inline.add(bytes(_WIDEST))
        zeros = Extent(start, added_shape, place.file, place.offset, (0,) * len(shape))
        return Entry(entry.name, entry.dtype, shape, (*entry.extents, zeros)), None
    kept_extents = [_clip(entry, extent, dim, 0, length) for extent in entry.extents]
    cut_extents = [_clip(entry, extent, dim, length, old_length) for extent in entry.extents]
    cut_off = (*shape[:dim], old_length - length, *shape[dim + 1 :])
    return (
        Entry(entry.name, entry.dtype, shape, tuple(each for each in kept_extents if each is not None)),
        Entry(
            f"{entry.name} from {length} on",
            entry.dtype,
            cut_off,
            tuple(each for each in cut_extents if each is not None),
        ),
    )


def _clip(entry: Entry, extent: Extent, dim: int, start: int, stop: int) -> Extent | None:
    """Return the part of a stored chunk between two indices of a dim; positions in it are counted from the first
    index.
    """
    low, high = max(extent.start[dim], start), min(extent.start[dim] + extent.shape[dim], stop)
    if low >= high:
        return None
    strides = extent.strides or row_major(extent.shape)
    shape = (*extent.shape[:dim], high - low, *extent.shape[dim + 1 :])
    offset = extent.offset + (low - extent.start[dim]) * strides[dim] * ITEM_BITS[entry.dtype] // 8
    begin = (*extent.start[:dim], low - start, *extent.start[dim + 1 :])
    dense = extent.strides is None and all(count == 1 for count in shape[:dim])
    return Extent(begin, shape, extent.file, offset, None if dense else strides)
