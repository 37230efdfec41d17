"""Layers beside attention, and differentiable collectives over a row."""
