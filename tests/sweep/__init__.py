"""The sweep: every language-model class of transformers, built tiny, in a ring against eager attention alone."""
