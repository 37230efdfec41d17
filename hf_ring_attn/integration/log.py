"""The package's log lines: once each in a trainer, on the first rank, visible at a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..comm.ring import world_rank

logger = logging.getLogger("hf_ring_attn")
"""The package's logger. Its level is INFO unless a program sets one.

Lines go to the program's handlers, the root logger's too, or to stderr if no handler accepts their level.
"""
_said: set[tuple[object, str]] = set()
"""Keys of the lines logged so far, and texts of the warnings."""


class _Stderr(logging.Handler):
    """Writes lines that no other handler accepts to stderr."""

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
    logger.disabled = False  # logging.config disables existing loggers
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())
    return logger


_quiet = 0
"""How many `quiet` contexts are open."""


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, `say` says nothing, and may say it afterwards; warnings are logged."""
    global _quiet
    _quiet += 1
    try:
        yield
    finally:
        _quiet -= 1


def say_again() -> None:
    """A run begins in this process: `say` says its lines again. A warning stays said."""
    _said.difference_update([key for key in _said if key[1] == "info"])


def say(text: str, key: object = None) -> None:
    """Logs a line on the first rank of the job, once per ``key`` (default: the text) until `say_again`."""
    line = (text if key is None else key, "info")
    if not _quiet and line not in _said and world_rank() == 0:
        _said.add(line)
        _logger().info(text)


def warn(text: str, everywhere: bool = True) -> None:
    """Logs a warning once per text, on every process or on the first rank of the job."""
    if (text, "warning") not in _said and (everywhere or world_rank() == 0):
        _said.add((text, "warning"))
        _logger().warning(text)
