"""The tables that there are: families, their dialects, what their axes stand for."""
