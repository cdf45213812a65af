"""Refit: at every push, the target gets what its own loader would read from a save of the same step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import transaxle as tx
from tests.live.jobs import SECRET, apart, free_port
from tests.live.ranks import run
from tests.live.topologies import FSDP, FSDP_TP, HSDP, LLAMA, MOE, PP, adamw, build, train
from transaxle.torch_tensors import local_of

ROUNDS = 4
TINY = "1MiB"
PLANNING = (
    "axes/translation/", "axes/layout/", "engine/", "live/global_tensors.py", "live/model/source_view.py",
    "live/reshard.py", "live/state_dict_adapter.py", "live/ties.py", "move/mover.py", "refit/agreement.py:agree",
)  # fmt: skip
"""Where plans are made; the patterns of `only=` are looked up in `engine/views/encode.py` alone."""
Tensors = dict[str, torch.Tensor]


@contextmanager
def _watched() -> Iterator[set[str]]:
    """Record the functions of the package that are called, each with its module."""
    home, passed = str(Path(tx.__file__).parent) + "/", set[str]()

    def watch(frame: Any, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(home) and frame.f_code.co_name != "<module>":
            passed.add(f"{file.removeprefix(home)}:{frame.f_code.co_name}")

    sys.setprofile(watch)
    try:
        yield passed
    finally:
        sys.setprofile(None)


def _placed(tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> Tensors:
    """Cut an engine's weights, empty: what it computes by rows along rows, what comes after along columns."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        columns = any(part in name for part in ("o_proj", "down_proj", "linear_proj", "linear_fc2"))
        cut = Replicate() if tensor.dim() == 1 else Shard(tensor.dim() - 1 if columns else 0)
        found[name] = distribute_tensor(torch.full_like(tensor, -1), mesh, [cut], src_data_rank=None)
    return found


def _engine(folder: str, dialect: str, dtype: torch.dtype) -> Callable[[], Tensors]:
    """Return what makes an engine's empty weights, of all ranks of this job."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with tx.open(folder) as checkpoint:
        shapes = {name: each.shape for name, each in checkpoint.as_dialect(dialect).items()}
    return lambda: _placed({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, mesh)


def _of_two_jobs(rank: int, world: int, folder: str, port: int, config: dict[str, Any], how: str, to: str) -> int:
    """Train and push in one job, pull in the other, which holds what comes against a save of the same step."""
    job, _ = apart(rank, world, world - 2)
    dtype = torch.bfloat16 if to == "bf16" else torch.float32
    group = tx.refit.meet(f"127.0.0.1:{port}", number=rank, size=world, secret=SECRET)
    model: Any = {}
    engine: Any = {}
    truth: Tensors = {}
    received = 0
    if job == 0:
        torch.manual_seed(0)
        model = build(config, how, meta=False)
        tx.save(model, f"{folder}/begin")
    dist.barrier(group)
    if job == 1:
        make = _engine(f"{folder}/begin", "hf" if to == "bf16" else to, dtype)
        engine, truth = make(), make()
    refit = tx.Refit(model, engine, group, bucket=TINY, dtype="bf16" if to == "bf16" else None)
    optimizer = adamw(model) if job == 0 else None
    for step in range(ROUNDS):
        if optimizer is not None:
            train(model, optimizer, 1, how, begin=step)
        with _watched() as passed:
            report = refit.push() if job == 0 else refit.pull()
        assert [each for each in passed if each.startswith(PLANNING) and "views/encode.py" not in each] == []
        assert report.version == refit.version == step + 1
        received = report.bytes_received
        assert received == report.bytes_needed
        assert report.buffers <= 2 << 20
        if job == 0:
            tx.save(model, f"{folder}/{step}")
        dist.barrier(group)
        if job == 1:
            tx.load(truth, f"{folder}/{step}", dtype="bf16" if to == "bf16" else None)
            assert engine.keys() == truth.keys()
            assert all(torch.equal(local_of(tensor), local_of(truth[name])) for name, tensor in engine.items())
    refit.close()
    return received


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("config", "how", "to"),
    [
        (LLAMA, FSDP, "megatron"), (MOE, FSDP, "hf"), (LLAMA, PP, "megatron"), (LLAMA, HSDP, "bf16"),
        (LLAMA, FSDP_TP, "hf"), (MOE, FSDP, "bf16"),
    ],
)  # fmt: skip
def test_rounds_of_two_jobs(tmp_path: Path, config: dict[str, Any], how: str, to: str) -> None:
    world = 6 if how == FSDP_TP else 4
    received = run(world, _of_two_jobs, str(tmp_path), free_port(), config, how, to)
    assert received[: world - 2] == [0] * (world - 2)
    assert min(received[world - 2 :]) > 0
