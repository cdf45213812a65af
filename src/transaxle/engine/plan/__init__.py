"""Planning a whole conversion of a checkpoint before any byte is moved."""
