"""The attention and mask functions that are registered as "ring_fp32"."""
