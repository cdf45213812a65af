"""OpenRLHF's PPO whose ranks send shards of the weights to vLLM, and gather no parameter.

    python openrlhf_sync.py --actor.model_name_or_path MODEL ...    # the options of `openrlhf.cli.train_ppo_ray`

OpenRLHF's own trainer gathers every parameter on every rank, and its first rank broadcasts it to vLLM. In this one, the
first rank assembles the tensors of a hub from the shards of all ranks, bucket by bucket, and makes the same calls for
each tensor. Stacked experts become single ones, as vLLM loads them.
"""

from __future__ import annotations

import runpy
from types import ModuleType
from typing import Any

import ray
import torch
import torch.distributed as dist
from openrlhf.trainer.ray import ppo_actor

import transaxle as tx

ENGINE_DTYPE = "bf16"
"""Dtype of OpenRLHF's vLLM engines, which take no other."""
BUCKET = "1GB"


class Trainer(ppo_actor.ActorPPOTrainer):  # type: ignore[misc]  # OpenRLHF has no types
    """OpenRLHF's trainer of the actor, with weights from `tx.refit.named_tensors`."""

    def __init__(self, strategy: Any, actor: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(strategy, actor, *arguments, **options)
        settings = strategy.args.ds
        refused = {
            "colocated engines, which share memory with the trainer": self.use_cuda_ipc,
            "ds.tensor_parallel_size above 1": getattr(settings, "tensor_parallel_size", 1) > 1,
            "adapters (ds.lora.rank)": settings.lora.rank > 0,
            "models with vision, of which OpenRLHF sends the trained part": getattr(actor, "is_vlm", False),
        }
        if names := [name for name, present in refused.items() if present]:
            raise ValueError(f"use OpenRLHF's own trainer for {', '.join(names)}")

    def broadcast_to_vllm(self) -> None:
        """Send the present weights to all engines; OpenRLHF calls this method on all ranks.

        Raises:
            RuntimeError: raised on every rank, if an engine fails. Engines may have some new weights then.
        """
        errors = [""]
        model = self.actor.model.module
        for bucket in tx.refit.named_tensors(model, dtype=ENGINE_DTYPE, bucket=BUCKET, on=[0]):
            if not errors[0]:
                errors[0] = self._send(bucket)
        dist.broadcast_object_list(errors, src=0)
        if errors[0]:
            raise RuntimeError(f"vLLM did not get the weights: {errors[0]}")
        torch.cuda.empty_cache()
        ppo_actor.torch_dist_barrier_and_cuda_sync()

    def _send(self, bucket: list[tuple[str, torch.Tensor]]) -> str:
        """Send the tensors of a bucket, which is empty except on the first rank; return the error, if there is one."""
        try:
            for name, tensor in bucket:
                self._broadcast(name, tensor)
            if bucket and getattr(self.strategy.args.vllm, "enable_prefix_caching", False):
                ray.get([engine.reset_prefix_cache.remote() for engine in self.vllm_engines])
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one in the next bucket
            return f"{type(error).__name__}: {error}"
        return ""

    def _broadcast(self, name: str, tensor: torch.Tensor) -> None:
        """Send one tensor to all workers of all engines, and wait until they have loaded it."""
        loads = [
            engine.update_weight.remote(name, dtype=tensor.dtype, shape=tensor.shape) for engine in self.vllm_engines
        ]
        if getattr(self.strategy.args.vllm, "sync_with_ray", False):
            import ray.util.collective as collective

            collective.broadcast(tensor, 0, group_name=self._model_update_group)
        else:
            self._model_update_group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        ray.get(loads)


def install(module: ModuleType = ppo_actor) -> None:
    """Make OpenRLHF's actors use `Trainer`; call this function before they are started."""
    module.ActorPPOTrainer = Trainer  # type: ignore[attr-defined]


if __name__ == "__main__":
    install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
