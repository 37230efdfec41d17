"""The command ``autoload``: "ring_fp32" in programs that do not import this package. Off, unless it is enabled."""
