"""TRL's trainers in a ring of GPUs against one GPU: tables of tests/integration/hosts, in float32 and in bf16.

    CUDA_VISIBLE_DEVICES=0 python -m tests.gpu.trainers_ranks --save alone.pt
    torchrun --nproc_per_node 2 -m tests.gpu.trainers_ranks --compare alone.pt

``--only WORD`` takes the cases that have it in their names.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from tests.gpu.kinds_ranks import report
from tests.helpers.jobs import distillation_jobs, grpo_jobs, preference_jobs, tool_jobs
from tests.helpers.jobs.kinds_jobs import distance
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.sft_jobs import OFFLINE, Outcome
from tests.integration.hosts import test_distillation_trainer as distillation
from tests.integration.hosts import test_preference_images as images

ON_GPU = {"use_cpu": False}
HALF = {**ON_GPU, "bf16": True}
EXACT, COARSE = 2e-4, 0.1
"""Relative bounds of the loss and of how far all steps moved the weights: float32 with sampled tokens, bf16."""
WANTED = ("Gemma 3", "Qwen2.5-VL", "a stream", "FSDP2", "at a temperature")


def cases() -> dict[str, Callable[[Mesh], Outcome]]:
    found: dict[str, Callable[[Mesh], Outcome]] = {}
    for case in (distillation.FIRST, *(c for c in distillation.CASES if any(word in c.why for word in WANTED))):
        found[f"distillation, {case.why}"] = partial(distillation_jobs.trained, case.with_args(**ON_GPU))
    found["distillation, bf16"] = partial(distillation_jobs.trained, distillation.FIRST.with_args(**HALF))
    for pairs in images.LEARNT:
        found[pairs.why] = partial(preference_jobs.trained, pairs.with_args(**ON_GPU))
    for prompts in images.REINFORCED:
        found[prompts.why] = partial(grpo_jobs.trained, prompts.with_args(**ON_GPU))
    for what in ("tools", "environments", "distillation"):
        found[f"tools, {what}"] = partial(of_tools, what)
    return found


def of_tools(what: str, mesh: Mesh) -> Outcome:
    """Async tools among them, which the ring's first rank calls while the others wait."""
    return tool_jobs.trained(what, mesh, **ON_GPU)[0]


def apart(got: Outcome, want: Outcome) -> tuple[float, float]:
    """The largest relative distance of a step's loss, and that of the weights as a share of their way."""
    losses = max(
        abs(a["loss"] - b["loss"]) / max(abs(b["loss"]), 0.05) for a, b in zip(got.steps, want.steps, strict=True)
    )
    moved = distance(want.after, want.before)
    assert moved > 0, "nothing was learnt"
    return losses, distance(got.after, want.after) / moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save")
    parser.add_argument("--compare")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    size = int(os.environ.get("WORLD_SIZE", "1"))
    OFFLINE["ACCELERATE_USE_CPU"] = "false"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    want: dict[str, Outcome] = torch.load(options.compare, weights_only=False) if options.compare else {}
    found: dict[str, Outcome] = {}
    wrong = 0
    for why, run in cases().items():
        if options.only not in why:
            continue
        began = time.perf_counter()
        try:
            got = found[why] = run(Mesh(cp=size))
        except Exception:  # noqa: BLE001  the other cases are tried all the same
            wrong += 1
            report(f"{why}: raised\n{traceback.format_exc()}")
            continue
        losses = [round(step["loss"], 6) for step in got.steps]
        line = f"{why}: losses {losses}, {time.perf_counter() - began:.1f} s"
        if options.compare:
            far = apart(got, want[why]) if why in want else (torch.inf, torch.inf)
            good = max(far) <= (COARSE if "bf16" in why else EXACT)
            wrong += not good
            line += f"; loss off by {far[0]:.1e}, weights by {far[1]:.1e}: {'right' if good else 'WRONG'}"
        report(line)
    if options.save:
        torch.save(found, options.save)
    report(f"{len(found)} cases of {len(cases())}, {wrong} wrong")
    if size > 1:
        dist.destroy_process_group()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
