"""Weights beside the model in a loop: exact if the program averages their gradients, else refused at the next batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

import hf_ring_attn
from hf_ring_attn.integration.gradients import beside_weights
from hf_ring_attn.testing import relative_error
from tests.helpers.jobs.plain_jobs import attempt, tokens
from tests.helpers.live_ranks import LiveRanks
from tests.helpers.models.tiny_models import SIZES, VOCABULARY, build

Ranks = Callable[[int], LiveRanks]
BATCHES = [tokens(23, seed=seed) for seed in range(3)]


def trained(kind: str, averages: bool, steps: int = 3) -> list[Tensor]:
    """A head's weight after each step. ``kind``: "ddp", "bare" or "whole rows". ``averages``: the head's gradient."""
    in_ring = dist.is_initialized()
    inner: Any = build("LlamaModel", "ring_fp32" if in_ring else "sdpa", **SIZES)
    model: Any = DistributedDataParallel(inner) if in_ring and kind == "ddp" else inner
    torch.manual_seed(0)
    head = nn.Linear(inner.config.hidden_size, VOCABULARY)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    found = []
    for batch in BATCHES[:steps]:
        optimizer.zero_grad()
        _backward(model, head, batch, kind, averages)
        optimizer.step()
        found.append(head.weight.detach().clone())
    return found


def _backward(model: Any, head: nn.Module, batch: Any, kind: str, averages: bool) -> None:
    in_ring, targets = dist.is_initialized(), pad(batch["labels"][:, 1:], (0, 1), value=-100)
    if in_ring and kind == "whole rows":
        with hf_ring_attn.whole_rows(model) as rows:
            states = model(input_ids=batch["input_ids"]).last_hidden_state
        cross_entropy(head(states).flatten(0, 1), targets.flatten()).backward()
        rows.reduce_gradients(model)
        return
    whole = {"shift_labels": targets, "num_items_in_batch": (targets != -100).sum()}
    sharded: Any = hf_ring_attn.shard(batch) if in_ring else SimpleNamespace(inputs=whole)
    names = ("input_ids", "position_ids", "attention_mask")
    given = {name: sharded.inputs[name] for name in names if name in sharded.inputs} if in_ring else {
        "input_ids": batch["input_ids"]}  # fmt: skip
    with sharded if in_ring else nullcontext():
        states = model(**given).last_hidden_state
    total = cross_entropy(head(states).flatten(0, 1), sharded.inputs["shift_labels"].flatten(), reduction="sum")
    (total / sharded.inputs["num_items_in_batch"]).backward()
    if in_ring and averages:
        sharded.reduce_gradients(head)
    if in_ring and kind == "bare":
        sharded.reduce_gradients(model)


@pytest.mark.parametrize("kind", ["ddp", "bare", "whole rows"])
def test_a_head_whose_gradient_is_averaged_is_that_of_one_process(ranks: Ranks, kind: str) -> None:
    """From whole rows every rank has the same gradient, so none need be averaged."""
    want = trained(kind, True)
    for found in ranks(2).run(trained, kind, True):
        assert all(relative_error(got, weight) < 1e-5 for got, weight in zip(found, want, strict=True))


@pytest.mark.parametrize("kind", ["ddp", "bare"])
def test_a_head_whose_gradient_is_not_is_refused(ranks: Ranks, kind: str) -> None:
    for error in ranks(2).run(attempt, trained, kind, False):
        assert error is not None and error[0] == "RanksDiffer"
        assert "the same gradient of weights beside the model (its norm), but got" in error[1]
    assert ranks(2).run(attempt, forgotten, kind) == [None, None]


def forgotten(kind: str) -> None:
    """What the last batch left is not that of another program."""
    beside_weights.forget()
    trained(kind, True, steps=1)


def test_weights_of_another_process_than_all_are_not_compared(ranks: Ranks) -> None:
    """Only one rank has an optimizer of its own: nobody waits for another."""
    assert ranks(2).run(attempt, one_rank_alone) == [None, None]


def one_rank_alone() -> None:
    model: Any = build("LlamaForCausalLM", "ring_fp32", **SIZES)
    own = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([own], lr=0.1)
    for batch in BATCHES:
        sharded = hf_ring_attn.shard(batch)
        with sharded:
            loss = model(**sharded.inputs).loss
        loss.backward()
        sharded.reduce_gradients(model)
        if dist.get_rank() == 0:
            own.sum().backward()
            optimizer.step()
