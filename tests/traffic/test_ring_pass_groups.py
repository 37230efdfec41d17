"""Heads in ring passes one after the other, since the sums of all of them would be large."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.config import RingConfig
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
