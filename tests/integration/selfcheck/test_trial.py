"""The trial step of programs that checkpoint by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import hf_ring_attn
from tests.helpers.checks import Ranks
from tests.helpers.jobs.plain_jobs import tokens
from tests.helpers.models.tiny_models import tiny


def checkpointed(attention: str | None) -> Any:
    """A model whose layers are checkpointed by the program, reentrantly."""
    model: Any = tiny("llama", attention).double().train()
    for layer in model.model.layers:
        forward = layer.forward

        def call(hidden: Any, forward: Any = forward, **given: Any) -> Any:
            return checkpoint(partial(forward, **given), hidden, use_reentrant=True)

        layer.forward = call
    return model


def gradients() -> list[torch.Tensor | None]:
    model = checkpointed("ring_fp32")
    sharded = hf_ring_attn.shard(tokens(23))
    with sharded:
        loss = model(**sharded.inputs).loss
    loss.backward()
    sharded.reduce_gradients(model)
    return [x.grad for x in model.parameters()]


def test_a_programs_own_reentrant_checkpoints_are_tried(ranks: Ranks) -> None:
    """The self-check could not run them: their backward refuses autograd.grad."""
    model = checkpointed(None)
    model(**tokens(23), use_cache=False).loss.backward()
    for got in ranks(2).run(gradients):
        for x, weight in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(x, weight.grad, rtol=1e-5, atol=1e-7)
