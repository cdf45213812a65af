"""Megatron's distributed checkpoints (`torch_dist`): DCP folders with conventions of their own."""
