"""Tiles: block scales follow the codes wherever a relayout keeps every tile whole.

A tile is a region of a stored tensor whose elements share one scale: 128 x 128, 1 x 32, or the whole tensor. Tiles
belong to stored dims, not to axes, so whether a relayout keeps them whole is a question of numbers: every tile of the
target must lie inside one tile of the source, in any order within it, and takes its scale. Otherwise the codes would
need another scale than the one they were made with, and that is refused.

The answer is again a relayout, this time of the grids of scales: box copies for the same executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod

import msgspec

from transaxle.axes.geometry.piece import cut
from transaxle.axes.geometry.retile import Coordinate, Misaligned, TileBox, retile
from transaxle.axes.layout.relayout import Check, Origin, Target, TargetPart
from transaxle.axes.layout.solve import Shape
from transaxle.axes.notation.expression import Layout, Share
from transaxle.errors import TransaxleError, gathered, refuse

Tile = tuple[int, ...]
"""Positions of a tile along each stored dim."""

_SCALE = "scale"
_LISTED = 4
"""Cap on the sources of a misaligned tile that a refusal lists."""
DRAWN = 1024
"""Positions along a tile that are looked at one by one at most, to draw it."""


def grid(shape: Shape, tile: Tile) -> Shape:
    """Return the shape of the grid of scales: tiles along each dim, the last ones perhaps not full."""
    return tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))


class ScaleRelayout(msgspec.Struct, frozen=True):
    """How a target tensor's scales come from those of its sources."""

    target: Target
    """The grid of scales, to be filled from the sources' grids. Tiles of padding alone have no source."""
    checks: tuple[Check, ...]
    """Scales that must be bit-equal, because one scale stands for all of them in the target."""


class SplitTile(msgspec.Struct, frozen=True):
    """A target tile that draws on several source tiles, looked at along the dim in which it draws on the most."""

    rule: str
    """The target's rule, as the user wrote it."""
    number: Tile
    """Which tile it is, along each dim of the target."""
    dim: int
    """The dim that is looked at; in all others it is the tile's first position."""
    runs: tuple[tuple[int, int, str, Tile], ...]
    """Positions `[start, stop)` of the target along it, the stored tensor they come from, and its tile; no name, where
    there is padding."""


def scales(
    target: Target, tile: Tile, tiles: Mapping[str, Tile], *, named: Callable[[str], str], dtype: str
) -> ScaleRelayout:
    """Relayout the scales that belong to a target tensor's codes.

    Args:
        target: the codes, as a target of a translation.
        tile: the target's tile.
        tiles: stored name of codes -> their tile, for every source of the target.
        named: gives the name of the scales from the name of the codes.
        dtype: safetensors code of the scales.

    Post-condition: executing the result gives each target tile the scale of every element's tile in the sources.

    Raises:
        Refused: BLOCK_MISALIGNED where a target tile has elements of several source tiles; it names them.
    """
    shape = grid(target.layout.shape, tile)
    grids = {o.name: grid(o.layout.shape, tiles[o.name]) for part in target.parts for o in part.origins}
    # One scale each: it stays valid wherever the elements go, so only equality of the scales matters.
    if prod(shape) == 1 and all(prod(stored) == 1 for stored in grids.values()):
        return _one_scale(target, shape, grids, named, dtype)
    views = tuple(target.layout.shares[part.component] for part in target.parts)
    sources = tuple(_coordinates(part, target.index, tiles) for part in target.parts)
    stored = [[(origin.name, dict(origin.index)) for origin in part.origins] for part in target.parts]
    # Parts read from the same stored tensors get the number of the first such part: only these may share a source tile.
    groups = tuple(map(stored.index, stored))
    try:
        boxes_per_part = retile(target.layout.shape, tile, views, sources, groups)
    except Misaligned as fault:
        raise _misaligned(target, tile, fault.tile, sources) from None
    shares: dict[str, tuple[Share, ...]] = {}
    parts = []
    for part, boxes in zip(target.parts, boxes_per_part, strict=True):
        by_index = _by_index(part, target.index)
        for number, box in enumerate(boxes):
            component = f"{part.component}#{number}"
            # The columns of a box: the target's dims, the source's dims, then the axes in the sources' names.
            dims = [_share(box, column) for column in range(len(box.start))]
            # The remaining columns count in the sources' names.
            coordinate_end = len(shape) + len(grids[part.origins[0].name])
            shares[component] = tuple(dims[: len(shape)])
            layout = Layout(grids[part.origins[0].name], {component: tuple(dims[len(shape) : coordinate_end])})
            origins = [
                Origin(named(by_index[key]), component, layout, index)
                for key, index in _indices(dims[coordinate_end:])
                if key in by_index
            ]
            parts.append(TargetPart(component, tuple(origins)))
    return ScaleRelayout(Target(named(target.name), dtype, Layout(shape, shares), {}, tuple(parts), target.rule), ())


def _one_scale(
    target: Target, shape: Shape, grids: Mapping[str, Shape], named: Callable[[str], str], dtype: str
) -> ScaleRelayout:
    """Relayout one scale per tensor: those of all sources must be equal, which the checks prove."""
    candidates = []
    for name, stored in grids.items():
        target_layout, source_layout = (Layout(s, {_SCALE: tuple(Share(0, ()) for _ in s)}) for s in (shape, stored))
        part = TargetPart(_SCALE, (Origin(named(name), _SCALE, source_layout, {}),))
        candidates.append(Target(named(target.name), dtype, target_layout, {}, (part,), target.rule))
    why = f"{target.rule}\none scale would have to stand for all of them"
    return ScaleRelayout(candidates[0], tuple(Check(candidates[0], candidate, why) for candidate in candidates[1:]))


def _coordinates(part: TargetPart, index: Mapping[str, int], tiles: Mapping[str, Tile]) -> tuple[Coordinate, ...]:
    """Return the coordinates that locate an element in the sources: one per stored dim, then one per axis in their
    names.

    An axis that is also in the target's name has a fixed index there, and needs no coordinate.
    """
    model = part.origins[0]
    tile = tiles[model.name]
    for other in part.origins[1:]:
        if tiles[other.name] != tile or (other.layout is not model.layout and other.layout != model.layout):
            message = f"{model.name} and {other.name} differ in their tiles or their layout"
            raise refuse("UNSUPPORTED", message, tensor=model.name)
    coordinates = []
    for share, step in zip(model.layout.shares[model.component], tile, strict=True):
        fixed = sum(index[axis] * stride for axis, _, stride in share.axes if axis in index)
        weights = tuple((axis, stride) for axis, _, stride in share.axes if axis not in index)
        coordinates.append(Coordinate(weights, share.offset + fixed, step))
    return (*coordinates, *(Coordinate(((axis, 1),), 0, 1) for axis in model.index if axis not in index))


def _by_index(part: TargetPart, index: Mapping[str, int]) -> dict[tuple[int, ...], str]:
    """Return the sources' names by their indices along the axes that only the source's names have."""
    return {tuple(i for axis, i in origin.index.items() if axis not in index): origin.name for origin in part.origins}


def _share(box: TileBox, column: int) -> Share:
    """Return the share of one dim: loops that step along it, the widest step first."""
    axes = [(f"#{place}", count, step[column]) for place, (count, step) in enumerate(box.loops) if step[column]]
    return Share(box.start[column], tuple(sorted(axes, key=lambda axis: -axis[2])))


def _indices(names: Sequence[Share]) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """Yield the name indices that the loops run over, each with the loops' own indices."""
    loops = sorted((axis, count) for share in names for axis, count, _ in share.axes)
    for steps in product(*(range(count) for _, count in loops)):
        index = {axis: at for (axis, _), at in zip(loops, steps, strict=True)}
        yield tuple(share.offset + sum(index[axis] * step for axis, _, step in share.axes) for share in names), index


def _misaligned(
    target: Target, tile: Tile, number: tuple[int, ...], sources: Sequence[tuple[Coordinate, ...]]
) -> TransaxleError:
    """Build the refusal: the target tile, the source tiles that it draws on, and where in it each begins."""
    limits = zip(number, tile, target.layout.shape, strict=True)
    spans = [(at * step, min((at + 1) * step, size)) for at, step, size in limits]
    sources_drawn: dict[str, str] = {}
    for part, coordinates in zip(target.parts, sources, strict=True):
        by_index = _by_index(part, target.index)
        dims = len(part.origins[0].layout.shape)
        shares = target.layout.shares[part.component]
        for chosen in product(*(cut(share, *span) for share, span in zip(shares, spans, strict=True))):
            axes = [axis for share in shares for axis, _, _ in share.axes]
            box = dict(zip(axes, (span for spans_in_dim, _ in chosen for span in spans_in_dim), strict=True))
            bounds = [coordinate.bounds(box) for coordinate in coordinates]
            tiles = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in bounds[:dims])
            # Only a beginning inside a tile is worth telling: it is where the cut goes wrong.
            inside = [(begin, step) for (_, begin), step in zip(chosen, tile, strict=True) if begin % step]
            begins = " and ".join(f"{at} = {at // step} x {step} + {at % step}" for at, step in inside)
            for key in product(*map(dict.fromkeys, bounds[dims:])):
                sources_drawn.setdefault(
                    f"{by_index.get(key, '?')}, tile ({tiles})", f", from position {begins} on" if begins else ""
                )
    lines = [f"  {source}{begins}" for source, begins in sources_drawn.items()]
    more = [f"  … and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    region = " x ".join(f"[{start}, {stop})" for start, stop in spans)
    head = f"its tile {number} of {' x '.join(map(str, tile))}, positions {region}, has one scale, but comes from"
    error = refuse(
        "BLOCK_MISALIGNED",
        "\n".join([target.rule, head, *lines[:_LISTED], *more]),
        tensor=target.name,
        hint="Choose a dialect that keeps these tiles whole, or decode the tensor:  --decode bf16.",
    )
    detail = partial(_split, target, number, spans, sources)
    return gathered(replace(refusal, detail=detail) for refusal in error.refusals)


def _split(
    target: Target,
    number: Tile,
    spans: Sequence[tuple[int, int]],
    sources: Sequence[tuple[Coordinate, ...]],
) -> SplitTile | None:
    """Look at a tile position by position; None where it is too long for that."""
    if any(stop - start > DRAWN for start, stop in spans):
        return None
    by_dim = [_runs(target, dim, spans, sources) for dim in range(len(spans))]
    dim = max(range(len(by_dim)), key=lambda each: len({run[2:] for run in by_dim[each]}))
    return SplitTile(target.rule, number, dim, tuple(by_dim[dim]))


def _runs(
    target: Target, dim: int, spans: Sequence[tuple[int, int]], sources: Sequence[tuple[Coordinate, ...]]
) -> list[tuple[int, int, str, Tile]]:
    runs: list[tuple[int, int, str, Tile]] = []
    for at in range(*spans[dim]):
        place = [at if other == dim else start for other, (start, _) in enumerate(spans)]
        source = _source_of(target, place, sources)
        if runs and runs[-1][2:] == source:
            runs[-1] = runs[-1][0], at + 1, *source
        else:
            runs.append((at, at + 1, *source))
    return runs


def _source_of(target: Target, place: Sequence[int], sources: Sequence[tuple[Coordinate, ...]]) -> tuple[str, Tile]:
    """Return the stored tensor and its tile that one element of the target comes from; no name for padding."""
    for part, coordinates in zip(target.parts, sources, strict=True):
        shares = target.layout.shares[part.component]
        boxes = [cut(share, at, at + 1) for share, at in zip(shares, place, strict=True)]
        if not all(boxes):
            continue
        axes = [axis for share in shares for axis, _, _ in share.axes]
        box = dict(zip(axes, (span for ((spans, _), *_) in boxes for span in spans), strict=True))
        found = tuple(coordinate.bounds(box)[0] for coordinate in coordinates)
        dims = len(part.origins[0].layout.shape)
        return _by_index(part, target.index).get(found[dims:], "?"), found[:dims]
    return "", ()
