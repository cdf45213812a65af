"""What is told of a checkpoint, of a table and of a plan: plain data, names folded into few rows, moves in words."""
