"""Trainers and torch.distributed.checkpoint."""
