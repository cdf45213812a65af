"""NeMo Automodel's own checkpointer, which begins with any checkpoint: of Megatron, DeepSpeed or torchtitan, at a URL.

    from automodel_reader import AnyCheckpoint

    checkpointer = AnyCheckpoint(CheckpointingConfig(checkpoint_dir="runs", ...), dp_rank=0, tp_rank=0, pp_rank=0)
    checkpointer.load_base_model(model, device, root_dir, "megatron/iter_0000500")

Automodel asks for tensors by hub names, and each rank reads its own bytes of them from whatever the checkpoint stores.
"""

from __future__ import annotations

from typing import Any

from nemo_automodel.components.checkpoint.checkpointing import Checkpointer

import transaxle as tx


class AnyCheckpoint(Checkpointer):
    """Begins with the weights of any checkpoint."""

    def _get_storage_reader(
        self, model_path: str, key_mapping: Any, is_init_step: bool = False, is_safetensors: bool | None = None
    ) -> Any:
        """Return the reader for a checkpoint; Automodel calls this for every one."""
        if is_init_step:
            return tx.dcp.Reader(model_path, "hf")
        return super()._get_storage_reader(model_path, key_mapping, is_init_step, is_safetensors)
