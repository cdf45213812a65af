"""Executing one conversion plan with many workers: work items as plain data, executors, and the final commit."""
