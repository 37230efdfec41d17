"""The package's log lines: each once, on the first rank, visible at a terminal."""

from __future__ import annotations

import logging
import sys

from ..comm.ring import world_rank

logger = logging.getLogger("hf_ring_attn")
_said: set[object] = set()
"""The keys of lines that were logged."""


def _logger() -> logging.Logger:
    """Lines are for people at a terminal: without any logging set up, they go to stderr."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[hf_ring_attn] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def say(text: str, key: object = None) -> None:
    """Logs a line on the first rank of the job, once per ``key`` (default: the text)."""
    key = (text if key is None else key, "info")
    if key not in _said and world_rank() == 0:
        _said.add(key)
        _logger().info(text)


def warn(text: str) -> None:
    """Logs a warning once per text and process."""
    if (text, "warning") not in _said:
        _said.add((text, "warning"))
        _logger().warning(text)
