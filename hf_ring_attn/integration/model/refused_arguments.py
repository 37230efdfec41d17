"""Arguments of a layer's attention that a ring refuses, and why."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...sharding.mask import Band

NO_RING = "Train this model without a ring, with attn_implementation='sdpa' or its own"
NO_DROPOUT = "it is not exact in a ring; set it to 0.0 in the model's config (attention_dropout, attn_pdrop)"
REFUSED_ARGUMENTS = {
    "position_bias": f"a bias of S x S scores built from local lengths (T5) is not supported. {NO_RING}",
    "attn_bias": "an additive bias is not supported. Compute it by a function of positions, and pass that as score_mod",
    "block_indices": f"sparse attention over chosen blocks is not supported. {NO_RING}",
    "head_mask": "masking of heads is not supported. Leave it out",
    "output_attentions": "attention weights never exist in a ring, so a model cannot return them. Leave it out of the "
    "call, and set output_attentions=False in the model's config",
}
OF_SCORES = {"position_bias", "attn_bias", "block_indices"}
"""Those that change scores. A text model's attention with one runs on whole rows (`whole_attention`)."""
WITHOUT_BATCH = (
    "with no sharded batch ring_fp32 computes plain attention, which differs. Use the model's own there: "
    "model.set_attn_implementation('sdpa'), or 'eager' if it has no sdpa, and 'ring_fp32' again to train"
)
CAUSAL_OR_NOT = (
    "its mask is causal, but transformers' sdpa drops a causal mask, and then attends both ways: which of the two is "
    "meant is not known. Set use_bidirectional_attention=False in the model's config, or give it what its mask is made "
    "of (token_type_ids)"
)


def is_causal_or_not(module: nn.Module, seen: Any, is_causal: bool | None = None) -> bool:
    """Returns True for attention that is not causal, with a causal mask. ``is_causal``: of its call, if given there."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return not causal and isinstance(seen, Band) and seen.lo == 0
