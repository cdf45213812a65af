"""Tensor-parallel training, from a hub checkpoint to a hub checkpoint.

    torchrun --nproc_per_node=4 examples/tensor_parallel.py --source llama --out trained
    torchrun --nproc_per_node=4 examples/tensor_parallel.py --source llama --out trained --data 2    # FSDP 2 x TP 2
    torchrun --nproc_per_node=2 examples/tensor_parallel.py --source llama --out more --resume trained/state

`--out` gets two folders: `hub`, which `from_pretrained` loads, and `state`, with the optimizer's state, from which a
run at any degree goes on.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM

import transaxle as tx

BATCH, LENGTH = 4, 16


def options(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="folder of a hub checkpoint")
    parser.add_argument("--out", required=True, help="folder for what is written")
    parser.add_argument("--resume", help="a `state` folder to go on from")
    parser.add_argument("--data", type=int, default=1, help="ranks that hold the same part of the model under FSDP2")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args(words)


def build(source: str, data: int) -> nn.Module:
    """Make the model without memory for its weights: cut over the `tp` ranks, then sharded over the `dp` ranks."""
    mesh = init_device_mesh("cpu", (data, dist.get_world_size() // data), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    tx.parallel.tensor_parallel(model, mesh["tp"])
    if data > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def train(options: argparse.Namespace) -> list[float]:
    """Train for some steps, write both folders, and return the losses."""
    model = build(options.source, options.data)
    if not options.resume:
        tx.load(model, options.source, dtype="fp32")  # a hub's weights are bf16; each rank reads its part of them
    optimizer = AdamW(model.parameters(), lr=1e-3)  # of the parameters that have storage by now
    if options.resume:
        tx.load(model, options.resume, optimizer=optimizer)
    start = int(max((float(state["step"]) for state in optimizer.state.values()), default=0))
    losses = []
    for step in range(start, start + options.steps):
        # The same batch on every rank: for simplicity here also along `dp`, whose ranks would have different ones.
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        tx.parallel.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    Path(options.out).mkdir(parents=True, exist_ok=True)
    tx.save(model, f"{options.out}/hub", to="hf")
    tx.save(model, f"{options.out}/state", to="dcp", optimizer=optimizer)
    return losses


def main() -> None:
    """Run under `torchrun`."""
    dist.init_process_group("gloo")
    losses = train(options())
    if int(os.environ["RANK"]) == 0:
        print(f"losses {' '.join(f'{loss:.4f}' for loss in losses)}")
    gc.collect()  # the model's meshes must go before the process groups that they refer to
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
