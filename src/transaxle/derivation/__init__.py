"""Derivation of tables by tracing: a table follows from where a converter moves every number."""
