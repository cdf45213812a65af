"""Plugs: where other programs take weights in or give them out, by interfaces of their own."""
