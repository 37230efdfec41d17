"""The one line at start: what is active, on rank 0."""

from __future__ import annotations

from ...sharding.mask import BIDIRECTIONAL, CAUSAL, Band
from ...traffic import chosen
from ..context.batch_context import Scope
from ..context.mask_functions import SameGroup, parts_of
from ..log import say
from ..selfcheck.row import SelfCheckState


def features(scope: Scope) -> set[str]:
    """What a batch's attention had beyond one causal sequence, in words."""
    documents = scope.documents
    facts = [part for seen in scope.kinds for part in parts_of(seen)]
    present = {
        "window": any(isinstance(fact, Band) and fact not in (CAUSAL, BIDIRECTIONAL) for fact in facts),
        "chunks": any(isinstance(fact, SameGroup) and fact.kind == "chunks" for fact in facts),
        "blocks": any(isinstance(fact, SameGroup) and fact.kind == "blocks" for fact in facts),
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
    layout, config = scope.layout, scope.config
    what = f"; {', '.join(present)}" if present else ""
    verdict = scope.state(SelfCheckState).verdict
    checked = f"; self-check {verdict}" if verdict else ""
    if scope.ring.size == 1:
        say(f"no ring active; kernel {scope.kernel}{what}", key)
    else:
        say(
            f"ring of {scope.ring.size}: {layout.local_length} of {layout.length} tokens a rank, kernel "
            f"{scope.kernel}, backward {config.backward} by {chosen(scope.ring, config.traffic)}, loss {config.loss}"
            f"{what}{checked}",
            key,
        )
