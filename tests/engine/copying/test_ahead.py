"""DeepSeek-V3's own: layers that predict ahead, the copies they may hold, and its other names."""

from __future__ import annotations

from pathlib import Path

import pytest

import transaxle as tx
from tests.engine.peers import compared as peers
from tests.oracles import cases
from tests.oracles.cases import AUTOMODEL, HF, TE, TORCHTITAN
from tests.oracles.hub import Tensors

pytestmark = peers.pytestmark

FAMILY = "deepseek_v3"


COPIES = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
"""What DeepSeek's files also hold for each such layer -> the model's own."""


def _copies(held: Tensors) -> Tensors:
    return {f"model.layers.{layer}.{name}.weight": held[COPIES[name]].clone() for layer in (3, 4) for name in COPIES}


@pytest.mark.parametrize("dialect", [AUTOMODEL, TE])
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
    for dialect in (TORCHTITAN, TE, "megatron_layers"):
        with pytest.raises(tx.TransaxleError, match="UNEQUAL_COPIES") as caught:
            tx.convert(source, tmp_path / "refused", to=dialect, sync=False)
        assert [refusal.where.tensor for refusal in caught.value.refusals] == [f"model.layers.4.{name}.weight"]
        assert not (tmp_path / "refused").exists()
        assert 'to="safetensors:identity"' in caught.value.hint
    tx.convert(source, tmp_path / "same", to="safetensors:identity", sync=False)
    assert peers.load(tmp_path / "same") == peers.bits({**case.dialects[HF], **copies})
    tx.convert(source, tmp_path / "out", to=AUTOMODEL, sync=False)
    assert peers.load(tmp_path / "out") == peers.bits({**case.dialects[AUTOMODEL], **copies})


@pytest.mark.parametrize("dialect", [TE])
def test_older_names_of_megatron_are_read(dialect: str, tmp_path: Path) -> None:
    """What megatron-core 0.16 calls the layer inside, as its distributed checkpoints still do."""
    case = cases.case(FAMILY, "ahead")
    newer = case.dialects[dialect]
    older = {name.replace(".mtp_model_layer.", ".transformer_layer."): value for name, value in newer.items()}
    assert older.keys() != newer.keys()
    source = peers.store(tmp_path / "source", older, case.config)
    tx.convert(source, tmp_path / "out", to="hf", sync=False, dialect=dialect)
    assert peers.load(tmp_path / "out") == peers.bits(case.dialects[HF])


@pytest.mark.parametrize("lost", ["model.layers.4.mlp.experts.5.up_proj.weight", "model.layers.3.mlp.gate.weight"])
def test_half_a_layer_that_predicts_ahead_is_incomplete(lost: str, tmp_path: Path) -> None:
    case = cases.case(FAMILY, "ahead")
    held = {name: value for name, value in case.dialects[HF].items() if name != lost}
    source = peers.store(tmp_path / "source", held, case.config)
    with pytest.raises(tx.TransaxleError, match="MISSING_TENSOR") as caught:
        tx.convert(source, tmp_path / "out", to=HF, sync=False)
    assert lost in str(caught.value)
