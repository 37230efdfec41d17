"""A test of the tests: each planted defect must turn a check red, by far, and the same check is green without it.

The checks are those of test_ring.py, test_leaks.py and the loss of a sharded batch; the defects are in defects.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import hf_ring_attn
from hf_ring_attn.config import RingConfig
from hf_ring_attn.integration.context import whole_batch
from hf_ring_attn.testing import BIDIRECTIONAL, Case, packed, sliding
from tests.attention.test_leaks import leaks_of_all
from tests.attention.test_score_mod import GATHER, errors_of
from tests.helpers import layer_ranks, row_ranks
from tests.helpers.checks import EXACT, UNROUNDED, Ranks, distance, float64_errors, narrow, worst
from tests.helpers.defects import DEFECTS, planted

Check = Callable[[Ranks, int, str | None], float]

CAUSAL = Case(why="causal", length=48, heads=4, seed=1)
ODD = Case(why="bidirectional, with padding", length=45, band=BIDIRECTIONAL, seed=2)
WINDOW = Case(why="a window", length=48, band=sliding(7), seed=3)
DOCUMENTS = Case(why="documents", length=48, documents=(packed(5, 30, 13),), seed=4)
WIDE = Case(why="wide heads", length=256, heads=4, head_dim=64, value_dim=64, seed=5)


@dataclass(frozen=True)
class Exactness:
    """The worst relative error in float64, in multiples of its bound."""

    case: Case
    backward: str = "ring"

    def __call__(self, ranks: Ranks, world_size: int, defect: str | None) -> float:
        config = RingConfig(backward="ring" if self.backward == "ring" else "gather")
        (errors,) = float64_errors(ranks, world_size, self.case, [config], defect)
        return worst(errors) / EXACT


def unrounded_sums(ranks: Ranks, world_size: int, defect: str | None) -> float:
    """The worst relative error of float32 sums from bfloat16, in multiples of its bound."""
    return worst(narrow(ranks, world_size, WIDE, torch.bfloat16, RingConfig(), defect).errors) / UNROUNDED


@dataclass(frozen=True)
class Leaks:
    """How many times a change was seen where it must not be."""

    case: Case

    def __call__(self, ranks: Ranks, world_size: int, defect: str | None) -> float:
        return len(leaks_of_all(ranks, world_size, self.case, RingConfig(), torch.float32, defect))


@dataclass(frozen=True)
class Scored:
    """The worst relative error with a score_mod of score_mods.py in float64, in multiples of its bound."""

    mod: str
    backward: str = "ring"

    def __call__(self, ranks: Ranks, world_size: int, defect: str | None) -> float:
        config = RingConfig() if self.backward == "ring" else GATHER
        return max(map(worst, errors_of(ranks, world_size, CAUSAL, [self.mod], [config], defect).values())) / EXACT


TOKENS, WORDS = 29, 11


def tokens_and_labels() -> tuple[Tensor, Tensor, Tensor]:
    """A table of logits by word; two rows of words, of which the second begins with a prompt without labels."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(WORDS, WORDS, generator=generator, dtype=torch.float64)
    words = torch.randint(WORDS, (2, TOKENS), generator=generator)
    labels = words.clone()
    labels[1, :20] = whole_batch.IGNORED
    return table.requires_grad_(), words, labels


def sharded_loss(defect: str | None) -> dict[str, Tensor]:
    """The loss of the row and its gradient from a rank's share: a language model of one table."""
    table, words, labels = tokens_and_labels()
    with planted(defect):
        sharded = hf_ring_attn.shard({"input_ids": words, "labels": labels})
    logits, targets = table[sharded.inputs["input_ids"]], sharded.inputs["shift_labels"]
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=whole_batch.IGNORED, reduction="sum")
    loss = total / sharded.inputs["num_items_in_batch"]
    (gradient,) = torch.autograd.grad(loss, table)
    with sharded:
        return {"loss": sharded.reduce(loss), "gradient": sharded.ring.mean(gradient)}


def loss_of_the_row(ranks: Ranks, world_size: int, defect: str | None) -> float:
    """The worst relative error of the loss and its gradient, in multiples of the bound in float64."""
    table, words, labels = tokens_and_labels()
    loss = cross_entropy(table[words[:, :-1]].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=whole_batch.IGNORED)
    (gradient,) = torch.autograd.grad(loss, table)
    shares = ranks(world_size).run(sharded_loss, defect)
    return max(worst(distance(share, {"loss": loss.detach(), "gradient": gradient})) for share in shares) / EXACT


@dataclass(frozen=True)
class AlongTheRow:
    """The worst relative error of a convolution and a recurrence in float64, in multiples of its bound."""

    why: str

    def __call__(self, ranks: Ranks, world_size: int, defect: str | None) -> float:
        (row,) = (row for row in layer_ranks.ROWS if row.why == self.why)
        shares = [share for (share,) in ranks(world_size).run(layer_ranks.in_a_ring, [row], defect)]
        return worst(distance(layer_ranks.joined(shares, row), layer_ranks.alone(row))) / EXACT


def preference_of_rows(ranks: Ranks, world_size: int, defect: str | None) -> float:
    """The worst relative error of a preference loss and its gradient, in multiples of the bound in float64."""
    shares = ranks(world_size).run(row_ranks.preference_in_a_ring, TOKENS, 0, defect)
    return max(worst(distance(share, row_ranks.preference_alone(TOKENS))) for share in shares) / EXACT


PLANTED: list[tuple[str, Check, int, float]] = [
    # defect, check, ring size, by how many times it must at least break the bound
    ("bf16_hop", unrounded_sums, 2, 100),
    ("bf16_hop", unrounded_sums, 8, 100),
    ("unflipped_half", Exactness(CAUSAL), 2, 1e9),
    ("unflipped_half", Exactness(CAUSAL, "gather"), 4, 1e9),
    ("contiguous_chunks", Exactness(CAUSAL), 2, 1e9),
    ("contiguous_chunks", Exactness(CAUSAL, "gather"), 4, 1e9),
    ("ring_turned", Exactness(CAUSAL), 4, 1e9),
    ("ring_turned", Exactness(ODD), 8, 1e9),
    ("keys_stay", Exactness(CAUSAL), 2, 1e9),
    ("keys_stay", Exactness(ODD), 4, 1e9),
    ("window_off_by_one", Exactness(WINDOW), 1, 1e9),
    ("window_off_by_one", Exactness(WINDOW), 4, 1e9),
    ("window_off_by_one", Leaks(WINDOW), 2, 1),
    ("local_positions", Exactness(CAUSAL), 4, 1e9),
    ("local_positions", Exactness(WINDOW), 4, 1e9),
    ("reused_buffer", Exactness(CAUSAL), 2, 1e9),
    ("reused_buffer", Exactness(CAUSAL), 4, 1e9),
    ("dropped_hop", Exactness(CAUSAL), 2, 1e9),
    ("documents_forgotten", Exactness(DOCUMENTS), 2, 1e9),
    ("documents_forgotten", Exactness(ODD), 2, 1e9),
    ("documents_forgotten", Leaks(DOCUMENTS), 4, 1),
    ("local_indices", Scored("relative_bias"), 2, 1e9),
    ("local_indices", Scored("relative_bias", "gather"), 4, 1e9),
    ("local_heads", Scored("alibi", "gather"), 2, 1e9),
    ("captured_overwritten", Scored("few_buckets"), 1, 1e9),
    ("captured_overwritten", Scored("alibi"), 4, 1e9),
    ("labels_shifted_late", loss_of_the_row, 2, 1e9),
    ("labels_shifted_late", loss_of_the_row, 4, 1e9),
    ("runs_by_themselves", AlongTheRow("a length that fits"), 2, 1e9),
    ("runs_by_themselves", AlongTheRow("documents in tiny chunks"), 4, 1e9),
    ("states_stay", AlongTheRow("a length that fits"), 2, 1e9),
    ("states_leak", AlongTheRow("documents, others in each row"), 1, 1e9),
    ("states_leak", AlongTheRow("documents, others in each row"), 4, 1e9),
    ("shares_overwritten", AlongTheRow("heads that share all"), 2, 1e9),
    ("row_sum_times_ranks", preference_of_rows, 2, 1e9),
    ("row_gradient_of_one_rank", preference_of_rows, 2, 1e9),
    ("chunks_in_order_of_ranks", preference_of_rows, 2, 1e9),
    ("mask_shifted_late", preference_of_rows, 2, 1e9),
]


def test_every_defect_is_planted() -> None:
    assert {defect for defect, *_ in PLANTED} == set(DEFECTS)


@pytest.mark.parametrize(
    ("defect", "check", "world_size", "at_least"), PLANTED, ids=[f"{defect}-{size}" for defect, _, size, _ in PLANTED]
)
@pytest.mark.turns
def test_a_planted_defect_is_seen(ranks: Ranks, defect: str, check: Check, world_size: int, at_least: float) -> None:
    broken = check(ranks, world_size, defect)
    assert broken >= at_least, f"{defect} breaks the bound {broken:.3g} times only"
    assert check(ranks, world_size, None) < 1, "green without it, on the same ranks"
