"""Which axis of which parameter is cut, read from tables."""
