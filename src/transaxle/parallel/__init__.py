"""Tensor parallelism: cuts a model over ranks, along the axes that the rules of its model family allow."""

from transaxle.parallel.cutting import clip_grad_norm_
from transaxle.parallel.tensor_parallel import tensor_parallel
from transaxle.parallel.universal_metadata import universal_checkpoint_info

__all__ = ["clip_grad_norm_", "tensor_parallel", "universal_checkpoint_info"]
