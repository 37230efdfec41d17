"""TRL's trainers that save checkpoints and go on from them, for live ranks."""

from __future__ import annotations

from typing import Any

from tests.helpers.jobs import distillation_jobs, grpo_jobs, preference_jobs
from tests.helpers.jobs.runs import Mesh
from tests.helpers.jobs.trainer_jobs import launched
from tests.helpers.jobs.trl_runs import OFFLINE, Outcome, outcome, quiet

Case = preference_jobs.Case | grpo_jobs.Case | distillation_jobs.Case

STEPS, SAVED = 4, 2
"""Steps of a run, and those after which its checkpoint was saved."""


def trained(case: Case, mesh: Mesh, folder: str, checkpoint: str | None = None) -> Outcome:
    """The steps of an unbroken run, or those after ``checkpoint``, on this rank."""
    jobs: Any = next(jobs for jobs in (preference_jobs, grpo_jobs, distillation_jobs) if isinstance(case, jobs.Case))
    rows = {"per_device_train_batch_size": jobs.BATCH}
    saves = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "optim_args": "momentum=0.9"}
    with launched(mesh, **OFFLINE), quiet():
        host = jobs.trainer(case.with_args(**saves, **rows), folder, "ring_fp32" if mesh.cp > 1 else "sdpa")
        return outcome(host, lambda _: {}, checkpoint)
