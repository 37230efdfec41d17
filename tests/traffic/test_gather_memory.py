"""Bytes that attention by messages holds, in units of a group of heads of the whole row, and that gathered rows do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_ring_attn.attention.backward import gradients
from hf_ring_attn.attention.call import Call, Results, RingOptions
from hf_ring_attn.attention.op import forward
from hf_ring_attn.comm.ring import Pending, Ring
from hf_ring_attn.kernels import Params
from hf_ring_attn.kernels.base import InOrder
from hf_ring_attn.layers.collectives import gather_sequence
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.sharding.plan import Plan
from hf_ring_attn.traffic import Messages
from tests.helpers.live_bytes import Ledger, peak_bytes

RANKS, TOKENS, HEADS, WIDTH = 4, 512, 4, 16
GROUP = 2 * RANKS * TOKENS * WIDTH * 2
"""Bytes of one head's keys and values of the row in bfloat16."""


class Alone(Ring):
    """A ring of ranks that are all this one: what it sends is what it receives."""

    def gather(self, tensor: Tensor, doing: str = "") -> Pending:
        return Pending(self, doing, [torch.stack([tensor] * self.size)], ())

    def send_on(self, tensors: Any, doing: str) -> Pending:
        return Pending(self, doing, [tensor.clone() for tensor in tensors], ())

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor.sum(0)


class Noting(InOrder):
    """A kernel that computes nothing, and notes what is held when it is called."""

    name, two_streams, rounds_gradients = "noting", False, False

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.held = ledger, list[int]()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, params: Any, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.held.append(self.ledger.bytes)
        return out, q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    def delta(self, dout: Tensor, out: Tensor) -> Tensor:
        return out.new_zeros(out.shape[0], out.shape[2], out.shape[1], dtype=torch.float32)

    def backward(self, *_: object) -> None:
        self.held.append(self.ledger.bytes)


def most_bytes(backward: str) -> tuple[float, float]:
    """In the kernel, and at any time; backward "": of the forward."""
    ring, ledger = Alone.simulated(RANKS, 1), Ledger()
    kernel: Any = Noting(ledger)
    q, k, v, out, dout = (torch.zeros(1, TOKENS, HEADS, WIDTH, dtype=torch.bfloat16) for _ in range(5))
    lse = torch.zeros(1, HEADS, TOKENS)
    plan = Plan.of(ring, Layout(RANKS * TOKENS, RANKS, 1), Mask.of(CAUSAL, 1, RANKS * TOKENS), sparse_share=0)
    call = Call(q, k, v, plan, Params(1.0), RingOptions("noting", backward or "ring", heads_per_gather=1))
    with ledger:
        if backward:
            gradients(call, Results(out, lse, dout), Messages(ring), kernel)
        else:
            forward(call, Messages(ring), kernel)
    return max(kernel.held) / GROUP, ledger.peak / GROUP


@pytest.mark.parametrize(
    ("backward", "in_kernel", "at_most"),
    [
        # out; the group that is used and the one on its way; for a moment another, to put tokens in order
        pytest.param("", 2.6, 3.1, id="forward"),
        # dq, dk and dv; two groups; float32 sums of one; of these a copy in order of ranks leaves
        pytest.param("gather", 5.9, 6.9, id="backward by gather"),
        # all heads' keys and values of two ranks; float32 sums that leave and that arrive
        pytest.param("ring", 6.1, 7.1, id="backward by ring"),
    ],
)
def test_what_was_received_goes_once_it_was_used(backward: str, in_kernel: float, at_most: float) -> None:
    """The most was one group more each, and in the kernel one more in the forward, two in the backward by gather."""
    found = most_bytes(backward)
    assert found[0] < in_kernel and found[1] < at_most, found


@pytest.mark.parametrize("length", [4096, 4090])
def test_the_gradient_of_a_gathered_row_is_copied_in_sixteen_bits(length: int) -> None:
    """Then once in float32: its order is changed before, which took two copies in float32, 4.5 units for 3."""
    ring, layout = Alone.simulated(RANKS, 1), Layout(length, RANKS, 1)
    row = gather_sequence(torch.ones(1, layout.local_length, 8, dtype=torch.bfloat16).requires_grad_(), ring, layout)
    gradient = torch.ones_like(row)
    assert peak_bytes(lambda: row.backward(gradient)) < 3.1 * row.nbytes
