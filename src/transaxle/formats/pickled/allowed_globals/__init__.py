"""The globals that the restricted interpreter builds, and nothing else."""
