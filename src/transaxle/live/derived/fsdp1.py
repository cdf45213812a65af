"""FSDP1 (`FullyShardedDataParallel`): its parameters are flat; its state dict shows whole ones, which are copies.

What its state dict shows depends on a setting of the user's. Here it is always every tensor, whole, on every rank: the
one kind whose names and values mean the same whatever the wrapping, and that its `load_state_dict` takes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType


def is_flat(model: nn.Module) -> bool:
    """Whether FSDP1 holds any of a model's parameters."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Let state dicts of a model under FSDP1 be whole, on all ranks; of any other model nothing changes."""
    if not is_flat(model):
        yield
        return
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        yield
