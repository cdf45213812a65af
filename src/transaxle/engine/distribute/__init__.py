"""Executing one plan with many workers: work items as data, executors, and the commit."""
