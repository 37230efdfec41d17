"""CUDA graphs, for tests/gpu/test_pulls_on_gpu.py: torchrun --nproc_per_node 2 -m tests.gpu.graph_ranks

Layers around attention in a ring, compiled so that inductor replays what it can as CUDA graphs: outputs and gradients
of batches that follow each other are those of the same layers without a compiler. And a graph that is captured around
attention by hand is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hf_ring_attn.attention.call import Call, RingOptions
from hf_ring_attn.attention.kernel_choice import kernel_for
from hf_ring_attn.attention.op import attend
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.command_ranks import world
from hf_ring_attn.errors import CapturedGraph
from hf_ring_attn.kernels import Params, Request
from hf_ring_attn.sharding.layout import Layout
from hf_ring_attn.sharding.mask import CAUSAL, Mask
from hf_ring_attn.sharding.plan import Plan
from tests.gpu.verdict import told

LENGTH, HEADS, KV_HEADS, WIDTH, BATCHES = 2048, 8, 4, 64, 6
BOUND = 1e-2
"""Relative, in bfloat16: a compiler rounds in other places."""


class Layers(nn.Module):
    def __init__(self, plan: Plan, kernel: str) -> None:
        super().__init__()
        self.plan, self.kernel = plan, kernel
        self.projections = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * WIDTH)
        self.last = nn.Linear(HEADS * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (-1, WIDTH)).split([HEADS, KV_HEADS, KV_HEADS], 2)
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, _ = attend(Call(q, k, v, self.plan, Params(WIDTH**-0.5, deterministic=True), RingOptions(self.kernel)))
        found: Tensor = self.last(torch.nn.functional.gelu(out.flatten(2)))
        return found


def answer(layers: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The output, and the gradients of all weights."""
    layers.zero_grad()
    out = run(x)
    out.square().mean().backward()
    return [out.detach().clone(), *(p.grad.clone() for p in layers.parameters() if p.grad is not None)]


def main() -> None:
    with world("cuda", may_share=True) as (ring, device):
        failed = told(ring, list(differences(ring, device)), f"{BATCHES} compiled batches")
    sys.exit(failed)


def differences(ring: Ring, device: torch.device) -> Iterator[str]:
    """Words for each batch whose answer is another one when compiled, and for a capture that is not refused."""
    layout = Layout(LENGTH, ring.size, ring.rank)
    plan = Plan.of(ring, layout, Mask.of(CAUSAL, 1, LENGTH), sparse_share=0)
    request = Request("cuda", torch.bfloat16, HEADS, KV_HEADS, WIDTH, WIDTH, False, False, True)
    torch.manual_seed(0)
    layers = Layers(plan, kernel_for(ring.name, "auto", request)).to(device, torch.bfloat16)
    compiled = torch.compile(layers, mode="reduce-overhead", fullgraph=True)
    torch.manual_seed(1 + ring.rank)
    for number in range(BATCHES):
        x = torch.randn(1, layout.local_length, WIDTH, device=device, dtype=torch.bfloat16) * (number + 1)
        torch.compiler.cudagraph_mark_step_begin()
        for got, want in zip(answer(layers, compiled, x), answer(layers, layers, x), strict=True):
            far = float((got - want).norm() / want.norm())
            if not far < BOUND:
                yield f"batch {number}: {far:.1e} from what it is without a compiler"
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.graph(graph):
            layers(x)
        yield "a captured attention was not refused"
    except CapturedGraph:
        pass


if __name__ == "__main__":
    main()
