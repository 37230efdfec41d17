"""The state of a sharded batch and of a model, and queries on both."""
