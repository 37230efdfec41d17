"""Sharding a batch: the public `shard`, the comparison among ranks, the line at start."""
