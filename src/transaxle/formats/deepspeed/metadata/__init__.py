"""Universal-checkpoint metadata: how ranks cut each parameter."""
