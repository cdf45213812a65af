"""Carries plans out: bytes from one endpoint (files, the memory of ranks) to another."""
