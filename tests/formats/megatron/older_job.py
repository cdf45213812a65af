"""Runs the jobs of `trained_job` and `gpt_job` under an older megatron-core, which is first on the path.

    python -m tests.formats.megatron.older_job JOBS.json

It has this numpy and this torch. Megatron is imported once; the ranks of each job are forked from there. What failed is
written beside the list of jobs, one text for each, empty where nothing did.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem

from tests.formats.megatron import gpt_job, trained_job
from tests.formats.megatron.trained_job import Job
from tests.oracles import hub, megatron_peer

SAVE, LOAD = "save", "load"
FAILED = ".failed"


class _Results:
    """A queue of one result between a process and its child, in place of one that a manager serves."""

    def __init__(self) -> None:
        self._file = Path(tempfile.mkdtemp()) / "result"

    def put(self, value: object) -> None:
        beside = self._file.with_suffix(".part")
        beside.write_bytes(pickle.dumps(value))
        beside.rename(self._file)

    def empty(self) -> bool:
        return not self._file.exists()

    def get(self) -> object:
        value = pickle.loads(self._file.read_bytes())  # noqa: S301 - our own
        self._file.unlink()
        return value

    get_nowait = get


def _known(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function be called with arguments that this release does not have yet."""
    names = inspect.signature(function).parameters

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: value for key, value in kwargs.items() if key in names})

    return called


def _adapt() -> None:
    """Make up for what is newer here than the release, and for the package of CUDA kernels that is not here."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.fusions import fused_bias_geglu
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.optimizer import distrib_optimizer

    fused_bias_geglu.__dict__.setdefault("quick_gelu", None)
    np.product = np.prod  # type: ignore[attr-defined]
    filesystem_async._get_write_results_queue = lambda *_: _Results()
    own: Any = filesystem._write_item
    last = len(inspect.signature(own).parameters) - 1  # torch's serialization format, which these do not give
    kind = filesystem.SerializationFormat.TORCH_SAVE
    filesystem_async._write_item = lambda *args: own(*args[:last], kind)
    if not hasattr(distrib_optimizer, "quantize_nvfp4_param_shard"):
        distrib_optimizer.quantize_param_shard = lambda *_, **__: None
    optimizer = distrib_optimizer.DistributedOptimizer
    sharded = optimizer.sharded_state_dict
    if "metadata" not in inspect.signature(sharded).parameters:
        optimizer.sharded_state_dict = lambda *args, metadata: sharded(
            *args, sharding_type=metadata["distrib_optim_sharding_type"]
        )
    for name in ("is_pipeline_first_stage", "is_pipeline_last_stage"):
        setattr(parallel_state, name, _known(getattr(parallel_state, name)))
    gpt_layer_specs.get_gpt_decoder_block_spec = _known(gpt_layer_specs.get_gpt_decoder_block_spec)
    gpt_model.GPTModel.__init__ = _known(gpt_model.GPTModel.__init__)


def _rank(rank: int, world: int, meeting: str, told: dict[str, Any]) -> str:
    """Be one rank of a job; return what went wrong."""
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
        job, given = Job(*told["job"]), (told["config"], told["source"], told["folder"])
        if told["do"] == SAVE:
            trained_job.save(rank, world, *given, job)
        elif differ := gpt_job.load(rank, world, *given, job.tp, job.pp, job.ep):
            return f"not equal: {differ}"
        torch.distributed.barrier()
    except BaseException:  # noqa: BLE001 - it is told
        return traceback.format_exc()
    return ""


def _run(told: dict[str, Any]) -> str:
    """Fork the ranks, and wait for them; return what went wrong."""
    ranks = Job(*told["job"]).ranks
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                Path(folder, str(rank)).write_text(_rank(rank, ranks, f"{folder}/meeting", told), "utf-8")
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        texts = [Path(folder, str(rank)) for rank in range(ranks)]
        return "\n".join(text.read_text("utf-8") if text.exists() else "killed" for text in texts).strip()


def main(listed: Path) -> None:
    """Run all jobs."""
    import megatron.core

    _adapt()
    jobs = json.loads(listed.read_text("utf-8"))
    with gpt_job.on_cpu():
        megatron_peer.transformer_config(hub.configuration(jobs[0]["config"]))  # whatever that imports
    failed = [_run(told) for told in jobs]
    listed.with_suffix(FAILED).write_text(json.dumps([megatron.core.__version__, failed]), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
