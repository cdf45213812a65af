"""Every model type of transformers and torchtitan is loaded exactly from other values, or refused: part of the sweep.

`make oracle` takes every type, `make test` a sample of types that differ in kind. What comes of it is compared by
`named_parameters` and `named_buffers`; a type that is not built stands in a list here, so that it cannot grow unseen.
"""

from __future__ import annotations

import pytest

from tests.live import tiny
from tests.live.sweep import EXACT, outcome
from tests.live.titan import LACKING, titans
from tests.oracles.quiet import quiet

SAMPLE = {
    "gemma3_text": "tied embeddings",
    "qwen3_vl": "a wrapper with prefixes",
    "qwen3_moe": "packed experts",
    "falcon_h1": "state spaces beside attention",
}
TITANS = ["deepseek_v3 debugmodel", "llama3 debugmodel separate", "qwen3 debugmodel_moe fused"]
FAMILIES = {"deepseek_v3", "flux", "gpt_oss", "kimi_k2_7", "llama3", "muse_glimmer", "qwen3"}


@pytest.mark.parametrize("model_type", SAMPLE)
def test_some_models_of_transformers(model_type: str) -> None:
    with quiet():
        make = tiny.builder(model_type)
        assert not isinstance(make, str)
        assert outcome(make) == EXACT


@pytest.mark.parametrize("name", TITANS)
def test_some_models_of_torchtitan(name: str) -> None:
    with quiet():
        assert outcome(titans()[name]) == EXACT


@pytest.mark.oracle
def test_all_models_of_torchtitan() -> None:
    with quiet():
        models = titans()
        found = {name: outcome(make) for name, make in models.items()}
    assert set(found.values()) == {EXACT}, found
    assert {name.split()[0] for name in models} == FAMILIES
    assert sum("separate" in name for name in models) == sum("fused" in name for name in models) > len(FAMILIES) // 2


@pytest.mark.oracle
@pytest.mark.parametrize("family", LACKING)
def test_a_family_of_torchtitan_that_is_left_out_cannot_be_imported(family: str) -> None:
    import importlib

    with quiet(), pytest.raises(ImportError, match=LACKING[family]):
        importlib.import_module(f"torchtitan.models.{family}")
