"""Integrations with trainers and with `torch.distributed.checkpoint`."""
