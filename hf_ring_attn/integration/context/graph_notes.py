"""Notes on the graph of a loss: of which batch an attention, or an output of whole rows, is.

A graph outlives the batch's context, and a process may hold graphs of several batches and of none.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from .batch_context import BatchContext

_ATTENTION = "hf_ring_attn: how the batch of this attention was called"
_OUTPUT = "hf_ring_attn: the batch of this output of whole rows"


class WholeCall:
    """A state of a batch: the model that a loop called with its whole rows; None: the batch was not sharded so."""

    model: weakref.ref[nn.Module] | None = None


def note_attention(out: Tensor, context: BatchContext) -> None:
    """Notes an attention of a model. Its graph keeps no batch: a batch may hold tensors of the same graph."""
    made_by: Any = out.grad_fn
    made_by.metadata[_ATTENTION] = context.state(WholeCall)


def note_output(whole: Tensor, context: BatchContext) -> None:
    """Notes an output of a call with whole rows in a loop."""
    made_by: Any = whole.grad_fn
    if made_by is not None and context.state(WholeCall).model is not None:
        made_by.metadata[_OUTPUT] = context


def call_of_attention(node: Any) -> WholeCall | None:
    """The call that a function of a graph was an attention of; None: it is no model's attention."""
    call: WholeCall | None = node.metadata.get(_ATTENTION)
    return call


def batch_of_output(node: Any) -> BatchContext | None:
    """The batch whose output, in a loop, a function of a graph made; None: it made none."""
    context: BatchContext | None = node.metadata.get(_OUTPUT)
    return context
