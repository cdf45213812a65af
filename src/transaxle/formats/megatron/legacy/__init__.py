"""Megatron's checkpoints of one folder for each rank (`--ckpt-format torch`).

From files to tensors: `rank_grid` describes what one rank wrote, and says which ranks there are; `global_names` turns a
rank's layer and expert numbers into the model's, and knows the order of parameters; `rank_optimizer` reads what an
optimizer keeps of each, and puts whole tensors together.
"""
