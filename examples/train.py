"""A training loop with FSDP2: begin from a checkpoint, save every few steps in the background, resume on any ranks.

    torchrun --nproc_per_node=2 examples/train.py --out run --steps 6 --every 3
    torchrun --nproc_per_node=1 examples/train.py --out run --steps 9 --every 3     # goes on from step 6, on one rank

The parts are those of torchtitan's trainer: a model on the meta device, `fully_shard` layer by layer, weights that come
from a checkpoint, AdamW with a schedule, a data loader that knows its place, and a checkpointer that is asked after
every step. Every checkpoint is a model in the layout of hub files, with the optimizer's state and the run's own beside
it; `--to dcp:torchtitan` writes another layout.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR
from transformers import LlamaConfig, LlamaForCausalLM

import transaxle as tx

BATCH, LENGTH = 8, 32
STEP, INITIAL = "step-", "initial"


def config(dropout: float) -> LlamaConfig:
    """Return the sizes of a model that trains in seconds."""
    return LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, attention_dropout=dropout,
    )  # fmt: skip


def build(mesh: DeviceMesh, dropout: float) -> LlamaForCausalLM:
    """Make the model without memory for its weights, sharded layer by layer."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config(dropout))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Progress:
    """How far the run is: what a checkpoint must bring back beside weights and optimizer."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens = 0

    def state_dict(self) -> dict[str, int]:
        """Return it."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take it back."""
        vars(self).update(state)


class Data:
    """A data loader that knows its place. The place counts for all ranks together, so any number of them can go on."""

    def __init__(self) -> None:
        self.at = 0

    def batch(self, device: str) -> torch.Tensor:
        """Return this rank's part of the next batch."""
        generator = torch.Generator().manual_seed(self.at)
        self.at += BATCH
        starts = torch.randint(0, 256, (BATCH, 1), generator=generator)
        rows = (starts + 7 * torch.arange(LENGTH)) % 256
        return rows.chunk(dist.get_world_size())[dist.get_rank()].to(device)

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.at = state["at"]


class Checkpointer:
    """Saves every few steps, in the background; keeps the newest few; resumes from the last.

    Args:
        out: folder of the checkpoints.
        to: `FORMAT[:DIALECT]`.
        every: steps between checkpoints.
        keep: how many stay; 0: all.
        model: the model.
        optimizer: its optimizer.
        extra: what else the run must remember.
    """

    def __init__(
        self, out: Path, to: str, every: int, keep: int, model: nn.Module, optimizer: Optimizer, extra: dict[str, Any]
    ) -> None:
        self._out, self._to, self._every, self._keep = out, to, every, keep
        self._model, self._optimizer, self._extra = model, optimizer, extra
        self._job: tx.SaveJob | None = None

    def resume(self, initial: Path) -> tx.LoadReport:
        """Load the newest checkpoint; where there is none, the weights of `initial`."""
        steps = self._steps()
        dist.barrier()
        if not steps:
            return tx.load(self._model, initial)
        return tx.load(self._model, self._folder(steps[-1]), optimizer=self._optimizer, extra=self._extra)

    def after(self, step: int) -> None:
        """Save, if it is time; the save before this one is waited for."""
        if step % self._every == 0:
            target = self._folder(step)
            self._job = tx.async_save(
                self._model, target, to=self._to, optimizer=self._optimizer, extra=self._extra, overwrite=True
            )
            self._tidy()

    def finish(self) -> None:
        """Wait for the last save."""
        if self._job is not None:
            self._job.result()
            self._tidy()

    def _folder(self, step: int) -> Path:
        """Return where a step's checkpoint is; a folder of this name is complete, or not there."""
        return self._out / f"{STEP}{step}"

    def _steps(self) -> list[int]:
        return sorted(int(folder.name.removeprefix(STEP)) for folder in self._out.glob(f"{STEP}*"))

    def _tidy(self) -> None:
        """Remove all but the newest checkpoints; the one in the making is not among them yet."""
        if self._keep and dist.get_rank() == 0:
            for step in self._steps()[: -self._keep]:
                gone = self._out / f".{STEP}{step}"  # first, so that a step is whole or not there if this is killed
                shutil.rmtree(gone, ignore_errors=True)
                self._folder(step).rename(gone)
                shutil.rmtree(gone)


def write_initial(out: Path) -> Path:
    """Write a model with random weights to start from; a real run starts from hub files."""
    folder = out / INITIAL
    out.mkdir(parents=True, exist_ok=True)
    exists = folder.exists()
    dist.barrier()
    if not exists:
        torch.manual_seed(0)
        tx.save(LlamaForCausalLM(config(0.0)), folder)
    return folder


def train(arguments: argparse.Namespace) -> list[float]:
    """Train from the newest checkpoint to the last step; return the losses."""
    world = dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(
        device, (arguments.replicas, world // arguments.replicas), mesh_dim_names=("replicate", "shard")
    )
    model = build(mesh if arguments.replicas > 1 else mesh["shard"], arguments.dropout)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    schedule = LinearLR(optimizer, start_factor=0.25, total_iters=4)
    progress, data = Progress(), Data()
    torch.manual_seed(1 + dist.get_rank())
    # Every rank has random numbers of its own; on another number of ranks they begin anew.
    extra = {"progress": progress, "data": data, "schedule": schedule, "random": tx.Random(strict=False)}
    checkpointer = Checkpointer(arguments.out, arguments.to, arguments.every, arguments.keep, model, optimizer, extra)
    report = checkpointer.resume(arguments.init or write_initial(arguments.out))
    tell(f"loaded {report}")
    model.train()
    losses = []
    while progress.step < arguments.steps:
        tokens = data.batch(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        progress.step += 1
        progress.tokens += BATCH * LENGTH
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(float(mean))
        tell(f"step {progress.step} loss {losses[-1]:.6f} lr {schedule.get_last_lr()[0]:.4f} tokens {progress.tokens}")
        checkpointer.after(progress.step)
    checkpointer.finish()
    return losses


def tell(line: str) -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def options(words: list[str] | None = None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder of the checkpoints")
    parser.add_argument("--init", type=Path, help="weights to begin from; otherwise they are drawn")
    parser.add_argument("--to", default="hf", help="FORMAT[:DIALECT] of the checkpoints")
    parser.add_argument("--steps", type=int, default=6, help="last step")
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=0, help="newest checkpoints that are kept; 0: all")
    parser.add_argument("--replicas", type=int, default=1, help="groups of ranks that each hold the whole model")
    parser.add_argument("--dropout", type=float, default=0.0, help="of attention")
    return parser.parse_args(words)


def main() -> None:
    """Read the options and train."""
    arguments = options()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    train(arguments)
    gc.collect()  # the model's meshes must go before the process groups that they refer to
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
