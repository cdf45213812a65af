"""Exchange of bytes between ranks through collectives and shared memory, and the key-value store through which ranks
find each other.
"""
