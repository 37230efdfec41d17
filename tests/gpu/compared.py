"""Cases of training in a ring of GPUs against one GPU, for programs of this folder.

    CUDA_VISIBLE_DEVICES=0 python -m tests.gpu.PROGRAM --save alone.pt
    torchrun --nproc_per_node 2 -m tests.gpu.PROGRAM --compare alone.pt

``--only WORD`` takes the cases that have it in their names.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.jobs.runs import Mesh


def compare(
    cases: Mapping[str, Callable[[Mesh, str], Any]],
    losses: Callable[[Any], list[float]],
    far: Callable[[Any, Any], tuple[float, float]],
    bounds: Callable[[str], tuple[float, float]],
) -> None:
    """Runs each case, saves or compares what it gives, reports, and ends the process: with 1 if any is wrong.

    Args:
        cases: by name, of a mesh and a device. losses: of an outcome.
        far: how far two outcomes are apart, in their losses and weights. bounds: of a case by its name, for both.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--save")
    parser.add_argument("--compare")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
    if size > 1:  # gloo beside NCCL, for parameters on the host
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    want: dict[str, Any] = torch.load(options.compare, weights_only=False) if options.compare else {}
    found: dict[str, Any] = {}
    wrong = 0
    for why in [why for why in cases if options.only in why]:
        began = time.perf_counter()
        try:
            got = found[why] = cases[why](Mesh(cp=size), device)
        except Exception:  # noqa: BLE001  the other cases are tried all the same
            wrong += 1
            _report(f"{why}: raised\n{traceback.format_exc()}")
            continue
        line = f"{why}: losses {[round(x, 6) for x in losses(got)]}, {time.perf_counter() - began:.1f} s"
        if options.compare:
            apart = far(got, want[why]) if why in want else (torch.inf, torch.inf)
            good = all(x <= bound for x, bound in zip(apart, bounds(why), strict=True))
            wrong += not good
            line += f"; one GPU {[round(x, 6) for x in losses(want[why])]}" if why in want else ""
            line += f"; loss off by {apart[0]:.1e}, weights by {apart[1]:.1e}: {'right' if good else 'WRONG'}"
        _report(line)
    if options.save:
        torch.save(found, options.save)
    _report(f"{len(found)} cases of {len(cases)} on {device}, {wrong} wrong")
    if size > 1:
        dist.destroy_process_group()
    sys.exit(wrong > 0)


def _report(line: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0 or "raised" in line:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
