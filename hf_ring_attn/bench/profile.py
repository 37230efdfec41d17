"""Profiles forward and backward in the ring with torch's profiler, as a table and as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from ..attention.call import RingOptions
from ..attention.kernel_choice import kernel_for
from ..comm.ring import Ring
from . import contenders
from .workload import Workload

CALLS = 3


def save(work: Workload, ring: Ring, kernel: str, chosen: Sequence[RingOptions], folder: Path) -> None:
    """Writes profile-TOKENS-OPTIONS-RANK.txt (kernels by time) and .json.gz (for chrome://tracing) of each rank."""
    kernel = kernel_for(ring.name, kernel, work.request())
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if work.device.type == "cuda" else [])]
    for one in chosen:
        contender = contenders.in_ring(work, ring, kernel, one)
        contender.both.run()
        with torch.profiler.profile(activities=activities) as found:
            for _ in range(CALLS):
                contender.both.run()
            if work.device.type == "cuda":
                torch.cuda.synchronize()
        folder.mkdir(parents=True, exist_ok=True)
        name = f"profile-{work.tokens}-{contenders.name_of(one).replace(' ', '-')}-{ring.rank}"
        text = found.key_averages().table(
            sort_by=f"self_{work.device.type}_time_total", row_limit=40, max_name_column_width=90
        )
        (folder / f"{name}.txt").write_text(f"{CALLS} calls of forward and backward\n{text}\n")
        found.export_chrome_trace(str(folder / f"{name}.json.gz"))
