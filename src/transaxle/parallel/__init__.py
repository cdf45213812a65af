"""Tensor parallelism for models whose family has a table of mapping rules with tensor names and cuttable axes."""

from transaxle.parallel.cutting import clip_grad_norm_
from transaxle.parallel.tensor_parallel import tensor_parallel
from transaxle.parallel.universal_metadata import universal_checkpoint_info

__all__ = ["clip_grad_norm_", "tensor_parallel", "universal_checkpoint_info"]
