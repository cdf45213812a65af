"""vLLM in an environment of its own: what its models hold after `load_weights`, on every rank."""
