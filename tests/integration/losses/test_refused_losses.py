"""A loop's own loss of a rank's tokens, which is refused: shifted or averaged by hand, or of its tokens as a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, nll_loss, pad

import hf_ring_attn
from tests.helpers.jobs.plain_jobs import Batch, attempt
from tests.helpers.models.tiny_models import VOCABULARY, tiny
from tests.integration.losses.test_local_logits import (
    BATCH,
    EVEN,
    WITHOUT_LABELS,
    Loss,
    Negative,
    OwnLoss,
    Ranks,
    each_loss,
    hidden_of,
    logits_alone,
    logits_of,
    shifted,
    summed,
)

OF_ONE_RANK: Batch = {**BATCH, "labels": BATCH["labels"].index_fill(1, torch.arange(7, 19), -100)}
"""All labels are the first rank's, of two."""
MASKED: Batch = {**BATCH, "labels": BATCH["labels"].index_fill(1, torch.tensor([6, 7, 12, 13, 17, 18, 19]), -100)}
"""No label where chunks of a ring of two begin."""
REFUSED: dict[str, tuple[Batch, Loss]] = {
    "PooledOnOneRank: the last token": (BATCH, lambda model, sharded: hidden_of(model, sharded)[:, -1].square().sum()),
    "PooledOnOneRank: a token of each row": (
        BATCH, lambda model, sharded: hidden_of(model, sharded)[torch.arange(2), torch.tensor([3, 5])].square().sum()),
    "PooledOnOneRank: a mean": (EVEN, lambda model, sharded: hidden_of(model, sharded).mean(1).square().sum()),
    "PooledOnOneRank: the largest": (BATCH, lambda model, sharded: hidden_of(model, sharded).max(1).values.sum()),
    "PooledOnOneRank: a norm": (BATCH, lambda model, sharded: hidden_of(model, sharded).norm()),
    "PooledOnOneRank: log-probabilities of rows": (
        BATCH, lambda model, sharded: each_loss(
            logits_of(model, sharded), sharded.inputs)[0].unflatten(0, (2, -1)).sum(1).mul(0.01).sigmoid().sum()),
    "ShiftedByHand": (BATCH, lambda model, sharded: shifted(logits_of(model, sharded), sharded.inputs["labels"])),
    "ShiftedByHand: in float32": (
        BATCH, lambda model, sharded: shifted(logits_of(model, sharded).float(), sharded.inputs["labels"])),
    "ShiftedByHand: without labels": (
        BATCH, lambda model, sharded: shifted(logits_alone(model, sharded).float(), sharded.inputs["labels"])),
    "ShiftedByHand: of ids": (
        WITHOUT_LABELS,
        lambda model, sharded: shifted(logits_of(model, sharded).float(), sharded.inputs["input_ids"])),
    "ShiftedByHand: log-probabilities": (
        WITHOUT_LABELS, lambda model, sharded: -torch.log_softmax(logits_of(model, sharded), -1)[:, 1:].mean()),
    "ShiftedByHand: of a tuple": (
        BATCH, lambda model, sharded: shifted(
            model(**{**sharded.inputs, "labels": None}, return_dict=False)[0], sharded.inputs["labels"])),
    "ShiftedByHand: hidden states": (
        BATCH, lambda model, sharded: shifted(
            hidden_of(model, sharded) @ model.lm_head.weight.T, sharded.inputs["labels"])),
    "ShiftedByHand: hidden states before the head": (
        BATCH, lambda model, sharded: cross_entropy(
            model.lm_head(hidden_of(model, sharded)[:, :-1]).flatten(0, 1), sharded.inputs["labels"][:, 1:].flatten())),
    "ShiftedByHand: up to a number": (
        BATCH, lambda model, sharded: up_to_a_number(logits_of(model, sharded), sharded.inputs["labels"])),
    "ShiftedByHand: row by row": (
        BATCH, lambda model, sharded: torch.stack([
            cross_entropy(row[:-1], labels[1:]) for row, labels in zip(
                logits_of(model, sharded), sharded.inputs["labels"], strict=True)]).sum()),
    "ShiftedByHand: narrow": (
        BATCH, lambda model, sharded: narrowed(logits_of(model, sharded), sharded.inputs["labels"])),
    "ShiftedByHand: narrow, by two tokens": (
        BATCH, lambda model, sharded: narrowed(logits_of(model, sharded), sharded.inputs["labels"], 2)),
    "ShiftedByHand: token by token": (
        BATCH, lambda model, sharded: cross_entropy(
            torch.stack(logits_of(model, sharded).unbind(1)[:-1], 1).flatten(0, 1),
            sharded.inputs["labels"][:, 1:].flatten(), reduction="sum")),
    "ShiftedByHand: labels": (
        BATCH, lambda model, sharded: summed(
            logits_of(model, sharded), {**sharded.inputs, "shift_labels": padded(sharded.inputs["labels"])})),
    "ShiftedByHand: ids whose log-probabilities are gathered": (
        BATCH, lambda model, sharded: -log_softmax(logits_of(model, sharded), -1).gather(
            -1, padded(sharded.inputs["input_ids"]).clamp(min=0)[..., None]).sum()),
    "ShiftedByHand: ids in the place of labels": (
        WITHOUT_LABELS, lambda model, sharded: cross_entropy(
            logits_of(model, sharded).flatten(0, 1), padded(sharded.inputs["input_ids"]).flatten(), reduction="sum")),
    "ShiftedByHand: ids where labels are masked": (
        MASKED, lambda model, sharded: summed(
            logits_alone(model, sharded), {**sharded.inputs, "shift_labels": padded(sharded.inputs["input_ids"])})),
    "ShiftedByHand: slices for ids where labels are masked": (
        MASKED, lambda model, sharded: cross_entropy(
            logits_alone(model, sharded)[:, :-2].flatten(0, 1), sharded.inputs["input_ids"][:, 2:].flatten(),
            reduction="sum")),
    "ShiftedByHand: slices of hidden states where labels are masked": (
        MASKED, lambda model, sharded: hidden_of(model, sharded)[:, :-2].square().sum()),
    "MeanOfOneRank: a product over its count": (
        BATCH, lambda model, sharded: product_over(*each_loss(logits_of(model, sharded), sharded.inputs))),
    "MeanOfOneRank: times 1 / its count": (
        BATCH, lambda model, sharded: times_one_over(*each_loss(logits_of(model, sharded), sharded.inputs))),
    "MeanOfOneRank: times 1 / its count, each token": (
        BATCH, lambda model, sharded: over_its_count(*each_loss(logits_of(model, sharded), sharded.inputs))),
    "MeanOfOneRank: by a normalized mask": (
        BATCH, lambda model, sharded: by_weights(*each_loss(logits_of(model, sharded), sharded.inputs), 1)),
    "MeanOfOneRank: by normalized weights": (
        BATCH, lambda model, sharded: by_weights(
            *each_loss(logits_of(model, sharded), sharded.inputs), sharded.inputs["input_ids"].flatten() % 2 + 1)),
    "MeanOfOneRank: by a mask that is normalized in each row": (
        BATCH, lambda model, sharded: by_row(*each_loss(logits_of(model, sharded), sharded.inputs))),
    "MeanOfOneRank: by classes": (
        EVEN, lambda model, sharded: cross_entropy(
            logits_of(model, sharded).flatten(0, 1), sharded.inputs["input_ids"].flatten(),
            weight=torch.arange(1.0, VOCABULARY + 1))),
    "MeanOfOneRank: compiled": (
        BATCH, lambda model, sharded: torch.compile(cross_entropy, backend="aot_eager")(
            logits_alone(model, sharded).flatten(0, 1), sharded.inputs["shift_labels"].flatten())),
    "MeanOfOneRank: after a function of its own": (
        BATCH, lambda model, sharded: cross_entropy(
            -own_negative(logits_alone(model, sharded)).flatten(0, 1), sharded.inputs["shift_labels"].flatten())),
    "MeanOfOneRank: in a function of its own": (
        BATCH, lambda model, sharded: own_mean(
            logits_alone(model, sharded).flatten(0, 1), sharded.inputs["shift_labels"].flatten())),
    "MeanOfOneRank: a gradient by hand": (
        BATCH, lambda model, sharded: by_hand(logits_alone(model, sharded), sharded.inputs["shift_labels"])),
    "PooledOnOneRank: a mean of selected tokens": (
        BATCH, lambda model, sharded: hidden_of(model, sharded)[sharded.inputs["shift_labels"] != -100]
        .mean(0).square().sum()),
    "PooledOnOneRank: a product with a mask": (
        BATCH, lambda model, sharded: torch.einsum(
            "btd,bt->bd", hidden_of(model, sharded), (sharded.inputs["shift_labels"] != -100).float()).square().sum()),
    "PooledOnOneRank: the hardest tokens": (
        BATCH, lambda model, sharded: each_loss(
            logits_of(model, sharded), sharded.inputs)[0].topk(5).values.sum()),
    "PooledOnOneRank: tokens above a quantile": (
        BATCH, lambda model, sharded: above_a_quantile(each_loss(logits_of(model, sharded), sharded.inputs)[0])),
    "PooledOnOneRank: advantages by a rank's mean": (
        BATCH, lambda model, sharded: by_advantage(*each_loss(logits_of(model, sharded), sharded.inputs))),
    "PooledOnOneRank: a cumulative sum": (
        BATCH, lambda model, sharded: each_loss(
            logits_of(model, sharded), sharded.inputs)[0].unflatten(0, (2, -1)).cumsum(1).square().sum()),
    "PooledOnOneRank: tokens beside each other": (
        EVEN, lambda model, sharded: hidden_of(model, sharded).diff(dim=1).square().sum()),
    "PooledOnOneRank: tokens against tokens": (
        BATCH, lambda model, sharded: similar(hidden_of(model, sharded)[sharded.inputs["shift_labels"] != -100])),
    "ShiftedByHand: shifted labels, once more": (
        BATCH, lambda model, sharded: summed(
            logits_of(model, sharded), {**sharded.inputs, "shift_labels": padded(sharded.inputs["shift_labels"])})),
    "ShiftedByHand: labels, by two": (
        BATCH, lambda model, sharded: summed(
            logits_of(model, sharded), {**sharded.inputs, "shift_labels": padded(padded(sharded.inputs["labels"]))})),
    "ShiftedByHand: by two tokens": (
        BATCH, lambda model, sharded: cross_entropy(
            logits_of(model, sharded)[:, :-2].flatten(0, 1), sharded.inputs["labels"][:, 2:].flatten(),
            reduction="sum")),
    "ShiftedByHand: the first tokens left out": (
        BATCH, lambda model, sharded: summed(
            logits_of(model, sharded)[:, 3:], {**sharded.inputs, "shift_labels": sharded.inputs["shift_labels"][:, 3:]}
        )),
    "MeanOfOneRank: beside a penalty": (
        BATCH, lambda model, sharded: over_a_mask(*each_loss(logits_of(model, sharded), sharded.inputs))
        + 1e-3 * logits_of(model, sharded)[sharded.inputs["shift_labels"] != -100].logsumexp(-1).square().mean()),
    "MeanOfOneRank": (
        BATCH, lambda model, sharded: cross_entropy(
            logits_of(model, sharded).flatten(0, 1), sharded.inputs["shift_labels"].flatten())),
    "MeanOfOneRank: where a rank has no label": (
        OF_ONE_RANK, lambda model, sharded: cross_entropy(
            logits_of(model, sharded).flatten(0, 1), sharded.inputs["shift_labels"].flatten())),
    "MeanOfOneRank: a module's": (
        BATCH, lambda model, sharded: nn.CrossEntropyLoss()(
            logits_alone(model, sharded).transpose(1, 2), sharded.inputs["shift_labels"])),
    "MeanOfOneRank: of labels that were copied": (
        BATCH, lambda model, sharded: nll_loss(
            log_softmax(logits_alone(model, sharded).flatten(0, 1), -1), sharded.inputs["shift_labels"].flatten() + 0)),
    "MeanOfOneRank: of hidden states": (
        BATCH, lambda model, sharded: cross_entropy(
            model.lm_head(hidden_of(model, sharded)).flatten(0, 1), sharded.inputs["shift_labels"].flatten())),
    "MeanOfOneRank: over a sum of a mask": (
        BATCH, lambda model, sharded: over_a_mask(*each_loss(logits_of(model, sharded), sharded.inputs))),
    "MeanOfOneRank: over a number": (
        BATCH, lambda model, sharded: over_a_number(*each_loss(logits_of(model, sharded), sharded.inputs))),
    "PooledOnOneRank: a mean of each row": (
        BATCH, lambda model, sharded: of_each_row(*each_loss(logits_of(model, sharded), sharded.inputs))),
    "MeanOfOneRank: of those with a label": (
        BATCH, lambda model, sharded: selected(*each_loss(logits_of(model, sharded), sharded.inputs)).mean()),
    "MeanOfOneRank: of those without nan": (
        BATCH, lambda model, sharded: without(*each_loss(logits_of(model, sharded), sharded.inputs)).nanmean()),
    "MeanOfOneRank: of logits without nan": (
        EVEN, lambda model, sharded: without(
            logits_of(model, sharded).square(), (sharded.inputs["input_ids"] % 3 > 0)[..., None]).nanmean()),
    "MeanOfOneRank: a divergence": (
        BATCH, lambda model, sharded: kl_div(
            log_softmax(logits_of(model, sharded)[sharded.inputs["shift_labels"] != -100], -1),
            torch.tensor(0.1), reduction="batchmean")),
    "MeanOfOneRank: with the ring's padding": (
        BATCH, lambda model, sharded: each_loss(logits_of(model, sharded), sharded.inputs)[0].mean()),
    "PaddingInLoss": (
        WITHOUT_LABELS, lambda model, sharded: logits_of(model, sharded).logsumexp(-1).square().sum()),
    "PaddingInLoss: of hidden states": (
        BATCH, lambda model, sharded: hidden_of(model, sharded).square().sum()),
}  # fmt: skip


def up_to_a_number(logits: Any, labels: Tensor) -> Tensor:
    return cross_entropy(logits[:, : labels.shape[1] - 1].flatten(0, 1), labels[:, 1:].flatten())


def narrowed(logits: Any, labels: Tensor, by: int = 1) -> Tensor:
    given = logits.narrow(1, 0, labels.shape[1] - by)
    return cross_entropy(given.flatten(0, 1), labels[:, by:].flatten(), reduction="sum")


def padded(labels: Tensor) -> Tensor:
    return pad(labels[:, 1:], (0, 1), value=-100)


def product_over(losses: Any, counts: Tensor) -> Tensor:
    loss: Tensor = torch.dot(losses, counts.to(losses.dtype)) / counts.sum()
    return loss


def times_one_over(losses: Any, counts: Tensor) -> Tensor:
    loss: Tensor = (losses * counts).sum() * (1 / counts.sum())
    return loss


def over_its_count(losses: Any, counts: Tensor) -> Tensor:
    loss: Tensor = (losses * (1 / counts.sum())).sum()
    return loss


def by_weights(losses: Any, counts: Tensor, weights: Any) -> Tensor:
    weights = counts * weights
    loss: Tensor = (losses * (weights / weights.sum())).sum()
    return loss


def by_row(losses: Any, counts: Tensor) -> Tensor:
    counts = counts.unflatten(0, (2, -1))
    loss: Tensor = (losses.unflatten(0, (2, -1)) * (counts / counts.sum(1, keepdim=True))).sum()
    return loss


def own_negative(x: Any) -> Any:
    return Negative.apply(x)  # type: ignore[no-untyped-call]


def own_mean(logits: Any, targets: Tensor) -> Any:
    return OwnLoss.apply(logits, targets, "mean")  # type: ignore[no-untyped-call]


def by_hand(logits: Any, targets: Tensor) -> Tensor:
    """A loss of nothing, after the program has given its logits a gradient."""
    counts = (targets != -100)[..., None]
    gradient = logits.detach().softmax(-1) - torch.nn.functional.one_hot(targets.clamp(min=0), logits.shape[-1])
    logits.backward(gradient=gradient * counts / counts.sum())
    return torch.zeros((), requires_grad=True) * 0


def above_a_quantile(losses: Any) -> Tensor:
    loss: Tensor = (losses * (losses.detach() > losses.detach().quantile(0.7))).sum()
    return loss


def by_advantage(losses: Any, counts: Tensor) -> Tensor:
    with torch.no_grad():
        advantages = losses - losses.mean()
    loss: Tensor = (losses * advantages * counts).sum()
    return loss


def similar(states: Any) -> Tensor:
    loss: Tensor = (states @ states.transpose(0, 1)).square().sum()
    return loss


def over_a_mask(losses: Any, counts: Tensor) -> Tensor:
    loss: Tensor = (losses * counts).sum() / counts.sum().clamp(min=1)
    return loss


def over_a_number(losses: Any, counts: Tensor) -> Tensor:
    loss: Tensor = losses.sum() / int(counts.sum())
    return loss


def of_each_row(losses: Any, counts: Tensor) -> Tensor:
    loss: Tensor = (losses.unflatten(0, (2, -1)).sum(1) / counts.unflatten(0, (2, -1)).sum(1)).mean()
    return loss


def selected(losses: Any, counts: Tensor) -> Any:
    return losses[counts]


def without(losses: Any, counts: Tensor) -> Any:
    return losses.masked_fill(~counts, torch.nan)


def balanced(router_logits: Any) -> Tensor:
    """An auxiliary loss of experts, which takes a rank's tokens for the batch's."""
    chances = router_logits.softmax(-1)
    chosen = nn.functional.one_hot(chances.topk(2, -1).indices, chances.shape[-1]).sum(1).to(chances.dtype)
    loss: Tensor = (chosen.mean(0) * chances.mean(0)).sum()
    return loss


def of_experts(balances: bool) -> None:
    model = tiny("mixtral", "ring_fp32")
    sharded = hf_ring_attn.shard(BATCH)
    with sharded:
        out = model(**sharded.inputs, output_router_logits=True)
    aux = sum(map(balanced, out.router_logits)) if balances else out.aux_loss
    (out.loss + 0.1 * aux).backward()
    sharded.reduce_gradients(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_experts_are_balanced_on_whole_rows(ranks: Ranks) -> None:
    for error in ranks(2).run(attempt, of_experts, True):
        assert error is not None and error[0] == "PooledOnOneRank"
    assert ranks(2).run(attempt, of_experts, False) == [None] * 2


def refused(why: str, trains: str = "") -> None:
    batch, loss_of = REFUSED[why]
    model = tiny("llama", "ring_fp32")
    for name, weight in model.named_parameters():
        weight.requires_grad_(trains in name)
    before = [weight.detach().clone() for weight in model.parameters()]
    sharded = hf_ring_attn.shard(batch)
    try:
        with sharded:
            loss = loss_of(model, sharded)
        loss.backward()
        sharded.reduce_gradients(model)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    finally:
        assert sharded.ring.size == 1 or all(map(torch.equal, before, model.parameters()))


@pytest.mark.turns(4)
@pytest.mark.parametrize("why", REFUSED)
def test_a_loss_by_hand_is_refused_on_every_rank(ranks: Ranks, why: str) -> None:
    """Shifted on each rank, labels of chunks' last tokens were lost; a mean counted ranks with few labels too much."""
    for error in ranks(2).run(attempt, refused, why):
        assert error is not None
        assert error[0] == why.partition(":")[0]


@pytest.mark.parametrize("why", ["MeanOfOneRank", "MeanOfOneRank: of hidden states", "ShiftedByHand: labels"])
def test_it_is_refused_where_only_the_head_trains(ranks: Ranks, why: str) -> None:
    for error in ranks(2).run(attempt, refused, why, "lm_head"):
        assert error is not None and error[0] == why.partition(":")[0]


def test_one_process_may_shift_and_average(ranks: Ranks) -> None:
    for why in REFUSED:
        assert ranks(1).run(attempt, refused, why) == [None]
