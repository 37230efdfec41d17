"""The one line at start: what is active, on rank 0."""

from __future__ import annotations

import logging
import sys

from ..comm import world_rank
from ..mask import BIDIRECTIONAL, CAUSAL, Band
from ..traffic import chosen
from .active import Scope
from .overlays import Alike, parts_of

logger = logging.getLogger("hf_ring_attn")
_said: set[tuple[object, ...]] = set()


def _logger() -> logging.Logger:
    """Lines are for people at a terminal: without any logging set up, they go to stderr."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[hf_ring_attn] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def say(text: str, level: int = logging.INFO) -> None:
    """Logs a line on the first rank of the job, once per text."""
    if (text,) not in _said and world_rank() == 0:
        _said.add((text,))
        _logger().log(level, text)


def warn(text: str) -> None:
    """Logs a warning once per text and process."""
    if (text, "warning") not in _said:
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
