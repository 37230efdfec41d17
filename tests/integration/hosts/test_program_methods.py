"""Functions that stand in for a trainer's own methods: a copy of the trainer has its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import Trainer

from tests.helpers.checks import Ranks
from tests.helpers.jobs.runs import Mesh, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, trainer_of


class Scaled(Trainer):
    """A trainer with an attribute that its loss reads, and an evaluation that counts."""

    scale, evaluations = 1.0, 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return (loss * self.scale, outputs) if return_outputs else loss * self.scale

    def evaluate(self, *given: Any, **named: Any) -> Any:
        self.evaluations += 1
        return super().evaluate(*given, **named)


def of_a_copy(mesh: Mesh) -> list[dict[str, float]]:
    with launched(mesh), a_folder(None) as folder:
        run = Run(why="", steps=2, arguments={"eval_strategy": "no"})
        trainer = trainer_of(run, mesh, folder, kind=Scaled)
        trainer.train()
        other: Any = copy.copy(trainer)
        other.state, other.scale = copy.deepcopy(trainer.state), 0.5
        other.evaluate()
        other.train()
        assert (vars(trainer).get("evaluations"), other.evaluations) == (None, 1)
        return numbers(other.state.log_history)


def test_a_copy_of_a_trainer_computes_its_own_loss(ranks: Ranks) -> None:
    """It computed that of the first trainer, with its attributes."""
    want = ranks(1).run(of_a_copy, Mesh())[0]
    for got in ranks(2).run(of_a_copy, Mesh(cp=2)):
        assert got == [pytest.approx(entry, rel=1e-5) for entry in want]
