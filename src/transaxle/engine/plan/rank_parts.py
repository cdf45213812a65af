"""What ranks hold of the tensors of a checkpoint with files for each of them: which parts of which dims.

Tensor parallelism is the table's: its `cut` statements name the axes that ranks share out. The rows of a vocabulary are
padded first, so that they divide.
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
from transaxle.errors import Refusal, TransaxleError, Where, gathered
from transaxle.formats.catalog import ITEM_BITS, Entry, Extent, NumbersInMemory
from transaxle.formats.storage.storage import layer

Parts = Mapping[str, tuple[int, tuple[Intervals, ...]] | None]
"""Parameter -> the dim that tensor-parallel ranks share out, and the positions of each; None: all have all of it."""
_TP = "tp"
RANKS = "tensor_parallel_size"
"""Key that formulas find in a config: for tensors that have one part of their whole on each rank."""
_WIDEST = 16
"""Bytes of the widest element."""


def of_ranks(
    checkpoint: Checkpoint,
    dialect: str,
    names: Collection[str],
    degrees: Degrees,
    axes: Mapping[str, int],
    problems: list[Refusal],
) -> dict[str, Any]:
    """Return what a draft takes that lays out files for each rank.

    Args:
        checkpoint: the source.
        dialect: of the target; `identity` for the source's own names.
        names: of the tensors that are written.
        degrees: the ranks.
        axes: sizes that the shapes tell, where no config does.
        problems: parameters that do not divide are added.
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
    """Return what each of several tensor-parallel ranks holds of the parameters of a dialect.

    Args:
        checkpoint: the source.
        dialect: of the target.
        names: of the tensors that are written; those that the dialect does not have are left out, and so are those
            with padding, which divide as they are.
        ranks: their number.
        axes: sizes that the shapes tell, where no config does.
        problems: parameters that do not divide are added.
    """
    family, sizes = checkpoint.recognised.family, checkpoint.sizes
    parameters = tuple(dict.fromkeys(split_slot(name)[0] for name in names))
    bound = bind(parameters, family, pick_dialect(family, dialect), sizes)
    cuts = tuple(cut for cut in family.cuts if cut.mesh == _TP)
    found: dict[str, tuple[int, tuple[Intervals, ...]] | None] = {}
    known: dict[tuple[Line, frozenset[tuple[str, int]]], tuple[int, tuple[Intervals, ...]] | None] = {}
    for (line, _), names_of_line in bound.names.items():
        if line.expression.padding:
            continue
        for position, name in names_of_line.items():
            at = {**axes, **sizes.at(dict(zip(line.name.axes, position, strict=True)))}
            key = line, frozenset(at.items())
            try:
                if key not in known:
                    known[key] = share_out(line.expression, cuts, at, ranks)
                found[name] = known[key]
            except TransaxleError as error:
                found[name] = None  # as if it were whole, so that it is refused once
                problems.extend(
                    Refusal(each.code, each.message, Where(None, name), each.hint) for each in error.refusals
                )
    return found


def for_ranks(config: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Return a config as formulas see it on so many tensor-parallel ranks; the text model's part says so too."""
    nested = config.get("text_config")
    inner = {"text_config": {**nested, RANKS: tp}} if isinstance(nested, Mapping) else {}
    return {**config, **inner, RANKS: tp}


def engine_parts(
    family: Family, dialect: str, config: Mapping[str, Any], names: Collection[str], *, tp: int, ep: int = 1
) -> Parts:
    """Return what the ranks of an inference engine hold of its parameters.

    Args:
        family: of the model.
        dialect: the engine's.
        config: of the model.
        names: of the parameters; those that the dialect does not have are left out.
        tp: number of tensor-parallel ranks.
        ep: how many of them share out the experts: all, or 1 where each has a part of every expert.

    Raises:
        Refused: UNSUPPORTED, with every parameter that does not divide.
        UsageError: UNKNOWN_AXIS where a size is not known.
    """
    sizes = Sizes(family, for_ranks(config, 1 if ep > 1 else tp))
    label = pick_dialect(family, dialect)
    bound = bind(tuple(names), family, label, sizes)
    found: dict[str, tuple[int, tuple[Intervals, ...]] | None] = {}
    problems: list[Refusal] = []
    known: dict[tuple[Line, frozenset[tuple[str, int]]], tuple[int, tuple[Intervals, ...]] | None] = {}
    for (line, _), names_of_line in bound.names.items():
        for position, name in names_of_line.items():
            at = sizes.at(dict(zip(line.name.axes, position, strict=True)))
            key = line, frozenset(at.items())
            try:
                if key not in known:
                    known[key] = rank_shares(line.expression, family, label.name, at, tp=tp, ep=ep)
                found[name] = known[key]
            except TransaxleError as error:
                problems.extend(replace(each, where=Where(None, name)) for each in error.refusals)
    if problems:
        raise gathered(problems)
    return found


def padded(checkpoint: Checkpoint, dialect: str, degrees: Degrees) -> Checkpoint:
    """Return a checkpoint whose padded dims are as long as so many ranks need them, where the user does not say it.

    Args:
        checkpoint: the source.
        dialect: of the target.
        degrees: the ranks.
    """
    reading, multiple = checkpoint.recognised, degrees.rows * degrees.tp
    if any(line.expression.padding for line in reading.dialect.lines):
        return _repadded(checkpoint, multiple)
    known = checkpoint.sizes.at({})
    given: dict[str, int] = {}
    for line in pick_dialect(reading.family, dialect).lines:
        for node in line.expression.dims if line.expression.padding else ():
            axes, length = _padding(node, known)
            if len(axes) == 1 and length is not None and axes[0] not in known:
                given[axes[0]] = -length % multiple
    settings = msgspec.structs.replace(checkpoint.settings, axes={**given, **checkpoint.settings.axes})
    return Checkpoint(checkpoint.container, settings, None, None, checkpoint.undecoded)


def _padding(node: Node, known: Mapping[str, int]) -> tuple[list[str], int | None]:
    """Return the axes that pad a dim, and its length without them if it is known."""
    if not isinstance(node, Sum):
        return [], None
    axes = [axis for name, part in node.segments if name == PADDING for axis in sorted(axes_in(part))]
    named = [part for name, part in node.segments if name != PADDING]
    length = None if any(unknown(part, known) for part in named) else sum(size(part, known) for part in named)
    return axes, length


def _repadded(checkpoint: Checkpoint, multiple: int) -> Checkpoint:
    """Return a padded checkpoint with more or less padding: zeros at the end, or rows that are left behind."""
    container, reading = checkpoint.container, checkpoint.recognised
    inline = layer(container.storage, NumbersInMemory) or NumbersInMemory(container.storage)
    entries, left = dict(container.entries), dict(container.left)
    said = checkpoint.settings.axes
    given: dict[str, int] = {}
    for (line, _), names in checkpoint.bound.names.items():
        for position, name in names.items() if line.expression.padding else ():
            if name not in entries or len(entries[name].shape) != len(line.expression.dims):
                continue  # a step has no dims
            known = checkpoint.sizes.at(dict(zip(line.name.axes, position, strict=True)))
            for dim, node in enumerate(line.expression.dims):
                axes, length = _padding(node, known)
                if len(axes) == 1 and length is not None and axes[0] not in said:
                    given[axes[0]] = -length % multiple
                    entries[name], rest = _resized(entries[name], dim, length + given[axes[0]], inline)
                    left |= {rest.name: rest} if rest is not None else {}
    if all(entries[name] is entry for name, entry in container.entries.items()):
        return checkpoint
    storage = container.storage if layer(container.storage, NumbersInMemory) is not None else inline
    settings = msgspec.structs.replace(
        checkpoint.settings,
        family=reading.family.name,
        dialect=reading.dialect.label,
        axes={**given, **said},
    )
    resized = msgspec.structs.replace(container, storage=storage, entries=entries, left=left)
    return Checkpoint(resized, settings, None, None, checkpoint.undecoded)


def _resized(entry: Entry, dim: int, length: int, inline: NumbersInMemory) -> tuple[Entry, Entry | None]:
    """Return an entry with another length along a dim, and what is cut off; None where nothing is."""
    have = entry.shape[dim]
    if length == have:
        return entry, None
    shape = (*entry.shape[:dim], length, *entry.shape[dim + 1 :])
    if length > have:
        start = tuple(have if at == dim else 0 for at in range(len(shape)))
        more = (*shape[:dim], length - have, *shape[dim + 1 :])
        place = inline.add(bytes(_WIDEST))
        zeros = Extent(start, more, place.file, place.offset, (0,) * len(shape))
        return Entry(entry.name, entry.dtype, shape, (*entry.extents, zeros)), None
    kept = [_clipped(entry, extent, dim, 0, length) for extent in entry.extents]
    rest = [_clipped(entry, extent, dim, length, have) for extent in entry.extents]
    cut_off = (*shape[:dim], have - length, *shape[dim + 1 :])
    return (
        Entry(entry.name, entry.dtype, shape, tuple(each for each in kept if each is not None)),
        Entry(f"{entry.name} from {length} on", entry.dtype, cut_off, tuple(each for each in rest if each is not None)),
    )


def _clipped(entry: Entry, extent: Extent, dim: int, start: int, stop: int) -> Extent | None:
    """Return the part of a chunk between two indices of a dim, which is counted from the first."""
    low, high = max(extent.start[dim], start), min(extent.start[dim] + extent.shape[dim], stop)
    if low >= high:
        return None
    strides = extent.strides or row_major(extent.shape)
    shape = (*extent.shape[:dim], high - low, *extent.shape[dim + 1 :])
    offset = extent.offset + (low - extent.start[dim]) * strides[dim] * ITEM_BITS[entry.dtype] // 8
    begin = (*extent.start[:dim], low - start, *extent.start[dim + 1 :])
    dense = extent.strides is None and all(count == 1 for count in shape[:dim])
    return Extent(begin, shape, extent.file, offset, None if dense else strides)
