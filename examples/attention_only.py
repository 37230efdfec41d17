"""Attention over a sequence that two processes share, without transformers: a window, grouped heads, gradients.

torchrun --nproc_per_node 2 examples/attention_only.py
"""

from __future__ import annotations

import torch
from torch import distributed

from hf_ring_attn import positions, ring_attention

LENGTH, HEADS, KEY_HEADS, WIDTH = 1001, 8, 2, 32


def main() -> None:
    distributed.init_process_group("gloo")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    mine = positions(LENGTH, rank=rank, world_size=world_size)  # which tokens this rank holds

    torch.manual_seed(0)
    wholes = (torch.randn(1, LENGTH, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    q, k, v = (whole[:, mine].requires_grad_() for whole in wholes)
    out = ring_attention(q, k, v, window=(255, 0))  # a token sees itself and the 255 before it
    loss = out.square().sum()
    loss.backward()

    assert k.grad is not None
    sums = torch.stack([loss.detach(), k.grad.square().sum()])  # of this rank's tokens
    distributed.all_reduce(sums)
    if rank == 0:
        print(f"loss {sums[0]:.7g}\nsquared norm of k's gradient {sums[1]:.7g}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
