"""The best checkpoint is the same on every rank, though one rank saves it after the others went on."""

from __future__ import annotations

import time
from typing import Any

from transformers import Trainer

from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, trainer_of


class SavesLate(Trainer):
    def _save(self, *given: Any, **named: Any) -> None:
        time.sleep(0.5)
        super()._save(*given, **named)


ARGUMENTS = {
    "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_strategy": "steps", "save_steps": 1,
    "eval_steps": 1, "learning_rate": 0.01, "greater_is_better": True,
}  # fmt: skip


def best_of(folder: str) -> str:
    run = Run(why="", steps=2, kind=SavesLate, arguments=ARGUMENTS, fsdp2=True)
    with launched(Mesh(cp=2)), a_folder(folder) as output:
        trainer = trainer_of(run, Mesh(cp=2), output)
        trainer.train()
        return str(trainer.state.best_model_checkpoint)


def test_ranks_load_one_checkpoint(ranks: Ranks, tmp_path: Any) -> None:
    found = ranks(2).run(best_of, str(tmp_path))
    assert found[0] == found[1] and found[0].endswith("checkpoint-2")
