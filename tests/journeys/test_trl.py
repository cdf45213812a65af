"""TRL's SFTTrainer with its defaults: of a whole model, and of an adapter of peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.journeys import trained_models as models
from tests.journeys.record import Journey
from tests.oracles.quiet import quiet

PEER = "trl"
pytestmark = pytest.mark.peers


def _hub(model_type: str, folder: Path) -> Path:
    """A model with a tokenizer of its own."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    models.hub_folder(model_type, folder)
    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2, **{f"w{number}": number for number in range(3, 90)}}
    tokenizer = Tokenizer(kinds.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    return folder


def _trained(hub: Path, folder: Path, **said: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [{"text": " ".join(f"w{token}" for token in row["input_ids"])} for row in models.rows()]
    with quiet():
        args = SFTConfig(**models.settings(folder, use_cpu=True))
        trainer = SFTTrainer(model=str(hub), args=args, train_dataset=Dataset.from_list(texts), **said)
        trainer.train()
    return trainer


def _logits(trainer: Any) -> torch.Tensor:
    """Logits in the precision of the weights: TRL trains under autocast."""
    return models.logits(trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False))


def _same_tokenizer(folder: Path, hub: Path) -> None:
    from transformers import AutoTokenizer

    with quiet():
        ours, first = (AutoTokenizer.from_pretrained(each) for each in (folder, hub))
    assert ours.get_vocab() == first.get_vocab()
    assert ours("w5 w8 w80").input_ids == first("w5 w8 w80").input_ids == [5, 8, 80]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
def test_sft(journey: Journey, model_type: str, tmp_path: Path) -> None:
    hub = _hub(model_type, tmp_path / "hub")
    before = models.whole(models.loaded(hub))
    trainer = _trained(hub, tmp_path / "run")
    journey.passed("load")
    assert models.unmoved(before, models.whole(trainer.model)) == []
    journey.passed("train", "save")
    checkpoint, wanted = tmp_path / "run" / f"checkpoint-{models.STEPS}", _logits(trainer)
    tx.convert(checkpoint, tmp_path / "back", to="hf", sync=False)
    journey.passed("back")
    journey.equal("logits", models.logits(models.loaded(tmp_path / "back")), wanted)
    _same_tokenizer(tmp_path / "back", hub)
    config, told = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "back", checkpoint))
    assert config == told
    tx.save(trainer.model, tmp_path / "live", to="hf", optimizer=trainer.optimizer, sync=False)
    journey.passed("live save")
    journey.equal("logits", models.logits(models.loaded(tmp_path / "live")), wanted)
    models.carried(journey, checkpoint, tmp_path / "live", tmp_path / "with-optimizer")


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_sft_of_an_adapter(journey: Journey, model_type: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    hub = _hub(model_type, tmp_path / "hub")
    trainer = _trained(hub, tmp_path / "run", peft_config=LoraConfig())
    journey.passed("load", "train", "save")
    wanted = _logits(trainer)
    assert (wanted - models.logits(models.loaded(hub))).abs().max() > 1e-4 * wanted.abs().max()
    tx.convert(hub, tmp_path / "merged", to="hf", merge=tmp_path / f"run/checkpoint-{models.STEPS}", sync=False)
    journey.passed("back")
    journey.equal("logits", models.logits(models.loaded(tmp_path / "merged")), wanted)
    _same_tokenizer(tmp_path / "merged", hub)
