"""Refit against `full_tensor()`, broadcast and load: a trainer's weights into an engine on other ranks.

A Qwen3-MoE of 1.3 GB in bfloat16, sharded by FSDP2 over four ranks, goes into an engine that cuts it over two others by
tensor parallelism, gate and up each for itself. Promises: at least three times as fast as what frameworks do, bytes
received by each rank at most 1.02 of those that it needs, buckets of at most twice 64 MB, and nothing planned after the
first push.

The other side gathers each tensor on every rank of the trainer (`full_tensor()`), broadcasts it to the engine's ranks,
and these copy their part of it into their weights. Both sides run in the same processes over gloo on loopback, take
turns, and are timed from the first rank's begin to the last rank's end; the median of the rounds counts. Between ranks
of one machine ours goes through shared memory; `--network` keeps it from that, so that both sides pay for gloo.

    python benchmarks/refit.py [--quick] [--network] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from promises import Promises
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import transaxle as tx
from transaxle.live.transport import shared_memory

TRAINER, ENGINE = 4, 2
SECRET = "of both jobs of this benchmark, on one machine"
SIZES = {
    "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 2, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "tie_word_embeddings": False,
}  # fmt: skip
QUICK = {"vocab_size": 1024, "num_hidden_layers": 2, "num_experts": 4}
FASTER, RECEIVED, BUCKET = 3.0, 1.02, 64_000_000
State = dict[str, Any]


def build(sizes: dict[str, Any]) -> Any:
    """Return a transformers model with random weights and stacked experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config_sizes = dict(sizes)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config_sizes.pop("model_type"), **config_sizes), dtype=torch.bfloat16
    )


def trainer(sizes: dict[str, Any]) -> Any:
    """Return the model, sharded over all ranks of the trainer."""
    mesh, model = init_device_mesh("cpu", (TRAINER,)), build(sizes)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def cut(name: str, dims: int) -> Placement:
    """Return the placement of a weight in the engine."""
    if "norm" in name or name.endswith("mlp.gate.weight"):
        return Replicate()
    if "gate_up" in name:
        return _StridedShard(1, split_factor=2)
    return Shard(dims - 1 if "o_proj" in name or "down_proj" in name else dims - 2)


def engine(sizes: dict[str, Any]) -> State:
    """Return this engine rank's weights, uninitialized."""
    mesh = init_device_mesh("cpu", (ENGINE,))
    with torch.device("meta"):
        shapes = build(sizes).state_dict()
    weights = {}
    for name, tensor in shapes.items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        weights[name] = distribute_tensor(whole, mesh, [cut(name, tensor.dim())], src_data_rank=None)
        weights[name]._local_tensor = weights[name].to_local().clone()
    return weights


def gather_and_load(model: Any, weights: State, group: dist.ProcessGroup | None, engine_rank: int) -> None:
    """Update the engine as frameworks do: gather whole tensors on all trainer ranks, broadcast them, copy parts."""
    if model is not None:
        for tensor in model.state_dict().values():
            whole = tensor.full_tensor()
            if group is not None:
                group.broadcast([whole.view(torch.uint8)], _root()).wait()
        return
    for name, tensor in weights.items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        assert group is not None
        group.broadcast([whole.view(torch.uint8)], _root()).wait()
        load(name, whole, tensor.to_local(), engine_rank)


def _root() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def load(name: str, whole: torch.Tensor, part: torch.Tensor, engine_rank: int) -> None:
    """Copy a rank's part of a whole tensor into its weight, as the engine's loader does."""
    how = cut(name, whole.dim())
    if isinstance(how, _StridedShard):
        halves = [half.chunk(ENGINE, 1)[engine_rank] for half in whole.chunk(2, 1)]
        size = halves[0].shape[1]
        part[:, :size].copy_(halves[0])
        part[:, size:].copy_(halves[1])
    else:
        part.copy_(whole.chunk(ENGINE, how.dim)[engine_rank] if isinstance(how, Shard) else whole)


def time_push(group: dist.ProcessGroup, work: Callable[[], Any]) -> float:
    """Return the seconds until all ranks have finished."""
    group.barrier().wait()
    begin = time.monotonic()
    work()
    group.barrier().wait()
    return time.monotonic() - begin


def run(number: int, ports: tuple[int, int], folder: str, options: argparse.Namespace) -> None:
    """Run one rank of one of the two jobs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    trains, job_rank = number < TRAINER, number if number < TRAINER else number - TRAINER
    size, job = (TRAINER, "trainer") if trains else (ENGINE, "engine")
    dist.init_process_group("gloo", f"file://{folder}/{job}", rank=job_rank, world_size=size)
    group = tx.refit.meet(f"127.0.0.1:{ports[0]}", number, TRAINER + ENGINE, secret=SECRET, backend="gloo")
    root = None
    if number == 0 or not trains:
        place = 0 if trains else 1 + job_rank, 1 + ENGINE
        root = tx.refit.meet(f"127.0.0.1:{ports[1]}", *place, secret=SECRET, backend="gloo")
    model: Any = trainer(options.sizes) if trains else None
    weights: State = {} if trains else engine(options.sizes)
    with patch.object(shared_memory, "map_region", (lambda _: None) if options.network else shared_memory.map_region):
        begin = time.monotonic()
        refits = {
            name: tx.Refit({} if model is None else model, weights, group, bucket=BUCKET, in_place=name == "in place")
            for name in ("staged", "in place")
        }
        planned = (time.monotonic() - begin) / len(refits)
        report = refits["staged"].push()
        truth = {name: tensor.to_local().clone() for name, tensor in weights.items()}
        gather_and_load(model, weights, root, job_rank)
        assert all(torch.equal(tensor.to_local(), truth[name]) for name, tensor in weights.items())
        seconds: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for name, refit in refits.items():
                seconds.setdefault(name, []).append(time_push(group, refit.push))
            seconds.setdefault("gathered", []).append(
                time_push(group, lambda: gather_and_load(model, weights, root, job_rank))
            )
    result = {
        "seconds": {name: statistics.median(refit) for name, refit in seconds.items()},
        "plan": planned,
        "received": report.bytes_received,
        "needed": report.bytes_needed,
        "buffers": report.buffers,
        "written": report.bytes_written,
    }
    Path(folder, f"rank{number}.json").write_text(json.dumps(result), "utf-8")


def free_ports() -> tuple[int, int]:
    """Return two free ports."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


def main() -> int:
    """Run both sides, and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, to check only that it works")
    parser.add_argument("--network", action="store_true", help="no shared memory")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.sizes = {**SIZES, **(QUICK if options.quick else {})}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(free_ports(), folder, options), nprocs=TRAINER + ENGINE)
        ranks = [json.loads(Path(folder, f"rank{n}.json").read_text("utf-8")) for n in range(TRAINER + ENGINE)]
    took = {name: max(rank["seconds"][name] for rank in ranks) for name in ranks[0]["seconds"]}
    size = sum(rank["written"] for rank in ranks)
    received = max(rank["received"] / rank["needed"] for rank in ranks if rank["needed"])
    print(
        f"{size / 1e9:.2f} GB, FSDP {TRAINER} -> TP {ENGINE} on other ranks" + (", network" if options.network else "")
    )
    print(f"planned once in {max(rank['plan'] for rank in ranks):.2f} s")
    for name, seconds in took.items():
        print(f"{name:>10}  {seconds:6.2f} s  {took['gather_and_load'] / seconds:5.1f} x")
    print(f"received {received:.3f} of what is needed; buckets {max(rank['buffers'] for rank in ranks) / 1e6:.0f} MB")
    if options.quick:
        return 0
    promises = Promises()
    promises.at_least("refit, staged, against gather, broadcast and load", took["gathered"] / took["staged"], FASTER)
    promises.at_most("refit, received for each byte needed", received, RECEIVED, "bytes")
    promises.at_most("refit, buckets", max(rank["buffers"] for rank in ranks) / 1e6, 2 * BUCKET / 1e6, "MB")
    return promises.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
