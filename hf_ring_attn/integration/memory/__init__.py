"""Memory of a step: checkpoints, saved attention, activations on the host, MLPs in chunks."""
