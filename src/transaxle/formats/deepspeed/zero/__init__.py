"""ZeRO partitions and the files of all ranks, read as whole tensors."""
