"""DeepSeek-V3's own: layers that predict ahead, the copies they may hold, and its other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.engine.peers import compared as peers
from tests.oracles import cases
from tests.oracles.cases import AUTOMODEL, HF, MEGATRON, TE, TORCHTITAN, TRANSFORMERS
from tests.oracles.hub import Tensors
from transaxle.axes.notation.family import Sizes
from transaxle.families import builtin

pytestmark = peers.pytestmark

FAMILY = "deepseek_v3"
AHEAD = "num_nextn_predict_layers"


COPIES = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
"""What DeepSeek's files also hold for each such layer -> the model's own."""


def _copies(held: Tensors) -> Tensors:
    return {f"model.layers.{layer}.{name}.weight": held[COPIES[name]].clone() for layer in (3, 4) for name in COPIES}


@pytest.mark.parametrize("dialect", [AUTOMODEL, TORCHTITAN, TE])
def test_copies_of_the_embedding_and_the_head_are_never_dropped(dialect: str, tmp_path: Path) -> None:
    case = cases.case(FAMILY, "ahead")
    copies = _copies(case.dialects[HF])
    held = {**case.dialects[HF], **copies}
    source = peers.store(tmp_path / "source", held, case.config)
    out, back = tmp_path / "out", tmp_path / "back"
    tx.convert(source, out, to=dialect, sync=False)
    assert peers.load(out) == peers.bits({**case.dialects[dialect], **copies})
    tx.convert(out, back, to="hf", sync=False)
    assert peers.load(back) == peers.bits(held)


@pytest.mark.parametrize("name", COPIES)
def test_copies_that_differ_from_the_models_own_go_only_where_they_have_a_name(name: str, tmp_path: Path) -> None:
    """Elsewhere the model's own is in their place."""
    case = cases.case(FAMILY, "ahead")
    copies = _copies(case.dialects[HF])
    copies[f"model.layers.4.{name}.weight"][45, 39] += 1
    source = peers.store(tmp_path / "source", {**case.dialects[HF], **copies}, case.config)
    for dialect in (TORCHTITAN, "torchtitan@0.2", MEGATRON, TE, "megatron_layers"):
        with pytest.raises(tx.TransaxleError, match="UNEQUAL_COPIES") as caught:
            tx.convert(source, tmp_path / "refused", to=dialect, sync=False)
        assert [refusal.where.tensor for refusal in caught.value.refusals] == [f"model.layers.4.{name}.weight"]
        assert not (tmp_path / "refused").exists()
        assert 'to="safetensors:identity"' in caught.value.hint
    tx.convert(source, tmp_path / "same", to="safetensors:identity", sync=False)
    assert peers.load(tmp_path / "same") == peers.bits({**case.dialects[HF], **copies})
    tx.convert(source, tmp_path / "out", to=AUTOMODEL, sync=False)
    assert peers.load(tmp_path / "out") == peers.bits({**case.dialects[AUTOMODEL], **copies})


@pytest.mark.parametrize("dialect", [MEGATRON, TE])
def test_older_names_of_megatron_are_read(dialect: str, tmp_path: Path) -> None:
    """What megatron-core 0.16 calls the layer inside, as its distributed checkpoints still do."""
    case = cases.case(FAMILY, "ahead")
    newer = case.dialects[dialect]
    older = {name.replace(".mtp_model_layer.", ".transformer_layer."): value for name, value in newer.items()}
    assert older.keys() != newer.keys()
    source = peers.store(tmp_path / "source", older, case.config)
    tx.convert(source, tmp_path / "out", to="hf", sync=False, dialect=dialect)
    assert peers.load(tmp_path / "out") == peers.bits(case.dialects[HF])


def test_a_config_may_speak_of_layers_that_the_file_has_not(tmp_path: Path) -> None:
    """transformers drops them and leaves their number in the config."""
    case = cases.case(FAMILY, "asymmetric")
    source = peers.store(tmp_path / "source", case.dialects[HF], {**case.config, AHEAD: 1})
    for dialect in (TRANSFORMERS, TORCHTITAN, TE):
        tx.convert(source, tmp_path / dialect, to=dialect, sync=False)
        assert peers.load(tmp_path / dialect) == peers.bits(case.dialects[dialect])


@pytest.mark.parametrize(
    "lost",
    ["model.layers.4.enorm.weight", "model.layers.4.mlp.experts.5.up_proj.weight", "model.layers.3.mlp.gate.weight"],
)
def test_half_a_layer_that_predicts_ahead_is_incomplete(lost: str, tmp_path: Path) -> None:
    case = cases.case(FAMILY, "ahead")
    held = {name: value for name, value in case.dialects[HF].items() if name != lost}
    source = peers.store(tmp_path / "source", held, case.config)
    with pytest.raises(tx.TransaxleError, match="MISSING_TENSOR") as caught:
        tx.convert(source, tmp_path / "out", to=HF, sync=False)
    assert lost in str(caught.value)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_kimi_is_read_as_what_it_is(prefix: str, tmp_path: Path) -> None:
    """K2 by itself; and inside Kimi-VL, which has no table, so that only its files are converted."""
    case = cases.case(FAMILY, "asymmetric")
    text: dict[str, Any] = {**case.config, "model_type": "kimi_k2", "topk_method": "noaux_tc"}
    config = {"model_type": "kimi_vl", "text_config": text} if prefix else text
    other = {"vision_tower.patch_embed.proj.weight": torch.arange(12.0).reshape(3, 4)} if prefix else {}
    held = {f"{prefix}{name}": value for name, value in case.dialects[HF].items()} | other
    source = peers.store(tmp_path / "source", held, config)
    with tx.open(source) as checkpoint:
        assert (checkpoint.family, checkpoint.dialect) == (FAMILY, HF)
    if prefix:
        with pytest.raises(tx.TransaxleError, match=r"(?s)UNKNOWN_FAMILY.*kimi_vl.*vision_tower.patch_embed"):
            tx.convert(source, tmp_path / "out", to=TORCHTITAN, sync=False)
        tx.convert(source, tmp_path / "out", to="safetensors", sync=False)
        assert peers.load(tmp_path / "out") == peers.bits(held)
    else:
        tx.convert(source, tmp_path / "out", to=TORCHTITAN, sync=False)
        assert peers.load(tmp_path / "out") == peers.bits(case.dialects[TORCHTITAN])


def test_which_layers_hold_experts() -> None:
    table = builtin()[FAMILY]
    config = {
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 2,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
    }
    sizes = Sizes(table, config)
    for name, layers in (("router", [2, 4]), ("shared_up", [2, 4]), ("mlp_up", [0, 1, 3, 5])):
        held = [layer for layer in range(6) if sizes.holds(table.tensors[name].when, {"l": layer})]
        assert held == layers
