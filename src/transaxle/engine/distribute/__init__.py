"""Executing one conversion plan with many workers: work items as plain data, executors that run them, and the final
commit.
"""
