"""A loss of hidden states that only some ranks compute, as where a rank has tokens that the batch marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from tests.helpers.jobs.plain_jobs import Batch, tokens
from tests.integration.losses.test_local_logits import Ranks, assert_same, trained

IDS = tokens(24)["input_ids"]
AT = torch.arange(24).expand(2, -1)
MARKED: Batch = {"input_ids": IDS, "labels": IDS, "marked": AT < 4, "few": (AT == 1) | (AT == 8)}
"""The first rank of two has all marked tokens, and each has one of the few in each row."""


def inputs_and_marks(sharded: Any) -> tuple[dict[str, Any], Tensor, Tensor]:
    inputs = dict(sharded.inputs)
    return inputs, inputs.pop("marked").bool(), inputs.pop("few").bool()


def beside_marked(model: Any, sharded: Any) -> Tensor:
    inputs, marked, _ = inputs_and_marks(sharded)
    out = model(**inputs, output_hidden_states=True)
    loss: Tensor = out.loss
    if marked.any():
        states = out.hidden_states[-1][marked]
        loss = loss + (dist.get_world_size() if dist.is_initialized() else 1) * states.square().sum()
    return loss


def of_a_product(model: Any, sharded: Any) -> Tensor:
    """Values of few tokens by a product with a vector: no more numbers than the batch has rows, but no sums."""
    inputs, _, few = inputs_and_marks(sharded)
    out = model(**{**inputs, "labels": None}, output_hidden_states=True)
    values = out.hidden_states[-1][few] @ model.lm_head.weight[3]
    loss: Tensor = (dist.get_world_size() if dist.is_initialized() else 1) * (values - 1).square().sum()
    return loss


LOSSES = {"beside marked tokens": beside_marked, "of a product": of_a_product}


def ring_step(loss_of: str) -> tuple[Tensor, dict[str, Tensor]]:
    loss, gradients = trained(MARKED, LOSSES[loss_of], in_ring=True)
    return loss, gradients


@pytest.mark.parametrize("loss_of", LOSSES)
def test_one_rank_alone_may_have_a_loss_of_hidden_states(ranks: Ranks, loss_of: str) -> None:
    """The ranks compared different numbers of losses, and waited for each other; the product was taken for a mean."""
    want = trained(MARKED, LOSSES[loss_of], in_ring=False)
    found = ranks(2).run(ring_step, loss_of)
    assert_same([(want[0], gradients) for _, gradients in found], want, 1e-6)
