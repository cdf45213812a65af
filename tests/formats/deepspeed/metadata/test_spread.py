"""The geometry of tensor-parallel cuts: both forms of the metadata, against slices of an `arange`, and each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.errors import TransaxleError
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.categories import Patterns, exact_pattern
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.deepspeed.spread import Spread, by_widths, fold_dims, owners, same, write_affine
from transaxle.formats.deepspeed.universal_record import UniversalInfo

FILE = "mp_rank_00_model_states.pt"
NAME = "layers.0.qkv.weight"
PATTERN = exact_pattern(NAME)


def node(info: dict[str, Any]) -> CheckedValue:
    return CheckedValue(info, FILE)


def described(spread: Spread, version: int = 1) -> dict[str, Any]:
    return {keys.AFFINE: {keys.AFFINE_VERSION: version, keys.AFFINE_PARAMS: {PATTERN: write_affine(spread)}}}


def listed(sizes: Sequence[int], widths: Sequence[Sequence[int]], dim: int, dims: int) -> dict[str, Any]:
    shape: list[object] = [-1] * dims
    shape[dim] = tuple(sizes)
    return {
        keys.INFO_VERSION: keys.INFO_CURRENT,
        keys.UNSUPPORTED_PATTERNS: {},
        keys.SUB_PARAMS: [{keys.PATTERNS: [PATTERN], keys.SHAPE: shape, keys.PARTITION_DIM: dim}],
        keys.SHARD_WIDTHS: {PATTERN: [list(each) for each in widths]},
    }


def cut(full: np.ndarray, dim: int, widths: Sequence[Sequence[int]], rank: int) -> np.ndarray:
    """The shard of a rank, by slicing: what DeepSpeed's layers do."""
    parts, start = [], 0
    for each in widths:
        first = start + sum(each[:rank])
        parts.append(full.take(range(first, first + each[rank]), dim))
        start += sum(each)
    return np.concatenate(parts, dim)


def rebuilt(spread: Spread, shards: Sequence[np.ndarray]) -> np.ndarray:
    out = np.full(spread.shape, -1)
    for holding in owners(spread).blocks_to_read:
        block = holding.block
        into = tuple(slice(s, s + n) for s, n in zip(block.start, block.shape, strict=True))
        taken = tuple(slice(s, s + n) for s, n in zip(block.at, block.shape, strict=True))
        out[into] = shards[holding.rank][taken]
    return out


width_tables = st.integers(1, 4).flatmap(
    lambda ranks: st.lists(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks), min_size=1, max_size=3)
)


@given(width_tables, st.integers(0, 1))
def test_shards_give_the_whole_back(widths: list[list[int]], dim: int) -> None:
    rows = sum(map(sum, widths))
    shape = (rows, 3) if dim == 0 else (3, rows)
    full = np.arange(rows * 3).reshape(shape)
    spread = by_widths(shape, dim, widths)
    shards = [cut(full, dim, widths, rank) for rank in range(len(widths[0]))]
    assert spread.shards == tuple(shard.shape for shard in shards)
    assert owners(spread).missing == 0
    np.testing.assert_array_equal(rebuilt(spread, shards), full)
    for rank, shard in enumerate(shards):
        for piece in spread.pieces(rank):
            for dims, value in np.ndenumerate(full):
                if all(low <= at < high for at, (low, high) in zip(dims, piece.box.values(), strict=True)):
                    away = zip(dims, piece.box.values(), piece.strides.values(), strict=True)
                    place = piece.offset + sum((at - low) * step for at, (low, _), step in away)
                    assert shard.ravel()[place] == value


@given(width_tables, st.integers(0, 1))
def test_both_forms_agree_and_each_suffices(widths: list[list[int]], dim: int) -> None:
    rows = sum(map(sum, widths))
    shape = (rows, 3) if dim == 0 else (3, rows)
    spread = by_widths(shape, dim, widths)
    sizes = [sum(each) for each in widths]
    forms = [described(spread), listed(sizes, widths, dim, 2), described(spread) | listed(sizes, widths, dim, 2)]
    for info in forms if rows else forms[:1]:
        assert same(UniversalInfo(node(info), len(widths[0])).spread(NAME, spread.shards), spread)


def test_a_view_with_more_dims_is_merged_into_the_shards_own() -> None:
    """DeepSpeed may cut a `[heads * width, d]` weight as `[heads, parts, d]`: each head gives up a few rows."""
    full = np.arange(4 * 6 * 5).reshape(24, 5)
    view = full.reshape(4, 6, 5)
    shards = [view[:, :2].reshape(8, 5), view[:, 2:].reshape(16, 5)]
    spread = fold_dims(by_widths((4, 6, 5), 1, [[2, 4]]), [shard.shape for shard in shards])
    np.testing.assert_array_equal(rebuilt(spread, shards), full)


def refused(info: dict[str, Any], ranks: int, shards: Sequence[tuple[int, ...]]) -> TransaxleError:
    with pytest.raises(TransaxleError) as caught:
        UniversalInfo(node(info), ranks).spread(NAME, shards)
    return caught.value


FUSED = [[4, 4], [2, 2], [2, 2]]
SPREAD = by_widths((16, 3), 0, FUSED)


@pytest.mark.parametrize(
    ("sizes", "widths", "said"),
    [
        ([8, 4, 4], [[4, 4], [2, 2]], "3 parts on 2 ranks"),
        ([8, 4, 4], [[4, 5], [2, 2], [2, 2]], "sum to 9, but the part has 8"),
        ([8, 4, 5], [[4, 4], [2, 2], [2, 3]], "48 elements"),
        ([], [], "empty"),
    ],
)
def test_widths_that_do_not_add_up_are_refused(sizes: list[int], widths: list[list[int]], said: str) -> None:
    error = refused(listed(sizes, widths, 0, 2), 2, SPREAD.shards)
    assert said in str(error)
    assert error.exit_code == 3


def test_the_padding_of_a_vocabulary_goes() -> None:
    info = {keys.VOCABULARY_PATTERNS: [PATTERN], keys.TRUE_VOCABULARY: 13, keys.PADDED_VOCABULARY: 16}
    spread = UniversalInfo(node(info), 2).spread(NAME, [(8, 3), (8, 3)])
    full = np.arange(48).reshape(16, 3)
    np.testing.assert_array_equal(rebuilt(spread, [full[:8], full[8:]]), full[:13])


@pytest.mark.parametrize("change", ["overlap", "outside", "strides", "locations", "count", "ranks"])
def test_malformed_pieces_are_refused(change: str) -> None:
    info = described(SPREAD)
    ranks = info[keys.AFFINE][keys.AFFINE_PARAMS][PATTERN][keys.RANKS]
    piece = ranks[0][keys.PIECES][0]
    if change == "overlap":
        ranks[0][keys.PIECES][1][keys.DEST][0] = 0
    elif change == "outside":
        piece[keys.SOURCE][0] = 3 * 14
    elif change == "strides":
        piece[keys.SOURCE][1] = [6, 1]
    elif change == "locations":
        piece[keys.LOCATIONS] = [0, 1]
    elif change == "count":
        del ranks[0][keys.PIECES][2]
    else:
        del ranks[1]
    assert refused(info, 2, SPREAD.shards).exit_code == 3


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        (PATTERN, NAME, True),
        (PATTERN, f"{NAME}x", False),
        (PATTERN, "layers_0_qkv_weight", False),
        (r"\d+.mlp.weight", "12.mlp.weight", True),
        (r"tied_modules.embed", "tied_modules.embed.weight", True),
        (r".*\.bias$", "a.b.bias", True),
        (r"a?b", "b", True),
        ("a*" * 30 + "b", "a" * 60, False),
        ("x(a|b)", "xb.weight", True),
        (r"a\$", "a", False),
        (r"a\$", "a$b", True),
        (exact_pattern("a$\n(b)"), "a$\n(b)", True),
    ],
)
def test_patterns(pattern: str, name: str, matches: bool) -> None:
    assert Patterns([pattern]).match(name) == (pattern,) * matches


@pytest.mark.parametrize("pattern", ["(a", "a{3000}", "[ab", r"\bx", "**", "a\\", "(?=a)"])
def test_patterns_that_are_not_read_are_refused(pattern: str) -> None:
    with pytest.raises(TransaxleError, match=re.escape(repr(pattern))) as caught:
        Patterns(["b", pattern])
    assert caught.value.code == "UNSUPPORTED"
