"""Fused projections: DeepSpeed's own partition functions hand to each rank what the rules say, and it goes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.refusals import refuses
from transaxle.axes.geometry import ChunkRule, whole
from transaxle.axes.layout.divide import divide
from transaxle.axes.notation import tables
from transaxle.formats.deepspeed.spread import cut, owners

pytestmark = pytest.mark.peers
(ORDERS,) = tables.read(Path(__file__).with_name("orders.rules").read_text("utf-8"), file="orders.rules")
LINES = {line.name.text: line.expression for line in ORDERS.dialects[0].lines}


@dataclass(frozen=True)
class Order:
    """One of DeepSpeed's orders at some sizes."""

    line: str
    """Line of the rules."""
    module: str
    """Class by which DeepSpeed knows the order; or one of our own words below for what is not in its list."""
    sizes: dict[str, int]
    ranks: int
    heads: int | None = None
    """`num_kv_heads` that DeepSpeed reads in the model's config."""
    meta: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.module}-{self.line}-{'-'.join(f'{k}{v}' for k, v in self.sizes.items())}-tp{self.ranks}"


def _sizes(**sizes: int) -> dict[str, int]:
    return {"d": 5, "c": 4} | sizes


SIMPLE = [
    *(Order("bloom", m, _sizes(h=h), n, h) for m in ("BloomBlock", "Unknown") for h, n in ((4, 2), (6, 4), (3, 2))),
    *(Order("falcon", "FalconDecoderLayer", _sizes(g=g, r=3), n, g) for g, n in ((4, 2), (3, 2), (2, 4))),
    *(
        Order("glm", m, _sizes(h=h), n, h)
        for m in ("GLMBlock", "MPTBlock", "MptBlock", "BaichuanLayer", "QWenBlock", "DecoderLayer")
        for h, n in ((4, 2), (6, 4), (8, 4))
    ),
    *(
        Order(line, "GLMBlock", _sizes(g=2, r=r), n, 2, {"n_embd": 2 * r * 4})
        for line in ("glm2", "glm2_bias")
        for r, n in ((3, 2), (1, 2), (5, 4))
    ),
    *(
        Order(
            "glm2", "Phi3DecoderLayer", {"d": g * r * 4, "c": 4, "g": g, "r": r}, n, g, {"num_attention_heads": g * r}
        )
        for g, r, n in ((4, 2, 2), (4, 2, 4), (3, 2, 2), (2, 3, 4), (1, 4, 2), (5, 1, 3))
    ),
    *(
        Order("bigcode", "GPTBigCodeBlock", _sizes(h=h), n, h, {"n_embd": 4 * h})
        for h, n in ((4, 2), (3, 2), (5, 4), (1, 2))
    ),
    *(Order("codegen", "CodeGenBlock", _sizes(m=4, h=h), n, 4 * h) for h, n in ((2, 2), (4, 4), (6, 3), (4, 2))),
]
"""Orders that `prepare_tp_fused_qkvw` knows."""
OTHERS = [
    *(Order("yuan_v", "values", _sizes(two=2, h=h), n, 2 * h) for h, n in ((2, 2), (4, 2), (4, 4), (6, 3))),
    *(Order("yuan_o", "values", _sizes(two=2, h=h), n, 2 * h) for h, n in ((2, 2), (4, 2), (6, 3))),
    *(Order("gate_up", "halves", _sizes(f=f), n) for f, n in ((8, 2), (7, 2), (11, 4), (3, 4))),
    *(Order("row", "heads", _sizes(g=g, r=r), n, g) for g, r, n in ((4, 2, 2), (3, 2, 2), (2, 3, 4), (1, 4, 2))),
    *(Order("vocab", "rows", _sizes(f=f), n, 2, {"tp_grain_size": s}) for f, n, s in ((251, 2, 1), (250, 4, 64))),
]


def _whole(order: Order) -> np.ndarray:
    shape = LINES[order.line].layout(order.sizes).shape
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def _meta(order: Order) -> Any:
    from deepspeed.module_inject.tp_shard import AutoTPMeta

    return AutoTPMeta(num_kv_heads=order.heads, **order.meta)


def _fused(order: Order, full: Any, rank: int) -> Any:
    from deepspeed.module_inject.fusedqkv_utils import prepare_tp_fused_qkvw

    named = type("Named", (), {"__str__": lambda _: order.module})()
    return prepare_tp_fused_qkvw(named, full, order.ranks, rank, _meta(order))


def _other(order: Order, full: Any, rank: int) -> Any:
    """Call the function that cuts what is not in DeepSpeed's list of fused projections."""
    import torch
    from deepspeed.module_inject import layers
    from deepspeed.module_inject.fusedqkv_utils import shard_value_with_share_qk
    from deepspeed.module_inject.tp_shard import get_shard_size_list

    meta = _meta(order)
    if order.module == "values":
        real = full.to(torch.float64)  # DeepSpeed makes a parameter of it
        weight, _ = shard_value_with_share_qk(real, None, rank, order.ranks, order.line == "yuan_v", meta)
        return weight.detach().to(full.dtype)
    if order.module == "halves":
        halves = (order.sizes["f"],) * 2
        widths = layers._subparam_shard_widths(halves, order.ranks, meta, "mlp")
        return layers._partition_logical_tensor(full, 0, order.ranks, rank, widths, subparam_sizes=halves)
    dim, name = (1, "self_attn.o_proj") if order.module == "heads" else (0, "lm_head")
    return full.split(get_shard_size_list(full.shape[dim], order.ranks, meta, name), dim)[rank]


def _shards(order: Order) -> list[np.ndarray]:
    torch = pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    full = torch.from_numpy(_whole(order))
    part = _fused if order in SIMPLE else _other
    return [np.asarray(part(order, full, rank)) for rank in range(order.ranks)]


def _taken(full: np.ndarray, dim: int | None, rule: ChunkRule, ranks: int, rank: int) -> np.ndarray:
    if dim is None:
        return full
    held = rule(whole(full.shape[dim]), ranks, rank)
    return full.take([row for start, stop in held for row in range(start, stop)], dim)


@pytest.mark.parametrize("order", [*SIMPLE, *OTHERS], ids=str)
def test_the_rules_cut_as_deepspeed_does(order: Order) -> None:
    full, shards = _whole(order), _shards(order)
    division = divide(LINES[order.line], ORDERS.cuts, order.sizes, [shard.shape for shard in shards])
    assert division.shape == full.shape
    assert division.dim is not None
    for rank, shard in enumerate(shards):
        np.testing.assert_array_equal(_taken(full, division.dim, division.rule, order.ranks, rank), shard)
    spread = cut(division.shape, division.dim, division.rule, order.ranks)
    assert spread.shards == tuple(shard.shape for shard in shards)
    found = owners(spread)
    assert found.missing == 0
    rebuilt = np.full(full.shape, -1)
    for holding in found.blocks_to_read:
        block = holding.block
        into, taken = (
            tuple(slice(s, s + n) for s, n in zip(first, block.shape, strict=True)) for first in (block.start, block.at)
        )
        rebuilt[into] = shards[holding.rank][taken]
    np.testing.assert_array_equal(rebuilt, full)


def test_every_order_that_deepspeed_knows_is_here() -> None:
    utils = pytest.importorskip("deepspeed.module_inject.fusedqkv_utils")
    assert set(utils.FUSED_QKV_TYPE_DICT) <= {order.module for order in SIMPLE}


def test_orders_that_overlap_are_refused() -> None:
    """With an odd number of heads on a rank, Yuan's pairing gives one head to two ranks: that is no cut."""
    order = Order("yuan_v", "values", _sizes(two=2, h=3), 2, 6)
    shards = _shards(order)
    with refuses("SHAPE_MISMATCH"):
        divide(LINES[order.line], ORDERS.cuts, order.sizes, [shard.shape for shard in shards])
