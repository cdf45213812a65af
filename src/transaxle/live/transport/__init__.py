"""Exchange of bytes between ranks through collectives and shared memory, and the store where ranks meet."""
