"""Processes forked from one that has imported what takes long: torch, transformers and DeepSpeed, a second or two each.

That process is started once in a session, and never touches a device.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext, SpawnContext

import torch

_LONG = [
    "tests.live.ranks",
    "tests.oracles.deepspeed_peer.run",
    "deepspeed.runtime.zero.muon.muon_optimizer",
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
