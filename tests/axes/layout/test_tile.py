from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.axes import walking
from tests.axes.apply import HOLE, Array, Entry, Extent, Store, arange, fill, law, numbers, only, translated
from transaxle.axes.layout.relayout import Copier, Shape, Target
from transaxle.axes.layout.tile import ScaleRelayout, Tile, grid, scales
from transaxle.axes.notation.expression import parse
from transaxle.errors import Refused

Tiling = Callable[[Shape], Tile]

SCALE = "F32"


def whole_tile(shape: Shape) -> Tile:
    """The tile of an encoding with one scale per tensor."""
    return tuple(max(size, 1) for size in shape)


def named(codes: str) -> str:
    return f"{codes}_scale"


def numbered(store: Store, tiling: Tiling) -> tuple[dict[str, Array], Store]:
    """For every stored tensor the tile that each element lies in, by a number of its own; and the grids of these."""
    tiles, grids, start = {}, Store(), 0
    for name, entry in store.entries.items():
        shape = grid(entry.shape, tiling(entry.shape))
        places = [i // step for i, step in zip(np.indices(entry.shape), tiling(entry.shape), strict=True)]
        tiles[name] = np.ravel_multi_index(places, shape) + start if places else np.array(start)
        grids.put(named(name), np.arange(start, start + int(np.prod(shape))).reshape(shape))
        start += int(np.prod(shape))
    return tiles, grids


def expected(elements: Array, tile: Tile) -> Array | None:
    """The grid of a target whose elements have these source tiles; None where a tile has several."""
    found = np.full(grid(elements.shape, tile), HOLE)
    for place_ in np.ndindex(*found.shape):
        inside = elements[tuple(slice(i * step, (i + 1) * step) for i, step in zip(place_, tile, strict=True))]
        distinct = np.unique(inside[inside != HOLE])
        if len(distinct) > 1:
            return None
        if len(distinct):
            found[place_] = distinct[0]
    return found


def relaid(target: Target, tile: Tile, store: Store, tiling: Tiling) -> ScaleRelayout:
    tiles = {name: tiling(entry.shape) for name, entry in store.entries.items()}
    return scales(target, tile, tiles, scale_name=named, dtype=SCALE)


def refusal(target: Target, tile: Tile, store: Store, tiling: Tiling) -> Refused:
    with pytest.raises(Refused) as caught:
        relaid(target, tile, store, tiling)
    assert caught.value.code == "BLOCK_MISALIGNED"
    assert caught.value.where.tensor == target.name
    assert "--decode" in caught.value.hint
    return caught.value


@law
@given(walking.dialects(), walking.dialects(), walking.sizes(), st.data(), st.booleans())
def test_scales_follow_their_codes_or_are_refused(
    source: list[walking.Line], target: list[walking.Line], sizes: dict[str, int], data: st.DataObject, chunked: bool
) -> None:
    """Any table, any tiles: what a walk over all elements finds, tile by tile."""
    mine, yours = (data.draw(st.lists(st.integers(1, 4), min_size=6, max_size=6)) for _ in range(2))
    store = Store(walking.stored(source, sizes))
    view = translated(walking.family(source, target), "one", "two", store, {axis: sizes[axis] for axis in "abce"})
    if not any(expression.padding for _, _, expression in source):
        sizes = {**sizes, "z": 0}

    def tiling(shape: Shape) -> Tile:
        return tuple(mine[: len(shape)])

    tiles, grids = numbered(store, tiling)
    if chunked:
        for name, entry in list(grids.entries.items()):
            array = grids.chunks[name, 0].reshape(entry.shape)
            if array.shape and array.shape[0] > 1:
                rest = tuple((0, size) for size in array.shape[1:])
                grids.put(name, array, [((0, 1), *rest), ((1, array.shape[0]), *rest)])
    of_element = {
        int(number): int(tile)
        for name in store.entries
        for number, tile in zip(store.chunks[name, 0], tiles[name].reshape(-1), strict=True)
        if number != HOLE
    }
    for name, array in walking.stored(target, sizes).items():
        elements = np.array([of_element.get(int(number), HOLE) for number in array.reshape(-1)]).reshape(array.shape)
        tile = tuple(yours[: array.ndim])
        wanted = expected(elements, tile)
        one = view.targets[name]
        sources = {origin.name for part in one.parts for origin in part.origins}
        single = int(np.prod(grid(array.shape, tile))) == 1
        if single and all(np.prod(grids.entries[named(codes)].shape) == 1 for codes in sources):
            found = relaid(one, tile, store, tiling)
            held = [fill(grids, side).item() for check in found.checks for side in (check.first, check.second)]
            assert {fill(grids, found.target).item(), *held} == {grids.chunks[named(n), 0].item() for n in sources}
        elif wanted is None:
            refusal(one, tile, store, tiling)
        else:
            found = relaid(one, tile, store, tiling)
            assert (found.target.name, found.target.dtype) == (named(name), SCALE)
            np.testing.assert_array_equal(fill(grids, found.target), wanted)
            written = sum(copy.move.size for copy in Copier(grids.entries).copies(found.target))
            assert written == np.count_nonzero(wanted != HOLE)  # each scale once


TOY = only("""
family toy
  axes e g r c=head t=2 h=half d=width f
  q : g r c d
  k : g c d
  v : g c d
  rope : g t h d
  gate : e f d
  up : e f d
dialect blocked
  q = q[(g r c) d]
  k = k[(g c) d]
  v = v[(g c) d]
  rope = rope[(g t h) d]
  gate.{e} = gate[f d]
  up.{e} = up[f d]
dialect one
  qkv = [[q:(g r c) | k:(g c) | v:(g c)] d]
dialect grouped
  qkv = [(g [q:(r c) | k:c | v:c]) d]
  rope = rope[(g h t) d]
  gate_up = [e [gate:f | up:f] d]
dialect fused
  gate_up.{e} = [[gate:f | up:f] d]
dialect turned
  gate_up = [e d [gate:f | up:f]]
""")


def fixed(*tile: int) -> Tiling:
    return lambda shape: (1,) * (len(shape) - len(tile)) + tile


BLOCK = fixed(128, 128)
WIDTH = 160


def moved(source: str, target: str, tensors: Mapping[str, torch.Tensor], **sizes: int) -> tuple[Store, Target]:
    """The one tensor of a target that these tensors become."""
    store = Store(tensors)
    view = translated(TOY, source, target, store, {"width": next(iter(tensors.values())).shape[-1]}, sizes)
    assert {r.code for r in view.refusals} <= {"MISSING_TENSOR"}
    (one,) = (found for name, found in view.targets.items() if name not in tensors or name == "rope")
    return store, one


def judged(store: Store, one: Target, wanted: torch.Tensor, tiling: Tiling = BLOCK) -> bool:
    """Whether the scales can follow, which must be what a walk over the elements says, with the scales it says."""
    tile = tiling(one.shape)
    found = expected(numbers(wanted), tile)
    if found is None:
        refusal(one, tile, store, tiling)
        return False
    _, grids = numbered(store, tiling)
    result = relaid(one, tile, store, tiling)
    assert result.checks == ()
    np.testing.assert_array_equal(fill(grids, result.target), found)
    return True


@pytest.mark.parametrize("source", ["blocked", "one"])
@pytest.mark.parametrize(("head", "exact"), [(128, True), (64, False), (80, False), (192, False)])
def test_blocked_to_grouped_attention(source: str, head: int, exact: bool) -> None:
    groups, repeats = 2, 3
    rows = {"q": groups * repeats * head, "k": groups * head, "v": groups * head}
    tensors = {name: arange(count, WIDTH) for name, count in rows.items()}
    if source == "one":
        tensors = {"qkv": arange(sum(rows.values()), WIDTH)}
    sizes = {"g": groups, "r": repeats, "head": head, "c": head}
    store = Store(tensors)
    view = translated(TOY, source, "grouped", store, {"width": WIDTH, **sizes}, {"g": groups, "r": repeats, "c": head})
    one = view.targets["qkv"]
    tiles, _ = numbered(store, BLOCK)
    parts = {name: torch.from_numpy(tile) for name, tile in tiles.items()}
    if source == "one":
        parts = dict(zip("qkv", parts["qkv"].split(list(rows.values())), strict=True))
    shaped = [parts[name].reshape(groups, -1, WIDTH) for name in "qkv"]
    assert judged(store, one, torch.cat(shaped, 1).reshape(-1, WIDTH)) is exact


def test_source_tiles_that_cannot_be_one_box() -> None:
    """Rows of two tensors in turn, in tiles of three: rows 1, 3, 5, 7 lie in tiles 0, 1, 1, 2."""
    family = only(
        "family turn\n  axes f\n  x : f\n  y : f\ndialect a\n  xy = [(f [x: | y:])]\n"
        "dialect b\n  x = x[f]\n  y = y[f]\n"
    )
    store = Store({"xy": arange(8)})
    view = translated(family, "a", "b", store)
    _, grids = numbered(store, fixed(3))
    for name, wanted in (("x", [0, 0, 1, 2]), ("y", [0, 1, 1, 2])):
        found = relaid(view.targets[name], (1,), store, fixed(3))
        assert fill(grids, found.target).tolist() == wanted


def test_a_transposed_tensor_needs_transposed_tiles() -> None:
    tensors = {f"{name}.0": arange(256, WIDTH) for name in ("gate", "up")}
    store, one = moved("blocked", "turned", tensors, e=1)
    refusal(one, (1, 1, 32), store, fixed(1, 32))
    assert relaid(one, (1, 32, 1), store, fixed(1, 32)).target.shape == (1, 5, 512)


def test_the_refusal_names_the_tile_and_its_sources_with_the_numbers() -> None:
    tensors = {f"{name}.{e}": arange(576, 256) for name in ("gate", "up") for e in range(3)}
    store, one = moved("blocked", "grouped", tensors, e=3)
    message = refusal(one, (1, 128, 128), store, BLOCK).refusals[0].message
    assert message.splitlines() == [
        "gate_up = [e [gate:f | up:f] d]",
        "its tile (0, 4, 0) of 1 x 128 x 128, positions [0, 1) x [512, 640) x [0, 128), has one scale, but comes from",
        "  gate.0, tile (4, 0)",
        "  up.0, tile (0, 0), from position 576 = 4 x 128 + 64 on",
    ]


def test_the_refusal_names_few_of_many_sources() -> None:
    tensors = {f"{name}.{e}": arange(2, 8) for name in ("gate", "up") for e in range(9)}
    store, one = moved("blocked", "grouped", tensors, e=9)
    message = refusal(one, (9, 4, 8), store, fixed(2, 4)).refusals[0].message
    assert message.splitlines()[2:] == [
        "  gate.0, tile (0, 0 to 1)",
        "  gate.8, tile (0, 0 to 1)",
        "  up.0, tile (0, 0 to 1), from position 2 = 0 x 4 + 2 on",
        "  up.8, tile (0, 0 to 1), from position 2 = 0 x 4 + 2 on",
    ]


def test_one_scale_per_tensor_must_be_equal_to_be_fused() -> None:
    tensors = {f"{name}.0": arange(576, WIDTH) for name in ("gate", "up")}
    store, one = moved("blocked", "fused", tensors, e=1)
    found = relaid(one, whole_tile(one.shape), store, whole_tile)
    grids = Store({named("gate.0"): np.array([[7]]), named("up.0"): np.array([[8]])})
    assert fill(grids, found.target).tolist() == [[7]]
    (check,) = found.checks
    assert [fill(grids, side).item() for side in (check.first, check.second)] == [7, 8]
    assert "one scale would have to stand for all of them" in check.why
    stack = moved("blocked", "grouped", tensors, e=1)[1]
    assert relaid(stack, (1, 1152, WIDTH), store, whole_tile).checks != ()


def test_sources_of_other_tiles_are_unsupported() -> None:
    tensors = {f"{name}.{e}": arange(128, 128) for name in ("gate", "up") for e in range(2)}
    _, one = moved("blocked", "grouped", tensors, e=2)
    tiles = {name: (128, 128) if name != "up.1" else (64, 128) for name in tensors}
    with pytest.raises(Refused, match=r"up\.0 and up\.1 differ") as caught:
        scales(one, (1, 128, 128), tiles, scale_name=named, dtype=SCALE)
    assert caught.value.code == "UNSUPPORTED"


def test_sources_of_other_layouts_are_unsupported() -> None:
    tensors = {f"{name}.{e}": arange(128, 128) for name in ("gate", "up") for e in range(2)}
    store, one = moved("blocked", "grouped", tensors, e=2)
    gate, up = one.parts
    odd = msgspec.structs.replace(up.origins[1], layout=parse("up[d f]").layout({"d": 128, "f": 128}))
    twisted = replace(one, parts=(gate, up._replace(origins=(up.origins[0], odd))))
    with pytest.raises(Refused, match=r"up\.0 and up\.1 differ") as caught:
        relaid(twisted, (1, 128, 128), store, BLOCK)
    assert caught.value.code == "UNSUPPORTED"
    equal = msgspec.structs.replace(odd, layout=parse("up[f d]").layout({"d": 128, "f": 128}))
    again = replace(one, parts=(gate, up._replace(origins=(up.origins[0], equal))))
    assert relaid(again, (1, 128, 128), store, BLOCK).target.shape == (2, 2, 1)


def test_many_experts_are_few_parts() -> None:
    """384 experts, 128 x 128 tiles, as of a large model: one box each for gate and up, and no look at any element."""
    store = Store()
    for name, e in product(("gate", "up"), range(384)):
        store.entries[f"{name}.{e}"] = Entry("U8", (2048, 7168), (Extent((0, 0), (2048, 7168)),))
    view = translated(TOY, "blocked", "grouped", store, {"width": 7168})
    found = relaid(view.targets["gate_up"], (1, 128, 128), store, BLOCK).target
    assert found.shape == (384, 32, 56)
    assert [len(part.origins) for part in found.parts] == [384, 384]
