"""Values for people: slices as numpy has them, arrays and torch tensors, many in file order, and in other processes."""
