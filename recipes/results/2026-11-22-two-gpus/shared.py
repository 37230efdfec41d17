"""What comparing shared keys costs a compiled layer, beside a gather of the same keys."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from hf_ring_attn.traffic.kept import MAKES, TAKES, Compared

from hf_ring_attn.bench.world import world


def milliseconds(call: Callable[[], object], times: int = 20) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / times


with world(None) as (ring, device):
    for tokens in (2048, 16384, 65536):
        k = torch.randn(1, tokens, 8, 128, device=device, dtype=torch.bfloat16)
        v, keeper = torch.randn_like(k), Compared()
        made = keeper.kept(MAKES, ring, "plan", k, v)
        assert made is not None
        made.parts = []
        compare = milliseconds(lambda of=keeper, k=k, v=v: of.kept(TAKES, ring, "plan", k, v))
        gather = milliseconds(lambda k=k, v=v: ring.gather(torch.stack([k, v])).wait())
        copies = milliseconds(lambda k=k, v=v: (k.clone(), v.clone()))
        if ring.rank == 0:
            line = f"compare {compare:.3f} ms, NCCL gather {gather:.3f} ms, copies {copies:.3f} ms"
            print(f"{tokens} tokens a rank: {line}", flush=True)
