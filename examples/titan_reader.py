"""torchtitan's own checkpoint manager, whose `initial_load_path` may be the folder of any checkpoint: of a hub in any
number format, of Megatron, of DeepSpeed, or of rank files.

    from titan_reader import AnyCheckpoint

    config.checkpoint = AnyCheckpoint.Config(enable=True, initial_load_path="/runs/iter_500", initial_load_in_hf=True)

torchtitan itself requires a folder, by its absolute path or a URL for fsspec; it refuses names of a hub's repositories
and single files. No adapter takes part: each rank reads its own bytes, under torchtitan's names, cast to float32, the
dtype in which torchtitan trains by default. torchtitan still saves and resumes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL

import transaxle as tx


class AnyCheckpoint(CheckpointManager):
    """Begins with the weights of any checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options."""

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load the model's weights; torchtitan calls this for every checkpoint."""
        if not from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        cast = {"decode": "fp32"} if from_quantized else {"dtype": "fp32"}
        load(state_dict, storage_reader=tx.dcp.Reader(checkpoint_id, "torchtitan", **cast))
        self.states[MODEL].load_state_dict(state_dict)
