"""Processes forked from one that has imported what takes long: torch, transformers and DeepSpeed, a second or two each.

That process is started once in a session, and never touches a device. What is forked from it may ask it for others.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext, ForkServerContext, SpawnContext
from typing import Any

import torch

_LONG = [
    "tests.live.ranks",
    "tests.oracles.deepspeed_peer.run",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "transaxle.live.asynchronous",
    "transaxle.live.load",
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "mixtral", "phi3", "qwen2")),
    "tests.frozen",
]
"""What takes long to import, and what is to come last; what is not installed is left out."""


def context() -> SpawnContext | ForkServerContext:
    """Return how to start processes; beside a GPU from nothing, for what has asked for devices must not be forked."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    multiprocessing.set_forkserver_preload(_LONG)
    return multiprocessing.get_context("forkserver")


def fork_what_is_spawned() -> None:
    """Let processes that this one spawns, itself forked, be forked from the same server, so that none imports torch.

    Those that save in the background are such. That any program can spawn them, `tests/live/background` tries with
    programs and ranks of its own.
    """
    server: Any = forkserver._forkserver  # by itself it would start another server in here
    if server._forkserver_address is None:
        return
    server.ensure_running = resource_tracker.ensure_running
    usual: Any = multiprocessing.get_context

    def get_context(method: str | None = None) -> BaseContext:
        found: BaseContext = usual("forkserver" if method == "spawn" else method)
        return found

    there: Any = torch.multiprocessing
    there.get_context = get_context
