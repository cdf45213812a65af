"""Flat buckets laid out here in plain loops, as Megatron does it: parameters are found where they were put."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.formats.catalog import Entry, Extent
from transaxle.formats.megatron.flat_buckets import Bucket, GroupBuffer, NoFitError, assign_buffers, lay_into_buckets
from transaxle.formats.megatron.rank_parameters import (
    Box,
    LocalParameter,
    Model,
    Order,
    StoredParameter,
    UnknownOrderError,
    model_of,
)

ORDER = Order(norms_apart=False, grouped=True)
_ALIGNED = 64
Place = tuple[int, int]
"""Bucket, and first element in it."""


class Laid(NamedTuple):
    """Parameters in buckets."""

    places: list[Place]
    """Of each parameter, in the order of the buckets."""
    sizes: list[int]
    """Elements of each bucket, without the padding at its end."""
    padded: list[int]
    starts: list[list[int]]
    """Where the chunks of each bucket begin."""


def _laid(sizes: Sequence[int], shared: Sequence[bool], full: int | None, ranks: int) -> Laid:
    """Lay parameters out one by one, last ones first; then cut each bucket into the shares of ranks."""
    laid = Laid([], [], [], [])
    ends: list[list[tuple[int, int]]] = [[]]
    at = 0

    def close(size: int) -> None:
        nonlocal at
        laid.sizes.append(size)
        laid.padded.append(-(-size // lcm(ranks, 128)) * lcm(ranks, 128))
        ends.append([])
        at = 0

    for size, alone in reversed(list(zip(sizes, shared, strict=True))):
        at = -(-at // _ALIGNED) * _ALIGNED
        if alone and at:
            close(at)
        laid.places.append((len(laid.sizes), at))
        ends[-1].append((at, at + size))
        at += size
        if alone or (full is not None and at >= full):
            close(at)
    if at:
        close(at)
    for number, (size, padded) in enumerate(zip(laid.sizes, laid.padded, strict=True)):
        share = padded // ranks
        marks = {0, *range(0, size, share), *(mark for each in ends[number] for mark in each)}
        laid.starts.append(sorted(mark for mark in marks if mark < size))
    return laid


def _buffer(laid: Laid, dtype: str = "F32", key: str = "buffer") -> GroupBuffer:
    buckets = []
    for size, padded, starts in zip(laid.sizes, laid.padded, laid.starts, strict=True):
        extents = tuple(Extent((a,), (b - a,), "file", 4 * a) for a, b in pairwise([*starts, size]))
        buckets.append(Bucket({"param": Entry("param", "F32", (size,), extents)}, padded))
    return GroupBuffer(key, dtype, tuple(buckets))


def _parameters(sizes: Sequence[int], shared: Sequence[bool]) -> list[LocalParameter]:
    found = []
    for at, (size, one) in enumerate(zip(sizes, shared, strict=True)):
        stored = StoredParameter(Entry(str(at), "F32", (size,), ()), 0, (Box((0,), (size,)),))
        found.append(LocalParameter((at,), stored, (), size, one))
    return found


_SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=12)
_FULL = st.none() | st.integers(1, 900)


@given(_SIZES, _FULL, st.integers(1, 5), st.data())
def test_parameters_are_found_where_put(sizes: list[int], full: int | None, ranks: int, data: st.DataObject) -> None:
    shared = [False] * len(sizes)
    for end in {0, len(sizes) - 1}:  # an embedding, an output layer
        shared[end] = data.draw(st.booleans())
    laid = _laid(sizes, shared, full, ranks)
    placed = lay_into_buckets(_parameters(sizes, shared), _buffer(laid))
    assert placed is not None
    assert [(each.bucket, each.start) for each in placed] == laid.places
    assert [each.parameter.size for each in placed] == sizes[::-1]


@given(_SIZES, _FULL, st.data())
def test_other_parameters_do_not_fit(sizes: list[int], full: int | None, data: st.DataObject) -> None:
    alone = [False] * len(sizes)
    buffer = _buffer(_laid(sizes, alone, full, 1))
    others = data.draw(st.permutations(sizes))
    assert (lay_into_buckets(_parameters(others, alone), buffer) is None) == (others != sizes)
    assert lay_into_buckets(_parameters(sizes[1:], alone[1:]), buffer) is None
    assert lay_into_buckets(_parameters([*sizes, 1], [*alone, False]), buffer) is None


@given(st.lists(st.integers(3, 60), min_size=1, max_size=2), st.data())
def test_every_chunk_begins_for_a_reason(sizes: list[int], data: st.DataObject) -> None:
    alone = [False] * len(sizes)
    laid = _laid(sizes, alone, None, 1)
    parameters, (starts,) = _parameters(sizes, alone), laid.starts
    odd = data.draw(st.integers(0, laid.sizes[0] // 2 - 1)) * 2 + 1  # no share of the 128 elements of a bucket
    if odd not in starts:
        assert lay_into_buckets(parameters, _buffer(laid._replace(starts=[sorted([*starts, odd])]))) is None
    for mark in starts[1:]:
        assert (
            lay_into_buckets(parameters, _buffer(laid._replace(starts=[[at for at in starts if at != mark]]))) is None
        )


def _entry(name: str, shape: tuple[int, ...], parts: int = 1, dim: int = 0, stacked: int = 0) -> Entry:
    """A tensor whose chunks are those of ranks, of each layer and expert."""
    step = shape[stacked + dim] // parts
    size = tuple(step if at == stacked + dim else 1 if at < stacked else whole for at, whole in enumerate(shape))
    extents = []
    for slot in range(shape[0]) if stacked else [0]:
        for part in range(parts):
            start = [0] * len(shape)
            start[stacked + dim] = part * step
            if stacked:
                start[0] = slot
            extents.append(Extent(tuple(start), size, "file", 0))
    return Entry(name, "BF16", shape, tuple(extents))


D, F, WORDS, EXPERTS = 8, 20, 24, 4


def _model(layers: str, *, tied: bool = False) -> Model:
    """A model cut among two ranks, with dense layers (d) and those of experts (e)."""
    entries = [
        _entry("embedding.word_embeddings.weight", (WORDS, D), 2),
        _entry("decoder.final_layernorm.weight", (D,)),
    ]
    if not tied:
        entries.append(_entry("output_layer.weight", (WORDS, D), 2))
    for at, kind in enumerate(layers):
        stem = f"decoder.layers.{at}"
        entries += [
            _entry(f"{stem}.self_attention.linear_proj.weight", (D, D), 2, 1),
            _entry(f"{stem}.self_attention.linear_qkv.weight", (3 * D, D), 2),
            _entry(f"{stem}.self_attention.linear_qkv.layer_norm_weight", (D,)),
        ]
        if kind == "e":
            entries += [
                _entry(f"{stem}.mlp.router.weight", (EXPERTS, D)),
                _entry(f"{stem}.mlp.experts.experts.linear_fc1.weight", (EXPERTS, 2 * F, D), 2, stacked=1),
                _entry(f"{stem}.mlp.experts.experts.linear_fc2.weight", (EXPERTS, D, F), stacked=1),
            ]
        else:
            entries += [
                _entry(f"{stem}.mlp.linear_fc1.weight", (2 * F, D), 4),
                _entry(f"{stem}.mlp.linear_fc2.weight", (D, F), 2, 1),
            ]
    return model_of(entries)


Runs = list[list[range]]
"""Of each stage, the parts of the model that its model chunks have."""


def _groups(
    model: Model, runs: Runs, ranks: int, parallel: int | None, full: int | None
) -> dict[int, list[GroupBuffer]]:
    """Buffers of all groups of ranks: of experts, where so many ranks share them out, or else of all the others."""
    groups: dict[int, list[GroupBuffer]] = {}
    for stage, of_stage in enumerate(runs):
        for rank in range(ranks):
            group = rank + ranks * stage if parallel is None else rank % ranks + ranks * parallel * stage
            numbers = range(1) if parallel is None else range(parallel)
            for number in numbers:
                each = EXPERTS // (parallel or 1)
                experts = None if parallel is None else range(number * each, (number + 1) * each)
                for run in of_stage:
                    found = model.local(run, ORDER, experts, experts_only=parallel is not None)
                    if found:
                        sizes, shared = [one.size for one in found], [one.shared for one in found]
                        laid = _laid(sizes, shared, full, 2)
                        groups.setdefault(group + ranks * number, []).append(_buffer(laid, "BF16", f"{group}"))
    return groups


@pytest.mark.parametrize("full", [None, 300])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "runs",
    [
        [[range(7)]],
        [[range(3)], [range(3, 7)]],
        [[range(1)], [range(1, 2)], [range(2, 7)]],
        [[range(2), range(4, 5)], [range(2, 4), range(5, 7)]],
    ],
    ids=["one stage", "two stages", "an embedding by itself", "two model chunks each"],
)
def test_stages_are_found_by_what_their_buffers_hold(runs: Runs, full: int | None, *, tied: bool) -> None:
    model = _model("ddee", tied=tied)
    dense = _groups(model, runs, 2, None, full)
    for parallel in (1, 2, 4):
        experts = _groups(model, runs, 1, parallel, full)
        held = assign_buffers(model, ORDER, dense, experts)
        assert sorted(id(each.buffer) for each in held) == sorted(
            id(buffer) for groups in (dense, experts) for listed in groups.values() for buffer in listed
        )
        found: dict[int, set[tuple[str, tuple[int, ...]]]] = {0: set(), 1: set()}
        for each in held:
            found[each.rank] |= {(one.parameter.stored.name, one.parameter.slot) for one in each.placed}
        every = {(one.stored.name, one.slot) for one in model.local(range(7), ORDER)}
        assert found[0] == every
        assert found[1] == {one for one in every if ".experts.experts." not in one[0]}


def test_buffers_of_another_model_do_not_fit() -> None:
    model, other = _model("ddee"), _model("dddee")
    dense, experts = (_groups(model, [[range(7)]], ranks, parallel, None) for ranks, parallel in ((2, None), (1, 2)))
    with pytest.raises(NoFitError, match=r"no buffer holds|does not hold"):
        assign_buffers(other, ORDER, dense, experts)
    with pytest.raises(NoFitError, match="groups of ranks, and parameters are cut among 2"):
        assign_buffers(model, ORDER, {0: dense[0]}, experts)
    with pytest.raises(NoFitError, match="experts"):
        assign_buffers(model, ORDER, dense, {0: experts[0]})
    with pytest.raises(NoFitError, match="cut among other ranks"):
        assign_buffers(model, ORDER, dense, {})
    with pytest.raises(NoFitError, match="holds more than the model"):
        assign_buffers(model, ORDER, {group: [*listed, *listed] for group, listed in dense.items()}, experts)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (_entry("decoder.layers.mlp.linear_fc2.weight", (2, D, F), 2, 1), "not one for each layer"),
        (_entry("vision.weight", (D, D)), "pipeline stage"),
        (_entry("decoder.final_layernorm.weight", (D,), 4), "2 pieces, which 4 ranks"),
    ],
)
def test_tensors_that_no_rank_saved(entry: Entry, message: str) -> None:
    words = _entry("embedding.word_embeddings.weight", (WORDS, D), 2)
    with pytest.raises(UnknownOrderError, match=message):
        model_of([words, entry]).local(range(3), ORDER)
