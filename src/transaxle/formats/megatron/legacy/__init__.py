"""Megatron's checkpoints with one folder for each rank (`--ckpt-format torch`).

`rank_grid` reads the ranks' files and places the ranks on the mesh. `global_names` converts the layer and expert
numbers in a rank's tensor names into the whole model's, and derives the order of parameters. `rank_optimizer` reads the
optimizer state of each rank, and joins tensors over ranks.
"""
