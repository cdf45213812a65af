"""Planning a complete conversion of a checkpoint before any byte is moved."""
