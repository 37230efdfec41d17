"""The package's log lines: each once, on the first rank, visible at a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

from ..comm.ring import world_rank

logger = logging.getLogger("hf_ring_attn")
"""The package's logger. Its level is INFO unless a program sets one: the root logger's level does not count.

A line goes to the program's handlers, those of the root logger among them. If none of them takes lines of its level,
it goes to stderr. `logging.getLogger("hf_ring_attn").setLevel(...)` silences lines.
"""
_said: set[object] = set()
"""The keys of lines that were logged."""


class _Stderr(logging.Handler):
    """Writes what no other handler takes."""

    def emit(self, record: logging.LogRecord) -> None:
        if not any(record.levelno >= other.level for other in _handlers() if other is not self):
            sys.stderr.write(f"[hf_ring_attn] {record.getMessage()}\n")


def _handlers() -> Iterator[logging.Handler]:
    """The handlers that a line reaches."""
    at: logging.Logger | None = logger
    while at is not None:
        yield from (handler for handler in at.handlers if not isinstance(handler, logging.NullHandler))
        at = at.parent if at.propagate else None


def _logger() -> logging.Logger:
    logger.disabled = False  # as logging.config leaves every logger that was there before
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())
    return logger


def say(text: str, key: object = None) -> None:
    """Logs a line on the first rank of the job, once per ``key`` (default: the text)."""
    key = (text if key is None else key, "info")
    if key not in _said and world_rank() == 0:
        _said.add(key)
        _logger().info(text)


def warn(text: str, everywhere: bool = True) -> None:
    """Logs a warning once per text, on every process or on the first rank of the job."""
    if (text, "warning") not in _said and (everywhere or world_rank() == 0):
        _said.add((text, "warning"))
        _logger().warning(text)
