"""Universal checkpoints: one folder a parameter."""
