"""Where a tensor that holds several layers or experts is cut: a chunk is what one module of one layer holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

from transaxle.axes.layout.relayout import Target
from transaxle.axes.notation.expression import Layout


def chunk_cuts(
    targets: Mapping[str, Target], numbered: Mapping[str, Collection[str]]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return where chunks begin along the first dims of tensors, without those that are one chunk.

    Args:
        targets: the tensors.
        numbered: logical tensor -> axes that other dialects have in its names: layers, experts.
    """
    by_layout: dict[int, tuple[tuple[int, ...], ...]] = {}
    found = {}
    for name, target in targets.items():
        key = id(target.layout)
        if key not in by_layout:
            by_layout[key] = _cuts(target.layout, numbered)
        if any(len(starts) > 1 for starts in by_layout[key]):
            found[name] = by_layout[key]
    return found


def _cuts(layout: Layout, numbered: Mapping[str, Collection[str]]) -> tuple[tuple[int, ...], ...]:
    cuts: list[tuple[int, ...]] = []
    # A router has a row for each expert, and yet is one tensor of its layer in every dialect.
    own = set[str].intersection(*(set(numbered.get(component, ())) for component in layout.shares))
    for dim, size in enumerate(layout.shape):
        shares = [share[dim] for share in layout.shares.values()]
        axes = {share.axes for share in shares}
        if len(axes) == 1 and all(len(share.axes) == 1 and share.axes[0][0] in own for share in shares):
            cuts.append(tuple(range(size)))
            continue
        # Parts that lie behind each other, such as gate and up, are chunks of their own.
        spans = sorted((share.offset, share.offset + _length(share.axes)) for share in shares)
        if all(end <= begin for (_, end), (begin, _) in pairwise(spans)):
            cuts.append((0, *(begin for begin, _ in spans[1:])))
        break
    return tuple(cuts)


def _length(axes: tuple[tuple[str, int, int], ...]) -> int:
    """Return how far a part reaches along a dim."""
    return axes[0][1] * axes[0][2] if axes else 1
