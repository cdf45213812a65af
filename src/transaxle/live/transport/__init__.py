"""Bytes between ranks: collectives, shared memory, rendezvous."""
