"""DeepSpeed's checkpoints: the ZeRO stages, tensor and pipeline parallel ranks, and universal checkpoints."""
