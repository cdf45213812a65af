"""Integrations of Transaxle with trainers and with `torch.distributed.checkpoint`."""
