"""The one line at start: what is active, on rank 0."""

from __future__ import annotations

from ...sharding.mask import BIDIRECTIONAL, CAUSAL, Band
from ...traffic import transport_name
from ..context.batch_context import BatchContext
from ..context.mask_functions import SameGroup, parts_of
from ..log import say
from ..losses.head import ChunkedLoss
from ..selfcheck.row import SelfCheckState


def features(context: BatchContext) -> set[str]:
    """The features of a batch's attention beyond one causal sequence, in words."""
    documents = context.facts.documents
    facts = [part for seen in context.kinds for part in parts_of(seen)]
    present = {
        "window": any(isinstance(fact, Band) and fact not in (CAUSAL, BIDIRECTIONAL) for fact in facts),
        "chunks": any(isinstance(fact, SameGroup) and fact.kind == "chunks" for fact in facts),
        "blocks": any(isinstance(fact, SameGroup) and fact.kind == "blocks" for fact in facts),
        "bidirectional": BIDIRECTIONAL in context.kinds,
        "documents": documents is not None and int(documents.max()) > 0,
        f"{context.config.heads_per_gather} heads a gather": bool(context.config.heads_per_gather),
        f"{context.layout.chunks} chunks a rank, balanced by work": bool(context.layout.owners),
    }
    return context.log.features | {name for name, is_there in present.items() if is_there}


def loss_in_words(context: BatchContext) -> str:
    """Says how the loss was computed, and why logits were made although "auto" avoids them where it can."""
    state = context.state(ChunkedLoss)
    if state.losses:
        return "chunked"
    if context.log.fused:
        return "by TRL's fused head"
    if context.whole_head:
        return "of whole rows"
    if context.gathers_logits:
        return "on gathered outputs"
    if not context.facts.has_labels:
        return "not by the model (no labels)"
    return f"sharded ({state.why})" if state.why else "sharded"


def announce(context: BatchContext) -> None:
    """Logs what was active in a sharded batch, once per ring size, kernel and set of features."""
    if not context.log.kernel:
        return
    present = sorted(features(context))
    key = (context.ring.size, context.log.kernel, loss_in_words(context), *present)
    layout, config, log = context.layout, context.config, context.log
    what = f"; {', '.join(present)}" if present else ""
    verdict = context.state(SelfCheckState).verdict
    held = layout.local_length
    shown = f"{held} of {layout.length} tokens a rank"
    if held > layout.length:
        shown = f"{held} of {layout.padded} padded tokens a rank"
    rows = "" if log.rows_a_step is None else f", {log.rows_a_step:,} row{'s' * (log.rows_a_step != 1)} a step"
    checked = f"; self-check {verdict}" if verdict else ""
    if context.ring.size == 1:
        say(f"no ring active; kernel {context.log.kernel}{what}", key)
    else:
        say(
            f"ring of {context.ring.size}: {shown}{rows}, kernel "
            f"{log.kernel}, backward {config.backward} by {transport_name(context.ring, config.traffic)}, "
            f"loss {loss_in_words(context)}{what}{checked}",
            key,
        )
