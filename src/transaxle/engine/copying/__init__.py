"""What targets are made of: transfers out of a catalog, bitcasts, means of replicas, checks of duplicates."""
