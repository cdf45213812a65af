"""AutoTP checkpoints older than the metadata: cut as the table or the user's rules say, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.formats.deepspeed.built import write_old
from tests.formats.deepspeed.zero.test_truth import differing
from tests.oracles.deepspeed_peer.case import BY_NAME, CASES, FP32, LOW, STATES, Case
from tests.oracles.deepspeed_peer.farm import Farm
from tests.oracles.option_sources import write
from transaxle.arguments import Weights
from transaxle.formats.deepspeed import keys
from transaxle.formats.training_state import OPTIMIZER

pytestmark = pytest.mark.peers
RULES = Path(__file__).with_name("fused.rules")
OLD = [case.name for case in CASES if case.launch.tp > 1 and case.launch.pp == 1 and not case.ours]
LLAMA = "tp2-vocab251"
FUSED = "tp2-fused"


@pytest.fixture(scope="module")
def old(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Copies of real checkpoints without their metadata, as DeepSpeed wrote them before it had any."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("old")

    def strip(name: str) -> Path:
        target: Path = folder / name
        if not target.exists():
            shutil.copytree(farm.checkpoint(name), target)
            for file in target.rglob("*.pt"):
                held = torch.load(file, weights_only=False)
                held.pop(keys.INFO, None)
                held.get(keys.STATE, {}).pop(keys.INFO, None)
                torch.save(held, file)
        return target

    return strip


def config(case: Case) -> dict[str, Any]:
    return {
        "model_type": case.model, "vocab_size": case.vocab, "hidden_size": case.hidden, "intermediate_size": case.inner,
        "num_hidden_layers": case.layers, "num_attention_heads": case.heads, "num_key_value_heads": case.kv,
        "tie_word_embeddings": case.tied,
    }  # fmt: skip


def said(name: str, tmp_path: Path) -> dict[str, Any]:
    """What a user would say of a case: its config, and for a model without a table the rules."""
    case = BY_NAME[name]
    if case.model != "fused":
        return {"config": config(case)}
    rules = tmp_path / RULES.name
    rules.write_text(RULES.read_text("utf-8").replace("layers.", f"{case.blocks}."), "utf-8")
    return {"config": config(case), "rules": rules}


PIPE = """
family pipe
  axes l n=vocab_size d=hidden_size f=intermediate_size
  embed : n d
  ln : l d
  ln_bias : l d
  up : l f d
  up_bias : l f
  down : l d f
  down_bias : l d
  head : n d
  cut tp = f
dialect own
  0.weight = embed[n d]
  {l}.ln.weight = ln[d]
  {l}.ln.bias = ln_bias[d]
  {l}.up.weight = up[f d]
  {l}.up.bias = up_bias[f]
  {l}.down.weight = down[d f]
  {l}.down.bias = down_bias[d]
  5.lin.weight = head[n d]
"""


SMALL = """
family small
  axes n d
  embed : n d
  norm : d
  cut tp = n
dialect own
  embed.weight = embed[n d]
  norm.weight = norm[d]
"""


@pytest.mark.parametrize("name", ["pp2-tp2", "pp2-tp2-frozen"])
def test_the_layer_files_of_a_pipeline_are_joined_so_too(farm: Farm, old: Any, name: str, tmp_path: Path) -> None:
    rules = tmp_path / "pipe.rules"
    rules.write_text(PIPE, "utf-8")
    settings = config(BY_NAME[name])
    low = farm.truth(name, LOW)
    with tx.open(old(name), rules=rules, config=settings) as ck:
        assert differing(ck, {n: held for n, held in low.items() if n not in farm.truth(name, FP32)}) == []
        assert differing(ck, farm.truth(name, FP32)) == []
    with tx.open(old(name), weights="lp", rules=rules, config=settings) as ck:
        assert differing(ck, low) == []
    rules.write_text(PIPE.replace("cut tp = f", "cut tp = n"), "utf-8")
    assert {r.code for r in refused(old(name), rules=rules, config=settings).refusals} == {"SHAPE_MISMATCH"}


@pytest.mark.oracle
@pytest.mark.parametrize("name", OLD)
def test_without_metadata_the_table_says_how_it_was_cut(farm: Farm, old: Any, name: str, tmp_path: Path) -> None:
    weights = farm.truth(name, FP32)
    wanted = weights | {n: held for n, held in farm.truth(name, LOW).items() if n not in weights}
    for state in STATES:
        wanted |= {f"{OPTIMIZER}{n}/{state}": held for n, held in farm.truth(name, state).items()}
    with tx.open(old(name), **said(name, tmp_path)) as ck:
        assert differing(ck, wanted) == []


def test_a_first_rank_without_rows_is_one_of_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rows, norm = np.arange(1, 13, dtype=np.float32).reshape(4, 3), np.arange(3, dtype=np.float32)
    parts = [{"embed.weight": part, "norm.weight": norm} for part in (rows[:0], rows[:3], rows[3:])]
    rules = tmp_path / "small.rules"
    rules.write_text(SMALL, "utf-8")
    source = write_old(tmp_path / "run", parts)
    known: dict[str, Any] = {"rules": rules, "family": "small", "axes": {"n": 4, "d": 3}}
    for weights in ("fp32", "lp"):
        with tx.open(source, weights=weights, **known) as ck:
            assert ck["embed.weight"].read().astype(np.float32).tolist() == rows.tolist()
            assert ck[f"{OPTIMIZER}embed.weight/exp_avg"].read().tolist() == (rows * 2).tolist()


def test_a_parameter_with_the_name_of_a_state_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    name = f"{OPTIMIZER}norm.weight/exp_avg"
    source = write_old(tmp_path / "run", [{"norm.weight": np.ones(3, np.float32), name: np.ones(3, np.float32)}])
    error = refused(source)
    assert (error.code, error.where.tensor) == ("NAME_COLLISION", name)


def refused(path: Path, **kwargs: Any) -> tx.TransaxleError:
    with pytest.raises(tx.TransaxleError) as caught:
        tx.open(path, **kwargs)
    return caught.value


def test_without_a_config_the_sizes_are_asked_for(old: Any) -> None:
    error = refused(old(LLAMA), family="llama")
    assert {refusal.code for refusal in error.refusals} == {"UNKNOWN_AXIS"}
    assert "--config" in error.hint
    assert error.where.tensor is not None


@pytest.mark.parametrize(
    ("gone", "message"), [("cut tp", "has no `cut tp` statement"), ("lm_head.weight", "has no line for it")]
)
def test_rules_that_leave_something_out_are_refused(old: Any, tmp_path: Path, gone: str, message: str) -> None:
    known = said(FUSED, tmp_path)
    lines = known["rules"].read_text("utf-8").splitlines()
    known["rules"].write_text("\n".join(line for line in lines if gone not in line), "utf-8")
    error = refused(old(FUSED), **known)
    assert error.code == "UNSUPPORTED"
    assert message in str(error)


def test_another_models_sizes_are_refused(old: Any) -> None:
    case = BY_NAME[LLAMA]
    error = refused(old(LLAMA), config=config(case) | {"num_attention_heads": 8, "head_dim": 8})
    assert error.code == "SHAPE_MISMATCH"
    assert "no split gives [64, 32]" in str(error)


def test_other_rules_would_give_other_values(farm: Farm, old: Any, tmp_path: Path) -> None:
    """The order of a fused projection matters: what its shards do not tell, the rules decide."""
    known = said(FUSED, tmp_path)
    text = known["rules"].read_text("utf-8")
    wrong = text.replace("[[q:(g r c) | k:(g c) | v:(g c)] d]", "[(g [q:(r c) | k:c | v:c]) d]")
    assert wrong != text
    known["rules"].write_text(wrong, "utf-8")
    with tx.open(old(FUSED), **known) as ck:
        different = differing(ck, farm.truth(FUSED, FP32))
    assert different == [f"layers.{layer}.self_attn.qkv_proj.weight" for layer in (0, 1)]


@pytest.mark.parametrize("weights", ["fp32", "lp"])
def test_norms_that_drifted_apart_become_their_mean(weights: Weights, tmp_path: Path) -> None:
    """In both precisions: what is not read has drifted, too, and does not stand against it."""
    source = write("replicas", "llama", tmp_path / "run")
    with pytest.raises(tx.TransaxleError, match="--average-replicas") as caught:
        tx.convert(source.path, tmp_path / "out", to="hf", weights=weights)
    assert {refusal.code for refusal in caught.value.refusals} == {"UNEQUAL_COPIES"}
    tx.convert(source.path, tmp_path / "out", to="hf", weights=weights, average=True)
    found = load_file(tmp_path / "out/model.safetensors")
    wanted = source.weights[weights]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
