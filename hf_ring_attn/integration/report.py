"""The one line at start: what is active, on rank 0."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

from ..comm import world_rank
from ..mask import BIDIRECTIONAL, CAUSAL, Band
from ..traffic import chosen
from .active import Scope
from .overlays import Alike, parts_of

logger = logging.getLogger("hf_ring_attn")
"""The package's logger. Its level is INFO unless a program sets one: the root logger's level does not count.

A line goes to the program's handlers, those of the root logger among them. If none of them takes lines of its level,
it goes to stderr. `logging.getLogger("hf_ring_attn").setLevel(...)` silences lines.
"""
_said: set[tuple[object, ...]] = set()


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


def say(text: str) -> None:
    """Logs a line on the first rank of the job, once per text."""
    if (text,) not in _said and world_rank() == 0:
        _said.add((text,))
        _logger().info(text)


def warn(text: str, everywhere: bool = True) -> None:
    """Logs a warning once per text, on every process or on the first rank of the job."""
    if (text, "warning") not in _said and (everywhere or world_rank() == 0):
        _said.add((text, "warning"))
        _logger().warning(text)


def features(scope: Scope) -> set[str]:
    """What a batch's attention had beyond one causal sequence, in words."""
    documents = scope.documents
    facts = [part for seen in scope.kinds for part in parts_of(seen)]
    present = {
        "window": any(isinstance(fact, Band) and fact not in (CAUSAL, BIDIRECTIONAL) for fact in facts),
        "chunks": any(isinstance(fact, Alike) and fact.kind == "chunks" for fact in facts),
        "blocks": any(isinstance(fact, Alike) and fact.kind == "blocks" for fact in facts),
        "bidirectional": BIDIRECTIONAL in scope.kinds,
        "documents": documents is not None and int(documents.max()) > 0,
        f"{scope.layout.chunks} chunks a rank, dealt by their work": bool(scope.layout.owners),
    }
    return scope.features | {name for name, is_there in present.items() if is_there}


def announce(scope: Scope) -> None:
    """Says what was active in a sharded batch, once per ring size, kernel and set of features."""
    if not scope.kernel:
        return
    present = sorted(features(scope))
    key = (scope.ring.size, scope.kernel, *present)
    if key in _said:
        return
    _said.add(key)
    layout, config = scope.layout, scope.config
    what = f"; {', '.join(present)}" if present else ""
    checked = f"; self-check {scope.self_check}" if scope.self_check else ""
    if scope.ring.size == 1:
        say(f"no ring active; kernel {scope.kernel}{what}")
    else:
        say(
            f"ring of {scope.ring.size}: {layout.local_length} of {layout.length} tokens a rank, kernel "
            f"{scope.kernel}, backward {config.backward} by {chosen(scope.ring, config.traffic)}, loss {config.loss}"
            f"{what}{checked}"
        )
