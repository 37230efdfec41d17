"""Collectives of a ring. Knows no mask and no model."""
