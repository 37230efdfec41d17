"""Losses that average each document of a packed row: right by counts of whole rows, refused by those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, softplus

import hf_ring_attn
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.plain_jobs import Batch, attempt, gradients_of, tokens
from tests.helpers.models.tiny_models import tiny

MOST = 6
"""Documents of a batch."""
LENGTHS = {"both rows": ((7, 9, 8), (11, 13)), "padded": ((7, 9, 7), (11, 12)), "one row": ((7, 9, 8),)}
Sums = Callable[[Any, Any, Tensor], Any]


def packed(lengths: tuple[tuple[int, ...], ...]) -> Batch:
    """Rows of documents, with a column of each token's document."""
    batch = tokens(sum(lengths[0]), rows=len(lengths))
    rows = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    positions, labels = torch.stack(rows), batch["input_ids"].masked_fill(torch.stack(rows) == 0, -100)
    starts = (positions == 0).flatten().long()
    return {**batch, "labels": labels, "position_ids": positions, "document": (starts.cumsum(0) - 1).view_as(positions)}


def zeros(losses: Any) -> Tensor:
    return torch.zeros(MOST, dtype=losses.dtype)


def added(losses: Any, where: Tensor, counts: Tensor) -> Any:
    return (zeros(losses).index_add(0, where, losses) / counts).sum()


def added_in_place(losses: Any, where: Tensor, counts: Tensor) -> Any:
    sums = zeros(losses)
    sums.scatter_add_(0, where, losses)
    return (sums / counts).sum()


def added_in_chunks(losses: Any, where: Tensor, counts: Tensor) -> Any:
    sums = zeros(losses)
    for some, places in zip(losses.split(5), where.split(5), strict=True):
        sums = sums.scatter_add(0, places, some)
    return (sums / counts).sum()


def multiplied(losses: Any, where: Tensor, counts: Tensor) -> Any:
    return ((losses @ one_hot(where, MOST).to(losses.dtype)) / counts).sum()


def each_token(losses: Any, where: Tensor, counts: Tensor) -> Any:
    return (losses / counts[where]).sum()


def masked(losses: Any, where: Tensor, counts: Tensor) -> Any:
    return sum((losses * (where == number)).sum() / counts[number] for number in range(MOST))


def selected(losses: Any, where: Tensor, counts: Tensor) -> Any:
    return sum(losses[where == number].sum() / counts[number] for number in where.unique().tolist())


SUMS: dict[str, Sums] = {
    f.__name__: f for f in (added, added_in_place, added_in_chunks, multiplied, each_token, masked, selected)
}


def loss_of(sums: str, counted: str, model: Any, sharded: Any) -> Any:
    """The mean of each document, and then of all. ``counted``: on whole rows, or by each rank."""
    inputs = dict(sharded.inputs)
    where, targets = inputs.pop("document").flatten(), inputs["shift_labels"].flatten()
    logits = model(**{**inputs, "labels": None}).logits.flatten(0, 1)
    counts = torch.zeros(MOST, dtype=logits.dtype).index_add(0, where, (targets != -100).to(logits.dtype))
    if sharded.ring.size > 1 and counted == "whole":
        dist.all_reduce(counts)
    if sums == "means of logits":
        each = [cross_entropy(logits[where == number], targets[where == number]) for number in where.unique().tolist()]
        return torch.stack(each).sum()
    losses = cross_entropy(logits, targets, reduction="none")
    if sums == "not linear":
        return softplus(zeros(losses).index_add(0, where, losses)).sum()
    return SUMS[sums](losses, where, counts.clamp(min=1)) * sharded.ring.size


def gradients(sums: str, counted: str, rows: str) -> dict[str, Tensor]:
    model = tiny("llama", "ring_fp32").double()
    sharded = hf_ring_attn.shard(packed(LENGTHS[rows]))
    with sharded:
        loss = loss_of(sums, counted, model, sharded)
    loss.backward()
    sharded.reduce_gradients(model)
    found = gradients_of(model)
    torch.optim.SGD(model.parameters(), lr=0.0).step()  # which the ranks refuse, if any
    return found


@pytest.mark.turns(4)
@pytest.mark.parametrize("sums", SUMS)
def test_counts_of_whole_rows_give_the_gradients_of_one_process(ranks: Ranks, sums: str) -> None:
    for rows in LENGTHS:
        (whole,) = ranks(1).run(gradients, sums, "whole", rows)
        for got in ranks(2).run(gradients, sums, "whole", rows):
            for name, gradient in whole.items():
                torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.turns(4)
@pytest.mark.parametrize("sums", [*SUMS, "means of logits", "not linear"])
def test_counts_of_a_rank_are_refused(ranks: Ranks, sums: str) -> None:
    """Sums by index, and weights of each token, were not seen: the gradient was wrong by half of its norm, silently."""
    for rows in LENGTHS:
        for error in ranks(2).run(attempt, gradients, sums, "own", rows):
            assert error is not None and error[0] in ("MeanOfOneRank", "PooledOnOneRank")
