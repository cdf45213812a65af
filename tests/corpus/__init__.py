"""Inputs that mislead, each accepted once: `tests/cli/test_corpus.py` gives them to every command."""
