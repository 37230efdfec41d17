"""A loop that divides a rank's sum by its own count of the whole batch: 1/W of the loss, so it is warned of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from hf_ring_attn.integration.losses.whole_counts import DIVIDED
from tests.helpers.jobs.plain_jobs import told
from tests.integration.losses.test_local_logits import BATCH, EXACT, Ranks, each_loss, logits_alone, logits_of, trained

LABELS, TOKENS = int((BATCH["labels"][:, 1:] != -100).sum()), BATCH["input_ids"].numel()
"""The counts of the whole batch, as one process has them."""
PROMPT = {**BATCH, "labels": BATCH["labels"].index_fill(1, torch.arange(8), -100)}
ANSWERS = int((PROMPT["labels"] != -100).sum())
Of = Callable[[Any, Any], Tensor]
"""A loss of the sum of a rank's tokens, and of the share of the batch."""

BY_THE_WHOLE: dict[str, Of] = {
    "labels": lambda total, _: total / LABELS,
    "tokens": lambda total, _: total / TOKENS,
    "tokens but one of each row": lambda total, _: total / (TOKENS - len(BATCH["input_ids"])),
    "a tensor": lambda total, _: total / torch.tensor(LABELS),
    "a product": lambda total, _: total * (1 / LABELS),
    "in place": lambda total, _: total.div_(LABELS),
    "a count gathered from all ranks": lambda total, _: total / (LABELS * dist.get_world_size()),
    "the same, times the number of ranks": lambda total, _: (
        total * dist.get_world_size() / (LABELS * dist.get_world_size())),
}  # fmt: skip
RIGHT: dict[str, Of] = {
    "times the number of ranks": lambda total, _: total / LABELS * dist.get_world_size(),
    "by a part": lambda total, sharded: total / sharded.inputs["num_items_in_batch"],
    "half of it": lambda total, sharded: 0.5 * (total / sharded.inputs["num_items_in_batch"]),
    "a sum": lambda total, _: total,
}


def warned(batch: Any, loss_of: Any) -> list[str]:
    """What each rank is warned of, of the number that is divided by."""
    return [text for text in told(trained, batch, loss_of, True) if text == DIVIDED.format(2)]


def of_a_sum(of: Of, alone: bool = False) -> list[str]:
    def loss_of(model: Any, sharded: Any) -> Tensor:
        logits = (logits_alone if alone else logits_of)(model, sharded)
        losses, counts = each_loss(logits, sharded.inputs)
        return of((losses * counts).sum(), sharded)

    return warned(BATCH, loss_of)


def by_name(name: str, alone: bool = False) -> list[str]:
    return of_a_sum((BY_THE_WHOLE | RIGHT)[name], alone)


@pytest.mark.parametrize("name", BY_THE_WHOLE)
def test_a_loss_over_a_count_of_the_whole_batch_is_warned_of(ranks: Ranks, name: str) -> None:
    first, other = ranks(2).run(by_name, name, name == "labels")
    assert len(first) == 1 and not other  # the first rank's log has it


@pytest.mark.parametrize("name", RIGHT)
def test_other_numbers_are_not(ranks: Ranks, name: str) -> None:
    assert ranks(2).run(by_name, name) == [[], []]


def exact(name: str) -> list[str]:
    return warned(BATCH, EXACT[name])


def test_losses_that_are_exact_are_not(ranks: Ranks) -> None:
    for name in EXACT:
        assert ranks(2).run(exact, name) == [[], []], name


def each_over_the_whole() -> list[str]:
    """Each token's loss is divided, and of a count of labels that no rank shifted."""

    def loss_of(model: Any, sharded: Any) -> Tensor:
        losses, counts = each_loss(logits_alone(model, sharded), sharded.inputs)
        loss: Tensor = ((losses / ANSWERS) * counts).sum()
        return loss

    return warned(PROMPT, loss_of)


def in_chunks() -> list[str]:
    """No logits are made."""

    def loss_of(model: Any, sharded: Any) -> Tensor:
        logits, targets = logits_alone(model, sharded), sharded.inputs["shift_labels"]
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / LABELS

    return warned(BATCH, loss_of)


def test_a_loss_without_logits_is_seen(ranks: Ranks) -> None:
    assert [len(found) for found in ranks(2).run(in_chunks)] == [1, 0]


def test_tokens_that_are_divided_one_by_one_are_seen(ranks: Ranks) -> None:
    assert [len(found) for found in ranks(2).run(each_over_the_whole)] == [1, 0]


def of_labels_that_one_rank_has() -> list[str]:
    """A mean of all labels of the batch, which are the first rank's."""

    def loss_of(model: Any, sharded: Any) -> Tensor:
        logits, targets = logits_alone(model, sharded).flatten(0, 1), sharded.inputs["shift_labels"].flatten()
        loss: Tensor = cross_entropy(logits, targets) if (targets >= 0).any() else logits.sum() * 0.0
        return loss

    return warned({**BATCH, "labels": BATCH["labels"].index_fill(1, torch.arange(7, 19), -100)}, loss_of)


def test_a_mean_of_labels_that_one_rank_has_is_seen(ranks: Ranks) -> None:
    assert [len(found) for found in ranks(2).run(of_labels_that_one_rank_has)] == [1, 0]
