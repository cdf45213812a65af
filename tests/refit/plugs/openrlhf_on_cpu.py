"""What OpenRLHF needs for its actors to run on a CPU; each process of the job calls `prepare` first.

vLLM, flash-attn and pylatexenc become modules without contents, and vLLM's group for weights one over gloo.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

ABSENT = ("vllm", "flash_attn", "pylatexenc")
SECRET = "only the ranks of this job know it"


class _Empty(ModuleType):
    """A module in which every name is a mock."""

    __version__ = "0.20.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class Group:
    """What OpenRLHF uses of vLLM's group of the trainer's first rank and all workers."""

    def __init__(self, host: str, port: int, rank: int, size: int, device: object) -> None:
        import transaxle as tx

        self.group = tx.refit.meet(f"{host}:{port}", rank, size, secret=SECRET, backend="gloo", timeout=60)

    def broadcast(self, tensor: Any, src: int, stream: object) -> None:
        self.group.broadcast(tensor, src).wait()


def prepare() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    import torch

    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    for name in ("current_stream", "synchronize", "empty_cache", "set_device"):  # torch wants different functions
        setattr(cuda, name, lambda *_: None)
    import openrlhf.utils.distributed_util as distributed

    distributed.stateless_init_process_group = Group
    import openrlhf.models.actor as models
    import openrlhf.utils as utils

    utils.get_tokenizer = lambda *_, **__: None  # the job has only token numbers
    models._patch_zero3_weight_mapping = lambda: None  # for transformers 5.15, and an error with later ones


def settings(**values: Any) -> Any:
    """Return options of OpenRLHF: a dict in a dict is a namespace in a namespace."""
    return SimpleNamespace(
        **{name: settings(**value) if isinstance(value, dict) else value for name, value in values.items()}
    )
