"""Who hands items of work to workers: this process, a pool, a Ray cluster."""
