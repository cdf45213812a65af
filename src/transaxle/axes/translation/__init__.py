"""Translation of the tensors of one dialect into those of another."""
