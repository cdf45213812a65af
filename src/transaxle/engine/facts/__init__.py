"""What is told of a checkpoint and of a table, as plain data."""
