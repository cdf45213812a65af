"""The storage of checkpoints (folders, object stores, hubs): ranged reads, and atomic writes of whole checkpoints."""
