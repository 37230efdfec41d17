"""Losses of a sharded row: without logits, and a program's own, compared among ranks."""
