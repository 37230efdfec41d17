"""Learnable biases on the scores of a sequence that two processes share: T5's bias and your own, in three steps.

torchrun --nproc_per_node 2 examples/learnable_bias.py
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from hf_ring_attn import positions, ring_attention
from hf_ring_attn.biases import RelativeBias

LENGTH, HEADS, WIDTH = 301, 4, 16


def main() -> None:
    distributed.init_process_group("gloo")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    mine = positions(LENGTH, rank=rank, world_size=world_size)  # which tokens this rank holds

    torch.manual_seed(0)  # the same parameters and the same row on every rank
    relative = RelativeBias(HEADS, buckets=16, max_distance=100)
    importance = torch.zeros(LENGTH, requires_grad=True)  # of each key, wherever it is held
    q, k, v, target = (torch.randn(1, LENGTH, HEADS, WIDTH)[:, mine] for _ in range(4))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        biased: Tensor = relative(score, b, h, q_idx, kv_idx)  # indices count from the row's beginning
        return biased * importance[kv_idx].exp()

    weights = [relative.weight, importance]
    for step in range(3):
        out = ring_attention(q, k, v, score_mod=score_mod)
        loss = (out - target).square().sum()  # of this rank's tokens
        gradients = torch.autograd.grad(loss, weights)  # each rank's share: their sum is the gradient
        total = loss.detach()
        for tensor in (total, *gradients):
            distributed.all_reduce(tensor)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 1e-3 * gradient
        if rank == 0:
            print(f"step {step}: loss {total:.7g}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
