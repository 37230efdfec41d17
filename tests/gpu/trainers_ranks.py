"""TRL's trainers in a ring of GPUs against one GPU: tables of tests/integration/hosts, in float32 and in bf16.

Options: see `compared`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tests.gpu.compared import compare
from tests.helpers.jobs import distillation_jobs, grpo_jobs, preference_jobs, tool_jobs, whole_logits_jobs
from tests.helpers.jobs.kinds_jobs import distance
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trl_runs import OFFLINE, Outcome
from tests.integration.hosts import test_distillation_trainer as distillation
from tests.integration.hosts import test_logits_trainers as of_logits
from tests.integration.hosts import test_preference_images as images

ON_GPU = {"use_cpu": False}
HALF = {**ON_GPU, "bf16": True}
EXACT, COARSE = 2e-4, 0.1
"""Relative bounds of the loss and of how far all steps moved the weights: float32 with sampled tokens, bf16."""
WANTED = ("Gemma 3", "Qwen2.5-VL", "a stream", "FSDP2", "at a temperature")
OF_LOGITS = ("ORPO, accumulated", "CPO, ipo", "FSDP2, TPO", "some answers generated", "online DPO, accumulated")


def cases() -> dict[str, Callable[[Mesh], Outcome]]:
    found: dict[str, Callable[[Mesh], Outcome]] = {}
    for case in (distillation.FIRST, *(c for c in distillation.CASES if any(word in c.why for word in WANTED))):
        found[f"distillation, {case.why}"] = partial(distillation_jobs.trained, case.with_args(**ON_GPU))
    found["distillation, bf16"] = partial(distillation_jobs.trained, distillation.FIRST.with_args(**HALF))
    for pairs in images.LEARNT:
        found[pairs.why] = partial(preference_jobs.trained, pairs.with_args(**ON_GPU))
    for prompts in images.REINFORCED:
        found[prompts.why] = partial(grpo_jobs.trained, prompts.with_args(**ON_GPU))
    for one in of_logits.CASES:
        if any(word in one.why for word in OF_LOGITS):
            on_gpu = replace(one, args={**one.args, **ON_GPU})
            found[f"whole rows, {one.why}"] = partial(whole_logits_jobs.trained, on_gpu)
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


def _train(run: Callable[[Mesh], Outcome], mesh: Mesh, _device: str) -> Outcome:
    return run(mesh)


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    OFFLINE["ACCELERATE_USE_CPU"] = "false"

    def bounds(why: str) -> tuple[float, float]:
        return (COARSE, COARSE) if "bf16" in why else (EXACT, EXACT)

    compare(
        {why: partial(_train, run) for why, run in cases().items()},
        lambda got: [step["loss"] for step in got.steps], apart, bounds,
    )  # fmt: skip


if __name__ == "__main__":
    main()
