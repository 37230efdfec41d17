"""Trainers that a program has changed: a change that is the program's own affair holds, one of the loss is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Trainer

from comparison import LOSS, Ranks
from jobs import a_folder, launched, numbers, trainer_of
from runs import Mesh, Rows, Run
from tiny_models import tiny

LEFT = Rows(shortest=9, pad_to="left", labelled="answers")
SHORT = Run(why="", steps=2, rows=LEFT, evaluated=LEFT, metrics="logits", arguments={"eval_steps": 2})


# ---- batches ---------------------------------------------------------------------------------------------------------


class Positions(Trainer):
    """Counts positions from the first token that is no padding, as generation does."""

    prepared = 0

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.prepared += 1
        inputs = super()._prepare_inputs(inputs)
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0) + 3 * self.prepared
        return inputs


def log_of(kind: type[Trainer], run: Run, mesh: Mesh) -> tuple[list[dict[str, float]], int]:
    """What a trainer logged, and how often it prepared a batch."""
    with launched(mesh), a_folder(None) as folder:
        model = tiny("gpt2", "ring_fp32" if mesh.cp > 1 else None, **NO_DROPOUT)
        trainer = trainer_of(run, mesh, folder, model, kind=kind)
        trainer.train()
        return numbers(trainer.state.log_history), getattr(trainer, "prepared", 0)


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def assert_same_log(ranks: Ranks, kind: type[Trainer], run: Run) -> None:
    want = ranks(1).run(log_of, kind, run, Mesh())[0]
    for log, prepared in ranks(2).run(log_of, kind, run, Mesh(cp=2)):
        assert prepared == want[1]
        assert [pytest.approx(entry, rel=LOSS) for entry in want[0]] == log


def test_a_batch_is_prepared_once_and_whole(ranks: Ranks) -> None:
    """transformers prepares it inside the step, where a rank has its share: positions were numbered anew there."""
    assert_same_log(ranks, Positions, SHORT)
