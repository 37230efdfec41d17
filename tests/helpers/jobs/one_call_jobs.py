"""One call of a model with whole rows, and what it leaves to others and to later ones, for live ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import hf_ring_attn
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny


def of_two_ways() -> str:
    """What a step with a sharded batch is refused with, after a call with whole rows that had no backward."""
    model: Any = tiny("llama", "ring_fp32")
    with hf_ring_attn.whole_rows(model) as rows:
        logits = model(input_ids=tokens(23)["input_ids"]).logits
    assert rows.latest is not None
    try:
        with hf_ring_attn.shard(tokens(23)) as sharded:
            mine = model(**sharded.inputs).logits.flatten(0, 1)
        told, count = sharded.inputs["shift_labels"].flatten(), sharded.inputs["num_items_in_batch"]
        (cross_entropy(mine, told, reduction="sum") / count).backward()
    except hf_ring_attn.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return "" if logits.requires_grad else "no gradient"


def beside_an_attention(by_grad: bool) -> bool:
    """Whether an attention without a model has its gradient, while the batch of a call with whole rows is alive."""
    model: Any = tiny("llama", "ring_fp32")
    with hf_ring_attn.whole_rows(model) as rows:
        logits = model(input_ids=tokens(23)["input_ids"]).logits
    assert rows.latest is not None and logits.requires_grad
    q, k, v = (torch.ones(1, 12, 2, 8, requires_grad=True) for _ in range(3))
    loss = hf_ring_attn.ring_attention(q, k, v).square().sum()
    if by_grad:
        return bool(torch.autograd.grad(loss, v)[0].any())
    loss.backward()
    return v.grad is not None


def of_a_copy() -> tuple[Tensor, Tensor]:
    """A weight's gradient of a model, and of a copy that was made inside, after both were called there."""
    model: Any = tiny("llama", "ring_fp32")
    with hf_ring_attn.whole_rows(model):
        other = copy.deepcopy(model)
        found = model(input_ids=tokens(23)["input_ids"]).logits
        assert other.forward.__self__ is other if hasattr(other.forward, "__self__") else other.forward.args[0] is other
        again = other(input_ids=tokens(23)["input_ids"]).logits
    (found.square().mean() + again.square().mean()).backward()
    return model.lm_head.weight.grad, other.lm_head.weight.grad
