"""Heads in ring passes, or gathered, one group after the other, since the sums of all of them would be large."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.config import RingConfig
from hf_ring_attn.kernels.reference import Reference
from hf_ring_attn.sharding import plan
from hf_ring_attn.testing import relative_error
from hf_ring_attn.traffic import Messages, head_groups
from tests.helpers.checks import EXACT, Ranks
from tests.helpers.rank_functions import held


def apart() -> list[tuple[bool, list[int]]]:
    """For three kinds of attention in float64: whether heads in ring passes one after the other have the answer of
    those in one pass, and how many key heads each pass had."""
    generator = torch.Generator().manual_seed(6)
    mine = held(50, dist.get_rank(), dist.get_world_size())
    shapes = ((10, 8), (5, 8), (5, 6), (10, 6))
    q, k, v, dout = (torch.randn(2, 50, *shape, generator=generator).double()[:, mine] for shape in shapes)
    sinks, bias = (torch.randn(10, generator=generator).double() for _ in range(2))
    ids = torch.arange(50) // 20

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + leaves[-1][h] * (i - j)

    found, ring_pass = [], Messages.ring_pass
    for more in ({}, {"documents": ids, "softcap": 3.0}, {"score_mod": mod}):
        answers: list[tuple[Tensor, ...]] = []
        passes: list[int] = []

        def counted(transport: Messages, k: Tensor, *args: Any, passes: list[int] = passes) -> Any:
            passes.append(k.shape[2])
            return ring_pass(transport, k, *args)

        for most in (head_groups.SUMS, 1):
            leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks, bias)]
            used = leaves if "score_mod" in more else leaves[:4]
            out = ring_attention(*leaves[:3], sinks=leaves[3], config=RingConfig(), **more)
            with (
                mock.patch.multiple(head_groups, SUMS=most, QUERIES=1, SCORES=1),
                mock.patch.object(Messages, "ring_pass", counted),
            ):
                answers.append((out, *torch.autograd.grad(out, used, dout)))
        same = all(relative_error(x, y) < EXACT for x, y in zip(*answers, strict=True))
        found.append((same, passes))
    return found


def test_heads_in_several_ring_passes_have_the_same_gradients(ranks: Ranks) -> None:
    for found in ranks(3).run(apart):
        assert found == [(True, [5, 3, 2])] * 3


def accumulators(heads_per_gather: int | None, options: dict[str, Any]) -> list[tuple[int, int]]:
    """Of each accumulator of dq that a backward makes: its heads, and how many made before it are in memory."""
    generator = torch.Generator().manual_seed(6)
    mine = held(400, dist.get_rank(), dist.get_world_size())
    q, k, v = (torch.randn(1, 400, heads, 8, generator=generator)[:, mine].requires_grad_() for heads in (8, 4, 4))
    made: list[weakref.ref[Any]] = []
    found: list[tuple[int, int]] = []
    new = Reference.new_gradient

    def noted(kernel: Reference, chunk: Tensor, place: Any = None) -> Tensor:
        gradient = new(kernel, chunk, place)
        if place.of == "q":
            found.append((gradient.shape[2], sum(one() is not None for one in made)))
            made.append(weakref.ref(gradient.untyped_storage()))
        return gradient

    config = RingConfig(heads_per_gather=heads_per_gather, kernel="reference", **options)
    with mock.patch.multiple(plan, SPARSE_SHARE=1, KEY_BLOCK=4):  # the keys in a window alone, though the row is short
        out = ring_attention(q, k, v, window=(None, None) if options else (9, 0), config=config)
    with mock.patch.object(Reference, "new_gradient", noted):
        out.sum().backward()
    return found


@pytest.mark.parametrize("options", [{}, {"backward": "gather"}], ids=["window", "backward by gather"])
def test_gathered_heads_have_accumulators_of_a_group_at_a_time(ranks: Ranks, options: dict[str, Any]) -> None:
    """dq's are float32 and as many as queries have heads: 6.5 GiB of a GPU in 32B layers at 416K tokens on two."""
    assert ranks(2).run(accumulators, 1, options) == [[(2, 0)] * 4] * 2
    assert ranks(2).run(accumulators, 4, options) == [[(8, 0)]] * 2
