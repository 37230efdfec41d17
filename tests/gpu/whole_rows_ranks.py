"""Losses of whole rows, in loops and in a Trainer, in a ring of GPUs against one GPU, in float32 and in bf16.

The cases are those of tests/integration/batch/test_whole_rows.py, tests/integration/hosts/test_whole_row_losses.py and
test_found_whole_rows.py. Two more of a Trainer have a loader that one rank reads (test_one_reader.py).
Options: see `compared`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.gpu.compared import compare
from tests.helpers.jobs import trainer_jobs, whole_call_jobs
from tests.helpers.jobs.kinds_jobs import distance
from tests.helpers.jobs.runs import Mesh, Run
from tests.integration.batch import test_whole_rows as loops
from tests.integration.hosts import test_found_whole_rows as found
from tests.integration.hosts import test_one_reader as one_reader
from tests.integration.hosts import test_whole_row_losses as trainers

EXACT, COARSE = (2e-5, 1e-3), (2e-2, 0.1)
"""Relative bounds of losses, and of gradients or of how far all steps moved the weights: in float32, in bf16."""


class Found(NamedTuple):
    """``ways``: gradients by name, or how far each weight moved."""

    losses: list[float]
    ways: dict[str, Tensor]


def of_a_loop(case: whole_call_jobs.Case, mesh: Mesh, device: str) -> Found:
    answer = whole_call_jobs.answer(case, mesh.cp > 1, device)
    return Found([float(answer.loss)], {name: x.float().cpu() for name, x in answer.gradients.items()})


def of_a_trainer(run: Run, mesh: Mesh, _device: str) -> Found:
    outcome = trainer_jobs.train(run, mesh, ACCELERATE_USE_CPU=str(not torch.cuda.is_available()).lower())
    losses = [x for entry in outcome.log for name, x in sorted(entry.items()) if name.endswith("loss")]
    return Found(losses, {name: x.float().cpu() for name, x in outcome.updates.items()})


def cases() -> dict[str, Any]:
    every: dict[str, Any] = {}
    for case in loops.CASES:
        every[f"loop, {case.why}"] = partial(of_a_loop, dataclasses.replace(case, dtype=torch.float32))
    for case in loops.CASES[:3]:
        every[f"loop, {case.why}, bf16"] = partial(of_a_loop, dataclasses.replace(case, dtype=torch.bfloat16))
    for run in (*trainers.RUNS, *found.RUNS, *one_reader.RUNS[:2]):
        on_gpu = {**run.arguments, "use_cpu": not torch.cuda.is_available()}
        every[f"trainer, {run.why}"] = partial(of_a_trainer, dataclasses.replace(run, arguments=on_gpu))
    half = dataclasses.replace(trainers.RUNS[0], arguments={"use_cpu": not torch.cuda.is_available(), "bf16": True})
    every["trainer, bf16"] = partial(of_a_trainer, half)
    return every


def apart(got: Found, want: Found) -> tuple[float, float]:
    losses = max(abs(a - b) / max(abs(b), 0.05) for a, b in zip(got.losses, want.losses, strict=True))
    # Without a ring, weights that a loss does not reach have no gradient; FSDP2 and DDP give zeros.
    wanted = {name: want.ways.get(name, torch.zeros_like(x)) for name, x in got.ways.items()}
    assert got.ways.keys() >= want.ways.keys()
    nothing = {name: torch.zeros_like(x) for name, x in wanted.items()}
    size = distance(wanted, nothing)
    assert size > 0, "no gradient"
    return losses, distance(got.ways, wanted) / size


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    compare(cases(), lambda got: got.losses, apart, lambda why: COARSE if "bf16" in why else EXACT)


if __name__ == "__main__":
    main()
