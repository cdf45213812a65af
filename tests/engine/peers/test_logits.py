"""A model that went through every dialect computes what it computed before, to the last bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.engine.peers import compared as peers
from tests.oracles import VARIANTS, cases, hub
from tests.oracles.cases import HF
from tests.oracles.hub import WEIGHTS
from tests.oracles.quiet import quiet

pytestmark = peers.pytestmark


def _loaded(folder: Path, config: dict[str, Any]) -> Any:
    """The model that transformers loads from this folder."""
    with quiet():
        if config["model_type"] != hub.STEP:
            from transformers import AutoModelForCausalLM

            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # transformers has its text model only inside a vision model: our tensors go under that model's config.
        around = hub.model(config)
        whole = folder.with_name(f"{folder.name} with vision")
        around.save_pretrained(whole)
        shutil.copy(folder / WEIGHTS, whole / WEIGHTS)
        return type(around).from_pretrained(whole, dtype=torch.float32).eval()


def _logits(folder: Path, config: dict[str, Any]) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) % config["vocab_size"]
    with torch.no_grad():
        logits: torch.Tensor = _loaded(folder, config)(input_ids=tokens).logits
    assert logits.isfinite().all()
    return logits


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "variant"), [(f, v) for f in VARIANTS for v in ("asymmetric", "tied", "square") if v in VARIANTS[f]]
)
def test_logits_survive_every_dialect(family: str, variant: str, tmp_path: Path) -> None:
    case = cases.case(family, variant)
    here = first = peers.store(tmp_path / "0", case.dialects[HF], case.config)
    stations = [*(label for label in peers.held(family, variant) if label != HF), HF]
    for number, dialect in enumerate(stations, 1):
        out = tmp_path / str(number)
        tx.convert(here, out, to=dialect, sync=False)
        here = out
    last = _logits(here, case.config)
    assert torch.equal(last, _logits(first, case.config))
    assert last.unique().numel() > 100


def test_a_swapped_expert_changes_the_logits(tmp_path: Path) -> None:
    """The comparison above can fail: two experts of equal shape in each other's place are seen."""
    case = cases.case("qwen3_moe", "asymmetric")
    stems = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)]
    swapped = dict(case.dialects[HF])
    swapped[stems[0]], swapped[stems[1]] = swapped[stems[1]], swapped[stems[0]]
    one = peers.store(tmp_path / "one", case.dialects[HF], case.config)
    other = peers.store(tmp_path / "other", swapped, case.config)
    assert not torch.equal(_logits(one, case.config), _logits(other, case.config))
