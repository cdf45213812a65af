"""Megatron's checkpoints."""
