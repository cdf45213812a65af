"""From the tensors of one dialect to those of another."""
