"""Megatron's checkpoints with one folder for each rank (`--ckpt-format torch`).

The module `rank_grid` reads the ranks' files and places the ranks on the mesh. The module `global_names` converts a
rank's own layer and expert numbers in tensor names into the numbers of the whole model, and derives the order of
parameters. The module `rank_optimizer` reads the optimizer state of each rank, and joins tensors over ranks.
"""
