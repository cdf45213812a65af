"""Saves that go on while training does."""
