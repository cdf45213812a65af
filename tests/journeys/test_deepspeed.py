"""DeepSpeed through transformers' Trainer: ZeRO-1, 2 and 3 on two ranks, in both precisions that CPUs have."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import transaxle as tx
from tests.journeys import trained_models as models
from tests.journeys.record import Journey
from tests.live.ranks import Ranks, Task
from tests.oracles.deepspeed_peer.uncompiled import gloo_alone
from tests.oracles.quiet import quiet

PEER = "deepspeed"
pytestmark = [pytest.mark.peers, pytest.mark.slow]

FP32, BF16 = "fp32", "bf16"
TAG = f"global_step{models.STEPS}"
_AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def _on_ranks(task: Task, *args: Any) -> list[Any]:
    """Run it on two ranks of its own: DeepSpeed keeps groups of processes for good."""
    ranks = Ranks(2)
    try:
        return ranks.run(task, *args)
    finally:
        ranks.stop()


@contextmanager
def _launched(rank: int, world: int) -> Iterator[None]:
    """Let this process look like one of DeepSpeed's launcher, on a machine without devices."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import training_args

    os.environ |= {**models.launched_as(rank, world), "DS_ACCELERATOR": "cpu"}
    gloo_alone()
    with (
        quiet(),
        patch.object(PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.NO)),
        patch.object(training_args, "is_torch_bf16_gpu_available", lambda: True),
    ):
        yield


def _trainer(folder: Path, stage: int, dtype: str, steps: int, **said: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    config = {
        **dict.fromkeys(_AUTO, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage}, **said,
    }  # fmt: skip
    told = models.settings(folder / f"run-{steps}", steps, bf16=dtype == BF16, lr_scheduler_type="constant")
    args = TrainingArguments(**told, deepspeed=config)
    return Trainer(model=models.loaded(folder / "hub"), args=args, train_dataset=models.rows())


def _train(rank: int, world: int, folder: str, stage: int, dtype: str) -> tuple[torch.Tensor, tx.TransaxleError]:
    """Train and save; return logits, and how the live model with its optimizer is refused."""
    with _launched(rank, world):
        trainer = _trainer(Path(folder), stage, dtype, models.STEPS)
        trainer.train()
        engine = trainer.model_wrapped
        said = models.logits(engine)
        with pytest.raises(tx.TransaxleError) as refused:
            tx.save(engine, Path(folder, "live"), to="hf", optimizer=trainer.optimizer)
        return said, refused.value


def _resume(rank: int, world: int, folder: str, stage: int, dtype: str, universal: str) -> torch.Tensor:
    """Resume from the Trainer's own checkpoint, or from a universal one in its place; return logits after a step."""
    with _launched(rank, world):
        more = {"checkpoint": {"load_universal": True}} if universal else {}
        trainer = _trainer(Path(folder), stage, dtype, models.STEPS + 1, **more)
        trainer.train(resume_from_checkpoint=universal or str(Path(folder, f"run-{models.STEPS}/checkpoint-3")))
        assert trainer.state.global_step == models.STEPS + 1
        return models.logits(trainer.model_wrapped)


_AT = {1: 2, 2: 1, 3: 2}
"""Stage -> at which its run goes on. At 3 DeepSpeed itself counts steps twice where there are two groups, as here."""
CASES = [
    ("llama", 1, FP32), ("llama", 2, BF16), ("llama", 3, FP32), ("qwen3", 1, BF16), ("qwen3", 3, BF16),
    ("qwen3_moe", 2, FP32), ("qwen3_moe", 3, BF16), ("deepseek_v3", 1, FP32), ("deepseek_v3", 3, FP32),
    ("gpt_oss", 2, BF16),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "stage", "dtype"), CASES)
def test_zero(journey: Journey, model_type: str, stage: int, dtype: str, tmp_path: Path) -> None:
    hub = models.hub_folder(model_type, tmp_path / "hub")
    (wanted, refused), _ = _on_ranks(_train, str(tmp_path), stage, dtype)
    journey.passed("load", "train", "save")
    with journey.refused("live save", "UNSUPPORTED"):
        models.again(refused)
    checkpoint = tmp_path / f"run-{models.STEPS}/checkpoint-3"
    low = torch.float32 if dtype == FP32 else torch.bfloat16
    for name, source in (("trainer", checkpoint), ("deepspeed", checkpoint / TAG)):
        tx.convert(source, tmp_path / name, to="hf", config=hub / "config.json", sync=False)
        journey.passed("back")
        journey.equal("logits", models.logits(models.loaded(tmp_path / name, low)), wanted)

    universal = tmp_path / "universal" / checkpoint.name
    universal.parent.mkdir()
    tx.convert(checkpoint, universal, to="deepspeed-universal", sync=False)
    journey.passed("optimizer")
    for file in ("scheduler.pt", *(f"rng_state_{rank}.pth" for rank in range(2))):
        shutil.copy(checkpoint / file, universal / file)  # the Trainer's own, which any resumed run needs
    own, *_ = _on_ranks(_resume, str(tmp_path), stage, dtype, "")
    assert not torch.equal(own, wanted)
    found, *_ = _on_ranks(_resume, str(tmp_path), _AT[stage], dtype, str(universal))
    if dtype == FP32:
        journey.equal("resume", found, own)
    else:
        assert torch.equal(found, own)
        journey.passed("resume")
