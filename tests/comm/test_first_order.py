"""Second derivatives of what ranks do together: refused in words, where torch would take some of them for zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_ring_attn.attention.function import ring_attention
from hf_ring_attn.biases import Alibi
from hf_ring_attn.comm.first_order import once
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.errors import SecondGradient
from hf_ring_attn.layers.collectives import gather_sequence, sum_over_ring
from hf_ring_attn.layers.halo import RowShare, along
from hf_ring_attn.layers.head_parallel import by_heads
from hf_ring_attn.sharding.layout import Layout
from tests.helpers.checks import Ranks

LENGTH = 8


def rows() -> RowShare:
    ring = Ring.of(None)
    return RowShare(ring, Layout(LENGTH, ring.size, ring.rank), None)


def flat(x: Tensor) -> Tensor:
    return x.flatten(2)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ring attention": lambda x: ring_attention(x, x * 2, x, length=LENGTH),
    "ring attention with a score_mod": lambda x: ring_attention(x, x * 2, x, length=LENGTH, score_mod=Alibi(2)),
    "a layer that takes tokens of other ranks": lambda x: along(flat(x).square(), rows(), 1, torch.sin),
    "a layer whose ranks share heads": lambda x: by_heads(rows(), [x], [], [], lambda a, b, c: a[0].square()),
    "a row that was gathered": lambda x: gather_sequence(x, rows().ring, rows().layout).square(),
    "a sum over the ring": lambda x: sum_over_ring(x, rows().ring).square(),
}


def twice(what: str, plain: bool) -> str:
    """The refusal of a penalty on the first gradients, which come from a sum, that is linear, or from another loss."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    x = torch.randn(1, LENGTH // size, 2, 4, dtype=torch.float64, requires_grad=True)
    out = FUNCTIONS[what](x)
    (first,) = torch.autograd.grad(out.sum() if plain else out.square().sum(), x, create_graph=True)
    try:
        (first.square().sum() + x.sum()).backward()
    except SecondGradient as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_second_derivatives_are_refused(ranks: Ranks, what: str, plain: bool) -> None:
    text = f"a gradient of {what} was differentiated again (create_graph=True: a gradient penalty, a Hessian)."
    for refusal in ranks(2).run(twice, what, plain):
        assert refusal.startswith(text)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("what", [name for name in FUNCTIONS if "attention" in name])
def test_on_one_device_too(what: str, plain: bool) -> None:
    assert twice(what, plain).startswith(f"a gradient of {what} was differentiated again")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, _number: int, y: Tensor) -> Tensor:
        return 2 * x + 3 * y

    @staticmethod
    @once("a test")
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        return 2 * gradient, None, 3 * gradient


def test_first_gradients_are_as_they_were_with_a_graph_too() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    for graph in (False, True):
        out: Tensor = Doubled.apply(x, 1, y)  # type: ignore[no-untyped-call]
        dx, dy = torch.autograd.grad(out.sum(), (x, y), create_graph=graph)
        assert torch.equal(dx, torch.full((3,), 2.0)) and torch.equal(dy, torch.full((3,), 3.0))
        assert dx.requires_grad == graph == dy.requires_grad
