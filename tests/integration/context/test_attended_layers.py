"""A program that skips layers: right if ranks skip the same ones, else refused before an optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_ring_attn
from hf_ring_attn.integration.context import attended_layers
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.plain_jobs import attempt, gradients_of, tokens
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.models.tiny_models import tiny
from tests.integration.losses.test_local_logits import logits_alone, summed

Ranks = Callable[[int], LiveRanks]
BATCH = tokens(23)
OF_MODEL, OF_OWN, OF_WHOLE = "the model's loss", "its own loss", "a loss of whole rows"


def skips(layer: nn.Module, skipped: Callable[[], bool]) -> None:
    own = layer.forward

    def forward(hidden: Tensor, *args: Any, **given: Any) -> Any:
        return hidden if skipped() else own(hidden, *args, **given)

    layer.forward = forward


@mock.patch.object(attended_layers, "compiled_here", new=bool)  # an earlier test's code may be compiled
def trained(loss_of: str, by_rank: bool) -> dict[str, Tensor]:
    """Gradients of the second batch, in which each rank skips a layer; of the first, the self-check's, none is skipped.

    Args:
        by_rank: another one on each rank.
    """
    in_ring = dist.is_initialized()
    model = tiny("llama", "ring_fp32" if in_ring else None, num_hidden_layers=3)
    out: list[int] = []
    for number, layer in enumerate(model.model.layers):
        skips(layer, partial(out.__contains__, number))
    for chosen in ([], [1 + dist.get_rank() if by_rank else 1]):
        out[:] = chosen
        model.zero_grad()
        before = [weight.detach().clone() for weight in model.parameters()]
        _backward(model, loss_of, in_ring)
        try:
            torch.optim.SGD(model.parameters(), lr=0.0 if not chosen else 1.0).step()
        except hf_ring_attn.RingAttentionError:
            assert all(map(torch.equal, before, model.parameters()))
            raise
    return gradients_of(model)


def _backward(model: Any, loss_of: str, in_ring: bool) -> None:
    if not in_ring:
        model(**BATCH, use_cache=False).loss.backward()
    elif loss_of == OF_WHOLE:
        with hf_ring_attn.whole_rows(model) as rows:
            logits = model(input_ids=BATCH["input_ids"]).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), BATCH["labels"][:, 1:].flatten()).backward()
        rows.reduce_gradients(model)
    else:
        sharded = hf_ring_attn.shard(BATCH)
        with sharded:
            of_own = loss_of == OF_OWN
            loss = summed(logits_alone(model, sharded), sharded.inputs) if of_own else model(**sharded.inputs).loss
        loss.backward()
        sharded.reduce_gradients(model)


@pytest.mark.parametrize("loss_of", [OF_MODEL, OF_OWN, OF_WHOLE])
def test_layers_that_all_ranks_skip_are_exact(ranks: Ranks, loss_of: str) -> None:
    want = trained(loss_of, by_rank=False)
    for found in ranks(2).run(trained, loss_of, False):
        for name, gradient in want.items():
            assert relative_error(found[name], gradient) < 1e-5, name


@pytest.mark.parametrize("loss_of", [OF_MODEL, OF_OWN, OF_WHOLE])
def test_ranks_that_skip_other_layers_are_refused(ranks: Ranks, loss_of: str) -> None:
    """Each attention found a partner, in another layer: nothing failed, and the numbers were wrong."""
    for error in ranks(2).run(attempt, trained, loss_of, True):
        assert error is not None and error[0] == "RanksDiffer"
        assert "the same layers that attend, but got rank 0: [0, 2], rank 1: [0, 1]." in error[1]
