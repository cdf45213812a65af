"""Grouped linear layers and mixtures of experts, which multiply the weights of N experts in one call."""

from transaxle.nn.checkpoint_layouts import accept_layouts, experts_as, load_state_dict, optimizer_state_as
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.nn.grouped_tensor import GroupedTensor
from transaxle.nn.kernel_choice import Path
from transaxle.nn.moe import MoE

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
