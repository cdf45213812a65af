"""The last import of a process that others are forked from: what was imported before belongs to them all.

A full garbage collection writes into each object that it looks at, and so makes a copy of its page: some 90 MB for each
of the forked processes, if it looks at all of torch and transformers.
"""

import gc

gc.collect()
gc.freeze()
