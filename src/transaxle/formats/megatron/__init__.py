"""Reads and writes checkpoints of Megatron-LM and megatron-core."""
