"""Numbers that a program logs: a warning names those that differ between ranks of a ring."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Trainer

from hf_ring_attn.integration.hosts import logged_numbers
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, trainer_of

RUN = Run(why="", steps=4, rows=Rows(shortest=9, pad_to="right"), arguments={"eval_strategy": "no"})


def said_by(what: str) -> list[str]:
    """The warnings of a program that logs something in each step."""

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
            right = (out.logits.argmax(-1) == inputs["labels"]).sum()
            count, rank = torch.stack([right, inputs["labels"].ne(-100).sum()]), torch.distributed.get_rank()
            if what == "counts":
                self.log({"right": float(count[0]), "labels": float(count[1]), "loss_scale": 2.0})
            elif what == "sums of counts":
                right, labels = self.accelerator.reduce(count).tolist()
                self.log({"right": right, "labels": labels})
            elif what == "times":
                self.log({"step_time": 0.1 * rank, "memory_gib": 1.0 + rank})
            elif what == "rank 0 alone" and rank == 0:
                self.log({"right": float(count[0])})
            return (loss, out) if return_outputs else loss

    said: list[str] = []
    heard = mock.patch.object(logged_numbers, "warn", lambda text, everywhere: said.append(text))
    with heard, launched(Mesh(cp=2)), a_folder(None) as folder:
        trainer_of(RUN, Mesh(cp=2), folder, kind=Own).train()
    return said


def test_numbers_of_a_ranks_tokens_are_named(ranks: Ranks) -> None:
    """Trainer wrote those of rank 0, silently."""
    for said in ranks(2).run(said_by, "counts"):
        (text,) = said
        assert text.startswith("the ranks of a ring logged different numbers: ")
        assert "labels (" in text and "loss_scale" not in text


@pytest.mark.parametrize("what", ["sums of counts", "times", "rank 0 alone"])
def test_other_numbers_are_not(ranks: Ranks, what: str) -> None:
    assert ranks(2).run(said_by, what) == [[], []]
