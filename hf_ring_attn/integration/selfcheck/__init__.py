"""The self-check: a short row through the model, whole and sharded, before step one."""
