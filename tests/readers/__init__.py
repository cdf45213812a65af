"""`check`, held against readers that are run in full."""
