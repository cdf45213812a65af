"""Two checkpoints compared; one checked against what it says of itself."""
