"""compute_loss that calls its model in some batches only: by what a rank's tokens are, or by what all ranks know."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import Trainer

from hf_ring_attn import RingConfig
from tests.helpers.jobs.comparison import Ranks
from tests.helpers.jobs.runs import Mesh, Rows, Run
from tests.helpers.jobs.trainer_jobs import a_folder, launched, refusal_of, trainer_of

OPTIONS = {"eval_strategy": "no"}
RUN = Run(
    why="", steps=4, arguments=OPTIONS, rows=Rows(length=40, shortest=31, pad_to="right", labelled="last"),
    ring=RingConfig(loss="chunked"),
)  # fmt: skip
"""By default such a loss gets whole rows."""


class OnlyWithLabels(Trainer):
    """Guards against the mean of no labels, as people write it."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if (inputs["labels"] != -100).sum() == 0:
            return torch.zeros((), requires_grad=True)
        return super().compute_loss(model, inputs, *given, **named)


class TwiceWithLabels(Trainer):
    """Calls the model once more where there is something to learn."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        loss: Any = super().compute_loss(model, inputs, *given, **named)
        if (inputs["labels"] != -100).any():
            loss = (loss + super().compute_loss(model, inputs, *given, **named)) / 2
        return loss


class NotAtStepTwo(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if self.state.global_step == 2:
            return torch.zeros((), requires_grad=True)
        return super().compute_loss(model, inputs, *given, **named)


def refusal(kind: type[Trainer]) -> tuple[str, int]:
    with launched(Mesh(cp=2)), a_folder(None) as folder:
        return refusal_of(trainer_of(RUN, Mesh(cp=2), folder, kind=kind))


@pytest.mark.parametrize("kind", [OnlyWithLabels, TwiceWithLabels])
def test_a_rank_that_skips_its_model_is_refused_on_all_ranks_before_the_first_step(
    ranks: Ranks, kind: type[Trainer]
) -> None:
    """The others waited in an attention for the rank without labels: gloo ended the process, NCCL would hang."""
    for text, steps in ranks(2).run(refusal, kind):
        assert re.match("RanksDiffer: .* next call of the model in the loss, but got rank .: .*left out", text)
        assert "num_items_in_batch" in text
        assert steps == 0


def test_a_batch_that_all_ranks_skip_is_refused_in_words_that_say_so(ranks: Ranks) -> None:
    """The words were those for a model without ring attention."""
    for text, steps in ranks(2).run(refusal, NotAtStepTwo):
        assert text.startswith("NoRingAttention: a rank left its batch without a call of the model")
        assert steps == 2
