"""Sums that source and target keep alike are moved whole: no size of a part is asked for."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.axes.apply import Store, arange, carried, fill, law, only, same, translated
from tests.axes.toy import equal, only_refusal
from transaxle.axes.layout.tile import grid, scales
from transaxle.axes.notation.family import Sizes
from transaxle.families import builtin

FUSED = only("""
family fused
  axes l=layers d=width g=groups r=ranks c=head f=inner p copy=copies
  q    : l g r c d  optional
  k    : l g c d    optional
  v    : l g c d    optional
  gate : l f d      optional
  up   : l f d      optional
  head : f d        optional
dialect hf
  layers.{l}.qkv = [(g [q:(r c) | k:c | v:c]) d]
  layers.{l}.glu = [[gate:f | up:f] d]
  also old.{l}.qkv = [(g [q:(r c) | k:c | v:c]) d]
  also older.{l}.qkv = [[q:(g r c) | k:(g c) | v:(g c)] d]
  head = [[head:f | 0:p] d]
dialect renamed
  blocks.{l}.attn.w = [(g [q:(r c) | k:c | v:c]) d]
  blocks.{l}.mlp.w = [[gate:f | up:f] d]
  head.w = [[head:f | 0:p] d]
dialect blocked
  blocks.{l}.attn.w = [[q:(g r c) | k:(g c) | v:(g c)] d]
dialect copied
  blocks.{l}.attn.w = [(g [q:(r c) | k:c | v:c]) copy d]
dialect apart
  blocks.{l}.qkv = [(g [q:(r c) | k:c | v:c]) d]
  blocks.{l}.q   = q[(g r c) d]
""")


def stored(rows: int = 24, columns: int = 3, *, prefix: str = "layers") -> dict[str, torch.Tensor]:
    return {f"{prefix}.{i}.qkv": arange(rows, columns, start=1000 * i) for i in range(2)}


def test_a_sum_that_stays_as_it_is_needs_no_sizes() -> None:
    source = stored()
    found = carried(FUSED, "hf", "renamed", Store(source))
    same(found, {f"blocks.{i}.attn.w": source[f"layers.{i}.qkv"] for i in range(2)})
    same(carried(FUSED, "renamed", "hf", Store(found)), source)
    same(carried(FUSED, "hf", "hf", Store(source)), source)
    old = stored(prefix="old")
    same(carried(FUSED, "hf", "hf", Store(old)), source)


@law
@given(st.integers(0, 12), st.integers(0, 4), st.integers(1, 3), st.integers(1, 3))
def test_chunks_states_and_rows_of_any_number(rows: int, columns: int, down: int, across: int) -> None:
    """Nothing says that rows are whole groups, so none are asked for; every element is where it was."""
    store = Store()
    for name, array in stored(rows, columns).items():
        edges = [
            [size * i // parts for i in range(parts + 1)]
            for size, parts in zip((rows, columns), (down, across), strict=True)
        ]
        spans = [[pair for pair in pairwise(dim) if pair[0] < pair[1]] for dim in edges]
        store.put(name, array, list(product(*spans)) or None)
        store.put(f"optim/{name}/exp_avg", array + 7)
        store.put(f"optim/{name}/step", arange(1).reshape(()))
    found = carried(FUSED, "hf", "renamed", store)
    wanted = {f"blocks.{i}.attn.w": array for i, array in enumerate(stored(rows, columns).values())}
    states = {f"optim/{name}/exp_avg": array + 7 for name, array in wanted.items()}
    steps = {f"optim/{name}/step": arange(1).reshape(()) for name in wanted}
    same(found, wanted | states | steps)


def test_sizes_that_are_known_are_still_held_against_shapes() -> None:
    source = Store(stored())
    view = translated(FUSED, "hf", "renamed", source, {"width": 4})
    assert {each.code for each in view.refusals} == {"SHAPE_MISMATCH"}
    view = translated(FUSED, "hf", "renamed", source, {"groups": 2, "ranks": 3, "head": 4, "width": 3})
    assert {each.code for each in view.refusals} == {"SHAPE_MISMATCH"}
    assert translated(FUSED, "hf", "renamed", source, {"groups": 2, "ranks": 1, "head": 4}).refusals == ()


@pytest.mark.parametrize("target", ["blocked", "apart"])
def test_where_a_line_takes_it_apart_sizes_are_asked_for(target: str) -> None:
    refused = translated(FUSED, "hf", target, Store(stored())).refusals
    assert {each.code for each in refused} == {"UNKNOWN_AXIS"}


def test_another_layout_in_the_source_takes_it_apart() -> None:
    both = Store({**stored(), **{f"older.{i}.qkv": arange(24, 3) for i in range(2)}})
    assert {each.code for each in translated(FUSED, "hf", "renamed", both).refusals} == {"UNKNOWN_AXIS"}


def test_padding_is_not_moved_blindly() -> None:
    view = translated(FUSED, "hf", "renamed", Store({"head": arange(8, 3)}))
    assert only_refusal(view, "UNKNOWN_AXIS").message.startswith("[[head:f | 0:p] d]")


def test_copies_under_two_names_are_compared_whole() -> None:
    source = stored()
    store = Store({**source, **stored(prefix="old")})
    view = translated(FUSED, "hf", "renamed", store)
    assert view.refusals == ()
    assert all(equal(view, store))
    store.put("old.1.qkv", arange(24, 3, start=5))
    assert not all(equal(view, store))


@pytest.mark.parametrize(("rows", "tile"), [(24, (4, 2)), (22, (5, 3)), (24, (24, 3)), (7, (1, 1))])
def test_scales_of_blocks_stay_where_they_are(rows: int, tile: tuple[int, int]) -> None:
    source = stored(rows)
    view = translated(FUSED, "hf", "renamed", Store(source))
    for i, name in enumerate(source):
        shape = grid((rows, 3), tile)
        scale = arange(*shape, start=50 * i)
        tiles = dict.fromkeys(source, tile)
        moved = scales(view.targets[f"blocks.{i}.attn.w"], tile, tiles, scale_name="{}_scale".format, dtype="F32")
        assert fill(Store({f"{name}_scale": scale}), moved.target).tolist() == scale.tolist()


USUAL: dict[str, object] = {
    "num_hidden_layers": 2,
    "vocab_size": 11,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "intermediate_size": 7,
}
CONFIGS: dict[str, dict[str, object]] = {
    "bloom": {"n_layer": 2, "vocab_size": 11, "hidden_size": 12, "n_head": 3},
    "falcon": {**USUAL, "new_decoder_architecture": False, "multi_query": False, "parallel_attn": True, "bias": False},
    "gpt_neox": USUAL,
    "mpt": {"n_layers": 2, "vocab_size": 11, "d_model": 12, "n_heads": 3},
    "phi3": {**USUAL, "num_attention_heads": 6, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_fused_attention_of_real_families_needs_no_config(name: str) -> None:
    family, config = builtin()[name], {"model_type": name, "tie_word_embeddings": False, **CONFIGS[name]}
    sizes, store = Sizes(family, config), Store()
    hf = family.dialect("hf")
    assert hf is not None
    for line in hf.lines:
        index = dict.fromkeys(line.name.axes, 0)
        asked = [family.tensors[name].when for name in line.expression.components]
        if not line.read_only and all(sizes.holds(when, index) for when in (line.when, *asked)):
            layout = line.expression.layout({"p": 0, **sizes.at(index)})
            for number in range(2 if line.name.axes else 1):
                stored_name = line.name.format((number,) * len(line.name.axes))
                store.put(stored_name, arange(*layout.shape, start=97 * len(store.entries)))
    view = translated(family, "hf", "transformers", store)
    assert view.refusals == ()
    with_config = translated(family, "hf", "transformers", store, config)
    assert with_config.refusals == ()
    assert sum("query_key_value" in name or "qkv" in name for name in view.targets) >= 2
    assert view.targets.keys() == with_config.targets.keys()
    for stored_name, target in view.targets.items():
        assert fill(store, target).tolist() == fill(store, with_config.targets[stored_name]).tolist()
