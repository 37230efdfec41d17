"""Leaks, bit by bit: a token that is changed changes those that it has to do with, and not one bit of the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_ring_attn.config import RingConfig
from hf_ring_attn.testing import BIDIRECTIONAL, PADDING, Case, Inputs, inputs, packed, sliding
from tests.helpers.checks import Ranks, same_bits
from tests.helpers.oracle import visible
from tests.helpers.rank_functions import Answer, planted_attention, whole

SIZES = (1, 2, 4)
CASES = [
    Case(why="documents", length=48, heads=4, documents=(packed(3, 21, 8, 16),), seed=1),
    Case(
        why="documents that see both ways, other ones in each row",
        batch=2, length=41, band=BIDIRECTIONAL, documents=(packed(5, 30, 6), packed(20, 21)), seed=2,
    ),
    Case(why="a window", length=48, band=sliding(7), seed=3),
    Case(why="a window that sees both ways", length=48, band=(-5, 3), seed=4),
    Case(
        why="padding, and a hole in a document",
        length=40, documents=(((0, 9), (PADDING, 3), (0, 13), (1, 8), (PADDING, 7)),), seed=5,
    ),
    Case(
        why="documents, window, padding, softcap, sinks",
        batch=2, length=43, heads=6, kv_heads=2, band=sliding(6), softcap=2.0, sinks=True,
        documents=(packed(-4, 20, 19), packed(13, 25, -5)), seed=6,
    ),
]  # fmt: skip


def touched(case: Case, row: int, token: int) -> dict[str, Tensor]:
    """[B, S] bool for out, dq, dk and dv: what may change when a token does, by the definition of attention.

    A token that sees it gets another out, so its own gradient and those of all keys that it sees change. And the token
    has another gradient itself, and gives another one to the keys that it sees.
    """
    sees = visible(case, inputs(case)["documents"])
    near = torch.zeros(case.batch, case.length, dtype=torch.bool)
    near[row] = sees[row, :, token]
    near[row, token] = True  # another query and another dout
    keys = (sees & near[:, :, None]).any(1)
    keys[row, token] |= bool(sees[row, token, token])
    queries = near & sees.any(2)
    return {"out": queries, "dq": queries, "dk": keys, "dv": keys}


def changed(case: Case, row: int, token: int, dtype: torch.dtype) -> Inputs:
    x = inputs(case, dtype)
    for name in ("q", "k", "v", "dout"):
        x[name][row, token] = 3 - 2 * x[name][row, token]
    return x


def tokens_to_change(case: Case) -> list[tuple[int, int]]:
    """Tokens at the edges of each run of each row, and one inside."""
    rows = case.documents or (packed(case.length),) * case.batch
    places = []
    for row, runs in enumerate(rows):
        start = 0
        for _, count in runs:
            places += [(row, start), (row, start + count // 2), (row, start + count - 1)]
            start += count
    return sorted(set(places))


def leaks(case: Case, at: tuple[int, int], before: Answer, after: Answer) -> list[str]:
    """What changed that may not, and what did not change that must."""
    found = []
    for name, may in touched(case, *at).items():
        moved = (before[name] != after[name]).flatten(2).any(2)
        if not same_bits(before[name][~may], after[name][~may]):
            found.append(f"{name} of {(moved & ~may).nonzero().tolist()} changed with {at}")
        if name == "out" and not moved[may].all():
            found.append(f"{name} of {(~moved & may).nonzero().tolist()} did not change with {at}")
    return found


def leaks_of_all(
    ranks: Ranks, size: int, case: Case, config: RingConfig, dtype: torch.dtype, defect: str | None = None
) -> list[str]:
    found = []
    before = whole(ranks(size).run(planted_attention, case, config, inputs(case, dtype), defect), case.length)
    for at in tokens_to_change(case):
        given = changed(case, *at, dtype)
        after = whole(ranks(size).run(planted_attention, case, config, given, defect), case.length)
        found += leaks(case, at, before, after)
    return found


@pytest.mark.parametrize("config", [RingConfig(), RingConfig(backward="gather")], ids=lambda config: config.backward)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why)
@pytest.mark.turns
def test_nothing_leaks(ranks: Ranks, case: Case, size: int, config: RingConfig) -> None:
    assert leaks_of_all(ranks, size, case, config, torch.float32) == []
