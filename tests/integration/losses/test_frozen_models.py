"""A loop that trains a head on a frozen model's hidden states: right, or refused, as if the model trained, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hf_ring_attn
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.models.tiny_models import VOCABULARY, tiny

Loss = Callable[[nn.Module, Tensor, Tensor, Any], Tensor]
"""Of a head, hidden states [B, T, H], labels [B, T] and what `shard` gave; None in one process."""
ROWS, CLASSES, STEPS = torch.tensor([1, 2]), 5, 2
WIDTH = 32
"""Of the tiny model's hidden states."""


def tokens(length: int) -> tuple[Tensor, Tensor]:
    """Two rows, with a class for most tokens."""
    ids = torch.randint(3, VOCABULARY, (2, length))
    labels = torch.randint(CLASSES, (2, length))
    labels[0, :15] = -100
    return ids, labels


def each(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def of_rows(head: nn.Module, pooled: Tensor) -> Tensor:
    return cross_entropy(head(pooled), ROWS)


def distance(head: nn.Module, hidden: Tensor) -> Tensor:
    found: Tensor = head(hidden)[..., 0] - hidden[..., 0]
    return found


RIGHT: dict[str, Loss] = {
    "the last token": lambda head, h, _y, ring: of_rows(head, h[:, -1] if ring is None else ring.last_token(h)),
    "a mean": lambda head, h, _y, ring: of_rows(head, h.mean(1) if ring is None else ring.row_mean(h)),
    "whole rows": lambda head, h, _y, ring: of_rows(head, (h if ring is None else ring.gather(h)).amax(1)),
    "each token": lambda head, h, y, ring: (
        each(head, h, y) / (73 if ring is None else ring.inputs["num_items_in_batch"])),
    "each token, of as many on each rank": lambda head, h, _y, _ring: distance(head, h).square().mean(),
}  # fmt: skip
REFUSED: dict[str, Loss] = {
    "PooledOnOneRank: the last token": lambda head, h, _y, _ring: of_rows(head, h[:, -1]),
    "PooledOnOneRank: the first token": lambda head, h, _y, _ring: of_rows(head, h[:, 0]),
    "PooledOnOneRank: a mean": lambda head, h, _y, _ring: of_rows(head, h.mean(1)),
    "PooledOnOneRank: the largest": lambda head, h, _y, _ring: of_rows(head, h.amax(1)),
    "PooledOnOneRank: row by row": lambda head, h, _y, _ring: of_rows(head, torch.stack([x.mean(0) for x in h])),
    "MeanOfOneRank: each token": lambda head, h, y, _ring: each(head, h, y) / (y != -100).sum(),
    "MeanOfOneRank: selected tokens": lambda head, h, y, _ring: cross_entropy(head(h[y != -100]), y[y != -100]),
    "MeanOfOneRank: over a statistic": lambda head, h, _y, _ring: (
        distance(head, h).square().sum() / (h - h.mean((0, 1))).square().sum()),
}  # fmt: skip


def learnt(name: str, without_gradients: bool, length: int = 44, trains: bool = False) -> list[Tensor] | str:
    """The loss of each step and the trained weights, or what was raised."""
    alone, loss_of = torch.distributed.get_world_size() == 1, (RIGHT | REFUSED)[name]
    model = tiny("llama", "sdpa" if alone else "ring_fp32").model.requires_grad_(trains)
    torch.manual_seed(0)
    head = nn.Linear(model.config.hidden_size, CLASSES)
    optimizer, losses = torch.optim.SGD(head.parameters(), 0.5), []
    try:
        for _ in range(STEPS):
            ids, labels = tokens(length)
            sharded = (
                None if alone else hf_ring_attn.shard({"input_ids": ids, "labels": labels, "shift_labels": labels})
            )
            inputs: dict[str, Any] = {"input_ids": ids} if sharded is None else sharded.inputs
            given = {key: x for key, x in inputs.items() if "label" not in key and key != "num_items_in_batch"}
            with torch.set_grad_enabled(not without_gradients):
                hidden = run(model, sharded, given)
            loss = loss_of(head, hidden, labels if sharded is None else inputs["shift_labels"], sharded)
            loss.backward()
            if sharded is not None:
                sharded.reduce_gradients(head)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach() if sharded is None else sharded.reduce(loss))
    except hf_ring_attn.errors.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return [torch.stack(losses), head.weight.detach(), head.bias.detach()]


def run(model: Any, sharded: Any, inputs: dict[str, Any]) -> Tensor:
    if sharded is None:
        return last_hidden_state(model, inputs)
    with sharded:
        return last_hidden_state(model, inputs)


def last_hidden_state(model: Any, inputs: dict[str, Any]) -> Tensor:
    found: Tensor = model(**inputs).last_hidden_state
    return found


@pytest.mark.parametrize("without_gradients", [True, False], ids=["no_grad", "frozen"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_head_learns_what_it_learns_in_one_process(ranks: Ranks, name: str, without_gradients: bool) -> None:
    (want,) = ranks(1).run(learnt, name, without_gradients)
    for got in ranks(2).run(learnt, name, without_gradients):
        assert not isinstance(got, str), got
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("without_gradients", [True, False], ids=["no_grad", "frozen"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_of_a_ranks_tokens_is_refused(ranks: Ranks, name: str, without_gradients: bool) -> None:
    for said in ranks(2).run(learnt, name, without_gradients):
        assert isinstance(said, str) and said.startswith(name.partition(":")[0]), said


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("name", [name for name in REFUSED if "row by row" not in name])
def test_a_rank_may_have_as_many_tokens_as_states_are_wide(ranks: Ranks, name: str, trains: bool) -> None:
    """8,192 tokens on two ranks, and a width of 4,096: a rank's last token was taken for all of its tokens."""
    for said in ranks(2).run(learnt, name, False, 2 * WIDTH, trains):
        assert isinstance(said, str) and said.startswith(name.partition(":")[0]), said


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "each token"])
def test_that_refuses_no_right_loss(ranks: Ranks, name: str) -> None:
    (want,) = ranks(1).run(learnt, name, False, 2 * WIDTH)
    for got in ranks(2).run(learnt, name, False, 2 * WIDTH):
        assert not isinstance(got, str), got
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
