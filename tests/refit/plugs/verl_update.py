"""A job of verl on CPUs, by its own classes: two ranks train with its FSDP engine, and its checkpoint engine manager
sends the weights to two workers of rollouts, through Ray.

Only the rollouts' servers are not verl's: each keeps the tensors that it gets. As a script, `verl_update.py MODEL
FOLDER` runs the updates of `main`, and writes for each `STEP/truth.safetensors`, the tensors that verl's own engine
gathers; `STEP/REPLICA.safetensors`; and what happened into `STEP/report.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RolloutConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

PLUGIN = "transaxle.verl_plugin"
ON_ALL: Any = register(dispatch_mode=Dispatch.ONE_TO_ALL)
EAGER = {"attn_implementation": "eager"}


class Trainer(TrainingWorker):  # type: ignore[misc]  # verl has no types
    """One rank of the trainer; its methods for updates are those of verl's `ActorRolloutRefWorker`."""

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        EngineRegistry.register("language_model", ["fsdp2"], "cpu")(FSDPEngineWithLMHead)
        super().__init__(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=model,
                    load_tokenizer=False,
                    use_remove_padding=False,
                    override_config=EAGER,
                    external_lib=PLUGIN,
                ),
                engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False),
                optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=4),
                checkpoint_config=CheckpointConfig(),
            )
        )
        self.engine.initialize()
        self.actor = SimpleNamespace(engine=self.engine)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "transaxle", is_master=dist.get_rank() == 0, bucket_size=1 << 20, **options
        )

    @ON_ALL  # type: ignore[untyped-decorator]
    def train(self, step: int, folder: str) -> list[str]:
        """Change all weights, and save the tensors that verl's own engine gathers; return their names, in order."""
        with torch.no_grad():
            for parameter in self.engine.module.parameters():
                parameter.mul_(1 + step / 7)
        pairs, _ = FSDPEngineWithLMHead.get_per_tensor_param(self.engine)
        whole = {name: tensor.clone() for name, tensor in pairs}
        if dist.get_rank() == 0:
            save_file(whole, f"{folder}/truth.safetensors")
        return list(whole)

    @ON_ALL  # type: ignore[untyped-decorator]
    def gather(self, whole: bool) -> None:
        """Set whether the weights are gathered by verl's own engine."""
        kind = FSDPEngineWithLMHead if whole else EngineRegistry.get_engine_cls("language_model", "fsdp2")
        self.engine.__class__ = kind

    @ON_ALL  # type: ignore[untyped-decorator]
    def disturb(self, disturbed: bool) -> None:
        """Add a parameter that no table knows to the model of this trainer, or remove it."""
        layer = self.engine.module.model.layers[1].mlp
        layer.adaptor = nn.Parameter(torch.ones(3)) if disturbed else None


class Server:
    """A rollout's server: it keeps the tensors that it gets."""

    replica_rank = 0
    is_leader_rank = True

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    async def update_weights(self, weights: Any, global_steps: int, wire_format: str) -> None:
        assert wire_format == "named_tensors"
        async for name, tensor in weights:
            assert name not in self.tensors or global_steps
            self.tensors[name] = tensor.clone()


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    """verl's worker beside a rollout's server."""

    @ON_ALL  # type: ignore[untyped-decorator]
    def save(self, path: str) -> None:
        save_file(self.server_adapter.tensors, path)


class Replica:
    """A rollout of one worker, without requests that must be stopped."""

    def __init__(self, group: RayWorkerGroup) -> None:
        self.group, self.workers = group, group.workers

    async def _nothing(self, **_: object) -> None:
        pass

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = _nothing


def start(cls: type, count: int, *arguments: Any) -> RayWorkerGroup:
    """Start the workers of a group on CPUs."""
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(cls), *arguments), device_name="cpu")


def main(model: str, folder: Path) -> None:
    options = {"timeout": 60}
    checkpoint_engine = CheckpointEngineConfig(
        backend="transaxle", custom_backend_module=PLUGIN, update_weights_bucket_megabytes=1,
        engine_kwargs={"transaxle": options},
    )  # fmt: skip
    trainer = start(Trainer, 2, model, options)
    config = RolloutConfig(name="vllm", checkpoint_engine=checkpoint_engine)
    described = HFModelConfig(path=model, load_tokenizer=False, override_config=EAGER)
    replicas = [Replica(start(Rollout, 1, config, described, Server())) for _ in range(2)]
    manager = CheckpointEngineManager(checkpoint_engine, trainer, list(replicas))

    def update(step: int) -> None:
        at = folder / str(step)
        at.mkdir()
        names, _ = trainer.train(step, str(at))
        report = {"names": names, "error": ""}
        try:
            manager.update_weights(global_steps=step)
        except ray.exceptions.RayTaskError as error:
            report["error"] = str(error)
        joined = trainer.execute_checkpoint_engine(["prepare"] * 2)
        report["joined"] = [worker.joined for worker in ray.get(joined)]
        (at / "report.json").write_text(json.dumps(report))
        for number, replica in enumerate(replicas):
            replica.group.save(str(at / f"{number}.safetensors"))

    update(0)
    update(1)
    trainer.disturb(True)
    update(2)  # is refused
    trainer.disturb(False)
    manager.remove_replicas(replicas[1:])
    trainer.gather(True)
    update(3)


if __name__ == "__main__":
    with TemporaryDirectory(ignore_cleanup_errors=True) as logs:  # a short path: Ray has sockets there
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False, _temp_dir=logs)
        main(sys.argv[1], Path(sys.argv[2]))
        ray.shutdown()
