"""Ring attention: the op, its backward, kernel choice, and `ring_attention` for use without transformers."""
