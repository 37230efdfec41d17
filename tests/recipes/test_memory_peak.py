"""memory_peak.py: the fullest moment of a trace of torch's allocator."""

from __future__ import annotations

import runpy
from typing import Any

from tests.helpers.programs import REPOSITORY

MODULE = runpy.run_path(str(REPOSITORY / "recipes" / "long_context_lora" / "memory_peak.py"))
GIB, MIB = 2**30, 2**20
MLP = [
    {"filename": "/site-packages/torch/nn/modules/linear.py", "line": 5, "name": "forward"},
    {"filename": "/opt/torch/lib/site-packages/peft/tuners/lora/layer.py", "line": 7, "name": "forward"},
    {"filename": "??", "line": 0, "name": "PyEval"},
]


def event(action: str, addr: int, size: int, frames: Any = ()) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "frames": list(frames)}


def test_the_fullest_moment_is_named_by_code_and_size() -> None:
    trace = [
        event("alloc", 1, 2 * GIB, MLP),
        event("segment_alloc", 90, 8 * GIB),
        event("free_requested", 50, GIB),  # of before
        event("free_completed", 50, GIB),
        event("alloc", 2, 2 * GIB, MLP),
        event("alloc", 3, MIB // 2),
        event("alloc", 4, 3 * GIB),  # 9 GiB and a half MiB: the most
        event("free_requested", 1, 2 * GIB),
        event("alloc", 1, GIB, MLP),  # the same address again
        event("free_requested", 4, 3 * GIB),
    ]
    found = MODULE["fullest"](trace, 3 * GIB)
    assert found["peak_GiB"] == 9 + 0.5 / 1024
    assert found["from_before_GiB"] == 2
    assert found["smaller_GiB"] == 0.5 / 1024
    assert found["lines"] == [(4.0, 2, 2.0, "lora/layer.py:7 forward"), (3.0, 1, 3.0, "no Python")]
    total = found["from_before_GiB"] + found["smaller_GiB"] + sum(line[0] for line in found["lines"])
    assert total == found["peak_GiB"]


def test_without_an_allocation_the_fullest_moment_is_the_beginning() -> None:
    found = MODULE["fullest"]([event("free_requested", 50, GIB)], 3 * GIB)
    assert found == {"peak_GiB": 3.0, "from_before_GiB": 3.0, "smaller_GiB": 0.0, "lines": []}
