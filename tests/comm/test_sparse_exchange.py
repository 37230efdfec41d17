"""The sparse exchange of tokens, in a ring of two that is a stand-in: what leaves, and in which memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_ring_attn.comm.ring import Pending, Ring
from hf_ring_attn.comm.sparse_exchange import Exchange


class Leaving(Ring):
    """What it sends is what it receives."""

    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], doing: str) -> Pending:
        assert tensor.is_contiguous(), "else a copy of the copy leaves"
        assert len(tensor) == sum(sends) == sum(receives)
        return Pending(self, doing, [tensor], ())


def test_tokens_of_several_rows_are_copied_once() -> None:
    runs = torch.tensor([[0, 1, 2], [1, 4, 1]])  # to rank 0 tokens 1 and 2, to rank 1 token 4
    exchange, ring = Exchange.of(runs, torch.tensor([[0, 0, 2], [1, 2, 1]]), 2), Leaving.simulated(2, 0)
    x: Any = torch.arange(30.0).view(3, 5, 2)
    seen = exchange.arrived(exchange.take(ring, x).wait()[0])
    assert torch.equal(seen, x[:, [1, 2, 4]])
    home = exchange.give_back(ring, seen, 5)
    assert torch.equal(home, x * torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])[:, None])
