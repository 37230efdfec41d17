"""Groups and lanes on one stream or on two, in turns: of one rank without traffic (alone.txt, measured by a patch of
bbae114 that did what the code does now), or of a ring by pulls beside Ulysses (ring.txt, by a forerunner at 409f490).

    python streams.py; torchrun --nproc_per_node 4 streams.py
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

from hf_ring_attn.bench import roads
from hf_ring_attn.bench.clock import Call, in_turns
from hf_ring_attn.bench.peers import PEERS
from hf_ring_attn.bench.speed import largest_over
from hf_ring_attn.bench.workload import Workload
from hf_ring_attn.bench.world import world
from hf_ring_attn.kernels import KERNELS

SHAPES = [(n, 32, 8, 128) for n in (2**15, 2**16, 2**17, 2**18)] + [(2**17, 64, 8, 64), (2**17, 16, 8, 256)]
ROUNDS = 5


def with_streams(run: Callable[[], object], two: bool) -> object:
    KERNELS["flash4"].abreast = two
    return run()


with world(None) as (ring, device):
    for tokens, heads, kv_heads, width in SHAPES:
        work = Workload(tokens, device, heads, kv_heads, width, width)
        of_one = {"one device": roads.one_device(work, "flash4")}
        if ring.size > 1:
            of_one |= {name: make() for name, make in PEERS["ulysses"](work) if "flash" in name}
            both = {"ring": roads.in_ring(work, ring, "flash4", roads.Options(traffic="pulls"))}
        else:
            both = {f"rank of {size}": roads.without_traffic(work, size, size // 2, "flash4") for size in (4, 8)}
        by_name = {name: (road, False) for name, road in of_one.items()}
        for name, road in both.items():
            by_name |= {f"{name}, one stream": (road, False), f"{name}, two": (road, True)}
        calls = {
            (name, kind): Call(functools.partial(with_streams, getattr(road, kind).run, two))
            for name, (road, two) in by_name.items() for kind in ("forward", "both")
        }  # fmt: skip
        turns = {" ".join(key): call for key, call in calls.items()}
        found = in_turns(turns, ROUNDS, device, largest_over(ring, device))
        for name, (road, _) in by_name.items():
            text = f"{tokens:7d} {heads}/{kv_heads} x {width} {name:24s}"
            for kind in ("forward", "both"):
                mine, one = found[f"{name} {kind}"].seconds, found[f"one device {kind}"].seconds
                share = statistics.median(road.share * y / x for x, y in zip(mine, one, strict=True))
                text += f" | {kind} {1e3 * statistics.median(mine):8.3f} ms {share:6.1%}"
            if ring.rank == 0:
                print(text, flush=True)
