"""A model's own loss function of whole rows, whichever it is: it gets their logits, and their labels as they are."""

from __future__ import annotations

from typing import Any

from ...layers.collectives import gather_sequence
from ..context import batch_context
from ..patching.compiler import uncompiled
from .local_logits import held


@uncompiled("hf_ring_attn gathers the logits of whole rows")
def of_whole_rows(*args: Any, **given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a loss function, with logits [B, S, V] in place of a rank's if the batch gathers logits."""
    context = batch_context.current()
    if context is None or not context.gathers_logits:
        return args, given
    logits = held(args[0] if args else given["logits"])
    if logits.shape[:2] != context.local_shape:
        return args, given
    whole = gather_sequence(logits, context.ring, context.layout)
    return ((whole, *args[1:]), given) if args else ((), {**given, "logits": whole})
