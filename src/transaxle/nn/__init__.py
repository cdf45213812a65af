"""Grouped linear layers: N experts in one product, one tensor or N in a checkpoint."""

from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.nn.grouped_tensor import GroupedTensor
from transaxle.nn.layouts import accept_layouts, experts_as
from transaxle.nn.moe import MoE
from transaxle.nn.optimizer import optimizer_state_as
from transaxle.nn.path import Path

__all__ = ["GroupedLinear", "GroupedTensor", "MoE", "Path", "accept_layouts", "experts_as", "optimizer_state_as"]
