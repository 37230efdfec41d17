"""Kinds of models: what a ring supports exactly, and what it prepares in a model."""
