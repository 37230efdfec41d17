"""Attention that a checkpoint saves: the contexts of its forward and of its recompute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_ring_attn import ring_attention
from hf_ring_attn.attention.saved_results import SavedResults


@pytest.mark.parametrize("more", ["another attention", "more heads"])
def test_a_recompute_with_other_attentions_is_named(more: str) -> None:
    """One more was an IndexError."""
    runs: list[int] = []

    def layer(q: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 2:
            q = ring_attention(q, q, q) if more == "another attention" else torch.cat([q, q], 2)
        return ring_attention(q, q, q).sin()

    q = torch.randn(1, 8, 2, 4, requires_grad=True)
    out = checkpoint(layer, q, use_reentrant=False, context_fn=lambda: SavedResults().contexts())
    assert isinstance(out, Tensor)
    with pytest.raises(AssertionError, match="a recompute calls the same attentions as the forward"):
        out.sum().backward()
