"""A job of OpenRLHF on CPUs, by its own classes: its actors of the policy on two ranks under ZeRO-3, with the trainer
of the example, and two engines whose workers have OpenRLHF's own methods.

As a script, `openrlhf_update.py MODEL FOLDER` runs the updates of `main`. It writes for each
`STEP/truth.safetensors`, the parameters that DeepSpeed gathers; `STEP/ENGINE.safetensors`, what the engine has loaded;
and the ranks' errors into `STEP/report.json`. `refusals.json` has the error of each rank for options that the example
refuses.
"""

from __future__ import annotations

import json
import sys
from copy import copy, deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

from openrlhf_on_cpu import prepare, settings

prepare()

import deepspeed  # noqa: E402
import openrlhf_sync  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.comm.torch import build_shm_op  # noqa: E402
from openrlhf.trainer.ray import ppo_actor  # noqa: E402
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap  # noqa: E402
from openrlhf.utils.deepspeed import DeepspeedStrategy  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

WORLD = 2
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def options(model: str) -> Any:
    return settings(
        ds={
            "param_dtype": "bf16", "zero_stage": 3, "attn_implementation": "eager", "experts_implementation": None,
            "load_in_4bit": False, "lora": {"rank": 0, "alpha": 16, "target_modules": None, "dropout": 0},
            "packing_samples": False, "use_liger_kernel": False, "enable_sleep": False, "tensor_parallel_size": 1,
        },
        actor={
            "model_name_or_path": model, "gradient_checkpointing_enable": False, "optim": "adam", "adam": ADAM,
            "muon": {}, "lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "min_lr_ratio": 0.0, "max_norm": 0.0,
            "eps_clip_low_high": (0.2, 0.2), "dual_clip": None, "policy_loss_type": "ppo", "aux_loss_coef": 0.0,
            "loss_agg_mode": "token-mean", "eps_clip": 0.2,
        },
        algo={
            "advantage": {
                "is_correction_level": "off", "is_correction_mode": "mask", "is_correction_gating": "ratio",
                "is_correction_threshold": (0.5, 5.0),
            }
        },
        train={
            "enable_ema": False, "max_epochs": 1, "dynamic_batch_enable": False, "colocate_all": False,
            "async_enable": False, "micro_batch_size": 1, "ema_beta": 0.9,
        },
        ckpt={"save_hf": False, "disable_ds": True, "path": "none", "load_enable": False},
        data={"disable_fast_tokenizer": False},
        rollout={"temperature": 1.0},
        vllm={"num_engines": WORLD, "tensor_parallel_size": 1, "sync_backend": "gloo", "enable_prefix_caching": True},
    )  # fmt: skip


class Strategy(DeepspeedStrategy):  # type: ignore[misc]  # OpenRLHF has no types
    """OpenRLHF's strategy for DeepSpeed, on a CPU and without an optimizer."""

    def setup_distributed(self, timeout: object = None) -> None:
        deepspeed.init_distributed(dist_backend="gloo")
        self.ring_attn_rank = 0

    def prepare(self, trained: Any) -> Any:
        model, _ = trained
        config = self.get_ds_train_config()
        config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 40}
        model.model = deepspeed.initialize(model=model.model, config=config)[0]
        return model, None, None


class Engine(WorkerWrap):  # type: ignore[misc]
    """An engine of one worker, which has OpenRLHF's own methods."""

    device = "cpu"

    def __init__(self, port: int) -> None:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        self.loaded: dict[str, torch.Tensor] = {}
        self.resets, self.refuses = 0, ""
        self.model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if self.refuses and self.refuses in name:
                raise KeyError(name)
            self.loaded[name] = tensor.clone()

    def update_weight(self, *arguments: Any, **options: Any) -> None:
        """Load a tensor as OpenRLHF's worker does, in the machine's memory."""
        with mock.patch.object(torch, "empty", partial(_empty, torch.empty)):
            super().update_weight(*arguments, **options)

    def refuse(self, name: str) -> None:
        self.refuses = name

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def state(self) -> tuple[dict[str, torch.Tensor], int]:
        return self.loaded, self.resets


def _empty(make: Any, *sizes: Any, **options: Any) -> torch.Tensor:
    """Make a tensor in the machine's memory, whatever device is asked for."""
    tensor: torch.Tensor = make(*sizes, **options | {"device": "cpu"})
    return tensor


def scale(actor: Any, factor: float) -> dict[str, torch.Tensor]:
    """Multiply all parameters, in one rank of the policy; return them as DeepSpeed gathers them."""
    parameters = dict(actor.actor.model.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), modifier_rank=0):
        if dist.get_rank() == 0:
            for parameter in parameters.values():
                parameter.data.mul_(factor)
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def refusal(actor: Any) -> str:
    """Return the error of a trainer for a policy under tensor parallelism, with an adapter."""
    strategy = copy(actor.strategy)
    strategy.args = deepcopy(strategy.args)
    strategy.args.ds.tensor_parallel_size, strategy.args.ds.lora.rank = 2, 4
    try:
        openrlhf_sync.Trainer(strategy, actor.actor, None, None, None)
    except ValueError as error:
        return str(error)
    return ""


def main(model: str, folder: Path) -> None:
    openrlhf_sync.install()
    arguments = options(model)
    ports = [ppo_actor.BaseModelActor._get_free_port() for _ in range(WORLD + 1)]
    engines = [ray.remote(num_cpus=0)(Engine).remote(port) for port in ports[1:]]
    started = ppo_actor.PolicyModelActor.options(num_cpus=0, num_gpus=0)
    actors = [started.remote(WORLD, rank, "127.0.0.1", ports[0]) for rank in range(WORLD)]
    strategy = Strategy(zero_stage=3, train_batch_size=WORLD, args=arguments)
    ray.get([actor.init_model_from_pretrained.remote(strategy, model, 4, engines) for actor in actors])
    refusals = ray.get([actor.__ray_call__.remote(refusal) for actor in actors])
    (folder / "refusals.json").write_text(json.dumps(refusals))
    for step, refuses in enumerate(("", "", "layers.1", "")):
        at = folder / str(step)
        at.mkdir()
        ray.get([engine.refuse.remote(refuses) for engine in engines])
        truth, *_ = ray.get([actor.__ray_call__.remote(scale, 1 + step / 7) for actor in actors])
        save_file(truth, at / "truth.safetensors")
        errors = []
        for update in [actor.broadcast_to_vllm.remote() for actor in actors]:
            try:
                ray.get(update)
            except ray.exceptions.RayTaskError as error:
                errors.append(str(error.cause))
        states = ray.get([engine.state.remote() for engine in engines])
        for number, (loaded, _) in enumerate(states):
            save_file(loaded, at / f"{number}.safetensors")
        (at / "report.json").write_text(json.dumps({"errors": errors, "resets": [resets for _, resets in states]}))


if __name__ == "__main__":
    build_shm_op()  # its compiler would take memory beside that of all actors
    with TemporaryDirectory(ignore_cleanup_errors=True) as logs:  # a short path: Ray has sockets there
        ray.init(
            num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False, _temp_dir=logs,
            runtime_env={"worker_process_setup_hook": "openrlhf_on_cpu.prepare"},
        )  # fmt: skip
        job = import_module(Path(__file__).stem)
        ray.cloudpickle.register_pickle_by_value(job.openrlhf_sync)  # as Ray sends what a script defines
        job.main(sys.argv[1], Path(sys.argv[2]))
        ray.shutdown()
