"""A million tokens through one attention layer, forward and backward: seconds, memory, and entries against float64.

    torchrun --nproc_per_node 8 recipes/benchmarks/long_row.py --tokens 1048576 [--save FOLDER]
    python recipes/benchmarks/long_row.py --tokens 1048576 --ring 8             # the share of one rank of eight, alone

Under torchrun some entries are compared with float64, computed from the whole row: out and dq of a few queries, and dk
and dv of a few keys, given the out and lse of the run. An offset that wraps around, or a chunk in the wrong place,
shows there. Errors are relative to the norm of what they are errors of.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hf_ring_attn
from hf_ring_attn import RingConfig
from hf_ring_attn.attention.call import RingOptions
from hf_ring_attn.attention.kernel_choice import kernel_for
from hf_ring_attn.bench import contenders, results
from hf_ring_attn.bench.provenance import facts
from hf_ring_attn.bench.speed import largest_over
from hf_ring_attn.bench.workload import Workload
from hf_ring_attn.comm.ring import Ring
from hf_ring_attn.command_ranks import world
from hf_ring_attn.sharding.layout import Layout

ENTRIES = 8
"""How many queries, and how many keys, are computed in float64."""
WARM_UP = 2**14
"""Tokens of a row that goes first, so that nothing is compiled while the long one is timed."""


def whole(x: Tensor, layout: Layout) -> Tensor:
    """[T, ...] of this rank: the row [S, ...] in its order."""
    parts = x.new_empty(layout.world_size, 1, *x.shape)
    dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1))
    return layout.merge(parts)[0]


def probe(work: Workload, layout: Layout, config: RingConfig) -> dict[str, float]:
    """The relative errors of some entries of the first and the last head."""
    *leaves, dout = work.inputs(layout.local_length, layout.rank)
    q, k, v = (x.requires_grad_() for x in leaves)
    out, lse = hf_ring_attn.ring_attention(q, k, v, length=work.tokens, return_lse=True, config=config)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    places = torch.linspace(work.tokens // 16, work.tokens - 1, ENTRIES, device=work.device).long()
    wrong: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    group = work.heads // work.kv_heads
    for kv_head in {0, work.kv_heads - 1}:
        keys, values, got_dk, got_dv = (whole(x.detach()[0, :, kv_head], layout) for x in (k, v, dk, dv))
        want_dk, want_dv = torch.zeros(2, len(places), work.width, dtype=torch.float64, device=work.device)
        for head in range(kv_head * group, (kv_head + 1) * group):
            queries, outs, douts, got_dq = (whole(x.detach()[0, :, head], layout) for x in (q, out, dout, dq))
            lses = whole(lse[0, head], layout).double()
            scale = work.width**-0.5
            for n, place in enumerate(places.tolist()):
                seen, gave = keys[: place + 1].double(), values[: place + 1].double()
                weights = torch.softmax(scale * (seen @ queries[place].double()), 0)
                d_out = douts[place].double()
                delta = d_out @ outs[place].double()
                wrong["out"].append((outs[place], weights @ gave))
                d_scores = weights * (gave @ d_out - delta)
                wrong["dq"].append((got_dq[place], scale * (d_scores @ seen)))
                after = slice(place, None)
                asked, d_outs = queries[after].double(), douts[after].double()
                weights = torch.exp(scale * (asked @ keys[place].double()) - lses[after])
                deltas = (d_outs * outs[after].double()).sum(-1)
                want_dv[n] += weights @ d_outs
                want_dk[n] += scale * ((weights * (d_outs @ values[place].double() - deltas)) @ asked)
        wrong["dk"] += list(zip(got_dk[places], want_dk, strict=True))
        wrong["dv"] += list(zip(got_dv[places], want_dv, strict=True))
    return {name: relative(pairs) for name, pairs in wrong.items()}


def relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest |got - want| / |want| of pairs of vectors."""
    return max(float((got.double() - want).norm() / want.norm()) for got, want in pairs)


def contender_of(work: Workload, ring: Ring, kernel: str, ring_size: int) -> contenders.Contender:
    if ring.size > 1:
        return contenders.in_ring(work, ring, kernel, RingOptions(kernel))
    return contenders.without_traffic(work, ring_size, ring_size // 2, kernel)


def timed(run: Callable[[], object], device: torch.device, largest: Callable[[float], float]) -> tuple[float, float]:
    """Seconds of one call, the slowest rank's, and the bytes that it needs beside what is there; 0 on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    largest(0.0)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = largest(time.perf_counter() - began)
    return seconds, largest(float(torch.cuda.max_memory_allocated() - before)) if device.type == "cuda" else 0.0


def measured(work: Workload, ring: Ring, given: argparse.Namespace) -> dict[str, Any]:
    kernel, largest = kernel_for(ring.name, given.kernel, work.request()), largest_over(ring, work.device)
    contender_of(replace(work, tokens=min(WARM_UP, work.tokens)), ring, kernel, given.ring).both.run()
    contender = contender_of(work, ring, kernel, given.ring)
    forward, backward = work.flops()
    result: dict[str, Any] = {"kernel": kernel, "ring": ring.size if ring.size > 1 else given.ring, "ranks": ring.size}
    for name, run, flops in (
        ("forward", contender.forward.run, forward),
        ("both", contender.both.run, forward + backward),
    ):
        rounds = [timed(run, work.device, largest) for _ in range(given.rounds)]
        seconds = [one for one, _ in rounds]
        rate = flops * contender.share / statistics.median(seconds) / 1e12
        result[name] = {"seconds": seconds, "peak_bytes": max(peak for _, peak in rounds), "tflops": rate}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries, and of keys and values")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ring", type=int, default=8, help="in one process: the ring of which one rank is computed")
    parser.add_argument("--kernel", default="auto", help="as in RingConfig")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the raw numbers into its results.jsonl")
    given = parser.parse_args()
    with world(None) as (ring, device):
        if given.tokens % (2 * ring.size):
            parser.error(f"--tokens must be a multiple of {2 * ring.size}, two chunks a rank, got {given.tokens}")
        run(given, ring, device)


def run(given: argparse.Namespace, ring: Ring, device: torch.device) -> None:
    head = facts()
    heads, kv_heads = given.heads
    work = Workload(given.tokens, device, heads, kv_heads, given.width, given.width, getattr(torch, given.dtype))
    result = {**head, "tokens": given.tokens, "dtype": given.dtype, **measured(work, ring, given)}
    if ring.size > 1:
        result["errors"] = probe(work, Layout(given.tokens, ring.size, ring.rank), RingConfig(kernel=given.kernel))
    if ring.rank:
        return
    for name in ("forward", "both"):
        row = result[name]
        peak = f", {row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else ""
        print(
            f"{given.tokens:,} tokens, {result['kernel']}, 1/{result['ring']} a device, {name}: "
            f"{statistics.median(row['seconds']):.2f} s, {row['tflops']:.0f} TFLOP/s a device{peak}"
        )
    if "errors" in result:
        print("largest relative error of single vectors:", {k: f"{x:.1e}" for k, x in result["errors"].items()})
    if given.save:
        results.save(given.save, f"long_row_{ring.size}", result)


if __name__ == "__main__":
    main()
