"""Other programs' loading code, run on checkpoints without data to see what becomes of each tensor."""
