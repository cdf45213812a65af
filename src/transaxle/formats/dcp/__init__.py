"""torch.distributed.checkpoint (DCP) folders: reads their chunks without torch, and lays out new folders that torch can
load.
"""
