"""Notes of each attention that a layer computed: with its batch, its graph and the end of its backward."""

from __future__ import annotations

from torch import Tensor, nn

from ...sharding.layout import Layout
from ...traffic.gathered_kv import is_recomputing
from ..context import batch_context
from ..context.attended_layers import AttendedLayers
from ..context.graph_notes import note_attention
from ..patching.compiler import uncompiled
from .backward_end import BackwardEnd


@uncompiled("hf_ring_attn hooks the backward of an attention")
def note_output(out: Tensor, layer: nn.Module, layout: Layout) -> None:
    """Notes an attention with its batch and in its graph, and lets its backward average gradients at its end, if need
    be."""
    context = batch_context.current()
    if context is None or context.ring.size == 1 or is_recomputing():  # a reentrant checkpoint's is inside another
        return
    if layout.world_size > 1:  # not a tower's, which some ranks may leave out
        context.state(AttendedLayers).note(layer)
    if not out.requires_grad:
        return
    note_attention(out, context)
    end = context.state(BackwardEnd)
    if end.parts:  # none under FSDP2
        out.register_hook(lambda _gradient: end.expect())
