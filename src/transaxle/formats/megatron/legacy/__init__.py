"""Megatron's checkpoints of one folder for each rank (`--ckpt-format torch`).

From files to tensors: `rank_file` describes what one rank wrote, `rank_grid` says which ranks there are, `global_names`
turns a rank's layer and expert numbers into the model's, `rank_optimizer` and `param_order` read what an optimizer
keeps of each parameter, `joined_ranks` puts whole tensors together.
"""
