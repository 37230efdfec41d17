"""Bytes of an exchange of tokens for heads, in a ring that is a stand-in."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_ring_attn.comm.ring import Pending, Ring
from hf_ring_attn.layers import head_parallel
from hf_ring_attn.layers.halo import RowShare
from hf_ring_attn.sharding.layout import Layout
from tests.helpers.live_bytes import peak_bytes


class Receiving(Ring):
    def all_to_all(self, tensor: Tensor, sends: list[int], receives: list[int], doing: str) -> Pending:
        return Pending(self, doing, [tensor.new_zeros(sum(receives), *tensor.shape[1:])], ())


def test_what_arrived_goes_once_it_is_in_order() -> None:
    """Of four inputs what arrived, one that leaves and one in order; all eight were held, and one that leaves."""
    rows = RowShare(Receiving.simulated(4, 1), Layout(256, 4, 1))
    tensors = [torch.zeros(1, 64, 8, 16) for _ in range(4)]
    parts = [[(0, 2), (2, 4), (4, 6), (6, 8)]] * 4
    most = peak_bytes(lambda: head_parallel._gather_heads(rows, tensors, parts))
    assert most < 6.1 * tensors[0].nbytes
