"""A job of NeMo-RL on CPUs, by its own classes: its synchronizer sends the weights of two ranks of a policy to two
workers of rollouts, through Ray, with the methods of its policy workers and of its vLLM workers.

As a script, `nemo_rl_update.py FOLDER` runs the updates of `main`. It writes for each `STEP/truth.safetensors`, the
tensors of the policy; `STEP/WORKER.safetensors`, what the worker has loaded; and an error into `STEP/error`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2
TRANSPORT = "transaxle.nemo_rl_plugin:NemoEngine"
# The `__init__` modules of these packages import vLLM, Megatron and other programs; the modules used here do not.
PACKAGES = (
    "models", "models.generation", "models.generation.vllm", "models.policy", "models.policy.workers", "weight_sync",
    "distributed",
)  # fmt: skip


def _prepare_imports() -> None:
    """Let modules of NeMo-RL be imported without the `__init__` modules of their packages, and without a GPU."""
    root = Path(next(iter(importlib.util.find_spec("nemo_rl").submodule_search_locations)))  # type: ignore[union-attr,arg-type]
    for name in PACKAGES:
        package = sys.modules.setdefault(f"nemo_rl.{name}", ModuleType(f"nemo_rl.{name}"))
        package.__path__ = [str(root.joinpath(*name.split(".")))]
    batches = ModuleType("nemo_rl.distributed.batched_data_dict")
    batches.BatchedDataDict = dict  # type: ignore[attr-defined]
    sys.modules[batches.__name__] = batches
    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=1 << 26)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    cuda.current_stream = lambda: SimpleNamespace(synchronize=lambda: None)


_prepare_imports()

from nemo_rl.models.generation.vllm.checkpoint_engine import (  # noqa: E402
    VllmCheckpointEngineMixin,
    VllmCheckpointEngineRpcMixin,
)
from nemo_rl.models.policy.workers.checkpoint_engine import (  # noqa: E402
    DTensorCheckpointEngineSendMixin,
    PolicyCheckpointEngineMixin,
)
from nemo_rl.weight_sync.checkpoint_engine_config import checkpoint_engine_refit_config  # noqa: E402
from nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer import CheckpointEngineWeightSynchronizer  # noqa: E402


def _join(rank: int, address: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=WORLD)


class Policy(DTensorCheckpointEngineSendMixin, PolicyCheckpointEngineMixin):  # type: ignore[misc]  # NeMo-RL has no types
    """One rank of a policy under FSDP2."""

    cpu_offload = False

    def __init__(self, rank: int, address: str) -> None:
        _join(rank, address)
        self.rank, self.step, self.fails = rank, 0, False
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 80, bias=False), nn.Embedding(301, 24))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (WORLD,)))

    def train(self, step: int, fails: bool) -> None:
        self.step, self.fails = step, fails

    def _checkpoint_engine_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name, (tensor.full_tensor() * (1 + self.step)).bfloat16()
        if self.fails and self.rank:
            raise ZeroDivisionError("the policy's second rank has failed")

    def whole(self) -> dict[str, torch.Tensor]:
        fails, self.fails = self.fails, False
        whole = dict(self._checkpoint_engine_params())
        self.fails = fails
        return whole


class Loading:
    """The methods of a vLLM worker that load weights."""

    def _load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.loaded.update({name: tensor.clone() for name, tensor in weights})  # type: ignore[attr-defined]

    def _maybe_process_fp8_kv_cache(self) -> None:
        pass


class Rollout(VllmCheckpointEngineMixin, Loading):  # type: ignore[misc]
    """One worker of a vLLM engine."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}


class Engine(VllmCheckpointEngineRpcMixin):  # type: ignore[misc]
    """A vLLM engine of one worker, in NeMo-RL's actor; the engines are data parallel over their own process group."""

    def __init__(self, rank: int, address: str) -> None:
        _join(rank, address)
        self.worker = Rollout()
        self.llm = SimpleNamespace(collective_rpc=lambda method, args: [getattr(self.worker, method)(*args)])

    def loaded(self) -> dict[str, torch.Tensor]:
        return self.worker.loaded


class Group:
    """The calls of NeMo-RL's worker group."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def run_all_workers_single_data(
        self, method: str, run_rank_0_only_axes: object = None, **options: Any
    ) -> list[Any]:
        return [getattr(worker, method).remote(**options) for worker in self.workers]

    def run_all_workers_multiple_data(
        self, method: str, *, method_args: list[Any], run_rank_0_only_axes: object, common_kwargs: dict[str, Any]
    ) -> list[Any]:
        return [
            getattr(worker, method).remote(method_args=arguments, **common_kwargs)
            for worker, arguments in zip(self.workers, method_args, strict=True)
        ]


def _start(cls: type) -> Group:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    return Group([ray.remote(num_cpus=0)(cls).remote(rank, address) for rank in range(WORLD)])


def main(folder: Path) -> None:
    config = {
        "refit_transport": TRANSPORT,
        "refit_cfg": {
            TRANSPORT: {"release_after_refit": True, "timeout": 60, "update_weights_bucket_memory_ratio": 0.02}
        },
        "vllm_cfg": {"async_engine": False},
    }
    policy, engines = _start(Policy), _start(Engine)
    synchronizer = CheckpointEngineWeightSynchronizer(
        SimpleNamespace(worker_group=policy, prepare_refit_info=dict),
        SimpleNamespace(worker_group=engines, prepare_refit_info=lambda _: None, cfg=config, dp_size=WORLD),
        checkpoint_engine_refit_config(config),
    )
    synchronizer.init_communicator()
    for step, fails in enumerate((False, False, True, False)):
        ray.get([worker.train.remote(step, fails) for worker in policy.workers])
        at = folder / str(step)
        at.mkdir()
        error = ""
        try:
            synchronizer.sync_weights()
        except Exception as raised:  # noqa: BLE001 - the test reads what was raised
            error = str(raised)
        (at / "error").write_text(error, "utf-8")
        whole, _ = ray.get([worker.whole.remote() for worker in policy.workers])
        save_file(whole, at / "truth.safetensors")
        for number, loaded in enumerate(ray.get([worker.loaded.remote() for worker in engines.workers])):
            save_file(loaded, at / f"{number}.safetensors")


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with TemporaryDirectory(ignore_cleanup_errors=True) as logs:  # a short path: Ray has sockets there
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False, _temp_dir=logs)
        # Ray's workers import this module by its name, and so prepare their own imports.
        importlib.import_module(Path(__file__).stem).main(Path(sys.argv[1]))
        ray.shutdown()
