"""Plan, then execute: plans are data, execution is dumb."""
