"""A model that we cut, trained by DeepSpeed's own engine: started with `torch.distributed.run`, it tells what it holds.

python -m torch.distributed.run --nproc_per_node=4 -m tests.parallel.engine OUT KIND…
"""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.models import CONFIGS, LENGTH, build, tokens
from transaxle.parallel.metadata import universal_checkpoint_info
from transaxle.parallel.tensor_parallel import tensor_parallel

STEPS = 3
STATES = ("exp_avg", "exp_avg_sq")


def train(kind: str, out: Path) -> None:
    """Train, save, and write down what this rank holds, and the metadata as we collect it."""
    config, ranks = CONFIGS[kind], dist.get_world_size()
    model = tensor_parallel(build(config), init_device_mesh("cpu", (ranks,)), dtensor=False)
    info = universal_checkpoint_info(model)
    said = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "tensor_parallel": {"autotp_size": ranks},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=said)
    for step in range(STEPS):
        ids = tokens(config, step)
        assert ids.shape[1] == LENGTH
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(out / kind), tag=f"global_step{STEPS}")
    held = {}
    for name, parameter in engine.module.named_parameters():
        held[name] = safe_get_full_fp32_param(parameter).reshape(parameter.shape).clone().numpy()
        for state in STATES:
            value = safe_get_full_optimizer_state(parameter, state)
            held[f"optim/{name}/{state}"] = value.reshape(parameter.shape).clone().numpy()
    (out / f"{kind}.{dist.get_rank()}.truth").write_bytes(pickle.dumps((held, info)))
    engine.destroy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=120))
    for each in sys.argv[2:]:
        train(each, Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
