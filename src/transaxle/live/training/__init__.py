"""Optimizers, parameter groups and extra state."""
