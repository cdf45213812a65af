"""torch.distributed.checkpoint (DCP) folders: a catalog of chunks without torch, and drafts that torch reads."""
