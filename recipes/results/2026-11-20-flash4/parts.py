"""Where the time of a rank's backward goes, in microseconds, and what two streams save. Prints parts.txt.

    python recipes/results/2026-11-20-flash4/parts.py

Rank 3 of 8, causal, 32 query heads over 8 key heads, 128 wide, bfloat16, without traffic.
"""

from __future__ import annotations

import torch
from hf_ring_attn.mask import CAUSAL, Mask
from measure import KERNEL, LLAMA, W128, tensors, timed, visible

from hf_ring_attn.bench.replay import Rank, places
from hf_ring_attn.kernels import Gradients, Params
from hf_ring_attn.kernels.base import row_products
from hf_ring_attn.kernels.flash4.accumulators import in_blocks
from hf_ring_attn.kernels.flash4.blocks import HOPPER, Blocks

SIZE, RANK = 8, 3


def parts(length: int) -> None:
    q, k, v, dout = tensors(length, LLAMA, W128)
    mask, params = Mask.of(CAUSAL, 1, length), Params(W128[0] ** -0.5)
    me = Rank.of(length, SIZE, RANK, mask)
    held = [Rank.of(length, SIZE, rank, mask).held.cuda() for rank in range(SIZE)]
    mine, d = q[:, held[RANK]], dout[:, held[RANK]]
    chunks = [(k[:, here].contiguous(), v[:, here].contiguous()) for here in held]
    out, lse = KERNEL.forward(mine, k, v, me.forward, params)
    delta = KERNEL.delta(d, out)
    home = places(mine, *chunks[0], me.queries, me.keys[0], params.scale)
    dq = KERNEL.new_gradient(mine, home[0])
    into = [
        Gradients(dq, KERNEL.new_gradient(kk, home[1]), KERNEL.new_gradient(vv, home[2]), home) for kk, vv in chunks
    ]
    blocks = Blocks.of(home[0], HOPPER[W128])

    def step(source: int) -> None:
        KERNEL.backward(d, mine, *chunks[source], lse, delta, me.backward[source], params, into[source])

    def all_steps() -> None:
        for source in range(SIZE):
            step(source)

    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def two_streams() -> None:
        here = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(here)
        for source in range(SIZE):
            with torch.cuda.stream(streams[source % 2]):
                step(source)
        for stream in streams:
            here.wait_stream(stream)

    sums = list(zip((dq, into[0].dk, into[0].dv), home, strict=True))
    seconds = timed(
        {
            "all steps": all_steps,
            "all steps, two streams": two_streams,
            "keys of rank 0": lambda: step(0),
            "its own keys": lambda: step(RANK),
            "keys of rank 7": lambda: step(7),
            "zero dk and dv, each step": lambda: [
                KERNEL.new_gradient(x, p) for x, p in zip(chunks[0], home[1:], strict=True)
            ],
            "zero dq": lambda: KERNEL.new_gradient(mine, home[0]),
            "delta": lambda: KERNEL.delta(d, out),
            "delta in torch": lambda: row_products(d, out),
            "lse and delta into blocks": lambda: in_blocks(lse, delta, blocks),
            "round dq, dk, dv": lambda: [KERNEL.finish(x, torch.bfloat16, p) for x, p in sums],
            "dk in float32": lambda: KERNEL.finish(into[0].dk, torch.float32, home[1]),
        }
    )
    flops = sum(visible(table) for table in me.backward) * 2 * LLAMA[0] * (3 * W128[0] + 2 * W128[1])
    print(f"S {length}")
    for name, second in seconds.items():
        speed = f"  {flops / second / 1e12:.0f} TFLOP/s" if name.startswith("all") else ""
        print(f"  {name:28} {second * 1e6:8.0f}{speed}")


if __name__ == "__main__":
    for tokens in (32768, 65536, 131072):
        parts(tokens)
