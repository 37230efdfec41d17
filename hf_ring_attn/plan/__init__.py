"""The command ``plan``: memory and seconds of a training step, from a model's config alone."""
