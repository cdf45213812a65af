"""Flat buckets of Megatron's distributed optimizer (`dp_reshardable`): which parameter lies where in them."""
