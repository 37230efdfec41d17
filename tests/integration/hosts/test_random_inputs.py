"""Random masks that a Trainer's `_prepare_inputs` draws are those of one process, also with evaluations in between."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import Trainer

from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.runs import Mesh, Row, Rows, Run
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


@pytest.mark.turns(4)
@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("kind", [Masks, MasksTraining, MasksLater])
def test_evaluations_leave_random_masks_as_in_one_process(ranks: Ranks, kind: type[Trainer], metrics: bool) -> None:
    want = ranks(1).run(trained, Mesh(), kind, metrics)[0]
    for log in ranks(2).run(trained, Mesh(cp=2), kind, metrics):
        assert [pytest.approx(entry, rel=LOSS) for entry in want] == log


# ---- workers that are not equally fast ------------------------------------------------------------------------------

UNORDERED = Run(why="", arguments={"dataloader_num_workers": 2, "dataloader_in_order": False})


def collated(rows: Any, slow: bool) -> Row:
    worker = torch.utils.data.get_worker_info()
    if slow and worker is not None and worker.id == 0:
        time.sleep(1.0)
    return UNORDERED.rows.collate(rows)


def first_batches(run: Run, mesh: Mesh) -> list[torch.Tensor]:
    """The ids of two batches, of which a worker of one rank makes the first slowly."""
    collate = partial(collated, slow=os.environ.get("RANK") == "1")
    with launched(mesh), a_folder(None) as folder:
        batches = iter(trainer_of(run, mesh, folder, data_collator=collate).get_train_dataloader())
        return [next(batches)["input_ids"] for _ in range(2)]


def test_workers_that_may_hand_out_batches_as_they_finish_them_keep_an_order(ranks: Ranks) -> None:
    """`dataloader_in_order=False`: ranks of a ring got other batches, and were refused in mid-run (RanksDiffer)."""
    (want,) = ranks(1).run(first_batches, replace(UNORDERED, arguments={}), Mesh())
    for got in ranks(2).run(first_batches, UNORDERED, Mesh(cp=2)):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
