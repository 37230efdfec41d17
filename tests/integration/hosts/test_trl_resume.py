"""DPO, KTO, GRPO, RLOO and distillation go on from a checkpoint, at any ring size, as if they had never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.jobs import distillation_jobs, grpo_jobs, preference_jobs
from tests.helpers.jobs.comparison import LOSS, PARAMETER, Ranks
from tests.helpers.jobs.resume_jobs import SAVED, STEPS, Case, trained
from tests.helpers.jobs.runs import Mesh

CP2, CP4, ALONE = Mesh(cp=2), Mesh(cp=4), Mesh()
DPO = preference_jobs.Case("DPO and a reference model")
DPO_LORA = preference_jobs.Case("DPO with LoRA", reference=False, lora=True)
DPO_FSDP = preference_jobs.Case("DPO under FSDP2", fsdp=True)
KTO = preference_jobs.Case("KTO", {"train_sampling_strategy": "sequential"}, kto=True)
GRPO = grpo_jobs.Case(
    "GRPO, generated", {"beta": 0.1, "learning_rate": 0.3, "gradient_accumulation_steps": 2}, fixed=False
)
RLOO = grpo_jobs.Case("RLOO, generated", {"learning_rate": 0.003, "beta": 0.05}, rloo=True, lora=True, fixed=False)
DISTILLED = distillation_jobs.Case("distillation", {"gradient_accumulation_steps": 2})
MOVES: list[tuple[Case, Mesh, Mesh]] = [
    (DPO, CP2, CP4),
    (DPO_LORA, CP2, ALONE),
    (DPO_FSDP, CP2, CP4),
    (KTO, CP4, CP2),
    (GRPO, CP2, CP2),
    (GRPO, ALONE, CP2),
    (RLOO, CP4, CP2),
    (GRPO, Mesh(dp=2), Mesh(dp=2, cp=2)),
    (DISTILLED, CP2, CP2),
    (DISTILLED, ALONE, CP2),
    (DISTILLED, CP4, CP2),
]


@pytest.mark.parametrize(("case", "first", "second"), MOVES, ids=lambda x: getattr(x, "why", str(x)))
@pytest.mark.turns
def test_a_run_goes_on_as_if_it_had_not_stopped(
    ranks: Ranks, tmp_path: Path, case: Case, first: Mesh, second: Mesh
) -> None:
    want = ranks(first.alone.size).run(trained, case, first.alone, str(tmp_path / "alone"))[0]
    ranks(first.size).run(trained, case, first, str(tmp_path / "first"))
    checkpoint = tmp_path / "first" / f"checkpoint-{SAVED}"
    for got in ranks(second.size).run(trained, case, second, str(tmp_path / "second"), str(checkpoint)):
        assert len(got.steps) == len(want.steps) == STEPS
        for number, (mine, theirs) in enumerate(zip(got.steps[SAVED:], want.steps[SAVED:], strict=True), SAVED + 1):
            assert mine.keys() == theirs.keys()
            for name, x in theirs.items():
                if name != "num_tokens":  # TRL counts from the start anew
                    assert mine[name] == pytest.approx(x, rel=LOSS, abs=LOSS), f"step {number}: {name}"
        for name, parameter in want.after.items():
            assert (got.after[name] - parameter).abs().max() <= PARAMETER, name
