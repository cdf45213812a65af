"""Ranks that train with Megatron-FSDP on CPUs, and save with `--ckpt-format fsdp_dtensor`, in Megatron's environment.

python -m tests.formats.megatron.training.sharded_job OUT RANKS WORDS
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.formats.megatron.training import peer

STEPS, ROWS, LENGTH = 2, 49, 16
_USUAL = peer._ALWAYS.replace("--ckpt-format torch_dist --async-strategy mcore", "--ckpt-format fsdp_dtensor")
ALWAYS = f"""
    {_USUAL}
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer --no-save-rng
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --max-position-embeddings 64
    --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --vocab-size {ROWS} --make-vocab-size-divisible-by 2 --transformer-impl local --bf16
"""


def launch(python: Path, root: Path, out: Path, ranks: int, words: str) -> None:
    """Train and save, in a process of Megatron's environment."""
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NVTE"))}
    command = [str(python), "-W", "ignore", "-m", __name__, str(out), str(ranks), words]
    done = subprocess.run(
        command, cwd=root, env=cleared, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]


def _rank(rank: int, world: int, out: str, words: str) -> None:
    import torch
    from torch import distributed as dist

    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # Megatron-FSDP does not want the one connection
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(number) for name, number in place.items()}
    dist.init_process_group("gloo", f"file://{out}.meeting", rank=rank, world_size=world)
    from megatron.core.enums import ModelType
    from megatron.training import checkpointing, training
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron

    sys.argv = ["train", *ALWAYS.split(), *words.split(), "--save", out]
    args = parse_args()
    validate_args(args)
    set_global_variables(args, build_tokenizer=True)
    initialize_megatron(allow_no_cuda=True)

    def provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any) -> Any:
        stage = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
        return peer._model(args, trains=False, **stage)

    kind = ModelType.encoder_or_decoder
    (model,), optimizer, schedule = training.setup_model_and_optimizer(kind, provider, checkpointing_context={})
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    for step in range(STEPS):
        model.zero_grad_buffer()
        text = (torch.arange(LENGTH + 1)[None] * (step + rank + 2)) % ROWS
        model(text[:, :-1], torch.arange(LENGTH)[None], mask, labels=text[:, 1:]).float().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        schedule.step(increment=args.global_batch_size)
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        _complete(each.optimizer)
    told = {"checkpointing_context": {}, "preprocess_common_state_dict_fn": training.preprocess_common_state_dict}
    checkpointing.save_checkpoint(STEPS, [model], optimizer, schedule, 0, **told)
    dist.barrier()


def _complete(optimizer: Any) -> None:
    """Give a state to every parameter, in order: saves are collective, and ranks without elements got no gradient."""
    import torch

    for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
        state = optimizer.state.pop(parameter, {})
        for moment in ("exp_avg", "exp_avg_sq"):
            state.setdefault(moment, torch.zeros_like(parameter))
        optimizer.state[parameter] = state


def main(out: str, ranks: int, words: str) -> int:
    """Run all ranks, and return how many failed."""
    import torch

    from tests.oracles.bridge_peer import without_cuda

    peer._prepare(te=False)
    torch.cuda.is_available = lambda: True
    without_cuda._Stream.record_event = lambda self, *_: self
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=_rank, args=(rank, ranks, out, words)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
