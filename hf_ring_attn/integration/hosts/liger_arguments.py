"""`use_liger_kernel=True` in a ring: Liger's norms, RoPE and gated MLPs, and the ring's own loss."""

from __future__ import annotations

from typing import Any

from ... import errors
from ..log import say

LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
"""Liger's losses, by their names in `liger_kernel_config`."""


def leave_loss_to_ring(arguments: Any) -> None:
    """Turns off Liger's losses in TrainingArguments, before the trainer applies Liger; idempotent.

    Raises:
        UnsupportedOption: one of them was asked for by name.
    """
    if not arguments.use_liger_kernel:
        return
    chosen = arguments.liger_kernel_config or {}
    for name in LOSSES:
        if chosen.get(name):
            why = "a ring computes the loss of all ranks' tokens itself, in chunks without all logits: leave it out"
            raise errors.UnsupportedOption(f"liger_kernel_config={{{name!r}: True}}", why)
    arguments.liger_kernel_config = {**chosen, **dict.fromkeys(LOSSES, False)}
    say("use_liger_kernel=True: Liger's kernels in the layers; the loss is the ring's own, in place of Liger's")
