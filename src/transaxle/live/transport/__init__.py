"""Exchange of bytes between ranks: collectives, shared memory, rendezvous."""
