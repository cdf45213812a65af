"""Megatron's checkpoints with one folder for each rank (`--ckpt-format torch`).

`rank_grid` reads the files of the ranks and places the ranks on the mesh; `global_names` converts a rank's layer and
expert numbers into the model's, and derives the order of parameters; `rank_optimizer` reads the optimizer state of each
rank, and joins tensors over ranks.
"""
