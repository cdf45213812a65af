"""Grouped linear layers and mixtures of experts: N experts in one product, stored as one tensor or as N."""

from transaxle.nn.checkpoints.layouts import accept_layouts, experts_as
from transaxle.nn.checkpoints.whole_model import load_state_dict
from transaxle.nn.gemm.grouped_tensor import GroupedTensor
from transaxle.nn.gemm.kernel_choice import Path
from transaxle.nn.linear.grouped_linear import GroupedLinear
from transaxle.nn.linear.grouped_optimizer import optimizer_state_as
from transaxle.nn.moe.moe import MoE

__all__ = [
    "GroupedLinear",
    "GroupedTensor",
    "MoE",
    "Path",
    "accept_layouts",
    "experts_as",
    "load_state_dict",
    "optimizer_state_as",
]
