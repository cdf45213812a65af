"""What a refactoring must not change: conversions, loads, saves and refusals, whose results are kept as digests."""
