"""Storage for `torch.distributed.checkpoint`: `tx.dcp.Reader` and `tx.dcp.Writer`."""

from transaxle.live.integrations.dcp_storage import Reader, Writer

__all__ = ["Reader", "Writer"]
