"""Arguments of a layer's attention that a ring refuses, and why."""

from __future__ import annotations

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
