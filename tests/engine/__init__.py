"""Tests of the engine: plans, their execution, and what is said about two checkpoints."""

from __future__ import annotations

from hypothesis import settings

law = settings(derandomize=True, max_examples=100, database=None)
"""How properties are tested: the same examples in every run, however slow the machine is."""
