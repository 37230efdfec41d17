"""Random masks that a Trainer's `_prepare_inputs` draws are those of one process, also with evaluations in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Trainer

from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, trainer_of


class Masks(Trainer):
    """Masks tokens at random in training, and in evaluations."""

    masks_evaluations = True

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        if not self.model.training and not self.masks_evaluations:  # type: ignore[union-attr]
            return inputs
        hidden = torch.rand(inputs["input_ids"].shape) < 0.15
        return {**inputs, "input_ids": inputs["input_ids"].masked_fill(hidden, 5)}


class MasksTraining(Masks):
    masks_evaluations = False


class MasksLater(Masks):
    """Masks tokens in its own step."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        hidden = torch.rand(inputs["input_ids"].shape) < 0.15
        inputs = {**inputs, "input_ids": inputs["input_ids"].masked_fill(hidden, 5)}
        return super().training_step(model, inputs, num_items_in_batch)


RUN = Run(
    why="", steps=4, rows=Rows(count=12, shortest=9, pad_to="right"), evaluated=Rows(count=3, length=21),
    arguments={"eval_strategy": "steps", "eval_steps": 1},
)  # fmt: skip


def trained(mesh: Mesh, kind: type[Trainer], metrics: bool) -> list[dict[str, float]]:
    torch.manual_seed(0)
    with launched(mesh), a_folder(None) as folder:
        more: dict[str, Any] = {"compute_metrics": lambda prediction: {}} if metrics else {}
        trainer = trainer_of(RUN, mesh, folder, kind=kind, **more)
        trainer.train()
        return numbers(trainer.state.log_history)


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("kind", [Masks, MasksTraining, MasksLater])
def test_evaluations_leave_random_masks_as_in_one_process(ranks: Ranks, kind: type[Trainer], metrics: bool) -> None:
    want = ranks(1).run(trained, Mesh(), kind, metrics)[0]
    for log in ranks(2).run(trained, Mesh(cp=2), kind, metrics):
        assert [pytest.approx(entry, rel=LOSS) for entry in want] == log
