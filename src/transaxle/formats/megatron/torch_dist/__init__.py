"""Reads and writes Megatron's distributed checkpoints (`torch_dist`): DCP folders with Megatron's own file names and
tensor keys.
"""
