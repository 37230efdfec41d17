"""Ring attention itself: the op, its backward, kernel choice, and `ring_attention` for people without transformers."""
