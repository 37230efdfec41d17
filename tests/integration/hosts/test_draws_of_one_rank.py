"""A collator that masks tokens at random, and a callback that samples text on rank 0 alone, or on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from tests.helpers.jobs.comparison import LOSS, Ranks
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, numbers, refusal_of, trainer_of

RUN = Run(why="", steps=3, rows=Rows(shortest=9, pad_to="right"), arguments={"eval_strategy": "no"})


def masked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = RUN.rows.collate(rows)
    hidden = torch.rand(batch["input_ids"].shape) < 0.15
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 5)}


class Samples(TrainerCallback):
    def __init__(self, everywhere: bool) -> None:
        self.everywhere = everywhere

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.everywhere or state.is_world_process_zero:
            given["model"].generate(torch.arange(5)[None], max_new_tokens=4, do_sample=True, pad_token_id=0)


def trained(mesh: Mesh, everywhere: bool) -> tuple[str, int, list[dict[str, float]]]:
    torch.manual_seed(0)
    with launched(mesh), a_folder(None) as folder:
        trainer = trainer_of(RUN, mesh, folder, data_collator=masked, callbacks=[Samples(everywhere)])
        return *refusal_of(trainer), numbers(trainer.state.log_history)


@pytest.mark.parametrize("everywhere", [True, False])
def test_samples_leave_random_masks_as_in_one_process(ranks: Ranks, everywhere: bool) -> None:
    """Those of rank zero alone were refused, since the ranks' masks differed from then on."""
    want = ranks(1).run(trained, Mesh(), True)[0][2]
    for text, steps, log in ranks(2).run(trained, Mesh(cp=2), everywhere):
        assert (text, steps) == ("", 3)
        assert [pytest.approx(entry, rel=LOSS) for entry in want] == log
