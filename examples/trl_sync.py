"""TRL's GRPO with a vLLM server that gets the weights from Transaxle: each worker its own parts, in one push.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "transaxle"}' \
        --logprobs-mode processed_logprobs --max-logprobs -1
    python trl_sync.py MODEL http://127.0.0.1:8000 --steps 3

TRL's own `VLLMGeneration` gathers every parameter, and the trainer's first rank broadcasts it to all workers over NCCL.
In this one every rank of the trainer sends its own shards, over NCCL or gloo, and each worker gets only its parts.
Adapters of peft are merged on the way. `install` works for TRL's other trainers too.
"""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

import transaxle as tx

PROMPTS = ["one two three", "four five six", "seven eight nine", "one three five"]


class Generation(VLLMGeneration):  # type: ignore[misc]  # TRL has no types
    """TRL's generation by a vLLM server, with weights from `tx.refit.VllmRefit`."""

    dtype = "bf16"
    """Dtype of the server's weights."""
    refit: tx.refit.VllmRefit | None = None

    def _init_vllm(self) -> None:
        """Connect to the server, without TRL's own group for weights."""
        if self.mode != "server":
            raise ValueError("set vllm_mode='server': a model in the trainer's process needs no transfer")
        self.url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        if self.accelerator.is_main_process:
            self.vllm_client = VLLMClient(base_url=self.url, connection_timeout=self.server_timeout)
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Push the present weights; TRL calls this on all ranks. The server empties its caches."""
        if self.refit is None:  # the model is sharded by now
            adapter = "merged" if is_peft_model(self.model) else None
            self.refit = tx.refit.VllmRefit(self.model, self.url, dtype=self.dtype, adapter=adapter)
        self.refit.push()


def install(trainers: ModuleType) -> None:
    """Make the trainers of a module of TRL use `Generation`."""
    trainers.VLLMGeneration = Generation  # type: ignore[attr-defined]


def train(model: str, url: str, steps: int, **options: Any) -> Any:
    """Train a model with GRPO for a reward that prefers even tokens; return the trainer.

    Args:
        model: folder or name of a model, with a tokenizer.
        url: address of the vLLM server.
        steps: number of optimizer steps.
        **options: further options of `GRPOConfig`.
    """
    install(grpo_trainer)
    config = GRPOConfig(
        output_dir="grpo", max_steps=steps, num_generations=4, per_device_train_batch_size=4, max_completion_length=16,
        use_vllm=True, vllm_mode="server", vllm_server_base_url=url, logging_steps=1, save_strategy="no", **options,
    )  # fmt: skip
    trainer = grpo_trainer.GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=lambda completion_ids, **_: [sum(token % 2 == 0 for token in each) for each in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * steps}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model with GRPO and a vLLM server.")
    parser.add_argument("model")
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=3)
    chosen = parser.parse_args()
    train(chosen.model, chosen.url, chosen.steps)
