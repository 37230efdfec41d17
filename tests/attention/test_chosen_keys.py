"""Attention to chosen keys: bits of a choice, and both passes against dense float64, at ring sizes 1 to 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_ring_attn.attention.call import Call, RingOptions
from hf_ring_attn.attention.score_mod_op import attend_scored
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.kernels import KERNELS, Params, Request, asking
from hf_ring_attn.kernels.score_mods import chosen_keys
from hf_ring_attn.kernels.score_mods.chosen_keys import ChosenKeys, is_chosen, packed
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.testing import relative_error
from tests.helpers.checks import Ranks
from tests.kernels.flex_cases import on_cpu

BATCH, HEADS, GROUPS, LENGTH, CHOSEN = 2, 4, 2, 75, 9


def choice(length: int = LENGTH, chosen: int = CHOSEN) -> Tensor:
    """[B, S, n]: of each query, its own token and others, in any order, later ones and doubles among them, or -1."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randint(-1, length, (BATCH, length, chosen), generator=generator)
    found[:, :, 4] = torch.arange(length)
    return found


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    sizes = ((HEADS, 8), (GROUPS, 8), (GROUPS, 6), (HEADS, 6))
    return [torch.randn(BATCH, LENGTH, *size, generator=generator, dtype=torch.float64) for size in sizes]


def dense() -> list[Tensor]:
    """out, dq, dk and dv of whole rows, by the definition."""
    q, k, v, dout = inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    seen = is_chosen(choice(), LENGTH)[:, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * 8**-0.5
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def of_rank(kernel: str = "reference") -> list[Tensor]:
    """This rank's rows of the same, with only its own queries' choice."""
    ring = Ring.of(None)
    layout = Layout(LENGTH, ring.size, ring.rank)
    places, real = layout.positions(), layout.positions() < LENGTH
    q, k, v, dout = (layout.shard(layout.pad(x, 1), 1) for x in inputs())
    mine = layout.shard(layout.pad(choice(), 1, -1), 1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mod = ChosenKeys(mine, places, layout.padded).mod()
    documents = layout.pad(torch.zeros(BATCH, LENGTH, dtype=torch.int64), 1, -1)
    plan = Plan.of(ring, layout, Mask.of(CAUSAL, BATCH, layout.padded, documents))
    call = Call(q, k, v, plan, Params(8**-0.5, score_mod=mod), RingOptions(kernel))
    out = attend_scored(call)[0]
    return [x[:, real] for x in (out.detach(), *torch.autograd.grad(out, leaves, dout))]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_has_its_rows_of_the_definition(ranks: Ranks, world: int) -> None:
    want = dense()
    for rank, got in enumerate(ranks(world).run(of_rank)):
        at = Layout(LENGTH, world, rank).positions()
        for mine, whole in zip(got, want, strict=True):
            assert relative_error(mine, whole[:, at[at < LENGTH]]) < 1e-13


def test_flex_computes_the_same() -> None:
    with on_cpu():
        got = of_rank("flex")
    for mine, whole in zip(got, dense(), strict=True):
        assert relative_error(mine, whole) < 1e-12


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("at_once", [1, 2**28])
def test_bits_are_the_choice(keys: int, at_once: int) -> None:
    chosen = torch.randint(-1, keys, (2, 7, 5), generator=torch.Generator().manual_seed(keys))
    with mock.patch.object(chosen_keys, "MOST_BYTES", at_once):
        words = packed(chosen, keys)
    assert words.dtype == torch.int32 and words.shape == (2, 7, -(-keys // 32))
    bits = (words[..., None] >> torch.arange(32)) & 1
    want = torch.zeros(2, 7, keys, dtype=torch.bool)
    for row, query, key in ((b, i, int(x)) for b in range(2) for i in range(7) for x in chosen[b, i]):
        if key >= 0:
            want[row, query, key] = True
    assert torch.equal(bits.flatten(2)[..., :keys].bool(), want) and not bits.flatten(2)[..., keys:].any()
    assert torch.equal(is_chosen(chosen, keys), want)


def test_choices_of_other_layers_share_compiled_code() -> None:
    """A kernel that compiles a function asks whether it is the same by its code and its graph."""
    request = Request("cuda", torch.bfloat16, 4, 2, 64, 64, False, False, False, score_mod=True)
    made = [ChosenKeys(choice(n, 5)[:, :n], torch.arange(n), n) for n in (40, 64)]
    mods = [one.mod() for one in made]
    part: Any = None
    with mock.patch.object(KERNELS["flex"], "unsupported", return_value=[]):
        one, other = (asking(request, mod, 0.1, None, part) for mod in mods)
    assert one == other and hash(one) == hash(other)
    assert one != replace(other, heads=8)
