"""peft's defaults, trained by transformers' Trainer: adapters merged as peft merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import transaxle as tx
from tests.journeys import trained_models as models
from tests.journeys.record import Journey
from tests.oracles.quiet import quiet

PEER = "peft"
pytestmark = pytest.mark.peers


class Case(NamedTuple):
    """An adapter, and what it is for."""

    model_type: str
    settings: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple
    changes: dict[str, Any] = {}  # noqa: RUF012
    refused: str = ""
    """What the refusal says, of what is not merged exactly."""


_UNTIED = {"tie_word_embeddings": False}
_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES = {
    "defaults of llama": Case("llama"),
    "defaults of qwen2": Case("qwen2"),
    "defaults of gemma3": Case("gemma3_text"),
    "all linear of mixtral": Case("mixtral", {"target_modules": "all-linear"}),
    "all linear of qwen3": Case("qwen3", {"target_modules": "all-linear"}),
    "all linear of qwen3_moe": Case("qwen3_moe", {"target_modules": "all-linear"}),
    "all linear of deepseek_v3": Case("deepseek_v3", {"target_modules": "all-linear"}),
    "experts of qwen3_moe": Case("qwen3_moe", {"target_modules": [], **_EXPERTS}),
    "experts of gpt_oss": Case("gpt_oss", {"target_modules": "all-linear", **_EXPERTS}),
    "head and embedding of llama": Case("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}, _UNTIED),
    "embedding of llama": Case("llama", {"target_modules": ["q_proj", "embed_tokens"]}, _UNTIED),
    "head of llama": Case("llama", {"target_modules": ["v_proj", "lm_head"]}, _UNTIED),
    "some tokens of llama": Case("llama", {"trainable_token_indices": [5, 8, 13]}, _UNTIED, "trainable_token_indices"),
    "tied embedding of qwen3": Case(
        "qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, refused="tied"
    ),
    "tied embedding of qwen3, as one": Case(
        "qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    ),
    "rank-stabilized": Case("llama", {"use_rslora": True}),
    "DoRA": Case("llama", {"use_dora": True}, refused="use_dora"),
    "biases of qwen2": Case("qwen2", {"bias": "all"}),
    "PiSSA": Case("llama", {"init_lora_weights": "pissa"}, refused="pissa"),
    "layers replaced": Case("llama", {"layers_to_transform": [1], "lora_alpha": 32}),
}


_SAMPLE = "head and embedding of llama"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sampled] if name == _SAMPLE else []) for name in CASES]
)
def test_adapter(journey: Journey, name: str, tmp_path: Path) -> None:
    import peft
    from transformers import Trainer, TrainingArguments

    case = CASES[name]
    hub = models.hub_folder(case.model_type, tmp_path / "hub", **case.changes)
    with quiet():
        model = peft.get_peft_model(models.loaded(hub), peft.LoraConfig(task_type="CAUSAL_LM", **case.settings))
        journey.passed("load")
        args = TrainingArguments(**models.settings(tmp_path / "run", use_cpu=True))
        before = models.logits(model)
        trainer = Trainer(model=model, args=args, train_dataset=models.rows())
        trainer.train()
    wanted = models.logits(model)
    assert (wanted - before).abs().max() > 1e-4 * wanted.abs().max()
    journey.passed("train", "save")
    adapter = tmp_path / "run" / f"checkpoint-{models.STEPS}"
    if case.refused:
        with journey.refused("back", "UNSUPPORTED", case.refused):
            tx.convert(hub, tmp_path / "hf", to="hf", merge=adapter)
        return
    for to in ("hf", "safetensors:transformers"):
        there = tmp_path / to.replace(":", "-")
        tx.convert(hub, there, to=to, merge=adapter, sync=False)
        journey.passed("back")
        merged = models.loaded(hub)
        tx.load(merged, there)
        journey.equal("logits", models.logits(merged), wanted)
        if to == "hf":
            journey.equal("logits", models.logits(models.loaded(there)), wanted)
