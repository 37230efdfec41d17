"""Probes for leaks in a ring: what a token must not see must not change its logits, nor get a gradient from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..testing import relative_error
from .runs import Batch, logits_in_ring, sharded_unchecked, spans


def leaks(model: nn.Module, batch: Batch, packed: Batch, stops: Sequence[int]) -> dict[str, float]:
    """By probe, the relative change of what must not change; 0 where nothing leaks. The same on every rank.

    Args:
        batch: one document. packed: several of them, which end at ``stops``.
    """
    length = batch["input_ids"].shape[1]
    place = 2 * length // 3
    first, (start, stop) = logits_in_ring(model, batch), list(spans(stops))[1]
    later = logits_in_ring(model, _changed(batch, place, length))
    documents, other = logits_in_ring(model, packed), logits_in_ring(model, _changed(packed, start, stop))
    return {
        "a later token changes earlier logits": relative_error(later[:, :place], first[:, :place]),
        "a document changes the one before it": relative_error(other[:, :start], documents[:, :start]),
        "a document changes the one after it": relative_error(other[:, stop:], documents[:, stop:]),
        "a token's loss has a gradient outside of its past": _gradient_outside(
            model, packed, start, (start + stop) // 2
        ),
    }


def _changed(batch: Batch, start: int, stop: int) -> Batch:
    """Tokens from ``start`` to ``stop`` reversed and moved by one, so that most of them change."""
    ids = batch["input_ids"].clone()
    ids[:, start:stop] = ids[:, start:stop].flip(1).roll(1, 1)
    return {**batch, "input_ids": ids}


def _gradient_outside(model: Any, batch: Batch, start: int, token: int) -> float:
    """Norm of one token's gradient by the embeddings of other documents and of later tokens, over that by its past."""
    sharded = sharded_unchecked(batch)
    embeddings: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0]

    with sharded, model.get_input_embeddings().register_forward_hook(keep):
        out = model(**sharded.inputs)
    sharded.gather(out.logits)[0, token].float().square().sum().backward()
    model.zero_grad()
    mine = embeddings[0].grad
    assert mine is not None, "the loss depends on no embedding"
    gradient = sharded.gather(mine.detach())[0].float().norm(dim=-1)
    past = torch.zeros(len(gradient), dtype=torch.bool, device=gradient.device)
    past[start : token + 1] = True
    return float(gradient[~past].norm() / gradient[past].norm())
