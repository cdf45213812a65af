"""The folder format of torch.distributed.checkpoint (DCP): reads chunks from DCP folders without torch, and lays out
new folders that torch can load.
"""
