"""A training loop with FSDP2: begin from a checkpoint, save every few steps in the background, resume on any ranks.

    torchrun --nproc_per_node=2 examples/train.py --out run --steps 6 --every 3
    torchrun --nproc_per_node=1 examples/train.py --out run --steps 9 --every 3     # goes on from step 6, on one rank

The parts are those of torchtitan's trainer: a model on the meta device, `fully_shard` layer by layer, weights that come
from a checkpoint, AdamW, and a checkpointer that is asked after every step. Every checkpoint is a model in
the layout of hub files, with the optimizer's state beside it; `--to dcp:torchtitan` writes another layout.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

import transaxle as tx

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
)  # fmt: skip
BATCH, LENGTH = 8, 32
STEP = "step-"


def build(mesh: DeviceMesh) -> LlamaForCausalLM:
    """Make the model without memory for its weights, sharded layer by layer."""
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def draw(folder: Path, to: str) -> None:
    """Write a model of random weights, to begin from; a real run begins from the files of a hub."""
    torch.manual_seed(0)
    tx.save(LlamaForCausalLM(CONFIG), folder, to=to)


class Checkpointer:
    """Saves every few steps, in the background; finds the newest checkpoint."""

    def __init__(self, out: Path, to: str, every: int) -> None:
        self._out, self._to, self._every = out, to, every
        self._job: tx.SaveJob | None = None

    def folder(self, step: int) -> Path:
        """Return where a step's checkpoint is; a folder of this name is complete, or not there."""
        return self._out / f"{STEP}{step}"

    def newest(self) -> int:
        """Return the last step that was saved; without any, step 0 is made."""
        self._out.mkdir(parents=True, exist_ok=True)
        steps = [int(folder.name.removeprefix(STEP)) for folder in self._out.glob(f"{STEP}*")]
        dist.barrier()
        if not steps:
            draw(self.folder(0), self._to)
        return max(steps, default=0)

    def after(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Save, if it is time; the save before this one is waited for."""
        if step % self._every == 0:
            self._job = tx.async_save(model, self.folder(step), to=self._to, optimizer=optimizer)

    def finish(self) -> None:
        """Wait for the last save."""
        if self._job is not None:
            self._job.result()


def batch(step: int, device: str) -> torch.Tensor:
    """Return this rank's part of a step's batch; the whole of it depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, 256, (BATCH, 1), generator=generator)
    rows = (starts + 7 * torch.arange(LENGTH)) % 256
    return rows.chunk(dist.get_world_size())[dist.get_rank()].to(device)


def train(said: argparse.Namespace) -> None:
    """Train from the newest checkpoint to the last step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = build(mesh)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    checkpointer = Checkpointer(said.out, said.to, said.every)
    begin = checkpointer.newest()
    report = tx.load(model, checkpointer.folder(begin), optimizer=optimizer)
    tell(f"loaded {report}")
    model.train()
    for step in range(begin + 1, said.steps + 1):
        tokens = batch(step, device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        tell(f"step {step} loss {float(mean):.6f}")
        checkpointer.after(step, model, optimizer)
    checkpointer.finish()


def tell(line: str) -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder of the checkpoints")
    parser.add_argument("--to", default="hf", help="FORMAT[:DIALECT] of the checkpoints")
    parser.add_argument("--steps", type=int, default=6, help="last step")
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    said = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    train(said)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
