"""A loss of hidden states that only some ranks compute, as where a rank has tokens that the batch marks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from tests.helpers.jobs.plain_jobs import Batch, tokens
from tests.integration.model.test_local_logits import Ranks, assert_same, trained

IDS = tokens(24)["input_ids"]
MARKED: Batch = {"input_ids": IDS, "labels": IDS, "marked": (torch.arange(24) < 4).expand(2, -1).contiguous()}
"""The first rank of two has all marked tokens."""


def beside_marked(model: Any, sharded: Any) -> Tensor:
    inputs = dict(sharded.inputs)
    marked = inputs.pop("marked")
    out = model(**inputs, output_hidden_states=True)
    loss: Tensor = out.loss
    if marked.any():
        states = out.hidden_states[-1][marked]
        loss = loss + (dist.get_world_size() if dist.is_initialized() else 1) * states.square().sum()
    return loss


def ring_step() -> tuple[Tensor, dict[str, Tensor]]:
    loss, gradients = trained(MARKED, beside_marked, in_ring=True)
    return loss, gradients


def test_one_rank_alone_may_have_a_loss_of_hidden_states(ranks: Ranks) -> None:
    """The ranks compared different numbers of losses: they waited for each other forever."""
    want = trained(MARKED, beside_marked, in_ring=False)
    found = ranks(2).run(ring_step)
    assert_same([(want[0], gradients) for _, gradients in found], want, 1e-6)
