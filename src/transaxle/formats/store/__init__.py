"""Where the bytes of checkpoints are: folders, services and hubs; read in ranges, written whole, and committed."""
