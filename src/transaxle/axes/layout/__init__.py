"""Table lines applied to a concrete model: axes get sizes, tensors get layouts, lines are compared."""
