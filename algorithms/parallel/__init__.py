"""Tensor parallelism: shards of a target, and collectives over its processes."""
