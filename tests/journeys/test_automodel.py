"""NeMo Automodel: every model of its registry that runs on a CPU, from the hub through training and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.journeys import automodel
from tests.journeys.record import Journey, chosen
from tests.journeys.test_titan import open_hub
from tests.oracles import automodel_peer
from tests.oracles.every_dialect import NOT_COMPARED
from tests.oracles.peer_bytes import write
from tests.oracles.test_dialects import CASES, FILES, Case
from tests.oracles.tiny_models import made
from transaxle.formats.training_state import OPTIMIZER as OPTIM

PEER = "nemo-automodel"
_HEADS = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "head_dim": 4,
}  # fmt: skip
"""Of latent attention: sizes that transformers can compute with."""
_MODELS = {
    "DeepseekV3ForCausalLM": "deepseek_v3", "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Glm4MoeForCausalLM": "glm4_moe", "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa", "LlamaForCausalLM": "llama", "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "ministral3", "MuseGlimmerForConditionalGeneration": "muse_glimmer",
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3VLForConditionalGeneration": "qwen3_vl", "Qwen3_5ForCausalLM": "qwen3_5_text",
}  # fmt: skip
"""Automodel's models -> their types."""
_OTHERS = {
    "DeepseekV32ForCausalLM": "computes other logits than transformers, on a CPU, from the same files",
    "DeepseekV4ForCausalLM": "transformers does not compute with tiny sizes of it",
    "GptOssForCausalLM": "attention that is compiled for GPUs",
    "HYV3ForCausalLM": "computes other logits than transformers, on a CPU, from the same files",
    "HyMT2ForCausalLM": "transformers has no model of its own for it",
    "KimiK25VLForConditionalGeneration": "its loader leaves the tower of pictures as it was, from published names",
    "LagunaForCausalLM": "transformers does not compute with tiny sizes of it",
    "MiMoV2FlashForCausalLM": "computes other logits than transformers, on a CPU, from the same files",
    "MiniMaxM3SparseForConditionalGeneration": "its loader leaves the tower of pictures as it was",
    "Mistral3FP8VLMForConditionalGeneration": "loads FP8 checkpoints only",
    "Mistral4ForCausalLM": "computes other logits than transformers, on a CPU, from the same files",
    "NemotronHForCausalLM": "needs mamba_ssm",
    "Qwen3NextForCausalLM": "computes other logits than transformers, on a CPU, from the same files",
    "Qwen3VLMoeForConditionalGeneration": "needs another transformers to compute",
    "Qwen3_5ForConditionalGeneration": "transformers does not compute with tiny sizes of it",
    "Qwen3_5MoeForCausalLM": "needs another transformers to compute",
    "Qwen3_5MoeForConditionalGeneration": "needs another transformers to compute",
    "Step3p5ForCausalLM": "transformers has it as a part of Step-3.7 alone",
    "Step3p7ForConditionalGeneration": "transformers does not compute with tiny sizes of it",
}
"""Models of the registry without a journey, although there is a table -> why."""
_FREQUENCIES = {"MuseGlimmerForConditionalGeneration": ("model.rotary_emb.freqs",)}
"""Models -> buffers that Automodel saves and the hub has not."""
_IN_TORCHTITAN = ("DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM")
"""Models of which torchtitan trains the same, experts in other stacks."""
_SAMPLE = ("Qwen2ForCausalLM",)
MOMENT = "exp_avg"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", chosen(metafunc.config, lambda: _MODELS, _SAMPLE))


def store(model_type: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Store a tiny model of transformers, and return it with its config."""
    case = CASES.get(model_type, (Case(),))[0]
    heads = _HEADS if "qk_head_dim" in case.changes else {}
    model, stored, config = made(model_type, {**case.changes, **heads}, folder / "made", more=case.more)
    files = FILES[model_type](model, stored) if model_type in FILES else stored
    write(folder / "hub", files, json.dumps(config))
    return model.eval(), config


def test_each_model_of_the_registry_has_a_journey_or_a_reason() -> None:
    assert automodel_peer.models() - NOT_COMPARED.keys() == _MODELS.keys() | _OTHERS.keys()


def test_from_the_hub_and_back(journey: Journey, name: str, tmp_path: Path) -> None:
    assert name in automodel_peer.models()
    trained, config = store(_MODELS[name], tmp_path)
    hub, settings = tmp_path / "hub", tmp_path / "hub/config.json"
    run = automodel.Run(config, hub, tmp_path / "run")
    run.load()
    state = {key: value.clone() for key, value in run.state().items()}
    assert [key for key, value in state.items() if value.isnan().any()] == []
    tokens = automodel.draw(run.model.config, torch.Generator().manual_seed(7))
    journey.equal("load", trained(tokens).logits, run.logits(tokens))

    live = automodel.Run(config, hub, tmp_path / "live")
    if name in _FREQUENCIES:
        with journey.refused("live load", "MISSING_TENSOR", *_FREQUENCIES[name]):
            tx.load(live.model, hub)
    else:
        tx.load(live.model, hub)
        assert [key for key, value in live.state().items() if not torch.equal(value, state[key])] == []
        journey.passed("live load")

    run.train()
    fixed = (*automodel.FIXED, *(() if run.corrects else (automodel.CORRECTION,)))
    moving = {key: value for key, value in run.state().items() if not any(part in key for part in fixed)}
    assert [key for key, value in moving.items() if torch.equal(value, state[key])] == []
    journey.passed("train")
    saved, expected = run.save(), run.logits(tokens)
    journey.passed("save")
    tx.convert(saved / "model", tmp_path / "back", to="hf", config=settings, verify=True)
    journey.passed("back")
    journey.equal("logits", open_hub(tmp_path / "back")(tokens).logits, expected)
    tx.save(run.model, tmp_path / "saved", config=settings)
    journey.equal("live save", open_hub(tmp_path / "saved")(tokens).logits, expected)
    _with_optimizer(journey, name, run, saved, tmp_path)


def _with_optimizer(journey: Journey, model: str, run: automodel.Run, saved: Path, folder: Path) -> None:
    """Convert weights and optimizer of a step together: Automodel has its own names of experts in the state alone."""
    settings = folder / "hub/config.json"
    expected = {f"{OPTIM}{name}/{key}": value for name, state in run.moments().items() for key, value in state.items()}
    holder = automodel.Run(run.config, run.hub, folder / "moments")
    with torch.no_grad():
        for name, value in holder.model.named_parameters():
            value.copy_(expected[f"{OPTIM}{name}/{MOMENT}"])
    moments = tx.open(holder.save() / "model")
    for to in ("dcp:hf", "deepspeed-universal", *(("dcp:torchtitan",) if model in _IN_TORCHTITAN else ())):
        between, back = folder / f"with-{to}", folder / f"back-{to}"
        tx.convert(saved, between, to=to, config=settings, optimizer=True, verify=True)
        assert tx.diff(saved, between, optimizer=True, config=settings).equal
        tx.convert(between, back, to="dcp:automodel", config=settings, optimizer=True)
        found = {name: torch.as_tensor(value.read().copy()) for name, value in tx.open(back, optimizer=True).items()}
        assert {name for name in found if name.startswith(OPTIM)} == expected.keys()
        assert [name for name, value in expected.items() if not torch.equal(found[name].to(value), value)] == []
        (group,) = tx.open(back, optimizer=True).metadata["param_groups"]
        assert sorted(group["params"]) == sorted(run.moments())
        journey.passed("optimizer")
    hub = tx.open(folder / "with-dcp:hf", optimizer=True)
    names = {name.split("/")[1] for name in hub if name.endswith(f"/{MOMENT}")}
    weights = {name for name in hub if not name.startswith(OPTIM)}
    assert names == {name for name in weights if not name.endswith(automodel.CORRECTION)}
    assert [name for name in names if hub[f"{OPTIM}{name}/{MOMENT}"].tobytes() != moments[name].tobytes()] == []
    resumed = automodel.Run(run.config, run.hub, folder / "resumed")
    if model in _FREQUENCIES:
        with journey.refused("resume", "MISSING_TENSOR", *_FREQUENCIES[model]):
            tx.load(resumed.model, saved, optimizer=resumed.optimizer, config=settings)
        return
    tx.load(resumed.model, saved, optimizer=resumed.optimizer, config=settings)
    for each in (run, resumed):
        each.train()
    theirs = resumed.state()
    assert [name for name, value in run.state().items() if not torch.equal(theirs[name], value)] == []
    journey.passed("resume")
